-- The crowd, for wrk. Each thread takes its own slice of the token file (all lines have one length),
-- one line for each request, so that every request comes from a buyer who has not come before.
-- Each answer is looked at: its status is counted, and a 202 must say that it reserved.
--
-- args: token file, tokens to skip, tokens to use, requests per path, keyed (0|1), body, path...
--       The first "requests per path" buyers go to the first path, the next to the second, and so on;
--       0 means that all go to the first.
local threads = {}

function setup(thread)
  thread:set("index", #threads)
  table.insert(threads, thread)
end

local file, head, tail, paths, left, seen, per_path, keyed, key_base, width
reserved, other_202, sold_out, bad, statuses = 0, 0, 0, 0, ""
local counts = {}

function init(args)
  local name, skip, use = args[1], tonumber(args[2]), tonumber(args[3])
  per_path, keyed = tonumber(args[4]), args[5] == "1"
  local body = args[6]
  paths = {}
  for i = 7, #args do table.insert(paths, args[i]) end
  local n = tonumber(os.getenv("WRK_THREADS") or "2")
  file = assert(io.open(name, "r"))
  file:setvbuf("full", 1048576)
  width = #file:read("*l") + 1
  local share = math.floor(use / n)
  -- With several paths the threads take turns, so that all are at about the same path.
  left = share
  seen = index * share
  file:seek("set", (skip + index * share) * width)
  if #paths > 1 then
    -- whole sales per thread
    local sales = math.floor(#paths / n)
    local mine = {}
    for i = 1, sales do mine[i] = paths[index * sales + i] end
    if sales > 0 then paths = mine end
  end
  seen = 0
  key_base = index
  head = " HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\nContent-Length: " .. #body .. "\r\nAuthorization: Bearer "
  tail = "\r\n\r\n" .. body
end

function request()
  if left <= 0 then
    wrk.thread:stop()
    return "GET /exhausted HTTP/1.1\r\nHost: bench\r\n\r\n"
  end
  left = left - 1
  local path = paths[1]
  if per_path > 0 then
    path = paths[math.min(#paths, math.floor(seen / per_path) + 1)]
  end
  seen = seen + 1
  if keyed then
    return "POST " .. path .. head .. file:read("*l") .. "\r\nIdempotency-Key: k-" .. key_base .. "-" .. seen .. tail
  end
  return "POST " .. path .. head .. file:read("*l") .. tail
end

function response(status, headers, body)
  counts[status] = (counts[status] or 0) + 1
  if status == 202 then
    if string.find(body, '"status":"reserved"', 1, true) then
      reserved = reserved + 1
    else
      other_202 = other_202 + 1
    end
  elseif status == 409 and string.find(body, '"code":"sold_out"', 1, true) then
    sold_out = sold_out + 1
  else
    bad = bad + 1
    local s = ""
    for k, v in pairs(counts) do s = s .. k .. ":" .. v .. " " end
    statuses = s
    if bad == 1 then io.stderr:write("crowd: first unexpected answer: ", status, " ", body or "", "\n") end
  end
end

function done(summary, latency, requests)
  local r, o, s, b, text = 0, 0, 0, 0, ""
  for _, t in ipairs(threads) do
    r = r + t:get("reserved")
    o = o + t:get("other_202")
    s = s + t:get("sold_out")
    b = b + t:get("bad")
    text = text .. t:get("statuses")
  end
  local e = summary.errors
  io.write(string.format(
    '\nCROWD {"duration_us":%d,"requests":%d,"reserved":%d,"other_202":%d,"sold_out":%d,"bad":%d,"statuses":"%s","connect":%d,"read":%d,"write":%d,"timeout":%d,"p50_us":%d,"p90_us":%d,"p99_us":%d,"max_us":%d}\n',
    summary.duration, summary.requests, r, o, s, b, text, e.connect, e.read, e.write, e.timeout,
    latency:percentile(50), latency:percentile(90), latency:percentile(99), latency.max))
end
