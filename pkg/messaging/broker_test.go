package messaging

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"testing"
	"time"

	"seckill/pkg/testkit"
)

// Cases that stop, starve or reconfigure a broker share a private one.
func TestBrokerThatMisbehaves(t *testing.T) {
	t.Parallel()
	ca, cert, key := certificate(t)
	tlsPort := testkit.FreePort(t)
	srv := testkit.StartRabbitMQ(t, fmt.Sprintf("listeners.ssl.local = 127.0.0.1:%d", tlsPort),
		"ssl_options.cacertfile = "+ca, "ssl_options.certfile = "+cert, "ssl_options.keyfile = "+key)
	ctl := func(t *testing.T, args ...string) {
		t.Helper()
		if out, err := srv.Ctl(args...); err != nil {
			t.Fatal(err, out)
		}
	}
	cfg := quick(srv.URL)
	ctl(t, "eval", "application:set_env(rabbit, channel_tick_interval, 500).")

	t.Run("over TLS", func(t *testing.T) {
		over := cfg
		over.URL = fmt.Sprintf("amqps://guest:guest@127.0.0.1:%d/?cacertfile=%s&server_name_indication=broker.test", tlsPort, ca)
		c := declared(t, over)
		must(t, c.Publish(t.Context(), ExchangeDead, reserved1(1)))
		over.URL = fmt.Sprintf("amqps://guest:guest@127.0.0.1:%d/", tlsPort) // a certificate nobody vouches for
		if err := start(t, over).Declare(within(t, time.Second)); !errors.Is(err, ErrNotConnected) {
			t.Errorf("unknown authority: %v", err)
		}
	})

	// O21: under an alarm Send ends at once, consumers go on, Close ends in time, and all is well after.
	t.Run("blocked", func(t *testing.T) {
		cfg := cfg
		cfg.ConfirmTimeout = time.Second
		c := declared(t, cfg)
		closing := start(t, cfg)
		ready(t, closing)
		a := newAdmin(t, srv.URL)
		var l ledger
		stop := consume(t, c, ConsumerConfig{Queue: QueuePayments}, func(_ context.Context, b []Delivery) []Result {
			l.add(b)
			return done(len(b))
		})
		up(t, c, 1)
		paid := OrderPaid(Payment{OrderID: anOrder(1).ID, TransactionID: "t1", AmountMinor: 1, Currency: "CNY", ReceivedAt: at(0)})
		ctl(t, "eval", "vm_memory_monitor:set_vm_memory_high_watermark(0.0000001), rabbit_alarm:set_alarm({{resource_limit, memory, node()}, []}).")
		// The broker tells a connection only when it publishes.
		large := reserved1(1)
		large.Body = make([]byte, 1<<20)
		for _, x := range []*Client{c, closing} {
			p := x.Send(t.Context(), ExchangeEvents, reserved1(1))
			testkit.Eventually(t, patience, func() error {
				if s := x.State(); !s.Blocked || s.BlockedReason == "" || !s.Connected {
					return errorf("not blocked: %+v", s)
				}
				return nil
			})
			if err := p.Wait(within(t, 5*time.Second)); !errors.Is(err, ErrUnknownOutcome) || errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("first publish: %v", err)
			}
		}
		before := runtime.NumGoroutine() // of the tests beside this one, too
		began := time.Now()
		for i := range 5000 {
			p := c.Send(t.Context(), ExchangeEvents, large)
			if i%100 == 0 {
				if err := p.Wait(t.Context()); !errors.Is(err, ErrBlocked) {
					t.Fatalf("send %d: %v", i, err)
				}
			}
		}
		if d := time.Since(began); d > 2*time.Second {
			t.Errorf("5000 sends took %s", d)
		}
		if n := runtime.NumGoroutine(); n > before+20 {
			t.Errorf("%d goroutines, %d before", n, before)
		}
		// Writes that do fill the socket: a third client learns of the block only by them.
		third := start(t, cfg)
		ready(t, third)
		began = time.Now()
		var pending []*Pending
		for range 50 {
			pending = append(pending, third.Send(t.Context(), ExchangeEvents, large))
		}
		for _, p := range pending {
			if err := p.Wait(within(t, 4*time.Second)); err == nil || errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("large publish: %v", err)
			}
		}
		if d := time.Since(began); d > 3*time.Second {
			t.Errorf("outcomes took %s", d)
		}
		for _, x := range []*Client{closing, third} {
			began = time.Now()
			_ = x.Close(within(t, time.Second))
			if d := time.Since(began); d > 1500*time.Millisecond {
				t.Errorf("close took %s", d)
			}
		}
		ctl(t, "eval", "rabbit_alarm:clear_alarm({resource_limit, memory, node()}), vm_memory_monitor:set_vm_memory_high_watermark(0.4).")
		testkit.Eventually(t, patience, func() error {
			if s := c.State(); s.Blocked {
				return errorf("still blocked: %+v", s)
			}
			return nil
		})
		ready(t, c)
		testkit.Eventually(t, patience, func() error {
			return errors.Join(c.Publish(t.Context(), ExchangeEvents, reserved1(2), paid)...)
		})
		testkit.Eventually(t, patience, func() error {
			if len(l.seen()) == 0 {
				return errors.New("payment not handled")
			}
			return nil
		})
		if err := stop(); err != nil {
			t.Error(err)
		}
		if n := a.depth(QueueOrders); n < 1 {
			t.Errorf("%d orders", n)
		}
		purge(a, QueueOrders)
	})

	// O15 c: the broker ends a channel whose delivery is not acknowledged in time; health turns red, the
	// message comes again on a new channel, and the late ack harms nobody.
	t.Run("consumer time-out", func(t *testing.T) {
		ctl(t, "eval", "application:set_env(rabbit, consumer_timeout, 3000).")
		defer ctl(t, "eval", "application:set_env(rabbit, consumer_timeout, 1800000).")
		c := declared(t, cfg)
		a := newAdmin(t, srv.URL)
		var l ledger
		stop := consume(t, c, ConsumerConfig{Queue: QueueOrders}, func(ctx context.Context, b []Delivery) []Result {
			first := len(l.seen()) == 0
			l.add(b)
			for first && c.State().ConsumersUp > 0 && ctx.Err() == nil {
				time.Sleep(5 * time.Millisecond)
			}
			return done(len(b))
		})
		up(t, c, 1)
		must(t, c.Publish(t.Context(), ExchangeEvents, reserved1(1), reserved1(2)))
		testkit.Eventually(t, patience, func() error {
			// An ack that is late on a slow machine makes more deliveries.
			if got := l.seen(); !slices.Contains(got, reserved1(2).ID) {
				return errorf("handled %v", got)
			}
			return nil
		})
		if d := l.deliveries()[1]; d.ID != reserved1(1).ID || !d.Redelivered || d.DeliveryCount < 1 {
			t.Errorf("second delivery %+v", d)
		}
		if err := stop(); err != nil {
			t.Error(err)
		}
		a.has(QueueOrders, 0)
	})

	// O15 a: all connections closed by the broker. O15 d: the broker restarted. What was confirmed is
	// there, consumption and publishing go on by themselves.
	for name, interrupt := range map[string]func(t *testing.T){
		"connections closed": func(t *testing.T) { ctl(t, "close_all_connections", "maintenance") },
		"killed and started": func(*testing.T) { srv.Kill(); srv.Restart() },
	} {
		t.Run(name, func(t *testing.T) {
			c := declared(t, cfg)
			must(t, c.Publish(t.Context(), ExchangeEvents, reserved1(1), reserved1(2), reserved1(3)))
			interrupt(t)
			ready(t, c)
			testkit.Eventually(t, patience, func() error {
				return errors.Join(c.Publish(t.Context(), ExchangeEvents, reserved1(4))...)
			})
			var l ledger
			stop := consume(t, c, ConsumerConfig{Queue: QueueOrders, BatchOrders: 2}, func(_ context.Context, b []Delivery) []Result {
				l.add(b)
				return done(len(b))
			})
			testkit.Eventually(t, patience, func() error {
				got := l.seen()
				for i := range 4 {
					if !slices.Contains(got, reserved1(i+1).ID) {
						return errorf("handled %v", got)
					}
				}
				return nil
			})
			if err := stop(); err != nil {
				t.Error(err)
			}
			if err := c.Close(within(t, patience)); err != nil {
				t.Error(err)
			}
		})
	}
}

// certificate makes an authority and a server certificate for broker.test.
func certificate(t *testing.T) (ca, cert, key string) {
	t.Helper()
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), DNSNames: []string{"broker.test"},
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &private.PublicKey, private)
	if err != nil {
		t.Fatal(err)
	}
	secret, err := x509.MarshalPKCS8PrivateKey(private)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	cert, key = filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	for path, block := range map[string]*pem.Block{cert: {Type: "CERTIFICATE", Bytes: der}, key: {Type: "PRIVATE KEY", Bytes: secret}} {
		if err := os.WriteFile(path, pem.EncodeToMemory(block), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return cert, cert, key
}
