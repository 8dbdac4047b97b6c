package app_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/rabbitmq/amqp091-go"

	"seckill/pkg/config"
	"seckill/pkg/lifecycle"
	"seckill/pkg/messaging"
	"seckill/pkg/order"
	"seckill/pkg/stock"
	"seckill/pkg/testkit"
	"seckill/services/order-worker/internal/admin"
	"seckill/services/order-worker/internal/app"
	"seckill/services/order-worker/internal/relay"
	"seckill/services/order-worker/internal/rollback"
	"seckill/services/order-worker/internal/store"
	"seckill/services/order-worker/internal/workertest"
)

// services is where a test's workers run.
type services struct {
	redis testkit.RedisEnv
	url   string
	dsn   string
}

func (s services) config(roles ...string) app.Config {
	return app.Config{
		Metrics: app.MetricsConfig{Addr: "127.0.0.1:0"}, Admin: app.AdminConfig{Addr: "127.0.0.1:0", Tokens: []config.Secret{config.Secret("tester:operator:" + admin.HashToken("secret"))}},
		Redis: stock.Config{Addrs: []string{s.redis.Addr}, DB: s.redis.DB, Prefix: s.redis.Prefix, ReadTimeout: 5 * time.Second}, RabbitMQ: messaging.Config{URL: s.url}, MySQL: store.Config{DSN: s.dsn},
		Worker: app.WorkerConfig{Roles: roles},
		Relay:  relay.Config{Interval: 50 * time.Millisecond, Age: 300 * time.Millisecond},
		Sweep:  rollback.SweepConfig{Interval: 100 * time.Millisecond, Grace: 500 * time.Millisecond},
	}
}

// start runs a worker; stop ends it and gives its exit code.
func start(t *testing.T, cfg app.Config) (a *app.App, stop func() int) {
	t.Helper()
	a, err := app.New(t.Context(), cfg, testkit.Logger(t))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	code := make(chan int, 1)
	go func() { code <- a.Run(ctx) }()
	var once sync.Once
	var got int
	stop = func() int {
		once.Do(func() { cancel(); got = <-code })
		return got
	}
	t.Cleanup(func() { stop() })
	return a, stop
}

func fetch(t *testing.T, url string) (int, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer secret")
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: 30 * time.Second}
	resp, err := client.Do(req)
	if err != nil {
		return 0, err.Error()
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(body)
}

func ready(t *testing.T, a *app.App) {
	t.Helper()
	testkit.Eventually(t, time.Minute, func() error {
		if code, body := fetch(t, "http://"+a.MetricsAddr()+"/readyz"); code != http.StatusOK {
			return fmt.Errorf("readyz: %d %s", code, body)
		}
		return nil
	})
}

// The whole way through one process: what was reserved but never published (C1) is relayed, written,
// and, unpaid, taken back by its delay queue; lost delays (C10, O19) are swept. Then a clean stop.
func TestWorkerCarriesOrdersFromTheOutboxToTheirEndAndStopsInOrder(t *testing.T) {
	s := services{testkit.Redis(t), testkit.RabbitMQ(t), testkit.MySQL(t)}
	a, stop := start(t, s.config())
	ready(t, a)
	b := workertest.New(t, workertest.Options{DSN: s.dsn, BrokerURL: s.url, Redis: &s.redis})
	sale := b.Open(t, 50, workertest.Timeout("1s"))
	orders := sale.Buyers(40)
	testkit.Eventually(t, time.Minute, func() error {
		if n := b.Int(t, "SELECT COUNT(*) FROM orders WHERE activity_id=? AND status='cancelled' AND reason='payment_timeout'", sale.ID); n != len(orders) {
			return fmt.Errorf("%d of %d orders are cancelled", n, len(orders))
		}
		if n := sale.Left(workertest.Pool); n != 50 {
			return fmt.Errorf("%d left", n)
		}
		if n := b.Int(t, "SELECT COUNT(*) FROM compensations"); n != 0 {
			return fmt.Errorf("%d compensations", n)
		}
		return nil
	})
	sale.Balanced()
	for _, name := range []string{
		`seckill_orders_persisted_total{result="persisted"} 40`, "seckill_batch_orders_count", `seckill_rollbacks_total{reason="expired",result="done"}`,
		"seckill_rollback_lateness_seconds_count", "seckill_outbox_oldest_age_seconds 0", `seckill_drift_units{source="stock_guard"} 0`,
		`seckill_tx_retries_total{code="1213"}`, `go_sql_open_connections{db_name="mysql"}`, "seckill_amqp_connected", "seckill_dead_letters",
	} {
		testkit.Eventually(t, time.Minute, func() error { // some are measured now and then
			if _, metrics := fetch(t, "http://"+a.MetricsAddr()+"/metrics"); !strings.Contains(metrics, name) {
				return fmt.Errorf("metrics lack %s", name)
			}
			return nil
		})
	}
	if code, _ := fetch(t, "http://"+a.AdminAddr()+"/admin/v1/activities"); code != http.StatusOK {
		t.Errorf("admin API answers %d", code)
	}
	if code := stop(); code != lifecycle.ExitOK {
		t.Errorf("exit code %d", code)
	}
}

// O13: a queue that is there with other arguments ends the start with one clear line, and stays.
func TestQueueWithOtherArgumentsEndsTheStart(t *testing.T) {
	s := services{testkit.Redis(t), testkit.RabbitMQ(t), testkit.MySQL(t)}
	conn, err := amqp091.Dial(s.url)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	ch, err := conn.Channel()
	if err != nil {
		t.Fatal(err)
	}
	name := messaging.DelayExchange(5 * time.Second)
	if _, err := ch.QueueDeclare(name, true, false, false, false, amqp091.Table{"x-queue-type": "quorum", "x-message-ttl": 7000}); err != nil {
		t.Fatal(err)
	}
	var out safeBuffer
	a, err := app.New(t.Context(), s.config(), slog.New(slog.NewJSONHandler(&out, nil)))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if code := a.Run(ctx); code != lifecycle.ExitFailed || ctx.Err() != nil {
		t.Errorf("exit code %d, %v", code, ctx.Err())
	}
	if text := out.String(); !strings.Contains(text, name) || !strings.Contains(text, "wanted") {
		t.Errorf("the log does not name queue and wanted value:\n%s", text)
	}
	if _, err := ch.QueueDeclarePassive(name, true, false, false, false, nil); err != nil {
		t.Errorf("queue is gone: %v", err)
	}
}

// Redis that evicts would forget sales: the start warns (O10).
func TestStartWarnsOfARedisThatEvicts(t *testing.T) {
	redis := testkit.StartRedis(t, "--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru")
	s := services{testkit.RedisEnv{Addr: redis.Addr}, "amqp://guest:guest@127.0.0.1:1/", testkit.MySQL(t)}
	var out safeBuffer
	a, err := app.New(t.Context(), s.config(app.RoleScheduler), slog.New(slog.NewJSONHandler(&out, nil)))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	code := make(chan int, 1)
	go func() { code <- a.Run(ctx) }()
	testkit.Eventually(t, time.Minute, func() error {
		if !strings.Contains(out.String(), "allkeys-lru") {
			return fmt.Errorf("no warning in the log:\n%s", out.String())
		}
		return nil
	})
	// The broker cannot be reached: that is shown, and does not keep the worker from being ready.
	ready(t, a)
	_, body := fetch(t, "http://"+a.MetricsAddr()+"/readyz")
	var report lifecycle.Report
	if err := json.Unmarshal([]byte(body), &report); err != nil || report.Checks["broker"].OK {
		t.Errorf("readyz: %s (%v)", body, err)
	}
	cancel()
	if got := <-code; got != lifecycle.ExitOK {
		t.Errorf("exit code %d", got)
	}
}

type safeBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *safeBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p) //nolint:wrapcheck // a buffer
}

func (s *safeBuffer) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}

// Roles: two processes, each with a part of them, do the work of one; either can be restarted.
func TestRolesCanBeSplitAndRestarted(t *testing.T) {
	s := services{testkit.Redis(t), testkit.RabbitMQ(t), testkit.MySQL(t)}
	first, stopFirst := start(t, s.config(app.RoleOrders, app.RolePayments))
	second, stopSecond := start(t, s.config(app.RoleRollbacks, app.RoleRelay, app.RoleScheduler, app.RoleDeadLetters))
	ready(t, first)
	ready(t, second)
	if second.AdminAddr() != "" {
		t.Error("admin API without the role")
	}
	b := workertest.New(t, workertest.Options{DSN: s.dsn, BrokerURL: s.url, Redis: &s.redis})
	sale := b.Open(t, 10)
	orders := sale.Buyers(3)
	if code := stopFirst(); code != lifecycle.ExitOK {
		t.Errorf("exit code %d", code)
	}
	again, _ := start(t, s.config(app.RoleOrders, app.RolePayments))
	ready(t, again)
	for _, o := range orders {
		testkit.Eventually(t, time.Minute, func() error {
			if row := b.Row(t, o.ID); row == nil || row.Status != order.Pending || b.Record(t, o.ID).Status != order.Pending {
				return fmt.Errorf("%s: %+v", o.ID, row)
			}
			return nil
		})
	}
	if code := stopSecond(); code != lifecycle.ExitOK {
		t.Errorf("exit code %d", code)
	}
	sale.Balanced()
}

func TestConfigurationRefusesWhatCannotWork(t *testing.T) {
	s := services{testkit.RedisEnv{Addr: "127.0.0.1:1"}, "amqp://127.0.0.1:1/", "root@tcp(127.0.0.1:1)/x"}
	for name, change := range map[string]func(*app.Config){
		"unknown role":    func(c *app.Config) { c.Worker.Roles = []string{"cook"} },
		"no admin tokens": func(c *app.Config) { c.Admin.Tokens = nil },
		"no schema":       func(c *app.Config) { c.MySQL.DSN = "root:se?cr#t@tcp(127.0.0.1:3306)/" },
		"no dsn at all":   func(c *app.Config) { c.MySQL.DSN = "se?cr#t" },
		"batch of zero":   func(c *app.Config) { c.Worker.BatchOrders = -1 },
	} {
		cfg := s.config()
		change(&cfg)
		_, err := app.New(t.Context(), cfg, testkit.Logger(t))
		if err == nil {
			t.Errorf("%s: accepted", name)
		} else if strings.Contains(err.Error(), "se?cr") {
			t.Errorf("%s: the error shows a secret: %v", name, err)
		}
	}
}
