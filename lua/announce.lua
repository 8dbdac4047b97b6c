#!lua
-- Makes an activity known in one bucket, without stock: nothing can be reserved from it yet. A hash
-- that was warmed stays as it is; a cold one is written again, so that an edit reaches it.
--
-- KEYS[1] hash    activity
-- KEYS[2] string  end marker
-- ARGV[1…] field, value, field, value, …: the catalogue of the sale
--
-- Returns {ok | warm | settled (it is over, or deleted)} or {corrupt, what} (nothing was written).
-- Idempotent. One slot.
local a = redis.pcall('HMGET', KEYS[1], 'warm', 'version', 'fence')
if type(a) == 'table' and a.err then
  if string.find(a.err, '^WRONGTYPE') then return {'corrupt', KEYS[1]} end
  return a
end
if a[1] and a[1] ~= '0' then return {'warm'} end
local mark = redis.pcall('GET', KEYS[2])
if type(mark) == 'table' and mark.err then
  if string.find(mark.err, '^WRONGTYPE') then return {'corrupt', KEYS[2]} end
  return mark
end
if mark == 'settled' then return {'settled'} end
-- The clock as first version: a hash that was lost and made again never repeats an old version.
local t = redis.call('TIME')
local version = a[2] or (t[1] .. string.sub('00000' .. t[2], -6, -4))
-- The old fields go (an edit may have dropped a sku); the write is a denyoom command even so,
-- because the shebang has Redis check its memory before the first line.
redis.call('DEL', KEYS[1])
redis.call('HSET', KEYS[1], 'warm', '0', 'open', '0', 'fence', a[3] or '0', 'version', version,
  unpack(ARGV))
return {'ok'}
