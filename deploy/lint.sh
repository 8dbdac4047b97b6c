#!/usr/bin/env bash
# make lint: every check runs; the first line of a failing one says what to do.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
rc=0
check() { # what to do, command...
  local advice=$1
  shift
  local out
  if ! out=$("$@" 2>&1); then
    printf '%s\n%s\n' "FAILED ($advice): $*" "$out"
    rc=1
  fi
}
modules=$(go list -m -f '{{.Dir}}')

unformatted() { local bad; bad=$(git ls-files '*.go' ':!*.pb.go' | xargs gofmt -l); [[ -z $bad ]] || { echo "$bad"; return 1; }; }
check 'gofmt -w' unformatted

for dir in $modules; do
  check "go mod tidy in ${dir#"$PWD"/}" env -C "$dir" GOWORK=off go mod tidy -diff
  check "see below" env -C "$dir" "$TOOLS/golangci-lint" run --config "$PWD/.golangci.yml" --build-tags failpoints ./...
done

check 'see proto/buf.yaml' env -C proto "$TOOLS/buf" lint
# Compared with the last commit that is published; a fresh repository has none.
base=$(git rev-parse --verify -q origin/main || true)
if [[ -z $base || $base == "$(git rev-parse HEAD)" ]]; then base=$(git rev-parse --verify -q HEAD~1 || true); fi
if [[ -n $base ]] && git cat-file -e "$base:proto/buf.yaml" 2>/dev/null; then
  check 'messages in queues outlive a release' "$TOOLS/buf" breaking proto --against ".git#ref=$base,subdir=proto"
fi

if docker compose version >/dev/null 2>&1; then
  check 'see docker-compose.yml' docker compose --env-file .env.example config -q
elif command -v docker-compose >/dev/null; then
  check 'see docker-compose.yml' docker-compose --env-file .env.example config -q
fi

generated() {
  local tmp
  tmp=$(mktemp -d)
  cp -r proto/. "$tmp" && (cd "$tmp" && PATH="$TOOLS:$PATH" "$TOOLS/buf" generate) && diff -r proto "$tmp"
  local r=$?
  rm -rf "$tmp"
  return $r
}
check 'make generate' generated

[[ $rc == 0 ]] && echo "lint: all checks passed"
exit $rc
