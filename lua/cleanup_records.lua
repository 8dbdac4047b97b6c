#!lua
-- Removes purchase records of a sale that was settled in MySQL. What is left of a paid or refund-due
-- order is a receipt with a TTL. A record that is still reserved or pending stays and is named: its
-- row has to be followed first.
--
-- KEYS[1] hash    activity
-- KEYS[2] string  end marker
-- KEYS[2i+1] hash  purchase record i   KEYS[2i+2] hash  its receipt
-- ARGV[1] fencing number of the caller   ARGV[2] TTL of receipts (ms)   ARGV[2+i] ULID of record i
--
-- Returns {ok, removed, receipts, ULID…} (of the live ones) | {fenced} | {no_marker} |
-- {corrupt, what}; nothing was written unless ok. Idempotent. One slot.
local function failed(r)
  return type(r) == 'table' and r.err
end
for i, cmd in ipairs({'HLEN', 'STRLEN'}) do
  local r = redis.pcall(cmd, KEYS[i])
  if failed(r) then
    if string.find(r.err, '^WRONGTYPE') then return {'corrupt', KEYS[i]} end
    return r
  end
end
if redis.call('HGET', KEYS[1], 'fence') ~= ARGV[1] then return {'fenced'} end
if redis.call('EXISTS', KEYS[2]) == 0 then return {'no_marker'} end
local n, receipts, out = 0, 0, {'ok', '', ''}
for i = 1, (#KEYS - 2) / 2 do
  local rec, receipt = KEYS[2 * i + 1], KEYS[2 * i + 2]
  local r = redis.pcall('HMGET', rec, 's', 'o', 'x', 'w', 'd')
  if not failed(r) and (r[1] == 'r' or r[1] == 'p') then
    out[#out + 1] = ARGV[2 + i]
  else
    -- What is no hash (nobody writes such a thing) goes with the rest.
    if not failed(r) and r[1] and (r[1] == 'd' or r[5] == '1') then
      redis.call('DEL', receipt)
      redis.call('HSET', receipt, 's', r[1], 'o', r[2] or '', 'x', r[3] or '')
      if r[4] then redis.call('HSET', receipt, 'w', r[4]) end
      if r[5] then redis.call('HSET', receipt, 'd', r[5]) end
      redis.call('PEXPIRE', receipt, ARGV[2])
      receipts = receipts + 1
    end
    n = n + redis.call('UNLINK', rec)
  end
end
if n > 0 and redis.call('HEXISTS', KEYS[1], 'version') == 1 then
  redis.call('HINCRBY', KEYS[1], 'version', 1)
end
out[2], out[3] = string.format('%d', n), string.format('%d', receipts)
return out
