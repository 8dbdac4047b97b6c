package acceptance

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"seckill/pkg/order"
	"seckill/pkg/stock"
	"seckill/pkg/testkit"
)

// row is an order in MySQL.
type row struct {
	id, user, sku, pool, status, reason, origin string
	quantity                                    int
}

// picture is what both stores hold of a sale.
type picture struct {
	limit    int
	rows     []row
	records  map[string]stock.Record
	held     map[string]int // Redis
	holdings map[string]int // MySQL
	outbox   []string
}

func (s *stack) picture(activity string) picture {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	p := picture{records: map[string]stock.Record{}, held: map[string]int{}, holdings: map[string]int{}}
	p.limit = s.count("SELECT per_user_limit FROM activities WHERE id = ?", activity)
	rows, err := s.db.QueryContext(ctx, "SELECT id, user_id, sku_id, pool, status, reason, origin, quantity FROM orders WHERE activity_id = ?", activity)
	if err != nil {
		s.t.Fatal(err)
	}
	defer func() { _ = rows.Close() }()
	for rows.Next() {
		var r row
		if err := rows.Scan(&r.id, &r.user, &r.sku, &r.pool, &r.status, &r.reason, &r.origin, &r.quantity); err != nil {
			s.t.Fatal(err)
		}
		p.rows = append(p.rows, r)
	}
	if err := rows.Err(); err != nil {
		s.t.Fatal(err)
	}
	holdings, err := s.db.QueryContext(ctx, "SELECT user_id, held FROM user_holdings WHERE activity_id = ?", activity)
	if err != nil {
		s.t.Fatal(err)
	}
	defer func() { _ = holdings.Close() }()
	for holdings.Next() {
		var u string
		var n int
		if err := holdings.Scan(&u, &n); err != nil {
			s.t.Fatal(err)
		}
		p.holdings[u] = n
	}
	if err := holdings.Err(); err != nil {
		s.t.Fatal(err)
	}
	err = errors.Join(
		s.stock.EachRecord(ctx, activity, func(r stock.Record) error { p.records[r.ID.String()] = r; return nil }),
		s.stock.EachHolding(ctx, activity, func(h stock.Holding) error { p.held[h.User] += h.Units; return nil }),
	)
	if err != nil {
		s.t.Fatal(err)
	}
	buckets := s.count("SELECT buckets FROM activities WHERE id = ?", activity)
	for b := range buckets {
		waiting, parked, err := s.stock.OutboxIDs(ctx, activity, b)
		if err != nil {
			s.t.Fatal(err)
		}
		for _, id := range append(waiting, parked...) {
			p.outbox = append(p.outbox, id.String())
		}
	}
	return p
}

// quiet waits until nothing of a sale is on its way any more: queues empty, outbox empty, nothing
// owed, both stores agreeing. pending says whether orders may be left waiting for payment.
func (s *stack) quiet(activity string, pending bool) {
	s.t.Helper()
	testkit.Eventually(s.t, 2*within, func() error {
		if !pending {
			if n := s.count("SELECT COUNT(*) FROM orders WHERE activity_id = ? AND status = 'pending'", activity); n > 0 {
				return fmt.Errorf("%d orders are pending", n)
			}
		}
		if n := s.count("SELECT COUNT(*) FROM compensations WHERE activity_id = ?", activity); n > 0 {
			return fmt.Errorf("%d compensations are open", n)
		}
		if n := s.count("SELECT COUNT(*) FROM payments WHERE order_id LIKE ? AND status = 'kept'", activity+"-%"); n > 0 {
			return fmt.Errorf("%d payments are kept", n)
		}
		p := s.picture(activity)
		if len(p.outbox) > 0 {
			return fmt.Errorf("outbox holds %v", p.outbox)
		}
		for _, r := range p.rows {
			if rec, ok := p.records[r.id]; ok && string(rec.Status) != r.status {
				return fmt.Errorf("order %s is %s in MySQL and %s in Redis", r.id, r.status, rec.Status)
			}
		}
		for _, q := range []string{"seckill.orders", "seckill.payments", "seckill.rollbacks"} {
			if n := s.depth(q); n > 0 {
				return fmt.Errorf("%s holds %d", q, n)
			}
		}
		return nil
	})
}

// wrong tells the first few broken promises and counts them all.
type wrong struct {
	t testing.TB
	n int
}

func (w *wrong) add(format string, args ...any) {
	if w.n++; w.n <= 20 {
		w.t.Helper()
		w.t.Errorf(format, args...)
	}
}

// promises checks P1 to P4 of a quiet sale. accepted are the orders that buyers were told of.
func (s *stack) promises(activity string, accepted ...string) {
	s.t.Helper()
	p := s.picture(activity)
	w := &wrong{t: s.t}
	byID := map[string]row{}
	live := map[string]int{} // pool → units
	users := map[string]int{}
	records := map[string]int{}
	recordUsers := map[string]int{}
	for _, r := range p.rows {
		byID[r.id] = r
		st, err := order.ParseStatus(r.status)
		if err != nil {
			w.add("%v", err)
		}
		if st.Live() {
			live[r.sku+"/"+r.pool] += r.quantity
			users[r.user] += r.quantity
		}
		s.ledger(w, r)
		if rec, ok := p.records[r.id]; !ok && r.origin == "order" {
			w.add("order %s is %s in MySQL and unknown in Redis", r.id, r.status)
		} else if ok && (rec.Status != st || rec.User != r.user || rec.Pool != r.pool || rec.Quantity != r.quantity) {
			w.add("order %s: %+v in MySQL, %+v in Redis", r.id, r, rec)
		}
	}
	for id, rec := range p.records {
		if _, ok := byID[id]; !ok {
			w.add("order %s is %s in Redis and unknown in MySQL", id, rec.Status)
		}
		if rec.Status.Live() {
			records[rec.SKU+"/"+rec.Pool] += rec.Quantity
			recordUsers[rec.User] += rec.Quantity
		}
	}
	// P2: each one accepted has one row; each row belongs to somebody who was told.
	for _, id := range accepted {
		r, ok := byID[id]
		if !ok {
			w.add("order %s was accepted and has no row", id)
		}
		if r.status == "rejected" && r.reason == "" {
			w.add("order %s was rejected without a reason", id)
		}
	}
	for id := range byID {
		if !slices.Contains(accepted, id) {
			w.add("order %s exists and nobody was told of it", id)
		}
	}
	s.pools(w, activity, live, records)
	for _, side := range []struct {
		store        string
		sums, counts map[string]int
	}{{"MySQL", users, p.holdings}, {"Redis", recordUsers, p.held}} {
		for u, n := range side.sums {
			if n > p.limit {
				w.add("%s holds %d units in %s, the limit is %d", u, n, side.store, p.limit)
			}
			if side.counts[u] != n {
				w.add("%s holds %d units by his orders in %s and %d by the counter", u, n, side.store, side.counts[u])
			}
		}
		for u, n := range side.counts {
			if side.sums[u] != n {
				w.add("%s holds %d units by the counter in %s and %d by his orders", u, n, side.store, side.sums[u])
			}
		}
	}
	if w.n > 0 {
		s.t.Fatalf("%d promises broken in %s", w.n, activity)
	}
}

// ledger checks that the entries of an order explain its state, each once (P3).
func (s *stack) ledger(w *wrong, r row) {
	s.t.Helper()
	sold := s.count("SELECT COUNT(*) FROM stock_ledger WHERE ref = ? AND op = 'sell' AND account = 'sale'", r.id)
	back := s.count("SELECT COUNT(*) FROM stock_ledger WHERE ref = ? AND op IN ('cancel','refund') AND account = 'sale'", r.id)
	delta := s.count("SELECT SUM(delta) FROM stock_ledger WHERE ref = ? AND account = 'sale'", r.id)
	switch {
	case r.status == "pending" || r.status == "paid":
		if sold != 1 || back != 0 || delta != -r.quantity {
			w.add("order %s is %s, its ledger: sold %d times, returned %d times, %d units", r.id, r.status, sold, back, delta)
		}
	case sold != back || delta != 0:
		w.add("order %s is %s, its ledger: sold %d times, returned %d times, %d units", r.id, r.status, sold, back, delta)
	}
}

// pools checks P1 and P4: units are conserved in both stores.
func (s *stack) pools(w *wrong, activity string, live, records map[string]int) {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	a, err := s.stock.Activity(ctx, activity)
	if err != nil {
		s.t.Fatal(err)
	}
	levels, err := s.stock.Levels(ctx, &a)
	if err != nil {
		s.t.Fatal(err)
	}
	rows, err := s.db.QueryContext(ctx, "SELECT sku_id, pool, allocated, available, withheld, live, returned FROM activity_stock WHERE activity_id = ?", activity)
	if err != nil {
		s.t.Fatal(err)
	}
	defer func() { _ = rows.Close() }()
	for rows.Next() {
		var sku, pool string
		var allocated, available, withheld, counted, returned int
		if err := rows.Scan(&sku, &pool, &allocated, &available, &withheld, &counted, &returned); err != nil {
			s.t.Fatal(err)
		}
		k := sku + "/" + pool
		level, ok := levels[sku][pool]
		if !ok {
			w.add("%s has no level in Redis", k)
		}
		ledger := s.count("SELECT SUM(delta) FROM stock_ledger WHERE activity_id = ? AND sku_id = ? AND pool = ? AND account = 'sale'", activity, sku, pool)
		if live[k] > allocated || records[k] > allocated || available < 0 || level < 0 {
			w.add("%s oversold: %d allocated, %d live in MySQL, %d in Redis, %d available, %d on sale", k, allocated, live[k], records[k], available, level)
		}
		if counted != live[k] || allocated != available+withheld+live[k]+returned || ledger != available {
			w.add("%s in MySQL: %d allocated, %d available, %d withheld, %d live (%d counted), %d returned, ledger %d", k, allocated, available, withheld, live[k], counted, returned, ledger)
		}
		if level != available || records[k] != live[k] {
			w.add("%s: %d available and %d live in MySQL, %d on sale and %d live in Redis", k, available, live[k], level, records[k])
		}
	}
	if err := rows.Err(); err != nil {
		s.t.Fatal(err)
	}
}

// settled is quiet and then promises.
func (s *stack) settled(activity string, pending bool, accepted ...string) {
	s.t.Helper()
	s.quiet(activity, pending)
	s.promises(activity, accepted...)
	if n := s.count("SELECT COUNT(*) FROM dead_letters WHERE activity_id = ?", activity); n > 0 && !strings.Contains(s.t.Name(), "DeadLetter") {
		s.t.Errorf("%d dead letters", n)
	}
}
