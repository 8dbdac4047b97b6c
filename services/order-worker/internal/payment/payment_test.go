package payment_test

import (
	"sync"
	"testing"
	"time"

	"seckill/pkg/messaging"
	"seckill/pkg/order"
	"seckill/pkg/testkit"
	"seckill/services/order-worker/internal/payment"
	"seckill/services/order-worker/internal/rollback"
	"seckill/services/order-worker/internal/workertest"
)

// TestPayment shares one set of services: a vhost costs seconds to make.
func TestPayment(t *testing.T) {
	b := workertest.New(t, workertest.Options{})
	for name, f := range map[string]func(*testing.T, *workertest.Bench){
		"a payment sets its order to paid, once, however often it comes":               paysOnce,
		"a second transaction for a paid order is due for refund":                      secondPayment,
		"another amount or currency pays nothing and is due for refund":                otherAmount,
		"a payment after the cancel is due for refund and the buyer sees it":           latePayment,
		"a transaction that is booked for another order is a letter":                   reusedTransaction,
		"a payment and the order's own transaction side by side always meet":           besideOrder,
		"payment against expiry: the first commit wins, and nothing comes back":        againstExpiry,
		"a payment whose order never came becomes tombstone plus refund due":           orphan,
		"what mysql refuses to book is a letter, and the others are booked":            refusedByMySQL,
		"a row that cannot be read holds up no payment but its own":                    unreadableRow,
		"a kept payment that mysql refuses to apply does not hold its order's batch":   keptRefused,
		"money that cannot be given up does not hold up the others":                    orphanRefused,
		"a kept payment waits as long as redis holds the reservation":                  orphanOnItsWay,
		"a refund of a paid order makes its payment due and the unit buyable":          refund,
		"a payment of an order that mysql rejected is due for refund":                  rejectedOrder,
		"broken payment messages are letters":                                          broken,
		"amounts above the precision of a float stay exact":                            exactAmounts,
		"booked before the worker died: redis is told when the message comes up again": diedAfterCommit,
	} {
		t.Run(name, func(t *testing.T) { f(t, b) })
	}
}

func pay(o order.Order, txn string) messaging.Payment {
	return messaging.Payment{
		OrderID: o.ID, TransactionID: txn + "-" + o.ID.ULID, AmountMinor: o.UnitPriceMinor * int64(o.Quantity), Currency: o.Currency,
		ReceivedAt: time.Now().UTC().Truncate(time.Microsecond), Order: &o,
	}
}

func paid(ps ...messaging.Payment) []messaging.Delivery {
	msgs := make([]messaging.Message, len(ps))
	for i, p := range ps {
		msgs[i] = messaging.OrderPaid(p)
	}
	return workertest.Deliver(msgs...)
}

// open makes a sale with n persisted orders.
func open(t *testing.T, b *workertest.Bench, n int, timeout string) (*workertest.Sale, []order.Order) {
	t.Helper()
	s := b.Open(t, n+5, workertest.Timeout(timeout))
	orders := s.Buyers(n)
	workertest.Done(t, workertest.Handle(t, b.Persist.Handle, workertest.Each(orders)))
	return s, orders
}

func payments(t *testing.T, b *workertest.Bench, o order.Order, status, reason string) int {
	t.Helper()
	return b.Int(t, "SELECT COUNT(*) FROM payments WHERE order_id=? AND status=? AND reason=?", o.ID.String(), status, reason)
}

// O26: repeated callbacks change nothing; R5.
func paysOnce(t *testing.T, b *workertest.Bench) {
	s, o := open(t, b, 2, "15m")
	p := pay(o[0], "t1")
	workertest.Done(t, workertest.Handle(t, b.Payment.Handle, paid(p, p, p)))
	workertest.Done(t, workertest.Handle(t, b.Payment.Handle, paid(p)))
	b.WantStatus(t, o[0].ID, order.Paid)
	b.WantStatus(t, o[1].ID, order.Pending)
	if n := payments(t, b, o[0], "applied", ""); n != 1 {
		t.Errorf("%d applied payments", n)
	}
	// An expiry that comes afterwards releases nothing.
	workertest.Done(t, workertest.Handle(t, b.Rollback.Handle, workertest.Deliver(messaging.OrderExpired(o[:1]))))
	b.WantStatus(t, o[0].ID, order.Paid)
	s.Balanced()
}

// R5 (m2 second-payment-refund).
func secondPayment(t *testing.T, b *workertest.Bench) {
	s, o := open(t, b, 1, "15m")
	workertest.Done(t, workertest.Handle(t, b.Payment.Handle, paid(pay(o[0], "first"), pay(o[0], "second"))))
	if payments(t, b, o[0], "applied", "") != 1 || payments(t, b, o[0], "refund_due", "second_payment") != 1 {
		t.Error("want one applied and one due")
	}
	b.WantStatus(t, o[0].ID, order.Paid)
	s.Balanced()
}

// O26: a callback with another amount is refused and recorded.
func otherAmount(t *testing.T, b *workertest.Bench) {
	s, o := open(t, b, 2, "15m")
	p, q := pay(o[0], "cheap"), pay(o[1], "dollars")
	p.AmountMinor--
	q.Currency = "USD"
	workertest.Done(t, workertest.Handle(t, b.Payment.Handle, paid(p, q)))
	for _, o := range o {
		b.WantStatus(t, o.ID, order.Pending)
		if payments(t, b, o, "refund_due", "amount_mismatch") != 1 {
			t.Errorf("payment of %s is not due", o.ID)
		}
		if !b.Record(t, o.ID).RefundDue {
			t.Errorf("record of %s does not say that money goes back", o.ID)
		}
	}
	workertest.Done(t, workertest.Handle(t, b.Payment.Handle, paid(pay(o[0], "right"))))
	b.WantStatus(t, o[0].ID, order.Paid)
	s.Balanced()
}

// C7, R5.
func latePayment(t *testing.T, b *workertest.Bench) {
	s, o := open(t, b, 1, "15m")
	if err := b.Rollback.Cancel(t.Context(), o[0].ID, order.ReasonOperatorCancelled); err != nil {
		t.Fatal(err)
	}
	workertest.Done(t, workertest.Handle(t, b.Payment.Handle, paid(pay(o[0], "late"))))
	b.WantStatus(t, o[0].ID, order.Cancelled)
	if payments(t, b, o[0], "refund_due", "late_payment") != 1 || !b.Record(t, o[0].ID).RefundDue {
		t.Error("late money is not due for refund in both places")
	}
	s.Balanced()
}

func reusedTransaction(t *testing.T, b *workertest.Bench) {
	s, o := open(t, b, 2, "15m")
	p, q := pay(o[0], "x"), pay(o[1], "y")
	q.TransactionID = p.TransactionID
	workertest.Done(t, workertest.Handle(t, b.Payment.Handle, paid(p)))
	r := workertest.Handle(t, b.Payment.Handle, paid(q))
	if len(r[0].Dead) != 1 || r[0].Dead[0].Class != "conflict" {
		t.Errorf("got %+v", r[0])
	}
	b.WantStatus(t, o[1].ID, order.Pending)
	s.Balanced()
}

// R5 (m2 apply-after-commit): two transactions that cannot see each other.
func besideOrder(t *testing.T, b *workertest.Bench) {
	s := b.Open(t, 60)
	orders := s.Buyers(60)
	ps := make([]messaging.Payment, len(orders))
	for i, o := range orders {
		ps[i] = pay(o, "beside")
		ps[i].Order = nil
	}
	for i := 0; i < len(orders); i += 6 {
		var wg sync.WaitGroup
		wg.Add(2)
		go func() {
			defer wg.Done()
			workertest.Work(t, b.Persist.Handle, workertest.Each(orders[i:i+6]))
		}()
		go func() {
			defer wg.Done()
			workertest.Work(t, b.Payment.Handle, paid(ps[i:i+6]...))
		}()
		wg.Wait()
	}
	for _, o := range orders {
		b.WantStatus(t, o.ID, order.Paid)
	}
	s.Balanced()
}

// O26, R16: callbacks around the deadline, each three times.
func againstExpiry(t *testing.T, b *workertest.Bench) {
	s, orders := open(t, b, 100, "1s")
	last := orders[len(orders)-1].PayBefore
	time.Sleep(time.Until(last.Add(20 * time.Millisecond))) // the clock is the subject here
	var wg sync.WaitGroup
	for i := 0; i < len(orders); i += 10 {
		part := orders[i : i+10]
		wg.Add(2)
		go func() {
			defer wg.Done()
			workertest.Work(t, b.Rollback.Handle, workertest.Deliver(messaging.OrderExpired(part)))
		}()
		go func() {
			defer wg.Done()
			for _, o := range part {
				p := pay(o, "race")
				workertest.Work(t, b.Payment.Handle, paid(p, p, p))
			}
		}()
	}
	wg.Wait()
	paidN, cancelledN := 0, 0
	for _, o := range orders {
		switch row := b.Row(t, o.ID); row.Status {
		case order.Paid:
			paidN++
			b.WantStatus(t, o.ID, order.Paid)
			if payments(t, b, o, "applied", "") != 1 {
				t.Errorf("%s is paid without an applied payment", o.ID)
			}
		case order.Cancelled:
			cancelledN++
			b.WantStatus(t, o.ID, order.Cancelled)
			if payments(t, b, o, "refund_due", "late_payment") != 1 || !b.Record(t, o.ID).RefundDue {
				t.Errorf("%s is cancelled and its money is not due", o.ID)
			}
		default:
			t.Errorf("%s is %s", o.ID, row.Status)
		}
	}
	t.Logf("%d paid, %d cancelled", paidN, cancelledN)
	if left := s.Left(workertest.Pool); left != 5+cancelledN {
		t.Errorf("%d left, want %d", left, 5+cancelledN)
	}
	s.Balanced()
}

// R5 (m2 orphan-payment-sweep).
func orphan(t *testing.T, b *workertest.Bench) {
	s := b.Open(t, 10)
	known, bare := s.Forge(s.User(), 1), s.Forge(s.User(), 1)
	p, q := pay(known, "orphan"), pay(bare, "orphan")
	q.Order = nil
	workertest.Done(t, workertest.Handle(t, b.Payment.Handle, paid(p, q)))
	sweeper := rollback.NewSweeper(b.Rollback, rollback.SweepConfig{PaymentAge: time.Hour}, testkit.Logger(t))
	if _, err := sweeper.Payments(t.Context()); err != nil {
		t.Fatal(err)
	}
	if payments(t, b, known, "kept", "") != 1 {
		t.Fatal("swept too early")
	}
	b.Exec(t, "UPDATE payments SET updated_at=updated_at - INTERVAL 2 HOUR WHERE order_id LIKE CONCAT(?,'-%')", s.ID)
	sweep(t, b)
	for _, o := range []order.Order{known, bare} {
		if row := b.Row(t, o.ID); row == nil || row.Status != order.Cancelled || row.Reason != order.ReasonOrderLost {
			t.Errorf("row %+v", row)
		}
		if payments(t, b, o, "refund_due", "order_lost") != 1 {
			t.Errorf("payment of %s is not due", o.ID)
		}
		// The order's message after all: it finds the tombstone and takes nothing (R18).
		workertest.Done(t, workertest.Handle(t, b.Persist.Handle, workertest.Each([]order.Order{o})))
	}
	if row := b.Row(t, bare.ID); row.UserID != bare.User || row.Status != order.Cancelled {
		t.Errorf("bare tombstone was not completed: %+v", row)
	}
	s.Balanced()
}

// One payment that MySQL will not write held the payments of every sale.
func refusedByMySQL(t *testing.T, b *workertest.Bench) {
	s, o := open(t, b, 9, "15m")
	ps := make([]messaging.Payment, len(o))
	for i := range o {
		ps[i] = pay(o[i], "refused")
	}
	allow := b.Trigger(t, "INSERT ON payments", "NEW.transaction_id='"+ps[4].TransactionID+"'", "SIGNAL SQLSTATE '23000' SET MYSQL_ERRNO=1452")
	batch := paid(ps...)
	for i, r := range workertest.Handle(t, b.Payment.Handle, batch) {
		if (len(r.Dead) == 1) != (i == 4) || i == 4 && (r.Dead[0].Class != payment.ClassRefused || r.Dead[0].Message.ID != batch[4].ID) {
			t.Errorf("delivery %d: %+v", i, r)
		}
	}
	for i := range o {
		want := order.Paid
		if i == 4 {
			want = order.Pending
		}
		b.WantStatus(t, o[i].ID, want)
	}
	allow()
	workertest.Done(t, workertest.Handle(t, b.Payment.Handle, batch[4:5]))
	b.WantStatus(t, o[4].ID, order.Paid)
	s.Balanced()
}

// An unknown status, written by hand or by another program, held the payments of every sale.
func unreadableRow(t *testing.T, b *workertest.Bench) {
	s, o := open(t, b, 3, "15m")
	b.Exec(t, "UPDATE orders SET status='shipped' WHERE id=?", o[1].ID.String())
	batch := paid(pay(o[0], "unread"), pay(o[1], "unread"), pay(o[2], "unread"))
	for i, r := range workertest.Handle(t, b.Payment.Handle, batch) {
		if (len(r.Dead) == 1) != (i == 1) || i == 1 && r.Dead[0].Class != payment.ClassRefused {
			t.Errorf("delivery %d: %+v", i, r)
		}
	}
	b.WantStatus(t, o[0].ID, order.Paid)
	b.WantStatus(t, o[2].ID, order.Paid)
	b.Exec(t, "UPDATE orders SET status='pending' WHERE id=?", o[1].ID.String())
	workertest.Done(t, workertest.Handle(t, b.Payment.Handle, batch[1:2]))
	b.WantStatus(t, o[1].ID, order.Paid)
	s.Balanced()
}

// A payment that waits and cannot be applied held the orders of every sale.
func keptRefused(t *testing.T, b *workertest.Bench) {
	s := b.Open(t, 10)
	o := s.Buyers(6)
	ps := make([]messaging.Payment, len(o))
	for i := range o {
		ps[i] = pay(o[i], "early")
	}
	workertest.Done(t, workertest.Handle(t, b.Payment.Handle, paid(ps...)))
	allow := b.Refuse(t, "UPDATE ON payments", "NEW.transaction_id='"+ps[2].TransactionID+"' AND NEW.status<>OLD.status")
	workertest.Done(t, workertest.Handle(t, b.Persist.Handle, workertest.Each(o)))
	for i := range o {
		want := order.Paid
		if i == 2 {
			want = order.Pending
		}
		b.WantStatus(t, o[i].ID, want)
	}
	allow()
	b.Exec(t, "UPDATE payments SET updated_at=updated_at - INTERVAL 2 HOUR WHERE order_id=?", o[2].ID.String())
	sweep(t, b)
	b.WantStatus(t, o[2].ID, order.Paid)
	s.Balanced()
}

func orphanRefused(t *testing.T, b *workertest.Bench) {
	s := b.Open(t, 10)
	first, second := s.Forge(s.User(), 1), s.Forge(s.User(), 1)
	workertest.Done(t, workertest.Handle(t, b.Payment.Handle, paid(pay(first, "stuck"))))
	workertest.Done(t, workertest.Handle(t, b.Payment.Handle, paid(pay(second, "behind"))))
	b.Exec(t, "UPDATE payments SET updated_at=updated_at - INTERVAL 2 HOUR WHERE order_id LIKE CONCAT(?,'-%')", s.ID)
	b.Exec(t, "UPDATE payments SET updated_at=updated_at - INTERVAL 1 HOUR WHERE order_id=?", first.ID.String())
	allow := b.Refuse(t, "INSERT ON orders", "NEW.id='"+first.ID.String()+"'")
	sweeper := rollback.NewSweeper(b.Rollback, rollback.SweepConfig{PaymentAge: time.Hour}, testkit.Logger(t))
	if _, err := sweeper.Payments(t.Context()); err == nil {
		t.Error("the sweep says nothing of what it could not do")
	}
	if payments(t, b, first, "kept", "") != 1 || payments(t, b, second, "refund_due", "order_lost") != 1 {
		t.Error("the money behind the first is not due")
	}
	allow()
	b.Exec(t, "UPDATE payments SET updated_at=updated_at - INTERVAL 2 HOUR WHERE order_id=?", first.ID.String())
	sweep(t, b)
	if payments(t, b, first, "refund_due", "order_lost") != 1 {
		t.Error("the first is not due when nothing is in its way")
	}
	s.Balanced()
}

func sweep(t *testing.T, b *workertest.Bench) {
	t.Helper()
	s := rollback.NewSweeper(b.Rollback, rollback.SweepConfig{PaymentAge: time.Hour}, testkit.Logger(t))
	if _, err := s.Payments(t.Context()); err != nil {
		t.Fatal(err)
	}
}

func orphanOnItsWay(t *testing.T, b *workertest.Bench) {
	s := b.Open(t, 10)
	o := s.Buyers(1)[0]
	workertest.Done(t, workertest.Handle(t, b.Payment.Handle, paid(pay(o, "waits"))))
	b.Exec(t, "UPDATE payments SET updated_at=updated_at - INTERVAL 2 HOUR WHERE order_id=?", o.ID.String())
	sweep(t, b)
	if b.Row(t, o.ID) != nil || payments(t, b, o, "kept", "") != 1 {
		t.Error("the order was given up although it is on its way")
	}
	workertest.Done(t, workertest.Handle(t, b.Persist.Handle, workertest.Each([]order.Order{o})))
	b.WantStatus(t, o.ID, order.Paid)
	s.Balanced()
}

func refund(t *testing.T, b *workertest.Bench) {
	s, o := open(t, b, 1, "15m")
	workertest.Done(t, workertest.Handle(t, b.Payment.Handle, paid(pay(o[0], "t"))))
	ask := messaging.RefundRequested(messaging.Refund{OrderID: o[0].ID, Reason: "damaged", Actor: "operator:x", RequestedAt: time.Now()})
	for range 2 { // repeated ones change nothing
		workertest.Done(t, workertest.Handle(t, b.Rollback.Handle, workertest.Deliver(ask, ask)))
		b.WantStatus(t, o[0].ID, order.Refunded)
		if n := s.Left(workertest.Pool); n != 6 {
			t.Errorf("%d left, want 6", n)
		}
	}
	if payments(t, b, o[0], "refund_due", "order_refunded") != 1 {
		t.Error("the payment is not due")
	}
	again := s.Reserve(o[0].User, workertest.Pool, 1) // his limit is free again
	workertest.Done(t, workertest.Handle(t, b.Persist.Handle, workertest.Each([]order.Order{again})))
	b.WantStatus(t, again.ID, order.Pending)
	s.Balanced()
}

func rejectedOrder(t *testing.T, b *workertest.Bench) {
	s := b.Open(t, 1)
	b.Exec(t, "UPDATE activity_stock SET available=0 WHERE activity_id=?", s.ID)
	o := s.Buyers(1)[0]
	workertest.Done(t, workertest.Handle(t, b.Payment.Handle, paid(pay(o, "t"))))
	workertest.Done(t, workertest.Handle(t, b.Persist.Handle, workertest.Each([]order.Order{o})))
	b.WantStatus(t, o.ID, order.Rejected)
	if payments(t, b, o, "refund_due", "late_payment") != 1 || !b.Record(t, o.ID).RefundDue {
		t.Error("money of a rejected order is not due")
	}
	s.Balanced()
}

func broken(t *testing.T, b *workertest.Bench) {
	s, o := open(t, b, 1, "15m")
	batch := workertest.Deliver(
		messaging.Message{ID: "x", Key: messaging.KeyOrderPaid, Body: []byte("not protobuf"), Orders: 1},
		messaging.Message{ID: "y", Key: messaging.KeyOrderPaid, Orders: 1},
	)
	r := workertest.Handle(t, b.Payment.Handle, append(batch, paid(pay(o[0], "t"))...))
	if len(r[0].Dead) != 1 || len(r[1].Dead) != 1 || len(r[2].Dead) != 0 {
		t.Errorf("got %+v", r)
	}
	b.WantStatus(t, o[0].ID, order.Paid)
	s.Balanced()
}

// O26: 3 × 19999.99 = 59999.97.
func exactAmounts(t *testing.T, b *workertest.Bench) {
	s := b.Open(t, 10, workertest.Limit(3))
	o := s.Reserve(s.User(), workertest.Pool, 3)
	workertest.Done(t, workertest.Handle(t, b.Persist.Handle, workertest.Each([]order.Order{o})))
	p := pay(o, "t")
	if p.AmountMinor != 5999997 {
		t.Fatalf("amount %d", p.AmountMinor)
	}
	workertest.Done(t, workertest.Handle(t, b.Payment.Handle, paid(p)))
	b.WantStatus(t, o.ID, order.Paid)
	if n := b.Int(t, "SELECT amount_minor FROM orders WHERE id=?", o.ID.String()); n != 5999997 {
		t.Errorf("stored amount %d", n)
	}
	s.Balanced()
}

// C5 for payments, R2: committed, then killed before Redis knew.
func diedAfterCommit(t *testing.T, b *workertest.Bench) {
	s, o := open(t, b, 2, "15m")
	b.Exec(t, "UPDATE orders SET status='paid' WHERE id=?", o[0].ID.String())
	p := pay(o[0], "died")
	b.Exec(t, "INSERT INTO payments (transaction_id,order_id,amount_minor,currency,status,reason,received_at,created_at,updated_at) VALUES (?,?,?,?,'applied','',UTC_TIMESTAMP(6),UTC_TIMESTAMP(6),UTC_TIMESTAMP(6))",
		p.TransactionID, o[0].ID.String(), p.AmountMinor, p.Currency)
	if err := b.Rollback.Cancel(t.Context(), o[1].ID, order.ReasonUserCancelled); err != nil {
		t.Fatal(err)
	}
	q := pay(o[1], "died")
	b.Exec(t, "INSERT INTO payments (transaction_id,order_id,amount_minor,currency,status,reason,received_at,created_at,updated_at) VALUES (?,?,?,?,'refund_due','late_payment',UTC_TIMESTAMP(6),UTC_TIMESTAMP(6),UTC_TIMESTAMP(6))",
		q.TransactionID, o[1].ID.String(), q.AmountMinor, q.Currency)
	workertest.Done(t, workertest.Handle(t, b.Payment.Handle, paid(p, q)))
	b.WantStatus(t, o[0].ID, order.Paid)
	if !b.Record(t, o[1].ID).RefundDue {
		t.Error("record does not say that money goes back")
	}
	if n := b.Int(t, "SELECT COUNT(*) FROM payments WHERE order_id IN (?,?)", o[0].ID.String(), o[1].ID.String()); n != 2 {
		t.Errorf("%d payments, want 2", n)
	}
	s.Balanced()
}
