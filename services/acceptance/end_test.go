package acceptance

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"seckill/pkg/adminapi"
	"seckill/pkg/sale"
	"seckill/pkg/stock"
	"seckill/pkg/testkit"
)

// fastEnds lets an end come back soon after it had to wait, and after its worker died.
func fastEnds(more map[string]string) map[string]string {
	env := map[string]string{
		"SECKILL_SETTLEMENT_INTERVAL": "200ms", "SECKILL_SETTLEMENT_AGAIN": "1s", "SECKILL_SETTLEMENT_STALE": "2s", "SECKILL_SETTLEMENT_LOCK_TTL": "2s",
	}
	maps.Copy(env, more)
	return env
}

// spare is what stays in each warehouse beside a sale.
const spare = 3

// open is sell for a sale with several pools, changed by change. Each sale of a test has units of its
// own in the inventory, and spare ones that it must not touch.
func (s *stack) open(units map[string]int, timeout time.Duration, change func(*sale.Sale)) string {
	s.t.Helper()
	s.client.CloseIdleConnections()
	n := s.names.Add(1)
	plan := sale.Sale{
		ID: fmt.Sprintf("sale-%d", n), Name: fmt.Sprintf("Acceptance %d", n), StartsAt: time.Now().Add(-time.Second).UTC().Format(time.RFC3339Nano),
		EndsAt: time.Now().Add(2 * time.Hour).UTC().Format(time.RFC3339Nano), PerUserLimit: 1, PaymentTimeout: timeout.String(),
		Currency: "EUR", Qualification: sale.QualificationNone, Buckets: 1, RefundAfterEnd: sale.RefundNational,
		Items: []sale.Item{{SKU: "sku", PriceMinor: price, Pools: units}},
	}
	if change != nil {
		change(&plan)
	}
	s.counting.Lock()
	defer s.counting.Unlock()
	for _, it := range plan.Items {
		for pool, n := range it.Pools {
			have := s.count("SELECT SUM(on_hand) FROM inventory WHERE sku_id = ? AND pool = ?", it.SKU, pool)
			s.mustAdmin(http.MethodPut, "/admin/v1/inventory", map[string]any{"sku_id": it.SKU, "pool": pool, "on_hand": max(have, spare) + n}, nil)
		}
	}
	s.mustAdmin(http.MethodPost, "/admin/v1/activities", plan, nil)
	s.mustAdmin(http.MethodPost, "/admin/v1/activities/"+plan.ID+"/warm", nil, nil)
	return plan.ID
}

// buyIn buys one unit in a region.
func (s *stack) buyIn(replica int, activity, user, region string) reply {
	return s.call(http.MethodPost, s.api(replica)+"/v1/activities/"+activity+"/orders", user, map[string]string{"Idempotency-Key": "k"},
		fmt.Sprintf(`{"sku_id":"sku","quantity":1,"region":%q}`, region))
}

// stateOf reads the state of a sale.
func (s *stack) stateOf(activity string) string {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	var st string
	if err := s.db.QueryRowContext(ctx, "SELECT state FROM activities WHERE id = ?", activity).Scan(&st); err != nil {
		s.t.Fatal(err)
	}
	return st
}

// reaches waits until a sale has a state.
func (s *stack) reaches(activity, want string) {
	s.t.Helper()
	testkit.Eventually(s.t, 2*within, func() error {
		if got := s.stateOf(activity); got != want {
			return fmt.Errorf("activity %s is %s, not %s", activity, got, want)
		}
		return nil
	})
}

// endNow ends a sale as an operator does.
func (s *stack) endNow(activity string) {
	s.t.Helper()
	if out, errOut, code := s.ctl("activity", "end", activity, "--reason", "over", "--yes"); code != 0 {
		s.t.Fatalf("activity end: code %d: %s%s", code, out, errOut)
	}
}

// over waits until a sale is closed and checks everything that must hold then (design §6). accepted are
// the orders that buyers were told of.
func (s *stack) over(activity string, accepted ...string) adminapi.Report {
	s.t.Helper()
	return s.closed(activity, true, accepted)
}

// closed is over for a sale of which Redis remembers what it should, or nothing.
func (s *stack) closed(activity string, remembers bool, accepted []string) adminapi.Report {
	s.t.Helper()
	s.reaches(activity, adminapi.ActivityClosed)
	// Given back by its holder, or run out with a holder that was killed.
	testkit.Eventually(s.t, within, func() error {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		if n, err := s.rdb.Exists(ctx, s.prefix+"seckill:lock:settle:"+activity).Result(); err != nil || n > 0 {
			return fmt.Errorf("the settlement lock is still held (%w)", err)
		}
		return nil
	})
	w := &wrong{t: s.t}
	p := s.picture(activity)
	byID := map[string]row{}
	live := map[string]int{}
	users := map[string]int{}
	for _, r := range p.rows {
		byID[r.id] = r
		if !slices.Contains(accepted, r.id) {
			w.add("order %s exists and nobody was told of it", r.id)
		}
		switch r.status {
		case "paid":
			live[r.sku+"/"+r.pool] += r.quantity
			users[r.user] += r.quantity
		case "cancelled", "refunded", "rejected":
		default:
			w.add("order %s is %s after the end", r.id, r.status)
		}
		// A refund after the settlement went on to a warehouse in the same transaction.
		if onward := s.count("SELECT COUNT(*) FROM stock_ledger WHERE ref = ? AND op = 'settle'", r.id); onward == 0 {
			s.ledger(w, r)
		} else if back := s.count("SELECT COUNT(*) FROM stock_ledger WHERE ref = ? AND op = 'refund'", r.id); r.status != "refunded" || onward != 2 || back != 1 {
			w.add("order %s is %s, its ledger: refunded %d times, moved on %d times", r.id, r.status, back, onward)
		}
	}
	for _, id := range accepted {
		if r, ok := byID[id]; !ok || r.status == "rejected" && r.reason == "" {
			w.add("order %s was accepted and is %q (%s)", id, r.status, r.reason)
		}
	}
	for u, n := range p.holdings {
		if users[u] != n {
			w.add("%s holds %d units by the counter and %d by his orders", u, n, users[u])
		}
	}
	s.returned(w, activity, live)
	for what, query := range map[string]string{
		"compensations": "SELECT COUNT(*) FROM compensations WHERE activity_id = ?",
		"dead letters":  "SELECT COUNT(*) FROM dead_letters WHERE activity_id = ?",
		"kept payments": "SELECT COUNT(*) FROM payments WHERE status = 'kept' AND order_id LIKE CONCAT(?, '-%')",
	} {
		if n := s.count(query, activity); n > 0 {
			w.add("%d %s are left", n, what)
		}
	}
	rep := s.finalReport(w, activity)
	if remembers {
		s.swept(w, activity, p.rows)
		s.remembered(w, activity, p.rows)
	} else {
		s.swept(w, activity, nil)
	}
	if w.n > 0 {
		s.t.Fatalf("%d things are wrong after the end of %s", w.n, activity)
	}
	s.verified(activity)
	return rep
}

// verified runs `seckillctl verify`. What other tests do to the same database at this moment is theirs:
// their waits pass. The slow log never forgets, and its clock goes on while a machine with few cores lets
// Redis wait in the middle of a script: that line is a measurement, and is shown. That it fails where a
// script is slow, the verifier's own test shows.
func (s *stack) verified(activity string) {
	s.t.Helper()
	testkit.Eventually(s.t, within, func() error {
		out, errOut, code := s.ctl("verify", activity, "-o", "json")
		var r adminapi.VerifyResult
		if err := json.Unmarshal([]byte(out), &r); err != nil {
			return fmt.Errorf("verify: code %d, %w: %s%s", code, err, out, errOut)
		}
		if r.OK != (code == 0) || code != 0 && code != 5 {
			return fmt.Errorf("verify: code %d, ok %v", code, r.OK)
		}
		for _, l := range r.Lines {
			switch {
			case l.OK:
			case l.Check == "scripts over 10 ms in the slow log":
				s.t.Logf("%s: %s", l.Check, l.Measured)
			default:
				return fmt.Errorf("verify: code %d: %+v", code, l)
			}
		}
		return nil
	})
}

// returned checks that what nobody bought went to the inventory, exactly once.
func (s *stack) returned(w *wrong, activity string, live map[string]int) {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	rows, err := s.db.QueryContext(ctx, "SELECT sku_id, pool, allocated, available, withheld, live, returned, settled_at IS NOT NULL FROM activity_stock WHERE activity_id = ?", activity)
	if err != nil {
		s.t.Fatal(err)
	}
	defer func() { _ = rows.Close() }()
	for rows.Next() {
		var sku, pool string
		var allocated, available, withheld, counted, returned int
		var settled bool
		if err := rows.Scan(&sku, &pool, &allocated, &available, &withheld, &counted, &returned, &settled); err != nil {
			s.t.Fatal(err)
		}
		k := sku + "/" + pool
		if !settled || available != 0 || withheld != 0 || counted != live[k] || allocated != returned+live[k] {
			w.add("%s: settled %v, %d allocated, %d available, %d withheld, %d sold (%d counted), %d returned", k, settled, allocated, available, withheld, live[k], counted, returned)
		}
		if n := s.count("SELECT SUM(delta) FROM stock_ledger WHERE activity_id = ? AND sku_id = ? AND pool = ? AND account = 'sale'", activity, sku, pool); n != 0 {
			w.add("%s: the ledger explains %d available units", k, n)
		}
		ref := activity + "/" + sku + "/" + pool
		if n := s.count("SELECT COUNT(*) FROM stock_ledger WHERE ref = ? AND op = 'settle' AND account = 'inventory'", ref); n > 1 {
			w.add("%s was settled %d times", k, n)
		}
	}
	if err := rows.Err(); err != nil {
		s.t.Fatal(err)
	}
	// All that left the inventory for the sale and was not sold is back, in one warehouse or another.
	sold := 0
	for _, n := range live {
		sold += n
	}
	if n := s.count("SELECT SUM(delta) FROM stock_ledger WHERE activity_id = ? AND account = 'inventory'", activity); n != -sold {
		w.add("the inventory lost %d units to the sale, %d are sold", -n, sold)
	}
	if n := s.count("SELECT COUNT(*) FROM inventory i WHERE on_hand <> (SELECT SUM(delta) FROM stock_ledger l WHERE l.account = 'inventory' AND l.sku_id = i.sku_id AND l.pool = i.pool)"); n > 0 {
		w.add("the ledger does not explain %d rows of the inventory", n)
	}
}

// keys lists what Redis has of a sale.
func (s *stack) keys(activity string) []string {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	seen := map[string]bool{}
	it := s.rdb.Scan(ctx, 0, s.prefix+"*{"+activity+":*", 1000).Iterator()
	for it.Next(ctx) {
		seen[strings.TrimPrefix(it.Val(), s.prefix)] = true
	}
	if err := it.Err(); err != nil {
		s.t.Fatal(err)
	}
	return slices.Sorted(maps.Keys(seen))
}

// swept checks that nothing is left in Redis but the markers with their hashes, and the receipts, each
// for 24 h at least (P6).
func (s *stack) swept(w *wrong, activity string, rows []row) {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	wanted, allowed := map[string]bool{}, map[string]bool{}
	for _, r := range rows {
		switch {
		case r.status == "paid" || s.due(r.id) && !s.dueSinceSettled(activity, r.id):
			wanted[r.id] = true
		case s.due(r.id):
			allowed[r.id] = true
		}
	}
	marks := 0
	for _, k := range s.keys(activity) {
		switch {
		case strings.HasPrefix(k, "seckill:receipt:"):
			id := k[strings.LastIndexByte(k, ':')+1:]
			if !wanted[id] && !allowed[id] {
				w.add("a receipt of order %s is left", id)
			}
			delete(wanted, id)
		case strings.HasSuffix(k, ":end"):
			marks++
			if v, err := s.rdb.Get(ctx, s.prefix+k).Result(); err != nil || v != "settled" {
				w.add("the marker says %q (%v)", v, err)
			}
		case strings.HasPrefix(k, "seckill:activity:"):
		default:
			w.add("%s is left", k)
		}
		if ttl := s.rdb.TTL(ctx, s.prefix+k).Val(); ttl < stock.MarkerTTL {
			w.add("%s lives for %s", k, ttl)
		}
	}
	if buckets := s.count("SELECT buckets FROM activities WHERE id = ?", activity); marks != buckets || len(wanted) > 0 {
		w.add("%d markers for %d buckets, no receipts of the orders %v", marks, buckets, slices.Collect(maps.Keys(wanted)))
	}
}

// due says whether money of an order has to go back.
func (s *stack) due(id string) bool {
	s.t.Helper()
	return s.count("SELECT COUNT(*) FROM payments WHERE order_id = ? AND status = 'refund_due'", id) > 0
}

// dueSinceSettled says whether that was found out only after the sale was settled: by a payment whose
// message came later than that, or by a refund. Of an order that was cancelled nothing may be left in
// Redis by then which could tell its buyer.
func (s *stack) dueSinceSettled(activity, id string) bool {
	s.t.Helper()
	return s.count("SELECT COUNT(*) FROM payments p JOIN activities a ON a.id = ? WHERE p.order_id = ? AND p.status = 'refund_due' AND p.updated_at >= a.settled_at", activity, id) > 0
}

// finalReport checks the report against the rows.
func (s *stack) finalReport(w *wrong, activity string) adminapi.Report {
	s.t.Helper()
	out, errOut, code := s.ctl("activity", "report", activity, "-o", "json")
	var r adminapi.Report
	if err := json.Unmarshal([]byte(out), &r); err != nil {
		s.t.Fatalf("report: code %d, %v: %s%s", code, err, out, errOut)
	}
	if code != 0 || !r.Final || !r.AddsUp || len(r.Problems) > 0 {
		w.add("report: code %d, final %v, adds up %v: %v", code, r.Final, r.AddsUp, r.Problems)
	}
	tally := func(where string) int {
		return s.count("SELECT COUNT(*) FROM orders WHERE activity_id = ? AND sku_id <> '' AND "+where, activity)
	}
	late := 0
	for _, l := range r.RefundedSince {
		late += l.Orders
	}
	for _, c := range []struct {
		what string
		got  int
		want int
	}{
		{"sold", r.Total.Sold.Orders - late, tally("status = 'paid'")},
		{"refunded", r.Total.Refunded.Orders + late, tally("status = 'refunded'")},
		{"cancelled", r.Total.Cancelled.Orders, tally("status = 'cancelled' AND reason <> 'payment_timeout'")},
		{"expired", r.Total.Expired.Orders, tally("status = 'cancelled' AND reason = 'payment_timeout'")},
		{"rejected", r.Total.Rejected.Orders, tally("status = 'rejected'")},
		{"pending", r.Total.Pending.Orders, 0},
		{"available", int(r.Total.Available), 0},
		{"returned", int(r.Total.Returned), s.count("SELECT SUM(returned) FROM activity_stock WHERE activity_id = ?", activity) - late},
	} {
		if c.got != c.want {
			w.add("the report says %d %s, the rows %d", c.got, c.what, c.want)
		}
	}
	return r
}

// remembered checks what buyers are told afterwards: paid and refund-due orders from their receipts,
// all others are archived.
func (s *stack) remembered(w *wrong, activity string, rows []row) {
	s.t.Helper()
	for i, r := range rows {
		if i%(1+len(rows)/50) > 0 {
			continue // of a crowd, some
		}
		got, due := s.look(r.id, r.user), s.due(r.id)
		switch {
		case due && got.Code == "order_archived" && s.dueSinceSettled(activity, r.id):
		case r.status == "paid" || due:
			if got.Status != http.StatusOK || got.State != r.status || got.Due != due {
				w.add("%s order %s, refund due %v: its buyer sees %d %s", r.status, r.id, due, got.Status, got.Body)
			}
		case got.Status != http.StatusGone || got.Code != "order_archived":
			w.add("%s order %s: its buyer sees %d %s", r.status, r.id, got.Status, got.Body)
		}
		if other := s.look(r.id, "somebody-else"); other.Status/100 == 2 {
			w.add("somebody else sees order %s: %s", r.id, other.Body)
		}
	}
}

// harvest fills a sale with orders of every kind in two pools: paid, paid and refunded, cancelled,
// cancelled and paid too late, and left unpaid. It gives their ids.
func (s *stack) harvest(activity string) []string {
	s.t.Helper()
	kinds := map[string][]string{}
	var all []string
	for _, region := range []string{"national", "beijing"} {
		for _, kind := range []string{"paid", "paid", "refunded", "cancelled", "late", "unpaid", "unpaid"} {
			user := fmt.Sprintf("%s-%s-%d", kind, region, len(all))
			r := s.buyIn(0, activity, user, region)
			if !r.accepted() || r.Pool != region {
				s.t.Fatalf("buy in %s: %d %s %v", region, r.Status, r.Body, r.Err)
			}
			all = append(all, r.OrderID)
			kinds[kind] = append(kinds[kind], r.OrderID)
			// Paid or cancelled at once, so that a slow machine does not make them late: a payment and
			// a cancel may come before their order (R5, R18).
			switch kind {
			case "paid", "refunded":
				s.mustPay(r.OrderID)
			case "cancelled", "late":
				if r := s.cancel(r.OrderID, user); !r.accepted() {
					s.t.Fatalf("cancel: %d %s", r.Status, r.Body)
				}
			}
		}
	}
	for _, id := range slices.Concat(kinds["paid"], kinds["refunded"]) {
		s.becomes(id, "paid")
	}
	for _, id := range slices.Concat(kinds["cancelled"], kinds["late"]) {
		s.becomes(id, "cancelled")
	}
	for _, id := range kinds["late"] {
		s.mustPay(id)
	}
	for _, id := range kinds["refunded"] {
		s.mustAdmin(http.MethodPost, "/admin/v1/orders/"+id+"/refund", map[string]any{"reason": "broken"}, nil)
		s.becomes(id, "refunded")
	}
	testkit.Eventually(s.t, within, func() error {
		for _, id := range slices.Concat(kinds["late"], kinds["refunded"]) {
			if !s.due(id) {
				return fmt.Errorf("nothing is due for order %s", id)
			}
		}
		return nil
	})
	return all
}

func (s *stack) mustPay(id string) {
	s.t.Helper()
	if r := s.pay(id, "txn-"+id, 1); !r.accepted() {
		s.t.Fatalf("pay: %d %s %v", r.Status, r.Body, r.Err)
	}
}

// killedAtStep kills the worker after one step of the end of a sale. Started again, it goes on by itself,
// and the sale is closed as if nothing had happened.
func killedAtStep(t *testing.T, step int) {
	t.Parallel()
	s := newStack(t, options{workerEnv: fastEnds(nil), cold: true})
	s.workers[0].start(fmt.Sprintf("end.step%d@1=kill", step))
	s.apis[0].start("")
	sale := s.open(map[string]int{"national": 12, "beijing": 9}, 5*time.Second, nil)
	s.known(0, sale)
	ids := s.harvest(sale)
	if _, _, code := s.ctl("activity", "end", sale, "--reason", "over", "--yes"); code != 0 && step > 2 {
		t.Errorf("activity end: code %d", code)
	}
	s.workers[0].died()
	switch r := s.buyIn(0, sale, "afterwards", "national"); {
	case step == 0 && r.accepted():
		ids = append(ids, r.OrderID) // Redis has not heard of the end: his order is as good as any
	case r.Code != "activity_ended" || r.Status != http.StatusGone:
		t.Errorf("bought after the end: %d %s %v", r.Status, r.Body, r.Err)
	}
	s.workers[0].start("")
	rep := s.over(sale, ids...)
	if rep.Total.Sold.Orders != 4 || rep.Total.Refunded.Orders != 2 || rep.Total.Expired.Orders < 4 || rep.Total.Allocated != 21 {
		t.Errorf("report: %+v", rep.Total)
	}
	for pool, want := range map[string]int{"national": 12 - 2, "beijing": 9 - 2} {
		if n := s.count("SELECT on_hand FROM inventory WHERE pool = ?", pool); n != want+spare {
			t.Errorf("%d units in the warehouse %s, want %d", n, pool, want+spare)
		}
	}
}

// Design §6, step by step: the worker is killed at each of them.

func TestEnd_S0(t *testing.T) { killedAtStep(t, 0) } // the end is recorded, in MySQL alone
func TestEnd_S1(t *testing.T) { killedAtStep(t, 1) } // the markers are there
func TestEnd_S2(t *testing.T) { killedAtStep(t, 2) } // activity.ended is in the delay queue
func TestEnd_S3(t *testing.T) { killedAtStep(t, 3) } // lock and fencing number are taken, nothing is on its way
func TestEnd_S4(t *testing.T) { killedAtStep(t, 4) } // unpaid orders are taken back
func TestEnd_S5(t *testing.T) { killedAtStep(t, 5) } // the pools are settled
func TestEnd_S6(t *testing.T) { killedAtStep(t, 6) } // Redis is cleaned
func TestEnd_S7(t *testing.T) { killedAtStep(t, 7) } // the sale is closed, its message not acknowledged

// A worker that sleeps (SIGSTOP) while it holds the settlement lock, longer than the lock lives. Another
// one takes over and finishes. When the sleeper wakes up it changes nothing any more, in neither store.
func TestEnd_SleeperWakesUpAfterAnotherHasFinished(t *testing.T) {
	t.Parallel()
	s := newStack(t, options{workers: 2, workerEnv: fastEnds(nil), cold: true})
	s.workers[0].start("")
	s.apis[0].start("")
	for step, next := range map[int]string{4: "settle the pools", 5: "clean up Redis", 6: "close the sale"} {
		t.Run(next, func(t *testing.T) {
			s := s.with(t)
			sale := s.open(map[string]int{"national": 12, "beijing": 9}, 5*time.Second, nil)
			s.known(0, sale)
			hold := filepath.Join(t.TempDir(), "hold")
			if err := os.WriteFile(hold, nil, 0o600); err != nil {
				t.Fatal(err)
			}
			sleeper := s.workers[0]
			sleeper.term()
			sleeper.start(fmt.Sprintf("end.step%d@1=pause:%s", step, hold))
			ids := s.harvest(sale)
			s.endNow(sale)
			testkit.Eventually(t, within, func() error {
				_, err := os.Stat(hold + ".hit")
				return err
			})
			sleeper.signal(syscall.SIGSTOP)
			// It finds its way free when it wakes up.
			if err := os.Remove(hold); err != nil {
				t.Fatal(err)
			}
			s.workers[1].start("")
			second := s.with(t)
			second.workers = []*process{s.workers[1], sleeper}
			second.over(sale, ids...)
			before := second.everything()
			sleeper.signal(syscall.SIGCONT)
			testkit.Eventually(t, within, func() error {
				if sleeper.metric("seckill_settlement_attempts_total", `result="fenced"`)+sleeper.metric("seckill_settlement_attempts_total", `result="failed"`) < 1 {
					return errors.New("the sleeper has not noticed yet")
				}
				return nil
			})
			after := second.everything()
			for what, was := range before {
				if is := after[what]; is != was {
					t.Errorf("%s has changed:\n%.2000s\nbecame\n%.2000s", what, was, is)
				}
			}
			second.over(sale, ids...)
			s.workers[1].term()
		})
	}
}

// everything is what both stores hold, to be compared.
func (s *stack) everything() map[string]string {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	out := map[string]string{}
	for _, table := range []string{"activities", "activity_stock", "inventory", "orders", "payments", "stock_ledger", "compensations", "user_holdings", "dead_letters"} {
		var name, sum string
		if err := s.db.QueryRowContext(ctx, "CHECKSUM TABLE "+table).Scan(&name, &sum); err != nil {
			s.t.Fatal(err)
		}
		out[table] = sum
	}
	var keys []string
	it := s.rdb.Scan(ctx, 0, s.prefix+"*", 1000).Iterator()
	for it.Next(ctx) {
		dump, err := s.rdb.Dump(ctx, it.Val()).Result()
		if err != nil {
			s.t.Fatal(err)
		}
		keys = append(keys, fmt.Sprintf("%s=%x", it.Val(), dump))
	}
	if err := it.Err(); err != nil {
		s.t.Fatal(err)
	}
	slices.Sort(keys)
	out["redis"] = strings.Join(slices.Compact(keys), "\n")
	return out
}

// The end comes while buyers click, from two workers at once and several times. Each of the 202s ends as
// one order in one final state; whoever clicks after the end is told so; the sale is settled once.
func TestEnd_UnderLoadAndCalledByMany(t *testing.T) {
	t.Parallel()
	s := newStack(t, options{apis: 2, workers: 2, workerEnv: fastEnds(nil)})
	sale := s.open(map[string]int{"national": 3000, "beijing": 500}, 5*time.Second, func(p *sale.Sale) {
		p.Buckets = 2
		p.RegionFallback = map[string][]string{"beijing": {"national"}}
	})
	s.known(0, sale)
	s.known(1, sale)
	var got answers
	quit := make(chan struct{})
	var buying sync.WaitGroup
	enough := make(chan struct{})
	var once sync.Once
	for worker := range 10 {
		buying.Go(func() {
			tick := time.NewTicker(50 * time.Millisecond) // 200 a second, all together
			defer tick.Stop()
			for i := 0; ; i++ {
				select {
				case <-quit:
					return
				case <-tick.C:
				}
				user := fmt.Sprintf("load-%d-%d", worker, i)
				r := s.buyIn(i%2, sale, user, []string{"national", "beijing"}[i%2])
				for try := 0; try < 60 && (r.Err != nil || r.Code == "temporarily_unavailable"); try++ {
					r = s.buyIn(try%2, sale, user, []string{"national", "beijing"}[i%2]) // as a client does, with his key
				}
				got.add(r)
				if r.accepted() {
					switch i % 3 { // a third pays, a third cancels, a third expires
					case 0:
						_ = s.pay(r.OrderID, "txn-"+r.OrderID, 1)
					case 1:
						_ = s.cancel(r.OrderID, user)
					}
				}
				if i == 12 {
					once.Do(func() { close(enough) })
				}
			}
		})
	}
	<-enough
	var ending sync.WaitGroup
	codes := make([]int, 4)
	for i := range codes {
		at := s.with(t)
		at.workers = []*process{s.workers[i%2]}
		ending.Go(func() { _, _, codes[i] = at.ctl("activity", "end", sale, "--reason", "over", "--yes") })
	}
	ending.Wait()
	if !slices.Equal(codes, []int{0, 0, 0, 0}) {
		t.Errorf("activity end: codes %v", codes)
	}
	// From here on everybody is told, on both replicas.
	for i := range 20 {
		if r := s.buyIn(i%2, sale, fmt.Sprintf("late-%d", i), "national"); r.Status != http.StatusGone || r.Code != "activity_ended" {
			t.Errorf("clicked after the end: %d %s %v", r.Status, r.Body, r.Err)
		}
	}
	close(quit)
	buying.Wait()
	for code := range got.codes {
		if code != "accepted" && code != "activity_ended" {
			t.Errorf("answers %v", got.codes)
			break
		}
	}
	t.Logf("answers %v", got.codes)
	if got.codes["activity_ended"] == 0 {
		t.Error("nobody clicked while the sale ended")
	}
	rep := s.over(sale, got.ids...)
	if rep.Total.Sold.Orders == 0 || rep.Total.Cancelled.Orders == 0 || rep.Total.Expired.Orders == 0 {
		t.Errorf("report: %+v", rep.Total)
	}
	// Ended again, when everything is over, by both.
	before := s.everything()
	for i := range 2 {
		at := s.with(t)
		at.workers = []*process{s.workers[i]}
		if out, errOut, code := at.ctl("activity", "end", sale, "--yes", "-o", "json"); code != 0 || !strings.Contains(out, `"already": true`) {
			t.Errorf("activity end of a closed sale: code %d: %s%s", code, out, errOut)
		}
	}
	after := s.everything()
	for what, was := range before {
		if after[what] != was {
			t.Errorf("%s has changed", what)
		}
	}
	s.over(sale, got.ids...)
}

// MySQL is away for half a minute while the orders of an ended sale run out. Nothing gives up: no message
// becomes a dead letter, and every unit is where it belongs afterwards.
func TestEnd_DatabaseAwayDuringTheRollback(t *testing.T) {
	t.Parallel()
	s := newStack(t, options{mysqlProxy: true, workerEnv: fastEnds(nil)})
	sale := s.open(map[string]int{"national": 60, "beijing": 20}, 15*time.Second, nil)
	s.known(0, sale)
	var ids []string
	for i := range 60 {
		r := s.buyIn(0, sale, fmt.Sprintf("away-%d", i), []string{"national", "national", "beijing"}[i%3])
		if !r.accepted() {
			t.Fatalf("buy: %d %s %v", r.Status, r.Body, r.Err)
		}
		ids = append(ids, r.OrderID)
		if i < 6 {
			s.mustPay(r.OrderID)
		}
	}
	for _, id := range ids[:6] {
		s.becomes(id, "paid")
	}
	last := s.buyIn(0, sale, "away-last", "national")
	if !last.accepted() {
		t.Fatalf("buy: %d %s %v", last.Status, last.Body, last.Err)
	}
	ids = append(ids, last.OrderID)
	s.endNow(sale)
	s.mysql.Cut()
	away := time.After(30 * time.Second) // the outage itself
	// Somebody pays and somebody cancels meanwhile: the queues take it.
	for _, id := range ids[6:9] {
		s.mustPay(id)
	}
	if r := s.cancel(last.OrderID, "away-last"); !r.accepted() {
		t.Errorf("cancel: %d %s", r.Status, r.Body)
	}
	<-away
	if st := s.stateOf(sale); st != "ended" {
		t.Errorf("the sale is %s while its database is away", st)
	}
	s.mysql.Resume()
	rep := s.over(sale, ids...)
	if n := rep.Total.Sold.Orders; n < 6 || n > 9 {
		t.Errorf("%d sold", n)
	}
	if n := s.workers[0].metric("seckill_consumed_total", `result="dead"`); n != 0 {
		t.Errorf("%v messages were given up", n)
	}
	if n := s.depth("seckill.dead"); n != 0 {
		t.Errorf("%d dead letters", n)
	}
}

// Redis has lost everything in mid-sale. An end needs nothing of it: unpaid orders run out, paid ones
// stay, and every unit is accounted for. Nobody is told "sold out", and nobody buys.
func TestEnd_AfterRedisLostEverything(t *testing.T) {
	t.Parallel()
	private := testkit.StartRedis(t)
	s := newStack(t, options{redis: private, workerEnv: fastEnds(map[string]string{"SECKILL_RECONCILE_MANUAL": "true"})})
	sale := s.open(map[string]int{"national": 12, "beijing": 9}, 5*time.Second, nil)
	s.known(0, sale)
	ids := s.harvest(sale)
	s.quiet(sale, true)
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if err := s.rdb.FlushAll(ctx).Err(); err != nil {
		t.Fatal(err)
	}
	for i := range 5 {
		if r := s.buyIn(0, sale, fmt.Sprintf("gone-%d", i), "national"); r.Status/100 == 2 || r.Code == "sold_out" {
			t.Errorf("bought from nothing: %d %s", r.Status, r.Body)
		}
	}
	s.endNow(sale)
	rep := s.closed(sale, false, ids)
	if rep.Total.Sold.Orders != 4 || rep.Total.Returned != 21-4 {
		t.Errorf("report: %+v", rep.Total)
	}
	// A refund afterwards finds no receipt, and needs none.
	for _, id := range ids {
		if s.status(id) == "paid" {
			s.mustAdmin(http.MethodPost, "/admin/v1/orders/"+id+"/refund", map[string]any{"reason": "broken"}, nil)
			s.becomes(id, "refunded")
			break
		}
	}
	s.closed(sale, false, ids)
}
