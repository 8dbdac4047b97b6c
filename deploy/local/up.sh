#!/usr/bin/env bash
# make up: the three services, from what this machine has, with a user, schema and vhost of our own.
# May be run again at any time. Writes $run/env, which the other scripts read.
. "$(dirname "$0")/lib.sh"

engine() {
  [[ ${SECKILL_UP_DOCKER:-} != no ]] && command -v docker >/dev/null && docker compose version >/dev/null 2>&1 &&
    timeout 10 docker info >/dev/null 2>&1
}

# Packages that are already there need neither root nor apt-get.
packages() { [[ -z $(absent "${missing[@]}") ]] || { [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null; }; }

absent() { # packages to install for these services
  local s
  for s in "$@"; do
    case $s in
    redis) command -v redis-server >/dev/null || echo redis-server ;;
    rabbitmq) [[ -x /usr/lib/rabbitmq/bin/rabbitmq-server ]] || echo rabbitmq-server ;;
    mysql) command -v mariadbd >/dev/null || echo mariadb-server mariadb-client ;;
    esac
  done
}

# Secrets of this checkout, made once.
if [[ ! -f $run/secrets ]]; then
  (
    umask 077
    rnd() { head -c "$1" /dev/urandom | od -An -tx1 | tr -d ' \n'; }
    token=$(rnd 24)
    printf '%s' "$token" >"$run/admin-token"
    printf 'export SECKILL_AUTH_JWT_SECRET=%s\nexport SECKILL_PAYMENT_SECRETS=whsec_%s\nexport SECKILL_ADMIN_TOKENS=local:operator:%s\n' \
      "$(rnd 32)" "$(head -c 32 /dev/urandom | base64 -w0)" "$(printf '%s' "$token" | sha256sum | cut -d' ' -f1)" >"$run/secrets"
  )
fi

# --- which way for which service ------------------------------------------------------------------

missing=()
use() { # service addr given
  if [[ -n $3 ]]; then
    listens "$2" || die "$1: nothing listens at $2, which was configured by hand"
    say "$1: $2, as configured"
  elif alive "$1"; then
    say "$1: $2, started earlier by make up"
  elif [[ -f $run/compose ]] && grep -qx "$1" "$run/compose" && listens "$2"; then
    say "$1: $2, started earlier by docker compose"
  elif listens "$2"; then
    say "$1: $2, was already running"
  else
    missing+=("$1")
  fi
}

first() { printf '%s' "${1%%,*}"; }
given_redis=${SECKILL_REDIS_ADDRS:-} given_rabbit=${SECKILL_RABBITMQ_URL:-} given_mysql=${SECKILL_MYSQL_DSN:-}
if [[ -n $given_redis ]]; then redis_addr=$(first "$given_redis"); fi
if [[ -n $given_rabbit ]]; then
  rabbit_addr=$(sed -E 's#^amqps?://([^/]*@)?([^/@]+)(/.*)?$#\2#' <<<"$given_rabbit")
  [[ $rabbit_addr == *:* ]] || rabbit_addr+=:5672
fi
if [[ -n $given_mysql ]]; then mysql_addr=$(sed -E 's#^.*@tcp\(([^)]*)\)/[^/]*$#\1#' <<<"$given_mysql"); fi
use redis "$redis_addr" "$given_redis"
use rabbitmq "$rabbit_addr" "$given_rabbit"
use mysql "$mysql_addr" "$given_mysql"

# --- world 2: docker compose -----------------------------------------------------------------------

with_compose() {
  say "starting with docker compose: $*"
  export SECKILL_UP_NAME=$name SECKILL_UP_PASSWORD=$password
  export REDIS_PORT=${redis_addr##*:} RABBITMQ_PORT=${rabbit_addr##*:} MYSQL_PORT=${mysql_addr##*:}
  # shellcheck disable=SC1091
  (. "$run/secrets" && cd "$root" && docker compose -p "$name" up -d --wait "$@") >&2
  printf '%s\n' "$@" >>"$run/compose"
  sort -u -o "$run/compose" "$run/compose"
}

# --- world 3: the distribution's packages, without systemd -----------------------------------------

install_packages() {
  local want
  read -r -a want <<<"$(absent "$@" | tr '\n' ' ')"
  [[ ${#want[@]} -gt 0 ]] || return 0
  say "installing the distribution's packages: ${want[*]}"
  export DEBIAN_FRONTEND=noninteractive
  # Packages start their servers themselves where an init system lets them; ours have their own data.
  local policy=/usr/sbin/policy-rc.d made=
  if [[ ! -e $policy ]]; then
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod 755 "$policy"
    made=1
  fi
  { apt-get update -qq && apt-get install -y -qq --no-install-recommends "${want[@]}"; } >"$run/log/apt.log" 2>&1 || {
    [[ -z $made ]] || rm -f "$policy"
    die "apt-get failed: $(tail -n 3 "$run/log/apt.log")"
  }
  [[ -z $made ]] || rm -f "$policy"
}

start_redis() {
  mkdir -p "$run/redis"
  spawn redis redis-server --bind 127.0.0.1 --port "${redis_addr##*:}" --dir "$run/redis" \
    --appendonly yes --appendfsync everysec --maxmemory-policy noeviction --save ''
}

start_rabbitmq() {
  local d=$run/rabbitmq
  mkdir -p "$d"
  [[ -f $d/.erlang.cookie ]] || { (umask 377 && head -c 24 /dev/urandom | od -An -tx1 | tr -d ' \n' >"$d/.erlang.cookie"); }
  : >"$d/rabbitmq-env.conf"
  echo '[].' >"$d/enabled_plugins"
  printf 'listeners.tcp.local = 127.0.0.1:%s\nlog.file = false\nlog.console = true\n' "${rabbit_addr##*:}" >"$d/rabbitmq.conf"
  # The node's name stays with its data; ports are found anew, they may be taken meanwhile.
  [[ -f $d/node ]] || echo "$name-$$@localhost" >"$d/node"
  local epmd_port dist_port
  epmd_port=$(free_port) dist_port=$(free_port)
  cat >"$run/rabbitmqctl" <<END
#!/bin/sh
# rabbitmqctl for the broker that make up started
export HOME='$d' RABBITMQ_NODENAME='$(cat "$d/node")' RABBITMQ_CONF_ENV_FILE='$d/rabbitmq-env.conf' ERL_EPMD_PORT=$epmd_port
exec /usr/lib/rabbitmq/bin/rabbitmqctl "\$@"
END
  chmod 755 "$run/rabbitmqctl"
  spawn rabbitmq-epmd epmd -port "$epmd_port" -address 127.0.0.1
  wait_for 60 "the Erlang port mapper" listens "127.0.0.1:$epmd_port"
  # detached: the script becomes the Erlang machine in place of minding it, so signals reach the broker.
  spawn rabbitmq env HOME="$d" RABBITMQ_NODENAME="$(cat "$d/node")" RABBITMQ_CONF_ENV_FILE="$d/rabbitmq-env.conf" \
    RABBITMQ_CONFIG_FILE="$d/rabbitmq.conf" RABBITMQ_ENABLED_PLUGINS_FILE="$d/enabled_plugins" \
    RABBITMQ_MNESIA_BASE="$d/mnesia" RABBITMQ_LOG_BASE="$run/log" RABBITMQ_PID_FILE="$d/pid" RABBITMQ_DIST_PORT="$dist_port" \
    ERL_EPMD_PORT="$epmd_port" ERL_EPMD_ADDRESS=127.0.0.1 ERL_CRASH_DUMP=/dev/null \
    ERL_FLAGS='-kernel inet_dist_use_interface {127,0,0,1}' detached=true /usr/lib/rabbitmq/bin/rabbitmq-server
}

start_mysql() {
  local d=$run/mysql as=()
  [[ $(id -u) != 0 ]] || as=(--user=root) # it refuses to run as root unless told
  mkdir -p "$d"
  if [[ ! -d $d/data/mysql ]]; then
    mariadb-install-db --no-defaults "${as[@]}" --datadir="$d/data" --skip-test-db \
      --auth-root-authentication-method=socket >"$run/log/mysql-install.log" 2>&1 || die "mariadb-install-db failed, see $run/log/mysql-install.log"
  fi
  spawn mysql mariadbd --no-defaults "${as[@]}" --datadir="$d/data" --socket="$d/s" --pid-file="$d/pid" \
    --bind-address=127.0.0.1 --port="${mysql_addr##*:}" --skip-name-resolve --character-set-server=utf8mb4
}

if [[ ${#missing[@]} -gt 0 ]]; then
  if engine; then
    with_compose "${missing[@]}"
  elif packages; then
    install_packages "${missing[@]}"
    for s in "${missing[@]}"; do
      "start_$s"
      case $s in redis) a=$redis_addr ;; rabbitmq) a=$rabbit_addr ;; mysql) a=$mysql_addr ;; esac
      say "$s: $a, started from the distribution's package (data in $run/$s)"
    done
    wait_for 60 redis listens "$redis_addr"
    wait_for 180 mysql listens "$mysql_addr"
    wait_for 300 rabbitmq listens "$rabbit_addr"
  else
    die "nothing listens for: ${missing[*]}. Start them at redis $redis_addr, rabbitmq $rabbit_addr, mysql $mysql_addr, or start a Docker engine, or run this on Debian as root"
  fi
fi

# --- our own user, schema and vhost ----------------------------------------------------------------

mysql_as() { # user password args...; SQL on stdin
  local user=$1 pw=$2
  shift 2
  MYSQL_PWD=$pw "$(mysql_client)" --no-defaults --protocol=tcp -h "${mysql_addr%:*}" -P "${mysql_addr##*:}" -u "$user" \
    --connect-timeout=5 --batch --skip-column-names "$@"
}

setup_mysql() {
  local check="SELECT 1 FROM information_schema.schemata WHERE schema_name = '$name'; CREATE DATABASE \`t_up_check_$$\`; DROP DATABASE \`t_up_check_$$\`"
  if [[ $(mysql_as "$name" "$password" <<<"$check" 2>/dev/null) == 1 ]]; then return; fi
  # Tests make schemas of their own, all named t_<something>.
  local sql="
    CREATE DATABASE IF NOT EXISTS \`$name\` CHARACTER SET utf8mb4;
    CREATE USER IF NOT EXISTS '$name'@'%' IDENTIFIED BY '$password';
    CREATE USER IF NOT EXISTS '$name'@'localhost' IDENTIFIED BY '$password';
    ALTER USER '$name'@'%' IDENTIFIED BY '$password';
    ALTER USER '$name'@'localhost' IDENTIFIED BY '$password';
    GRANT ALL ON \`$name\`.* TO '$name'@'%'; GRANT ALL ON \`$name\`.* TO '$name'@'localhost';
    GRANT ALL ON \`t\\_%\`.* TO '$name'@'%'; GRANT ALL ON \`t\\_%\`.* TO '$name'@'localhost';"
  local err
  if err=$(mysql_as root "${SECKILL_UP_MYSQL_ROOT_PASSWORD:-}" <<<"$sql" 2>&1); then :
  elif [[ -S $run/mysql/s ]] && alive mysql && err=$("$(mysql_client)" --no-defaults --socket="$run/mysql/s" -u root <<<"$sql" 2>&1); then :
  elif [[ ${mysql_addr%:*} == 127.0.0.1 && -S /run/mysqld/mysqld.sock ]] && err=$("$(mysql_client)" --no-defaults --socket=/run/mysqld/mysqld.sock -u root <<<"$sql" 2>&1); then :
  else
    die "mysql at $mysql_addr does not let root in ($err). Set SECKILL_UP_MYSQL_ROOT_PASSWORD, or run this there:${sql//$password/<password>}"
  fi
  mysql_as "$name" "$password" <<<"SELECT 1" >/dev/null || die "mysql at $mysql_addr does not know the user that was just made: root was let in somewhere else"
  say "mysql: user and schema $name are there"
}

rabbit_ctl() {
  if [[ -x $run/rabbitmqctl ]] && alive rabbitmq; then echo "$run/rabbitmqctl"
  elif command -v rabbitmqctl >/dev/null; then command -v rabbitmqctl
  fi
}

setup_rabbitmq() {
  local ctl api=${SECKILL_UP_RABBITMQ_API:-}
  ctl=$(rabbit_ctl)
  if [[ -f $run/compose ]] && grep -qx rabbitmq "$run/compose"; then
    test_rabbit=(SECKILL_TEST_RABBITMQ_API "http://$name:$password@${rabbit_addr%:*}:15672")
    return # its image makes user and vhost
  fi
  if [[ -n $api ]]; then
    local base=${api%/}
    api_put() { curl -fsS -o /dev/null -X PUT -H 'content-type: application/json' -d "$2" "$base$1" || die "rabbitmq: management API refused $1"; }
    api_put "/api/vhosts/$name" '{}'
    api_put "/api/users/$name" "{\"password\":\"$password\",\"tags\":\"administrator\"}"
    api_put "/api/permissions/$name/$name" '{"configure":".*","write":".*","read":".*"}'
    test_rabbit=(SECKILL_TEST_RABBITMQ_API "$base")
  elif [[ -n $ctl ]]; then
    wait_for 180 rabbitmq "$ctl" --quiet await_startup
    # One call for all of it: each start of rabbitmqctl costs a second.
    local out
    out=$("$ctl" --quiet eval "
      Ports = [P || {listener, _, amqp, _, _, P, _} <- rabbit_networking:active_listeners()],
      case lists:member(${rabbit_addr##*:}, Ports) of false -> throw({this_node_listens_at, Ports}); true -> ok end,
      V = <<\"$name\">>, P = <<\"$password\">>, By = <<\"make up\">>,
      case rabbit_vhost:exists(V) of true -> ok; false -> ok = rabbit_vhost:add(V, By) end,
      case rabbit_auth_backend_internal:exists(V) of
        true -> rabbit_auth_backend_internal:change_password(V, P, By);
        false -> rabbit_auth_backend_internal:add_user(V, P, By) end,
      rabbit_auth_backend_internal:set_permissions(V, V, <<\".*\">>, <<\".*\">>, <<\".*\">>, By), done." 2>&1) ||
      die "rabbitmq at $rabbit_addr: $out"
    [[ $out == *done* ]] || die "rabbitmq at $rabbit_addr: $out"
    test_rabbit=(SECKILL_TEST_RABBITMQCTL "$ctl")
  else
    die "rabbitmq at $rabbit_addr: neither rabbitmqctl is here nor is SECKILL_UP_RABBITMQ_API set (http://user:password@host:15672)"
  fi
  say "rabbitmq: user and vhost $name are there"
}

test_rabbit=()
[[ -n $given_mysql ]] || setup_mysql
[[ -n $given_rabbit ]] || setup_rabbitmq

if command -v redis-cli >/dev/null; then
  policy=$(redis-cli -h "${redis_addr%:*}" -p "${redis_addr##*:}" config get maxmemory-policy 2>/dev/null | tail -n 1)
  aof=$(redis-cli -h "${redis_addr%:*}" -p "${redis_addr##*:}" config get appendonly 2>/dev/null | tail -n 1)
  [[ $policy == noeviction || -z $policy ]] || say "note: redis evicts keys ($policy); in production it must not (noeviction)"
  [[ $aof != no ]] || say "note: redis keeps no append-only file; a crash of it loses reservations that are not in MySQL yet"
fi

# --- what programs and tests read ------------------------------------------------------------------

(
  umask 077
  put() { printf 'export %s=%q\n' "$1" "$2"; }
  {
    echo "# written by make up"
    put SECKILL_REDIS_ADDRS "${given_redis:-$redis_addr}"
    [[ $name == seckill ]] || put SECKILL_REDIS_PREFIX "$name:"
    put SECKILL_RABBITMQ_URL "${given_rabbit:-amqp://$name:$password@$rabbit_addr/$name}"
    put SECKILL_MYSQL_DSN "${given_mysql:-$name:$password@tcp($mysql_addr)/$name}"
    put SECKILLCTL_TOKEN_FILE "$run/admin-token"
    cat "$run/secrets"
    # Tests may be pointed elsewhere; what is set from outside stays.
    put_test() { printf 'export %s=${%s:-%q}\n' "$1" "$1" "$2"; }
    put_test SECKILL_TEST_REDIS_ADDR "$redis_addr"
    [[ -n $given_rabbit ]] || put_test SECKILL_TEST_RABBITMQ_URL "amqp://$name:$password@$rabbit_addr/"
    [[ ${#test_rabbit[@]} == 0 ]] || put_test "${test_rabbit[@]}"
    [[ -n $given_mysql ]] || put_test SECKILL_TEST_MYSQL_DSN "$name:$password@tcp($mysql_addr)/"
  } >"$run/env.new"
  mv "$run/env.new" "$run/env"
)
say "up: redis $redis_addr, rabbitmq $rabbit_addr (vhost $name), mysql $mysql_addr (schema $name)"
