// Package payment books what the payment provider reported (R5).
//
// One transaction of the provider is booked once. Money that meets a pending order of the same
// amount pays it; the first commit wins against a cancel. Money that meets no order is kept until
// there is one; any other money is due for refund, and the buyer's record says so.
package payment

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"seckill/pkg/failpoint"
	"seckill/pkg/messaging"
	"seckill/pkg/order"
	"seckill/services/order-worker/internal/follow"
	"seckill/services/order-worker/internal/store"
)

// Classes of dead letters this package makes.
const (
	ClassUndecodable = "undecodable"
	ClassConflict    = "conflict" // the transaction is booked with another order, amount or currency
	ClassRefused     = "refused"  // MySQL will not write it: a trigger or a damaged row is in the way
)

const batchTimeout = time.Minute

// maxReads bounds how often a batch is read again after a duplicate key.
const maxReads = 8

// Handler handles seckill.payments. It is safe for concurrent use.
type Handler struct {
	st     *store.Store
	follow *follow.Follower
	log    *slog.Logger
	booked *prometheus.CounterVec
}

// New makes a Handler.
func New(st *store.Store, f *follow.Follower, log *slog.Logger, reg prometheus.Registerer) (*Handler, error) {
	h := &Handler{st: st, follow: f, log: log, booked: prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "seckill_payments_total",
		Help: "Payments booked, by what became of them.",
	}, []string{"result"})}
	for _, r := range []string{store.PaymentKept, store.PaymentApplied, store.PaymentRefundDue, "repeated", "conflict", "invalid", "refused"} {
		h.booked.WithLabelValues(r)
	}
	if err := reg.Register(h.booked); err != nil {
		return nil, fmt.Errorf("register metrics: %w", err)
	}
	return h, nil
}

// Handle is a messaging.Handler.
func (h *Handler) Handle(ctx context.Context, batch []messaging.Delivery) []messaging.Result {
	ctx, cancel := context.WithTimeout(ctx, batchTimeout)
	defer cancel()
	results := make([]messaging.Result, len(batch))
	if err := h.handle(ctx, batch, results); err != nil {
		for i := range results {
			results[i] = messaging.Result{Hold: err}
		}
	}
	return results
}

// arrived is a payment in a delivery.
type arrived struct {
	delivery int
	p        *store.Payment
}

func (h *Handler) handle(ctx context.Context, batch []messaging.Delivery, results []messaging.Result) error {
	list := make([]arrived, 0, len(batch))
	for i, d := range batch {
		p, err := messaging.DecodeOrderPaid(d.Message)
		if err != nil {
			results[i].Dead = []messaging.Dead{{Message: d.Message, Class: ClassUndecodable, Err: err}}
			h.booked.WithLabelValues("invalid").Inc()
			continue
		}
		row := &store.Payment{TransactionID: p.TransactionID, OrderID: p.OrderID.String(), AmountMinor: p.AmountMinor, Currency: p.Currency, ReceivedAt: p.ReceivedAt}
		if p.Order != nil {
			row.Content = messaging.OrderReserved([]order.Order{*p.Order}).Body
		}
		list = append(list, arrived{i, row})
	}
	if len(list) == 0 {
		return nil
	}
	var out booking
	refused, err := store.Each(list, len(list), func(some []arrived) error {
		b, err := h.book(ctx, some)
		if err == nil {
			out.add(b)
		}
		return err
	})
	if err != nil {
		return err
	}
	for _, r := range refused {
		h.booked.WithLabelValues("refused").Inc()
		results[r.Of.delivery].Dead = []messaging.Dead{{Message: batch[r.Of.delivery].Message, Class: ClassRefused, Err: r.Err}}
	}
	for _, a := range out.conflicts {
		h.booked.WithLabelValues("conflict").Inc()
		results[a.delivery].Dead = []messaging.Dead{{Message: batch[a.delivery].Message, Class: ClassConflict,
			Err: fmt.Errorf("transaction %s is booked for another order, amount or currency", a.p.TransactionID)}}
	}
	for _, p := range out.fresh {
		h.booked.WithLabelValues(p.Status).Inc()
		if p.Status == store.PaymentRefundDue {
			h.log.WarnContext(ctx, "payment is due for refund", "order_id", p.OrderID, "transaction_id", p.TransactionID, "reason", p.Reason)
		}
	}
	h.booked.WithLabelValues("repeated").Add(float64(out.repeated))
	if err := failpoint.Hit(ctx, "worker.after_commit"); err != nil {
		return err
	}
	if err := h.follow.Rows(ctx, out.follow); err != nil {
		return err
	}
	if err := h.follow.RefundDue(ctx, out.due); err != nil {
		return err
	}
	// The order may have been committed between our read and our commit: look again (R5).
	if len(out.kept) > 0 {
		if err := h.follow.Kept(ctx, out.kept); err != nil {
			return err
		}
	}
	_, letters, err := h.st.Waiting(ctx)
	if err != nil || !letters {
		return err
	}
	orders, ids := make([]string, len(out.done)), make([]string, len(out.done))
	for i, a := range out.done {
		orders[i], ids[i] = a.p.OrderID, batch[a.delivery].ID
	}
	return h.st.ResolvePayments(ctx, messaging.QueuePayments, orders, ids)
}

// booking is what one transaction did.
type booking struct {
	fresh     []*store.Payment
	repeated  int
	conflicts []arrived
	follow    []*store.Order // rows that Redis has to follow
	due       []string       // orders whose record has to say that money goes back
	kept      []string       // orders that payments wait for
	done      []arrived      // what is booked, now or before
}

func (b *booking) add(o booking) {
	b.fresh = append(b.fresh, o.fresh...)
	b.repeated += o.repeated
	b.conflicts = append(b.conflicts, o.conflicts...)
	b.follow = append(b.follow, o.follow...)
	b.due = append(b.due, o.due...)
	b.kept = append(b.kept, o.kept...)
	b.done = append(b.done, o.done...)
}

// book writes payments in one transaction.
func (h *Handler) book(ctx context.Context, list []arrived) (booking, error) {
	for try := 0; ; try++ {
		var out booking
		err := h.st.InTx(ctx, func(tx *store.Tx) error {
			var err error
			out, err = book(ctx, tx, list)
			return err
		})
		// Another holder of the same transaction was faster: read what it wrote (R13).
		if err == nil || !store.IsDuplicate(err) || try >= maxReads {
			if err != nil {
				err = fmt.Errorf("book %d payments: %w", len(list), err)
			}
			return out, err
		}
	}
}

func book(ctx context.Context, tx *store.Tx, list []arrived) (booking, error) {
	var out booking
	txns := make([]string, len(list))
	ids := make([]string, len(list))
	for i, a := range list {
		txns[i], ids[i] = a.p.TransactionID, a.p.OrderID
	}
	// Rows first and locked: what is decided below is decided on what the commit will find.
	rows, err := store.Orders(ctx, tx, ids, true)
	if err != nil {
		return out, err
	}
	known, err := store.Payments(ctx, tx, txns)
	if err != nil {
		return out, err
	}
	paid := map[string]bool{}
	follow := map[string]bool{}
	due := map[string]bool{}
	kept := map[string]bool{}
	for _, a := range list {
		p := a.p
		was := known[p.TransactionID]
		if was != nil && (was.OrderID != p.OrderID || was.AmountMinor != p.AmountMinor || was.Currency != p.Currency) {
			out.conflicts = append(out.conflicts, a)
			continue
		}
		out.done = append(out.done, a)
		o := rows[p.OrderID]
		if was != nil {
			// Booked before: nothing is booked again, but whoever did it may have died before Redis
			// knew.
			out.repeated++
			p = was
		} else {
			p.Status, p.Reason = store.PaymentKept, ""
			if o != nil {
				var pays bool
				if p.Status, p.Reason, pays = p.Decide(o); pays {
					o.Status = order.Paid
					paid[o.ID] = true
				}
			}
			out.fresh = append(out.fresh, p)
			known[p.TransactionID] = p
		}
		switch p.Status {
		case store.PaymentKept:
			kept[p.OrderID] = true
		case store.PaymentRefundDue:
			due[p.OrderID] = true
		}
		if o != nil && (o.Status == order.Paid || o.Status.Final()) {
			follow[o.ID] = true
		}
	}
	if err := store.InsertPayments(ctx, tx, out.fresh); err != nil {
		return out, err
	}
	if len(paid) > 0 {
		moved := keys(paid)
		if n, err := store.MoveOrders(ctx, tx, moved, order.Pending, order.Paid, ""); err != nil {
			return out, err
		} else if n != len(moved) {
			return out, fmt.Errorf("set %d locked orders to paid: %d were pending", len(moved), n)
		}
	}
	for id := range follow {
		out.follow = append(out.follow, rows[id])
	}
	out.due, out.kept = keys(due), keys(kept)
	return out, nil
}

func keys(m map[string]bool) []string {
	out := make([]string, 0, len(m))
	for k := range m {
		out = append(out, k)
	}
	slices.Sort(out)
	return out
}
