#!lua
-- Repairs one bucket after a comparison with MySQL, if nothing changed since the bucket was read (R8):
-- writes records that Redis lost, with their share of the limits, and sets stock.
--
-- KEYS[1] hash    activity
-- KEYS[2] string  end marker
-- KEYS[2i+1] hash  purchase record i   KEYS[2i+2] hash  its user's limit     (i = 1…r)
-- KEYS[2+2r+j] integer  stock j                                             (j = 1…n)
-- ARGV[1] version that was read   ARGV[2] r   ARGV[3] n
-- ARGV[7i-3…7i+3] of record i: ULID, s, o, x, w, d ('' for none), quantity ('0' when not live)
-- ARGV[3+7r+j] units for stock j
--
-- Returns {ok, version} | {changed, version} | {settled} | {no_stock} (a key to set is missing: that
-- is a rebuild's work) | {corrupt, what}; nothing was written unless ok. A record that is there stays
-- as it is. Idempotent by the version. One slot.
local function failed(r)
  return type(r) == 'table' and r.err
end
local function integer(s)
  return s and #s <= 15 and string.find(s, '^%d+$') and tonumber(s)
end
local records, stocks = tonumber(ARGV[2]), tonumber(ARGV[3])
local reads = {redis.pcall('HGET', KEYS[1], 'version'), redis.pcall('GET', KEYS[2])}
for i = 1, records do
  reads[2 * i + 1] = redis.pcall('HGET', KEYS[2 * i + 1], 's')
  reads[2 * i + 2] = redis.pcall('HGET', KEYS[2 * i + 2], 'held')
end
for j = 1, stocks do
  reads[2 + 2 * records + j] = redis.pcall('GET', KEYS[2 + 2 * records + j])
end
for i = 1, #KEYS do
  if failed(reads[i]) then
    if string.find(reads[i].err, '^WRONGTYPE') then return {'corrupt', KEYS[i]} end
    return reads[i]
  end
end
if reads[2] == 'settled' then return {'settled'} end
if reads[1] ~= ARGV[1] then return {'changed', reads[1] or ''} end
for i = 1, records do
  local held = reads[2 * i + 2]
  if held and not integer(held) or not integer(ARGV[7 * i + 3]) then return {'corrupt', KEYS[2 * i + 2]} end
end
for j = 1, stocks do
  if not reads[2 + 2 * records + j] then return {'no_stock'} end
  if not integer(ARGV[3 + 7 * records + j]) then return {'corrupt', 'units'} end
end
for j = 1, stocks do
  redis.call('SET', KEYS[2 + 2 * records + j], ARGV[3 + 7 * records + j])
end
for i = 1, records do
  if not reads[2 * i + 1] then
    local v = 7 * i - 3
    local f = {'s', ARGV[v + 1], 'o', ARGV[v + 2], 'x', ARGV[v + 3]}
    if ARGV[v + 4] ~= '' then f[#f + 1] = 'w'; f[#f + 1] = ARGV[v + 4] end
    if ARGV[v + 5] ~= '' then f[#f + 1] = 'd'; f[#f + 1] = ARGV[v + 5] end
    redis.call('HSET', KEYS[2 * i + 1], unpack(f))
    if ARGV[v + 6] ~= '0' and redis.call('HEXISTS', KEYS[2 * i + 2], ARGV[v]) == 0 then
      redis.call('HINCRBY', KEYS[2 * i + 2], 'held', ARGV[v + 6])
      redis.call('HSET', KEYS[2 * i + 2], ARGV[v], ARGV[v + 6])
    end
  end
end
redis.call('HINCRBY', KEYS[1], 'version', 1)
return {'ok', redis.call('HGET', KEYS[1], 'version')}
