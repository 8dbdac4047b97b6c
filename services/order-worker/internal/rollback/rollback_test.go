package rollback_test

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"seckill/pkg/messaging"
	"seckill/pkg/order"
	"seckill/pkg/sale"
	"seckill/pkg/testkit"
	"seckill/services/order-worker/internal/rollback"
	"seckill/services/order-worker/internal/store"
	"seckill/services/order-worker/internal/workertest"
)

// TestRollback shares one set of services: a vhost costs seconds to make.
func TestRollback(t *testing.T) {
	b := workertest.New(t, workertest.Options{})
	for name, f := range map[string]func(*testing.T, *workertest.Bench){
		"an expiry that comes too early is delayed again and hurts nobody":         tooEarly,
		"an expiry that is due gives unit and limit back in both stores":           due,
		"twenty cancels and two expiries give the unit back once":                  manyCancels,
		"an id that nobody knows is acked without effect":                          unknownID,
		"a cancel by id alone finds the content in redis":                          byRecord,
		"a cancel of a paid order changes nothing":                                 paidOrder,
		"the order's message after its cancel revives nothing":                     lateOrder,
		"killed between commit and release: the message comes again, or the sweep": diedBeforeRelease,
		"a release that meets no stock key is kept until there is one":             missingStockKey,
		"lost delays are swept":                                                    sweepsOrders,
		"an order whose money is on its way does not expire":                       moneyOnItsWay,
		"units go back to the pool they came from":                                 ownPool,
		"thousands of expiries are rolled back at the pace they were persisted":    manyExpiries,
		"a refund after the settlement goes to inventory, once":                    refundAfterSettlement,
		"a refund of what is not paid changes nothing":                             refundUnpaid,
		"broken and foreign messages are letters, the others go on":                broken,
		"what mysql refuses to take back holds up nobody else":                     refusedByMySQL,
		"a record that cannot be read holds up nobody":                             damagedRecords,
		"rows that somebody has changed hold up nobody":                            changedByHand,
		"what mysql refuses is swept past, and swept when it is mended":            refusedInSweep,
		"the end of a sale is handed to the settlement":                            ended,
		"cancels beside persists and payments under load keep every sum right":     besideEverything,
	} {
		t.Run(name, func(t *testing.T) { f(t, b) })
	}
}

func persisted(t *testing.T, b *workertest.Bench, units, n int, change ...func(*sale.Sale)) (*workertest.Sale, []order.Order) {
	t.Helper()
	s := b.Open(t, units, change...)
	orders := s.Buyers(n)
	workertest.Done(t, workertest.Handle(t, b.Persist.Handle, workertest.Each(orders)))
	return s, orders
}

func expired(orders ...order.Order) []messaging.Delivery {
	return workertest.Deliver(messaging.OrderExpired(orders))
}

func cancel(o order.Order, content bool) []messaging.Delivery {
	c := messaging.Cancel{OrderID: o.ID, Reason: order.ReasonUserCancelled, Actor: "user:" + o.User, RequestedAt: time.Now()}
	if content {
		c.Order = &o
	}
	return workertest.Deliver(messaging.CancelRequested(c))
}

func sweeper(t *testing.T, b *workertest.Bench) *rollback.Sweeper {
	return rollback.NewSweeper(b.Rollback, rollback.SweepConfig{Grace: time.Millisecond}, testkit.Logger(t))
}

// overdue makes orders look as if their payment time had passed, in message and row.
func overdue(t *testing.T, b *workertest.Bench, orders []order.Order) []order.Order {
	t.Helper()
	out := make([]order.Order, len(orders))
	for i, o := range orders {
		o.PayBefore = o.ReservedAt
		out[i] = o
		b.Exec(t, "UPDATE orders SET pay_before=reserved_at WHERE id=?", o.ID.String())
	}
	return out
}

// R16: pay_before <= now in MySQL's clock, else delayed again by the largest tier that fits.
func tooEarly(t *testing.T, b *workertest.Bench) {
	s, o := persisted(t, b, 10, 2)
	ghost := s.Forge("ghost", 1) // not persisted: its expiry is too early as well
	workertest.Done(t, workertest.Handle(t, b.Rollback.Handle, expired(o[0], o[1], ghost)))
	b.WantStatus(t, o[0].ID, order.Pending)
	b.WantStatus(t, o[1].ID, order.Pending)
	if b.Row(t, ghost.ID) != nil {
		t.Error("an early expiry left a tombstone")
	}
	s.Balanced()
	// It comes out of a tier that fits: 3 s are left, so 1 s tiers follow each other.
	close1 := o[0]
	close1.PayBefore = time.Now().Add(3 * time.Second)
	b.Exec(t, "UPDATE orders SET pay_before=? WHERE id=?", close1.PayBefore.UTC(), o[0].ID.String())
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		done <- b.Broker.Consume(ctx, messaging.ConsumerConfig{Queue: messaging.QueueRollbacks, Prefetch: 10}, b.Rollback.Handle)
	}()
	workertest.Done(t, workertest.Handle(t, b.Rollback.Handle, expired(close1)))
	testkit.Eventually(t, time.Minute, func() error {
		if row := b.Row(t, o[0].ID); row.Status != order.Cancelled {
			return fmt.Errorf("order is %s", row.Status)
		}
		return nil
	})
	stop()
	if err := <-done; err != nil {
		t.Error(err)
	}
	if late := time.Since(close1.PayBefore); late < 0 || late > 11*time.Second { // the tier of 15 s would be 12 s late
		t.Errorf("cancelled %s after its payment time", late)
	}
	s.Balanced()
}

func due(t *testing.T, b *workertest.Bench) {
	s, orders := persisted(t, b, 10, 3)
	orders = overdue(t, b, orders)
	workertest.Done(t, workertest.Handle(t, b.Rollback.Handle, expired(orders...)))
	for _, o := range orders {
		b.WantStatus(t, o.ID, order.Cancelled)
		if r := b.Record(t, o.ID).Reason; r != order.ReasonPaymentTimeout {
			t.Errorf("the buyer sees %q", r)
		}
	}
	if n := s.Left(workertest.Pool); n != 10 {
		t.Errorf("%d left, want 10", n)
	}
	s.Balanced()
	again := s.Reserve(orders[0].User, workertest.Pool, 1) // his limit is free
	workertest.Done(t, workertest.Handle(t, b.Persist.Handle, workertest.Each([]order.Order{again})))
	s.Balanced()
}

// O19, O26: after an outage a payment that came in time waits in one queue, the expiry in another. Whichever
// is handled first, the order is paid; money that never comes keeps nobody's goods for ever.
func moneyOnItsWay(t *testing.T, b *workertest.Bench) {
	s, orders := persisted(t, b, 10, 5)
	orders = overdue(t, b, orders)
	paying, stale, unpaid, future, cancelled := orders[0], orders[1], orders[2], orders[3], orders[4]
	for _, o := range []order.Order{paying, stale, future, cancelled} {
		if err := b.Stock.MarkPaying(t.Context(), o.ID); err != nil {
			t.Fatal(err)
		}
	}
	s.Noted(stale.ID, time.Now().Add(-16*time.Minute))
	s.Noted(future.ID, time.Now().Add(time.Hour))
	workertest.Done(t, workertest.Handle(t, b.Rollback.Handle, expired(orders[:4]...)))
	workertest.Done(t, workertest.Handle(t, b.Rollback.Handle, cancel(cancelled, false)))
	if _, err := sweeper(t, b).Orders(t.Context()); err != nil {
		t.Error(err)
	}
	if _, err := b.Rollback.CancelDue(t.Context(), s.ID); err != nil {
		t.Error(err)
	}
	b.WantStatus(t, paying.ID, order.Pending)
	for _, o := range []order.Order{stale, unpaid, future, cancelled} {
		b.WantStatus(t, o.ID, order.Cancelled)
	}
	money := messaging.OrderPaid(messaging.Payment{
		OrderID: paying.ID, TransactionID: "txn-" + paying.ID.ULID, AmountMinor: paying.UnitPriceMinor, Currency: paying.Currency, ReceivedAt: time.Now(),
	})
	workertest.Done(t, workertest.Handle(t, b.Payment.Handle, workertest.Deliver(money)))
	b.WantStatus(t, paying.ID, order.Paid)
	workertest.Done(t, workertest.Handle(t, b.Rollback.Handle, expired(paying)))
	b.WantStatus(t, paying.ID, order.Paid)
	if n := s.Left(workertest.Pool); n != 9 {
		t.Errorf("%d left, want 9", n)
	}
	s.Balanced()
}

// O27 (without the end).
func manyCancels(t *testing.T, b *workertest.Bench) {
	s, o := persisted(t, b, 5, 1)
	late := overdue(t, b, o)
	var wg sync.WaitGroup
	for i := range 22 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			batch := cancel(o[0], i%2 == 0)
			if i >= 20 {
				batch = expired(late...)
			}
			for _, r := range b.Rollback.Handle(context.Background(), batch) {
				if r.Hold != nil || len(r.Dead) > 0 {
					t.Errorf("got %+v", r)
				}
			}
		}()
	}
	wg.Wait()
	b.WantStatus(t, o[0].ID, order.Cancelled)
	if n := s.Left(workertest.Pool); n != 5 {
		t.Errorf("%d left, want 5", n)
	}
	if n := b.Int(t, "SELECT COUNT(*) FROM stock_ledger WHERE ref=? AND op='cancel'", o[0].ID.String()); n != 1 {
		t.Errorf("%d ledger rows for the cancel", n)
	}
	s.Balanced()
}

// O27, R18: no change, no error loop.
func unknownID(t *testing.T, b *workertest.Bench) {
	s := b.Open(t, 5)
	ghost := s.Forge("ghost", 1)
	workertest.Done(t, workertest.Handle(t, b.Rollback.Handle, cancel(ghost, false)))
	if b.Row(t, ghost.ID) != nil {
		t.Error("a row was written for an order that nobody knows")
	}
	if n := s.Left(workertest.Pool); n != 5 {
		t.Errorf("%d left, want 5", n)
	}
	s.Balanced()
}

// C8, R18: with a record in Redis there is content for a tombstone.
func byRecord(t *testing.T, b *workertest.Bench) {
	s := b.Open(t, 5)
	o := s.Buyers(1)[0]
	workertest.Done(t, workertest.Handle(t, b.Rollback.Handle, cancel(o, false)))
	b.WantStatus(t, o.ID, order.Cancelled)
	if row := b.Row(t, o.ID); row.Origin != store.OriginTombstone || row.UserID != o.User {
		t.Errorf("tombstone %+v", row)
	}
	workertest.Done(t, workertest.Handle(t, b.Persist.Handle, workertest.Each([]order.Order{o})))
	b.WantStatus(t, o.ID, order.Cancelled)
	if n := s.Left(workertest.Pool); n != 5 {
		t.Errorf("%d left, want 5", n)
	}
	s.Balanced()
}

func pay(t *testing.T, b *workertest.Bench, o order.Order) {
	t.Helper()
	p := messaging.Payment{OrderID: o.ID, TransactionID: "t" + o.ID.ULID, AmountMinor: workertest.PriceMinor, Currency: workertest.Currency, ReceivedAt: time.Now()}
	workertest.Done(t, workertest.Handle(t, b.Payment.Handle, workertest.Deliver(messaging.OrderPaid(p))))
}

func paidOrder(t *testing.T, b *workertest.Bench) {
	s, o := persisted(t, b, 5, 1)
	pay(t, b, o[0])
	workertest.Done(t, workertest.Handle(t, b.Rollback.Handle, cancel(o[0], true)))
	workertest.Done(t, workertest.Handle(t, b.Rollback.Handle, expired(overdue(t, b, o)...)))
	b.WantStatus(t, o[0].ID, order.Paid)
	s.Balanced()
}

// R1, R2: m1 guarded-status, steps-by-row.
func lateOrder(t *testing.T, b *workertest.Bench) {
	s, o := persisted(t, b, 5, 1)
	workertest.Done(t, workertest.Handle(t, b.Rollback.Handle, cancel(o[0], true)))
	for range 2 {
		workertest.Done(t, workertest.Handle(t, b.Persist.Handle, workertest.Each(o)))
		b.WantStatus(t, o[0].ID, order.Cancelled)
	}
	s.Balanced()
}

// C9, R3: committed with its compensation, then killed before the release.
func diedBeforeRelease(t *testing.T, b *workertest.Bench) {
	s, o := persisted(t, b, 5, 2)
	ctx := t.Context()
	err := b.Store.InTx(ctx, func(tx *store.Tx) error {
		ids := []string{o[0].ID.String(), o[1].ID.String()}
		rows, err := store.Orders(ctx, tx, ids, true)
		if err != nil {
			return err
		}
		list := []*store.Order{rows[ids[0]], rows[ids[1]]}
		if _, err := store.MoveOrders(ctx, tx, ids, order.Pending, order.Cancelled, order.ReasonUserCancelled); err != nil {
			return err
		}
		if err := store.Owe(ctx, tx, store.CompensateRelease, list, time.Hour); err != nil {
			return err
		}
		return store.ReturnUnits(ctx, tx, list, store.OpCancel)
	})
	if err != nil {
		t.Fatal(err)
	}
	if n := s.Left(workertest.Pool); n != 3 {
		t.Fatalf("%d left, want 3", n)
	}
	// One message comes again, the other was lost with the broker.
	workertest.Done(t, workertest.Handle(t, b.Rollback.Handle, cancel(o[0], true)))
	b.WantStatus(t, o[0].ID, order.Cancelled)
	if _, err := sweeper(t, b).Compensations(ctx); err != nil {
		t.Fatal(err)
	}
	if b.Record(t, o[1].ID).Status != order.Pending {
		t.Error("the compensation came up before its time")
	}
	b.Exec(t, "UPDATE compensations SET next_at=UTC_TIMESTAMP(6) WHERE subject=?", o[1].ID.String())
	together(t, 4, func() error {
		_, err := sweeper(t, b).Compensations(context.Background())
		return err
	})
	b.WantStatus(t, o[1].ID, order.Cancelled)
	if n := s.Left(workertest.Pool); n != 5 {
		t.Errorf("%d left, want 5", n)
	}
	s.Balanced()
}

func together(t *testing.T, n int, f func() error) {
	t.Helper()
	var wg sync.WaitGroup
	for range n {
		wg.Add(1)
		go func() {
			defer wg.Done()
			if err := f(); err != nil {
				t.Error(err)
			}
		}()
	}
	wg.Wait()
}

// A release that meets a missing stock key writes nothing and becomes a compensation (design §3).
func missingStockKey(t *testing.T, b *workertest.Bench) {
	s, o := persisted(t, b, 5, 1)
	restore := s.HideStock(workertest.Pool)
	workertest.Done(t, workertest.Handle(t, b.Rollback.Handle, cancel(o[0], true)))
	if row := b.Row(t, o[0].ID); row.Status != order.Cancelled {
		t.Errorf("row is %s", row.Status)
	}
	if got := b.Record(t, o[0].ID).Status; got != order.Pending {
		t.Errorf("record is %s although nothing was released", got)
	}
	due := func() {
		b.Exec(t, "UPDATE compensations SET next_at=UTC_TIMESTAMP(6) - INTERVAL 1 HOUR WHERE subject=?", o[0].ID.String())
		if _, err := sweeper(t, b).Compensations(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	due()
	if n := b.Int(t, "SELECT COUNT(*) FROM compensations WHERE subject=? AND attempts=1 AND last_error<>'' AND next_at>UTC_TIMESTAMP(6) - INTERVAL 30 MINUTE", o[0].ID.String()); n != 1 {
		t.Error("the compensation is not kept for later")
	}
	restore()
	due()
	b.WantStatus(t, o[0].ID, order.Cancelled)
	s.Balanced()
}

// C10, O19 b: the delay queue was lost; what was paid in between stays paid.
func sweepsOrders(t *testing.T, b *workertest.Bench) {
	s, o := persisted(t, b, 50, 50)
	overdue(t, b, o)
	pay(t, b, o[7])
	together(t, 3, func() error {
		for {
			more, err := sweeper(t, b).Orders(context.Background())
			if err != nil || !more {
				return err
			}
		}
	})
	for i, o := range o {
		want := order.Cancelled
		if i == 7 {
			want = order.Paid
		}
		b.WantStatus(t, o.ID, want)
	}
	if n := s.Left(workertest.Pool); n != 49 {
		t.Errorf("%d left, want 49", n)
	}
	s.Balanced()
}

func ownPool(t *testing.T, b *workertest.Bench) {
	s := b.Open(t, 0, workertest.Pools(map[string]int{"beijing": 2, "national": 3}))
	var orders []order.Order
	for _, pool := range []string{"beijing", "national", "beijing"} {
		orders = append(orders, s.Reserve(s.User(), pool, 1))
	}
	workertest.Done(t, workertest.Handle(t, b.Persist.Handle, workertest.Each(orders)))
	workertest.Done(t, workertest.Handle(t, b.Rollback.Handle, expired(overdue(t, b, orders)...)))
	if s.Left("beijing") != 2 || s.Left("national") != 3 {
		t.Errorf("beijing %d, national %d", s.Left("beijing"), s.Left("national"))
	}
	s.Balanced()
}

// Issue 3: "orders rolled back per second no slower than they were persisted".
func manyExpiries(t *testing.T, b *workertest.Bench) {
	const n = 4_000
	s := b.Open(t, n)
	orders := s.Buyers(n)
	run := func(h messaging.Handler, make func([]order.Order) messaging.Message) time.Duration {
		start := time.Now()
		for i := 0; i < n; i += 500 {
			var msgs []messaging.Message
			for j := i; j < i+500; j += 50 {
				msgs = append(msgs, make(orders[j:j+50]))
			}
			workertest.Work(t, h, workertest.Deliver(msgs...))
		}
		return time.Since(start)
	}
	persist := run(b.Persist.Handle, messaging.OrderReserved)
	b.Exec(t, "UPDATE orders SET pay_before=reserved_at WHERE activity_id=?", s.ID)
	back := run(b.Rollback.Handle, messaging.OrderExpired)
	t.Logf("%d orders persisted in %s, rolled back in %s", n, persist, back)
	if n := b.Int(t, "SELECT COUNT(*) FROM orders WHERE activity_id=? AND status='cancelled'", s.ID); n != len(orders) {
		t.Errorf("%d cancelled", n)
	}
	if s.Left(workertest.Pool) != n {
		t.Errorf("%d left", s.Left(workertest.Pool))
	}
	s.Balanced()
}

// R6: MySQL decides, in the transaction and under the pool row's lock, whether the sale is over.
func refundAfterSettlement(t *testing.T, b *workertest.Bench) {
	for _, c := range []struct{ where, target string }{{"national", "national"}, {"region", "beijing"}} {
		s := b.Open(t, 0, workertest.Pools(map[string]int{"beijing": 3}), func(p *sale.Sale) { p.RefundAfterEnd = c.where })
		b.Exec(t, "UPDATE activities SET shadow=0 WHERE id=?", s.ID)
		before := b.Int(t, "SELECT COALESCE(SUM(on_hand),0) FROM inventory WHERE sku_id=? AND pool=?", workertest.SKU, c.target)
		o := s.Reserve(s.User(), "beijing", 1)
		workertest.Done(t, workertest.Handle(t, b.Persist.Handle, workertest.Each([]order.Order{o})))
		pay(t, b, o)
		// What settlement does to the pool's row.
		b.Exec(t, "INSERT INTO stock_ledger VALUES (CONCAT(?,'/settle'),'settle','sale',?,?,'beijing',-2,UTC_TIMESTAMP(6))", s.ID, s.ID, workertest.SKU)
		b.Exec(t, "UPDATE activity_stock SET returned=available, available=0, settled_at=UTC_TIMESTAMP(6) WHERE activity_id=?", s.ID)
		ask := messaging.RefundRequested(messaging.Refund{OrderID: o.ID, Reason: "damaged", Actor: "operator:x", RequestedAt: time.Now()})
		for range 2 {
			workertest.Done(t, workertest.Handle(t, b.Rollback.Handle, workertest.Deliver(ask)))
		}
		b.WantStatus(t, o.ID, order.Refunded)
		if after := b.Int(t, "SELECT COALESCE(SUM(on_hand),0) FROM inventory WHERE sku_id=? AND pool=?", workertest.SKU, c.target); after != before+1 {
			t.Errorf("%s: inventory went from %d to %d", c.where, before, after)
		}
		if n := b.Int(t, "SELECT COALESCE(SUM(delta),0) FROM stock_ledger WHERE activity_id=? AND account='inventory' AND op='settle' AND pool=?", s.ID, c.target); n != 1 {
			t.Errorf("%s: the ledger explains %d units in inventory", c.where, n)
		}
		s.BalancedInMySQL()
	}
}

func refundUnpaid(t *testing.T, b *workertest.Bench) {
	s, o := persisted(t, b, 5, 2)
	workertest.Done(t, workertest.Handle(t, b.Rollback.Handle, cancel(o[1], true)))
	for i, want := range []order.Status{order.Pending, order.Cancelled} {
		ask := messaging.RefundRequested(messaging.Refund{OrderID: o[i].ID, Reason: "x", Actor: "operator:x", RequestedAt: time.Now()})
		workertest.Done(t, workertest.Handle(t, b.Rollback.Handle, workertest.Deliver(ask)))
		b.WantStatus(t, o[i].ID, want)
	}
	s.Balanced()
}

func broken(t *testing.T, b *workertest.Bench) {
	s, o := persisted(t, b, 5, 1)
	var batch []messaging.Delivery
	for _, key := range []string{messaging.KeyOrderExpired, messaging.KeyOrderCancelRequested, messaging.KeyOrderRefundRequested, messaging.KeyActivityEnded, "order.eaten"} {
		batch = append(batch, workertest.Deliver(messaging.Message{ID: key, Key: key, Body: []byte("\xffnonsense"), Orders: 1})...)
	}
	results := workertest.Handle(t, b.Rollback.Handle, append(batch, cancel(o[0], true)...))
	for i, r := range results {
		if want := i < len(batch); (len(r.Dead) == 1) != want {
			t.Errorf("delivery %d: %+v", i, r)
		}
	}
	b.WantStatus(t, o[0].ID, order.Cancelled)
	s.Balanced()
}

// letterOf fails the test unless exactly one of the results has a letter, and gives it.
func letterOf(t *testing.T, results []messaging.Result) messaging.Dead {
	t.Helper()
	var dead []messaging.Dead
	for _, r := range results {
		dead = append(dead, r.Dead...)
	}
	if len(dead) != 1 {
		t.Fatalf("%d letters: %+v", len(dead), dead)
	}
	if dead[0].Class != rollback.ClassRefused || dead[0].Err == nil {
		t.Errorf("letter %+v", dead[0])
	}
	return dead[0]
}

// One order that MySQL will not change held every sale's rollbacks.
func refusedByMySQL(t *testing.T, b *workertest.Bench) {
	s, o := persisted(t, b, 40, 20)
	o = overdue(t, b, o)
	allow := b.Refuse(t, "UPDATE ON orders", "NEW.id='"+o[3].ID.String()+"'")

	// An expiry that shares its message: only the culprit becomes a letter, in a message of its own.
	letter := letterOf(t, workertest.Handle(t, b.Rollback.Handle, expired(o[:10]...)))
	if good, _, err := messaging.DecodeOrderExpired(letter.Message); err != nil || len(good) != 1 || good[0].ID != o[3].ID {
		t.Errorf("letter of %+v, %v", good, err)
	}
	// A cancel and a refund beside others.
	pay(t, b, o[10])
	refund := func(o order.Order) messaging.Delivery {
		return workertest.Deliver(messaging.RefundRequested(messaging.Refund{OrderID: o.ID, Reason: "x", Actor: "operator:x", RequestedAt: time.Now()}))[0]
	}
	batch := append(cancel(o[3], true), append(cancel(o[11], false), refund(o[10]))...)
	if letter := letterOf(t, workertest.Handle(t, b.Rollback.Handle, batch)); letter.Message.ID != batch[0].ID {
		t.Errorf("letter %s, want %s", letter.Message.ID, batch[0].ID)
	}
	pay(t, b, o[12])
	pay(t, b, o[13])
	refuse := b.Refuse(t, "UPDATE ON orders", "NEW.status='refunded' AND NEW.id='"+o[12].ID.String()+"'")
	batch = []messaging.Delivery{refund(o[12]), refund(o[13])}
	if letter := letterOf(t, workertest.Handle(t, b.Rollback.Handle, batch)); letter.Message.ID != batch[0].ID {
		t.Errorf("letter %s, want %s", letter.Message.ID, batch[0].ID)
	}
	for i, want := range map[int]order.Status{2: order.Cancelled, 3: order.Pending, 9: order.Cancelled, 10: order.Refunded,
		11: order.Cancelled, 12: order.Paid, 13: order.Refunded} {
		b.WantStatus(t, o[i].ID, want)
	}
	s.Balanced()

	// Mended, the letters are sent again.
	allow()
	refuse()
	again := append(workertest.Deliver(letter.Message), batch[0])
	workertest.Done(t, workertest.Handle(t, b.Rollback.Handle, again))
	b.WantStatus(t, o[3].ID, order.Cancelled)
	b.WantStatus(t, o[12].ID, order.Refunded)
	s.Balanced()
}

// A purchase record that somebody has overwritten held the rollbacks, orders or payments of every sale,
// by which of them met it.
func damagedRecords(t *testing.T, b *workertest.Bench) {
	s, o := persisted(t, b, 20, 6)
	// A cancel by id alone, of an order that MySQL does not know yet, needs the record.
	late := s.Buyers(1)[0]
	restore := s.Damage(late.ID)
	batch := append(cancel(late, false), cancel(o[0], false)...)
	if letter := letterOf(t, workertest.Handle(t, b.Rollback.Handle, batch)); letter.Message.ID != batch[0].ID {
		t.Errorf("letter %s, want %s", letter.Message.ID, batch[0].ID)
	}
	b.WantStatus(t, o[0].ID, order.Cancelled)
	restore()
	workertest.Done(t, workertest.Handle(t, b.Rollback.Handle, batch[:1]))
	b.WantStatus(t, late.ID, order.Cancelled)

	// Money for an order that is cancelled: due for refund, whatever its record looks like.
	workertest.Done(t, workertest.Handle(t, b.Rollback.Handle, append(cancel(o[1], true), cancel(o[2], true)...)))
	restore = s.Damage(o[1].ID)
	pay(t, b, o[1])
	pay(t, b, o[2])
	if n := b.Int(t, "SELECT COUNT(*) FROM payments WHERE order_id IN (?, ?) AND status='refund_due'", o[1].ID.String(), o[2].ID.String()); n != 2 {
		t.Errorf("%d payments are due for refund, want 2", n)
	}
	restore()

	// A reservation whose content cannot be trusted is released by its record: kept for later.
	bad := s.Buyers(2)
	restore = s.Damage(bad[0].ID)
	tampered := func(o order.Order) messaging.Message {
		o.Quantity = 0
		return messaging.OrderReserved([]order.Order{o})
	}
	for i, r := range workertest.Handle(t, b.Persist.Handle, workertest.Deliver(tampered(bad[0]), tampered(bad[1]))) {
		if len(r.Dead) != 1 {
			t.Errorf("delivery %d: %+v", i, r)
		}
	}
	b.WantStatus(t, bad[1].ID, order.Rejected)
	restore()
	b.Exec(t, "UPDATE compensations SET next_at=UTC_TIMESTAMP(6) WHERE activity_id=?", s.ID)
	if _, err := sweeper(t, b).Compensations(t.Context()); err != nil {
		t.Error(err)
	}
	b.WantStatus(t, bad[0].ID, order.Rejected)
	s.Balanced()
}

// Rows with a status that nobody knows, and rows set back to a state that they have left, held the
// rollbacks of every sale, and the sweep.
func changedByHand(t *testing.T, b *workertest.Bench) {
	s, o := persisted(t, b, 20, 8)
	o = overdue(t, b, o)
	b.Exec(t, "UPDATE orders SET status='shipped' WHERE id=?", o[0].ID.String())
	b.Exec(t, "UPDATE orders SET status='reserved' WHERE id=?", o[1].ID.String())
	workertest.Done(t, workertest.Handle(t, b.Rollback.Handle, expired(o[2])))
	b.Exec(t, "UPDATE orders SET status='pending' WHERE id=?", o[2].ID.String())
	dead := map[string]bool{}
	for _, r := range workertest.Handle(t, b.Rollback.Handle, expired(o[:6]...)) {
		for _, d := range r.Dead {
			good, _, err := messaging.DecodeOrderExpired(d.Message)
			if err != nil || len(good) != 1 || d.Class != rollback.ClassRefused {
				t.Fatalf("%+v, %v", d, err)
			}
			dead[good[0].ID.String()] = true
		}
	}
	for i := range o[:6] {
		if dead[o[i].ID.String()] != (i < 3) {
			t.Errorf("order %d: a letter: %v", i, dead[o[i].ID.String()])
		}
	}
	for _, o := range o[3:6] {
		b.WantStatus(t, o.ID, order.Cancelled)
	}
	// The sweep meets the third, whose units have come back already, and goes past it.
	sweep := sweeper(t, b)
	for more := true; more; {
		var err error
		if more, err = sweep.Orders(context.Background()); err != nil {
			t.Fatal(err)
		}
	}
	b.WantStatus(t, o[6].ID, order.Cancelled)
	b.WantStatus(t, o[7].ID, order.Cancelled)
	// Put right by hand, as it was changed.
	b.Exec(t, "UPDATE orders SET status='cancelled' WHERE id=?", o[2].ID.String())
	b.Exec(t, "UPDATE orders SET status='pending' WHERE id IN (?, ?)", o[0].ID.String(), o[1].ID.String())
	workertest.Done(t, workertest.Handle(t, b.Rollback.Handle, expired(o[:3]...)))
	for _, o := range o {
		b.WantStatus(t, o.ID, order.Cancelled)
	}
	s.Balanced()
}

func refusedInSweep(t *testing.T, b *workertest.Bench) {
	const n = 600 // more than a page
	s, o := persisted(t, b, n, n)
	overdue(t, b, o)
	users := make([]string, n)
	for i, o := range o {
		users[i] = o.User
	}
	slices.Sort(users)
	last := users[519] // a page of refusals, and some
	allow := b.Refuse(t, "UPDATE ON orders", "NEW.activity_id='"+s.ID+"' AND NEW.reason='payment_timeout' AND NEW.user_id<='"+last+"'")
	count := func() int {
		return b.Int(t, "SELECT COUNT(*) FROM orders WHERE activity_id=? AND status='cancelled'", s.ID)
	}
	// A page full of refusals stands before the others.
	b.Exec(t, "UPDATE orders SET pay_before=pay_before - INTERVAL 1 HOUR WHERE activity_id=? AND user_id<=?", s.ID, last)
	sweep := sweeper(t, b)
	for more := true; more; {
		var err error
		if more, err = sweep.Orders(context.Background()); err != nil {
			t.Fatal(err)
		}
	}
	if got := count(); got != n-520 {
		t.Errorf("%d orders swept, want %d", got, n-520)
	}
	s.Balanced()
	if found, err := b.Rollback.CancelDue(t.Context(), s.ID); err == nil || found != 520 {
		t.Errorf("the end of a sale took %d refused orders for done: %v", found, err)
	}
	allow()
	if found, err := b.Rollback.CancelDue(t.Context(), s.ID); err != nil || found != 520 {
		t.Errorf("%d found, %v", found, err)
	}
	if got := count(); got != n {
		t.Errorf("%d of %d cancelled", got, n)
	}
	s.Balanced()
}

func ended(t *testing.T, b *workertest.Bench) {
	s := b.Open(t, 5)
	workertest.Done(t, workertest.Handle(t, b.Rollback.Handle, workertest.Deliver(messaging.ActivityEnded(s.ID, time.Now()))))
	s.Balanced()
}

// P1, P4 under load: O22's shape with cancels and payments beside it, and a session that holds the
// pool's row now and then.
func besideEverything(t *testing.T, b *workertest.Bench) {
	s := b.Open(t, 300, workertest.Limit(2))
	orders := make([]order.Order, 300)
	for i := range orders {
		orders[i] = s.Forge(fmt.Sprintf("u%d", i/2), 1)
	}
	stop := make(chan struct{})
	var blocker, wg sync.WaitGroup
	blocker.Add(1)
	go func() {
		defer blocker.Done()
		for {
			err := b.Store.InTx(context.Background(), func(tx *store.Tx) error {
				if _, err := store.LockPools(context.Background(), tx, []store.Pool{{Activity: s.ID, SKU: workertest.SKU, Pool: workertest.Pool}}); err != nil {
					return err
				}
				_, err := tx.ExecContext(context.Background(), "SELECT SLEEP(0.1)")
				return err
			})
			if err != nil {
				t.Error(err)
			}
			select {
			case <-stop:
				return
			case <-time.After(50 * time.Millisecond):
			}
		}
	}()
	for w := range 4 {
		part := orders[w*75 : (w+1)*75]
		wg.Add(3)
		go func() {
			defer wg.Done()
			for i := 0; i < len(part); i += 15 {
				workertest.Work(t, b.Persist.Handle, workertest.Each(part[i:i+15]))
			}
		}()
		go func() {
			defer wg.Done()
			for i := 0; i < len(part); i += 3 {
				workertest.Work(t, b.Rollback.Handle, cancel(part[i], true))
			}
		}()
		go func() {
			defer wg.Done()
			for i := 1; i < len(part); i += 3 {
				p := messaging.Payment{OrderID: part[i].ID, TransactionID: "t" + part[i].ID.ULID, AmountMinor: workertest.PriceMinor, Currency: workertest.Currency, ReceivedAt: time.Now()}
				workertest.Work(t, b.Payment.Handle, workertest.Deliver(messaging.OrderPaid(p)))
			}
		}()
	}
	wg.Wait()
	close(stop)
	blocker.Wait()
	want := map[string]int{"cancelled": 100, "paid": 100, "pending": 100}
	for status, n := range want {
		if got := b.Int(t, "SELECT COUNT(*) FROM orders WHERE activity_id=? AND status=?", s.ID, status); got != n {
			t.Errorf("%d %s, want %d", got, status, n)
		}
	}
	s.BalancedInMySQL()
}
