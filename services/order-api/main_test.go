package main

import (
	"bytes"
	"context"
	"errors"
	"os/exec"
	"strings"
	"testing"
	"time"

	"seckill/pkg/testkit"
)

func TestMain(m *testing.M) { testkit.VerifyNoLeaks(m) }

const (
	secret  = "a-secret-of-at-least-thirty-two-bytes"
	webhook = "whsec_MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3"
)

func TestWhatIsWrongStopsTheStartWithOneLineThatHoldsNoSecret(t *testing.T) {
	for name, tc := range map[string]struct {
		env  map[string]string
		args []string
		says string
	}{
		"no secret":              {map[string]string{"SECKILL_AUTH_JWT_SECRET": ""}, nil, "jwt_secret"},
		"no broker":              {map[string]string{"SECKILL_RABBITMQ_URL": ""}, nil, "rabbitmq"},
		"no webhook":             {map[string]string{"SECKILL_PAYMENT_SECRETS": ""}, nil, "payment.secrets"},
		"a bad webhook":          {map[string]string{"SECKILL_PAYMENT_SECRETS": "whsec_short-" + secret}, nil, "payment.secrets"},
		"unknown flag":           {nil, []string{"--htp-addr=:1"}, "htp-addr"},
		"a bad time":             {map[string]string{"SECKILL_HTTP_READ_TIMEOUT": "soon"}, nil, "read_timeout"},
		"a port that is not one": {map[string]string{"SECKILL_HTTP_ADDR": "127.0.0.1:99999"}, nil, "http"},
	} {
		t.Run(name, func(t *testing.T) {
			environment(t)
			for k, v := range tc.env {
				t.Setenv(k, v)
			}
			var out, errs bytes.Buffer
			ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
			defer cancel()
			if code := run(ctx, tc.args, &out, &errs); code != 1 {
				t.Errorf("exit code %d", code)
			}
			said := errs.String()
			if !strings.Contains(said, tc.says) || strings.Count(strings.TrimSpace(said), "\n") != 0 {
				t.Errorf("said %q", said)
			}
			if strings.Contains(said, secret) || strings.Contains(said, "hunter2") {
				t.Errorf("a secret shows: %q", said)
			}
		})
	}
}

func environment(t *testing.T) {
	t.Helper()
	for k, v := range map[string]string{
		"SECKILL_AUTH_JWT_SECRET": secret, "SECKILL_PAYMENT_SECRETS": webhook,
		"SECKILL_RABBITMQ_URL": "amqp://guest:hunter2@127.0.0.1:1/", "SECKILL_REDIS_ADDRS": "127.0.0.1:1",
		"SECKILL_REDIS_PASSWORD": "hunter2", "SECKILL_HTTP_ADDR": "127.0.0.1:0", "SECKILL_METRICS_ADDR": "127.0.0.1:0",
	} {
		t.Setenv(k, v)
	}
}

func TestPrintedSettingsHoldNoSecret(t *testing.T) {
	environment(t)
	var out, errs bytes.Buffer
	if code := run(context.Background(), []string{"--print-config"}, &out, &errs); code != 0 {
		t.Fatalf("exit code %d: %s", code, &errs)
	}
	for _, s := range []string{secret, webhook, "hunter2"} {
		if strings.Contains(out.String()+errs.String(), s) {
			t.Errorf("%q shows in\n%s", s, &out)
		}
	}
	for _, s := range []string{"redis_timeout: 1s", "handoff_queue: 8192", "127.0.0.1:0"} {
		if !strings.Contains(out.String(), s) {
			t.Errorf("%q is not in\n%s", s, &out)
		}
	}
}

// With every store away the process starts, is alive and not ready, and stops with 0.
func TestItStartsAndStopsWithEveryStoreAway(t *testing.T) {
	environment(t)
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	var out, errs syncBuffer
	done := make(chan int, 1)
	go func() { done <- run(ctx, nil, &out, &errs) }()
	testkit.Eventually(t, 20*time.Second, func() error {
		if !strings.Contains(errs.String(), "order-api is serving") {
			return errors.New(errs.String())
		}
		return nil
	})
	cancel()
	select {
	case code := <-done:
		if code != 0 {
			t.Errorf("exit code %d: %s", code, errs.String())
		}
	case <-time.After(30 * time.Second):
		t.Fatal("does not stop")
	}
	if strings.Contains(errs.String(), "hunter2") {
		t.Errorf("a secret shows: %s", errs.String())
	}
}

// order-api never opens a connection to a database: nothing in its module graph could.
func TestTheModuleGraphHoldsNoDatabaseCode(t *testing.T) {
	cmd := exec.Command("go", "list", "-m", "all")
	cmd.Env = append(cmd.Environ(), "GOWORK=off") // in the workspace the graph is everybody's
	text, err := cmd.Output()
	if err != nil {
		t.Fatalf("list modules: %v", err)
	}
	for line := range strings.Lines(string(text)) {
		m := strings.TrimSpace(line)
		for _, bad := range []string{"gorm.io", "go-sql-driver", "golang-migrate", "sqlite", "seckill/services/order-worker"} {
			if strings.Contains(m, bad) {
				t.Errorf("%s is in the graph", m)
			}
		}
	}
}
