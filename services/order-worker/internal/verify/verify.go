// Package verify checks what must hold after the end of a sale (design §6), each line with the value
// that was measured.
package verify

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net/http"
	"runtime"
	"strconv"
	"strings"
	"time"

	"seckill/pkg/adminapi"
	"seckill/pkg/stock"
	"seckill/services/order-worker/internal/activity"
	"seckill/services/order-worker/internal/admin"
	"seckill/services/order-worker/internal/store"
)

// Limits of the checklist.
const (
	maxPoolUse   = 0.30
	maxScript    = 10 * time.Millisecond
	maxStatement = 2 * time.Second
	// What may come on top of the level at the start: connections' goroutines that come and go, and
	// memory that belongs to other sales.
	goroutineSlack = 64
)

// reporter tells what became of a sale.
type reporter interface {
	Report(ctx context.Context, id string) (adminapi.Report, error)
}

// Verifier is safe for concurrent use.
type Verifier struct {
	st         *store.Store
	redis      *stock.Client
	sales      *activity.Service
	reports    reporter
	goroutines int // when the process was put together
}

// New makes a Verifier.
func New(st *store.Store, redis *stock.Client, sales *activity.Service, r reporter) *Verifier {
	return &Verifier{st: st, redis: redis, sales: sales, reports: r, goroutines: runtime.NumGoroutine()}
}

// Routes are the admin API's calls of this package.
func (v *Verifier) Routes() []admin.Route {
	return []admin.Route{{
		Method: http.MethodGet, Path: "/admin/v1/activities/{id}/verify", Role: admin.Viewer, Timeout: 2 * time.Minute,
		Handler: func(w http.ResponseWriter, r *http.Request) error {
			res, err := v.Verify(r.Context(), r.PathValue("id"))
			if err != nil {
				return err
			}
			return admin.WriteJSON(w, http.StatusOK, res)
		},
	}}
}

type list struct{ lines []adminapi.VerifyLine }

func (l *list) add(check string, ok bool, measured, limit string) {
	l.lines = append(l.lines, adminapi.VerifyLine{Check: check, OK: ok, Measured: measured, Limit: limit})
}

func (l *list) count(check string, n int64) {
	l.add(check, n == 0, strconv.FormatInt(n, 10), "0")
}

// Verify goes through the checklist. An error means that it could not be gone through; a check that
// fails is a line of the result.
func (v *Verifier) Verify(ctx context.Context, id string) (adminapi.VerifyResult, error) {
	res := adminapi.VerifyResult{ActivityID: id}
	d, err := v.sales.Load(ctx, id)
	if err != nil {
		return res, err
	}
	a, err := v.sales.Outline(ctx, d)
	if err != nil {
		return res, err
	}
	if res.At, err = v.st.Now(ctx); err != nil {
		return res, err
	}
	l := &list{}
	l.add("sale is closed", d.State == store.ActivityClosed, d.State, store.ActivityClosed)
	for _, check := range []func(context.Context, *list, *activity.Details, *stock.Activity) error{
		v.inRedis, v.units, v.open, v.locks, v.process,
	} {
		if err := check(ctx, l, d, a); err != nil {
			return res, fmt.Errorf("verify activity %s: %w", id, err)
		}
	}
	res.Lines, res.OK = l.lines, true
	for _, line := range l.lines {
		res.OK = res.OK && line.OK
	}
	return res, nil
}

func (v *Verifier) inRedis(ctx context.Context, l *list, d *activity.Details, a *stock.Activity) error {
	left, err := v.redis.KeysLeft(ctx, a)
	if err != nil {
		return err
	}
	for _, kind := range []string{"order", "user:limit", "user:qualify", "idem", "outbox", "parked", "stock"} {
		l.count(kind+" keys left in redis", int64(left[kind]))
	}
	locked, err := v.redis.Locked(ctx, "settle:"+d.ID)
	if err != nil {
		return err
	}
	l.add("settlement lock given back", !locked, map[bool]string{true: "held", false: "free"}[locked], "free")
	marks, err := v.redis.Markers(ctx, a)
	if err != nil {
		return err
	}
	// From the end on, 24 h at least: what is left of that now.
	want := time.Duration(0)
	if d.ClosedAt != nil {
		now, err := v.st.Now(ctx)
		if err != nil {
			return err
		}
		want = max(0, stock.MarkerTTL-now.Sub(*d.ClosedAt)-time.Minute)
	}
	ok, least := true, time.Duration(1<<62)
	for _, m := range marks {
		ok = ok && (m.Settled && m.TTL >= want || want == 0 && !m.Ended)
		least = min(least, m.TTL)
	}
	l.add("end markers settled, with their TTL", ok, fmt.Sprintf("%d markers, shortest %s", len(marks), least.Round(time.Second)), "at least "+want.Round(time.Second).String())
	slow, err := v.redis.SlowScripts(ctx, d.ID, maxScript)
	if err != nil {
		return err
	}
	longest := time.Duration(0)
	for _, s := range slow {
		longest = max(longest, s.Took)
	}
	measured := fmt.Sprintf("%d, longest %s", len(slow), longest)
	if len(slow) > 0 {
		measured += "; Redis' clock also counts the time it waited for a processor"
	}
	l.add("scripts over 10 ms in the slow log", len(slow) == 0, measured, "0")
	use := v.redis.PoolUse()
	l.add("redis pool in use", use < maxPoolUse, fmt.Sprintf("%.0f %%", 100*use), "under 30 %")
	return nil
}

func (v *Verifier) units(ctx context.Context, l *list, d *activity.Details, _ *stock.Activity) error {
	r, err := v.reports.Report(ctx, d.ID)
	if err != nil {
		return err
	}
	l.add("units are conserved and the ledger explains them", r.AddsUp, fmt.Sprintf("allocated %d = available %d + withheld %d + pending %d + sold %d + returned %d",
		r.Total.Allocated, r.Total.Available, r.Total.Withheld, r.Total.Pending.Units, r.Total.Sold.Units, r.Total.Returned), strings.Join(append(r.Problems, "exact"), "; "))
	var held sql.NullInt64
	if err := v.st.SQL().QueryRowContext(ctx, "SELECT SUM(held) FROM user_holdings WHERE activity_id = ?", d.ID).Scan(&held); err != nil {
		return fmt.Errorf("sum holdings: %w", err)
	}
	live := int64(0)
	for _, p := range d.Pools {
		live += p.Live
	}
	l.add("holdings of users equal the live units", held.Int64 == live, strconv.FormatInt(held.Int64, 10), strconv.FormatInt(live, 10))
	return nil
}

func (v *Verifier) open(ctx context.Context, l *list, d *activity.Details, _ *stock.Activity) error {
	for _, q := range []struct{ check, query string }{
		{"compensations waiting", "SELECT COUNT(*) FROM compensations WHERE activity_id = ?"},
		{"dead letters open", "SELECT COUNT(*) FROM dead_letters WHERE activity_id = ? AND state IN ('open','claimed','sent')"},
		{"orders without a final state", "SELECT COUNT(*) FROM orders WHERE activity_id = ? AND status = 'pending'"},
		{"pools not settled", "SELECT COUNT(*) FROM activity_stock WHERE activity_id = ? AND settled_at IS NULL"},
	} {
		var n int64
		if err := v.st.SQL().QueryRowContext(ctx, q.query, d.ID).Scan(&n); err != nil {
			return fmt.Errorf("count %s: %w", q.check, err)
		}
		l.count(q.check, n)
	}
	var kept int64
	if err := v.st.SQL().QueryRowContext(ctx, "SELECT COUNT(*) FROM payments WHERE "+store.PaymentsOf+" AND status = ?",
		append(store.PaymentsOfArgs(d.ID), store.PaymentKept)...).Scan(&kept); err != nil {
		return fmt.Errorf("count kept payments: %w", err)
	}
	l.count("payments kept for orders that have not come", kept)
	return nil
}

// locks looks at the database as a whole: whatever waits or runs there now may be the sale's.
func (v *Verifier) locks(ctx context.Context, l *list, _ *activity.Details, _ *stock.Activity) error {
	rows, err := v.st.SQL().QueryContext(ctx, "SHOW GLOBAL STATUS LIKE 'Innodb_row_lock%'")
	if err != nil {
		return fmt.Errorf("read row locks: %w", err)
	}
	defer func() { _ = rows.Close() }()
	status := map[string]string{}
	for rows.Next() {
		var name, value string
		if err := rows.Scan(&name, &value); err != nil {
			return fmt.Errorf("read row locks: %w", err)
		}
		status[strings.ToLower(name)] = value
	}
	if err := rows.Err(); err != nil {
		return fmt.Errorf("read row locks: %w", err)
	}
	now := status["innodb_row_lock_current_waits"]
	l.add("row-lock waits", now == "0", fmt.Sprintf("%s now; %s since the server's start, longest %s ms", now, status["innodb_row_lock_waits"], status["innodb_row_lock_time_max"]), "0 now")
	var longest sql.NullFloat64
	err = v.st.SQL().QueryRowContext(ctx, "SELECT MAX(time) FROM information_schema.processlist WHERE command = 'Query' AND db = DATABASE() AND id <> CONNECTION_ID()").Scan(&longest)
	if err != nil {
		return fmt.Errorf("read running statements: %w", err)
	}
	took := time.Duration(longest.Float64 * float64(time.Second))
	l.add("longest running statement", took < maxStatement, took.String(), "under "+maxStatement.String())
	s := v.st.SQL().Stats()
	use := 0.0
	if s.MaxOpenConnections > 0 {
		use = float64(s.InUse) / float64(s.MaxOpenConnections)
	}
	l.add("mysql pool in use", use < maxPoolUse, fmt.Sprintf("%d of %d", s.InUse, s.MaxOpenConnections), "under 30 %")
	return nil
}

func (v *Verifier) process(ctx context.Context, l *list, _ *activity.Details, _ *stock.Activity) error {
	n := runtime.NumGoroutine()
	// Each connection to the database has a goroutine of its own and may have one at work; the pool keeps
	// them for a while after the crowd has gone.
	conns := 2 * v.st.SQL().Stats().OpenConnections
	l.add("goroutines of this worker", n <= v.goroutines+conns+goroutineSlack, strconv.Itoa(n),
		fmt.Sprintf("at most %d above the %d at its start and %d of its connections", goroutineSlack, v.goroutines, conns))
	used, err := v.redis.MemoryUsed(ctx)
	if err != nil && !errors.Is(err, stock.ErrUnavailable) {
		return err
	}
	l.add("redis memory", err == nil, fmt.Sprintf("%.1f MiB", float64(used)/(1<<20)), "shown; the sale's share is its keys above")
	return err
}
