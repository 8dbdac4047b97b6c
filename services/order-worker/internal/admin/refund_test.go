package admin_test

import (
	"context"
	"database/sql"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"seckill/pkg/adminapi"
	"seckill/pkg/messaging"
	"seckill/pkg/order"
	"seckill/pkg/testkit"
	"seckill/services/order-worker/internal/rig"
	"seckill/services/order-worker/internal/rollback"
	"seckill/services/order-worker/internal/store"
)

// paidOrder buys, persists and pays an order.
func paidOrder(r *rig.Rig, activity, user string) order.Order {
	r.T.Helper()
	o := r.MustBuy(activity, user)
	r.Publish(messaging.OrderReserved([]order.Order{o}))
	payOrder(r, o, "t-"+o.ID.ULID)
	awaitStatus(r, o, order.Paid)
	return o
}

func payOrder(r *rig.Rig, o order.Order, transaction string) {
	r.T.Helper()
	amount, err := o.AmountMinor()
	if err != nil {
		r.T.Fatal(err)
	}
	r.Publish(messaging.OrderPaid(messaging.Payment{
		OrderID: o.ID, TransactionID: transaction, AmountMinor: amount, Currency: o.Currency, ReceivedAt: time.Now(), Order: &o,
	}))
}

func awaitStatus(r *rig.Rig, o order.Order, want order.Status) {
	r.T.Helper()
	testkit.Eventually(r.T, time.Minute, func() error {
		if r.Count("SELECT COUNT(*) FROM orders WHERE id = ? AND status = ?", o.ID.String(), string(want)) != 1 {
			return fmt.Errorf("order %s is not %s", o.ID, want)
		}
		return nil
	})
}

func TestOperatorsTakeOrdersBack(t *testing.T) {
	t.Parallel()
	r := rig.New(t, rig.Options{})
	r.ConsumeOrders()
	r.ConsumePayments()
	r.ConsumeRollbacks()
	r.ConsumeDead()
	r.Sell(rig.Plan("sale", map[string]int{"national": 10}))
	const words = "顾客来电要求退款 – l'acheteur l'a demandé 🙏"

	t.Run("a paid order is refunded once, and its units are bought again", func(t *testing.T) {
		o := paidOrder(r, "sale", "u1")
		path := "/admin/v1/orders/" + o.ID.String() + "/refund"
		for _, bad := range []any{"{}", adminapi.RefundRequest{Reason: " "}, adminapi.RefundRequest{Reason: strings.Repeat("退", 201)}, adminapi.RefundRequest{Reason: "a\x00b"}} {
			if status, p := r.Call(rig.OperatorToken, http.MethodPost, path, bad, nil); status != http.StatusBadRequest {
				t.Errorf("%v: %d %+v", bad, status, p)
			}
		}
		if status, _ := r.Call(rig.ViewerToken, http.MethodPost, path, adminapi.RefundRequest{Reason: "r"}, nil); status != http.StatusForbidden {
			t.Errorf("a viewer: %d", status)
		}
		var res adminapi.RefundResult
		if status, p := r.Call(rig.OperatorToken, http.MethodPost, path, adminapi.RefundRequest{Reason: words}, &res); status != http.StatusAccepted || !res.Queued {
			t.Fatalf("%d %+v %+v", status, p, res)
		}
		awaitStatus(r, o, order.Refunded)
		if status, p := r.Call(rig.OperatorToken, http.MethodPost, path, adminapi.RefundRequest{Reason: "again"}, &res); status != http.StatusOK || res.Changed || res.Reason != order.ReasonOperatorRefunded {
			t.Errorf("again: %d %+v %+v", status, p, res)
		}
		testkit.Eventually(t, time.Minute, func() error {
			if n := r.Level("sale", "national"); n != 10 {
				return fmt.Errorf("%d units on sale", n)
			}
			return nil
		})
		if n := r.Count("SELECT COUNT(*) FROM operator_audit WHERE action = 'order.refund' AND subject = ? AND reason = ?", o.ID.String(), words); n != 1 {
			t.Errorf("%d audit rows hold the operator's words", n)
		}
		if n := r.Count("SELECT COUNT(*) FROM payments WHERE order_id = ? AND status = 'refund_due' AND reason = 'order_refunded'", o.ID.String()); n != 1 {
			t.Errorf("%d payments are due", n)
		}
	})

	t.Run("what is not paid cannot be refunded", func(t *testing.T) {
		o := r.MustBuy("sale", "u2")
		for range 2 {
			if status, p := r.Call(rig.OperatorToken, http.MethodPost, "/admin/v1/orders/"+o.ID.String()+"/refund", adminapi.RefundRequest{Reason: "r"}, nil); status != http.StatusConflict || p.Code != adminapi.CodeNotRefundable {
				t.Errorf("%d %+v", status, p)
			}
			r.Publish(messaging.OrderReserved([]order.Order{o}))
			awaitStatus(r, o, order.Pending)
		}
	})

	// A message of another program may give its reason in any language: it must be stored, and must not
	// hold the queue for those behind it. One that no column can hold is a dead letter.
	t.Run("a reason of any language in a message is stored and holds up nobody", func(t *testing.T) {
		cancelled, refunded, tooLong := r.MustBuy("sale", "u3"), paidOrder(r, "sale", "u4"), paidOrder(r, "sale", "u5")
		r.Publish(messaging.OrderReserved([]order.Order{cancelled}))
		awaitStatus(r, cancelled, order.Pending)
		long := messaging.RefundRequested(messaging.Refund{OrderID: tooLong.ID, Reason: strings.Repeat("退", 65), Actor: "operator:x", RequestedAt: time.Now()})
		r.Publish(
			messaging.CancelRequested(messaging.Cancel{OrderID: cancelled.ID, Reason: strings.Repeat("退", 64), Actor: "operator:x", RequestedAt: time.Now(), Order: &cancelled}),
			messaging.RefundRequested(messaging.Refund{OrderID: refunded.ID, Reason: words, Actor: "operator:x", RequestedAt: time.Now()}),
			long,
		)
		awaitStatus(r, cancelled, order.Cancelled)
		awaitStatus(r, refunded, order.Refunded)
		var got adminapi.Order
		r.Call(rig.ViewerToken, http.MethodGet, "/admin/v1/orders/"+refunded.ID.String(), nil, &got)
		if got.Reason != words {
			t.Errorf("reason is %q", got.Reason)
		}
		r.Call(rig.ViewerToken, http.MethodGet, "/admin/v1/orders/"+cancelled.ID.String(), nil, &got)
		if got.Reason != strings.Repeat("退", 64) {
			t.Errorf("reason is %q", got.Reason)
		}
		if l := r.Becomes(long.ID, "open"); l.Class != "undecodable" {
			t.Errorf("%+v", l)
		}
	})
}

func TestMoneyThatIsDueIsSettledOnce(t *testing.T) {
	t.Parallel()
	r := rig.New(t, rig.Options{})
	r.ConsumeOrders()
	r.ConsumePayments()
	r.Sell(rig.Plan("sale", map[string]int{"national": 10}))
	o := paidOrder(r, "sale", "u1")
	payOrder(r, o, "second")
	var l adminapi.PaymentList
	testkit.Eventually(t, time.Minute, func() error {
		r.Call(rig.ViewerToken, http.MethodGet, "/admin/v1/payments?status=refund_due", nil, &l)
		if len(l.Payments) != 1 {
			return fmt.Errorf("%d payments are due", len(l.Payments))
		}
		return nil
	})
	if p := l.Payments[0]; p.TransactionID != "second" || p.Reason != "second_payment" || p.OrderID != o.ID.String() {
		t.Errorf("%+v", p)
	}
	for path, want := range map[string]int{"second": 400, "nosuch": 404, "t-" + o.ID.ULID: 409, "a%20b": 404} {
		in := adminapi.SettleRefundRequest{Reason: "bank reference 7"}
		if path == "second" {
			in.Reason = ""
		}
		if status, p := r.Call(rig.OperatorToken, http.MethodPost, "/admin/v1/payments/"+path+"/settle-refund", in, nil); status != want {
			t.Errorf("%s: %d %+v, want %d", path, status, p, want)
		}
	}
	// What the buyer is told follows.
	told := func(want bool) {
		t.Helper()
		testkit.Eventually(t, time.Minute, func() error {
			ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
			defer cancel()
			rec, err := r.Stock.Order(ctx, o.ID)
			if err == nil && rec.RefundDue != want {
				err = fmt.Errorf("refund due: %v, want %v", rec.RefundDue, want)
			}
			return err
		})
	}
	told(true)
	for i := range 2 {
		var res adminapi.SettleRefundResult
		if status, p := r.Call(rig.OperatorToken, http.MethodPost, "/admin/v1/payments/second/settle-refund", adminapi.SettleRefundRequest{Reason: "已退款"}, &res); status != http.StatusOK || res.Changed != (i == 0) ||
			res.Status != adminapi.PaymentSettled || res.SettledBy != "tess" || res.SettleReason != "已退款" {
			t.Errorf("%d: %d %+v %+v", i, status, p, res)
		}
	}
	r.Go(rollback.NewSweeper(r.Rollbacks, rollback.SweepConfig{Interval: 50 * time.Millisecond}, testkit.Logger(t)).Run)
	told(false)
	if n := r.Count("SELECT COUNT(*) FROM operator_audit WHERE action = 'payment.settle_refund'"); n != 1 {
		t.Errorf("%d audit rows", n)
	}
	if status, _ := r.Call(rig.ViewerToken, http.MethodGet, "/admin/v1/payments?status=lost", nil, nil); status != http.StatusBadRequest {
		t.Errorf("%d", status)
	}
}

// A payment whose transaction began first and commits last must not fall behind the reader's cursor.
func TestFeedOfPaidOrdersMissesNoLateCommit(t *testing.T) {
	t.Parallel()
	r := rig.New(t, rig.Options{})
	r.ConsumeOrders()
	r.Sell(rig.Plan("sale", map[string]int{"national": 10}))
	shadow := rig.Plan("dark", map[string]int{"national": 10})
	shadow.Shadow = true
	r.Sell(shadow)
	pending := func(activity, user string) order.Order {
		o := r.MustBuy(activity, user)
		r.Publish(messaging.OrderReserved([]order.Order{o}))
		awaitStatus(r, o, order.Pending)
		return o
	}
	late, early, dark := pending("sale", "u1"), pending("sale", "u2"), pending("dark", "u3")
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	move := func(tx *sql.Tx, o order.Order) {
		t.Helper()
		if n, err := store.MoveOrders(ctx, tx, []string{o.ID.String()}, order.Pending, order.Paid, ""); err != nil || n != 1 {
			t.Fatalf("%d %v", n, err)
		}
	}
	begin := func() *sql.Tx {
		t.Helper()
		tx, err := r.Store.SQL().BeginTx(ctx, nil)
		if err != nil {
			t.Fatal(err)
		}
		return tx
	}
	read := func(after string) adminapi.PaidOrderList {
		t.Helper()
		var l adminapi.PaidOrderList
		if status, p := r.Call(rig.ViewerToken, http.MethodGet, "/admin/v1/orders/paid?limit=10&after="+after, nil, &l); status != http.StatusOK {
			t.Fatalf("%d %+v", status, p)
		}
		return l
	}
	slow := begin()
	move(slow, late)
	quick := begin()
	move(quick, early)
	move(quick, dark)
	if err := quick.Commit(); err != nil {
		t.Fatal(err)
	}
	first := read("")
	if len(first.Orders) != 1 || first.Orders[0].OrderID != early.ID.String() || first.Orders[0].PaidAt.IsZero() || first.Orders[0].Status != "paid" {
		t.Fatalf("%+v", first)
	}
	if l := read(first.NextCursor); len(l.Orders) != 0 || l.NextCursor != first.NextCursor {
		t.Errorf("%+v", l)
	}
	if err := slow.Commit(); err != nil {
		t.Fatal(err)
	}
	if l := read(first.NextCursor); len(l.Orders) != 1 || l.Orders[0].OrderID != late.ID.String() {
		t.Errorf("the late commit is missed: %+v", l)
	}
	if l := read("0"); len(l.Orders) != 2 || l.Orders[1].OrderID != late.ID.String() {
		t.Errorf("reading again: %+v", l)
	}
	for _, bad := range []string{"after=-1", "after=x", "afer=" + first.NextCursor, "cursor=" + first.NextCursor} {
		if status, _ := r.Call(rig.ViewerToken, http.MethodGet, "/admin/v1/orders/paid?"+bad, nil, nil); status != http.StatusBadRequest {
			t.Errorf("%s: %d", bad, status)
		}
	}
}
