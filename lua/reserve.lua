#!lua
-- Reserves units for up to a few dozen requests of one bucket, in their order: for each, takes the
-- units from the first pool that has enough, counts them against the user's limit, writes the purchase
-- record and the outbox entry. What all of them share (sale, clock, stock, outbox, version) is read and
-- written once per call: under load that is most of the work. One request's refusal or damage never
-- touches another's.
--
-- KEYS[1] hash    activity
-- KEYS[2] string  end marker
-- KEYS[3] zset    outbox: ULID by time (ms)
-- KEYS[4…3+p] string  stock: the pools of offer 1, then those of offer 2, … (in the order to look in)
-- then of each request:
--   hash    purchase record of this order id
--   hash    the user's limit: held, and ULID -> units held by that order (0: given back)
--   string  the user's qualification
--   string  idempotency key; only where the request has one
-- ARGV[1] number of offers
-- then of each offer (what several requests may ask for alike):
--   sku, region as asked, quantity (decimal digits), number of pools, their names
-- then of each request:
--   ULID of the order, user, offer (from 1), idempotency key or '', digest of the request
--
-- Returns x of each offer ('' where nothing could be granted), then for each request a code, alone or
-- in an array with more:
--   ok|<pool>                    reserved now, with x of its offer
--   {replay, s, o, x, i, w, d}   this order id was answered before; nothing changed
--   {key, ULID}                  the idempotency key was answered with that order; nothing changed
--   key_reused | invalid | not_found | not_warmed | ended | paused | not_qualified | sold_out
--   {not_started, start (ms), now (ms)}
--   {limit, ULID…}               with the user's orders
--   {corrupt, what}              a key holds something else than it should; nothing was written
--   invalid is also a second request of one user, or for one order id, in the same call.
-- Idempotent by order id and by idempotency key. One slot.
local call, pcall, find = redis.call, redis.pcall, string.find

-- A wrong type is a finding about the data; any other error belongs to the caller as it is. Replies
-- are tested for errors in place: this script is the sale's bottleneck, and calls cost.
local function report(r, what)
  if find(r.err, '^WRONGTYPE') then
    return {'corrupt', what}
  end
  return r
end
-- Counters are compared as numbers only when they are short enough to be exact.
local function number(s)
  return s and #s <= 15 and find(s, '^%d+$') and tonumber(s)
end

local offers, frozen, k, v = {}, {'limit', 'start', 'end', 'warm', 'open', 'paused', 'qualified', 'version'}, 4, 2
for i = 1, tonumber(ARGV[1]) do
  local sku, qty, n = ARGV[v], ARGV[v + 2], tonumber(ARGV[v + 3])
  local want = #qty <= 7 and find(qty, '^[1-9]%d*$') and tonumber(qty)
  offers[i] = {
    sku = sku, region = ARGV[v + 1], qty = qty, want = want and want <= 1000000 and n > 0 and want,
    keys = k, names = v + 4, pools = n
  }
  frozen[8 + i] = 'frozen:' .. sku
  k, v = k + n, v + 4 + n
end

-- What refuses everybody who has no earlier answer.
local function gate(a)
  if a.err then return report(a, 'activity') end
  if call('EXISTS', KEYS[2]) == 1 then return 'ended' end
  if not a[1] then return 'not_found' end
  local warm = a[4]
  if not warm or warm == '0' or a[5] ~= warm then return 'not_warmed' end
  local starts, ends = number(a[2]), number(a[3])
  if not (number(a[1]) and starts and ends and (not a[8] or number(a[8]))) then return {'corrupt', 'activity'} end
  local outbox = pcall('ZCARD', KEYS[3])
  if type(outbox) == 'table' then return report(outbox, 'outbox') end
  local t = call('TIME')
  local now = t[1] .. string.sub('00000' .. t[2], -6, -4)
  local at = tonumber(now)
  if at >= ends then return 'ended' end
  if at < starts then return {'not_started', a[2], now} end
  if a[6] == '1' then return 'paused' end
  return nil, now
end
local a = pcall('HMGET', KEYS[1], unpack(frozen))
local refusal, now = gate(a)
local limit, listed = number(a[1]), a[7] == '1'

local out = {}
for i, offer in ipairs(offers) do
  offer.frozen = a[8 + i]
  out[i] = ''
  if now and offer.frozen then out[i] = now .. '|' .. offer.frozen .. '|' .. offer.region end
end

-- What is left of a pool while this call goes on; false, with a refusal, where it cannot be known.
local left, trouble, taken = {}, {}, {}
local function level(key)
  local n = left[key]
  if n == nil then
    local s = pcall('GET', key)
    if type(s) == 'table' then
      trouble[key] = report(s, 'stock')
    elseif not s then
      trouble[key] = 'not_warmed'
    elseif not number(s) then
      trouble[key] = {'corrupt', 'stock'}
    end
    n = not trouble[key] and number(s)
    left[key] = n
  end
  return n
end

local seen, members, writes, w = {}, {}, {}, 0

-- Decides one request; whatever it grants is only noted.
local function decide(rec, hold, listing, idemkey, ulid, user, offer, idem, digest)
  -- Nearly everybody in a crowd is new: then one look at all three keys is all there is to read.
  local known = (idemkey and call('EXISTS', rec, hold, idemkey) or call('EXISTS', rec, hold)) > 0
  if known then
    -- One field tells whether there is a record; the rest is read only for a replay.
    local s = pcall('HGET', rec, 's')
    if s then
      if type(s) == 'table' then return report(s, 'record') end
      local r = call('HMGET', rec, 'o', 'x', 'i', 'w', 'd')
      return {'replay', s, r[1] or '', r[2] or '', r[3] or '', r[4] or '', r[5] or ''}
    end
    local before = idemkey and pcall('GET', idemkey)
    if before then
      if type(before) == 'table' then return report(before, 'idempotency key') end
      if string.sub(before, 27) ~= digest then return 'key_reused' end
      return {'key', string.sub(before, 1, 26)}
    end
  end
  local want = offer.want
  if not want or seen[rec] or seen[hold] then return 'invalid' end
  if refusal then return refusal end
  if not offer.frozen then return 'invalid' end
  if listed and call('EXISTS', listing) == 0 then return 'not_qualified' end

  local held, total = known and pcall('HGET', hold, 'held'), offer.qty
  if held or want > limit then
    if type(held) == 'table' then return report(held, 'limit') end
    local holds = number(held or '0')
    if not holds then return {'corrupt', 'limit'} end
    if holds + want > limit then
      local ids = {'limit'}
      local all = call('HGETALL', hold)
      for i = 1, #all, 2 do
        if all[i] ~= 'held' and all[i + 1] ~= '0' then ids[#ids + 1] = all[i] end
      end
      return ids
    end
    total = string.format('%d', holds + want)
  end

  for i = 0, offer.pools - 1 do
    local key = KEYS[offer.keys + i]
    local n = level(key)
    if not n then return trouble[key] end
    if n >= want then
      local pool = ARGV[offer.names + i]
      left[key] = n - want
      taken[key] = (taken[key] or 0) + want
      seen[rec], seen[hold] = true, true
      members[#members + 1] = now
      members[#members + 1] = ulid
      writes[w + 1], writes[w + 2], writes[w + 3], writes[w + 4] = rec, hold, idemkey, ulid
      writes[w + 5], writes[w + 6] = user .. '|' .. offer.sku .. '|' .. pool .. '|' .. offer.qty, offer
      writes[w + 7], writes[w + 8], writes[w + 9] = idem, digest, total
      w = w + 9
      return 'ok|' .. pool
    end
  end
  return 'sold_out'
end

local n = #out
while v <= #ARGV do
  local idem, idemkey = ARGV[v + 3], false
  local rec, hold, listing = KEYS[k], KEYS[k + 1], KEYS[k + 2]
  k = k + 3
  if idem ~= '' then
    idemkey = KEYS[k]
    k = k + 1
  end
  local which = tonumber(ARGV[v + 2])
  n = n + 1
  out[n] = decide(rec, hold, listing, idemkey, ARGV[v], ARGV[v + 1], offers[which], idem, ARGV[v + 4])
  offers[which].x = out[which]
  v = v + 5
end
if w == 0 then return out end

-- From here on nothing is refused: every key was read, and is what it should be.
for key, units in pairs(taken) do call('DECRBY', key, string.format('%d', units)) end
call('HINCRBY', KEYS[1], 'version', 1)
call('ZADD', KEYS[3], unpack(members))
for i = 0, w - 1, 9 do
  local rec, idemkey, offer = writes[i + 1], writes[i + 3], writes[i + 6]
  if idemkey then
    call('HSET', rec, 's', 'r', 'o', writes[i + 5], 'x', offer.x, 'i', writes[i + 7])
    call('SET', idemkey, writes[i + 4] .. writes[i + 8])
  else
    call('HSET', rec, 's', 'r', 'o', writes[i + 5], 'x', offer.x)
  end
  call('HSET', writes[i + 2], 'held', writes[i + 9], writes[i + 4], offer.qty)
end
return out
