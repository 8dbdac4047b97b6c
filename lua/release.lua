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
-- ARGV[7i-1] 1: withhold the units (R7); 2: nothing is sold any more, so that only the record matters:
--            the units stay where they are, and a damaged limit or record holds nothing up
-- ARGV[7i] 1: money has to go back
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

-- A pool's units and a user's limit are read once, and written once for all orders that touch them.
local levels = {}
local function level(key)
  local found = levels[key]
  if not found then
    local n = redis.pcall('GET', key)
    found = failed(n) and 'corrupt' or not n and 'no_stock' or not integer(n) and 'corrupt' or 'ok'
    levels[key] = found
  end
  return found
end
local limits, named = {}, {}

local done, gone, marks, back, records = {}, {}, {}, {}, {}

local function release(rec, limit, stock, ulid, content, qty, to, reason, withhold, due)
  local over = withhold == '2'
  local r = redis.pcall('HMGET', rec, 's', 'o', 'd')
  if failed(r) and not over then return 'corrupt' end
  local s = done[rec] or not failed(r) and r[1]
  if not s then
    gone[#gone + 1] = ulid
    return 'no_record'
  end
  if r[2] ~= content and not over then return 'mismatch' end
  if s ~= 'r' and s ~= 'p' and s ~= 'd' then
    if due == '1' and r[3] ~= '1' then marks[#marks + 1] = rec end
    gone[#gone + 1] = ulid
    return 'already'
  end
  local l = redis.pcall('HMGET', limit, 'held', ulid)
  local held, units = not failed(l) and (limits[limit] or integer(l[1] or '0')), integer(qty)
  if not (held and units or over) then return 'corrupt' end
  if withhold == '0' then
    local found = level(stock)
    if found ~= 'ok' then return found end
    back[stock] = (back[stock] or 0) + units
  end
  done[rec] = to
  gone[#gone + 1] = ulid
  records[#records + 1] = {rec, to, reason, due}
  -- What the limit does not know of (Redis forgot it) cannot be taken off it.
  if held and l[2] and l[2] ~= '0' then
    limits[limit] = math.max(held - units, 0)
    named[#named + 1] = {limit, ulid}
  end
  return 'applied'
end

local out = {}
for i = 1, (#KEYS - 3) / 3 do
  local k, v = 3 * i, 7 * i - 6
  out[i] = release(KEYS[k + 1], KEYS[k + 2], KEYS[k + 3], ARGV[v], ARGV[v + 1], ARGV[v + 2],
    ARGV[v + 3], ARGV[v + 4], ARGV[v + 5], ARGV[v + 6])
end

-- From here on nothing is refused. Stock first, then the records (P6).
for stock, units in pairs(back) do redis.call('INCRBY', stock, string.format('%d', units)) end
for _, r in ipairs(records) do
  local f = {'s', r[2]}
  if r[3] ~= '' then f[#f + 1] = 'w'; f[#f + 1] = r[3] end
  if r[4] == '1' then f[#f + 1] = 'd'; f[#f + 1] = '1' end
  redis.call('HSET', r[1], unpack(f))
end
for _, rec in ipairs(marks) do redis.call('HSET', rec, 'd', '1') end
-- An order stays named, with 0 units, so that its buyer still finds it; who cancels again and again is
-- not remembered for ever.
for _, n in ipairs(named) do
  local limit, ulid = n[1], n[2]
  local held = string.format('%d', limits[limit])
  if redis.call('HLEN', limit) <= 64 then
    redis.call('HSET', limit, 'held', held, ulid, '0')
  else
    redis.call('HSET', limit, 'held', held)
    redis.call('HDEL', limit, ulid)
  end
end
if #gone > 0 then
  redis.call('ZREM', KEYS[2], unpack(gone))
  redis.call('ZREM', KEYS[3], unpack(gone))
end
if #records + #marks > 0 and redis.call('HEXISTS', KEYS[1], 'version') == 1 then
  redis.call('HINCRBY', KEYS[1], 'version', 1)
end
return out
