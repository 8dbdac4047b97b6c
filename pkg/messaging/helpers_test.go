package messaging

import (
	"context"
	"fmt"
	"net/url"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/oklog/ulid/v2"
	amqp "github.com/rabbitmq/amqp091-go"
	"go.uber.org/goleak"

	"seckill/pkg/order"
	"seckill/pkg/testkit"
)

// brokers are vhosts on the shared broker. Making and removing one costs seconds of rabbitmqctl, so
// the tests of this package hand them on, emptied.
var brokers struct {
	mu   sync.Mutex
	free []string
	packageTB
}

// packageTB lets testkit make something that lives as long as the package's tests.
type packageTB struct {
	testing.TB
	mu      sync.Mutex
	cleanup []func()
	failed  bool
}

func (p *packageTB) Helper() {}

func (p *packageTB) Cleanup(f func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.cleanup = append(p.cleanup, f)
}

func (p *packageTB) Errorf(format string, args ...any) {
	p.failed = true
	fmt.Fprintf(os.Stderr, format+"\n", args...)
}

func (p *packageTB) Fatal(args ...any)                 { panic(fmt.Sprint(args...)) }
func (p *packageTB) Fatalf(format string, args ...any) { panic(fmt.Sprintf(format, args...)) }

func TestMain(m *testing.M) {
	if url := os.Getenv(childURL); url != "" {
		dieBetweenCopyAndAck(url)
	}
	goleak.VerifyTestMain(m, goleak.Cleanup(func(code int) {
		for _, f := range slices.Backward(brokers.cleanup) {
			f()
		}
		if brokers.failed && code == 0 {
			code = 1
		}
		os.Exit(code)
	}))
}

// broker gives a test an empty vhost of its own.
func broker(t testing.TB) string {
	t.Helper()
	var url string
	brokers.mu.Lock()
	if n := len(brokers.free); n > 0 {
		url, brokers.free = brokers.free[n-1], brokers.free[:n-1]
	}
	brokers.mu.Unlock()
	if url == "" {
		url = testkit.RabbitMQ(&brokers.packageTB)
	}
	t.Cleanup(func() {
		conn, err := amqp.Dial(url)
		if err != nil {
			t.Error(err)
			return
		}
		defer func() { _ = conn.Close() }()
		ch, err := conn.Channel()
		if err != nil {
			t.Error(err)
			return
		}
		exchanges, queues, _ := layout([]time.Duration{time.Second, 3 * time.Second, 10 * time.Second})
		queues = append(queues, queue{name: "small"}, queue{name: "test.queue"})
		exchanges = append(exchanges, exchange{name: "test.exchange"})
		for _, q := range queues {
			_, err = ch.QueueDelete(q.name, false, false, false)
			if err != nil {
				t.Error(err)
				return
			}
		}
		for _, e := range exchanges {
			if err := ch.ExchangeDelete(e.name, false, false); err != nil {
				t.Error(err)
				return
			}
		}
		brokers.mu.Lock()
		defer brokers.mu.Unlock()
		brokers.free = append(brokers.free, url)
	})
	return url
}

// patience is how long a test waits for what has to come; only a failure takes it all.
const patience = time.Minute

// quick is a configuration for tests: short tiers, short pauses. A slow machine needs the time that calls have.
func quick(url string) Config {
	return Config{
		URL: url, DelayTiers: []time.Duration{time.Second, 3 * time.Second}, ReconnectMin: 10 * time.Millisecond, ReconnectMax: 200 * time.Millisecond,
		TopologyInterval: time.Second,
	}
}

// start makes a started client that is closed at the end of the test.
func start(t testing.TB, cfg Config) *Client {
	t.Helper()
	c, err := New(cfg, testkit.Logger(t), nil)
	if err != nil {
		t.Fatal(err)
	}
	c.Start(t.Context())
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		_ = c.Close(ctx)
	})
	return c
}

// declared is a started client with its topology declared.
func declared(t testing.TB, cfg Config) *Client {
	t.Helper()
	c := start(t, cfg)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if err := c.Declare(ctx); err != nil {
		t.Fatal(err)
	}
	ready(t, c)
	return c
}

// ready waits until the client can publish.
func ready(t testing.TB, c *Client) {
	t.Helper()
	testkit.Eventually(t, patience, func() error {
		if s := c.State(); !s.Connected || s.Blocked {
			return fmt.Errorf("not connected: %+v", s)
		}
		return nil
	})
}

// admin is a channel of the test's own, made anew when an error has closed it.
type admin struct {
	t    testing.TB
	conn *amqp.Connection
}

func newAdmin(t testing.TB, url string) *admin {
	t.Helper()
	conn, err := amqp.Dial(url)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return &admin{t, conn}
}

func (a *admin) do(f func(ch *amqp.Channel) error) {
	a.t.Helper()
	if err := a.try(f); err != nil {
		a.t.Fatal(err)
	}
}

func (a *admin) try(f func(ch *amqp.Channel) error) error {
	ch, err := a.conn.Channel()
	if err != nil {
		return err
	}
	defer func() { _ = ch.Close() }()
	return f(ch)
}

// send publishes as a foreign program does and waits until the broker has confirmed. Without confirms a
// quorum queue may drop what was published right before the channel closes: the news of the close overtakes it.
func (a *admin) send(exchange, key string, msgs ...amqp.Publishing) {
	a.t.Helper()
	a.do(func(ch *amqp.Channel) error {
		if err := ch.Confirm(false); err != nil {
			return err
		}
		for _, m := range msgs {
			m.DeliveryMode = amqp.Persistent
			confirm, err := ch.PublishWithDeferredConfirm(exchange, key, true, false, m)
			if err != nil {
				return err
			}
			if ok, err := confirm.WaitContext(within(a.t, patience)); err != nil || !ok {
				return fmt.Errorf("confirmed %t: %w", ok, err)
			}
		}
		return nil
	})
}

// depth is how many messages are ready in a queue.
func (a *admin) depth(queue string) int {
	a.t.Helper()
	n := 0
	a.do(func(ch *amqp.Channel) error {
		q, err := ch.QueueDeclarePassive(queue, true, false, false, false, nil)
		n = q.Messages
		return err
	})
	return n
}

// has waits until n messages are ready in a queue.
func (a *admin) has(queue string, n int) {
	a.t.Helper()
	testkit.Eventually(a.t, patience, func() error {
		if d := a.depth(queue); d != n {
			return fmt.Errorf("%s holds %d messages, want %d", queue, d, n)
		}
		return nil
	})
}

// get takes one message out of a queue.
func (a *admin) get(queue string) amqp.Delivery {
	a.t.Helper()
	var out amqp.Delivery
	testkit.Eventually(a.t, patience, func() error {
		return a.try(func(ch *amqp.Channel) error {
			d, ok, err := ch.Get(queue, true)
			if err == nil && !ok {
				err = fmt.Errorf("%s is empty", queue)
			}
			out = d
			return err
		})
	})
	return out
}

func at(ms int64) time.Time { return time.UnixMilli(1_900_000_000_000 + ms).UTC() }

// anOrder makes the n-th order of a test; the same n gives the same order.
func anOrder(n int) order.Order {
	var u ulid.ULID
	if err := u.SetTime(uint64(1_900_000_000_000 + n)); err != nil {
		panic(err)
	}
	u[15], u[14], u[13] = byte(n), byte(n>>8), byte(n>>16)
	return order.Order{
		ID: order.ID{Activity: "sale-1", Bucket: 3, ULID: u.String()}, User: fmt.Sprintf("user-%d", n), SKU: "sku_1", Region: "beijing", Pool: "national",
		Quantity: 1 + n%3, UnitPriceMinor: 9900, Currency: "CNY", ReservedAt: at(int64(n)), PayBefore: at(int64(n)).Add(15 * time.Minute),
		PaymentTimeout: 15 * time.Minute, Epoch: 1, IdemKey: fmt.Sprintf("key-%d", n), IdemDigest: "0123456789abcdef0123456789abcdef",
	}
}

func reserved1(n int) Message { return OrderReserved([]order.Order{anOrder(n)}) }

// consume runs Consume in the background; stop ends it and gives its error.
func consume(t testing.TB, c *Client, cfg ConsumerConfig, h Handler) (stop func() error) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- c.Consume(ctx, cfg, h) }()
	var err error
	ended := false
	stop = func() error {
		cancel()
		if !ended {
			ended = true
			select {
			case err = <-done:
			case <-time.After(patience):
				t.Error("Consume does not end")
			}
		}
		return err
	}
	t.Cleanup(func() { _ = stop() })
	return stop
}

// up waits until all workers of the client consume.
func up(t testing.TB, c *Client, want int) {
	t.Helper()
	testkit.Eventually(t, patience, func() error {
		if s := c.State(); s.ConsumersUp != want || s.Consumers != want {
			return fmt.Errorf("%d of %d consumers up, want %d", s.ConsumersUp, s.Consumers, want)
		}
		return nil
	})
}

// must fails the test when one of the outcomes is an error.
func must(t testing.TB, errs []error) {
	t.Helper()
	for i, err := range errs {
		if err != nil {
			t.Fatalf("publish %d: %v", i, err)
		}
	}
}

// through is the URL of the broker behind a proxy.
func through(t testing.TB, raw, addr string) string {
	t.Helper()
	u, err := url.Parse(raw)
	if err != nil {
		t.Fatal(err)
	}
	u.Host = addr
	return u.String()
}

func host(t testing.TB, raw string) string {
	t.Helper()
	u, err := url.Parse(raw)
	if err != nil {
		t.Fatal(err)
	}
	return u.Host
}

func done(n int) []Result { return make([]Result, n) }

func errorf(format string, args ...any) error { return fmt.Errorf(format, args...) }

func purge(a *admin, queue string) {
	a.t.Helper()
	a.do(func(ch *amqp.Channel) error {
		_, err := ch.QueuePurge(queue, false)
		return err
	})
}
