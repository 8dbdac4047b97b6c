package persist_test

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"seckill/pkg/messaging"
	"seckill/pkg/order"
	orderv1 "seckill/proto/seckill/order/v1"
	"seckill/services/order-worker/internal/persist"
	"seckill/services/order-worker/internal/store"
	"seckill/services/order-worker/internal/workertest"
)

// TestPersist shares one set of services: a vhost costs seconds to make.
func TestPersist(t *testing.T) {
	b := workertest.New(t, workertest.Options{})
	for name, f := range map[string]func(*testing.T, *workertest.Bench){
		"one duplicate and one faulty order in a batch harm no other":                 duplicateAndFaulty,
		"a backlog of forty thousand fits into no limit of the server":                backlog,
		"the same message again and again, also to two handlers at once, is one row":  sameMessage,
		"copies of one order inside a batch are one row":                              copiesInBatch,
		"an id that is stored with other content is a conflict":                       conflict,
		"mysql with less stock than redis rejects the rest and withholds it":          smallerStock,
		"the last guard of the per-user limit rejects and gives the unit back":        limitGuard,
		"two batches with two orders of one user do not pass his limit":               limitRace,
		"an order of an unknown sale is rejected and a letter":                        unknownActivity,
		"an order that cannot be read is rejected by its id and gets its unit back":   invalidOrder,
		"broken messages are letters and hold up nobody":                              broken,
		"what stands in an order's way makes it a letter, whatever mysql calls it":    inTheWay,
		"an order whose row was deleted by hand is a letter, the others are written":  deletedByHand,
		"what mysql refuses to write at all is a letter, the others are written":      refusedByMySQL,
		"a payment that came first is applied by the order's own handler":             keptPayment,
		"ids above two to the fifty-third survive":                                    bigIDs,
		"an order whose tombstone came first takes no stock":                          tombstoneFirst,
		"expiry messages carry their own order":                                       expiryMessages,
		"the rows decide what follows when the first handler died after its commit":   diedAfterCommit,
		"letters of an order are resolved when it is written, contradictions are not": resolvesLetters,
	} {
		t.Run(name, func(t *testing.T) { f(t, b) })
	}
}

// O23, R13: one duplicate and one faulty order in a batch of fifty.
func duplicateAndFaulty(t *testing.T, b *workertest.Bench) {
	s := b.Open(t, 60)
	orders := s.Buyers(50)
	workertest.Done(t, workertest.Handle(t, b.Persist.Handle, workertest.Each(orders[7:8])))
	batch := workertest.Each(orders)
	batch[20] = workertest.Deliver(tamper(t, orders[20], func(o *orderv1.Order) { o.UserId = strings.Repeat("x", 300) }))[0]

	results := workertest.Handle(t, b.Persist.Handle, batch)
	for i, r := range results {
		if i == 20 {
			if len(r.Dead) != 1 || r.Dead[0].Class != "invalid_order" {
				t.Errorf("faulty order: %+v", r)
			}
		} else if len(r.Dead) > 0 {
			t.Errorf("order %d became a letter: %v", i, r.Dead[0].Err)
		}
	}
	if n := b.Int(t, "SELECT COUNT(*) FROM orders WHERE activity_id=? AND status='pending'", s.ID); n != 49 {
		t.Errorf("%d pending rows, want 49", n)
	}
	if n := b.Int(t, "SELECT available FROM activity_stock WHERE activity_id=?", s.ID); n != 60-49 {
		t.Errorf("%d units available, want %d", n, 60-49)
	}
	b.WantStatus(t, orders[20].ID, order.Rejected)
	s.Balanced()
}

// O23: no 1390 (too many placeholders) and no packet error, in batches far larger than usual.
func backlog(t *testing.T, b *workertest.Bench) {
	s := b.Open(t, 40_000)
	const size = 64
	var msgs []messaging.Message
	for range 40_000 / size {
		orders := make([]order.Order, size)
		for i := range orders {
			orders[i] = s.Forge(s.User(), 1)
		}
		msgs = append(msgs, messaging.OrderReserved(orders))
	}
	start := time.Now()
	for len(msgs) > 0 {
		n := min(len(msgs), 64) // 4,096 orders in one transaction
		workertest.Done(t, workertest.Handle(t, b.Persist.Handle, workertest.Deliver(msgs[:n]...)))
		msgs = msgs[n:]
	}
	t.Logf("40,000 orders in %s", time.Since(start))
	if n := b.Int(t, "SELECT live FROM activity_stock WHERE activity_id=?", s.ID); n != 40_000 {
		t.Errorf("%d live units, want 40000", n)
	}
	if n := b.Int(t, "SELECT COUNT(*) FROM orders WHERE activity_id=?", s.ID); n != 40_000 {
		t.Errorf("%d rows, want 40000", n)
	}
}

// O16 b, R13: five copies, different message ids, two handlers at once.
func sameMessage(t *testing.T, b *workertest.Bench) {
	s := b.Open(t, 10)
	o := s.Buyers(1)[0]
	var wg sync.WaitGroup
	for i := range 2 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			for j := range 5 {
				d := workertest.Each([]order.Order{o})
				d[0].ID = fmt.Sprintf("copy-%d-%d", i, j)
				for _, r := range b.Persist.Handle(context.Background(), d) {
					if r.Hold != nil || len(r.Dead) > 0 {
						t.Errorf("copy %d-%d: %+v", i, j, r)
					}
				}
			}
		}()
	}
	wg.Wait()
	b.WantStatus(t, o.ID, order.Pending)
	if n := b.Int(t, "SELECT available FROM activity_stock WHERE activity_id=?", s.ID); n != 9 {
		t.Errorf("%d available, want 9", n)
	}
	s.Balanced()
}

// R13: m8, one order twice in one batch.
func copiesInBatch(t *testing.T, b *workertest.Bench) {
	s := b.Open(t, 10)
	o := s.Buyers(3)
	batch := workertest.Each([]order.Order{o[0], o[0], o[1], o[2], o[1]})
	batch = append(batch, workertest.Deliver(messaging.OrderReserved(o))...)
	workertest.Done(t, workertest.Handle(t, b.Persist.Handle, batch))
	if n := b.Int(t, "SELECT available FROM activity_stock WHERE activity_id=?", s.ID); n != 7 {
		t.Errorf("%d available, want 7", n)
	}
	s.Balanced()
}

// The same id with another quantity: a dead letter, nothing else (design §2).
func conflict(t *testing.T, b *workertest.Bench) {
	s := b.Open(t, 10, workertest.Limit(5))
	o := s.Buyers(2)
	workertest.Done(t, workertest.Handle(t, b.Persist.Handle, workertest.Each(o[:1])))
	other := o[0]
	other.Quantity = 3
	results := workertest.Handle(t, b.Persist.Handle, workertest.Deliver(messaging.OrderReserved([]order.Order{other, o[1]})))
	if len(results[0].Dead) != 1 || results[0].Dead[0].Class != "conflict" || results[0].Dead[0].Message.Orders != 1 {
		t.Fatalf("got %+v", results[0])
	}
	if row := b.Row(t, o[0].ID); row.Quantity != 1 || row.Status != order.Pending {
		t.Errorf("row changed: %+v", row)
	}
	b.WantStatus(t, o[1].ID, order.Pending)
	s.Balanced()
}

// O24 (up to the realignment), R7: Redis 10, MySQL 3.
func smallerStock(t *testing.T, b *workertest.Bench) {
	s := b.Open(t, 10)
	b.Exec(t, "UPDATE activity_stock SET available=3 WHERE activity_id=?", s.ID)
	orders := s.Buyers(10)
	workertest.Done(t, workertest.Handle(t, b.Persist.Handle, workertest.Each(orders)))
	pending, rejected := 0, 0
	for _, o := range orders {
		switch row := b.Row(t, o.ID); row.Status {
		case order.Pending:
			pending++
		case order.Rejected:
			rejected++
			if rec := b.Record(t, o.ID); rec.Reason != order.ReasonOutOfStock || rec.Status != order.Rejected {
				t.Errorf("the buyer sees %s (%s)", rec.Status, rec.Reason)
			}
		}
	}
	if pending != 3 || rejected != 7 {
		t.Errorf("%d pending and %d rejected, want 3 and 7", pending, rejected)
	}
	if n := b.Int(t, "SELECT available FROM activity_stock WHERE activity_id=?", s.ID); n != 0 {
		t.Errorf("%d available in mysql, want exactly 0", n)
	}
	if n := s.Left(workertest.Pool); n != 0 {
		t.Errorf("redis sells %d more: rejected units came back", n)
	}
	if n := b.Int(t, "SELECT COUNT(*) FROM compensations WHERE kind='reconcile' AND subject=?", s.ID); n != 1 {
		t.Errorf("%d requests for reconciliation, want 1", n)
	}
	s.Balanced()
	// A redelivery changes nothing.
	workertest.Done(t, workertest.Handle(t, b.Persist.Handle, workertest.Each(orders)))
	s.Balanced()
}

// R14, R7: Redis lost a user's limit key; MySQL's counter row refuses his second order.
func limitGuard(t *testing.T, b *workertest.Bench) {
	s := b.Open(t, 10)
	orders := s.Buyers(5)
	workertest.Done(t, workertest.Handle(t, b.Persist.Handle, workertest.Each(orders[:2])))
	again := s.Forge(orders[0].User, 1)
	batch := append(workertest.Each(orders[2:]), workertest.Each([]order.Order{again})...)
	workertest.Done(t, workertest.Handle(t, b.Persist.Handle, batch))
	if row := b.Row(t, again.ID); row.Status != order.Rejected || row.Reason != order.ReasonLimitExceeded {
		t.Errorf("got %+v", row)
	}
	for _, o := range orders {
		b.WantStatus(t, o.ID, order.Pending)
	}
	s.Balanced()
}

// R14: m8, two orders of one user in two batches at once, many times.
func limitRace(t *testing.T, b *workertest.Bench) {
	s := b.Open(t, 1000)
	for range 10 {
		var left, right []order.Order
		for range 8 {
			u := s.User()
			left, right = append(left, s.Forge(u, 1)), append(right, s.Forge(u, 1))
		}
		var wg sync.WaitGroup
		for _, orders := range [][]order.Order{left, right} {
			wg.Add(1)
			go func() {
				defer wg.Done()
				for _, r := range b.Persist.Handle(context.Background(), workertest.Each(orders)) {
					if r.Hold != nil {
						t.Errorf("held: %v", r.Hold)
					}
				}
			}()
		}
		wg.Wait()
	}
	if n := b.Int(t, "SELECT COUNT(*) FROM user_holdings WHERE activity_id=? AND held<>1", s.ID); n != 0 {
		t.Errorf("%d users do not hold exactly one", n)
	}
	if n := b.Int(t, "SELECT COUNT(*) FROM orders WHERE activity_id=? AND status='pending'", s.ID); n != 80 {
		t.Errorf("%d pending, want 80", n)
	}
	if n := b.Int(t, "SELECT COUNT(*) FROM orders WHERE activity_id=? AND status='rejected' AND reason='limit_exceeded'", s.ID); n != 80 {
		t.Errorf("%d rejected, want 80", n)
	}
}

// O17: unknown activity.
func unknownActivity(t *testing.T, b *workertest.Bench) {
	s := b.Open(t, 10)
	good := s.Buyers(2)
	ghost := s.Forge("nobody", 1)
	ghost.ID.Activity = "ghost"
	noPool := s.Forge("somebody", 1)
	noPool.Pool = "mars"
	results := workertest.Handle(t, b.Persist.Handle, workertest.Each([]order.Order{good[0], ghost, noPool, good[1]}))
	for _, i := range []int{1, 2} {
		if len(results[i].Dead) != 1 || results[i].Dead[0].Class != "unknown_activity" {
			t.Errorf("got %+v", results[i])
		}
	}
	for _, o := range []order.Order{ghost, noPool} {
		if row := b.Row(t, o.ID); row == nil || row.Status != order.Rejected || row.Reason != order.ReasonUnknownActivity {
			t.Errorf("row %+v", row)
		}
	}
	for _, o := range good {
		b.WantStatus(t, o.ID, order.Pending)
	}
	s.Balanced()
}

// O34: a message that fails for good by its content: that buyer is told, his unit is back.
func invalidOrder(t *testing.T, b *workertest.Bench) {
	s := b.Open(t, 10)
	o := s.Buyers(2)
	m := tamper(t, o[0], func(o *orderv1.Order) { o.Currency = "euros" })
	results := workertest.Handle(t, b.Persist.Handle, append(workertest.Deliver(m), workertest.Each(o[1:])...))
	if len(results[0].Dead) != 1 || len(results[1].Dead) != 0 {
		t.Fatalf("got %+v", results)
	}
	b.WantStatus(t, o[0].ID, order.Rejected)
	b.WantStatus(t, o[1].ID, order.Pending)
	if n := s.Left(workertest.Pool); n != 9 {
		t.Errorf("%d left, want 9", n)
	}
	s.Balanced()
}

// An order that MySQL takes neither as it is nor as rejected held the orders of every sale.
func refusedByMySQL(t *testing.T, b *workertest.Bench) {
	s := b.Open(t, 20)
	o := s.Buyers(10)
	bad := s.Forge(s.User(), 1)
	allow := b.Refuse(t, "INSERT ON orders", "NEW.id IN ('"+o[6].ID.String()+"','"+bad.ID.String()+"')")
	m := tamper(t, bad, func(o *orderv1.Order) { o.Currency = "euros" })
	results := workertest.Handle(t, b.Persist.Handle, append(workertest.Each(o), workertest.Deliver(m)...))
	for i, r := range results {
		switch {
		case i == 6 && (len(r.Dead) != 1 || r.Dead[0].Class != persist.ClassRefused),
			i == 10 && (len(r.Dead) != 1 || r.Dead[0].Class != persist.ClassInvalidOrder),
			i != 6 && i != 10 && len(r.Dead) != 0:
			t.Errorf("delivery %d: %+v", i, r)
		}
	}
	for i := range o {
		if row := b.Row(t, o[i].ID); (row == nil) != (i == 6) {
			t.Errorf("order %d: row %+v", i, row)
		}
	}
	if r := b.Record(t, o[6].ID); r.Status != order.Reserved {
		t.Errorf("the buyer sees %s", r.Status)
	}
	allow()
	workertest.Done(t, workertest.Handle(t, b.Persist.Handle, workertest.Deliver(results[6].Dead[0].Message)))
	b.WantStatus(t, o[6].ID, order.Pending)
	s.Balanced()
}

// Errors that come from the shop's own triggers and keys held the orders of every sale.
func inTheWay(t *testing.T, b *workertest.Bench) {
	for _, then := range []string{
		"SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT='not in this shop'",
		"SIGNAL SQLSTATE '23000' SET MYSQL_ERRNO=1452, MESSAGE_TEXT='a foreign key'",
		"INSERT INTO gone_for_good VALUES (1)",
	} {
		s := b.Open(t, 20)
		o := s.Buyers(5)
		allow := b.Trigger(t, "INSERT ON orders", "NEW.user_id='"+o[2].User+"' AND NEW.activity_id='"+s.ID+"'", then)
		results := workertest.Handle(t, b.Persist.Handle, workertest.Each(o))
		for i, r := range results {
			if (len(r.Dead) == 1) != (i == 2) || i == 2 && r.Dead[0].Class != persist.ClassRefused {
				t.Errorf("%s: delivery %d: %+v", then, i, r)
			}
		}
		if b.Row(t, o[2].ID) != nil {
			t.Errorf("%s: the order was given up, though what stands in its way can be taken away", then)
		}
		allow()
		workertest.Done(t, workertest.Handle(t, b.Persist.Handle, workertest.Deliver(results[2].Dead[0].Message)))
		b.WantStatus(t, o[2].ID, order.Pending)
		s.Balanced()
	}
}

// Its ledger entry is still there, so it can be written neither again nor never.
func deletedByHand(t *testing.T, b *workertest.Bench) {
	s := b.Open(t, 20)
	o := s.Buyers(4)
	workertest.Done(t, workertest.Handle(t, b.Persist.Handle, workertest.Each(o[:2])))
	b.Exec(t, "DELETE FROM orders WHERE id=?", o[1].ID.String())
	for i, r := range workertest.Handle(t, b.Persist.Handle, workertest.Each(o)) {
		if (len(r.Dead) == 1) != (i == 1) || i == 1 && r.Dead[0].Class != persist.ClassRefused {
			t.Errorf("delivery %d: %+v", i, r)
		}
	}
	b.WantStatus(t, o[2].ID, order.Pending)
	b.WantStatus(t, o[3].ID, order.Pending)
}

// O17, O03: bodies that nobody can handle, in the middle of good ones.
func broken(t *testing.T, b *workertest.Bench) {
	s := b.Open(t, 10)
	o := s.Buyers(2)
	batch := workertest.Each(o[:1])
	for _, body := range [][]byte{nil, []byte("{}"), []byte(strings.Repeat("x", 2<<20)), {0xff, 0xff}} {
		batch = append(batch, workertest.Deliver(messaging.Message{ID: "broken", Key: messaging.KeyOrderReserved, Body: body, Orders: 1})...)
	}
	batch = append(batch, workertest.Deliver(
		tamper(t, s.Forge("a", 1), func(o *orderv1.Order) { o.OrderId = "" }),
		tamper(t, s.Forge("b", 1), func(o *orderv1.Order) { o.Quantity = 0 }),
		tamper(t, s.Forge("c", 1), func(o *orderv1.Order) { o.Quantity = 4_000_000_000 }),
	)...)
	batch = append(batch, workertest.Each(o[1:])...)
	results := workertest.Handle(t, b.Persist.Handle, batch)
	for i, r := range results {
		if want := i > 0 && i < len(results)-1; (len(r.Dead) == 1) != want {
			t.Errorf("delivery %d: %+v", i, r)
		}
	}
	for _, o := range o {
		b.WantStatus(t, o.ID, order.Pending)
	}
	s.Balanced()
}

// C7, R5: the payment was there first.
func keptPayment(t *testing.T, b *workertest.Bench) {
	s := b.Open(t, 10)
	o := s.Buyers(1)[0]
	p := messaging.Payment{OrderID: o.ID, TransactionID: "early-" + o.ID.ULID, AmountMinor: workertest.PriceMinor, Currency: workertest.Currency, ReceivedAt: time.Now()}
	workertest.Done(t, workertest.Handle(t, b.Payment.Handle, workertest.Deliver(messaging.OrderPaid(p))))
	if n := b.Int(t, "SELECT COUNT(*) FROM payments WHERE transaction_id=? AND status='kept'", p.TransactionID); n != 1 {
		t.Fatal("payment is not kept")
	}
	workertest.Done(t, workertest.Handle(t, b.Persist.Handle, workertest.Each([]order.Order{o})))
	b.WantStatus(t, o.ID, order.Paid)
	if n := b.Int(t, "SELECT COUNT(*) FROM payments WHERE transaction_id=? AND status='applied'", p.TransactionID); n != 1 {
		t.Error("payment is not applied")
	}
	s.Balanced()
}

// O07: ids stay text from the message to the row and back.
func bigIDs(t *testing.T, b *workertest.Bench) {
	s := b.Open(t, 10)
	users := []string{"1759812345678901234", "1759812345678901235", "9007199254740991", "9007199254740993", "9223372036854775807"}
	for _, u := range users {
		o := s.Reserve(u, workertest.Pool, 1)
		workertest.Done(t, workertest.Handle(t, b.Persist.Handle, workertest.Each([]order.Order{o})))
		row := b.Row(t, o.ID)
		if row.UserID != u || b.Record(t, o.ID).User != u {
			t.Errorf("user %s became %s in mysql, %s in redis", u, row.UserID, b.Record(t, o.ID).User)
		}
	}
	if n := b.Int(t, "SELECT COUNT(*) FROM user_holdings WHERE activity_id=?", s.ID); n != len(users) {
		t.Errorf("%d users, want %d", n, len(users))
	}
	s.Balanced()
}

// C8, R18: the cancel's tombstone is there before the order's own message.
func tombstoneFirst(t *testing.T, b *workertest.Bench) {
	s := b.Open(t, 10)
	o := s.Buyers(1)[0]
	cancel := messaging.CancelRequested(messaging.Cancel{OrderID: o.ID, Reason: order.ReasonUserCancelled, Actor: "user:" + o.User, RequestedAt: time.Now(), Order: &o})
	workertest.Done(t, workertest.Handle(t, b.Rollback.Handle, workertest.Deliver(cancel)))
	workertest.Done(t, workertest.Handle(t, b.Persist.Handle, workertest.Each([]order.Order{o})))
	b.WantStatus(t, o.ID, order.Cancelled)
	if n := b.Int(t, "SELECT available FROM activity_stock WHERE activity_id=?", s.ID); n != 10 {
		t.Errorf("%d available, want 10", n)
	}
	s.Balanced()
}

// O23, O18: "every cancel message carries the id of its own order", out of the right delay queue.
func expiryMessages(t *testing.T, b *workertest.Bench) {
	s := b.Open(t, 100, workertest.Timeout("1s"))
	orders := s.Buyers(100)
	ctx, cancel := context.WithCancel(context.Background())
	var mu sync.Mutex
	got := map[order.ID]int{}
	all := make(chan struct{})
	consumed := make(chan error, 1)
	go func() {
		consumed <- b.Broker.Consume(ctx, messaging.ConsumerConfig{Queue: messaging.QueueRollbacks, Prefetch: 100}, func(_ context.Context, batch []messaging.Delivery) []messaging.Result {
			mu.Lock()
			defer mu.Unlock()
			for _, d := range batch {
				good, _, err := messaging.DecodeOrderExpired(d.Message)
				if err != nil {
					t.Errorf("expiry: %v", err)
				}
				for _, o := range good {
					got[o.ID]++
				}
			}
			if len(got) == len(orders) {
				select {
				case <-all:
				default:
					close(all)
				}
			}
			return make([]messaging.Result, len(batch))
		})
	}()
	workertest.Done(t, workertest.Handle(t, b.Persist.Handle, workertest.Each(orders)))
	select {
	case <-all:
	case <-time.After(time.Minute):
		t.Error("expiry messages are missing")
	}
	cancel()
	if err := <-consumed; err != nil {
		t.Error(err)
	}
	mu.Lock()
	defer mu.Unlock()
	for _, o := range orders {
		if got[o.ID] == 0 {
			t.Errorf("no expiry for %s", o.ID)
		}
	}
}

// C5, C6, R2: the rows were committed by a handler that then died; meanwhile one order was paid and
// one cancelled. The redelivery follows the rows.
func diedAfterCommit(t *testing.T, b *workertest.Bench) {
	s := b.Open(t, 10)
	orders := s.Buyers(3)
	ctx := context.Background()
	err := b.Store.InTx(ctx, func(tx *store.Tx) error {
		var rows []*store.Order
		var ledger []store.LedgerEntry
		held := map[store.Holder]int{}
		for _, o := range orders {
			row, err := store.NewOrder(o, order.Pending, "", store.OriginOrder)
			if err != nil {
				return err
			}
			rows = append(rows, row)
			held[store.Holder{Activity: s.ID, User: o.User}]++
			ledger = append(ledger, store.LedgerEntry{Ref: row.ID, Op: store.OpSell, Account: store.AccountSale, ActivityID: s.ID, SKUID: o.SKU, Pool: o.Pool, Delta: -1})
		}
		if err := store.InsertOrders(ctx, tx, rows); err != nil {
			return err
		}
		if err := store.InsertLedger(ctx, tx, ledger); err != nil {
			return err
		}
		if err := store.RaiseHoldings(ctx, tx, held); err != nil {
			return err
		}
		return store.TakeUnits(ctx, tx, map[store.Pool]int64{{Activity: s.ID, SKU: workertest.SKU, Pool: workertest.Pool}: 3})
	})
	if err != nil {
		t.Fatal(err)
	}
	pay := messaging.Payment{OrderID: orders[1].ID, TransactionID: "txn-" + orders[1].ID.ULID, AmountMinor: workertest.PriceMinor, Currency: workertest.Currency, ReceivedAt: time.Now()}
	workertest.Done(t, workertest.Handle(t, b.Payment.Handle, workertest.Deliver(messaging.OrderPaid(pay))))
	if err := b.Rollback.Cancel(ctx, orders[2].ID, order.ReasonOperatorCancelled); err != nil {
		t.Fatal(err)
	}
	batch := workertest.Each(orders)
	for i := range batch {
		batch[i].Redelivered = true
	}
	workertest.Done(t, workertest.Handle(t, b.Persist.Handle, batch))
	b.WantStatus(t, orders[0].ID, order.Pending)
	b.WantStatus(t, orders[1].ID, order.Paid)
	b.WantStatus(t, orders[2].ID, order.Cancelled)
	s.Balanced()
}

// R15: guarded; a letter that contradicts the row stays open.
func resolvesLetters(t *testing.T, b *workertest.Bench) {
	s := b.Open(t, 10)
	o := s.Buyers(2)
	for i, class := range []string{"attempts_exhausted", "conflict"} {
		b.Exec(t, `INSERT INTO dead_letters (dedupe_key,message_id,routing_key,source_queue,class,error,attempt,activity_id,order_id,body,headers,state,created_at,updated_at)
			VALUES (?,?,?,?,?,'',0,?,?,'','{}','sent',UTC_TIMESTAMP(6),UTC_TIMESTAMP(6))`, o[i].ID.String(), "m", "order.reserved", messaging.QueueOrders, class, s.ID, o[i].ID.String())
	}
	workertest.Done(t, workertest.Handle(t, b.Persist.Handle, workertest.Each(o)))
	if n := b.Int(t, "SELECT COUNT(*) FROM dead_letters WHERE order_id=? AND state='resolved'", o[0].ID.String()); n != 1 {
		t.Error("letter is not resolved")
	}
	if n := b.Int(t, "SELECT COUNT(*) FROM dead_letters WHERE order_id=? AND state='sent'", o[1].ID.String()); n != 1 {
		t.Error("the contradicting letter was closed")
	}
	b.Exec(t, "DELETE FROM dead_letters WHERE activity_id=?", s.ID)
	s.Balanced()
}

// tamper makes an order.reserved message of one order with something changed in it.
func tamper(t *testing.T, o order.Order, change func(*orderv1.Order)) messaging.Message {
	t.Helper()
	m := messaging.OrderReserved([]order.Order{o})
	var p orderv1.OrderReserved
	if err := proto.Unmarshal(m.Body, &p); err != nil {
		t.Fatal(err)
	}
	change(p.GetOrders()[0])
	body, err := proto.Marshal(&p)
	if err != nil {
		t.Fatal(err)
	}
	m.Body = body
	return m
}
