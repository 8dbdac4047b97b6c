#!lua
-- Moves records forward after their rows are known to be in MySQL, and takes the orders out of the
-- outbox and the parked set. Never creates a record and never moves one back (R1). The record lets go
-- of its idempotency key: MySQL has it from now on, and the key itself still names the order. A paid one
-- also forgets that its money was on its way.
--
-- KEYS[1] hash  activity
-- KEYS[2] zset  outbox
-- KEYS[3] zset  parked
-- KEYS[3+i] hash  purchase record of order i
-- ARGV[2i-1] ULID of order i   ARGV[2i] status to reach: p (pending) or d (paid)
--
-- Returns one code per order: applied | already (there or further) | no_record | corrupt;
-- {bad_key, name} alone when outbox or parked set has the wrong type: nothing was written.
-- Idempotent. One slot.
local function failed(r)
  return type(r) == 'table' and r.err
end
for i = 1, 3 do
  local r = redis.pcall(i == 1 and 'HLEN' or 'ZCARD', KEYS[i])
  if failed(r) then
    if string.find(r.err, '^WRONGTYPE') then return {'bad_key', KEYS[i]} end
    return r
  end
end
local out, gone, changed = {}, {}, false
for i = 1, #KEYS - 3 do
  local ulid, to = ARGV[2 * i - 1], ARGV[2 * i]
  local r = redis.pcall('HMGET', KEYS[3 + i], 's', 'i', 'm')
  -- Its row is in MySQL, so nothing of it waits any more, whatever its record looks like.
  gone[#gone + 1] = ulid
  if failed(r) then
    out[i] = 'corrupt'
  else
    local s = r[1]
    if not s then
      out[i] = 'no_record'
    elseif s == 'r' or (s == 'p' and to == 'd') then
      redis.call('HSET', KEYS[3 + i], 's', to)
      if r[2] then redis.call('HDEL', KEYS[3 + i], 'i') end
      if r[3] and to == 'd' then redis.call('HDEL', KEYS[3 + i], 'm') end
      out[i], changed = 'applied', true
    else
      out[i] = 'already'
    end
  end
end
if #gone > 0 then
  redis.call('ZREM', KEYS[2], unpack(gone))
  redis.call('ZREM', KEYS[3], unpack(gone))
end
if changed and redis.call('HEXISTS', KEYS[1], 'version') == 1 then
  redis.call('HINCRBY', KEYS[1], 'version', 1)
end
return out
