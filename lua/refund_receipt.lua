#!lua
-- Moves the receipt of a paid order forward: the order was refunded after its sale was settled, and its
-- money has to go back. Never creates a receipt (R1), and leaves its TTL alone.
--
-- KEYS[1] hash  receipt
-- ARGV[1] reason or ''
--
-- Returns {applied | already | no_record} or {corrupt, what} (nothing was written). Idempotent.
-- One slot.
local s = redis.pcall('HGET', KEYS[1], 's')
if type(s) == 'table' and s.err then
  if string.find(s.err, '^WRONGTYPE') then return {'corrupt', KEYS[1]} end
  return s
end
if not s then return {'no_record'} end
if s ~= 'd' then return {'already'} end
redis.call('HSET', KEYS[1], 's', 'f', 'd', '1')
if ARGV[1] ~= '' then redis.call('HSET', KEYS[1], 'w', ARGV[1]) end
return {'applied'}
