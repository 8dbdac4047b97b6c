package acceptance

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"seckill/pkg/messaging"
	"seckill/pkg/order"
	"seckill/pkg/sale"
	"seckill/pkg/testkit"
)

// answers counts the answers of a crowd by code; accepted ones under "accepted".
type answers struct {
	mu    sync.Mutex
	codes map[string]int
	ids   []string
	slow  time.Duration // the longest
}

func (a *answers) add(r reply) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.codes == nil {
		a.codes = map[string]int{}
	}
	code := r.Code
	switch {
	case r.accepted():
		code = "accepted"
		a.ids = append(a.ids, r.OrderID)
	case r.Err != nil:
		code = "no answer: " + r.Err.Error()
	}
	a.codes[code]++
	a.slow = max(a.slow, r.Took)
}

func (a *answers) want(t testing.TB, want map[string]int) {
	t.Helper()
	if !maps.Equal(a.codes, want) {
		t.Errorf("answers %v, want %v", a.codes, want)
	}
}

// barrier runs n buyers at once.
func barrier(n int, fn func(i int)) {
	start := make(chan struct{})
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() {
			<-start
			fn(i)
		})
	}
	close(start)
	wg.Wait()
}

// O01: two hundred buyers, twenty pieces, through two replicas.
func TestO01_TwoHundredBuyersTwentyPieces(t *testing.T) {
	t.Parallel()
	s := newStack(t, options{apis: 2})
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
	defer cancel()
	for round := range 3 {
		sale := s.sell(20, 1, time.Minute)
		s.known(0, sale)
		s.known(1, sale)
		stop := make(chan struct{})
		var watching sync.WaitGroup
		watching.Go(func() {
			for {
				select {
				case <-stop:
					return
				case <-time.After(5 * time.Millisecond):
					if n, err := s.rdb.Get(ctx, s.stockKey(sale)).Int(); err != nil || n < 0 {
						t.Errorf("level fell to %d (%v)", n, err)
					}
				}
			}
		})
		var got answers
		owner := map[string]string{}
		var mu sync.Mutex
		barrier(200, func(i int) {
			user := fmt.Sprintf("o01-%d-%d", round, i)
			r := s.buy(i%2, sale, user, "", 1)
			got.add(r)
			if r.accepted() {
				mu.Lock()
				owner[r.OrderID] = user
				mu.Unlock()
			}
		})
		close(stop)
		watching.Wait()
		got.want(t, map[string]int{"accepted": 20, "sold_out": 180})
		if len(owner) != 20 {
			t.Errorf("%d different orders for 20 buyers", len(owner))
		}
		if n := s.level(sale, "sku", "national"); n != 0 {
			t.Errorf("%d units on sale, want 0", n)
		}
		s.quiet(sale, true)
		s.promises(sale, got.ids...)
		if n := s.count("SELECT available FROM activity_stock WHERE activity_id = ?", sale); n != 0 {
			t.Errorf("%d units available in MySQL, want 0", n)
		}
		for _, r := range s.picture(sale).rows {
			if owner[r.id] != r.user {
				t.Errorf("order %s belongs to %s and was given to %s", r.id, r.user, owner[r.id])
			}
		}
	}
}

// O01b: three each of twenty: six are accepted, two pieces are left for a later buyer of two.
func TestO01b_QuantityThreeOfTwenty(t *testing.T) {
	t.Parallel()
	s := newStack(t, options{apis: 2})
	sale := s.sell(20, 3, time.Minute)
	s.known(0, sale)
	s.known(1, sale)
	var got answers
	barrier(60, func(i int) { got.add(s.buy(i%2, sale, fmt.Sprintf("o01b-%d", i), "", 3)) })
	got.want(t, map[string]int{"accepted": 6, "sold_out": 54})
	last := s.buy(0, sale, "o01b-last", "", 2)
	if !last.accepted() {
		t.Fatalf("the buyer of two: %d %s", last.Status, last.Body)
	}
	s.quiet(sale, true)
	s.promises(sale, append(got.ids, last.OrderID)...)
	if n := s.level(sale, "sku", "national"); n != 0 {
		t.Errorf("%d units on sale, want 0", n)
	}
}

// O02c: the same key to replica A, which is held for two seconds, and to replica B: one order.
func TestO02c_SameKeyToTwoReplicas(t *testing.T) {
	t.Parallel()
	s := newStack(t, options{apis: 2})
	sale := s.sell(10, 1, time.Minute)
	s.apis[0].env["SECKILL_CHECKOUT_REDIS_TIMEOUT"] = "5s" // its deadline is not what is tested here
	s.apis[0].term()
	s.apis[0].start("api.after_reserve=sleep:2s")
	s.known(0, sale)
	s.known(1, sale)
	var held, quick reply
	var wg sync.WaitGroup
	wg.Go(func() { held = s.buy(0, sale, "o02", "same", 1) })
	quick = s.buy(1, sale, "o02", "same", 1)
	wg.Wait()
	for name, r := range map[string]reply{"held": held, "quick": quick} {
		if !r.accepted() {
			t.Errorf("%s replica answered %d %s %v", name, r.Status, r.Body, r.Err)
		}
	}
	if held.OrderID != quick.OrderID {
		t.Errorf("replica A answered %s, replica B %s", held.OrderID, quick.OrderID)
	}
	s.quiet(sale, true)
	s.promises(sale, quick.OrderID)
	if n := s.level(sale, "sku", "national"); n != 9 {
		t.Errorf("%d units on sale, want 9", n)
	}
}

// O04, up to the repair: the stock key is gone in mid-sale. Nobody is told "sold out", nothing is
// sold, nothing makes the key again, and somebody is alarmed.
func TestO04_StockKeyGone(t *testing.T) {
	t.Parallel()
	private := testkit.StartRedis(t)
	s := newStack(t, options{redis: private})
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	for name, lose := range map[string]func(sale string) error{
		"deleted": func(sale string) error { return s.rdb.Del(ctx, s.stockKey(sale)).Err() },
		"expired": func(sale string) error { return s.rdb.PExpire(ctx, s.stockKey(sale), time.Millisecond).Err() },
		"flushed": func(string) error { return s.rdb.FlushAll(ctx).Err() },
	} {
		t.Run(name, func(t *testing.T) {
			s := s.with(t)
			sale := s.sell(100, 1, time.Minute)
			s.known(0, sale)
			ids := s.crowd(sale, "o04-"+name, 25)
			s.quiet(sale, true)
			if err := lose(sale); err != nil {
				t.Fatal(err)
			}
			testkit.Eventually(t, within, func() error {
				if n := s.rdb.Exists(ctx, s.stockKey(sale)).Val(); n != 0 {
					return errors.New("the key is still there")
				}
				return nil
			})
			rows := s.count("SELECT COUNT(*) FROM orders WHERE activity_id = ?", sale)
			var got answers
			barrier(50, func(i int) { got.add(s.buy(0, sale, fmt.Sprintf("o04-%s-late-%d", name, i), "", 1)) })
			got.want(t, map[string]int{"temporarily_unavailable": 50})
			if n := s.count("SELECT COUNT(*) FROM orders WHERE activity_id = ?", sale); n != rows || len(ids) != 25 {
				t.Errorf("%d orders, want %d", n, rows)
			}
			if n := s.rdb.Exists(ctx, s.stockKey(sale)).Val(); n != 0 {
				t.Error("something has made the stock key again")
			}
			if n := s.apis[0].metric("seckill_reservations_total", `result="temporarily_unavailable"`); n < 50 {
				t.Errorf("the metric counts %v refusals", n)
			}
			// The buyers from before keep their rows: MySQL guards the limit when Redis has forgotten.
			if n := s.count("SELECT COUNT(*) FROM user_holdings WHERE activity_id = ? AND held = 1", sale); n != 25 {
				t.Errorf("%d holdings, want 25", n)
			}
		})
	}
}

func (s *stack) stockKey(sale string) string {
	return s.prefix + "seckill:stock:{" + sale + ":0}:sku:national"
}

// O04b: after warming nothing of the sale has a time to live.
func TestO04b_NothingExpiresInMidSale(t *testing.T) {
	t.Parallel()
	s := newStack(t, options{})
	sale := s.sell(10, 1, 15*time.Second)
	s.known(0, sale)
	s.mustBuy(sale, "o04b")
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	n := 0
	it := s.rdb.Scan(ctx, 0, s.prefix+"*{"+sale+":*", 1000).Iterator()
	for it.Next(ctx) {
		n++
		if ttl := s.rdb.TTL(ctx, it.Val()).Val(); ttl >= 0 {
			t.Errorf("%s expires in %s", it.Val(), ttl)
		}
	}
	if err := it.Err(); err != nil || n < 4 {
		t.Errorf("%d keys, %v", n, err)
	}
}

// O11 and O12 share a private broker, and so do O13 and the stop without a broker (O31): each start
// of one takes many seconds.
func TestO11_O12_BrokerAwayAndBrokerSaysNo(t *testing.T) {
	t.Parallel()
	rabbit := testkit.StartRabbitMQ(t)
	// The worker repairs what it misses. That it does so from time to time must not come between; that
	// a returned message makes it look is what is tested.
	seldom := map[string]string{"SECKILL_RABBITMQ_TOPOLOGY_INTERVAL": "10m"}
	api := maps.Clone(seldom)
	api["SECKILL_CHECKOUT_PUBLISH_TIMEOUT"] = "2s" // how long a payment waits for a broker that is away
	s := newStack(t, options{rabbit: rabbit, apiEnv: api, workerEnv: seldom})

	// O11: the broker is away between Redis and the queue.
	t.Run("O11", func(t *testing.T) {
		s := s.with(t)
		sale := s.sell(20, 1, 15*time.Minute) // a broker that starts on a busy machine takes its time
		s.known(0, sale)
		rabbit.Stop()
		var got answers
		barrier(10, func(i int) { got.add(s.buy(0, sale, fmt.Sprintf("o11-%d", i), "k", 1)) })
		got.want(t, map[string]int{"accepted": 10})
		if got.slow > 3*time.Second {
			t.Errorf("the slowest answer took %s", got.slow)
		}
		status, body, err := s.apis[0].get("/readyz")
		if err != nil || status != http.StatusOK {
			t.Errorf("a broker that cannot be reached takes the replica away: %d %s %v", status, body, err)
		}
		// A payment needs the broker's confirm: 503, and the provider comes again.
		if r := s.pay(got.ids[0], "txn-o11", 1); r.Status != http.StatusServiceUnavailable || r.Took > 5*time.Second {
			t.Errorf("pay without a broker: %d %s after %s", r.Status, r.Body, r.Took)
		}
		time.Sleep(5 * time.Second) // the outage itself
		rabbit.Restart()
		s.quiet(sale, true)
		s.promises(sale, got.ids...)
		for _, id := range got.ids {
			if st := s.status(id); st != "pending" {
				t.Errorf("order %s is %s", id, st)
			}
		}
	})

	// O12a: the binding is gone. A returned message does not count as published.
	t.Run("O12a no route", func(t *testing.T) {
		s := s.with(t)
		sale := s.sell(20, 1, 60*time.Second)
		s.known(0, sale)
		s.connected(s.apis[0])
		ch := s.broker()
		// The relay of a worker would have the binding declared again.
		s.workers[0].term()
		if err := ch.QueueUnbind("seckill.orders", "order.reserved", "seckill.events", nil); err != nil {
			t.Fatal(err)
		}
		before := s.apis[0].metric("seckill_publish_total", `result="returned"`)
		var got answers
		barrier(10, func(i int) { got.add(s.buy(0, sale, fmt.Sprintf("o12a-%d", i), "k", 1)) })
		got.want(t, map[string]int{"accepted": 10})
		testkit.Eventually(t, within, func() error {
			if n := s.apis[0].metric("seckill_publish_total", `result="returned"`); n <= before {
				return errors.New("no metric counts the returned messages")
			}
			return nil
		})
		if n := s.count("SELECT COUNT(*) FROM orders WHERE activity_id = ?", sale); n != 0 {
			t.Errorf("%d rows without a route", n)
		}
		if err := ch.QueueBind("seckill.orders", "order.reserved", "seckill.events", false, nil); err != nil {
			t.Fatal(err)
		}
		s.workers[0].start("")
		s.quiet(sale, true)
		s.promises(sale, got.ids...)
	})

	// O12b: the exchange is gone for a while.
	t.Run("O12b no exchange", func(t *testing.T) {
		s := s.with(t)
		sale := s.sell(20, 1, 60*time.Second)
		s.known(0, sale)
		s.connected(s.apis[0])
		ch := s.broker()
		if err := ch.ExchangeDelete("seckill.events", false, false); err != nil {
			t.Fatal(err)
		}
		var got answers
		barrier(10, func(i int) { got.add(s.buy(0, sale, fmt.Sprintf("o12b-%d", i), "k", 1)) })
		got.want(t, map[string]int{"accepted": 10})
		time.Sleep(2 * time.Second) // the outage itself
		if err := ch.ExchangeDeclare("seckill.events", "topic", true, false, false, false, nil); err != nil {
			t.Fatal(err)
		}
		for key, queue := range map[string]string{
			"order.reserved": "seckill.orders", "order.paid": "seckill.payments", "order.expired": "seckill.rollbacks",
			"order.cancel_requested": "seckill.rollbacks", "order.refund_requested": "seckill.rollbacks", "activity.ended": "seckill.rollbacks",
		} {
			if err := ch.QueueBind(queue, key, "seckill.events", false, nil); err != nil {
				t.Fatal(err)
			}
		}
		s.quiet(sale, true)
		s.promises(sale, got.ids...)
	})

	// O12c: the queue is full and its consumer stopped. reject-publish, never drop-head.
	t.Run("O12c queue full", func(t *testing.T) {
		s := s.with(t)
		sale := s.sell(60, 1, 60*time.Second)
		s.known(0, sale)
		s.workers[0].term()
		if out, err := rabbit.Ctl("set_policy", "full", "^seckill\\.orders$", `{"max-length":5}`, "--apply-to", "queues"); err != nil {
			t.Fatal(out, err)
		}
		s.connected(s.apis[0])
		refused := func() float64 { return s.apis[0].metric("seckill_publish_total", `result="nacked"`) }
		before := refused()
		var ids []string
		buy := func() { ids = append(ids, s.mustBuy(sale, fmt.Sprintf("o12c-%d", len(ids)))) } // one by one: each is a message
		// A policy reaches a quorum queue a moment after it was set, and its limit is not exact by the
		// message. Once the queue has refused one, it takes no other.
		for range 40 {
			if buy(); refused() > before {
				break
			}
		}
		testkit.Eventually(t, within, func() error {
			if refused() == before {
				return fmt.Errorf("none of %d messages was refused by a queue of five", len(ids))
			}
			return nil
		})
		full := s.depth("seckill.orders")
		if full < 5 || full > len(ids)-1 {
			t.Errorf("%d of %d messages in a queue of five", full, len(ids))
		}
		settled := func() float64 { return s.apis[0].metric("seckill_handoff_orders_total") }
		then := settled()
		for range 20 {
			buy()
		}
		testkit.Eventually(t, within, func() error {
			if n := settled() - then; n < 20 {
				return fmt.Errorf("the broker has answered for %v of 20 orders", n)
			}
			return nil
		})
		// Neither did it take one, nor drop one from its head for it.
		if n := s.depth("seckill.orders"); n != full {
			t.Errorf("a full queue of %d messages holds %d after 20 more", full, n)
		}
		if out, err := rabbit.Ctl("clear_policy", "full"); err != nil {
			t.Fatal(out, err)
		}
		s.workers[0].start("")
		s.quiet(sale, true)
		s.promises(sale, ids...)
	})

	// O19: the delay queue is purged and the broker restarted while fifty orders wait for their payment.
	// The sweep takes all of them back in time; what is paid meanwhile stays paid.
	t.Run("O19 delays lost", func(t *testing.T) {
		s := s.with(t)
		const n = 50
		sale := s.sell(n, 1, 15*time.Second)
		s.known(0, sale)
		ids := s.crowd(sale, "o19", n)
		if len(ids) != n {
			t.Fatalf("%d of %d accepted", len(ids), n)
		}
		s.quiet(sale, true)
		ch := s.broker()
		if purged, err := ch.QueuePurge("seckill.delay.15s", false); err != nil || purged == 0 {
			t.Fatalf("purged %d delay messages: %v", purged, err)
		}
		rabbit.Restart()
		testkit.Eventually(t, within, func() error {
			if r := s.pay(ids[0], "txn-o19", 1); !r.accepted() {
				return fmt.Errorf("pay: %d %s %v", r.Status, r.Body, r.Err)
			}
			return nil
		})
		s.settled(sale, false, ids...)
		s.paidOrDue(ids[0])
		// Grace (2 s) and interval (0.5 s) of the sweep, and what a busy machine takes for fifty orders.
		if late := s.count("SELECT MAX(TIMESTAMPDIFF(SECOND, pay_before, updated_at)) FROM orders WHERE activity_id = ? AND status = 'cancelled'", sale); late > 10 {
			t.Errorf("the last order was taken back %d s late", late)
		}
		if n := s.level(sale, "sku", "national"); n < 49 {
			t.Errorf("%d units on sale, want 49 or 50", n)
		}
	})

	// O31: both programs end in order also when the broker is down at that moment.
	t.Run("O31 stop without a broker", func(t *testing.T) {
		s := s.with(t)
		rabbit.Stop()
		if code := s.apis[0].term(); code != 0 {
			t.Errorf("order-api ended with code %d", code)
		}
		if code := s.workers[0].term(); code != 0 {
			t.Errorf("order-worker ended with code %d", code)
		}
	})
}

// connected waits until a program has its connections to the broker back.
func (s *stack) connected(p *process) {
	s.t.Helper()
	testkit.Eventually(s.t, within, func() error {
		if n := p.metric("seckill_amqp_connected"); n < 2 {
			return fmt.Errorf("%s has %v connections to the broker", p.name, n)
		}
		return nil
	})
}

// O13: a delay queue exists with another time to live and holds messages. The start ends with one
// clear line, the queue is left alone, and after the repair a start succeeds.
func TestO13_QueueWithOtherArguments(t *testing.T) {
	t.Parallel()
	s := newStack(t, options{cold: true})
	ch := s.broker()
	const queue = "seckill.delay.15s"
	if _, err := ch.QueueDeclare(queue, true, false, false, false, amqp.Table{
		"x-queue-type": "quorum", "x-dead-letter-exchange": "seckill.events", "x-dead-letter-strategy": "at-least-once",
		"x-overflow": "reject-publish", "x-delivery-limit": int64(20), "x-message-ttl": int64(99000),
	}); err != nil {
		t.Fatal(err)
	}
	if err := ch.Confirm(false); err != nil {
		t.Fatal(err)
	}
	for i := range 3 {
		c, err := ch.PublishWithDeferredConfirm("", queue, true, false, amqp.Publishing{Body: []byte{byte(i)}, DeliveryMode: amqp.Persistent})
		if err != nil || !c.Wait() {
			t.Fatal("publish", err)
		}
	}
	s.workers[0].launch("")
	s.apis[0].launch("")
	testkit.Eventually(t, 20*time.Second, func() error {
		if !s.workers[0].ended() {
			if status, body, err := s.workers[0].get("/readyz"); err == nil && status == http.StatusOK {
				t.Fatalf("the worker is ready: %s", body)
			}
			return errors.New("the worker goes on")
		}
		return nil
	})
	if code := s.workers[0].exitCode(); code == 0 {
		t.Error("the worker ended with code 0")
	}
	out := s.workers[0].output()
	for _, want := range []string{queue, "x-message-ttl", "15000", "99000"} {
		if !strings.Contains(out, want) {
			t.Errorf("the log does not name %s:\n%s", want, s.workers[0].tail())
		}
	}
	if n := s.depth(queue); n != 3 {
		t.Errorf("the queue holds %d messages, want 3", n)
	}
	// What order-api publishes to is declared last: it is not there, and order-api takes no traffic as soon
	// as it has looked.
	if err := s.broker().ExchangeDeclarePassive("seckill.events", "topic", true, false, false, false, nil); err == nil {
		t.Error("the worker has declared what order-api publishes to")
	}
	testkit.Eventually(t, within, func() error {
		if status, body, err := s.apis[0].get("/readyz"); err != nil || status != http.StatusServiceUnavailable || !strings.Contains(body, "missing") {
			return fmt.Errorf("order-api: %d %s %w", status, body, err)
		}
		return nil
	})
	if _, err := ch.QueueDelete(queue, false, false, false); err != nil {
		t.Fatal(err)
	}
	s.workers[0].start("")
	s.apis[0].ready()
	sale := s.sell(5, 1, 15*time.Second)
	s.known(0, sale)
	id := s.mustBuy(sale, "o13")
	s.becomes(id, "pending")
}

// O16b: the same order five times, under other message ids, to two consumers at once.
func TestO16b_SameOrderFiveTimesToTwoConsumers(t *testing.T) {
	t.Parallel()
	s := newStack(t, options{workers: 2})
	sale := s.sell(10, 1, 15*time.Second)
	s.known(0, sale)
	id := s.mustBuy(sale, "o16")
	s.becomes(id, "pending")
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	parsed, err := order.ParseID(id)
	if err != nil {
		t.Fatal(err)
	}
	rec, err := s.stock.Order(ctx, parsed)
	if err != nil {
		t.Fatal(err)
	}
	m := messaging.OrderReserved([]order.Order{rec.Order})
	barrier(5, func(i int) { s.publish(m.Key, fmt.Sprintf("%s-copy-%d", m.ID, i), m.Body) })
	s.becomes(id, "cancelled")
	s.settled(sale, false, id)
	if n := s.count("SELECT COUNT(*) FROM stock_ledger WHERE ref = ?", id); n != 2 {
		t.Errorf("%d ledger rows, want 2", n)
	}
	if n := s.level(sale, "sku", "national"); n != 10 {
		t.Errorf("%d units on sale, want 10", n)
	}
}

// O18: a short time-out does not wait behind a long one.
func TestO18_ShortTimeoutBehindLongOne(t *testing.T) {
	t.Parallel()
	s := newStack(t, options{})
	long := s.sell(5, 1, time.Minute)
	short := s.sell(1, 1, time.Second)
	s.known(0, long)
	s.known(0, short)
	a := s.mustBuy(long, "o18-a")
	s.becomes(a, "pending")
	placed := time.Now()
	b := s.mustBuy(short, "o18-b")
	s.becomes(b, "cancelled")
	if took := time.Since(placed); took > 3*time.Second {
		t.Errorf("cancelled after %s, want 1 s and at most two more", took)
	}
	testkit.Eventually(t, within, func() error {
		if r := s.buy(0, short, "o18-c", "", 1); !r.accepted() {
			return fmt.Errorf("buy what came back: %d %s", r.Status, r.Body)
		}
		return nil
	})
	if r := s.pay(a, "txn-o18", 1); !r.accepted() {
		t.Fatalf("pay: %d %s", r.Status, r.Body)
	}
	s.becomes(a, "paid")
}

// O26: payments at the time-out, plus or minus 50 ms, each three times, of amounts that no float holds. The first commit wins; money
// that came too late is due for refund; nothing is both.
func TestO26_PaymentAgainstTimeout(t *testing.T) {
	t.Parallel()
	s := newStack(t, options{})
	// 3 × 19999.99 is 59999.97, and a hundred times that is not a cent more or less.
	const n, quantity, unit, amount = 100, 3, 1999999, 5999997
	sale := s.open(map[string]int{"national": quantity * n}, 5*time.Second, func(p *sale.Sale) { p.PerUserLimit, p.Items[0].PriceMinor = quantity, unit })
	s.known(0, sale)
	var mu sync.Mutex
	var ids []string
	var wg sync.WaitGroup
	slots := make(chan struct{}, 16)
	for i := range n {
		wg.Go(func() {
			slots <- struct{}{}
			r := s.buy(0, sale, fmt.Sprintf("o26-%d", i), "k", quantity)
			at := time.Now()
			<-slots
			if !r.accepted() {
				t.Errorf("buy: %d %s %v", r.Status, r.Body, r.Err)
				return
			}
			mu.Lock()
			ids = append(ids, r.OrderID)
			mu.Unlock()
			offset := time.Duration(i%11-5) * 10 * time.Millisecond
			time.Sleep(time.Until(at.Add(5*time.Second + offset))) // the moment is the point of the test
			for range 3 {
				if r := s.payAmount(r.OrderID, "txn-"+r.OrderID, amount); !r.accepted() {
					t.Errorf("pay: %d %s %v", r.Status, r.Body, r.Err)
				}
			}
		})
	}
	wg.Wait()
	// A callback with another amount is refused.
	for _, other := range []int{amount - 1, amount + 3, 6000000, unit} {
		if r := s.payAmount(ids[0], "other", other); r.Code != "amount_mismatch" {
			t.Errorf("another amount, %d: %d %s", other, r.Status, r.Body)
		}
	}
	s.settled(sale, false, ids...)
	var paid, cancelled int
	testkit.Eventually(t, within, func() error { // the last payments may be in the worker's hands
		paid = s.count("SELECT COUNT(*) FROM orders WHERE activity_id = ? AND status = 'paid'", sale)
		cancelled = s.count("SELECT COUNT(*) FROM orders WHERE activity_id = ? AND status = 'cancelled'", sale)
		applied := s.count("SELECT COUNT(*) FROM payments WHERE status = 'applied' AND order_id LIKE ?", sale+"-%")
		due := s.count("SELECT COUNT(*) FROM payments WHERE status = 'refund_due' AND order_id LIKE ?", sale+"-%")
		if paid+cancelled != n || applied != paid || due != cancelled {
			return fmt.Errorf("%d paid with %d payments applied, %d cancelled with %d due for refund", paid, applied, cancelled, due)
		}
		return nil
	})
	if booked := s.count("SELECT SUM(amount_minor) FROM payments WHERE order_id LIKE ?", sale+"-%"); booked != n*amount {
		t.Errorf("booked %d, want %d", booked, n*amount)
	}
	if wrong := s.count("SELECT COUNT(*) FROM orders WHERE activity_id = ? AND (amount_minor <> ? OR unit_price_minor <> ?)", sale, amount, unit); wrong > 0 {
		t.Errorf("%d orders have another amount", wrong)
	}
	t.Logf("%d paid, %d cancelled", paid, cancelled)
}

// O34: asking for the result before it is there. One failure is nobody else's.
func TestO34_ResultBeforeItIsThere(t *testing.T) {
	t.Parallel()
	s := newStack(t, options{})
	sale := s.sell(5, 1, time.Minute)
	s.known(0, sale)
	s.workers[0].term()
	first, second := s.mustBuy(sale, "o34-1"), s.mustBuy(sale, "o34-2")
	for id, user := range map[string]string{first: "o34-1", second: "o34-2"} {
		if r := s.look(id, user); r.Status != http.StatusOK || r.State != "reserved" {
			t.Errorf("before the consumer: %d %s", r.Status, r.Body)
		}
	}
	// The first one fails for good: MySQL knows a holding that leaves no room below his limit.
	s.exec("INSERT INTO user_holdings (activity_id, user_id, held) VALUES (?, 'o34-1', 1) ON DUPLICATE KEY UPDATE held = 1", sale)
	s.workers[0].start("")
	testkit.Eventually(t, within, func() error {
		if r := s.look(first, "o34-1"); r.State != "rejected" || r.Reason == "" {
			return fmt.Errorf("the first sees %s", r.Body)
		}
		if r := s.look(second, "o34-2"); r.State != "pending" {
			return fmt.Errorf("the second sees %s", r.Body)
		}
		if n := s.level(sale, "sku", "national"); n != 4 {
			return fmt.Errorf("%d units on sale: his piece has not come back", n)
		}
		return nil
	})
	if r := s.look(first, "o34-3"); r.Status != http.StatusNotFound || r.Code != "order_not_found" {
		t.Errorf("somebody else's order: %d %s", r.Status, r.Body)
	}
	unknown := order.ID{Activity: sale, Bucket: 0, ULID: "01ARZ3NDEKTSV4RRFFQ69G5FAV"}.String()
	if r := s.look(unknown, "o34-3"); r.Status != http.StatusNotFound || r.Code != "order_not_found" {
		t.Errorf("an unknown order: %d %s", r.Status, r.Body)
	}
}

// O31: SIGTERM under load. Each accepted answer has an order, readiness turns red first, and both
// programs end with code 0.
func TestO31_StoppingUnderLoad(t *testing.T) {
	t.Parallel()
	s := newStack(t, options{apis: 2, workers: 2})
	sale := s.sell(5000, 1, 60*time.Second)
	s.known(0, sale)
	s.known(1, sale)
	load := s.load(sale, "o31", func(int, reply) {})
	load.reached(100)
	if code := s.apis[0].term(); code != 0 {
		t.Errorf("order-api ended with code %d", code)
	}
	load.reached(load.count() + 100)
	s.apis[0].start("")
	if code := s.workers[0].term(); code != 0 {
		t.Errorf("order-worker ended with code %d", code)
	}
	load.reached(load.count() + 100)
	s.workers[0].start("")
	ids := load.stop()
	s.quiet(sale, true)
	s.promises(sale, ids...)
}

// Two replicas of each, one of each killed under load: nothing that was promised is lost.
func TestKilledReplicasUnderLoad(t *testing.T) {
	t.Parallel()
	s := newStack(t, options{apis: 2, workers: 2})
	sale := s.sell(5000, 1, 5*time.Second)
	s.known(0, sale)
	s.known(1, sale)
	load := s.load(sale, "kill", func(i int, r reply) {
		switch i % 4 { // a share pays, a share cancels, the rest expires
		case 0:
			_ = s.pay(r.OrderID, "txn-"+r.OrderID, 1)
		case 1:
			_ = s.cancel(r.OrderID, fmt.Sprintf("kill-%d", i))
		}
	})
	load.reached(150)
	s.apis[1].kill9()
	s.workers[1].kill9()
	load.reached(load.count() + 150)
	s.apis[1].start("")
	s.workers[1].start("")
	load.reached(load.count() + 150)
	ids := load.stop()
	s.settled(sale, false, ids...)
}

// load is a stream of buyers. Who gets no answer, or one that does not know, asks again with the same
// key until somebody tells him.
type load struct {
	t       testing.TB
	mu      sync.Mutex
	ids     []string
	quit    chan struct{}
	buying  sync.WaitGroup
	changed chan struct{}
}

func (s *stack) load(sale, prefix string, then func(i int, r reply)) *load {
	l := &load{t: s.t, quit: make(chan struct{}), changed: make(chan struct{}, 1)}
	next := make(chan int)
	l.buying.Go(func() {
		defer close(next)
		tick := time.NewTicker(5 * time.Millisecond) // 200 a second
		defer tick.Stop()
		for i := 0; ; i++ {
			select {
			case <-l.quit:
				return
			case <-tick.C:
				select {
				case next <- i:
				case <-l.quit:
					return
				}
			}
		}
	})
	for range 16 {
		l.buying.Go(func() {
			for i := range next {
				for try := range 60 {
					r := s.buy((i+try)%len(s.apis), sale, fmt.Sprintf("%s-%d", prefix, i), "k", 1)
					if r.accepted() {
						then(i, r)
						l.mu.Lock()
						l.ids = append(l.ids, r.OrderID)
						l.mu.Unlock()
						select {
						case l.changed <- struct{}{}:
						default:
						}
						break
					}
					if r.Err == nil && r.Status != http.StatusServiceUnavailable {
						s.t.Errorf("buy: %d %s", r.Status, r.Body)
						break
					}
					time.Sleep(50 * time.Millisecond) // as a client does
				}
			}
		})
	}
	return l
}

func (l *load) count() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.ids)
}

// reached waits until so many orders were accepted.
func (l *load) reached(n int) {
	l.t.Helper()
	late := time.After(within)
	for l.count() < n {
		select {
		case <-l.changed:
		case <-late:
			l.t.Fatalf("%d orders accepted, want %d", l.count(), n)
		}
	}
}

func (l *load) stop() []string {
	close(l.quit)
	l.buying.Wait()
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.ids)
}
