#!lua
-- Reserves units for one order: takes them from the first pool that has enough, counts them against
-- the user's limit, writes the purchase record and the outbox entry.
--
-- KEYS[1] hash    activity
-- KEYS[2] string  end marker
-- KEYS[3] hash    purchase record of this order id
-- KEYS[4] hash    the user's limit: held, and ULID -> units held by that order (0: given back)
-- KEYS[5] zset    outbox: ULID by time (ms)
-- KEYS[6] string  the user's qualification
-- KEYS[7…6+n] string  stock of the n pools to look in, in this order
-- KEYS[7+n] string  idempotency key; only when ARGV[6] is not empty
-- ARGV[1] ULID of the order   ARGV[2] user   ARGV[3] sku   ARGV[4] region as asked
-- ARGV[5] quantity, decimal digits   ARGV[6] idempotency key or ''   ARGV[7] digest of the request
-- ARGV[8…7+n] names of the pools
--
-- Returns {code, …}:
--   ok, o, x                     reserved now (o and x as in the record)
--   replay, s, o, x, i, w, d     this order id was answered before; nothing changed
--   key, ULID                    the idempotency key was answered with that order; nothing changed
--   key_reused | invalid | not_found | not_warmed | ended | paused | not_qualified | sold_out
--   not_started, start (ms), now (ms)
--   limit, ULID…                 with the user's orders
--   corrupt, what                a key holds something else than it should; nothing was written
-- Idempotent by order id and by idempotency key. One slot.
local ulid, user, sku, qty, idem, digest = ARGV[1], ARGV[2], ARGV[3], ARGV[5], ARGV[6], ARGV[7]
local pools = #ARGV - 7
local pcall = redis.pcall

-- A wrong type is a finding about the data; any other error belongs to the caller as it is. Replies
-- are tested for errors in place: this script is the sale's bottleneck, and calls cost.
local function report(r, what)
  if string.find(r.err, '^WRONGTYPE') then
    return {'corrupt', what}
  end
  return r
end
-- Counters are compared as numbers only when they are short enough to be exact.
local function number(s)
  return s and #s <= 15 and string.find(s, '^%d+$') and tonumber(s)
end

-- One field tells whether there is a record; the rest is read only for a replay.
local s = pcall('HGET', KEYS[3], 's')
if s then
  if type(s) == 'table' then return report(s, 'record') end
  local rec = redis.call('HMGET', KEYS[3], 'o', 'x', 'i', 'w', 'd')
  return {'replay', s, rec[1] or '', rec[2] or '', rec[3] or '', rec[4] or '', rec[5] or ''}
end
local idemkey
if idem ~= '' then
  idemkey = KEYS[7 + pools]
  local seen = pcall('GET', idemkey)
  if seen then
    if type(seen) == 'table' then return report(seen, 'idempotency key') end
    if string.sub(seen, 27) ~= digest then return {'key_reused'} end
    return {'key', string.sub(seen, 1, 26)}
  end
end

if #qty > 7 or not string.find(qty, '^[1-9]%d*$') or pools < 1 then return {'invalid'} end
local want = tonumber(qty)
if want > 1000000 then return {'invalid'} end

local a = pcall('HMGET', KEYS[1], 'limit', 'start', 'end', 'warm', 'open', 'paused',
  'qualified', 'frozen:' .. sku)
if a.err then return report(a, 'activity') end
if redis.call('EXISTS', KEYS[2]) == 1 then return {'ended'} end
local limit, warm = a[1], a[4]
if not limit then return {'not_found'} end
if not warm or warm == '0' or a[5] ~= warm then return {'not_warmed'} end
limit = number(limit)
local starts, ends = number(a[2]), number(a[3])
if not (limit and starts and ends) then
  return {'corrupt', 'activity'}
end
local t = redis.call('TIME')
local now = t[1] .. string.sub('00000' .. t[2], -6, -4)
local at = tonumber(now)
if at >= ends then return {'ended'} end
if at < starts then return {'not_started', a[2], now} end
if a[6] == '1' then return {'paused'} end
if not a[8] then return {'invalid'} end
if a[7] == '1' and redis.call('EXISTS', KEYS[6]) == 0 then return {'not_qualified'} end

local held, total = pcall('HGET', KEYS[4], 'held'), qty
if held or want > limit then
  if type(held) == 'table' then return report(held, 'limit') end
  local holds = number(held or '0')
  if not holds then return {'corrupt', 'limit'} end
  if holds + want > limit then
    local ids = {'limit'}
    local all = redis.call('HGETALL', KEYS[4])
    for i = 1, #all, 2 do
      if all[i] ~= 'held' and all[i + 1] ~= '0' then ids[#ids + 1] = all[i] end
    end
    return ids
  end
  total = string.format('%d', holds + want)
end

local stock, pool
for i = 1, pools do
  local n = pcall('GET', KEYS[6 + i])
  if not n then return {'not_warmed'} end
  if type(n) == 'table' then return report(n, 'stock') end
  local left = number(n)
  if not left then return {'corrupt', 'stock'} end
  if left >= want then
    stock, pool = KEYS[6 + i], ARGV[7 + i]
    break
  end
end
if not stock then return {'sold_out'} end

-- Outbox and version were not read. They are written first, so that a wrong type or value still
-- leaves everything as it was.
local added = pcall('ZADD', KEYS[5], now, ulid)
if type(added) == 'table' then return report(added, 'outbox') end
local version = pcall('HINCRBY', KEYS[1], 'version', 1)
if type(version) == 'table' then
  redis.call('ZREM', KEYS[5], ulid)
  return {'corrupt', 'activity'}
end
local o = user .. '|' .. sku .. '|' .. pool .. '|' .. qty
local x = now .. '|' .. a[8] .. '|' .. ARGV[4]
redis.call('DECRBY', stock, qty)
if idemkey then
  redis.call('HSET', KEYS[3], 's', 'r', 'o', o, 'x', x, 'i', idem)
  redis.call('SET', idemkey, ulid .. digest)
else
  redis.call('HSET', KEYS[3], 's', 'r', 'o', o, 'x', x)
end
redis.call('HSET', KEYS[4], 'held', total, ulid, qty)
return {'ok', o, x}
