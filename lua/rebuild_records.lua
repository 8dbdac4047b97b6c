#!lua
-- Writes records of a rebuild (R10) into a bucket that is closed and carries the rebuild's number.
--
-- KEYS[1] hash  activity
-- KEYS[2] zset  outbox   KEYS[3] zset  parked
-- KEYS[3i+1] hash    purchase record i
-- KEYS[3i+2] hash    its user's limit
-- KEYS[3i+3] string  its idempotency key (its record again, if it has none)
-- ARGV[1] number of the rebuild
-- ARGV[11i-9…11i+1] of record i: ULID, s, o, x, w, d ('' for none), quantity ('0' when not live),
--   idempotency key ('' for none), digest, reserved at (ms), '1' when parked
--
-- Returns {ok} | {other} (the bucket is open, or carries another number) | {corrupt, what}; nothing
-- was written unless ok. A record that is there stays as it is. Idempotent. One slot.
local function failed(r)
  return type(r) == 'table' and r.err
end
local checks = {{'HLEN', 1}, {'ZCARD', 2}, {'ZCARD', 3}}
for i = 1, (#KEYS - 3) / 3 do
  checks[#checks + 1] = {'HLEN', 3 * i + 1}
  checks[#checks + 1] = {'HLEN', 3 * i + 2}
end
for _, c in ipairs(checks) do
  local r = redis.pcall(c[1], KEYS[c[2]])
  if failed(r) then
    if string.find(r.err, '^WRONGTYPE') then return {'corrupt', KEYS[c[2]]} end
    return r
  end
end
local a = redis.call('HMGET', KEYS[1], 'warm', 'open')
if a[1] ~= ARGV[1] or a[2] == a[1] then return {'other'} end
for i = 1, (#KEYS - 3) / 3 do
  local rec, limit, v = KEYS[3 * i + 1], KEYS[3 * i + 2], 11 * i - 9
  if redis.call('EXISTS', rec) == 0 then
    local f = {'s', ARGV[v + 1], 'o', ARGV[v + 2], 'x', ARGV[v + 3]}
    if ARGV[v + 4] ~= '' then f[#f + 1] = 'w'; f[#f + 1] = ARGV[v + 4] end
    if ARGV[v + 5] ~= '' then f[#f + 1] = 'd'; f[#f + 1] = ARGV[v + 5] end
    if ARGV[v + 7] ~= '' then
      redis.call('SET', KEYS[3 * i + 3], ARGV[v] .. ARGV[v + 8])
      if ARGV[v + 1] == 'r' then f[#f + 1] = 'i'; f[#f + 1] = ARGV[v + 7] end
    end
    redis.call('HSET', rec, unpack(f))
    if ARGV[v + 6] ~= '0' then
      redis.call('HINCRBY', limit, 'held', ARGV[v + 6])
      redis.call('HSET', limit, ARGV[v], ARGV[v + 6])
    elseif redis.call('HLEN', limit) <= 64 then
      redis.call('HSET', limit, ARGV[v], '0') -- its buyer finds it, as after a release
    end
    if ARGV[v + 1] == 'r' then
      redis.call('ZADD', ARGV[v + 10] == '1' and KEYS[3] or KEYS[2], ARGV[v + 9], ARGV[v])
    end
  end
end
return {'ok'}
