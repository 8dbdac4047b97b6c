package messaging

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	amqp "github.com/rabbitmq/amqp091-go"

	"seckill/pkg/order"
	"seckill/pkg/testkit"
)

type orderT = order.Order

// O12 a: an unroutable message is confirmed by the broker, and still never counts as published; the
// worker puts the binding back without a restart.
func TestReturnedMessageIsNotPublishedAndTheBindingHeals(t *testing.T) {
	t.Parallel()
	url := broker(t)
	a := newAdmin(t, url)
	cfg := quick(url)
	cfg.TopologyInterval = time.Hour // only the return itself can make it look
	c := declared(t, cfg)
	api := start(t, cfg)
	if err := api.Check(within(t, patience)); err != nil {
		t.Fatal(err)
	}
	ready(t, api)
	a.do(func(ch *amqp.Channel) error {
		return ch.QueueUnbind(QueueOrders, KeyOrderReserved, ExchangeEvents, nil)
	})
	// Among routable ones, so that returns are matched to the right messages.
	paid := OrderPaid(Payment{OrderID: anOrder(1).ID, TransactionID: "t1", AmountMinor: 1, Currency: "CNY", ReceivedAt: at(0)})
	errs := api.Publish(t.Context(), ExchangeEvents, paid, reserved1(1), paid, reserved1(1), reserved1(2), paid)
	for i, want := range []bool{false, true, false, true, true, false} {
		if errors.Is(errs[i], ErrReturned) != want || !want && errs[i] != nil {
			t.Errorf("message %d: %v", i, errs[i])
		}
	}
	if s := api.State(); s.Topology != TopologyMissing {
		t.Errorf("health hides it: %+v", s)
	}
	// The relay publishes again what was not confirmed.
	testkit.Eventually(t, patience, func() error {
		return errors.Join(c.Publish(t.Context(), ExchangeEvents, reserved1(1), reserved1(2))...)
	})
	if n := a.depth(QueueOrders); n < 2 {
		t.Errorf("%d messages in the queue", n)
	}
	testkit.Eventually(t, patience, func() error {
		if s := api.State(); s.Topology != TopologyOK {
			return fmt.Errorf("state %+v", s)
		}
		return nil
	})
}

// O12 b: publishing to an exchange that is not there never counts as published, does not take good
// messages down with it for long, and heals when it is there again.
func TestMissingExchangeIsNotPublishedToAndHeals(t *testing.T) {
	t.Parallel()
	url := broker(t)
	a := newAdmin(t, url)
	cfg := quick(url)
	api := start(t, cfg)
	wrk := declared(t, cfg)
	if err := api.Check(within(t, patience)); err != nil {
		t.Fatal(err)
	}
	ready(t, api)
	if err := wrk.Close(within(t, patience)); err != nil { // nobody repairs for now
		t.Fatal(err)
	}
	a.do(func(ch *amqp.Channel) error { return ch.ExchangeDelete(ExchangeEvents, false, false) })
	errs := api.Publish(t.Context(), ExchangeEvents, reserved1(1))
	if !errors.Is(errs[0], ErrUnknownOutcome) || !errors.Is(errs[0], ErrTopology) {
		t.Errorf("first: %v", errs[0])
	}
	// From now on nothing goes there, and what goes elsewhere is not disturbed.
	for range 20 {
		// Not connected for the moment that it takes to open another channel.
		err := api.Publish(t.Context(), ExchangeEvents, reserved1(2))[0]
		if !errors.Is(err, ErrTopology) && !errors.Is(err, ErrNotConnected) || errors.Is(err, ErrUnknownOutcome) {
			t.Fatalf("next: %v", err)
		}
	}
	testkit.Eventually(t, patience, func() error {
		return api.Publish(t.Context(), ExchangeDead, reserved1(3))[0]
	})
	if s := api.State(); s.Topology != TopologyMissing {
		t.Errorf("health hides it: %+v", s)
	}
	declared(t, cfg)
	testkit.Eventually(t, patience, func() error {
		return api.Publish(t.Context(), ExchangeEvents, reserved1(1))[0]
	})
	a.has(QueueOrders, 1)
}

// A client that neither declares nor checks heals from it too.
func TestMissingExchangeHealsWithoutCheck(t *testing.T) {
	t.Parallel()
	url := broker(t)
	c := start(t, quick(url))
	ready(t, c)
	if err := c.Publish(t.Context(), "test.exchange", reserved1(1))[0]; !errors.Is(err, ErrUnknownOutcome) {
		t.Fatal(err)
	}
	a := newAdmin(t, url)
	a.do(func(ch *amqp.Channel) error {
		if err := ch.ExchangeDeclare("test.exchange", amqp.ExchangeFanout, true, false, false, false, nil); err != nil {
			return err
		}
		if _, err := ch.QueueDeclare("test.queue", true, false, false, false, nil); err != nil {
			return err
		}
		return ch.QueueBind("test.queue", "", "test.exchange", false, nil)
	})
	testkit.Eventually(t, patience, func() error { return c.Publish(t.Context(), "test.exchange", reserved1(1))[0] })
}

// O12 c: what a full queue refuses is refused, exactly, and the queue keeps its oldest.
func TestFullQueueRefusesAndKeepsWhatItHas(t *testing.T) {
	t.Parallel()
	url := broker(t)
	a := newAdmin(t, url)
	a.do(func(ch *amqp.Channel) error {
		if err := ch.ExchangeDeclare(ExchangeEvents, amqp.ExchangeTopic, true, false, false, false, nil); err != nil {
			return err
		}
		if _, err := ch.QueueDeclare("small", true, false, false, false, amqp.Table{"x-queue-type": "quorum", "x-overflow": "reject-publish", "x-max-length": int64(5)}); err != nil {
			return err
		}
		return ch.QueueBind("small", "#", ExchangeEvents, false, nil)
	})
	reg := prometheus.NewRegistry()
	c, err := New(quick(url), testkit.Logger(t), reg)
	if err != nil {
		t.Fatal(err)
	}
	c.Start(t.Context())
	defer func() { _ = c.Close(context.Background()) }()
	ready(t, c)
	// One by one: a quorum queue learns of its length a moment late.
	confirmed := 0
	var refused []string
	for i := range 40 {
		switch err := c.Publish(t.Context(), ExchangeEvents, reserved1(i))[0]; {
		case err == nil:
			confirmed++
		case errors.Is(err, ErrNacked):
			refused = append(refused, reserved1(i).ID)
		default:
			t.Fatal(err)
		}
	}
	if confirmed < 5 || len(refused) == 0 {
		t.Fatalf("%d confirmed, %d refused", confirmed, len(refused))
	}
	a.has("small", confirmed)
	if d := a.get("small"); d.MessageId != reserved1(0).ID {
		t.Errorf("the oldest is gone; first is %s", d.MessageId)
	}
	want := fmt.Sprintf(`
# HELP seckill_publish_total Publishes by outcome; only confirmed ones are known to be in a queue.
# TYPE seckill_publish_total counter
seckill_publish_total{result="blocked"} 0
seckill_publish_total{result="confirmed"} %d
seckill_publish_total{result="invalid"} 0
seckill_publish_total{result="nacked"} %d
seckill_publish_total{result="not_connected"} 0
seckill_publish_total{result="returned"} 0
seckill_publish_total{result="topology"} 0
seckill_publish_total{result="unknown"} 0
`, confirmed, len(refused))
	if err := testutil.GatherAndCompare(reg, strings.NewReader(want), "seckill_publish_total"); err != nil {
		t.Error(err)
	}
}

func TestWithoutABrokerSendEndsAtOnceAndCloseToo(t *testing.T) {
	t.Parallel()
	c := start(t, quick("amqp://guest:guest@127.0.0.1:1/"))
	began := time.Now()
	for range 100 {
		if err := c.Send(t.Context(), ExchangeEvents, reserved1(1)).Wait(t.Context()); !errors.Is(err, ErrNotConnected) {
			t.Fatal(err)
		}
	}
	if err := c.Declare(within(t, 50*time.Millisecond)); !errors.Is(err, ErrNotConnected) {
		t.Errorf("declare: %v", err)
	}
	if err := c.Close(within(t, patience)); err != nil {
		t.Error(err)
	}
	if d := time.Since(began); d > 10*time.Second {
		t.Errorf("took %s", d)
	}
	if err := c.Send(t.Context(), ExchangeEvents, reserved1(1)).Wait(t.Context()); !errors.Is(err, ErrClosed) {
		t.Errorf("after close: %v", err)
	}
	if err := c.Close(t.Context()); err != nil {
		t.Errorf("second close: %v", err)
	}
}

func TestNeverStartedClientCloses(t *testing.T) {
	t.Parallel()
	c, err := New(quick("amqp://guest:guest@127.0.0.1:1/"), testkit.Logger(t), nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Send(t.Context(), ExchangeEvents, reserved1(1)).Wait(t.Context()); !errors.Is(err, ErrNotConnected) {
		t.Error(err)
	}
	if err := c.Close(t.Context()); err != nil {
		t.Error(err)
	}
}

func TestMessagesThatWouldBreakTheConnectionAreRefused(t *testing.T) {
	t.Parallel()
	url := broker(t)
	c := declared(t, quick(url))
	long := strings.Repeat("x", 256)
	many := make([]orderT, MaxOrdersPerMessage+1)
	for i := range many {
		many[i] = anOrder(i)
	}
	for name, m := range map[string]Message{
		"no id":       {Key: KeyOrderPaid, Body: []byte("x")},
		"long id":     {ID: long, Key: KeyOrderPaid},
		"long key":    {ID: "1", Key: long},
		"long header": {ID: "1", Key: KeyOrderPaid, Headers: map[string]string{long: "x"}},
		"too many":    OrderReserved(many),
	} {
		if err := c.Publish(t.Context(), ExchangeEvents, m)[0]; !errors.Is(err, ErrInvalidMessage) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := c.Publish(t.Context(), long, reserved1(1))[0]; !errors.Is(err, ErrInvalidMessage) {
		t.Errorf("long exchange: %v", err)
	}
	must(t, c.Publish(t.Context(), ExchangeEvents, reserved1(1)))
}

// What lies in flight when the connection breaks has no known outcome; everything goes on on a new
// connection, and nothing that was confirmed is missing.
func TestConnectionCutLosesNothingThatWasConfirmed(t *testing.T) {
	t.Parallel()
	url := broker(t)
	proxy := testkit.NewProxy(t, host(t, url))
	declared(t, quick(url))
	a := newAdmin(t, url)
	cfg := quick(through(t, url, proxy.Addr))
	c := start(t, cfg)
	ready(t, c)
	confirmed := map[string]bool{}
	unknown := 0
	for round := range 5 {
		var pending []*Pending
		var ids []string
		for i := range 200 {
			m := reserved1(round*1000 + i)
			ids = append(ids, m.ID)
			pending = append(pending, c.Send(t.Context(), ExchangeEvents, m))
			if i == 100 {
				if err := pending[50].Wait(within(t, patience)); err != nil { // some are confirmed, others in flight
					t.Errorf("before the cut: %v", err)
				}
				proxy.Cut()
			}
		}
		for i, p := range pending {
			err := p.Wait(within(t, 10*time.Second))
			switch {
			case err == nil:
				confirmed[ids[i]] = true
			case errors.Is(err, ErrUnknownOutcome):
				unknown++
			case !errors.Is(err, ErrNotConnected):
				t.Errorf("%s: %v", ids[i], err)
			}
		}
		testkit.Eventually(t, 10*time.Second, func() error {
			if c.State().Connected {
				return errors.New("does not see the cut")
			}
			return nil
		})
		proxy.Resume()
		ready(t, c)
	}
	must(t, c.Publish(t.Context(), ExchangeEvents, reserved1(99999)))
	found := map[string]bool{}
	a.do(func(ch *amqp.Channel) error {
		for {
			d, ok, err := ch.Get(QueueOrders, true)
			if err != nil || !ok {
				return err
			}
			found[d.MessageId] = true
		}
	})
	for id := range confirmed {
		if !found[id] {
			t.Errorf("%s was confirmed and is not in the queue", id)
		}
	}
	t.Logf("%d confirmed, %d unknown, %d in the queue", len(confirmed), unknown, len(found))
}

// O21 b: a path that forwards nothing is noticed within two heartbeats, and callers get their answers.
func TestDeadPathIsNoticedWithinTwoHeartbeats(t *testing.T) {
	t.Parallel()
	url := broker(t)
	proxy := testkit.NewProxy(t, host(t, url))
	declared(t, quick(url))
	cfg := quick(through(t, url, proxy.Addr))
	// The outcomes come long before the connection is given up, by its reader after 15 s and by its writer
	// after 20 s, and that before a publisher without confirms gives it up, after 30 s.
	cfg.Heartbeat, cfg.ConfirmTimeout = 10*time.Second, 5*time.Second
	const limit = 10 * time.Second
	c := start(t, cfg)
	ready(t, c)
	before := runtime.NumGoroutine()
	proxy.Stall()
	stalled := time.Now()
	big := reserved1(1)
	big.Body = make([]byte, 1<<20) // fills the socket buffers, so that a write hangs
	var pending []*Pending
	for range 64 {
		pending = append(pending, c.Send(t.Context(), ExchangeEvents, big))
	}
	if d := time.Since(stalled); d > limit {
		t.Errorf("Send was held up for %s", d)
	}
	for i, p := range pending {
		if err := p.Wait(within(t, limit)); !errors.Is(err, ErrUnknownOutcome) && !errors.Is(err, ErrBlocked) && !errors.Is(err, ErrNotConnected) || errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("message %d: %v", i, err)
		}
	}
	if d := time.Since(stalled); d > limit {
		t.Errorf("outcomes took %s", d)
	}
	testkit.Eventually(t, 2*cfg.Heartbeat+5*time.Second-time.Since(stalled), func() error {
		if c.State().Connected {
			return errors.New("still taken for connected")
		}
		return nil
	})
	if n := runtime.NumGoroutine(); n > before+200 {
		t.Errorf("%d goroutines, %d before", n, before)
	}
	proxy.Resume()
	ready(t, c)
	must(t, c.Publish(t.Context(), ExchangeEvents, reserved1(1)))
}

// A stalled path does not hold up Close.
func TestCloseEndsOnADeadPath(t *testing.T) {
	t.Parallel()
	url := broker(t)
	proxy := testkit.NewProxy(t, host(t, url))
	declared(t, quick(url))
	c := start(t, quick(through(t, url, proxy.Addr)))
	ready(t, c)
	proxy.Stall()
	p := c.Send(t.Context(), ExchangeEvents, reserved1(1))
	began := time.Now()
	if err := c.Close(within(t, time.Second)); err == nil {
		t.Error("close says that all is confirmed")
	}
	if d := time.Since(began); d > 8*time.Second { // with no deadline it would be 10 s
		t.Errorf("close took %s", d)
	}
	if err := p.Wait(within(t, time.Minute)); !errors.Is(err, ErrUnknownOutcome) || errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("pending: %v", err)
	}
}

func TestCloseWaitsForConfirms(t *testing.T) {
	t.Parallel()
	url := broker(t)
	c := declared(t, quick(url))
	var pending []*Pending
	for i := range 1000 {
		pending = append(pending, c.Send(t.Context(), ExchangeEvents, reserved1(i)))
	}
	if err := c.Close(within(t, patience)); err != nil {
		t.Fatal(err)
	}
	for i, p := range pending {
		if err := p.Wait(t.Context()); err != nil {
			t.Fatalf("message %d: %v", i, err)
		}
	}
	newAdmin(t, url).has(QueueOrders, 1000)
}

// Sends that come while the client closes all get an outcome.
func TestSendsDuringCloseAreSettled(t *testing.T) {
	t.Parallel()
	url := broker(t)
	c := declared(t, quick(url))
	outcomes := make(chan error, 4)
	for g := range 4 {
		go func() {
			for i := 0; ; i++ {
				err := c.Send(t.Context(), ExchangeEvents, reserved1(g*100000+i)).Wait(within(t, patience))
				if err != nil {
					outcomes <- err
					return
				}
			}
		}()
	}
	time.Sleep(50 * time.Millisecond) // some traffic; any time will do
	if err := c.Close(within(t, patience)); err != nil {
		t.Error(err)
	}
	for range 4 {
		if err := <-outcomes; !errors.Is(err, ErrClosed) && !errors.Is(err, ErrNotConnected) {
			t.Error(err)
		}
	}
}

func BenchmarkPublish(b *testing.B) {
	url := broker(b)
	c := declared(b, quick(url))
	body := reserved1(1)
	b.ReportAllocs()
	b.ResetTimer()
	const window = 1024
	pending := make([]*Pending, 0, window)
	for i := range b.N {
		pending = append(pending, c.pub.send(b.Context(), ExchangeEvents, publishing(body), body.Key, nil, true))
		if len(pending) == window || i == b.N-1 {
			for _, p := range pending[:len(pending)/2+1] {
				if err := p.Wait(b.Context()); err != nil {
					b.Fatal(err)
				}
			}
			pending = append(pending[:0], pending[len(pending)/2+1:]...)
		}
	}
	for _, p := range pending {
		if err := p.Wait(b.Context()); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "msgs/s")
}
