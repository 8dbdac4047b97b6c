#!/usr/bin/env bash
# make down: ends the programs and the services that make run and make up started, and no others.
# Data stays in $run; schema, vhost and users stay on servers that were there before.
. "$(dirname "$0")/lib.sh"

rc=0
for p in order-api order-worker; do
  if alive "$p"; then
    stop "$p" 40 && say "$p: ended" || rc=1
  fi
done
if [[ -f $run/compose ]]; then
  # shellcheck disable=SC1091,SC2046
  (. "$run/secrets" && cd "$root" && SECKILL_UP_NAME=$name SECKILL_UP_PASSWORD=$password docker compose -p "$name" stop $(cat "$run/compose")) >&2
  say "docker compose: stopped $(tr '\n' ' ' <"$run/compose")"
  rm -f "$run/compose"
fi
for s in mysql rabbitmq rabbitmq-epmd redis; do
  if alive "$s"; then
    stop "$s" 60 && say "$s: stopped" || rc=1
  fi
done
say "down: everything that was started here has ended; what ran before still runs"
exit $rc
