# shellcheck shell=bash disable=SC2034,SC2154
# What the scripts behind the Makefile share. Sourced, not run.
#
# What can be set from outside:
#   SECKILL_UP_NAME            name of schema, vhost and users (seckill); another one gets its own Redis prefix too
#   SECKILL_UP_REDIS_ADDR      host:port (127.0.0.1:6379)
#   SECKILL_UP_RABBITMQ_ADDR   host:port (127.0.0.1:5672)
#   SECKILL_UP_MYSQL_ADDR      host:port (127.0.0.1:3306)
#   SECKILL_UP_PASSWORD        of the users it makes (a development password)
#   SECKILL_UP_MYSQL_ROOT_PASSWORD, SECKILL_UP_RABBITMQ_API (http://user:password@host:15672)
#                              where the servers that already run do not let this user in otherwise
#   SECKILL_UP_RUN             where state is kept (.run)
#   SECKILL_UP_DOCKER=no       do not look for a Docker engine
#   SECKILL_REDIS_ADDRS, SECKILL_RABBITMQ_URL, SECKILL_MYSQL_DSN
#                              servers that somebody else looks after: used as they are, nothing is made there
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
run=${SECKILL_UP_RUN:-$root/.run}
mkdir -p "$run/log" "$run/pid"
chmod 700 "$run"

name=${SECKILL_UP_NAME:-seckill}
[[ $name =~ ^[a-z][a-z0-9_]{0,30}$ ]] || { echo "SECKILL_UP_NAME: '$name' is not a short lower-case name" >&2; exit 1; }
redis_addr=${SECKILL_UP_REDIS_ADDR:-127.0.0.1:6379}
rabbit_addr=${SECKILL_UP_RABBITMQ_ADDR:-127.0.0.1:5672}
mysql_addr=${SECKILL_UP_MYSQL_ADDR:-127.0.0.1:3306}
password=${SECKILL_UP_PASSWORD:-seckill-development-only}
[[ $password =~ ^[A-Za-z0-9_.-]+$ ]] || { echo "SECKILL_UP_PASSWORD: only A-Z a-z 0-9 _ . - (it goes into URLs and SQL)" >&2; exit 1; }

say() { printf '%s\n' "$*" >&2; }
die() { printf 'error: %s\n' "$*" >&2; exit 1; }

listens() { # host:port
  (exec 3<>"/dev/tcp/${1%:*}/${1##*:}") 2>/dev/null
}

wait_for() { # seconds what command...
  local end=$((SECONDS + $1)) what=$2
  shift 2
  until "$@" >/dev/null 2>&1; do
    ((SECONDS < end)) || die "$what is not ready in time (logs are in $run/log)"
    sleep 0.1
  done
}

free_port() { # outside the range that the kernel takes for outgoing connections
  local p
  for _ in $(seq 200); do
    p=$((10000 + RANDOM % 22000))
    if ! listens "127.0.0.1:$p"; then echo "$p"; return; fi
  done
  die "no free port on 127.0.0.1"
}

# A process is known by its pid and its start time: a pid alone may belong to somebody else later.
started_at() { sed 's/.*) //' "/proc/$1/stat" 2>/dev/null | cut -d' ' -f20; }

spawn() { # name command...; runs it detached, logs to $run/log/<name>.log
  local n=$1
  shift
  setsid "$@" >>"$run/log/$n.log" 2>&1 </dev/null &
  local pid=$!
  echo "$pid $(started_at "$pid")" >"$run/pid/$n"
}

alive() { # name
  local pid at
  [[ -f $run/pid/$1 ]] || return 1
  read -r pid at <"$run/pid/$1"
  [[ -n $at && $(started_at "$pid") == "$at" ]]
}

stop() { # name seconds; SIGTERM, then SIGKILL; 0 when it ended in order
  local pid at rc=0
  alive "$1" || { rm -f "$run/pid/$1"; return 0; }
  read -r pid at <"$run/pid/$1"
  kill -TERM "$pid" 2>/dev/null || true
  local end=$((SECONDS + $2))
  while alive "$1"; do
    if ((SECONDS >= end)); then
      say "$1 did not end within $2 s: killed"
      kill -KILL -- "-$pid" 2>/dev/null || kill -KILL "$pid" 2>/dev/null || true
      rc=1
      break
    fi
    sleep 0.1
  done
  rm -f "$run/pid/$1"
  # The exit code can be had where this very script has started it.
  local code=0
  wait "$pid" 2>/dev/null || code=$?
  if [[ $rc == 0 && $code != 0 && $code != 127 ]]; then
    say "$1 ended with exit code $code (log: $run/log/$1.log)"
    rc=1
  fi
  return $rc
}

mysql_client() { command -v mariadb || command -v mysql || die "neither the mariadb nor the mysql command line client is on this machine"; }
