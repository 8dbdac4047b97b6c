// Package levels shows as metrics what MySQL holds of live sales, and what waits to be done: units by
// sale, pool and state, orders that should have been taken back, compensations, ends that are not
// through, and waits for row locks.
//
// It reads; nothing depends on it. Every scheduler shows the same figures: take the maximum over the
// replicas, not the sum.
package levels

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"seckill/services/order-worker/internal/store"
)

const (
	// interval between two looks; the queries cost a few milliseconds.
	interval = 5 * time.Second
	// patience bounds one look.
	patience = 10 * time.Second
	// maxSales bounds the series: only so many live sales, those that end last, are shown pool by pool.
	maxSales = 50
)

// States of units.
const (
	unitsAvailable = "available" // can be reserved
	unitsLive      = "live"      // in pending and paid orders
	unitsWithheld  = "withheld"  // not sold again (R7)
	unitsReturned  = "returned"  // gone to the inventory
)

// Levels is safe for concurrent use.
type Levels struct {
	st  *store.Store
	log *slog.Logger

	units, backlog, oldest, owed, owedAge, unsettled, waiting, waits, waited *prometheus.Desc

	mu  sync.Mutex
	now []prometheus.Metric
}

// New makes Levels; it does no I/O.
func New(st *store.Store, log *slog.Logger, reg prometheus.Registerer) (*Levels, error) {
	desc := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc(name, help, labels, nil)
	}
	l := &Levels{
		st: st, log: log,
		units:     desc("seckill_units", "Units of sales that are not closed yet, by state.", "activity", "pool", "state"),
		backlog:   desc("seckill_rollback_backlog_orders", "Unpaid orders whose payment time is over and that have not been taken back."),
		oldest:    desc("seckill_rollback_backlog_oldest_seconds", "How long the payment time of the oldest of them has been over."),
		owed:      desc("seckill_compensations", "Work that committed transactions still owe, by kind.", "kind"),
		owedAge:   desc("seckill_compensations_oldest_seconds", "Age of the oldest of it."),
		unsettled: desc("seckill_settlement_oldest_seconds", "Time since the end of the sale that has waited longest to be closed."),
		waiting:   desc("seckill_row_lock_waiting", "Transactions of the database server that wait for a row lock now."),
		waits:     desc("seckill_row_lock_waits_total", "Waits for row locks since the database server's start."),
		waited:    desc("seckill_row_lock_seconds_total", "Time spent in them."),
	}
	if err := reg.Register(l); err != nil {
		return nil, fmt.Errorf("register metrics: %w", err)
	}
	return l, nil
}

// Describe implements prometheus.Collector.
func (l *Levels) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{l.units, l.backlog, l.oldest, l.owed, l.owedAge, l.unsettled, l.waiting, l.waits, l.waited} {
		ch <- d
	}
}

// Collect implements prometheus.Collector with what was seen last: a scrape waits for no database, and a
// sale that is closed has no series any more.
func (l *Levels) Collect(ch chan<- prometheus.Metric) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, m := range l.now {
		ch <- m
	}
}

// Run looks again and again until ctx ends.
func (l *Levels) Run(ctx context.Context) {
	tick := time.NewTicker(interval)
	defer tick.Stop()
	for {
		look, cancel := context.WithTimeout(ctx, patience)
		if err := l.Look(look); err != nil && ctx.Err() == nil {
			l.log.WarnContext(ctx, "levels could not be read", "error", err)
		}
		cancel()
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// Look reads the figures once. When it fails those of before are dropped: old figures would look like
// good ones.
func (l *Levels) Look(ctx context.Context) error {
	var out []prometheus.Metric
	var errs []error
	for _, look := range []func(context.Context) ([]prometheus.Metric, error){l.pools, l.late, l.compensations, l.ends, l.locks} {
		ms, err := look(ctx)
		out, errs = append(out, ms...), append(errs, err)
	}
	l.mu.Lock()
	l.now = out
	l.mu.Unlock()
	return errors.Join(errs...)
}

func gauge(d *prometheus.Desc, v float64, labels ...string) prometheus.Metric {
	return prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
}

func (l *Levels) pools(ctx context.Context) ([]prometheus.Metric, error) {
	var rows []struct {
		ActivityID, Pool                    string
		Available, Live, Withheld, Returned float64
	}
	err := l.st.DB(ctx).Raw("SELECT p.activity_id, p.pool, SUM(p.available) AS available, SUM(p.live) AS live, SUM(p.withheld) AS withheld, SUM(p.returned) AS returned "+
		"FROM (SELECT id FROM activities WHERE state IN ('warmed','ended','settled') ORDER BY ends_at DESC, id LIMIT ?) a "+
		"JOIN activity_stock p ON p.activity_id = a.id GROUP BY p.activity_id, p.pool", maxSales).Scan(&rows).Error
	if err != nil {
		return nil, fmt.Errorf("read units: %w", err)
	}
	var out []prometheus.Metric
	for _, r := range rows {
		for state, n := range map[string]float64{unitsAvailable: r.Available, unitsLive: r.Live, unitsWithheld: r.Withheld, unitsReturned: r.Returned} {
			out = append(out, gauge(l.units, n, r.ActivityID, r.Pool, state))
		}
	}
	return out, nil
}

// late counts by the index that the sweep uses; what is over is a short stretch of it.
func (l *Levels) late(ctx context.Context) ([]prometheus.Metric, error) {
	var row struct{ N, Oldest float64 }
	err := l.st.DB(ctx).Raw("SELECT COUNT(*) AS n, COALESCE(TIMESTAMPDIFF(MICROSECOND, MIN(pay_before), UTC_TIMESTAMP(6)), 0) / 1000000 AS oldest " +
		"FROM orders WHERE status = 'pending' AND pay_before <= UTC_TIMESTAMP(6)").Scan(&row).Error
	if err != nil {
		return nil, fmt.Errorf("count late orders: %w", err)
	}
	return []prometheus.Metric{gauge(l.backlog, row.N), gauge(l.oldest, row.Oldest)}, nil
}

func (l *Levels) compensations(ctx context.Context) ([]prometheus.Metric, error) {
	var rows []struct {
		Kind      string
		N, Oldest float64
	}
	err := l.st.DB(ctx).Raw("SELECT kind, COUNT(*) AS n, TIMESTAMPDIFF(MICROSECOND, MIN(created_at), UTC_TIMESTAMP(6)) / 1000000 AS oldest FROM compensations GROUP BY kind").Scan(&rows).Error
	if err != nil {
		return nil, fmt.Errorf("count compensations: %w", err)
	}
	n, oldest := map[string]float64{}, 0.0
	for _, r := range rows {
		n[r.Kind] = r.N
		oldest = max(oldest, r.Oldest)
	}
	out := []prometheus.Metric{gauge(l.owedAge, oldest)}
	for _, kind := range []string{store.CompensateRelease, store.CompensateRefundDue, store.CompensateStockAdd, store.CompensateReconcile} {
		out = append(out, gauge(l.owed, n[kind], kind))
	}
	return out, nil
}

func (l *Levels) ends(ctx context.Context) ([]prometheus.Metric, error) {
	var oldest float64
	err := l.st.SQL().QueryRowContext(ctx, "SELECT COALESCE(TIMESTAMPDIFF(MICROSECOND, MIN(ended_at), UTC_TIMESTAMP(6)), 0) / 1000000 "+
		"FROM activities WHERE state IN ('ended','settled')").Scan(&oldest)
	if err != nil {
		return nil, fmt.Errorf("look for ends that wait: %w", err)
	}
	return []prometheus.Metric{gauge(l.unsettled, oldest)}, nil
}

func (l *Levels) locks(ctx context.Context) ([]prometheus.Metric, error) {
	rows, err := l.st.SQL().QueryContext(ctx, "SHOW GLOBAL STATUS LIKE 'Innodb_row_lock%'")
	if err != nil {
		return nil, fmt.Errorf("read row locks: %w", err)
	}
	defer func() { _ = rows.Close() }()
	status := map[string]float64{}
	for rows.Next() {
		var name string
		var value float64
		if err := rows.Scan(&name, &value); err != nil {
			return nil, fmt.Errorf("read row locks: %w", err)
		}
		status[strings.ToLower(name)] = value
	}
	if err := rows.Err(); err != nil {
		return nil, fmt.Errorf("read row locks: %w", err)
	}
	return []prometheus.Metric{
		gauge(l.waiting, status["innodb_row_lock_current_waits"]),
		prometheus.MustNewConstMetric(l.waits, prometheus.CounterValue, status["innodb_row_lock_waits"]),
		prometheus.MustNewConstMetric(l.waited, prometheus.CounterValue, status["innodb_row_lock_time"]/1000),
	}, nil
}
