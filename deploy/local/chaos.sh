#!/usr/bin/env bash
# make chaos: the tests that kill programs and servers, one after the other, told aloud.
. "$(dirname "$0")/lib.sh"
# shellcheck disable=SC1091
. "$run/env"
unset SECKILL_REDIS_ADDRS SECKILL_REDIS_PREFIX SECKILL_RABBITMQ_URL SECKILL_MYSQL_DSN SECKILL_AUTH_JWT_SECRET \
  SECKILL_PAYMENT_SECRETS SECKILL_ADMIN_TOKENS SECKILLCTL_TOKEN_FILE SECKILLCTL_SERVER
cd "$root/services/acceptance"
go test -race -count=1 -tags failpoints -timeout 60m -p 1 -v "$@" ./...
