#!/usr/bin/env bash
# Runs the tests of every module against the services that make up prepared. All modules run; one
# that fails makes the whole fail at the end.
#   usage: test.sh [go test flags...]
. "$(dirname "$0")/lib.sh"
# shellcheck disable=SC1091
. "$run/env"
# Tests say themselves where they connect; the programs' settings are not for them.
unset SECKILL_REDIS_ADDRS SECKILL_REDIS_PREFIX SECKILL_RABBITMQ_URL SECKILL_MYSQL_DSN SECKILL_AUTH_JWT_SECRET \
  SECKILL_PAYMENT_SECRETS SECKILL_ADMIN_TOKENS SECKILLCTL_TOKEN_FILE SECKILLCTL_SERVER

# The bench's own tests drive its load tool.
if ! command -v wrk >/dev/null; then
  [[ $EUID -eq 0 ]] && command -v apt-get >/dev/null || die "wrk is not installed (Debian: apt-get install wrk)"
  say "installing the distribution's package: wrk"
  { apt-get update -qq && apt-get install -y -qq --no-install-recommends wrk; } >"$run/log/apt.log" 2>&1 ||
    die "apt-get failed: $(tail -n 3 "$run/log/apt.log")"
fi

cd "$root"
failed=()
log=$run/log/test.log
: >"$log"
test_in() { # module flags... packages
  local dir=$1
  shift
  echo "== $dir"
  (cd "$dir" && go test -race -count=1 -timeout "${TEST_TIMEOUT:-20m}" "$@") 2>&1 | tee -a "$log" || failed+=("$dir")
}
for dir in $(go list -m -f '{{.Dir}}'); do
  dir=${dir#"$root"/}
  case $dir in
  services/acceptance | services/order-worker) test_in "$dir" -tags failpoints "$@" ./... ;;
  *) test_in "$dir" "$@" ./... ;;
  esac
done
test_in pkg -tags failpoints "$@" ./failpoint

if [[ ${#failed[@]} -gt 0 ]]; then
  # Whoever sees only the end of this output should see what was wrong.
  echo "== what failed"
  awk '/^WARNING: DATA RACE/ { n = 50 } n-- > 0' "$log" | head -n 100 || true
  grep -E '^ *--- FAIL|^panic:|^FAIL|_test\.go:[0-9]+: ' "$log" | head -n 100 || true
  echo "FAILED: ${failed[*]}"
  exit 1
fi
echo "all modules passed"
