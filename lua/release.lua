#!lua
-- Gives the units and the limit of live records back, once, and leaves each record in its final
-- state (R1, R4). The idempotency key stays.
--
-- KEYS[1] hash  activity
-- KEYS[2] zset  outbox
-- KEYS[3] zset  parked
-- KEYS[3i+1] hash    purchase record of order i
-- KEYS[3i+2] hash    its user's limit
-- KEYS[3i+3] string  stock of the pool its units came from
-- ARGV[7i-6] ULID   ARGV[7i-5] user|sku|pool|quantity, must equal the record's
-- ARGV[7i-4] quantity   ARGV[7i-3] final status: c, f or j   ARGV[7i-2] reason or ''
-- ARGV[7i-1] 1: withhold the units (R7)   ARGV[7i] 1: money has to go back
--
-- Returns one code per order: applied | already (final before; only the refund mark may be added) |
-- no_record (only outbox and parked entries removed) | no_stock (stock key missing) | mismatch |
-- corrupt; nothing was written for the last three. {bad_key, name} alone when a shared key has the
-- wrong type. Idempotent by the record's state. One slot.
local function failed(r)
  return type(r) == 'table' and r.err
end
for i = 1, 3 do
  local r = redis.pcall(i == 1 and 'HLEN' or 'ZCARD', KEYS[i])
  if failed(r) then
    if string.find(r.err, '^WRONGTYPE') then return {'bad_key', KEYS[i]} end
    return r
  end
end
local function integer(s)
  return s and #s <= 15 and string.find(s, '^%d+$') and tonumber(s)
end
local changed = false

local function release(rec, limit, stock, ulid, content, qty, to, reason, withhold, due)
  local r = redis.pcall('HMGET', rec, 's', 'o')
  if failed(r) then return 'corrupt' end
  local s = r[1]
  if not s then
    redis.call('ZREM', KEYS[2], ulid)
    redis.call('ZREM', KEYS[3], ulid)
    return 'no_record'
  end
  if r[2] ~= content then return 'mismatch' end
  if s ~= 'r' and s ~= 'p' and s ~= 'd' then
    if due == '1' and redis.call('HGET', rec, 'd') ~= '1' then
      redis.call('HSET', rec, 'd', '1')
      changed = true
    end
    redis.call('ZREM', KEYS[2], ulid)
    redis.call('ZREM', KEYS[3], ulid)
    return 'already'
  end
  local l = redis.pcall('HMGET', limit, 'held', ulid)
  if failed(l) then return 'corrupt' end
  local held = integer(l[1] or '0')
  if not held or not integer(qty) then return 'corrupt' end
  if withhold ~= '1' then
    local n = redis.pcall('GET', stock)
    if failed(n) then return 'corrupt' end
    if not n then return 'no_stock' end
    if not integer(n) then return 'corrupt' end
    redis.call('INCRBY', stock, qty)
  end
  local f = {'s', to}
  if reason ~= '' then f[#f + 1] = 'w'; f[#f + 1] = reason end
  if due == '1' then f[#f + 1] = 'd'; f[#f + 1] = '1' end
  redis.call('HSET', rec, unpack(f))
  -- What the limit does not know of (Redis forgot it) cannot be taken off it. The order stays named,
  -- with 0 units, so that its buyer still finds it; who cancels again and again is not remembered for ever.
  if l[2] and l[2] ~= '0' then
    held = held - tonumber(qty)
    if held < 0 then held = 0 end
    if redis.call('HLEN', limit) <= 64 then
      redis.call('HSET', limit, 'held', held, ulid, '0')
    else
      redis.call('HSET', limit, 'held', held)
      redis.call('HDEL', limit, ulid)
    end
  end
  redis.call('ZREM', KEYS[2], ulid)
  redis.call('ZREM', KEYS[3], ulid)
  changed = true
  return 'applied'
end

local out = {}
for i = 1, (#KEYS - 3) / 3 do
  local k, v = 3 * i, 7 * i - 6
  out[i] = release(KEYS[k + 1], KEYS[k + 2], KEYS[k + 3], ARGV[v], ARGV[v + 1], ARGV[v + 2],
    ARGV[v + 3], ARGV[v + 4], ARGV[v + 5], ARGV[v + 6])
end
if changed and redis.call('HEXISTS', KEYS[1], 'version') == 1 then
  redis.call('HINCRBY', KEYS[1], 'version', 1)
end
return out
