#!lua
-- Removes what an earlier life left in a bucket that is being rebuilt (R10): closed, with the
-- rebuild's number.
--
-- KEYS[1] hash  activity
-- KEYS[1+i] any  what to remove
-- ARGV[1] number of the rebuild
--
-- Returns {ok, removed} | {other} (the bucket is open, or carries another number) | {corrupt, what}.
-- Idempotent. One slot.
local a = redis.pcall('HMGET', KEYS[1], 'warm', 'open')
if type(a) == 'table' and a.err then
  if string.find(a.err, '^WRONGTYPE') then return {'corrupt', KEYS[1]} end
  return a
end
if a[1] ~= ARGV[1] or a[2] == a[1] then return {'other'} end
local n = 0
for i = 2, #KEYS do n = n + redis.call('UNLINK', KEYS[i]) end
return {'ok', string.format('%d', n)}
