#!lua
-- Opens one bucket for the warm-up attempt that won in MySQL, if the bucket carries its number (R9).
--
-- KEYS[1] hash  activity
-- ARGV[1] number of the winning attempt
--
-- Returns {ok} (open now) | {already} | {other} (the bucket carries another number, or none) |
-- {corrupt, what}. Idempotent. One slot.
local a = redis.pcall('HMGET', KEYS[1], 'warm', 'open')
if type(a) == 'table' and a.err then
  if string.find(a.err, '^WRONGTYPE') then return {'corrupt', KEYS[1]} end
  return a
end
if a[1] ~= ARGV[1] or ARGV[1] == '0' then return {'other'} end
if a[2] == ARGV[1] then return {'already'} end
redis.call('HSET', KEYS[1], 'open', ARGV[1])
redis.call('HINCRBY', KEYS[1], 'version', 1)
return {'ok'}
