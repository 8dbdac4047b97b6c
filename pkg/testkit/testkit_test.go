package testkit

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	urlpkg "net/url"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
)

func TestMain(m *testing.M) { VerifyNoLeaks(m) }

func TestRedisKeysOfATestAreGoneAfterIt(t *testing.T) {
	var e RedisEnv
	ctx := context.Background()
	t.Run("inner", func(t *testing.T) {
		e = Redis(t)
		c := redis.NewClient(&redis.Options{Addr: e.Addr, DB: e.DB})
		defer func() { _ = c.Close() }()
		for i := range 1500 {
			if err := c.Set(ctx, fmt.Sprintf("%sk%d", e.Prefix, i), "v", time.Minute).Err(); err != nil {
				t.Fatal(err)
			}
		}
	})
	c := redis.NewClient(&redis.Options{Addr: e.Addr, DB: e.DB})
	defer func() { _ = c.Close() }()
	left, err := c.Keys(ctx, e.Prefix+"*").Result()
	if err != nil || len(left) != 0 {
		t.Errorf("left: %v %v", left, err)
	}
}

func TestVhostOfATestIsUsableAndGoneAfterIt(t *testing.T) {
	var url string
	t.Run("inner", func(t *testing.T) {
		url = RabbitMQ(t)
		if !strings.Contains(url, "/t") {
			t.Errorf("no vhost in %s", url)
		}
	})
	t.Setenv("SECKILL_TEST_RABBITMQ_API", "")
	u, err := urlpkg.Parse(url)
	if err != nil {
		t.Fatal(err)
	}
	admin, err := newVhostAdmin(u)
	if err != nil {
		t.Fatal(err)
	}
	vhost := url[strings.LastIndex(url, "/")+1:]
	if err := admin.eval(`false = rabbit_vhost:exists(<<"` + vhost + `">>).`); err != nil {
		t.Error(err)
	}
}

func TestSchemaOfATestIsGoneAfterIt(t *testing.T) {
	var dsn string
	t.Run("inner", func(t *testing.T) { dsn = MySQL(t) })
	target, err := parseDSN(dsn)
	if err != nil {
		t.Fatal(err)
	}
	out, err := target.exec("SHOW DATABASES LIKE '" + dsn[strings.LastIndex(dsn, "/")+1:] + "'")
	if err != nil || out != "" {
		t.Errorf("left: %q %v", out, err)
	}
}

func TestPrivateRedisIsKilledRestartedAndKeepsItsFile(t *testing.T) {
	s := StartRedis(t, "--appendonly", "yes", "--appendfsync", "always")
	c := redis.NewClient(&redis.Options{Addr: s.Addr})
	defer func() { _ = c.Close() }()
	ctx := context.Background()
	if err := c.Set(ctx, "k", "v", 0).Err(); err != nil {
		t.Fatal(err)
	}
	first := s.PID
	s.Kill()
	if err := syscall.Kill(first, 0); !errors.Is(err, syscall.ESRCH) {
		t.Errorf("process is still there: %v", err)
	}
	s.Restart()
	if s.PID == first {
		t.Error("same process")
	}
	if got, err := c.Get(ctx, "k").Result(); err != nil || got != "v" {
		t.Errorf("after restart: %q %v", got, err)
	}
	s.Pause()
	short, cancel := context.WithTimeout(ctx, 100*time.Millisecond)
	defer cancel()
	if err := c.Get(short, "k").Err(); err == nil {
		t.Error("a frozen server answered")
	}
	s.Resume()
	Eventually(t, time.Minute, func() error { return c.Get(ctx, "k").Err() })
}

func TestPrivateMySQLRunsStatementsAndSurvivesAKill(t *testing.T) {
	m := StartMySQL(t, "--max-connections=20")
	m.DSN("shop")
	if _, err := m.Exec("CREATE TABLE shop.t (a INT) ENGINE=InnoDB; INSERT INTO shop.t VALUES (7)"); err != nil {
		t.Fatal(err)
	}
	m.Kill()
	m.Restart()
	out, err := m.Exec("SELECT a, @@max_connections FROM shop.t")
	if err != nil || out != "7\t20\n" {
		t.Errorf("got %q %v", out, err)
	}
}

func TestPrivateRabbitMQHasItsOwnNodeAndLeavesNoProcess(t *testing.T) {
	var pids []int
	t.Run("inner", func(t *testing.T) {
		r := StartRabbitMQ(t, "vm_memory_high_watermark.relative = 0.3")
		if out, err := r.Ctl("eval", "node()."); err != nil || !strings.Contains(out, "@localhost") {
			t.Fatalf("node: %q %v", out, err)
		}
		if _, err := r.Ctl("add_vhost", "x"); err != nil {
			t.Fatal(err)
		}
		r.Kill()
		r.Restart()
		if out, err := r.Ctl("list_vhosts"); err != nil || !strings.Contains(out, "x\n") {
			t.Errorf("after restart: %q %v", out, err)
		}
		pids = groupMembers(t, r.Dir)
		if len(pids) == 0 {
			t.Error("no process seen")
		}
		r.Stop()
	})
	Eventually(t, time.Minute, func() error {
		for _, pid := range pids {
			if syscall.Kill(pid, 0) == nil {
				return fmt.Errorf("process %d is still there", pid)
			}
		}
		return nil
	})
}

func TestVhostIsMadeThroughTheManagementAPI(t *testing.T) {
	r := StartRabbitMQ(t)
	port := FreePort(t)
	write(t, filepath.Join(r.Dir, "enabled_plugins"), "[rabbitmq_management].\n", 0o600)
	conf, err := os.ReadFile(filepath.Join(r.Dir, "rabbitmq.conf"))
	if err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(r.Dir, "rabbitmq.conf"),
		fmt.Sprintf("%smanagement.tcp.ip = 127.0.0.1\nmanagement.tcp.port = %d\n", conf, port), 0o600)
	r.Restart()
	t.Setenv("SECKILL_TEST_RABBITMQ_URL", r.URL)
	t.Setenv("SECKILL_TEST_RABBITMQ_API", fmt.Sprintf("http://127.0.0.1:%d", port))
	t.Setenv("SECKILL_TEST_RABBITMQCTL", "/nowhere/rabbitmqctl")
	t.Run("inner", func(t *testing.T) {
		url := RabbitMQ(t)
		out, err := r.Ctl("list_permissions", "-p", url[strings.LastIndex(url, "/")+1:])
		if err != nil || !strings.Contains(out, "guest") {
			t.Errorf("permissions in the new vhost: %q %v", out, err)
		}
	})
	if out, err := r.Ctl("list_vhosts"); err != nil || strings.TrimSpace(strings.TrimPrefix(out, "name\n")) != "/" {
		t.Errorf("left: %q %v", out, err)
	}
}

// groupMembers finds the processes that were given a directory, by their environment.
func groupMembers(t *testing.T, dir string) []int {
	t.Helper()
	entries, err := os.ReadDir("/proc")
	if err != nil {
		t.Fatal(err)
	}
	var pids []int
	for _, e := range entries {
		b, err := os.ReadFile("/proc/" + e.Name() + "/environ")
		if err == nil && strings.Contains(string(b), dir) {
			var pid int
			if _, err := fmt.Sscan(e.Name(), &pid); err == nil {
				pids = append(pids, pid)
			}
		}
	}
	return pids
}

func TestProxyCutsStallsAndDropsReplies(t *testing.T) {
	echo, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan struct{})
	go func() {
		defer close(served)
		for {
			c, err := echo.Accept()
			if err != nil {
				return
			}
			go func() { _, _ = io.Copy(c, c); _ = c.Close() }()
		}
	}()
	defer func() { _ = echo.Close(); <-served }()
	p := NewProxy(t, echo.Addr().String())
	dial := func() *talker { return newTalker(t, p.Addr) }

	c := dial()
	c.want("a", "a")
	p.Stall()
	c.say("b")
	c.silent()
	p.Resume()
	c.hear("b")

	p.Cut()
	c.gone()
	dial().gone()
	p.Resume()
	d := dial()
	d.want("x", "x")

	p.DropReplies()
	d.say("lost")
	dropped(t, p)
	d.silent()
	p.Resume()
	d.gone()
	dial().want("y", "y")

	p.DropRepliesAfter("lose this")
	e, f := dial(), dial()
	e.want("e", "e")
	e.say("please lose this")
	dropped(t, p)
	e.silent()
	f.want("f", "f")
	p.Resume()
	e.gone()
	f.want("g", "g")
}

// dropped waits until the proxy has thrown a reply away: silence alone may mean that it was not there yet.
func dropped(t *testing.T, p *Proxy) {
	t.Helper()
	Eventually(t, time.Minute, func() error {
		p.mu.Lock()
		defer p.mu.Unlock()
		for c := range p.conns {
			if c.lossy {
				return nil
			}
		}
		return errors.New("no reply was dropped")
	})
}

type talker struct {
	t    *testing.T
	conn net.Conn
	r    *bufio.Reader
}

func newTalker(t *testing.T, addr string) *talker {
	t.Helper()
	c, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return &talker{t, c, bufio.NewReader(c)}
}

func (k *talker) say(s string) { _, _ = k.conn.Write([]byte(s + "\n")) }

func (k *talker) hear(s string) {
	k.t.Helper()
	_ = k.conn.SetReadDeadline(time.Now().Add(time.Minute))
	if got, err := k.r.ReadString('\n'); err != nil || got != s+"\n" {
		k.t.Errorf("got %q %v, want %q", got, err, s)
	}
}

func (k *talker) want(say, hear string) { k.t.Helper(); k.say(say); k.hear(hear) }

func (k *talker) silent() {
	k.t.Helper()
	_ = k.conn.SetReadDeadline(time.Now().Add(100 * time.Millisecond))
	if b, err := k.r.Peek(1); !errors.Is(err, os.ErrDeadlineExceeded) {
		k.t.Errorf("expected silence, got %q %v", b, err)
	}
}

func (k *talker) gone() {
	k.t.Helper()
	_ = k.conn.SetReadDeadline(time.Now().Add(time.Minute))
	if b, err := k.r.ReadByte(); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		k.t.Errorf("expected a closed connection, got %q %v", b, err)
	}
}

func TestDSNIsTakenApart(t *testing.T) {
	m, err := parseDSN("u:p@/:x@tcp(127.0.0.1:3307)/shop")
	if err != nil || m != (mysqlTarget{"u", "p@/:x", "127.0.0.1", "3307"}) {
		t.Errorf("%+v %v", m, err)
	}
	if got := m.dsn("other"); got != "u:p@/:x@tcp(127.0.0.1:3307)/other" {
		t.Error(got)
	}
	for _, bad := range []string{"", "tcp(x:1)/", "root@unix(/x)/", "root@tcp(x)/"} {
		if _, err := parseDSN(bad); err == nil {
			t.Errorf("%q accepted", bad)
		}
	}
}
