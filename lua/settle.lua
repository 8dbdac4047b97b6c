#!lua
-- Makes the end marker of one bucket say that the sale is settled, and gives marker and activity hash
-- their TTL.
--
-- KEYS[1] hash    activity
-- KEYS[2] string  end marker
-- ARGV[1] fencing number of the caller   ARGV[2] TTL (ms)
--
-- Returns {ok} | {fenced} | {corrupt, what}. Idempotent: the TTL starts anew. One slot.
local f = redis.pcall('HGET', KEYS[1], 'fence')
if type(f) == 'table' and f.err then
  if string.find(f.err, '^WRONGTYPE') then return {'corrupt', KEYS[1]} end
  return f
end
if f ~= ARGV[1] then return {'fenced'} end
redis.call('SET', KEYS[2], 'settled', 'PX', ARGV[2])
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return {'ok'}
