#!lua
-- Notes that money for an order has come and is on its way to MySQL: an expiry leaves the order alone
-- until it is there. Says nothing about the order's state, and never creates a record (R1).
--
-- KEYS[1] hash  purchase record
--
-- Returns {applied | already (paid or final: nothing to wait for) | no_record} or {corrupt, what}
-- (nothing was written). Idempotent, but for the time, which is the last one. One slot.
local s = redis.pcall('HGET', KEYS[1], 's')
if type(s) == 'table' and s.err then
  if string.find(s.err, '^WRONGTYPE') then return {'corrupt', KEYS[1]} end
  return s
end
if not s then return {'no_record'} end
if s ~= 'r' and s ~= 'p' then return {'already'} end
local t = redis.call('TIME')
redis.call('HSET', KEYS[1], 'm', t[1] .. string.sub('00000' .. t[2], -6, -4))
return {'applied'}
