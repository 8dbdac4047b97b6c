package messaging

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"seckill/pkg/testkit"
)

// ledger remembers what a handler was given.
type ledger struct {
	mu  sync.Mutex
	ids []string
	all []Delivery
}

func (l *ledger) add(batch []Delivery) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, d := range batch {
		l.ids = append(l.ids, d.ID)
		l.all = append(l.all, d)
	}
}

func (l *ledger) seen() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.ids)
}

func (l *ledger) deliveries() []Delivery {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.all)
}

func TestMessagesArriveAsTheyWereSentAndAreAcknowledged(t *testing.T) {
	t.Parallel()
	url := broker(t)
	c := declared(t, quick(url))
	a := newAdmin(t, url)
	var l ledger
	stop := consume(t, c, ConsumerConfig{Queue: QueueOrders, Workers: 2, BatchOrders: 16, BatchWait: 5 * time.Millisecond}, func(_ context.Context, b []Delivery) []Result {
		l.add(b)
		return done(len(b))
	})
	var msgs []Message
	for i := range 100 {
		m := reserved1(i)
		m.Headers = map[string]string{"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
		msgs = append(msgs, m)
	}
	must(t, c.Publish(t.Context(), ExchangeEvents, msgs...))
	testkit.Eventually(t, patience, func() error {
		if n := len(l.seen()); n != 100 {
			return errorf("%d handled", n)
		}
		return nil
	})
	if err := stop(); err != nil {
		t.Error(err)
	}
	a.has(QueueOrders, 0)
	for _, d := range l.deliveries() {
		if d.Headers["traceparent"] == "" || d.Attempt != 0 || d.Orders != 1 || d.Queue != QueueOrders || d.Key != KeyOrderReserved {
			t.Fatalf("delivery %+v", d)
		}
		good, bad, err := DecodeOrderReserved(d.Message)
		if err != nil || len(bad) > 0 || len(good) != 1 || !d.Time.Equal(good[0].ReservedAt) {
			t.Fatalf("decode: %v %v %v", good, bad, err)
		}
	}
}

// O17: messages that cannot be handled go to the dead letters with class, reason, place and attempt,
// retries come back with the attempt raised; ids and trace headers stay, what the broker adds does not.
func TestRetryAndDeadLetterKeepIdAndSayWhy(t *testing.T) {
	t.Parallel()
	url := broker(t)
	cfg := quick(url)
	cfg.MaxAttempts = 3
	c := declared(t, cfg)
	a := newAdmin(t, url)
	var l ledger
	consume(t, c, ConsumerConfig{Queue: QueueOrders, BatchOrders: 8}, func(_ context.Context, b []Delivery) []Result {
		l.add(b)
		rs := done(len(b))
		for i, d := range b {
			if _, _, err := DecodeOrderReserved(d.Message); err != nil {
				rs[i].Dead = []Dead{{Message: d.Message, Class: "undecodable", Err: err}}
			} else {
				rs[i].Retries = []Retry{{Message: d.Message, After: 500 * time.Millisecond, Err: errors.New("store says no")}}
			}
		}
		return rs
	})
	good := reserved1(1)
	good.Headers = map[string]string{"traceparent": "t-1", "x-death": "forged"}
	bad := Message{ID: "bad", Key: KeyOrderReserved, Body: []byte("not protobuf"), Headers: map[string]string{"traceparent": "t-2"}}
	must(t, c.Publish(t.Context(), ExchangeEvents, good, bad))
	// Foreign programs send without an id, with odd headers, a long body, to the queue itself.
	a.send("", QueueOrders, amqp.Publishing{
		Body: make([]byte, 2<<20), Headers: amqp.Table{headerOrders: "many", headerAttempt: int64(-7), "n": int64(1)},
	})
	a.has(QueueDead, 3)
	letters := map[string]amqp.Delivery{}
	for range 3 {
		d := a.get(QueueDead)
		letters[d.MessageId] = d
	}
	dead, ok := letters["bad"]
	if !ok || dead.RoutingKey != KeyOrderReserved || string(dead.Body) != "not protobuf" || dead.DeliveryMode != amqp.Persistent {
		t.Fatalf("letter %+v", dead)
	}
	for k, want := range map[string]any{headerClass: "undecodable", headerQueue: QueueOrders, headerKey: KeyOrderReserved, headerAttempt: int64(0), "traceparent": "t-2"} {
		if dead.Headers[k] != want {
			t.Errorf("header %s of the dead letter is %v, want %v", k, dead.Headers[k], want)
		}
	}
	if s, _ := dead.Headers[headerError].(string); !strings.Contains(s, "not protobuf of this event") {
		t.Errorf("error %q", s)
	}
	got := received(&dead, QueueDead)
	if got.DeadClass != "undecodable" || got.DeadQueue != QueueOrders || got.DeadError == "" || got.Headers["traceparent"] != "t-2" || len(got.Headers) != 1 {
		t.Errorf("read back: %+v", got)
	}
	used, ok := letters[good.ID]
	if !ok || used.Headers[headerClass] != ClassAttemptsExhausted || used.Headers[headerAttempt] != int64(2) || used.Headers["traceparent"] != "t-1" {
		t.Fatalf("letter %+v", used)
	}
	if s, _ := used.Headers[headerError].(string); !strings.Contains(s, "handled 3 times: store says no") {
		t.Errorf("error %q", s)
	}
	for id, d := range letters {
		for k := range d.Headers {
			if strings.HasPrefix(k, "x-") && k != "x-delivery-count" { // which the broker adds to what it hands us
				t.Errorf("%s carries %s", id, k)
			}
		}
	}
	attempts := []int{}
	for _, d := range l.deliveries() {
		if d.ID != good.ID {
			continue
		}
		attempts = append(attempts, d.Attempt)
		if d.Headers["traceparent"] != "t-1" || len(d.Headers) != 1 || d.Key != KeyOrderReserved || !d.Time.Equal(good.Time) {
			t.Errorf("delivery %+v", d)
		}
	}
	if !slices.Equal(attempts, []int{0, 1, 2}) {
		t.Errorf("attempts %v", attempts)
	}
}

// A foreign message whose headers fill a frame: with what a copy adds to them they would fill more than one,
// and the broker would close the connection over every attempt to publish it.
func TestCopiesOfMessagesWithHugeHeadersFitIntoAFrame(t *testing.T) {
	t.Parallel()
	url := broker(t)
	cfg := quick(url)
	cfg.MaxAttempts = 2
	c := declared(t, cfg)
	a := newAdmin(t, url)
	var mu sync.Mutex
	var retried []Delivery
	consume(t, c, ConsumerConfig{Queue: QueueOrders}, func(_ context.Context, batch []Delivery) []Result {
		rs := done(len(batch))
		for i, d := range batch {
			if d.ID == "junk" {
				rs[i].Dead = []Dead{{Message: d.Message, Class: "undecodable", Err: errors.New(strings.Repeat("no good ", 500))}}
				continue
			}
			mu.Lock()
			retried = append(retried, d)
			mu.Unlock()
			rs[i].Retries = []Retry{{Message: d.Message, Err: errors.New("store says no")}}
		}
		return rs
	})
	up(t, c, 1)
	many := amqp.Table{"traceparent": "t"}
	for i := range 1200 {
		many[fmt.Sprintf("h-%04d", i)] = strings.Repeat("y", 90)
	}
	for id, h := range map[string]amqp.Table{"junk": {"blob": strings.Repeat("x", 130_950), "traceparent": "t"}, "many": many} {
		a.send(ExchangeEvents, KeyOrderReserved, amqp.Publishing{MessageId: id, Headers: h, Body: []byte("junk")})
	}
	a.has(QueueDead, 2)
	for range 2 {
		d := a.get(QueueDead)
		l := received(&d, QueueDead)
		cause, dropped := "store says no", "" // what the second copy had to carry was small already
		if l.ID == "junk" {
			cause, dropped = "no good", `headers dropped: 1 with 130960 bytes, the first "blob"`
		}
		if l.Headers["traceparent"] != "t" || l.Headers["blob"] != "" || string(l.Body) != "junk" || !strings.Contains(l.DeadError, cause) || !strings.Contains(l.DeadError, dropped) || len(l.DeadError) > maxErrorText {
			t.Errorf("letter %s: %d headers, %q", l.ID, len(l.Headers), l.DeadError)
		}
	}
	mu.Lock()
	defer mu.Unlock()
	if len(retried) != 2 || retried[1].Attempt != 1 || retried[1].Headers["traceparent"] != "t" || len(retried[1].Headers) < 500 || len(retried[1].Headers) >= len(many) {
		t.Errorf("%d deliveries of the retried one", len(retried))
	}
}

// A store that is away spends no attempt: the same deliveries come again and again until it is back,
// while those that are done are acknowledged.
func TestHoldKeepsDeliveriesAndSpendsNoAttempt(t *testing.T) {
	t.Parallel()
	url := broker(t)
	c := declared(t, quick(url))
	a := newAdmin(t, url)
	var away atomic.Bool
	away.Store(true)
	var l ledger
	var holds atomic.Int64
	var msgs []Message
	for i := range 8 {
		msgs = append(msgs, reserved1(i+1))
	}
	// All are there before anybody consumes, and a full batch does not wait: the first is of four.
	must(t, c.Publish(t.Context(), ExchangeEvents, msgs...))
	a.has(QueueOrders, len(msgs))
	stop := consume(t, c, ConsumerConfig{Queue: QueueOrders, BatchOrders: 4, BatchWait: time.Minute}, func(_ context.Context, b []Delivery) []Result {
		rs := done(len(b))
		for i, d := range b {
			if d.ID == reserved1(2).ID && away.Load() {
				holds.Add(1)
				rs[i].Hold = errors.New("database away")
				rs[i].Dead = []Dead{{Message: d.Message, Class: "ignored"}}
				continue
			}
			l.add(b[i : i+1])
		}
		return rs
	})
	testkit.Eventually(t, patience, func() error {
		if holds.Load() < 2 || len(l.seen()) < 3 {
			return errorf("%d holds, %v handled", holds.Load(), l.seen())
		}
		return nil
	})
	away.Store(false)
	testkit.Eventually(t, patience, func() error {
		if n := len(l.seen()); n != len(msgs) {
			return errorf("%d handled", n)
		}
		return nil
	})
	for _, d := range l.deliveries() {
		if d.Attempt != 0 || d.Redelivered {
			t.Errorf("delivery %+v", d)
		}
	}
	if err := stop(); err != nil {
		t.Error(err)
	}
	a.has(QueueOrders, 0)
	a.has(QueueDead, 0)
}

// What was held to the limit goes back to the broker, before that ends the channel by itself.
func TestHoldLimitGivesDeliveriesBack(t *testing.T) {
	t.Parallel()
	url := broker(t)
	c := declared(t, quick(url))
	a := newAdmin(t, url)
	var counts sync.Map
	var handled atomic.Bool
	stop := consume(t, c, ConsumerConfig{Queue: QueueOrders, HoldLimit: 20 * time.Millisecond}, func(_ context.Context, b []Delivery) []Result {
		rs := done(len(b))
		for i, d := range b {
			counts.Store(d.DeliveryCount, true)
			// Given back until the count is dangerous, then copied with a count of zero.
			if _, rescued := counts.Load(rescueFrom); rescued && d.DeliveryCount == 0 {
				handled.Store(true)
				continue
			}
			rs[i].Hold = errors.New("database away")
		}
		return rs
	})
	must(t, c.Publish(t.Context(), ExchangeEvents, reserved1(1)))
	// The copy comes out of the delay queue, is handled, and nothing is left anywhere.
	testkit.Eventually(t, patience, func() error {
		if !handled.Load() {
			return errors.New("not handled yet")
		}
		return nil
	})
	if err := stop(); err != nil {
		t.Error(err)
	}
	for _, q := range []string{QueueOrders, QueueDead, DelayExchange(3 * time.Second)} {
		a.has(q, 0)
	}
	for n := range deliveryLimit + 1 {
		if _, ok := counts.Load(n); ok != (n <= rescueFrom) {
			t.Errorf("delivery count %d seen: %v", n, ok)
		}
	}
}

// O25 in the consumer: a handler that panics holds up nothing for ever. The batch is taken apart, only
// the culprit, a single order, is dead-lettered.
func TestPanickingHandlerLosesOnlyTheCulprit(t *testing.T) {
	t.Parallel()
	url := broker(t)
	c := declared(t, quick(url))
	a := newAdmin(t, url)
	var l ledger
	var afters atomic.Int64
	culprit := anOrder(3).ID
	stop := consume(t, c, ConsumerConfig{Queue: QueueOrders, BatchOrders: 16, BatchWait: 300 * time.Millisecond}, func(_ context.Context, b []Delivery) []Result {
		for _, d := range b {
			good, _, err := DecodeOrderReserved(d.Message)
			if err != nil {
				t.Error(err)
			}
			for _, o := range good {
				if o.ID == culprit {
					panic("cannot do " + o.ID.String())
				}
			}
		}
		l.add(b)
		rs := done(len(b))
		for i := range rs {
			rs[i].After = func(context.Context) error { afters.Add(1); return nil }
		}
		return rs
	})
	must(t, c.Publish(t.Context(), ExchangeEvents, reserved1(1), OrderReserved([]orderT{anOrder(2), anOrder(3), anOrder(4)}), reserved1(5)))
	a.has(QueueDead, 1)
	testkit.Eventually(t, patience, func() error {
		got := l.seen()
		slices.Sort(got)
		want := []string{reserved1(1).ID, reserved1(2).ID, reserved1(4).ID, reserved1(5).ID}
		if !slices.Equal(got, want) || afters.Load() != 4 {
			return errorf("handled %v, %d afters", got, afters.Load())
		}
		return nil
	})
	d := a.get(QueueDead)
	if d.MessageId != reserved1(3).ID || d.Headers[headerClass] != ClassPanic || !strings.Contains(d.Headers[headerError].(string), "cannot do") {
		t.Errorf("letter %s %v", d.MessageId, d.Headers)
	}
	if err := stop(); err != nil {
		t.Error(err)
	}
	a.has(QueueOrders, 0)
}

// After runs when the copies are confirmed and before the ack; when it fails, it runs again and the
// handler does not.
func TestAfterRunsAgainWithoutTheHandler(t *testing.T) {
	t.Parallel()
	url := broker(t)
	c := declared(t, quick(url))
	a := newAdmin(t, url)
	var handled, afters atomic.Int64
	var atAfter atomic.Int64
	stop := consume(t, c, ConsumerConfig{Queue: QueueOrders}, func(_ context.Context, b []Delivery) []Result {
		handled.Add(1)
		return []Result{{
			Dead: []Dead{{Message: b[0].Message, Class: "x"}},
			After: func(context.Context) error {
				atAfter.Store(int64(a.depth(QueueDead)))
				switch afters.Add(1) {
				case 1:
					return errors.New("park failed")
				case 2:
					panic("park panicked")
				}
				return nil
			},
		}}
	})
	must(t, c.Publish(t.Context(), ExchangeEvents, reserved1(1)))
	testkit.Eventually(t, patience, func() error {
		if afters.Load() < 3 {
			return errorf("%d afters", afters.Load())
		}
		return nil
	})
	if err := stop(); err != nil {
		t.Error(err)
	}
	a.has(QueueOrders, 0)
	a.has(QueueDead, 1)
	if handled.Load() != 1 || afters.Load() != 3 || atAfter.Load() != 1 {
		t.Errorf("%d handled, %d afters, %d letters at the last", handled.Load(), afters.Load(), atAfter.Load())
	}
}

// O14: the dead-letter exchange is gone (or unbound); what fails for good is held, not lost, and goes
// where it belongs as soon as the exchange is declared again, without a restart.
func TestDeadLetterExchangeGoneLosesNothing(t *testing.T) {
	t.Parallel()
	for name, destroy := range map[string]func(ch *amqp.Channel) error{
		"deleted": func(ch *amqp.Channel) error { return ch.ExchangeDelete(ExchangeDead, false, false) },
		"unbound": func(ch *amqp.Channel) error { return ch.QueueUnbind(QueueDead, "", ExchangeDead, nil) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			url := broker(t)
			cfg := quick(url)
			cfg.TopologyInterval = time.Hour
			c := declared(t, cfg)
			a := newAdmin(t, url)
			a.do(destroy)
			stop := consume(t, c, ConsumerConfig{Queue: QueueOrders}, func(_ context.Context, b []Delivery) []Result {
				return []Result{{Dead: []Dead{{Message: b[0].Message, Class: "undecodable"}}}}
			})
			must(t, c.Publish(t.Context(), ExchangeEvents, reserved1(1)))
			a.has(QueueDead, 1)
			if err := stop(); err != nil {
				t.Error(err)
			}
			a.has(QueueOrders, 0)
		})
	}
}

// O15 b: a deleted queue ends the consumer by basic.cancel; health is red until the queue is declared
// again, and consumption goes on by itself. So for a cut connection (a).
func TestConsumerComesBackAfterCancelAndCut(t *testing.T) {
	t.Parallel()
	url := broker(t)
	proxy := testkit.NewProxy(t, host(t, url))
	cfg := quick(through(t, url, proxy.Addr))
	c := declared(t, cfg)
	a := newAdmin(t, url)
	var l ledger
	consume(t, c, ConsumerConfig{Queue: QueueOrders, Workers: 3, BatchOrders: 4}, func(_ context.Context, b []Delivery) []Result {
		l.add(b)
		return done(len(b))
	})
	up(t, c, 3)
	handled := func(n int) {
		t.Helper()
		must(t, c.Publish(within(t, patience), ExchangeEvents, reserved1(n)))
		testkit.Eventually(t, patience, func() error {
			if !slices.Contains(l.seen(), reserved1(n).ID) {
				return errorf("%d not handled", n)
			}
			return nil
		})
	}
	handled(1)
	proxy.Cut()
	testkit.Eventually(t, 10*time.Second, func() error {
		if s := c.State(); s.ConsumersUp != 0 || s.Consumers != 3 || s.Connected {
			return errorf("health is not red: %+v", s)
		}
		return nil
	})
	proxy.Resume()
	ready(t, c)
	up(t, c, 3)
	handled(2)
	red := make(chan struct{})
	watching := make(chan struct{})
	go func() {
		defer close(watching)
		for c.State().ConsumersUp == 3 {
			select {
			case <-t.Context().Done():
				return
			case <-time.After(time.Millisecond):
			}
		}
		close(red)
	}()
	a.do(func(ch *amqp.Channel) error {
		_, err := ch.QueueDelete(QueueOrders, false, false, false)
		return err
	})
	select {
	case <-red:
	case <-time.After(patience):
		t.Error("health stayed green when the queue was deleted")
	}
	up(t, c, 3)
	<-watching
	testkit.Eventually(t, patience, func() error { return c.Publish(t.Context(), ExchangeEvents, reserved1(3))[0] })
	handled(4)
}

// O17 c: never more unacknowledged than prefetch times workers, however many wait; and a batch is
// bounded by orders, not by messages.
func TestPrefetchAndBatchAreBounded(t *testing.T) {
	t.Parallel()
	url := broker(t)
	c := declared(t, quick(url))
	a := newAdmin(t, url)
	var msgs []Message
	for i := range 300 {
		if i%10 == 0 {
			msgs = append(msgs, OrderReserved([]orderT{anOrder(3 * i), anOrder(3*i + 1), anOrder(3*i + 2)}))
		} else {
			msgs = append(msgs, reserved1(3*i))
		}
	}
	must(t, c.Publish(t.Context(), ExchangeEvents, msgs...))
	a.has(QueueOrders, 300)
	gate := make(chan struct{})
	var l ledger
	var largest, inHand atomic.Int64
	stop := consume(t, c, ConsumerConfig{Queue: QueueOrders, Workers: 2, Prefetch: 10, BatchOrders: 7, BatchWait: 50 * time.Millisecond}, func(ctx context.Context, b []Delivery) []Result {
		inHand.Add(1)
		select {
		case <-gate:
		case <-ctx.Done():
		}
		n := int64(0)
		for _, d := range b {
			n += int64(d.Orders)
		}
		for old := largest.Load(); n > old && !largest.CompareAndSwap(old, n); old = largest.Load() {
		}
		l.add(b)
		return done(len(b))
	})
	testkit.Eventually(t, patience, func() error {
		if inHand.Load() != 2 {
			return errors.New("not both at work")
		}
		return nil
	})
	a.has(QueueOrders, 300-2*10)
	close(gate)
	testkit.Eventually(t, patience, func() error {
		if n := len(l.seen()); n != 300 {
			return errorf("%d handled", n)
		}
		return nil
	})
	if err := stop(); err != nil {
		t.Error(err)
	}
	if largest.Load() != 7 {
		t.Errorf("largest batch has %d orders", largest.Load())
	}
	seen := l.seen()
	slices.Sort(seen)
	if n := len(slices.Compact(seen)); n != 300 {
		t.Errorf("%d different messages", n)
	}
	a.has(QueueOrders, 0)
}

// O31: a stop finishes and acknowledges the batch in hand, gives back what was only prefetched, and
// leaves nothing behind; a handler that does not end in time leaves its deliveries to the broker.
func TestStopFinishesWhatIsInHand(t *testing.T) {
	t.Parallel()
	url := broker(t)
	c := declared(t, quick(url))
	a := newAdmin(t, url)
	var msgs []Message
	for i := range 20 {
		msgs = append(msgs, reserved1(i))
	}
	must(t, c.Publish(t.Context(), ExchangeEvents, msgs...))
	a.has(QueueOrders, len(msgs))
	inHand, finish := make(chan struct{}), make(chan struct{})
	var l ledger
	stop := consume(t, c, ConsumerConfig{Queue: QueueOrders, BatchOrders: 5, BatchWait: time.Minute, Prefetch: 10_000, StopTimeout: time.Minute}, func(ctx context.Context, b []Delivery) []Result {
		close(inHand) // a second batch would panic
		<-finish
		if ctx.Err() != nil {
			t.Error("context ended before its time")
		}
		l.add(b)
		rs := done(len(b))
		rs[0].Dead = []Dead{{Message: b[0].Message, Class: "x"}}
		return rs
	})
	<-inHand
	a.has(QueueOrders, 0) // the others are prefetched
	ended := make(chan error, 1)
	go func() { ended <- stop() }()
	left := 15
	testkit.Eventually(t, patience, func() error {
		must(t, c.Publish(t.Context(), ExchangeEvents, reserved1(100+left)))
		if left++; a.depth(QueueOrders) == 0 {
			return errors.New("the broker still delivers to us")
		}
		return nil
	})
	close(finish)
	if err := <-ended; err != nil {
		t.Error(err)
	}
	if n := len(l.seen()); n != 5 {
		t.Errorf("%d handled", n)
	}
	a.has(QueueOrders, left)
	a.has(QueueDead, 1)
	if s := c.State(); s.Consumers != 0 || s.ConsumersUp != 0 {
		t.Errorf("state %+v", s)
	}

	// One that only ends with its context.
	busy := make(chan struct{}, 10)
	stop = consume(t, c, ConsumerConfig{Queue: QueueOrders, StopTimeout: 300 * time.Millisecond}, func(ctx context.Context, b []Delivery) []Result {
		busy <- struct{}{}
		<-ctx.Done()
		return []Result{{Hold: ctx.Err()}}
	})
	<-busy
	began := time.Now()
	if err := stop(); !errors.Is(err, errLeft) {
		t.Errorf("stop: %v", err)
	}
	if d := time.Since(began); d > 10*time.Second { // half of the default
		t.Errorf("stop took %s", d)
	}
	a.has(QueueOrders, left)
}

const childURL = "SECKILL_MESSAGING_TEST_CHILD"

// dieBetweenCopyAndAck is what the child process of the next test does.
func dieBetweenCopyAndAck(url string) {
	c, err := New(quick(url), slog.New(slog.DiscardHandler), nil)
	if err != nil {
		panic(err)
	}
	ctx := context.Background()
	c.Start(ctx)
	if err := c.Declare(ctx); err != nil {
		panic(err)
	}
	panic(c.Consume(ctx, ConsumerConfig{Queue: QueueOrders}, func(_ context.Context, b []Delivery) []Result {
		return []Result{{
			Retries: []Retry{{Message: b[0].Message, After: time.Second}},
			After:   func(context.Context) error { return syscall.Kill(os.Getpid(), syscall.SIGKILL) },
		}}
	}))
}

// A process killed between the confirmed copy and the ack leaves a duplicate and no loss.
func TestKillBetweenCopyAndAckDuplicatesAndLosesNothing(t *testing.T) {
	t.Parallel()
	url := broker(t)
	c := declared(t, quick(url))
	must(t, c.Publish(t.Context(), ExchangeEvents, reserved1(1)))
	child := exec.CommandContext(t.Context(), os.Args[0])
	child.Env = append(os.Environ(), childURL+"="+url)
	if out, err := child.CombinedOutput(); err == nil || child.ProcessState.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
		t.Fatalf("child ended with %v: %s", err, out)
	}
	var l ledger
	stop := consume(t, c, ConsumerConfig{Queue: QueueOrders}, func(_ context.Context, b []Delivery) []Result {
		l.add(b)
		return done(len(b))
	})
	testkit.Eventually(t, patience, func() error {
		if n := len(l.seen()); n != 2 {
			return errorf("%d handled", n)
		}
		return nil
	})
	if err := stop(); err != nil {
		t.Error(err)
	}
	attempts := map[int]bool{}
	for _, d := range l.deliveries() {
		attempts[d.Attempt] = d.ID == reserved1(1).ID
	}
	if !attempts[0] || !attempts[1] {
		t.Errorf("attempts %v", attempts)
	}
}

// A channel that breaks in that moment is the same thing to the broker.
func TestBreakBetweenCopyAndAckDuplicatesAndLosesNothing(t *testing.T) {
	t.Parallel()
	url := broker(t)
	proxy := testkit.NewProxy(t, host(t, url))
	a := newAdmin(t, url)
	c := declared(t, quick(through(t, url, proxy.Addr)))
	var broken atomic.Bool
	consume(t, c, ConsumerConfig{Queue: QueueOrders}, func(_ context.Context, b []Delivery) []Result {
		return []Result{{
			Dead: []Dead{{Message: b[0].Message, Class: "x"}},
			After: func(context.Context) error {
				if broken.CompareAndSwap(false, true) {
					proxy.Cut()
					for c.State().Connected {
						time.Sleep(time.Millisecond)
					}
					proxy.Resume()
				}
				return nil
			},
		}}
	})
	must(t, c.Publish(t.Context(), ExchangeEvents, reserved1(1)))
	a.has(QueueDead, 2)
	a.has(QueueOrders, 0)
	for range 2 {
		if d := a.get(QueueDead); d.MessageId != reserved1(1).ID {
			t.Errorf("letter %s", d.MessageId)
		}
	}
}

// What the broker itself dead-letters is read from its own headers, and at-least-once dead-lettering
// brings it there.
func TestDeliveryLimitIsReadFromTheBrokersHeaders(t *testing.T) {
	t.Parallel()
	url := broker(t)
	c := declared(t, quick(url))
	a := newAdmin(t, url)
	m := OrderReserved([]orderT{anOrder(1), anOrder(2)})
	m.Headers = map[string]string{"traceparent": "t-1"}
	must(t, c.Publish(t.Context(), ExchangeEvents, m))
	a.do(func(ch *amqp.Channel) error {
		for range deliveryLimit + 1 {
			for {
				d, ok, err := ch.Get(QueueOrders, false)
				if err != nil {
					return err
				}
				if !ok {
					continue
				}
				if err := d.Nack(false, true); err != nil {
					return err
				}
				break
			}
		}
		return nil
	})
	got := make(chan Delivery, 1)
	consume(t, c, ConsumerConfig{Queue: QueueDead}, func(_ context.Context, b []Delivery) []Result {
		got <- b[0]
		return done(len(b))
	})
	select {
	case d := <-got:
		if d.DeadClass != "delivery_limit" || d.DeadQueue != QueueOrders || d.DeadError == "" || d.ID != m.ID || d.Key != KeyOrderReserved || d.Orders != 2 || len(d.Headers) != 1 {
			t.Errorf("letter %+v", d)
		}
		parts, err := Split(d.Message)
		if err != nil || len(parts) != 2 || parts[0].ID != reserved1(1).ID || parts[0].Headers["traceparent"] != "t-1" {
			t.Errorf("split %+v %v", parts, err)
		}
	case <-time.After(patience):
		t.Error("no dead letter")
	}
}

func TestConsumeRefusesAWrongConfiguration(t *testing.T) {
	t.Parallel()
	c := start(t, quick("amqp://guest:guest@127.0.0.1:1/"))
	for _, cfg := range []ConsumerConfig{{}, {Queue: "q", Workers: -1}, {Queue: "q", Prefetch: 70000}, {Queue: "q", BatchWait: -1}} {
		if err := c.Consume(t.Context(), cfg, nil); err == nil {
			t.Errorf("%+v accepted", cfg)
		}
	}
	stop := consume(t, c, ConsumerConfig{Queue: QueueOrders, Workers: 4}, nil)
	up := c.State()
	if err := stop(); err != nil || up.ConsumersUp != 0 {
		t.Errorf("stop without a broker: %v, %+v", err, up)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	if err := c.Close(ctx); err != nil {
		t.Error(err)
	}
	if err := c.Consume(ctx, ConsumerConfig{Queue: "q"}, nil); !errors.Is(err, ErrClosed) {
		t.Errorf("consume on a closed client: %v", err)
	}
}

// A letter that cannot be stored has no further place to go: it is held, and stays in its queue.
func TestDeadLetterIsNeverDeadLetteredAgain(t *testing.T) {
	t.Parallel()
	url := broker(t)
	c := declared(t, quick(url))
	a := newAdmin(t, url)
	must(t, c.Publish(t.Context(), ExchangeDead, reserved1(1)))
	var calls atomic.Int64
	stop := consume(t, c, ConsumerConfig{Queue: QueueDead}, func(_ context.Context, b []Delivery) []Result {
		switch calls.Add(1) {
		case 1:
			return []Result{{Dead: []Dead{{Message: b[0].Message, Class: "x", Err: errors.New("no")}}}}
		case 2:
			return []Result{{Retries: []Retry{{Message: b[0].Message}}}}
		}
		panic("at the end of its wits")
	})
	testkit.Eventually(t, patience, func() error {
		if n := calls.Load(); n < 7 {
			return errorf("called %d times", n)
		}
		return nil
	})
	if err := stop(); !errors.Is(err, errLeft) {
		t.Errorf("stop: %v", err)
	}
	a.has(QueueDead, 1)
	a.has(QueueOrders, 0)
}
