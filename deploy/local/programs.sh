# shellcheck shell=bash disable=SC2034,SC2154
# Starting and stopping the two programs. Sourced after lib.sh by run.sh and demo.sh.

# shellcheck disable=SC1091
load_env() { . "$run/env"; }

pick_addr() { # wanted port, what for: the port, or another one if somebody has it
  local p=$1
  if listens "127.0.0.1:$p"; then
    p=$(free_port)
    say "port $1 ($2) is taken: using $p"
  fi
  echo "127.0.0.1:$p"
}

ready() { # metrics addr
  [[ $(curl -s -o /dev/null -w '%{http_code}' --max-time 2 "http://$1/readyz") == 200 ]]
}

await() { # name metrics-addr
  local end=$((SECONDS + 180))
  until ready "$2"; do
    alive "$1" || { tail -n 5 "$run/log/$1.log" >&2; die "$1 ended at its start (log: $run/log/$1.log)"; }
    ((SECONDS < end)) || { curl -s --max-time 2 "http://$2/readyz" >&2; die "$1 is not ready within 180 s (log: $run/log/$1.log)"; }
    sleep 0.1
  done
}

start_programs() {
  load_env
  api_addr=$(pick_addr 8080 "order API") api_metrics=$(pick_addr 9091 "metrics of order-api")
  admin_addr=$(pick_addr 8081 "admin API") worker_metrics=$(pick_addr 9092 "metrics of order-worker")
  export SECKILLCTL_SERVER=http://$admin_addr
  : >"$run/log/order-worker.log"
  : >"$run/log/order-api.log"
  # The worker first: it declares the queues that order-api looks for.
  SECKILL_ADMIN_ADDR=$admin_addr SECKILL_METRICS_ADDR=$worker_metrics spawn order-worker "$root/bin/order-worker"
  await order-worker "$worker_metrics"
  SECKILL_HTTP_ADDR=$api_addr SECKILL_METRICS_ADDR=$api_metrics spawn order-api "$root/bin/order-api"
  await order-api "$api_metrics"
  say "order-api: http://$api_addr, metrics and health http://$api_metrics"
  say "order-worker: admin API http://$admin_addr, metrics and health http://$worker_metrics"
}

stop_programs() { # order-api first: nothing new comes in while the worker finishes
  local rc=0
  stop order-api 40 || rc=1
  stop order-worker 40 || rc=1
  return $rc
}
