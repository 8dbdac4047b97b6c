#!lua
-- Writes catalogue and stock of one bucket for a numbered warm-up attempt, closed: nothing can be
-- reserved before warm_open (R9). Live stock is never overwritten, except by a rebuild (R10), which
-- needs a number later than the bucket's.
--
-- KEYS[1] hash    activity
-- KEYS[2] string  end marker
-- KEYS[2+i] string  stock i
-- ARGV[1] number of the attempt   ARGV[2] n, how many stock keys   ARGV[3] warm or rebuild
-- ARGV[3+i] units for stock i
-- ARGV[4+n…] field, value, …: the catalogue of the sale
--
-- Returns {ok} | {already} (the bucket is open) | {stale} (a later attempt was here) | {ended} (for a
-- rebuild: settled) | {corrupt, what}; nothing was written unless ok. Idempotent for one number while
-- the bucket is closed. One slot.
local number, n, rebuild = ARGV[1], tonumber(ARGV[2]), ARGV[3] == 'rebuild'
local a = redis.pcall('HMGET', KEYS[1], 'warm', 'open', 'version', 'fence')
if type(a) == 'table' and a.err then
  if not string.find(a.err, '^WRONGTYPE') then return a end
  if not rebuild then return {'corrupt', KEYS[1]} end
  a = {} -- a rebuild writes it anew, whatever it has become
end
local mark = redis.pcall('GET', KEYS[2])
if type(mark) == 'table' and mark.err then
  if string.find(mark.err, '^WRONGTYPE') then return {'corrupt', KEYS[2]} end
  return mark
end
local warm = a[1] or '0'
if warm ~= '0' and a[2] == warm and (not rebuild or number == warm) then return {'already'} end
-- As texts: attempt numbers stay exact whatever their length.
if #number < #warm or (#number == #warm and number < warm) then return {'stale'} end
if mark and (not rebuild or mark == 'settled') then return {'ended'} end
for i = 1, n do
  if not string.find(ARGV[3 + i], '^%d+$') then return {'corrupt', 'units'} end
end
local t = redis.call('TIME')
for i = 1, n do
  redis.call('SET', KEYS[2 + i], ARGV[3 + i]) -- without a TTL, ever
end
redis.call('DEL', KEYS[1])
redis.call('HSET', KEYS[1], 'warm', number, 'open', '0', 'fence', a[4] or '0',
  'version', a[3] or (t[1] .. string.sub('00000' .. t[2], -6, -4)), unpack(ARGV, 4 + n))
redis.call('HINCRBY', KEYS[1], 'version', 1)
return {'ok'}
