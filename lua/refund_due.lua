#!lua
-- Marks an order: money arrived that has to go back; or takes the mark off: it has been sent back.
-- Never creates a record (R1).
--
-- KEYS[1] hash  activity
-- KEYS[2] hash  purchase record
-- KEYS[3] hash  receipt
-- ARGV[1] 1: due   0: not any more
--
-- Returns {applied | already | no_record} or {corrupt, what} (nothing was written). Idempotent.
-- One slot.
for i = 1, 3 do
  local r = redis.pcall('HLEN', KEYS[i])
  if type(r) == 'table' and r.err then
    if string.find(r.err, '^WRONGTYPE') then return {'corrupt', KEYS[i]} end
    return r
  end
end
for i = 2, 3 do
  local r = redis.call('HMGET', KEYS[i], 's', 'd')
  if r[1] then
    if (r[2] == '1') == (ARGV[1] == '1') then return {'already'} end
    if ARGV[1] == '1' then redis.call('HSET', KEYS[i], 'd', '1') else redis.call('HDEL', KEYS[i], 'd') end
    if redis.call('HEXISTS', KEYS[1], 'version') == 1 then
      redis.call('HINCRBY', KEYS[1], 'version', 1)
    end
    return {'applied'}
  end
end
return {'no_record'}
