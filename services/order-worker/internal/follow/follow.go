// Package follow carries out what a committed row asks for, whatever message led to it (R2):
//
//	pending    → an order.expired in the delay queue of what is left of the payment time, then the
//	             Redis record to pending and out of the outbox
//	paid       → the Redis record to paid
//	cancelled, refunded, rejected → the units, limit and qualification back in Redis, once, and then
//	             the compensation that stood for it removed
//
// Every step may be repeated. After a crash anywhere, the message that comes again (or the sweep)
// calls it again with the row as it is then.
package follow

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"seckill/pkg/failpoint"
	"seckill/pkg/messaging"
	"seckill/pkg/order"
	"seckill/pkg/stock"
	"seckill/services/order-worker/internal/store"
)

// records is the part of stock.Client that moves records.
type records interface {
	Confirm(ctx context.Context, cs []stock.Confirmation) ([]stock.Outcome, error)
	Release(ctx context.Context, rs []stock.Release) ([]stock.Outcome, error)
	MarkRefundDue(ctx context.Context, id order.ID) error
	ClearRefundDue(ctx context.Context, id order.ID) error
	RefundReceipt(ctx context.Context, id order.ID, reason string) error
	Order(ctx context.Context, id order.ID) (stock.Record, error)
}

// broker is the part of messaging.Client that schedules.
type broker interface {
	Send(ctx context.Context, exchange string, m messaging.Message) *messaging.Pending
	Tier(d time.Duration) time.Duration
	Tiers() []time.Duration
}

// compensationDelay is when the sweep looks after a release that its own message has not carried
// out by then.
const compensationDelay = 5 * time.Second

// redisTimeout bounds one round of scripts, publishTimeout one round of publishes.
const (
	redisTimeout   = 10 * time.Second
	publishTimeout = 10 * time.Second
)

// Follower is safe for concurrent use.
type Follower struct {
	st      *store.Store
	records records
	broker  broker
	log     *slog.Logger
	drift   *prometheus.GaugeVec
}

// New makes a Follower.
func New(st *store.Store, rec records, br broker, log *slog.Logger, reg prometheus.Registerer) (*Follower, error) {
	f := &Follower{
		st: st, records: rec, broker: br, log: log,
		drift: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "seckill_drift_units",
			Help: "Units by which Redis and MySQL were found to differ, by who found it, since the start or the last comparison.",
		}, []string{"source"}),
	}
	for _, s := range []string{"stock_guard", "limit_guard", "record", "reconcile"} {
		f.drift.WithLabelValues(s)
	}
	if err := reg.Register(f.drift); err != nil {
		return nil, fmt.Errorf("register metrics: %w", err)
	}
	return f, nil
}

// Drift adds to the gauge of units by which the stores differ.
func (f *Follower) Drift(source string, units int) {
	f.drift.WithLabelValues(source).Add(float64(units))
}

// SetDrift sets the units by which the stores differed when they were last compared.
func (f *Follower) SetDrift(source string, units int) {
	f.drift.WithLabelValues(source).Set(float64(units))
}

// CompensationDelay is the time that Owe should give a release.
func CompensationDelay() time.Duration { return compensationDelay }

// Rows does for each row what its state asks for. An error means that something is left to be done:
// call it again, with the rows as they are then.
func (f *Follower) Rows(ctx context.Context, rows []*store.Order) error {
	return f.rows(ctx, rows, false)
}

// Settled is Rows for a sale whose pools are settled: records follow their rows whatever became of the
// other keys.
func (f *Follower) Settled(ctx context.Context, rows []*store.Order) error {
	return f.rows(ctx, rows, true)
}

func (f *Follower) rows(ctx context.Context, rows []*store.Order, over bool) error {
	var pending, final []*store.Order
	confirm := make([]stock.Confirmation, 0, len(rows))
	for _, o := range rows {
		id, err := order.ParseID(o.ID)
		if err != nil {
			return fmt.Errorf("follow row: %w", err)
		}
		switch o.Status {
		case order.Pending:
			pending = append(pending, o)
			confirm = append(confirm, stock.Confirmation{ID: id, To: order.Pending})
		case order.Paid:
			confirm = append(confirm, stock.Confirmation{ID: id, To: order.Paid})
		case order.Cancelled, order.Refunded, order.Rejected:
			final = append(final, o)
		case order.Reserved:
			return fmt.Errorf("follow order %s: row says %q", o.ID, o.Status)
		}
	}
	if err := f.Schedule(ctx, pending); err != nil {
		return err
	}
	if err := failpoint.Hit(ctx, "worker.after_expiry_publish"); err != nil {
		return err
	}
	if err := f.confirm(ctx, confirm); err != nil {
		return err
	}
	if err := failpoint.Hit(ctx, "worker.after_lua_confirm"); err != nil {
		return err
	}
	_, err := f.release(ctx, final, nil, over)
	return err
}

// Schedule puts order.expired for pending rows into the delay queues and waits until the broker has
// confirmed them all. The tier covers what is left of the payment time: for an order that was
// written at once that is its whole time-out, for one that waited in a backlog it is less.
func (f *Follower) Schedule(ctx context.Context, rows []*store.Order) error {
	if len(rows) == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, publishTimeout)
	defer cancel()
	tiers := map[time.Duration][]order.Order{}
	now := time.Now()
	for _, o := range rows {
		content, err := o.Content()
		if err != nil {
			return err
		}
		t := f.broker.Tier(o.PayBefore.Sub(now))
		if tiers[t] == nil {
			tiers[t] = make([]order.Order, 0, len(rows)) // nearly always there is one tier
		}
		tiers[t] = append(tiers[t], content)
	}
	return f.delay(ctx, tiers)
}

// Postpone puts order.expired that came too early into the largest delay tier that fits into what is
// left by the database's clock (R16): the last step towards the deadline is a short one.
func (f *Follower) Postpone(ctx context.Context, orders []order.Order, now time.Time) error {
	if len(orders) == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, publishTimeout)
	defer cancel()
	tiers := map[time.Duration][]order.Order{}
	all := f.broker.Tiers()
	for _, o := range orders {
		t := all[0]
		for _, tier := range all {
			if tier <= o.PayBefore.Sub(now) {
				t = tier
			}
		}
		tiers[t] = append(tiers[t], o)
	}
	return f.delay(ctx, tiers)
}

func (f *Follower) delay(ctx context.Context, tiers map[time.Duration][]order.Order) error {
	var waits []*messaging.Pending
	for tier, orders := range tiers {
		for len(orders) > 0 {
			n := min(len(orders), messaging.MaxOrdersPerMessage)
			waits = append(waits, f.broker.Send(ctx, messaging.DelayExchange(tier), messaging.OrderExpired(orders[:n])))
			orders = orders[n:]
		}
	}
	var errs []error
	for _, w := range waits {
		if err := w.Wait(ctx); err != nil {
			errs = append(errs, err)
		}
	}
	if len(errs) > 0 {
		return fmt.Errorf("schedule expiry: %d of %d messages: %w", len(errs), len(waits), errs[0])
	}
	return nil
}

func (f *Follower) confirm(ctx context.Context, cs []stock.Confirmation) error {
	if len(cs) == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, redisTimeout)
	defer cancel()
	outs, err := f.records.Confirm(ctx, cs)
	if err != nil && !onlyCorrupt(err) {
		return fmt.Errorf("confirm %d orders in redis: %w", len(cs), err)
	}
	for i, out := range outs {
		if out == 0 && err != nil {
			out = stock.Mismatch
		}
		switch out {
		case stock.Applied, stock.Already, stock.NoRecord:
			// NoRecord: Redis has forgotten it, or the sale was cleaned up. Status scripts create no
			// record (R1); reconciliation does.
		case stock.Mismatch, stock.NoStockKey:
			f.Drift("record", 1)
			f.log.ErrorContext(ctx, "redis record contradicts the order's row", "order_id", cs[i].ID.String())
		default:
			return fmt.Errorf("confirm order %s: unknown outcome %d", cs[i].ID, out)
		}
	}
	return nil
}

// onlyCorrupt says that all that failed are values in Redis of the wrong type or shape. Trying again
// cannot help, and one such value must not hold up the orders beside it.
func onlyCorrupt(err error) bool {
	return errors.Is(err, stock.ErrCorrupt) && !errors.Is(err, stock.ErrUnavailable) && !errors.Is(err, stock.ErrUnknownOutcome) &&
		!errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, context.Canceled)
}

// Release gives back in Redis what final rows held there, with the row's state and reason, and
// removes the compensations that stood for it: those named by owed if the caller has just noted them,
// else those of the rows. A row whose stock key is missing gets a compensation of its own: the sweep
// comes back to it.
func (f *Follower) Release(ctx context.Context, rows []*store.Order, owed []string) error {
	_, err := f.release(ctx, rows, owed, false)
	return err
}

// release also reports the rows that could not be released because a key is missing or damaged. Where the
// sale is over nothing is put back, and only the records count.
func (f *Follower) release(ctx context.Context, rows []*store.Order, owed []string, over bool) (stuck []*store.Order, err error) {
	if len(rows) == 0 {
		return nil, nil
	}
	rctx, cancel := context.WithTimeout(ctx, redisTimeout)
	defer cancel()
	rs := make([]stock.Release, 0, len(rows))
	of := make([]*store.Order, 0, len(rows))
	done := make([]string, 0, len(rows))
	var refunded []string
	for _, o := range rows {
		id, err := order.ParseID(o.ID)
		if err != nil {
			return nil, fmt.Errorf("release: %w", err)
		}
		r := stock.Release{
			ID: id, User: o.UserID, SKU: o.SKUID, Pool: o.Pool, Quantity: o.Quantity, To: o.Status, Reason: o.Reason,
			// MySQL had less than Redis thought: a unit put back would be accepted and refused for
			// ever (R7).
			Withhold: o.Status == order.Rejected && o.Reason == order.ReasonOutOfStock,
			Over:     over,
		}
		if o.Origin == store.OriginBare {
			rec, err := f.records.Order(rctx, id)
			switch {
			case err == nil:
			case errors.Is(err, stock.ErrOrderNotFound), errors.Is(err, stock.ErrArchived), over && onlyCorrupt(err):
				done = append(done, o.ID)
				continue
			case onlyCorrupt(err):
				f.Drift("record", 1)
				f.log.ErrorContext(ctx, "redis record cannot be read, its release is kept for later", "order_id", o.ID, "error", err)
				stuck = append(stuck, o)
				continue
			default:
				return nil, fmt.Errorf("read record of order %s: %w", o.ID, err)
			}
			r.User, r.SKU, r.Pool, r.Quantity = rec.User, rec.SKU, rec.Pool, rec.Quantity
		}
		rs = append(rs, r)
		of = append(of, o)
	}
	if len(rs) > 0 {
		outs, err := f.records.Release(rctx, rs)
		if err != nil && !onlyCorrupt(err) {
			return nil, fmt.Errorf("release %d orders in redis: %w", len(rs), err)
		}
		for i, out := range outs {
			if out == 0 && err != nil {
				f.Drift("record", rs[i].Quantity)
				f.log.ErrorContext(ctx, "redis record cannot be read, its release is kept for later", "order_id", of[i].ID, "error", err)
				out = stock.NoStockKey
			}
			if of[i].Status == order.Refunded {
				refunded = append(refunded, of[i].ID)
				if out == stock.NoRecord {
					if err := f.records.RefundReceipt(rctx, rs[i].ID, rs[i].Reason); err != nil && !onlyCorrupt(err) {
						return nil, err
					}
				}
			}
			switch out {
			case stock.Applied, stock.Already, stock.NoRecord:
				done = append(done, of[i].ID)
			case stock.Mismatch:
				done = append(done, of[i].ID)
				f.Drift("record", rs[i].Quantity)
				f.log.ErrorContext(ctx, "redis record contradicts the order's row, nothing released", "order_id", of[i].ID)
			case stock.NoStockKey:
				stuck = append(stuck, of[i])
			default:
				return nil, fmt.Errorf("release order %s: unknown outcome %d", of[i].ID, out)
			}
		}
	}
	if err := failpoint.Hit(ctx, "worker.cancel.after_release"); err != nil {
		return nil, err
	}
	// What was paid for them has to go back, until it was sent back: their buyers see that, too.
	if err := f.refunds(ctx, refunded); err != nil && !onlyCorrupt(err) {
		return nil, err
	}
	if len(stuck) > 0 {
		f.log.ErrorContext(ctx, "a key is missing or damaged, releases are kept for later", "orders", len(stuck), "activity_id", stuck[0].ActivityID)
		if err := store.Owe(ctx, f.st.SQL(), store.CompensateRelease, stuck, compensationDelay); err != nil {
			return nil, err
		}
	}
	if owed != nil {
		// A stuck order keeps the row it has just got.
		return stuck, f.st.Paid(ctx, store.CompensateRelease, without(owed, stuck))
	}
	return stuck, f.st.Paid(ctx, store.CompensateRelease, done)
}

// without drops the subjects that are the ids of stuck orders.
func without(owed []string, stuck []*store.Order) []string {
	return slices.DeleteFunc(slices.Clone(owed), func(s string) bool {
		return slices.ContainsFunc(stuck, func(o *store.Order) bool { return o.ID == s })
	})
}

// RefundDue marks the records of orders that money arrived for which has to go back.
func (f *Follower) RefundDue(ctx context.Context, ids []string) error {
	return f.mark(ctx, ids, f.records.MarkRefundDue)
}

func (f *Follower) mark(ctx context.Context, ids []string, with func(context.Context, order.ID) error) error {
	rctx, cancel := context.WithTimeout(ctx, redisTimeout)
	defer cancel()
	for _, s := range ids {
		id, err := order.ParseID(s)
		if err != nil {
			return fmt.Errorf("mark refund due: %w", err)
		}
		err = with(rctx, id)
		switch {
		case err == nil, errors.Is(err, stock.ErrOrderNotFound), errors.Is(err, stock.ErrArchived):
		case onlyCorrupt(err):
			// What is due stands in MySQL; that the buyer cannot see it holds up no other's money.
			f.Drift("record", 1)
			f.log.ErrorContext(ctx, "redis record cannot be read, its buyer does not see that money goes back", "order_id", s, "error", err)
		default:
			return fmt.Errorf("mark refund due of order %s: %w", s, err)
		}
	}
	return nil
}

// refunds brings the marks of records to what the payments say: money that was sent back is due no more.
func (f *Follower) refunds(ctx context.Context, ids []string) error {
	if len(ids) == 0 {
		return nil
	}
	due, err := f.st.RefundsDue(ctx, ids)
	if err != nil {
		return err
	}
	var over []string
	for _, id := range ids {
		if !due[id] {
			over = append(over, id)
		}
	}
	if err := f.mark(ctx, over, f.records.ClearRefundDue); err != nil {
		return err
	}
	// A payment that became due meanwhile may have set its mark before we took it off: look again.
	if due, err = f.st.RefundsDue(ctx, ids); err != nil {
		return err
	}
	return f.RefundDue(ctx, slices.Sorted(maps.Keys(due)))
}

// Kept applies payments that came before their orders and follows what they changed (R5). Call it
// after the commit that wrote the orders or the payments. What MySQL refuses stays kept, is logged, and
// tried again by the sweep: it is no reason to hold the message that brought us here.
func (f *Follower) Kept(ctx context.Context, orderIDs []string) error {
	if len(orderIDs) == 0 {
		return nil
	}
	rows, due := map[string]*store.Order{}, map[string]bool{}
	refused, err := store.Each(orderIDs, len(orderIDs), func(ids []string) error {
		r, d, err := f.st.ApplyKept(ctx, ids)
		maps.Copy(rows, r)
		maps.Copy(due, d)
		return err
	})
	for _, r := range refused {
		f.log.ErrorContext(ctx, "payment cannot be applied to its order", "order_id", r.Of, "error", r.Err)
	}
	if err != nil || len(rows) == 0 {
		return err
	}
	list := make([]*store.Order, 0, len(rows))
	for _, o := range rows {
		if o.Status == order.Paid {
			list = append(list, o)
		}
	}
	ids := make([]string, 0, len(due))
	for id := range due {
		ids = append(ids, id)
	}
	if len(ids) > 0 {
		f.log.WarnContext(ctx, "kept payments met orders that cannot be paid, refund due", "payments", len(ids))
	}
	if err := f.Rows(ctx, list); err != nil {
		return err
	}
	if err := f.RefundDue(ctx, ids); err != nil {
		return err
	}
	return f.st.Paid(ctx, store.CompensateRefundDue, ids)
}

// Compensate carries out compensations that have come up (C9): the rows are read again, and followed.
func (f *Follower) Compensate(ctx context.Context, due []store.Compensation) error {
	return f.compensate(ctx, due, false)
}

// CompensateEnded is Compensate for a sale whose end is recorded and marked. A release that waits for a
// stock key which Redis has lost, or for one that was damaged, would wait for ever: no request and no sweep
// makes the key again, and nobody buys from it any more. The record is released without it; what is left
// of the pool, and what the buyer holds, is in MySQL.
func (f *Follower) CompensateEnded(ctx context.Context, due []store.Compensation) error {
	return f.compensate(ctx, due, true)
}

func (f *Follower) compensate(ctx context.Context, due []store.Compensation, ended bool) error {
	var release, ids, mark []string
	for _, c := range due {
		switch c.Kind {
		case store.CompensateRelease:
			release = append(release, c.Subject)
			ids = append(ids, c.Orders()...)
		case store.CompensateRefundDue:
			mark = append(mark, c.Subject)
		}
	}
	rows, err := store.Orders(ctx, f.st.SQL(), ids, false)
	if err != nil {
		return err
	}
	// What has no final row needs no release: then the note is wrong, not the row.
	final := make([]*store.Order, 0, len(rows))
	for _, o := range rows {
		if o.Status.Final() {
			final = append(final, o)
		}
	}
	var stuck []*store.Order
	for part := range slices.Chunk(final, 512) {
		s, err := f.release(ctx, part, []string{}, false)
		if err == nil && ended && len(s) > 0 {
			s, err = f.release(ctx, s, nil, true)
		}
		if err != nil {
			return errors.Join(err, f.st.CompensationFailed(context.WithoutCancel(ctx), store.CompensateRelease, release, err))
		}
		stuck = append(stuck, s...)
	}
	if err := f.st.Paid(ctx, store.CompensateRelease, without(release, stuck)); err != nil {
		return err
	}
	if len(stuck) > 0 {
		ids := make([]string, len(stuck))
		for i, o := range stuck {
			ids[i] = o.ID
		}
		if err := f.st.CompensationFailed(ctx, store.CompensateRelease, ids, errors.New("a key in redis is missing or damaged")); err != nil {
			return err
		}
	}
	if err := f.refunds(ctx, mark); err != nil {
		return errors.Join(err, f.st.CompensationFailed(context.WithoutCancel(ctx), store.CompensateRefundDue, mark, err))
	}
	return f.st.Paid(ctx, store.CompensateRefundDue, mark)
}
