#!/usr/bin/env bash
# make run: both programs in the background, a sale that is open, and a curl that buys from it.
. "$(dirname "$0")/lib.sh"
. "$(dirname "$0")/programs.sh"

if alive order-api && alive order-worker; then
  say "already running:"
  cat "$run/hello"
  exit 0
fi
stop_programs || true
start_programs

ctl=$root/bin/seckillctl
sale=hello-$(date -u +%y%m%d-%H%M%S)
cat >"$run/hello-sale.yaml" <<END
id: $sale
name: Hello
starts_at: $(date -u -d '-1 minute' +%Y-%m-%dT%H:%M:%SZ)
ends_at: $(date -u -d '+1 day' +%Y-%m-%dT%H:%M:%SZ)
per_user_limit: 2
payment_timeout: 15m
currency: CNY
qualification: none
buckets: 1
items:
  - {sku_id: phone-256, price_minor: 399900, pools: {beijing: 100, national: 900}}
region_fallback: {beijing: [national]}
refund_after_end: national
END
"$ctl" inventory set --sku phone-256 --pool beijing --quantity 100 --yes >&2
"$ctl" inventory set --sku phone-256 --pool national --quantity 900 --yes >&2
"$ctl" activity create -f "$run/hello-sale.yaml" --yes >&2
"$ctl" activity warm "$sale" --yes >&2
token=$("$ctl" token mint --user alice)

cat >"$run/hello" <<END
order API      http://$api_addr         (OpenAPI at /openapi.yaml)
health         http://$api_metrics/readyz  http://$worker_metrics/readyz  (/metrics beside it)
admin API      http://$admin_addr         token in $run/admin-token
seckillctl     export SECKILLCTL_SERVER=http://$admin_addr SECKILLCTL_TOKEN_FILE=$run/admin-token; bin/seckillctl activity list

Buy two:

curl -sS http://$api_addr/v1/activities/$sale/orders \\
  -H 'Authorization: Bearer $token' \\
  -H 'Content-Type: application/json' -H 'Idempotency-Key: first-try' \\
  -d '{"sku_id":"phone-256","quantity":2,"region":"beijing"}'
END
cat "$run/hello"
say "make down ends it."
