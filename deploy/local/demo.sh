#!/usr/bin/env bash
# make demo: a rehearsal of a sale of 2,000 units with 20,000 buyers, then a clean stop.
. "$(dirname "$0")/lib.sh"
. "$(dirname "$0")/programs.sh"

for p in order-api order-worker; do
  if alive "$p"; then die "$p is running (make run); make down ends it"; fi
done
trap 'stop_programs || true' EXIT
start_programs
rc=0
"$root/bin/seckillctl" rehearse -f "$root/deploy/local/demo-sale.yaml" --buyers "${DEMO_BUYERS:-20000}" \
  --concurrency "${DEMO_CONCURRENCY:-256}" --api "http://$api_addr" || rc=$?
trap - EXIT
if stop_programs; then
  say "both programs ended in order"
else
  rc=1
fi
exit $rc
