#!lua
-- Adds units to a pool of an open sale, once per operation id (R6). Never creates a stock key.
--
-- KEYS[1] hash    activity
-- KEYS[2] string  end marker
-- KEYS[3] integer stock
-- ARGV[1] operation id   ARGV[2] units, positive
--
-- Returns {ok} | {already} | {ended} | {not_found} | {not_warmed} | {no_stock} | {corrupt, what};
-- nothing was written unless ok. Idempotent by operation id. One slot.
local function failed(r)
  return type(r) == 'table' and r.err
end
local a = redis.pcall('HMGET', KEYS[1], 'limit', 'warm', 'open', 'version', 'op:' .. ARGV[1])
local n = redis.pcall('GET', KEYS[3])
for i, r in pairs({[1] = a, [3] = n}) do
  if failed(r) then
    if string.find(r.err, '^WRONGTYPE') then return {'corrupt', KEYS[i]} end
    return r
  end
end
if not string.find(ARGV[2], '^%d+$') or #ARGV[2] > 15 then return {'corrupt', 'units'} end
if a[5] then return {'already'} end
if redis.call('EXISTS', KEYS[2]) == 1 then return {'ended'} end
if not a[1] then return {'not_found'} end
if not a[2] or a[2] == '0' or a[3] ~= a[2] then return {'not_warmed'} end
if not n then return {'no_stock'} end
if #n > 15 or not string.find(n, '^%d+$') then return {'corrupt', KEYS[3]} end
redis.call('INCRBY', KEYS[3], ARGV[2])
redis.call('HSET', KEYS[1], 'op:' .. ARGV[1], ARGV[2])
redis.call('HINCRBY', KEYS[1], 'version', 1)
return {'ok'}
