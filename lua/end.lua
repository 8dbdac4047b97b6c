#!lua
-- Writes the end marker of one bucket and closes its window. The marker has no TTL: it gets one when
-- the sale is settled, and a settled marker stays as it is.
--
-- KEYS[1] hash    activity
-- KEYS[2] string  end marker: 'ended' or 'settled'
-- ARGV[1] end of the sale (ms)
--
-- Returns {ok} | {settled} | {corrupt, what}. Idempotent. One slot.
local function failed(r)
  return type(r) == 'table' and r.err
end
local m = redis.pcall('GET', KEYS[2])
local known = redis.pcall('HEXISTS', KEYS[1], 'limit')
for i, r in ipairs({known, m}) do
  if failed(r) then
    if string.find(r.err, '^WRONGTYPE') then return {'corrupt', KEYS[i]} end
    return r
  end
end
if m == 'settled' then return {'settled'} end
redis.call('SET', KEYS[2], 'ended')
-- A hash that Redis lost is not made again from its end alone.
if known == 1 then redis.call('HSET', KEYS[1], 'end', ARGV[1]) end
return {'ok'}
