package acceptance

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"seckill/pkg/adminapi"
	"seckill/pkg/messaging"
	"seckill/pkg/order"
	"seckill/pkg/sale"
	"seckill/pkg/testkit"
)

// ctlJSON runs seckillctl and decodes what it prints.
func (s *stack) ctlJSON(out any, args ...string) {
	s.t.Helper()
	stdout, stderr, code := s.ctl(append(args, "-o", "json")...)
	if code != 0 {
		s.t.Fatalf("seckillctl %v: code %d: %s%s", args, code, stdout, stderr)
	}
	if err := json.Unmarshal([]byte(stdout), out); err != nil {
		s.t.Fatalf("seckillctl %v: %v in %s", args, err, stdout)
	}
}

// Region pools with fallback lists: whatever ends an order, its units return to the pool that they came
// from. Then a pool's stock key is lost in mid-sale: nobody buys from it and nothing makes it again, a
// release that meets the gap is kept for later, and the end puts everything right.
func TestEnd_RegionPoolsAndALostStockKey(t *testing.T) {
	t.Parallel()
	s := newStack(t, options{workerEnv: fastEnds(nil)})
	units := map[string]int{"beijing": 6, "shanghai": 4, "national": 12}
	sale := s.open(units, 15*time.Second, func(p *sale.Sale) {
		p.RegionFallback = map[string][]string{"beijing": {"national"}, "tibet": {"shanghai", "national"}}
	})
	s.known(0, sale)
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
	defer cancel()
	type bought struct{ id, user string }
	from := map[string][]bought{}
	var ids []string
	buy := func(user, region string) reply {
		t.Helper()
		r := s.buyIn(0, sale, user, region)
		if r.accepted() {
			from[r.Pool] = append(from[r.Pool], bought{r.OrderID, user})
			ids = append(ids, r.OrderID)
		}
		return r
	}
	// Of each pool one is paid, one paid and refunded, one cancelled, and the rest runs out.
	var refunded []string
	first := func(user, region, pool string) {
		t.Helper()
		r := buy(user, region)
		if !r.accepted() || r.Pool != pool {
			t.Fatalf("buyer %s in %s: %d %s", user, region, r.Status, r.Body)
		}
		switch len(from[pool]) {
		case 1:
			s.mustPay(r.OrderID)
		case 2:
			s.mustPay(r.OrderID)
			refunded = append(refunded, r.OrderID)
		}
	}
	for i := range 9 {
		first(fmt.Sprintf("b%d", i), "beijing", map[bool]string{true: "beijing", false: "national"}[i < 6])
	}
	for i := range 6 {
		first(fmt.Sprintf("t%d", i), "tibet", map[bool]string{true: "shanghai", false: "national"}[i < 4])
	}
	for pool := range units {
		youngest := from[pool][len(from[pool])-1]
		if r := s.cancel(youngest.id, youngest.user); !r.accepted() {
			t.Errorf("cancel: %d %s", r.Status, r.Body)
		}
	}
	for _, id := range refunded {
		s.becomes(id, "paid")
		s.mustAdmin(http.MethodPost, "/admin/v1/orders/"+id+"/refund", map[string]any{"reason": "broken"}, nil)
	}
	for _, id := range refunded {
		s.becomes(id, "refunded")
	}
	s.settled(sale, false, ids...)
	for pool, n := range units {
		if left := s.level(sale, "sku", pool); left != n-1 {
			t.Errorf("%d units on sale in %s, want %d: one is sold", left, pool, n-1)
		}
	}

	// What came back can be bought again, from where it came back to.
	last := buy("again", "beijing")
	paid := buy("again-paid", "beijing")
	if last.Pool != "beijing" || paid.Pool != "beijing" {
		t.Fatalf("bought again from %q and %q: %s", last.Pool, paid.Pool, last.Body)
	}
	s.mustPay(paid.OrderID)
	s.becomes(paid.OrderID, "paid")
	key := s.prefix + "seckill:stock:{" + sale + ":0}:sku:beijing"
	if n, err := s.rdb.Del(ctx, key).Result(); err != nil || n != 1 {
		t.Fatalf("deleted %d keys: %v", n, err)
	}
	if r := s.cancel(last.OrderID, "again"); !r.accepted() {
		t.Fatalf("cancel: %d %s", r.Status, r.Body)
	}
	s.becomes(last.OrderID, "cancelled")
	testkit.Eventually(t, within, func() error {
		if n := s.count("SELECT COUNT(*) FROM compensations WHERE activity_id = ? AND kind = 'release' AND subject = ?", sale, last.OrderID); n != 1 {
			return fmt.Errorf("%d releases are owed, want one", n)
		}
		return nil
	})
	// The lost pool is not sold out, and not sold from; the others go on.
	for i := range 10 {
		if r := buy(fmt.Sprintf("gap%d", i), "beijing"); r.accepted() && r.Pool == "beijing" || r.Code == "sold_out" {
			t.Errorf("a buyer of the lost pool: %d %s", r.Status, r.Body)
		}
	}
	if r := buy("elsewhere", "tibet"); !r.accepted() || r.Pool != "shanghai" {
		t.Errorf("a buyer of another pool: %d %s", r.Status, r.Body)
	}
	if n := s.rdb.Exists(ctx, key).Val(); n != 0 {
		t.Error("something has made the stock key again")
	}
	for _, k := range s.keys(sale) {
		if ttl := s.rdb.TTL(ctx, s.prefix+k).Val(); ttl >= 0 {
			t.Errorf("%s expires in %s in mid-sale", k, ttl)
		}
	}
	// Who watches sees the units of the live sale and what is owed; nothing of it once it is closed.
	series := `activity="` + sale + `"`
	testkit.Eventually(t, within, func() error {
		if n := s.workers[0].metric("seckill_compensations", `kind="release"`); n < 1 {
			return fmt.Errorf("the metrics show %v releases that are owed", n)
		}
		if n := s.workers[0].metric("seckill_units", series, `pool="shanghai"`, `state="live"`); n < 1 {
			return fmt.Errorf("the metrics show %v live units of shanghai, one is sold", n)
		}
		return nil
	})
	s.endNow(sale)
	rep := s.over(sale, ids...)
	testkit.Eventually(t, within, func() error {
		_, body, err := s.workers[0].get("/metrics")
		if err != nil || strings.Contains(body, series) {
			return fmt.Errorf("the metrics still show the sale (%w)", err)
		}
		return nil
	})
	for _, l := range rep.Lines {
		if want := map[string]int64{"beijing": 2, "shanghai": 1, "national": 1}[l.Pool]; l.Sold.Units != want || l.Returned != int64(units[l.Pool])-want {
			t.Errorf("%s: %d sold, %d returned", l.Pool, l.Sold.Units, l.Returned)
		}
	}
}

// A refund while the sale runs puts the unit back on sale; one after the end goes to the warehouse that
// the sale names. Money that came too late is due for refund, is listed, and is settled once. Repeating
// any of it changes nothing.
func TestEnd_RefundsBeforeAndAfter(t *testing.T) {
	t.Parallel()
	s := newStack(t, options{workerEnv: fastEnds(nil)})
	open := func(refunds string) string {
		return s.open(map[string]int{"beijing": 2, "national": 5}, 15*time.Second, func(p *sale.Sale) { p.RefundAfterEnd = refunds })
	}
	national, region := open(sale.RefundNational), open(sale.RefundRegion)
	ids := map[string][]string{}
	kept := map[string]string{}
	for _, id := range []string{national, region} {
		s.known(0, id)
		buy := func(user string) reply { return s.buyIn(0, id, user, "beijing") }
		first, second := buy("first"), buy("second")
		if !first.accepted() || !second.accepted() {
			t.Fatalf("buy: %d %s, %d %s", first.Status, first.Body, second.Status, second.Body)
		}
		s.mustPay(first.OrderID)
		s.mustPay(second.OrderID)
		s.becomes(first.OrderID, "paid")
		s.becomes(second.OrderID, "paid")
		if r := buy("third"); r.Code != "sold_out" {
			t.Errorf("the third buyer of two: %d %s", r.Status, r.Body)
		}
		for range 3 {
			if out, errOut, code := s.ctl("order", "refund", first.OrderID, "--reason", "broken", "--wait", "20s", "--yes"); code != 0 {
				t.Errorf("refund: code %d: %s%s", code, out, errOut)
			}
		}
		s.becomes(first.OrderID, "refunded")
		var third reply
		testkit.Eventually(t, within, func() error {
			if third = buy("third"); !third.accepted() || third.Pool != "beijing" {
				return fmt.Errorf("buy what was refunded: %d %s", third.Status, third.Body)
			}
			return nil
		})
		if r := s.look(first.OrderID, "first"); r.State != "refunded" || !r.Due {
			t.Errorf("the buyer of a refunded order sees %d %s", r.Status, r.Body)
		}
		// He cancels, and pays all the same.
		if r := s.cancel(third.OrderID, "third"); !r.accepted() {
			t.Errorf("cancel: %d %s", r.Status, r.Body)
		}
		s.becomes(third.OrderID, "cancelled")
		s.mustPay(third.OrderID)
		testkit.Eventually(t, within, func() error {
			if !s.due(third.OrderID) {
				return errors.New("the late money is not due for refund")
			}
			return nil
		})
		ids[id] = []string{first.OrderID, second.OrderID, third.OrderID}
		kept[id] = second.OrderID
		s.settled(id, false, ids[id]...)
	}
	var list []adminapi.Payment
	s.ctlJSON(&list, "payment", "list", "--due-refund")
	reasons := map[string]string{}
	for _, p := range list {
		reasons[p.OrderID] = p.Reason
	}
	for _, id := range []string{national, region} {
		if reasons[ids[id][0]] != "order_refunded" || reasons[ids[id][2]] != "late_payment" || len(reasons) != 4 {
			t.Errorf("due for refund: %v", reasons)
		}
		s.endNow(id)
	}
	for _, id := range []string{national, region} {
		rep := s.over(id, ids[id]...)
		if rep.Total.Sold.Orders != 1 || rep.Total.Refunded.Orders != 1 || rep.Payments.RefundDue.Orders != 2 {
			t.Errorf("report: %+v %+v", rep.Total, rep.Payments)
		}
	}
	// After the end.
	for _, id := range []string{national, region} {
		stocks := func() (n [2]int) {
			for i, pool := range []string{"beijing", "national"} {
				n[i] = s.count("SELECT on_hand FROM inventory WHERE sku_id = 'sku' AND pool = ?", pool)
			}
			return n
		}
		want := stocks()
		if id == region {
			want[0]++
		} else {
			want[1]++
		}
		for range 3 {
			if out, errOut, code := s.ctl("order", "refund", kept[id], "--reason", "broken", "--wait", "20s", "--yes"); code != 0 {
				t.Errorf("refund after the end: code %d: %s%s", code, out, errOut)
			}
		}
		s.becomes(kept[id], "refunded")
		testkit.Eventually(t, within, func() error {
			if r := s.look(kept[id], "second"); r.State != "refunded" || !r.Due {
				return fmt.Errorf("the buyer of an order that was refunded after the end sees %d %s", r.Status, r.Body)
			}
			return nil
		})
		if got := stocks(); got != want {
			t.Errorf("the warehouses beijing and national hold %v, want %v", got, want)
		}
		rep := s.over(id, ids[id]...)
		if len(rep.RefundedSince) != 1 || rep.RefundedSince[0].Units != 1 || rep.RefundedSince[0].Pool != "beijing" {
			t.Errorf("refunded since the report: %+v", rep.RefundedSince)
		}
	}
	// The money is sent back, once.
	txn := "txn-" + ids[national][2]
	for i := range 2 {
		var r adminapi.SettleRefundResult
		s.ctlJSON(&r, "payment", "settle-refund", txn, "--reason", "sent back", "--yes")
		if r.Changed != (i == 0) || r.Status != adminapi.PaymentSettled {
			t.Errorf("settle-refund, time %d: %+v", i+1, r)
		}
	}
	s.ctlJSON(&list, "payment", "list", "--due-refund")
	if slices.ContainsFunc(list, func(p adminapi.Payment) bool { return p.TransactionID == txn }) {
		t.Error("a refund that was settled is still listed as due")
	}
}

// O05: warmed again while it sells, ten times at once, and both programs started anew.
func TestO05_WarmAgainWhileSelling(t *testing.T) {
	t.Parallel()
	s := newStack(t, options{apis: 2, workers: 2})
	sale := s.sell(100, 1, 15*time.Minute)
	s.known(0, sale)
	s.known(1, sale)
	ids := s.crowd(sale, "o05", 40)
	if len(ids) != 40 {
		t.Fatalf("%d of 40 accepted", len(ids))
	}
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
	defer cancel()
	stop := make(chan struct{})
	var watching sync.WaitGroup
	watching.Go(func() {
		for {
			select {
			case <-stop:
				return
			case <-time.After(5 * time.Millisecond):
				if n, err := s.rdb.Get(ctx, s.stockKey(sale)).Int(); err != nil || n != 60 {
					t.Errorf("%d units on sale (%v), want 60 all the time", n, err)
					return
				}
			}
		}
	})
	warm := func() {
		barrier(10, func(i int) {
			at := s.with(t)
			at.workers = []*process{s.workers[i%2]}
			var r adminapi.WarmResult
			if status, text := at.admin(http.MethodPost, "/admin/v1/activities/"+sale+"/warm", nil, &r); status/100 != 2 || !r.Already {
				t.Errorf("warm again: %d %s", status, text)
			}
		})
	}
	warm()
	for _, p := range []*process{s.workers[0], s.apis[0], s.workers[1], s.apis[1]} {
		p.kill9()
		p.start("")
	}
	warm()
	// Another one is warmed without touching the first.
	other := s.sell(7, 1, time.Minute)
	close(stop)
	watching.Wait()
	if n := s.level(other, "sku", "national"); n != 7 {
		t.Errorf("%d units of the second sale, want 7", n)
	}
	s.known(0, sale)
	s.known(1, sale)
	// Those who bought before are still known.
	if r := s.buy(0, sale, "o05-0", "another", 1); r.Code != "limit_reached" {
		t.Errorf("bought twice: %d %s", r.Status, r.Body)
	}
	var got answers
	barrier(100, func(i int) {
		r := s.buy(i%2, sale, fmt.Sprintf("o05-late-%d", i), "k", 1)
		for try := 0; try < 20 && (r.Err != nil || r.Code == "temporarily_unavailable"); try++ {
			r = s.buy(i%2, sale, fmt.Sprintf("o05-late-%d", i), "k", 1)
		}
		got.add(r)
	})
	got.want(t, map[string]int{"accepted": 60, "sold_out": 40})
	s.quiet(sale, true)
	s.promises(sale, append(ids, got.ids...)...)
}

// O10: Redis is full. Nobody buys, nothing is half done; a rollback that falls due is carried out when
// there is room again, once.
func TestO10_RedisIsFull(t *testing.T) {
	t.Parallel()
	private := testkit.StartRedis(t)
	s := newStack(t, options{redis: private})
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
	defer cancel()
	sale := s.sell(10, 1, 15*time.Second)
	s.known(0, sale)
	id := s.mustBuy(sale, "o10")
	s.quiet(sale, true)
	if n := s.level(sale, "sku", "national"); n != 9 {
		t.Fatalf("%d units on sale, want 9", n)
	}
	limit := func(bytes string) {
		t.Helper()
		if err := s.rdb.ConfigSet(ctx, "maxmemory", bytes).Err(); err != nil {
			t.Fatal(err)
		}
	}
	before := s.keys(sale)
	limit("1")
	var got answers
	barrier(10, func(i int) { got.add(s.buy(0, sale, fmt.Sprintf("o10-%d", i), "k", 1)) })
	got.want(t, map[string]int{"temporarily_unavailable": 10})
	if got.slow > 5*time.Second {
		t.Errorf("the slowest answer took %s", got.slow)
	}
	if after := s.keys(sale); !slices.Equal(before, after) {
		t.Errorf("keys before %v, after %v", before, after)
	}
	s.becomes(id, "cancelled") // in MySQL
	// It is still owed to Redis, and stays so for as long as that refuses.
	testkit.Eventually(t, within, func() error {
		if n := s.count("SELECT COUNT(*) FROM compensations WHERE activity_id = ? AND attempts >= 1", sale); n != 1 {
			return fmt.Errorf("%d releases are owed and were tried again, want one", n)
		}
		return nil
	})
	if n := s.level(sale, "sku", "national"); n != 9 {
		t.Errorf("%d units on sale while Redis is full, want 9", n)
	}
	limit("0")
	s.settled(sale, false, id)
	if n := s.level(sale, "sku", "national"); n != 10 {
		t.Errorf("%d units on sale, want 10", n)
	}
	if n := s.count("SELECT COUNT(*) FROM stock_ledger WHERE ref = ? AND op = 'cancel'", id); n != 1 {
		t.Errorf("cancelled %d times", n)
	}
	if r := s.buy(0, sale, "o10-1", "k", 1); !r.accepted() {
		t.Errorf("buy when there is room again: %d %s", r.Status, r.Body)
	}
}

// O27: cancelled twenty times at once, its time-out delivered again and again, and the end runs at the
// same moment. The order is cancelled once and its unit is in the warehouse once. An order that never
// existed changes nothing.
func TestO27_CancelledManyTimesAndTheEnd(t *testing.T) {
	t.Parallel()
	s := newStack(t, options{apis: 2, workers: 2, workerEnv: fastEnds(nil)})
	sale := s.open(map[string]int{"national": 5}, 15*time.Second, nil)
	s.known(0, sale)
	s.known(1, sale)
	id := s.mustBuy(sale, "o27")
	s.becomes(id, "pending")
	if n := s.level(sale, "sku", "national"); n != 4 {
		t.Fatalf("%d units on sale, want 4", n)
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	parsed, err := order.ParseID(id)
	if err != nil {
		t.Fatal(err)
	}
	rec, err := s.stock.Order(ctx, parsed)
	if err != nil {
		t.Fatal(err)
	}
	expired := messaging.OrderExpired([]order.Order{rec.Order})
	never := rec.Order
	never.ID.ULID = "01ARZ3NDEKTSV4RRFFQ69G5FAV"
	unknown := messaging.CancelRequested(messaging.Cancel{OrderID: never.ID, Reason: order.ReasonUserCancelled, Actor: "user:o27", RequestedAt: time.Now()})
	// All at the moment at which its time is over.
	time.Sleep(time.Until(rec.PayBefore))
	barrier(25, func(i int) {
		switch {
		case i < 20:
			if r := s.call(http.MethodDelete, s.api(i%2)+"/v1/orders/"+id, "o27", nil, ""); !r.accepted() && r.Code != "order_not_cancellable" && r.Status != http.StatusOK {
				t.Errorf("cancel: %d %s", r.Status, r.Body)
			}
		case i < 22:
			s.publish(expired.Key, fmt.Sprintf("%s-copy-%d", expired.ID, i), expired.Body)
		case i < 23:
			s.publish(unknown.Key, unknown.ID, unknown.Body)
		default:
			at := s.with(t)
			at.workers = []*process{s.workers[i%2]}
			if out, errOut, code := at.ctl("activity", "end", sale, "--yes"); code != 0 {
				t.Errorf("activity end: code %d: %s%s", code, out, errOut)
			}
		}
	})
	s.becomes(id, "cancelled")
	s.over(sale, id)
	if n := s.count("SELECT COUNT(*) FROM stock_ledger WHERE ref = ?", id); n != 2 {
		t.Errorf("%d ledger rows, want one sell and one cancel", n)
	}
	if n := s.count("SELECT on_hand FROM inventory WHERE pool = 'national'"); n != 5+spare {
		t.Errorf("%d units in the warehouse, want %d", n, 5+spare)
	}
}

// ahead builds an order-api whose clock is ahead. Go programs do not ask the C library what time it is, so
// that nothing from outside can make one of them err; its sources are overlaid wherever they look at the
// clock.
func ahead(t testing.TB, by time.Duration) string {
	t.Helper()
	dir := t.TempDir()
	replace := map[string]string{}
	clock := regexp.MustCompile(`\btime\.(Now\(\)|Now\b|Since\()`)
	now := fmt.Sprintf("time.Now().Add(time.Duration(%d))", by)
	for _, root := range []string{"../order-api/internal", "../../pkg/order"} {
		err := filepath.WalkDir(root, func(path string, _ fs.DirEntry, err error) error {
			if err != nil || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
				return err
			}
			text, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			shifted := clock.ReplaceAllStringFunc(string(text), func(s string) string {
				switch s {
				case "time.Now()":
					return now
				case "time.Since(":
					return now + ".Sub("
				}
				return "func() time.Time { return " + now + " }"
			})
			if shifted == string(text) {
				return nil
			}
			if path, err = filepath.Abs(path); err != nil {
				return err
			}
			replace[path] = filepath.Join(dir, fmt.Sprintf("%d.go", len(replace)))
			return os.WriteFile(replace[path], []byte(shifted), 0o600)
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	overlay, err := json.Marshal(map[string]any{"Replace": replace})
	if err != nil || len(replace) < 4 {
		t.Fatalf("%d files look at the clock, %v", len(replace), err)
	}
	file, program := filepath.Join(dir, "overlay.json"), filepath.Join(dir, "order-api-ahead")
	if err := os.WriteFile(file, overlay, 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("go", "build", "-race", "-tags", "failpoints", "-overlay", file, "-o", program, ".")
	cmd.Dir = "../order-api"
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build an order-api that is ahead: %v\n%s", err, out)
	}
	return program
}

// O28: at the edges of the window, on two replicas, one of which runs 90 s ahead: the clock that counts is
// Redis'. An order of the last seconds whose message is held back until long after the end still becomes
// an order and is paid; the end returns only what nobody holds.
func TestO28_OpeningAndClosingTime(t *testing.T) {
	t.Parallel()
	fast := ahead(t, 90*time.Second)
	s := newStack(t, options{apis: 2, cold: true, workerEnv: fastEnds(map[string]string{"SECKILL_WORKER_ROLES": "payments,rollbacks,relay,scheduler,admin"})})
	s.apis[1].program = fast
	for _, p := range []*process{s.workers[0], s.apis[0], s.apis[1]} {
		p.start("")
	}
	var starts, ends time.Time
	sale := s.open(map[string]int{"national": 20}, time.Minute, func(p *sale.Sale) {
		starts = time.Now().Add(20 * time.Second).Truncate(time.Millisecond)
		ends = starts.Add(10 * time.Second)
		p.StartsAt, p.EndsAt = starts.UTC().Format(time.RFC3339Nano), ends.UTC().Format(time.RFC3339Nano)
	})
	s.known(0, sale)
	s.known(1, sale)
	for i := range 2 {
		var state struct {
			Time time.Time `json:"server_time"`
		}
		before := time.Now()
		r := s.call(http.MethodGet, s.api(i)+"/v1/activities/"+sale, "", nil, "")
		// Early by at most the second that its reading of Redis' clock may be old, and its way there.
		if err := json.Unmarshal([]byte(r.Body), &state); err != nil || state.Time.Before(before.Add(-3*time.Second)) || state.Time.After(time.Now().Add(3*time.Second)) {
			t.Errorf("replica %d says that it is %s (%v)", i, state.Time, err)
		}
	}
	right := func(at time.Time) string { // the code of a click at that moment; "" is accepted
		switch {
		case at.Before(starts):
			return "activity_not_started"
		case at.Before(ends):
			return ""
		}
		return "activity_ended"
	}
	var ids []string
	var got [2]reply
	for n, edge := range []struct {
		name string
		at   time.Time
	}{
		{"S-1s", starts.Add(-time.Second)},
		{"S", starts.Add(5 * time.Millisecond)},
		{"E-1s", ends.Add(-time.Second)},
		{"E", ends.Add(5 * time.Millisecond)},
		{"E+1s", ends.Add(time.Second)},
	} {
		time.Sleep(time.Until(edge.at)) // the moment is the point of the test
		barrier(2, func(i int) {
			before := time.Now()
			r := s.buy(i, sale, fmt.Sprintf("o28-%d-%d", n, i), "k", 1)
			after := time.Now() // on a machine that stands still, the click may come after the edge
			if r.Code != right(before) && r.Code != right(after) || r.accepted() != (r.Code == "") {
				t.Errorf("%s, replica %d: %d %s %v, sent %s, answered %s", edge.name, i, r.Status, r.Body, r.Err, before, after)
			}
			got[i] = r
		})
		for _, r := range got {
			if r.accepted() {
				ids = append(ids, r.OrderID)
			}
		}
	}
	// Refused ones left no mark: no record, no limit, no unit.
	records := 0
	for _, k := range s.keys(sale) {
		if strings.HasPrefix(k, "seckill:order:") || strings.HasPrefix(k, "seckill:user:limit:") {
			records++
		}
	}
	if n := s.level(sale, "sku", "national"); len(ids) < 2 || n != 20-len(ids) || records != 2*len(ids) {
		t.Errorf("%d accepted, %d units on sale, %d records and limits", len(ids), n, records)
	}
	// The end comes by the clock, and waits for what is on its way.
	testkit.Eventually(t, within, func() error {
		if n := s.workers[0].metric("seckill_settlement_attempts_total", `result="waiting"`); n < 2 {
			return fmt.Errorf("%v attempts to settle have waited", n)
		}
		return nil
	})
	if st := s.stateOf(sale); st != "ended" || s.count("SELECT COUNT(*) FROM orders WHERE activity_id = ?", sale) != 0 {
		t.Errorf("the sale is %s with its orders on their way", st)
	}
	s.workers[0].term()
	delete(s.workers[0].env, "SECKILL_WORKER_ROLES")
	s.workers[0].start("")
	for _, id := range ids {
		s.becomes(id, "pending")
		s.mustPay(id)
	}
	rep := s.over(sale, ids...)
	if rep.Total.Sold.Orders != len(ids) || rep.Total.Returned != int64(20-len(ids)) {
		t.Errorf("report: %+v", rep.Total)
	}
	if n := s.count("SELECT on_hand FROM inventory WHERE pool = 'national'"); n != 20-len(ids)+spare {
		t.Errorf("%d units in the warehouse, want %d", n, 20-len(ids)+spare)
	}
}
