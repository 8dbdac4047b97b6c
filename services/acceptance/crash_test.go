package acceptance

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"sync"
	"testing"
	"time"

	"seckill/pkg/testkit"
)

// one checks that a buyer has exactly one order and gives its id.
func (s *stack) one(activity, user string) string {
	s.t.Helper()
	ids := s.mine(activity, user)
	if len(ids) != 1 {
		s.t.Fatalf("%s has the orders %v, want one", user, ids)
	}
	return ids[0]
}

// known waits until order-api knows a sale: a replica that was just started has to read it first.
func (s *stack) known(replica int, activity string) {
	s.t.Helper()
	testkit.Eventually(s.t, within, func() error {
		r := s.call(http.MethodGet, s.api(replica)+"/v1/activities/"+activity, "", nil, "")
		if r.Err != nil || r.Status != http.StatusOK {
			return fmt.Errorf("activity: %d %s %v", r.Status, r.Body, r.Err)
		}
		return nil
	})
}

// C1, O11b: killed between the script and the answer. The outbox entry is in Redis, the relay
// publishes it.
func TestC1_KilledAfterReserveBeforePublish(t *testing.T) {
	t.Parallel()
	s := newStack(t, options{})
	sale := s.sell(5, 1, time.Minute)
	s.known(0, sale)
	var ids []string
	for i, point := range []string{"api.after_reserve=kill", "api.before_publish=kill"} {
		s.apis[0].term()
		s.apis[0].start(point)
		user := fmt.Sprintf("c1-%d", i)
		r := s.buy(0, sale, user, "k", 1)
		if r.accepted() != (i == 1) && i == 0 {
			t.Fatalf("%s: answered %d %s", point, r.Status, r.Body)
		}
		s.apis[0].died()
		s.apis[0].start("")
		id := s.one(sale, user)
		if r.accepted() && r.OrderID != id {
			t.Errorf("told %s, holds %s", r.OrderID, id)
		}
		// The retry of a buyer who was told nothing gets the very same order.
		if again := s.buy(0, sale, user, "k", 1); !again.accepted() || again.OrderID != id {
			t.Errorf("%s: retry answered %d %s, the order is %s", point, again.Status, again.Body, id)
		}
		ids = append(ids, id)
		s.becomes(id, "pending")
		if r := s.cancel(id, user); !r.accepted() {
			t.Errorf("cancel: %d %s", r.Status, r.Body)
		}
		s.becomes(id, "cancelled")
	}
	s.settled(sale, false, ids...)
	if n := s.level(sale, "sku", "national"); n != 5 {
		t.Errorf("%d units on sale, want 5", n)
	}
}

// C2: the confirm is lost. What was published is published again, with the same message id, and
// becomes one order.
func TestC2_PublishOutcomeUnknown(t *testing.T) {
	t.Parallel()
	probe := testkit.RabbitMQ(t)
	u, err := url.Parse(probe)
	if err != nil {
		t.Fatal(err)
	}
	proxy := testkit.NewProxy(t, u.Host)
	u.Host = proxy.Addr
	s := newStack(t, options{amqpURL: probe, rabbitURL: u.String()})
	sale := s.sell(5, 1, time.Minute)
	s.known(0, sale)
	// Nobody consumes orders for now; the relay goes on.
	s.workers[0].term()
	s.workers[0].env["SECKILL_WORKER_ROLES"] = "relay,admin"
	s.workers[0].start("")
	proxy.DropReplies()
	id := s.mustBuy(sale, "c2")
	testkit.Eventually(t, within, func() error {
		if n := s.depth("seckill.orders"); n < 2 {
			return fmt.Errorf("%d messages: the relay has not published it again", n)
		}
		return nil
	})
	s.apis[0].kill9()
	proxy.Resume()
	s.apis[0].start("")
	s.workers[0].term()
	delete(s.workers[0].env, "SECKILL_WORKER_ROLES")
	s.workers[0].start("")
	s.becomes(id, "pending")
	if r := s.pay(id, "txn-c2", 1); !r.accepted() {
		t.Fatalf("pay: %d %s", r.Status, r.Body)
	}
	s.becomes(id, "paid")
	s.settled(sale, false, id)
}

// C3: the reply of Redis is lost. The answer is 503 with the order id (R12), and a retry with the
// same key gets that order.
func TestC3_ReplyFromRedisLost(t *testing.T) {
	t.Parallel()
	env := testkit.Redis(t)
	proxy := testkit.NewProxy(t, env.Addr)
	s := newStack(t, options{redisEnv: &env, redisAddr: proxy.Addr, apiEnv: map[string]string{
		"SECKILL_REDIS_READ_TIMEOUT": "500ms", "SECKILL_CHECKOUT_REDIS_TIMEOUT": "2s",
	}})
	sale := s.sell(5, 1, time.Second)
	s.known(0, sale)
	// Redis knows the script by now, and only his reservation names him: it runs, whatever else is read
	// meanwhile.
	first := s.insist(sale, "c3-first")
	const buyer = "reply-is-lost"
	proxy.DropRepliesAfter(buyer)
	r := s.buy(0, sale, buyer, "k", 1)
	if r.Status != http.StatusServiceUnavailable || r.Took > 3*time.Second {
		t.Fatalf("answered %d %s after %s, want 503", r.Status, r.Body, r.Took)
	}
	told := r.OrderID
	if told == "" {
		t.Errorf("503 without the order id: %s", r.Body)
	}
	s.apis[0].kill9()
	proxy.Resume()
	s.apis[0].start("")
	s.known(0, sale)
	again := s.insist(sale, buyer)
	if told != "" && again != told {
		t.Fatalf("retry got %s, told was %s", again, told)
	}
	s.becomes(again, "cancelled")
	s.becomes(first, "cancelled")
	s.settled(sale, false, first, again)
	if n := s.level(sale, "sku", "national"); n != 5 {
		t.Errorf("%d units on sale, want 5", n)
	}
}

// C4: the client has gone after the script. The order goes on; `mine` shows it.
func TestC4_ClientGoneAfterReserve(t *testing.T) {
	t.Parallel()
	s := newStack(t, options{})
	sale := s.sell(5, 1, time.Minute)
	s.known(0, sale)
	s.apis[0].term()
	s.apis[0].start("api.after_reserve=sleep:1s")
	s.known(0, sale)
	conn, err := net.Dial("tcp", s.apis[0].env["SECKILL_HTTP_ADDR"])
	if err != nil {
		t.Fatal(err)
	}
	body := `{"sku_id":"sku","quantity":1,"region":"national"}`
	if _, err := fmt.Fprintf(conn, "POST /v1/activities/%s/orders HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s",
		sale, token("c4"), len(body), body); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, within, func() error {
		if n := s.level(sale, "sku", "national"); n != 4 {
			return fmt.Errorf("level %d", n)
		}
		return nil
	})
	if err := conn.Close(); err != nil {
		t.Fatal(err)
	}
	id := s.one(sale, "c4")
	s.becomes(id, "pending")
	if r := s.pay(id, "txn-c4", 1); !r.accepted() {
		t.Fatalf("pay: %d %s", r.Status, r.Body)
	}
	s.becomes(id, "paid")
	s.settled(sale, false, id)
}

// C5, O16: killed after the commit, at each step that follows. Delivered again, the row is found and
// the steps are run again by its state (R2); the stock is taken once, the time-out comes once.
func TestC5_KilledAfterCommit(t *testing.T) {
	t.Parallel()
	s := newStack(t, options{})
	sale := s.sell(10, 1, 5*time.Second)
	s.known(0, sale)
	var ids []string
	for i, point := range []string{"worker.after_commit", "worker.after_expiry_publish", "worker.after_lua_confirm", "consumer.before_ack"} {
		// Nothing of the round before may reach the fail point first.
		testkit.Eventually(t, within, func() error {
			if n := s.depth("seckill.delay.5s") + s.depth("seckill.rollbacks") + s.depth("seckill.orders"); n > 0 {
				return fmt.Errorf("%d messages are on their way", n)
			}
			if n := len(s.picture(sale).outbox); n > 0 {
				return fmt.Errorf("%d orders are in the outbox", n)
			}
			// What the killed worker had in hand has come again.
			if i > 0 && s.workers[0].metric("seckill_consumed_total", `queue="seckill.orders"`) == 0 {
				return errors.New("the order has not come again")
			}
			return nil
		})
		s.workers[0].term()
		s.workers[0].start(point + "@1=kill")
		id := s.mustBuy(sale, fmt.Sprintf("c5-%d", i))
		ids = append(ids, id)
		s.workers[0].died()
		if st := s.status(id); st != "pending" {
			t.Errorf("%s: the row is %q after the kill", point, st)
		}
		s.workers[0].start("")
		s.becomes(id, "cancelled")
		if n := s.count("SELECT COUNT(*) FROM stock_ledger WHERE ref = ?", id); n != 2 {
			t.Errorf("%s: %d ledger rows, want one sell and one cancel", point, n)
		}
	}
	s.settled(sale, false, ids...)
	if n := s.level(sale, "sku", "national"); n != 10 {
		t.Errorf("%d units on sale, want 10", n)
	}
}

// C6: the outcome of the commit is unknown. The row is read, then decided.
func TestC6_CommitOutcomeUnknown(t *testing.T) {
	t.Parallel()
	s := newStack(t, options{mysqlProxy: true})
	sale := s.sell(200, 1, 15*time.Minute)
	s.known(0, sale)
	s.workers[0].term()
	s.workers[0].start("worker.after_commit@1=error;worker.after_commit@3=error")
	// The connections are cut again and again while orders come: some cuts hit a commit.
	stop := make(chan struct{})
	var cutting sync.WaitGroup
	cutting.Go(func() {
		for {
			select {
			case <-stop:
				s.mysql.Resume()
				return
			case <-time.After(30 * time.Millisecond):
				s.mysql.Cut()
				s.mysql.Resume()
			}
		}
	})
	ids := s.crowd(sale, "c6", 120)
	close(stop)
	cutting.Wait()
	if len(ids) != 120 {
		t.Errorf("%d of 120 accepted: the click waits for no database", len(ids))
	}
	s.quiet(sale, true)
	s.promises(sale, ids...)
	// And killed while it is unknown.
	s.workers[0].kill9()
	s.workers[0].start("")
	for _, id := range ids[:10] {
		if r := s.pay(id, "txn-"+id, 1); !r.accepted() {
			t.Errorf("pay: %d %s", r.Status, r.Body)
		}
	}
	for _, id := range ids[:10] {
		s.becomes(id, "paid")
	}
	s.quiet(sale, true)
	s.promises(sale, ids...)
}

// crowd lets n buyers click at once and gives the orders that were accepted.
func (s *stack) crowd(activity, prefix string, n int) []string {
	s.t.Helper()
	var mu sync.Mutex
	var ids []string
	var wg sync.WaitGroup
	slots := make(chan struct{}, 32)
	for i := range n {
		wg.Go(func() {
			slots <- struct{}{}
			defer func() { <-slots }()
			if r := s.buy(i%len(s.apis), activity, fmt.Sprintf("%s-%d", prefix, i), "k", 1); r.accepted() {
				mu.Lock()
				ids = append(ids, r.OrderID)
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	return ids
}

// C7: a payment that comes before its order is kept and applied when the order is written (R5), also
// when the worker is killed in between. One that comes after the cancel is recorded as refund due.
func TestC7_PaymentBeforeOrderAndAfterCancel(t *testing.T) {
	t.Parallel()
	s := newStack(t, options{})
	sale := s.sell(5, 1, time.Minute)
	s.known(0, sale)
	s.workers[0].term()
	s.workers[0].env["SECKILL_WORKER_ROLES"] = "payments,admin"
	s.workers[0].start("")
	id := s.mustBuy(sale, "c7")
	if r := s.pay(id, "txn-1", 1); !r.accepted() {
		t.Fatalf("pay before the order: %d %s", r.Status, r.Body)
	}
	testkit.Eventually(t, within, func() error {
		if n := s.count("SELECT COUNT(*) FROM payments WHERE order_id = ? AND status = 'kept'", id); n != 1 {
			return fmt.Errorf("%d payments are kept", n)
		}
		return nil
	})
	if r := s.look(id, "c7"); r.State != "reserved" {
		t.Errorf("the buyer sees %s, want reserved", r.Body)
	}
	s.workers[0].kill9()
	delete(s.workers[0].env, "SECKILL_WORKER_ROLES")
	s.workers[0].launch("worker.after_commit@1=kill") // the payment waits for it: it may die before it is ready
	s.workers[0].died()
	s.workers[0].start("")
	s.becomes(id, "paid")

	late := s.mustBuy(sale, "c7-late")
	s.becomes(late, "pending")
	if r := s.cancel(late, "c7-late"); !r.accepted() {
		t.Fatalf("cancel: %d %s", r.Status, r.Body)
	}
	s.becomes(late, "cancelled")
	for range 2 {
		if r := s.pay(late, "txn-2", 1); !r.accepted() {
			t.Fatalf("pay after the cancel: %d %s", r.Status, r.Body)
		}
	}
	testkit.Eventually(t, within, func() error {
		if n := s.count("SELECT COUNT(*) FROM payments WHERE order_id = ? AND status = 'refund_due'", late); n != 1 {
			return fmt.Errorf("%d payments are due for refund", n)
		}
		if r := s.look(late, "c7-late"); r.State != "cancelled" || !r.Due {
			return fmt.Errorf("the buyer sees %s, want cancelled and refund_due", r.Body)
		}
		return nil
	})
	s.settled(sale, false, id, late)
}

// C8: a cancel before the order was persisted writes a tombstone; the late order message finds it and
// takes no stock (R18).
func TestC8_CancelBeforePersist(t *testing.T) {
	t.Parallel()
	s := newStack(t, options{})
	sale := s.sell(5, 1, time.Minute)
	s.known(0, sale)
	s.workers[0].term()
	s.workers[0].env["SECKILL_WORKER_ROLES"] = "rollbacks,scheduler,admin"
	s.workers[0].start("worker.cancel.after_commit@1=kill")
	id := s.mustBuy(sale, "c8")
	if r := s.cancel(id, "c8"); !r.accepted() {
		t.Fatalf("cancel: %d %s", r.Status, r.Body)
	}
	s.workers[0].died()
	if st := s.status(id); st != "cancelled" {
		t.Errorf("the tombstone is %q", st)
	}
	delete(s.workers[0].env, "SECKILL_WORKER_ROLES")
	s.workers[0].start("")
	s.settled(sale, false, id)
	if n := s.count("SELECT COUNT(*) FROM stock_ledger WHERE ref = ?", id); n != 0 {
		t.Errorf("the late order took stock: %d ledger rows", n)
	}
	if n := s.level(sale, "sku", "national"); n != 5 {
		t.Errorf("%d units on sale, want 5", n)
	}
	// He holds nothing and may buy again.
	if r := s.buy(0, sale, "c8", "other", 1); !r.accepted() {
		t.Errorf("buy again: %d %s", r.Status, r.Body)
	}
}

// C9: killed between the cancel in MySQL and the release in Redis, and after the release before the
// ack. The release runs, once.
func TestC9_KilledBetweenCancelAndRelease(t *testing.T) {
	t.Parallel()
	s := newStack(t, options{})
	sale := s.sell(5, 1, time.Minute)
	s.known(0, sale)
	var ids []string
	for i, point := range []string{"worker.cancel.after_commit", "worker.cancel.after_release"} {
		user := fmt.Sprintf("c9-%d", i)
		id := s.mustBuy(sale, user)
		ids = append(ids, id)
		s.becomes(id, "pending")
		s.workers[0].term()
		s.workers[0].start(point + "@1=kill")
		if r := s.cancel(id, user); !r.accepted() {
			t.Fatalf("cancel: %d %s", r.Status, r.Body)
		}
		s.workers[0].died()
		if st := s.status(id); st != "cancelled" {
			t.Errorf("%s: the row is %q", point, st)
		}
		if n := s.count("SELECT COUNT(*) FROM compensations WHERE subject = ?", id); n != 1 {
			t.Errorf("%s: %d compensations stand, want 1", point, n)
		}
		s.workers[0].start("")
		s.quiet(sale, false)
		if n := s.level(sale, "sku", "national"); n != 5 {
			t.Errorf("%s: %d units on sale, want 5", point, n)
		}
	}
	s.settled(sale, false, ids...)
}

// C10: the delay message is lost with the broker. A sweep finds the orders whose payment time is over.
func TestC10_DelayMessageLost(t *testing.T) {
	t.Parallel()
	s := newStack(t, options{})
	sale := s.sell(5, 1, 15*time.Second)
	s.known(0, sale)
	var ids []string
	for i := range 3 {
		ids = append(ids, s.mustBuy(sale, fmt.Sprintf("c10-%d", i)))
	}
	s.quiet(sale, true)
	ch := s.broker()
	purged, err := ch.QueuePurge("seckill.delay.15s", false)
	if err != nil {
		t.Fatal(err)
	}
	if purged == 0 {
		t.Fatal("no delay message was there to lose")
	}
	s.workers[0].kill9()
	s.workers[0].start("")
	if r := s.pay(ids[0], "txn-c10", 1); !r.accepted() {
		t.Fatalf("pay: %d %s", r.Status, r.Body)
	}
	for _, id := range ids[1:] {
		s.becomes(id, "cancelled")
	}
	s.settled(sale, false, ids...)
	s.paidOrDue(ids[0])
}

// O19, O26: nobody works while buyers pay in time, and when somebody does again, every payment time is over.
// Whatever is handled first, he who paid in time has bought; who did not has not.
func TestPaidInTimeWhileNobodyWorks(t *testing.T) {
	t.Parallel()
	s := newStack(t, options{})
	sale := s.sell(30, 1, 15*time.Second)
	s.known(0, sale)
	var ids []string
	for i := range 24 {
		ids = append(ids, s.mustBuy(sale, fmt.Sprintf("in-time-%d", i)))
	}
	s.quiet(sale, true)
	s.workers[0].kill9()
	paid, unpaid := ids[:20], ids[20:]
	for _, id := range paid {
		s.mustPay(id)
	}
	testkit.Eventually(t, within, func() error {
		if n := s.count("SELECT COUNT(*) FROM orders WHERE activity_id = ? AND pay_before > UTC_TIMESTAMP(6)", sale); n != 0 {
			return fmt.Errorf("%d orders can still be paid", n)
		}
		return nil
	})
	// The worst order of events: all expiries and sweeps first, then the money.
	s.workers[0].env["SECKILL_WORKER_ROLES"] = "rollbacks,scheduler,admin"
	s.workers[0].start("")
	for _, id := range unpaid {
		s.becomes(id, "cancelled")
	}
	testkit.Eventually(t, within, func() error {
		expired := s.workers[0].metric("seckill_rollbacks_total", `reason="expired",result="paying"`)
		swept := s.workers[0].metric("seckill_rollbacks_total", `reason="sweep",result="paying"`)
		if expired < 20 || swept < 20 {
			return fmt.Errorf("%v expiries and %v looks of the sweep have met money on its way", expired, swept)
		}
		return nil
	})
	s.workers[0].term()
	delete(s.workers[0].env, "SECKILL_WORKER_ROLES")
	s.workers[0].start("")
	for _, id := range paid {
		s.becomes(id, "paid")
	}
	if n := s.count("SELECT COUNT(*) FROM payments WHERE status <> 'applied'"); n != 0 {
		t.Errorf("%d payments were not applied", n)
	}
	s.settled(sale, false, ids...)
}

// C11: killed while draining and while replaying dead letters. Nothing lost, no second effect.
func TestC11_KilledAroundDeadLetters(t *testing.T) {
	t.Parallel()
	s := newStack(t, options{})
	sale := s.sell(5, 1, time.Minute)
	s.known(0, sale)
	// A message that nobody can decode is a letter whole.
	s.workers[0].term()
	s.workers[0].start("deadletter.after_insert@1=kill")
	s.publish("order.reserved", "broken-1", []byte("\x0a\x7fnot an order"))
	s.workers[0].died()
	s.workers[0].start("")
	letter := func() (id int64, state string, deaths int) {
		t.Helper()
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		rows, err := s.db.QueryContext(ctx, "SELECT id, state, occurrences FROM dead_letters WHERE message_id = 'broken-1'")
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = rows.Close() }()
		n := 0
		for rows.Next() {
			n++
			if err := rows.Scan(&id, &state, &deaths); err != nil {
				t.Fatal(err)
			}
		}
		if err := rows.Err(); err != nil || n > 1 {
			t.Fatalf("%d letters, %v", n, err)
		}
		return id, state, deaths
	}
	testkit.Eventually(t, within, func() error {
		if _, state, _ := letter(); state != "open" || s.depth("seckill.dead") != 0 {
			return fmt.Errorf("letter is %q", state)
		}
		return nil
	})
	for _, point := range []string{"replay.after_claim@1=kill", "replay.after_publish@1=kill"} {
		id, _, before := letter()
		s.workers[0].term()
		s.workers[0].start(point)
		if _, _, code := s.ctl("dead", "replay", fmt.Sprint(id), "--yes"); code == 0 && !s.workers[0].ended() {
			s.workers[0].died()
		}
		s.workers[0].died()
		s.workers[0].start("")
		testkit.Eventually(t, within, func() error {
			if _, state, deaths := letter(); state != "open" || deaths <= before {
				return fmt.Errorf("%s: letter is %s after %d deaths", point, state, deaths)
			}
			return nil
		})
	}
	// The good ones went on all the while.
	id := s.mustBuy(sale, "c11")
	s.becomes(id, "pending")
	if r := s.pay(id, "txn-c11", 1); !r.accepted() {
		t.Fatalf("pay: %d %s", r.Status, r.Body)
	}
	s.becomes(id, "paid")
	s.settled(sale, false, id)
	testkit.Eventually(t, within, func() error {
		if n := s.count("SELECT COUNT(*) FROM replay_jobs WHERE state <> 'done'"); n > 0 {
			return fmt.Errorf("%d replay jobs are not done", n)
		}
		return nil
	})
}
