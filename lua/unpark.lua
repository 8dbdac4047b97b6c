#!lua
-- Moves parked orders back to the outbox, as young entries: their message is being published again,
-- so the relay need not do the same at once.
--
-- KEYS[1] zset  outbox
-- KEYS[2] zset  parked
-- KEYS[2+i] hash  purchase record of order i
-- ARGV[i] ULID of order i
--
-- Returns {ok} or {corrupt, what} (nothing was written). An order that is not parked, or no longer
-- reserved, only leaves the parked set. Idempotent. One slot.
local function failed(r)
  return type(r) == 'table' and r.err
end
local reserved = {}
for i = 1, #KEYS do
  local r
  if i <= 2 then r = redis.pcall('ZCARD', KEYS[i]) else r = redis.pcall('HGET', KEYS[i], 's') end
  if failed(r) then
    if string.find(r.err, '^WRONGTYPE') then return {'corrupt', KEYS[i]} end
    return r
  end
  if i > 2 and r == 'r' then reserved[i - 2] = true end
end
local t = redis.call('TIME')
local now = t[1] .. string.sub('00000' .. t[2], -6, -4)
for i = 1, #ARGV do
  if reserved[i] and redis.call('ZSCORE', KEYS[2], ARGV[i]) then
    redis.call('ZADD', KEYS[1], 'NX', now, ARGV[i])
  end
  redis.call('ZREM', KEYS[2], ARGV[i])
end
return {'ok'}
