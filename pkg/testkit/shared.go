package testkit

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
)

// RedisEnv is a corner of the shared Redis: every key a test writes starts with Prefix.
type RedisEnv struct {
	Addr   string
	DB     int
	Prefix string
}

// Redis gives a prefix of its own on the shared server; what carries it is deleted at cleanup.
func Redis(t testing.TB) RedisEnv {
	t.Helper()
	e := RedisEnv{
		Addr:   env("SECKILL_TEST_REDIS_ADDR", "127.0.0.1:6379"),
		Prefix: "t" + uniqueName() + ":",
	}
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	client := redis.NewClient(&redis.Options{Addr: e.Addr, DB: e.DB})
	defer func() { _ = client.Close() }()
	if err := client.Ping(ctx).Err(); err != nil {
		t.Fatalf("this test needs Redis at %s (SECKILL_TEST_REDIS_ADDR; `make up` starts one): %v", e.Addr, err)
	}
	t.Cleanup(func() {
		if err := deletePrefix(e); err != nil {
			t.Errorf("remove test keys %s*: %v", e.Prefix, err)
		}
	})
	return e
}

func deletePrefix(e RedisEnv) error {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	client := redis.NewClient(&redis.Options{Addr: e.Addr, DB: e.DB})
	defer func() { _ = client.Close() }()
	var cursor uint64
	for {
		keys, next, err := client.Scan(ctx, cursor, e.Prefix+"*", 1000).Result()
		if err != nil {
			return fmt.Errorf("scan: %w", err)
		}
		if len(keys) > 0 {
			if err := client.Unlink(ctx, keys...).Err(); err != nil {
				return fmt.Errorf("unlink: %w", err)
			}
		}
		if cursor = next; cursor == 0 {
			return nil
		}
	}
}

// RabbitMQ makes a vhost of its own on the shared broker and returns the URL that leads there; the
// vhost is deleted at cleanup.
func RabbitMQ(t testing.TB) string {
	t.Helper()
	base := env("SECKILL_TEST_RABBITMQ_URL", "amqp://guest:guest@127.0.0.1:5672/")
	u, err := url.Parse(base)
	if err != nil {
		t.Fatal("SECKILL_TEST_RABBITMQ_URL is not a URL") // its text may hold a password
	}
	vhost := "t" + uniqueName()
	admin, err := newVhostAdmin(u)
	if err != nil {
		t.Fatal(err)
	}
	if err := admin.create(vhost); err != nil {
		t.Fatalf("this test needs a vhost of its own on RabbitMQ at %s (SECKILL_TEST_RABBITMQ_URL; `make up` starts one): %v", u.Host, err)
	}
	t.Cleanup(func() {
		if err := admin.remove(vhost); err != nil {
			t.Errorf("remove vhost %s: %v", vhost, err)
		}
	})
	u.Path = "/" + vhost
	return u.String()
}

// vhostAdmin makes and removes vhosts in one of two ways: the management API or rabbitmqctl.
type vhostAdmin struct {
	user string
	api  *url.URL
	ctl  []string
}

func newVhostAdmin(broker *url.URL) (*vhostAdmin, error) {
	a := &vhostAdmin{user: broker.User.Username()}
	if s := os.Getenv("SECKILL_TEST_RABBITMQ_API"); s != "" {
		u, err := url.Parse(s)
		if err != nil || u.Host == "" {
			return nil, errors.New("SECKILL_TEST_RABBITMQ_API is not a URL such as http://127.0.0.1:15672")
		}
		if u.User == nil {
			u.User = broker.User
		}
		a.api = u
		return a, nil
	}
	ctl := strings.Fields(env("SECKILL_TEST_RABBITMQCTL", "rabbitmqctl"))
	path, err := findProgram(ctl[0], "/usr/sbin/rabbitmqctl")
	if err != nil {
		return nil, errors.New("this test needs a RabbitMQ vhost of its own: neither rabbitmqctl is on this machine nor does SECKILL_TEST_RABBITMQ_API name a management API")
	}
	a.ctl = append([]string{path}, ctl[1:]...)
	return a, nil
}

func (a *vhostAdmin) create(vhost string) error {
	if a.api != nil {
		if err := a.call(http.MethodPut, "/api/vhosts/"+vhost, "{}"); err != nil {
			return err
		}
		return a.call(http.MethodPut, "/api/permissions/"+vhost+"/"+url.PathEscape(a.user), `{"configure":".*","write":".*","read":".*"}`)
	}
	// One eval in place of add_vhost and set_permissions: each start of rabbitmqctl costs a second.
	return a.eval(fmt.Sprintf(`V = <<"%s">>, ok = rabbit_vhost:add(V, <<"testkit">>), `+
		`ok = rabbit_auth_backend_internal:set_permissions(<<"%s">>, V, <<".*">>, <<".*">>, <<".*">>, <<"testkit">>).`, vhost, a.user))
}

func (a *vhostAdmin) remove(vhost string) error {
	if a.api != nil {
		return a.call(http.MethodDelete, "/api/vhosts/"+vhost, "")
	}
	return a.eval(fmt.Sprintf(`rabbit_vhost:delete(<<"%s">>, <<"testkit">>), false = rabbit_vhost:exists(<<"%s">>).`, vhost, vhost))
}

func (a *vhostAdmin) eval(expr string) error {
	ctx, cancel := context.WithTimeout(context.Background(), ctlTime)
	defer cancel()
	args := append(append([]string{}, a.ctl[1:]...), "eval", expr)
	out, err := exec.CommandContext(ctx, a.ctl[0], args...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("rabbitmqctl eval: %w: %s", err, bytes.TrimSpace(out))
	}
	return nil
}

func (a *vhostAdmin) call(method, path, body string) error {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	u := *a.api
	u.Path = strings.TrimSuffix(u.Path, "/") + path
	user := u.User
	u.User = nil
	req, err := http.NewRequestWithContext(ctx, method, u.String(), strings.NewReader(body))
	if err != nil {
		return fmt.Errorf("management API: %w", err)
	}
	password, _ := user.Password()
	req.SetBasicAuth(user.Username(), password)
	req.Header.Set("Content-Type", "application/json")
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Do(req)
	if err != nil {
		return fmt.Errorf("management API: %w", err)
	}
	defer func() { _ = resp.Body.Close() }()
	text, _ := io.ReadAll(io.LimitReader(resp.Body, 500))
	if resp.StatusCode/100 != 2 {
		return fmt.Errorf("management API: %s %s: %s %s", method, path, resp.Status, bytes.TrimSpace(text))
	}
	return nil
}

// MySQL makes a schema of its own on the shared server and returns its DSN in the form of
// go-sql-driver/mysql, without parameters; the schema is dropped at cleanup. MariaDB will do.
func MySQL(t testing.TB) string {
	t.Helper()
	dsn := env("SECKILL_TEST_MYSQL_DSN", "root@tcp(127.0.0.1:3306)/")
	target, err := parseDSN(dsn)
	if err != nil {
		t.Fatalf("SECKILL_TEST_MYSQL_DSN: %v", err)
	}
	schema := "t_" + uniqueName()
	if _, err := target.exec("CREATE DATABASE `" + schema + "` CHARACTER SET utf8mb4"); err != nil {
		t.Fatalf("this test needs MySQL or MariaDB at %s:%s (SECKILL_TEST_MYSQL_DSN; `make up` starts one): %v", target.host, target.port, err)
	}
	t.Cleanup(func() {
		if _, err := target.exec("SET lock_wait_timeout=30; DROP DATABASE IF EXISTS `" + schema + "`"); err != nil {
			t.Errorf("drop schema %s: %v", schema, err)
		}
	})
	return target.dsn(schema)
}

// mysqlTarget is what the command line client needs; no driver belongs into this module's graph.
type mysqlTarget struct{ user, password, host, port string }

// parseDSN understands user[:password]@tcp(host:port)/[schema][?…], the part that tests need.
func parseDSN(dsn string) (mysqlTarget, error) {
	var m mysqlTarget
	slash := strings.LastIndex(dsn, "/")
	if slash < 0 {
		return m, errors.New("no slash before the schema name")
	}
	at := strings.LastIndex(dsn[:slash], "@")
	if at < 0 {
		return m, errors.New("no user (user:password@tcp(host:port)/)")
	}
	m.user, m.password, _ = strings.Cut(dsn[:at], ":")
	addr, ok := strings.CutPrefix(dsn[at+1:slash], "tcp(")
	addr, ok2 := strings.CutSuffix(addr, ")")
	colon := strings.LastIndex(addr, ":")
	if !ok || !ok2 || colon < 0 {
		return m, errors.New("address is not of the form tcp(host:port)")
	}
	m.host, m.port = addr[:colon], addr[colon+1:]
	return m, nil
}

func (m mysqlTarget) dsn(schema string) string {
	cred := m.user
	if m.password != "" {
		cred += ":" + m.password
	}
	return cred + "@tcp(" + m.host + ":" + m.port + ")/" + schema
}

// exec runs statements through the command line client and returns tab-separated rows without a header.
func (m mysqlTarget) exec(sql string) (string, error) {
	client, err := findProgram("mariadb", "mysql")
	if err != nil {
		return "", errors.New("neither the mariadb nor the mysql command line client is on this machine")
	}
	ctx, cancel := context.WithTimeout(context.Background(), ctlTime)
	defer cancel()
	cmd := exec.CommandContext(ctx, client, "--no-defaults", "--protocol=tcp", "-h", m.host, "-P", m.port, "-u", m.user,
		"--connect-timeout=10", "--batch", "--skip-column-names", "--default-character-set=utf8mb4")
	cmd.Env = append(os.Environ(), "MYSQL_PWD="+m.password)
	cmd.Stdin = strings.NewReader(sql)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return stdout.String(), fmt.Errorf("%w: %s", err, bytes.TrimSpace(stderr.Bytes()))
	}
	return stdout.String(), nil
}

// findProgram returns the first of the names that is a program, in PATH or as a path of its own.
func findProgram(names ...string) (string, error) {
	for _, n := range names {
		if p, err := exec.LookPath(n); err == nil {
			return p, nil
		}
	}
	return "", fmt.Errorf("none of %s found", strings.Join(names, ", "))
}
