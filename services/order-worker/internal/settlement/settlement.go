package settlement

import (
	"cmp"
	"context"
	"database/sql"
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
	"seckill/services/order-worker/internal/activity"
	"seckill/services/order-worker/internal/audit"
	"seckill/services/order-worker/internal/follow"
	"seckill/services/order-worker/internal/store"
)

// Config of a Service. The zero value of each field means its default.
type Config struct {
	// Interval of the scheduler that finds sales whose end has come. Default 1 s.
	Interval time.Duration `mapstructure:"interval"`
	// Again is how long a settlement that has to wait comes back later. Default 5 s.
	Again time.Duration `mapstructure:"again"`
	// Stale is how long an end may make no attempt before the scheduler starts it again. Default 20 s.
	Stale time.Duration `mapstructure:"stale"`
	// LockTTL of the settlement lock, which is renewed while it is held. Default 15 s.
	LockTTL time.Duration `mapstructure:"lock_ttl"`
	// MarkerTTL is how long the end marker and the receipts stay after the clean-up. Default 48 h, at
	// least 24 h.
	MarkerTTL time.Duration `mapstructure:"marker_ttl"`
}

// WithDefaults returns c with every unset field filled in.
func (c Config) WithDefaults() Config {
	set := func(d *time.Duration, v time.Duration) {
		if *d <= 0 {
			*d = v
		}
	}
	set(&c.Interval, time.Second)
	set(&c.Again, 5*time.Second)
	set(&c.Stale, 20*time.Second)
	set(&c.LockTTL, 15*time.Second)
	set(&c.MarkerTTL, 48*time.Hour)
	c.MarkerTTL = max(c.MarkerTTL, stock.MarkerTTL)
	return c
}

// attemptTimeout bounds one attempt, so that a consumer is not held up for as long as the clean-up of
// a huge sale takes: the next attempt goes on where this one stopped.
const attemptTimeout = 30 * time.Second

// endDelay is the delay queue of activity.ended (design §6, step 2).
const endDelay = 5 * time.Second

// canceller takes back the orders of a sale whose payment time is over.
type canceller interface {
	CancelDue(ctx context.Context, activity string) (int, error)
}

// broker is the part of messaging.Client that is used here.
type broker interface {
	Publish(ctx context.Context, exchange string, msgs ...messaging.Message) []error
}

// Service is safe for concurrent use.
type Service struct {
	cfg    Config
	st     *store.Store
	redis  *stock.Client
	sales  *activity.Service
	cancel canceller
	follow *follow.Follower
	broker broker
	log    *slog.Logger

	attempts *prometheus.CounterVec
	open     *prometheus.GaugeVec
}

// New makes a Service; it does no I/O.
func New(cfg Config, st *store.Store, redis *stock.Client, sales *activity.Service, c canceller, f *follow.Follower, b broker, log *slog.Logger, reg prometheus.Registerer) (*Service, error) {
	s := &Service{
		cfg: cfg.WithDefaults(), st: st, redis: redis, sales: sales, cancel: c, follow: f, broker: b, log: log,
		attempts: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "seckill_settlement_attempts_total",
			Help: "Attempts to settle a sale, by how they ended.",
		}, []string{"result"}),
		open: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "seckill_activities",
			Help: "Sales by state.",
		}, []string{"state"}),
	}
	for _, r := range []string{"closed", "waiting", "locked", "fenced", "failed"} {
		s.attempts.WithLabelValues(r)
	}
	for _, c := range []prometheus.Collector{s.attempts, s.open} {
		if err := reg.Register(c); err != nil {
			return nil, fmt.Errorf("register metrics: %w", err)
		}
	}
	return s, nil
}

// End ends a sale now, or takes up an end that was begun. begun is false when it had ended before.
// Steps 0 to 2; the rest follows by message.
func (s *Service) End(ctx context.Context, id string, by audit.Actor, reason string) (begun bool, err error) {
	err = s.st.InTx(ctx, func(tx *store.Tx) error {
		begun = false
		var state string
		var endsAt time.Time
		err := tx.QueryRowContext(ctx, "SELECT state, ends_at FROM activities WHERE id = ? FOR UPDATE", id).Scan(&state, &endsAt)
		switch {
		case errors.Is(err, sql.ErrNoRows):
			return activity.ErrNotFound
		case err != nil:
			return fmt.Errorf("lock activity: %w", err)
		case state != store.ActivityDraft && state != store.ActivityWarmed:
			return nil
		}
		begun = true
		if _, err := tx.ExecContext(ctx, "UPDATE activities SET state = ?, ended_at = UTC_TIMESTAMP(6), ends_at = LEAST(ends_at, UTC_TIMESTAMP(6)), "+
			"updated_at = UTC_TIMESTAMP(6) WHERE id = ?", store.ActivityEnded, id); err != nil {
			return fmt.Errorf("record the end: %w", err)
		}
		return audit.Write(ctx, tx, by, audit.Entry{Action: "activity.end", Subject: id, Reason: reason, Result: "ended", Before: map[string]string{"state": state}})
	})
	if err != nil {
		return false, fmt.Errorf("end activity %s: %w", id, err)
	}
	if err := failpoint.Hit(ctx, "end.step0"); err != nil {
		return begun, err
	}
	return begun, s.begin(ctx, id)
}

// begin is steps 1 and 2: markers, then the message. Both may be repeated.
func (s *Service) begin(ctx context.Context, id string) error {
	d, err := s.sales.Load(ctx, id)
	if err != nil {
		return err
	}
	if d.State == store.ActivityClosed {
		return nil
	}
	if d.State == store.ActivityEnded {
		if err := s.mark(ctx, d); err != nil {
			return err
		}
	}
	if err := failpoint.Hit(ctx, "end.step1"); err != nil {
		return err
	}
	for _, err := range s.broker.Publish(ctx, messaging.DelayExchange(endDelay), messaging.ActivityEnded(id, d.EndsAt)) {
		if err != nil {
			return fmt.Errorf("schedule the settlement of activity %s: %w", id, err)
		}
	}
	return failpoint.Hit(ctx, "end.step2")
}

func (s *Service) mark(ctx context.Context, d *activity.Details) error {
	a, err := s.sales.Outline(ctx, d)
	if err != nil {
		return err
	}
	return s.redis.End(ctx, a, d.EndsAt)
}

// Run is the scheduler: it ends sales whose time has come and starts ends again that make no progress,
// until ctx ends. Several may run.
func (s *Service) Run(ctx context.Context) {
	tick := time.NewTicker(s.cfg.Interval)
	defer tick.Stop()
	for {
		if err := s.Schedule(ctx); err != nil && ctx.Err() == nil {
			s.log.WarnContext(ctx, "ending of sales held up", "error", err)
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// Schedule is one round of Run.
func (s *Service) Schedule(ctx context.Context) error {
	var errs []error
	due, err := s.ids(ctx, "SELECT id FROM activities WHERE state IN ('draft','warmed') AND ends_at <= UTC_TIMESTAMP(6) ORDER BY ends_at LIMIT 100")
	if err != nil {
		return err
	}
	for _, id := range due {
		errs = append(errs, activity.Bounded(ctx, func(ctx context.Context) error {
			_, err := s.End(ctx, id, audit.System(), "its time is over")
			return err
		}))
	}
	stale, err := s.ids(ctx, "SELECT id FROM activities WHERE state IN ('ended','settled') AND updated_at < UTC_TIMESTAMP(6) - INTERVAL ? MICROSECOND ORDER BY updated_at LIMIT 100",
		s.cfg.Stale.Microseconds())
	if err != nil {
		return errors.Join(append(errs, err)...)
	}
	for _, id := range stale {
		errs = append(errs, activity.Bounded(ctx, func(ctx context.Context) error { return s.takeUp(ctx, id) }))
	}
	return errors.Join(append(errs, activity.Bounded(ctx, s.count))...)
}

// takeUp starts an end again that makes no progress. One scheduler gets it: the others see it fresh.
func (s *Service) takeUp(ctx context.Context, id string) error {
	res, err := s.st.SQL().ExecContext(ctx, "UPDATE activities SET updated_at = UTC_TIMESTAMP(6) WHERE id = ? AND state IN ('ended','settled') AND updated_at < UTC_TIMESTAMP(6) - INTERVAL ? MICROSECOND",
		id, s.cfg.Stale.Microseconds())
	if err != nil {
		return fmt.Errorf("take up the end of activity %s: %w", id, err)
	}
	if n, err := res.RowsAffected(); err != nil || n == 0 {
		return err //nolint:wrapcheck // the driver knows the count already
	}
	return s.begin(ctx, id)
}

func (s *Service) ids(ctx context.Context, query string, args ...any) ([]string, error) {
	var out []string
	if err := activity.Bounded(ctx, func(ctx context.Context) error { return s.st.DB(ctx).Raw(query, args...).Scan(&out).Error }); err != nil {
		return nil, fmt.Errorf("read activities: %w", err)
	}
	return out, nil
}

func (s *Service) count(ctx context.Context) error {
	var rows []struct {
		State string
		N     int
	}
	if err := s.st.DB(ctx).Raw("SELECT state, COUNT(*) AS n FROM activities GROUP BY state").Scan(&rows).Error; err != nil {
		return fmt.Errorf("count activities: %w", err)
	}
	for _, st := range []string{store.ActivityDraft, store.ActivityWarmed, store.ActivityEnded, store.ActivitySettled, store.ActivityClosed} {
		n := 0
		for _, r := range rows {
			if r.State == st {
				n = r.N
			}
		}
		s.open.WithLabelValues(st).Set(float64(n))
	}
	return nil
}

// errWait says why a settlement has to come back later.
type errWait struct{ why string }

func (e errWait) Error() string { return e.why }

func wait(format string, args ...any) error { return errWait{fmt.Sprintf(format, args...)} }

// ErrFenced stops a settlement that slept while another went on.
var ErrFenced = stock.ErrFenced

// Handle is what rollback.Handler calls for activity.ended. Whatever an attempt leaves undone comes
// back through the delay queue; such a copy is a first attempt, for waiting is not failing.
func (s *Service) Handle(ctx context.Context, ended messaging.Ended, m messaging.Message) messaging.Result {
	err := s.settle(ctx, ended.Activity)
	var later errWait
	result := "failed"
	switch {
	case err == nil:
		s.attempts.WithLabelValues("closed").Inc()
		return messaging.Result{}
	case errors.As(err, &later):
		result = "waiting"
		s.log.InfoContext(ctx, "settlement waits", "activity_id", ended.Activity, "for", later.why)
	case errors.Is(err, stock.ErrLocked), errors.Is(err, errJustNow):
		// Whoever holds it goes on; if it died, the scheduler finds that out.
		s.attempts.WithLabelValues("locked").Inc()
		s.log.InfoContext(ctx, "settlement is in another's hands", "activity_id", ended.Activity)
		return messaging.Result{}
	case errors.Is(err, ErrFenced), errors.Is(err, stock.ErrLockLost):
		result = "fenced"
		s.log.WarnContext(ctx, "settlement stopped, another has taken over", "activity_id", ended.Activity)
	case errors.Is(err, errNotEnded):
		// The end is recorded before its message is sent: this one is somebody else's. If not, the
		// scheduler takes the end up.
		s.attempts.WithLabelValues("waiting").Inc()
		s.log.WarnContext(ctx, "asked to settle a sale that has not ended", "activity_id", ended.Activity)
		return messaging.Result{}
	case errors.Is(err, activity.ErrNotFound):
		s.log.WarnContext(ctx, "end of an unknown activity", "activity_id", ended.Activity)
		return messaging.Result{}
	default:
		s.log.ErrorContext(ctx, "settlement failed, trying again", "activity_id", ended.Activity, "error", err)
		if errors.Is(err, errBefore) && !s.first(ctx, ended.Activity) {
			return messaging.Result{} // another copy of the message has just failed in the same way
		}
	}
	s.attempts.WithLabelValues(result).Inc()
	m.Attempt = 0
	return messaging.Result{Retries: []messaging.Retry{{Message: m, After: s.cfg.Again}}}
}

// Settle does what is left of the end of a sale. nil: the sale is closed, or another attempt was made
// just now. errWait: something is still under way. Any other error: try again.
func (s *Service) Settle(ctx context.Context, id string) error {
	if err := s.settle(ctx, id); !errors.Is(err, errJustNow) {
		return err
	}
	return nil
}

var errNotEnded = errors.New("the sale has not ended")

// errBefore: an attempt failed before it took its fencing number, which is what says that it was made.
var errBefore = errors.New("before the settlement began")

// first notes an attempt that took no fencing number, so that the scheduler does not start the end again
// beside it, and reports whether there was none just now: copies of a message must not pile up.
func (s *Service) first(ctx context.Context, id string) bool {
	ctx, cancel := context.WithTimeout(ctx, attemptTimeout)
	defer cancel()
	res, err := s.st.SQL().ExecContext(ctx, "UPDATE activities SET updated_at = UTC_TIMESTAMP(6) WHERE id = ? AND updated_at < UTC_TIMESTAMP(6) - INTERVAL ? MICROSECOND",
		id, copiesApart.Microseconds())
	if err != nil {
		return true
	}
	n, err := res.RowsAffected()
	return err != nil || n > 0
}

// errJustNow: another attempt was made just now; its message goes on.
var errJustNow = errors.New("another attempt was made just now")

func (s *Service) settle(ctx context.Context, id string) error {
	ctx, cancel := context.WithTimeout(ctx, attemptTimeout)
	defer cancel()
	d, err := s.sales.Load(ctx, id)
	if err != nil {
		return err
	}
	switch d.State {
	case store.ActivityClosed:
		return nil
	case store.ActivityDraft, store.ActivityWarmed:
		return errNotEnded
	}
	a, err := s.sales.Outline(ctx, d)
	if err != nil {
		return fmt.Errorf("%w: %w", errBefore, err)
	}
	begun := false
	err = s.redis.Hold(ctx, "settle:"+id, s.cfg.LockTTL, func(ctx context.Context) error {
		begun = true
		err := s.steps(ctx, d, a)
		if err != nil && errors.Is(context.Cause(ctx), stock.ErrLockLost) {
			return fmt.Errorf("%w: %w", stock.ErrLockLost, err)
		}
		return err
	})
	if err != nil && !begun {
		err = fmt.Errorf("%w: %w", errBefore, err)
	}
	return err
}

// steps are 3 to 7, as far as they are still to be done, under the lock.
func (s *Service) steps(ctx context.Context, d *activity.Details, a *stock.Activity) error {
	id := d.ID
	fence, err := s.fence(ctx, id)
	if err != nil {
		return err
	}
	if fence == 0 {
		return errJustNow
	}
	if err := s.redis.Fence(ctx, a, fence); err != nil {
		return err
	}
	if d.State == store.ActivityEnded {
		if err := s.quiet(ctx, d, a); err != nil {
			return err
		}
		if err := failpoint.Hit(ctx, "end.step3"); err != nil {
			return err
		}
		if err := s.finishOrders(ctx, id); err != nil {
			return err
		}
		if err := failpoint.Hit(ctx, "end.step4"); err != nil {
			return err
		}
		if err := s.settlePools(ctx, id, fence); err != nil {
			return err
		}
	}
	if err := failpoint.Hit(ctx, "end.step5"); err != nil {
		return err
	}
	if err := s.cleanUp(ctx, a, fence); err != nil {
		return err
	}
	if err := failpoint.Hit(ctx, "end.step6"); err != nil {
		return err
	}
	if err := s.close(ctx, a, fence); err != nil {
		return err
	}
	return failpoint.Hit(ctx, "end.step7")
}

// copiesApart is the time below which two attempts are one: copies of activity.ended that gathered
// while nobody consumed (the scheduler adds one each time it finds no progress) come in a burst.
const copiesApart = 500 * time.Millisecond

// fence takes the next fencing number, or 0 where another attempt was made just now. The update is also
// the sign of life that keeps the scheduler from starting the end again.
func (s *Service) fence(ctx context.Context, id string) (n uint64, err error) {
	err = s.st.InTx(ctx, func(tx *store.Tx) error {
		n = 0
		res, err := tx.ExecContext(ctx, "UPDATE activities SET fencing = GREATEST(fencing, 0) + 1, updated_at = UTC_TIMESTAMP(6) WHERE id = ? "+
			"AND updated_at <= UTC_TIMESTAMP(6) - INTERVAL ? MICROSECOND", id, copiesApart.Microseconds())
		if err != nil {
			return fmt.Errorf("take fencing number: %w", err)
		}
		if hit, err := res.RowsAffected(); err != nil || hit == 0 {
			return err
		}
		if err := tx.QueryRowContext(ctx, "SELECT fencing FROM activities WHERE id = ?", id).Scan(&n); err != nil {
			return fmt.Errorf("take fencing number: %w", err)
		}
		return nil
	})
	return n, err
}

// holds locks the activity's row and checks that the number is still the last one taken.
func holds(ctx context.Context, tx *store.Tx, id string, fence uint64) (state string, err error) {
	var now uint64
	if err := tx.QueryRowContext(ctx, "SELECT fencing, state FROM activities WHERE id = ? FOR UPDATE", id).Scan(&now, &state); err != nil {
		return "", fmt.Errorf("lock activity %s: %w", id, err)
	}
	if now != fence {
		return "", fmt.Errorf("settle activity %s: %w", id, ErrFenced)
	}
	return state, nil
}

// quiet is step 3: a marker that Redis lost is written again, and nothing may be in an outbox or parked
// behind a dead letter.
func (s *Service) quiet(ctx context.Context, d *activity.Details, a *stock.Activity) error {
	marks, err := s.redis.Markers(ctx, a)
	if err != nil {
		return err
	}
	if slices.ContainsFunc(marks, func(m stock.Marker) bool { return !m.Ended }) {
		if err := s.mark(ctx, d); err != nil {
			return err
		}
	}
	waiting, parked := 0, 0
	var names []string
	for b := range max(1, a.Buckets) {
		stats, err := s.redis.OutboxStats(ctx, a.ID, b)
		if err != nil {
			return err
		}
		waiting += stats.Waiting
		parked += stats.Parked
		if stats.Parked > 0 && len(names) < 5 {
			_, ids, err := s.redis.OutboxIDs(ctx, a.ID, b)
			if err != nil {
				return err
			}
			for _, id := range ids[:min(5, len(ids))] {
				names = append(names, id.String())
			}
		}
	}
	if parked == 0 {
		// A Redis that has lost its parked set knows nothing of them; their buyers do.
		err := s.st.DB(ctx).Raw("SELECT l.order_id FROM dead_letters l LEFT JOIN orders o ON o.id = l.order_id WHERE l.activity_id = ? AND l.parked = 1 AND l.state IN (?, ?, ?) AND o.id IS NULL LIMIT 5",
			a.ID, store.LetterOpen, store.LetterClaimed, store.LetterSent).Scan(&names).Error
		if err != nil {
			return fmt.Errorf("read parked letters: %w", err)
		}
		parked = len(names)
	}
	switch {
	case parked > 0:
		return wait("%d orders parked behind dead letters, replay or discard them: %s", parked, strings.Join(names, ", "))
	case waiting > 0:
		return wait("%d orders on their way to the database", waiting)
	}
	return nil
}

// finishOrders is step 4: what is unpaid and over is taken back, what can still be paid keeps its time,
// and releases that are owed are carried out.
func (s *Service) finishOrders(ctx context.Context, id string) error {
	if _, err := s.cancel.CancelDue(ctx, id); err != nil {
		return err
	}
	n, err := pending(ctx, s.st.SQL(), id)
	if err != nil {
		return err
	}
	if n > 0 {
		return wait("%d orders that can still be paid", n)
	}
	var owed []store.Compensation
	if err := s.st.DB(ctx).Where("activity_id = ? AND kind IN ?", id, []string{store.CompensateRelease, store.CompensateRefundDue}).
		Limit(512).Find(&owed).Error; err != nil {
		return fmt.Errorf("read compensations of activity %s: %w", id, err)
	}
	if len(owed) == 0 {
		return nil
	}
	if err := s.follow.CompensateEnded(ctx, owed); err != nil {
		return err
	}
	return wait("%d releases that were owed", len(owed))
}

// pending counts orders of a sale that can still be paid. Their ids begin with the sale's.
func pending(ctx context.Context, q store.Querier, id string) (n int, err error) {
	rows, err := q.QueryContext(ctx, "SELECT COUNT(*) FROM orders WHERE id > ? AND id < ? AND activity_id = ? AND status = 'pending'", id+"-", id+".", id)
	if err != nil {
		return 0, fmt.Errorf("count pending orders of activity %s: %w", id, err)
	}
	defer func() { _ = rows.Close() }()
	if rows.Next() {
		err = rows.Scan(&n)
	}
	if err = errors.Join(err, rows.Err()); err != nil {
		return 0, fmt.Errorf("count pending orders of activity %s: %w", id, err)
	}
	return n, nil
}

// settlePools is step 5, in one transaction: the pools' rows are locked, a last look is taken for
// payable orders (an order that comes later meets a settled pool), and what is left goes to the
// inventory through the ledger. A rehearsal's units belong to nobody.
func (s *Service) settlePools(ctx context.Context, id string, fence uint64) error {
	return s.st.InTx(ctx, func(tx *store.Tx) error {
		state, err := holds(ctx, tx, id, fence)
		if err != nil || state != store.ActivityEnded {
			return err
		}
		// Its records become receipts: they have to be there.
		if busy, err := store.Rebuilding(ctx, tx, id); err != nil || busy {
			return cmp.Or(err, wait("a rebuild that is under way"))
		}
		var shadow bool
		if err := tx.QueryRowContext(ctx, "SELECT shadow FROM activities WHERE id = ?", id).Scan(&shadow); err != nil {
			return fmt.Errorf("read activity %s: %w", id, err)
		}
		pools, err := poolsOf(tx, id)
		if err != nil {
			return err
		}
		locked, err := store.LockPools(ctx, tx, pools)
		if err != nil {
			return err
		}
		n, err := pending(ctx, tx, id)
		if err != nil {
			return err
		}
		if n > 0 {
			return wait("%d orders that came in late and can still be paid", n)
		}
		var entries []store.LedgerEntry
		for _, p := range pools {
			row := locked[p]
			if row == nil || row.SettledAt != nil {
				continue
			}
			// What a row claims beyond what was allocated is no goods: it stays where the report shows it.
			back := max(row.Sellable(), 0)
			if _, err := tx.ExecContext(ctx, "UPDATE activity_stock SET returned = returned + ?, available = available - ?, settled_at = UTC_TIMESTAMP(6), updated_at = UTC_TIMESTAMP(6) "+
				"WHERE activity_id = ? AND sku_id = ? AND pool = ? AND settled_at IS NULL", back, back, p.Activity, p.SKU, p.Pool); err != nil {
				return fmt.Errorf("settle pool %v: %w", p, err)
			}
			if back == 0 {
				continue
			}
			e := store.LedgerEntry{Ref: id + "/" + p.SKU + "/" + p.Pool, Op: store.OpSettle, Account: store.AccountSale, ActivityID: id, SKUID: p.SKU, Pool: p.Pool, Delta: -back}
			entries = append(entries, e)
			if shadow {
				continue
			}
			e.Account, e.Delta = store.AccountInventory, back
			entries = append(entries, e)
			if err := store.ReturnToInventory(ctx, tx, p.SKU, p.Pool, back); err != nil {
				return err
			}
		}
		if err := store.InsertLedger(ctx, tx, entries); err != nil {
			return err
		}
		if _, err := tx.ExecContext(ctx, "UPDATE activities SET state = ?, settled_at = UTC_TIMESTAMP(6), updated_at = UTC_TIMESTAMP(6) WHERE id = ?", store.ActivitySettled, id); err != nil {
			return fmt.Errorf("settle activity %s: %w", id, err)
		}
		return nil
	})
}

func poolsOf(tx *store.Tx, id string) ([]store.Pool, error) {
	var rows []store.ActivityStock
	if err := tx.DB().Where("activity_id = ?", id).Order("sku_id, pool").Find(&rows).Error; err != nil {
		return nil, fmt.Errorf("read pools of activity %s: %w", id, err)
	}
	out := make([]store.Pool, len(rows))
	for i, r := range rows {
		out[i] = store.Pool{Activity: id, SKU: r.SKUID, Pool: r.Pool}
	}
	return out, nil
}

// cleanUp is step 6. A record that is still live after its pool was settled missed what its row says:
// the row is followed, and an order without a row is published again, finds the settled pool and is
// rejected.
func (s *Service) cleanUp(ctx context.Context, a *stock.Activity, fence uint64) error {
	done, err := s.redis.Cleanup(ctx, a, fence, s.cfg.MarkerTTL)
	if errors.Is(err, stock.ErrNoMarker) {
		return errors.Join(s.redis.End(ctx, a, a.EndsAt), wait("the end marker, which was lost"))
	}
	if err != nil || len(done.Live) == 0 {
		return err
	}
	ids := make([]string, len(done.Live))
	for i, id := range done.Live {
		ids[i] = id.String()
	}
	rows, err := store.Orders(ctx, s.st.SQL(), ids, false)
	if err != nil {
		return err
	}
	var known []*store.Order
	var lost []order.Order
	for i, id := range ids {
		if o := rows[id]; o != nil {
			known = append(known, o)
			continue
		}
		rec, err := s.redis.Order(ctx, done.Live[i])
		if err != nil {
			return fmt.Errorf("read record of order %s: %w", id, err)
		}
		lost = append(lost, rec.Order)
	}
	if err := s.follow.Settled(ctx, known); err != nil {
		return err
	}
	for part := range slices.Chunk(lost, messaging.MaxOrdersPerMessage) {
		for _, err := range s.broker.Publish(ctx, messaging.ExchangeEvents, messaging.OrderReserved(part)) {
			if err != nil {
				return fmt.Errorf("publish orders without a row: %w", err)
			}
		}
	}
	return wait("%d records that had not followed their rows", len(ids))
}

// close is step 7. The marker gets its TTL first: a sale that is closed is never looked at again.
func (s *Service) close(ctx context.Context, a *stock.Activity, fence uint64) error {
	if err := s.redis.SettleMarker(ctx, a, fence, s.cfg.MarkerTTL); err != nil {
		return err
	}
	report, err := s.report(ctx, a.ID)
	if err != nil {
		return err
	}
	return s.st.InTx(ctx, func(tx *store.Tx) error {
		state, err := holds(ctx, tx, a.ID, fence)
		if err != nil || state == store.ActivityClosed {
			return err
		}
		if _, err := tx.ExecContext(ctx, "UPDATE activities SET state = ?, closed_at = UTC_TIMESTAMP(6), updated_at = UTC_TIMESTAMP(6), report = ? WHERE id = ?",
			store.ActivityClosed, report, a.ID); err != nil {
			return fmt.Errorf("close activity %s: %w", a.ID, err)
		}
		return nil
	})
}
