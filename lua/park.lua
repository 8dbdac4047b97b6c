#!lua
-- Moves orders whose message lies in the dead letters from the outbox to the parked set, so that the
-- relay leaves them alone. Only an order that is still reserved is parked.
--
-- KEYS[1] zset  outbox
-- KEYS[2] zset  parked
-- KEYS[2+i] hash  purchase record of order i
-- ARGV[i] ULID of order i
--
-- Returns {ok} or {corrupt, what} (nothing was written). Idempotent. One slot.
local function failed(r)
  return type(r) == 'table' and r.err
end
local parked = {}
for i = 1, #KEYS do
  local r
  if i <= 2 then r = redis.pcall('ZCARD', KEYS[i]) else r = redis.pcall('HGET', KEYS[i], 's') end
  if failed(r) then
    if string.find(r.err, '^WRONGTYPE') then return {'corrupt', KEYS[i]} end
    return r
  end
  if i > 2 and r == 'r' then parked[i - 2] = true end
end
local t = redis.call('TIME')
local now = t[1] .. string.sub('00000' .. t[2], -6, -4)
for i = 1, #ARGV do
  if parked[i] then
    redis.call('ZADD', KEYS[2], 'NX', redis.call('ZSCORE', KEYS[1], ARGV[i]) or now, ARGV[i])
  end
  redis.call('ZREM', KEYS[1], ARGV[i])
end
return {'ok'}
