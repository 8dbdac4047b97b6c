#!lua
-- Pauses or resumes one bucket.
--
-- KEYS[1] hash  activity
-- ARGV[1] 1 pauses, 0 resumes
--
-- Returns {ok} | {not_found} | {corrupt, what}. Idempotent. One slot.
local a = redis.pcall('HEXISTS', KEYS[1], 'limit')
if type(a) == 'table' and a.err then
  if string.find(a.err, '^WRONGTYPE') then return {'corrupt', KEYS[1]} end
  return a
end
if a == 0 then return {'not_found'} end
redis.call('HSET', KEYS[1], 'paused', ARGV[1])
return {'ok'}
