#!lua
-- Lets users take part in a sale that asks for it.
--
-- KEYS[1] string  end marker
-- KEYS[1+i] string  qualification of user i
--
-- Returns {ok} or {ended} once the sale is settled: its keys were cleaned up and must not come back.
-- Idempotent. One slot.
local m = redis.pcall('GET', KEYS[1])
if type(m) == 'table' and m.err then
  if string.find(m.err, '^WRONGTYPE') then return {'corrupt', KEYS[1]} end
  return m
end
if m == 'settled' then return {'ended'} end
for i = 2, #KEYS do redis.call('SET', KEYS[i], '1') end
return {'ok'}
