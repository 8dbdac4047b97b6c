#!lua
-- Removes keys of a sale that was settled in MySQL: limits, qualifications, idempotency keys, outbox
-- and parked set, and stock, in the order in which the caller hands them over.
--
-- KEYS[1] hash    activity
-- KEYS[2] string  end marker
-- KEYS[2+i] any   what to remove
-- ARGV[1] fencing number of the caller
--
-- Returns {ok, removed} | {fenced} | {no_marker} | {corrupt, what}; nothing was written unless ok.
-- Idempotent. One slot.
for i, cmd in ipairs({'HLEN', 'STRLEN'}) do
  local r = redis.pcall(cmd, KEYS[i])
  if type(r) == 'table' and r.err then
    if string.find(r.err, '^WRONGTYPE') then return {'corrupt', KEYS[i]} end
    return r
  end
end
if redis.call('HGET', KEYS[1], 'fence') ~= ARGV[1] then return {'fenced'} end
if redis.call('EXISTS', KEYS[2]) == 0 then return {'no_marker'} end
local n = 0
for i = 3, #KEYS do n = n + redis.call('UNLINK', KEYS[i]) end
return {'ok', string.format('%d', n)}
