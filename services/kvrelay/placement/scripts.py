"""The Lua scripts. Each touches one key and so works in a cluster; each is atomic, so no router needs a lock."""

from __future__ import annotations

SET_SESSION = """
-- KEYS[1] session; ARGV: expected epoch, new value (JSON), TTL in ms. Returns what is stored afterwards.
local raw = redis.pcall('GET', KEYS[1])
if type(raw) == 'string' then
  local ok, now = pcall(cjson.decode, raw)
  local readable = ok and type(now) == 'table'
    and type(now.decode_worker) == 'string' and type(now.incarnation) == 'string' and type(now.tail_hash) == 'string'
    and type(now.epoch) == 'number' and now.epoch % 1 == 0 and now.epoch >= 0 and now.epoch < 9007199254740992
    and type(now.num_tokens) == 'number' and now.num_tokens % 1 == 0
  if readable and now.epoch ~= tonumber(ARGV[1]) then return raw end
end
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
return ARGV[2]
"""

LEAVE = """
-- KEYS[1] worker; ARGV: incarnation. Deletes the lease unless another process took it over. Returns 1 if deleted.
local raw = redis.call('GET', KEYS[1])
if not raw then return 0 end
local ok, now = pcall(cjson.decode, raw)
if ok and type(now) == 'table' and type(now.record) == 'table' and now.record.incarnation ~= ARGV[1] then return 0 end
return redis.call('DEL', KEYS[1])
"""

ADD_HOLDER = """
-- KEYS[1] prefix; ARGV: worker, TTL in ms, most holders. A sorted set of workers by the server's time of expiry.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
redis.call('ZADD', KEYS[1], now + ARGV[2], ARGV[1])
redis.call('ZREMRANGEBYRANK', KEYS[1], 0, -ARGV[3] - 1)
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return 1
"""

TAKE_QUOTA = """
-- KEYS[1] bucket; ARGV: amount, rate per s, burst. Returns the seconds that are missing, as a string; '0' if taken.
local amount, rate, burst = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local time = redis.call('TIME')
local now = time[1] + time[2] / 1000000
local stored = redis.call('HMGET', KEYS[1], 'level', 'at')
local level, at = tonumber(stored[1]) or burst, tonumber(stored[2]) or now
level = math.min(burst, level + math.max(0, now - at) * rate)
local missing = amount - level
if missing <= 0 then level = level - amount end
redis.call('HSET', KEYS[1], 'level', string.format('%.6f', level), 'at', string.format('%.6f', now))
redis.call('PEXPIRE', KEYS[1], math.ceil(burst / rate * 1000) + 1000)
return string.format('%.6f', math.max(0, missing / rate))
"""
