#!lua
-- Takes the fencing number of a settlement. Who holds a smaller one can do nothing any more.
--
-- KEYS[1] hash  activity
-- ARGV[1] number, from MySQL
--
-- Returns {ok} | {fenced} (a later one was here) | {corrupt, what}. A hash that Redis lost is made
-- again with the number alone: that makes no sale known. Idempotent for one number. One slot.
local f = redis.pcall('HGET', KEYS[1], 'fence')
if type(f) == 'table' and f.err then
  if string.find(f.err, '^WRONGTYPE') then return {'corrupt', KEYS[1]} end
  return f
end
local number, now = ARGV[1], f or '0'
if #number < #now or (#number == #now and number < now) then return {'fenced'} end
redis.call('HSET', KEYS[1], 'fence', number)
return {'ok'}
