// Package rollback takes orders back: payment times that are over, cancels that were asked for,
// refunds, and what the sweeps find when a message was lost.
//
// Everything that returns units is decided on locked rows in one transaction, which also notes the
// release that Redis is still owed (R3). The scripts give units back once, however often they are
// asked.
package rollback

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"seckill/pkg/failpoint"
	"seckill/pkg/messaging"
	"seckill/pkg/order"
	"seckill/pkg/stock"
	"seckill/services/order-worker/internal/follow"
	"seckill/services/order-worker/internal/store"
)

// Classes of dead letters this package makes.
const (
	ClassUndecodable  = "undecodable"
	ClassInvalidOrder = "invalid_order"
	ClassUnknownEvent = "unknown_event"
	ClassRefused      = "refused" // MySQL will not write it: a guard, a trigger or a damaged figure is in the way
)

const (
	batchTimeout = time.Minute
	maxOrders    = 512 // orders in one transaction
	maxReads     = 8   // readings of a batch after a duplicate key

	// moneyPatience is how long an order that is over waits for money that is on its way: longer than any
	// outage of the database that a sale survives, and no longer, since a provider may never come back with
	// a payment that the broker did not take.
	moneyPatience = 15 * time.Minute
)

// records is the part of stock.Client that knows orders.
type records interface {
	Order(ctx context.Context, id order.ID) (stock.Record, error)
	Paying(ctx context.Context, ids []order.ID) (map[order.ID]time.Time, error)
}

// Settler is told that a sale has ended; its answer decides about the message (activity.ended).
type Settler func(ctx context.Context, ended messaging.Ended, m messaging.Message) messaging.Result

// Handler handles seckill.rollbacks. It is safe for concurrent use.
type Handler struct {
	st      *store.Store
	records records
	follow  *follow.Follower
	settle  Settler
	log     *slog.Logger

	rollbacks *prometheus.CounterVec
	lateness  prometheus.Histogram
}

// New makes a Handler. settle may be nil: then the end of a sale is only logged here.
func New(st *store.Store, rec records, f *follow.Follower, settle Settler, log *slog.Logger, reg prometheus.Registerer) (*Handler, error) {
	h := &Handler{
		st: st, records: rec, follow: f, settle: settle, log: log,
		rollbacks: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "seckill_rollbacks_total",
			Help: "Orders that were to be taken back, by why and by what became of it.",
		}, []string{"reason", "result"}),
		lateness: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name:    "seckill_rollback_lateness_seconds",
			Help:    "From the end of the payment time to the commit of the cancel.",
			Buckets: []float64{0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 30, 60, 300, 900},
		}),
	}
	for _, r := range []string{reasonExpired, reasonCancel, reasonRefund, reasonSweep} {
		h.rollbacks.WithLabelValues(r, resultDone)
	}
	for _, c := range []prometheus.Collector{h.rollbacks, h.lateness} {
		if err := reg.Register(c); err != nil {
			return nil, fmt.Errorf("register metrics: %w", err)
		}
	}
	return h, nil
}

// Label values of seckill_rollbacks_total.
const (
	reasonExpired = "expired"
	reasonCancel  = "cancel"
	reasonRefund  = "refund"
	reasonSweep   = "sweep"

	resultDone      = "done"      // units are back
	resultTombstone = "tombstone" // came before its order
	resultAlready   = "already"   // was taken back before
	resultRefused   = "refused"   // the order is in a state that cannot be taken back this way
	resultBlocked   = "blocked"   // MySQL will not write it
	resultEarly     = "early"     // delayed again
	resultPaying    = "paying"    // its money is on its way; the sweep looks again
	resultUnknown   = "unknown"   // nobody knows the order
)

// ask is one order that somebody wants taken back.
type ask struct {
	id      string
	from    int          // the delivery
	content *order.Order // as the message knew it, or nil
	expiry  bool         // only if the payment time is over
	reason  string       // stored with the row
	label   string
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

func (h *Handler) handle(ctx context.Context, batch []messaging.Delivery, results []messaging.Result) error {
	var asks []ask
	var refunds []refund
	var ended []int
	dead := func(i int, class string, err error) {
		results[i].Dead = append(results[i].Dead, messaging.Dead{Message: batch[i].Message, Class: class, Err: err})
	}
	for i, d := range batch {
		switch d.Key {
		case messaging.KeyOrderExpired:
			good, bad, err := messaging.DecodeOrderExpired(d.Message)
			if err != nil {
				dead(i, ClassUndecodable, err)
				continue
			}
			for _, b := range bad {
				results[i].Dead = append(results[i].Dead, messaging.Dead{Message: b.Message, Class: ClassInvalidOrder, Err: b.Err})
			}
			if asks == nil {
				asks = make([]ask, 0, maxOrders)
			}
			for j := range good {
				o := &good[j]
				asks = append(asks, ask{id: o.ID.String(), from: i, content: o, expiry: true, reason: order.ReasonPaymentTimeout, label: reasonExpired})
			}
		case messaging.KeyOrderCancelRequested:
			c, err := messaging.DecodeCancelRequested(d.Message)
			if err != nil {
				dead(i, ClassUndecodable, err)
				continue
			}
			asks = append(asks, ask{id: c.OrderID.String(), from: i, content: c.Order, reason: c.Reason, label: reasonCancel})
		case messaging.KeyOrderRefundRequested:
			r, err := messaging.DecodeRefundRequested(d.Message)
			if err != nil {
				dead(i, ClassUndecodable, err)
				continue
			}
			refunds = append(refunds, refund{id: r.OrderID.String(), from: i, reason: strings.TrimSpace(r.Reason)})
		case messaging.KeyActivityEnded:
			ended = append(ended, i)
		default:
			dead(i, ClassUnknownEvent, fmt.Errorf("event %q is not handled here", d.Key))
		}
	}
	blocked, err := store.Each(asks, maxOrders, func(page []ask) error { return h.cancel(ctx, page) })
	if err != nil {
		return err
	}
	for _, b := range blocked {
		// An expiry shares its message with others, which are done.
		m := batch[b.Of.from].Message
		if b.Of.expiry {
			m = messaging.OrderExpired([]order.Order{*b.Of.content})
			m.Attempt, m.Headers = batch[b.Of.from].Attempt, batch[b.Of.from].Headers
		}
		results[b.Of.from].Dead = append(results[b.Of.from].Dead, messaging.Dead{Message: m, Class: ClassRefused, Err: b.Err})
		h.rollbacks.WithLabelValues(b.Of.label, resultBlocked).Inc()
	}
	stuck, err := store.Each(refunds, maxOrders, func(page []refund) error { return h.refund(ctx, page) })
	if err != nil {
		return err
	}
	for _, b := range stuck {
		dead(b.Of.from, ClassRefused, b.Err)
		h.rollbacks.WithLabelValues(reasonRefund, resultBlocked).Inc()
	}
	if len(asks)+len(refunds) > 0 {
		_, letters, err := h.st.Waiting(ctx)
		if err != nil {
			return err
		}
		if letters {
			ids := make([]string, 0, len(asks)+len(refunds))
			for _, a := range asks {
				ids = append(ids, a.id)
			}
			for _, r := range refunds {
				ids = append(ids, r.id)
			}
			for _, b := range blocked {
				ids = slices.DeleteFunc(ids, func(id string) bool { return id == b.Of.id })
			}
			for _, b := range stuck {
				ids = slices.DeleteFunc(ids, func(id string) bool { return id == b.Of.id })
			}
			if err := h.st.ResolveLetters(ctx, messaging.QueueRollbacks, ids); err != nil {
				return err
			}
		}
	}
	for _, i := range ended {
		e, err := messaging.DecodeActivityEnded(batch[i].Message)
		if err != nil {
			dead(i, ClassUndecodable, err)
			continue
		}
		if h.settle == nil {
			h.log.InfoContext(ctx, "activity ended", "activity_id", e.Activity)
			continue
		}
		results[i] = h.settle(ctx, e, batch[i].Message)
	}
	return nil
}

// Cancel takes orders back on an operator's behalf, without a message in between.
func (h *Handler) Cancel(ctx context.Context, id order.ID, reason string) error {
	return h.cancel(ctx, []ask{{id: id.String(), reason: reason, label: reasonCancel}})
}

// outcome is what one transaction of cancels did.
type outcome struct {
	now     time.Time
	fresh   []*store.Order // rows that are final since now
	owed    []string       // the compensations that stand for them
	already []*store.Order // rows that were final before
	early   []order.Order  // payment time not over yet
	unknown []ask          // no row, and nothing known but the id
	counts  map[[2]string]int
	late    []time.Duration
}

func (h *Handler) cancel(ctx context.Context, asks []ask) error {
	// One ask per order. A buyer's cancel goes before an expiry, which may be too early.
	unique := make(map[string]ask, len(asks))
	ids := make([]string, 0, len(asks))
	for _, a := range asks {
		was, ok := unique[a.id]
		if !ok {
			ids = append(ids, a.id)
		}
		if !ok || was.expiry && !a.expiry {
			if a.content == nil {
				a.content = was.content
			}
			unique[a.id] = a
		}
	}
	ids, err := h.unpaying(ctx, ids, unique)
	if err != nil {
		return fmt.Errorf("cancel %d orders: %w", len(unique), err)
	}
	if len(ids) == 0 {
		return nil
	}
	slices.Sort(ids)
	var out outcome
	for try := 0; ; try++ {
		err := h.st.InTx(ctx, func(tx *store.Tx) error {
			var err error
			out, err = cancelTx(ctx, tx, ids, unique)
			return err
		})
		if err == nil {
			break
		}
		// The order's own message was faster than the tombstone: read its row.
		if !store.IsDuplicate(err) || try >= maxReads {
			return fmt.Errorf("cancel %d orders: %w", len(ids), err)
		}
	}
	for k, n := range out.counts {
		h.rollbacks.WithLabelValues(k[0], k[1]).Add(float64(n))
	}
	for _, d := range out.late {
		h.lateness.Observe(d.Seconds())
	}
	if err := failpoint.Hit(ctx, "worker.cancel.after_commit"); err != nil {
		return err
	}
	if err := h.follow.Release(ctx, out.fresh, out.owed); err != nil {
		return err
	}
	if err := h.follow.Release(ctx, out.already, nil); err != nil {
		return err
	}
	if err := h.follow.Postpone(ctx, out.early, out.now); err != nil {
		return err
	}
	if err := h.kept(ctx, slices.Concat(out.fresh, out.already)); err != nil {
		return err
	}
	return h.byRecord(ctx, out.unknown)
}

// unpaying leaves out the expiries of orders whose money is on its way. When a worker or MySQL has been away,
// a payment that came in time waits in one queue and the expiry in another, and whoever was faster would
// decide about the buyer's goods. Nothing is lost with the message: the sweep finds what is over (C10).
func (h *Handler) unpaying(ctx context.Context, ids []string, asks map[string]ask) ([]string, error) {
	expiries := make([]order.ID, 0, len(ids))
	for _, id := range ids {
		if !asks[id].expiry {
			continue
		}
		if oid, err := order.ParseID(id); err == nil {
			expiries = append(expiries, oid)
		}
	}
	paying, err := h.records.Paying(ctx, expiries)
	if err != nil || len(paying) == 0 {
		return ids, err
	}
	now, err := h.st.Now(ctx)
	if err != nil {
		return nil, err
	}
	return slices.DeleteFunc(ids, func(id string) bool {
		oid, err := order.ParseID(id)
		since, waits := paying[oid]
		// A time that is still to come is nobody's note, and must not hold the order for ever.
		if err != nil || !waits || now.Sub(since).Abs() > moneyPatience {
			return false
		}
		h.rollbacks.WithLabelValues(asks[id].label, resultPaying).Inc()
		return true
	}), nil
}

// kept lets payments that wait for one of the rows meet it (R5).
func (h *Handler) kept(ctx context.Context, rows []*store.Order) error {
	if len(rows) == 0 {
		return nil
	}
	payments, _, err := h.st.Waiting(ctx)
	if err != nil || !payments {
		return err
	}
	ids := make([]string, len(rows))
	for i, o := range rows {
		ids[i] = o.ID
	}
	return h.follow.Kept(ctx, ids)
}

// byRecord deals with orders of which the message knew the id alone and MySQL nothing: the record in
// Redis has the content, and with it a tombstone can be written. Without a record nobody holds
// anything (R18).
func (h *Handler) byRecord(ctx context.Context, asks []ask) error {
	var again []ask
	for _, a := range asks {
		id, err := order.ParseID(a.id)
		if err != nil {
			return fmt.Errorf("cancel: %w", err)
		}
		rec, err := h.records.Order(ctx, id)
		switch {
		case errors.Is(err, stock.ErrOrderNotFound), errors.Is(err, stock.ErrArchived):
		case errors.Is(err, stock.ErrCorrupt):
			return fmt.Errorf("cancel order %s: %w: %w", a.id, store.ErrUndecidable, err)
		case err != nil:
			return fmt.Errorf("read record of order %s: %w", a.id, err)
		case !rec.Receipt:
			a.content = &rec.Order
			again = append(again, a)
			continue
		}
		h.rollbacks.WithLabelValues(a.label, resultUnknown).Inc()
		h.log.WarnContext(ctx, "asked to cancel an order that nobody knows", "order_id", a.id, "reason", a.reason)
	}
	if len(again) == 0 {
		return nil
	}
	return h.cancel(ctx, again)
}

func cancelTx(ctx context.Context, tx *store.Tx, ids []string, asks map[string]ask) (outcome, error) {
	out := outcome{counts: map[[2]string]int{}}
	rows, err := store.LockOrders(ctx, tx, ids)
	if err != nil {
		return out, err
	}
	if out.now, err = tx.Now(ctx); err != nil {
		return out, err
	}
	byReason := map[string][]string{}
	var cancelled, tombstones []*store.Order
	for _, id := range ids {
		a, o := asks[id], rows[id]
		count := func(result string) { out.counts[[2]string{a.label, result}]++ }
		switch {
		case o == nil && a.content == nil:
			out.unknown = append(out.unknown, a)
		case o == nil && a.expiry && a.content.PayBefore.After(out.now):
			out.early = append(out.early, *a.content)
			count(resultEarly)
		case o == nil:
			// Before its order: the row says what became of it, and the order's message, when it comes,
			// finds it and takes no stock (C8).
			t, err := store.NewOrder(*a.content, order.Cancelled, a.reason, store.OriginTombstone)
			if err != nil {
				return out, err
			}
			tombstones = append(tombstones, t)
			count(resultTombstone)
		case o.Status == order.Pending && a.expiry && o.PayBefore.After(out.now):
			// A sweep knows the id alone; it asked for what is over, so the clock has just gone back, and
			// the sweep comes again.
			if a.content != nil {
				again := *a.content
				again.PayBefore = o.PayBefore
				out.early = append(out.early, again)
			}
			count(resultEarly)
		case o.Status == order.Pending:
			byReason[a.reason] = append(byReason[a.reason], id)
			o.Status, o.Reason = order.Cancelled, a.reason
			cancelled = append(cancelled, o)
			count(resultDone)
			if a.expiry {
				out.late = append(out.late, out.now.Sub(o.PayBefore))
			}
		case o.Status.Final():
			out.already = append(out.already, o)
			count(resultAlready)
		default:
			count(resultRefused) // paid
		}
	}
	for reason, ids := range byReason {
		n, err := store.MoveOrders(ctx, tx, ids, order.Pending, order.Cancelled, reason)
		if err != nil {
			return out, err
		}
		if n != len(ids) {
			return out, fmt.Errorf("cancel %d locked orders: %d were pending", len(ids), n)
		}
	}
	if err := store.InsertOrders(ctx, tx, tombstones); err != nil {
		return out, err
	}
	out.fresh = slices.Concat(cancelled, tombstones)
	if out.owed, err = store.OweBatch(ctx, tx, store.CompensateRelease, out.fresh, follow.CompensationDelay()); err != nil {
		return out, err
	}
	// Last: the pool's row is the hot one.
	return out, store.ReturnUnits(ctx, tx, cancelled, store.OpCancel)
}

// refund is a paid order that an operator wants taken back.
type refund struct {
	id     string
	from   int // the delivery
	reason string
}

// refund undoes paid orders. Where their units go is decided in the transaction, under the pool's
// lock (R6): back on sale while the sale is not settled, else to inventory.
func (h *Handler) refund(ctx context.Context, refunds []refund) error {
	if len(refunds) == 0 {
		return nil
	}
	reasons := map[string]string{}
	var ids []string
	for _, r := range refunds {
		if _, ok := reasons[r.id]; !ok {
			reasons[r.id] = r.reason
			ids = append(ids, r.id)
		}
	}
	slices.Sort(ids)
	var release []*store.Order
	var counts map[string]int
	err := h.st.InTx(ctx, func(tx *store.Tx) error {
		release, counts = nil, map[string]int{}
		rows, err := store.Orders(ctx, tx, ids, true)
		if err != nil {
			return err
		}
		var refunded []*store.Order
		for _, id := range ids {
			o := rows[id]
			switch {
			case o == nil:
				counts[resultUnknown]++
			case o.Status == order.Paid:
				if _, err := store.MoveOrders(ctx, tx, []string{id}, order.Paid, order.Refunded, reasons[id]); err != nil {
					return err
				}
				o.Status, o.Reason = order.Refunded, reasons[id]
				refunded = append(refunded, o)
				counts[resultDone]++
			case o.Status == order.Refunded:
				release = append(release, o)
				counts[resultAlready]++
			default:
				counts[resultRefused]++
			}
		}
		if len(refunded) == 0 {
			return nil
		}
		release = append(release, refunded...)
		if err := store.RefundPayments(ctx, tx, refunded); err != nil {
			return err
		}
		if err := store.Owe(ctx, tx, store.CompensateRelease, refunded, follow.CompensationDelay()); err != nil {
			return err
		}
		return store.ReturnUnits(ctx, tx, refunded, store.OpRefund)
	})
	if err != nil {
		return fmt.Errorf("refund %d orders: %w", len(ids), err)
	}
	for result, n := range counts {
		h.rollbacks.WithLabelValues(reasonRefund, result).Add(float64(n))
	}
	if n := counts[resultRefused] + counts[resultUnknown]; n > 0 {
		h.log.WarnContext(ctx, "refunds asked for orders that are not paid", "orders", n)
	}
	if err := failpoint.Hit(ctx, "worker.cancel.after_commit"); err != nil {
		return err
	}
	return h.follow.Release(ctx, release, nil)
}
