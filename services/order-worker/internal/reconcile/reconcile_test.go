package reconcile_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"strings"
	"testing"
	"time"

	"seckill/pkg/adminapi"
	"seckill/pkg/messaging"
	"seckill/pkg/order"
	"seckill/pkg/stock"
	"seckill/pkg/testkit"
	"seckill/services/order-worker/internal/reconcile"
	"seckill/services/order-worker/internal/rig"
)

// now makes nothing too young to be compared.
var now = reconcile.Config{Interval: 200 * time.Millisecond, Young: time.Millisecond, Thorough: 1}

func ctx(t *testing.T) context.Context {
	t.Helper()
	c, cancel := context.WithTimeout(context.Background(), time.Minute)
	t.Cleanup(cancel)
	return c
}

func kinds(r adminapi.ReconcileResult) map[string]int {
	out := map[string]int{}
	for _, d := range r.Differences {
		out[d.Kind]++
	}
	return out
}

func persisted(r *rig.Rig, n int) {
	r.T.Helper()
	testkit.Eventually(r.T, time.Minute, func() error {
		if have := r.Count("SELECT COUNT(*) FROM orders"); have != n {
			return fmt.Errorf("%d rows", have)
		}
		return nil
	})
}

func quiet(r *rig.Rig, activity string) {
	r.T.Helper()
	testkit.Eventually(r.T, time.Minute, func() error {
		s, err := r.Stock.OutboxStats(ctx2(r), activity, 0)
		if err == nil && s.Waiting > 0 {
			err = errors.New("outbox is not empty")
		}
		return err
	})
}

func ctx2(r *rig.Rig) context.Context {
	c, cancel := context.WithTimeout(context.Background(), time.Minute)
	r.T.Cleanup(cancel)
	return c
}

func same(r *rig.Rig, activity string) {
	r.T.Helper()
	res, err := r.Reconciler.Reconcile(ctx2(r), activity, false)
	if err != nil || len(res.Differences) != 0 || !res.Stable || res.DriftUnits != 0 {
		r.T.Errorf("not the same: %+v %v", res, err)
	}
}

// R8: every kind of difference is found, told without repair, and mended with it.
func TestDifferencesAreFoundAndMended(t *testing.T) {
	t.Parallel()
	r := rig.New(t, rig.Options{Reconcile: now})
	r.Sell(rig.Plan("sale", map[string]int{"national": 100}))
	r.ConsumeOrders()
	var orders []order.Order
	for i := range 8 {
		o := r.MustBuy("sale", fmt.Sprintf("u%d", i))
		orders = append(orders, o)
		r.Publish(messaging.OrderReserved([]order.Order{o}))
	}
	persisted(r, 8)
	quiet(r, "sale")
	same(r, "sale")
	key := func(o order.Order) string { return r.Prefix + "seckill:order:{sale:0}:" + o.ID.String() }

	// Redis forgets two orders together with their units and limits, as a failover does.
	for _, o := range orders[:2] {
		r.Redis.Del(ctx(t), key(o), r.Prefix+"seckill:user:limit:{sale:0}:"+o.User)
		r.Redis.IncrBy(ctx(t), r.Prefix+"seckill:stock:{sale:0}:sku:national", 1)
		r.Redis.HIncrBy(ctx(t), r.Prefix+"seckill:activity:{sale:0}", "version", 1)
	}
	// One is cancelled in MySQL and its release was lost; one lost its outbox entry before it was published.
	r.Exec("UPDATE orders SET status='cancelled', reason='operator_cancelled', updated_at='2020-01-01' WHERE id = ?", orders[2].ID.String())
	r.Exec("UPDATE activity_stock SET available=available+1, live=live-1 WHERE activity_id='sale'")
	lost := r.MustBuy("sale", "lost")
	r.Redis.ZRem(ctx(t), r.Prefix+"seckill:outbox:{sale:0}", lost.ID.ULID)
	r.Exec("UPDATE orders SET updated_at='2020-01-01'")

	var told adminapi.ReconcileResult
	if code, p := r.Call(rig.OperatorToken, http.MethodPost, "/admin/v1/activities/sale/reconcile", nil, &told); code != http.StatusOK {
		t.Fatalf("%d %+v", code, p)
	}
	k := kinds(told)
	if k[adminapi.DiffForgotten] != 2 || k[adminapi.DiffNotReleased] != 1 || k[adminapi.DiffNotPublished] != 1 || told.DriftUnits == 0 {
		t.Errorf("told: %+v", told)
	}
	if r.Level("sale", "national") != 100-8+2-1 {
		t.Errorf("telling changed something: %d left", r.Level("sale", "national"))
	}
	mended, err := r.Reconciler.Reconcile(ctx(t), "sale", true)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("mended: %+v", mended)
	persisted(r, 9)
	quiet(r, "sale")
	testkit.Eventually(t, time.Minute, func() error {
		if n := r.Level("sale", "national"); n != 100-8 { // seven live orders and the lost one
			return fmt.Errorf("%d left", n)
		}
		return nil
	})
	for _, o := range orders[:2] {
		rec, err := r.Stock.Order(ctx(t), o.ID)
		if err != nil || rec.Status != order.Pending || rec.User != o.User {
			t.Errorf("forgotten order: %+v %v", rec, err)
		}
	}
	if rec, err := r.Stock.Order(ctx(t), orders[2].ID); err != nil || rec.Status != order.Cancelled {
		t.Errorf("released order: %+v %v", rec, err)
	}
	same(r, "sale")
	// The limits came back too: a forgotten user cannot buy his limit again.
	if _, err := r.Buy("sale", orders[0].User, 5); err == nil {
		t.Error("a forgotten order does not count against the limit")
	}
}

// A pool whose row somebody has deleted sells what MySQL cannot write: it is told, and nothing is mended.
func TestAPoolWithoutARowIsFound(t *testing.T) { // R8
	t.Parallel()
	r := rig.New(t, rig.Options{Reconcile: now})
	r.Sell(rig.Plan("sale", map[string]int{"national": 10, "beijing": 5}))
	r.MustBuy("sale", "u")
	r.Exec("DELETE FROM activity_stock WHERE activity_id = 'sale' AND pool = 'national'")
	for _, repair := range []bool{false, true} {
		res, err := r.Reconciler.Reconcile(ctx2(r), "sale", repair)
		if k := kinds(res); err != nil || k[adminapi.DiffUnexplained] != 1 || res.Differences[len(res.Differences)-1].Repaired {
			t.Errorf("repair %v: %+v %v", repair, res, err)
		}
	}
	if n, err := r.Redis.Get(ctx(t), r.Prefix+"seckill:stock:{sale:0}:sku:national").Int(); err != nil || n != 9 {
		t.Errorf("%d left in redis, %v", n, err)
	}
}

// A status that somebody wrote by hand is told with its order; it neither stops the comparison of the
// others nor is it guessed at.
func TestAnUnknownStatusIsFound(t *testing.T) { // R8
	t.Parallel()
	r := rig.New(t, rig.Options{Reconcile: now})
	r.Sell(rig.Plan("sale", map[string]int{"national": 10}))
	r.ConsumeOrders()
	var orders []order.Order
	for _, user := range []string{"seen", "forgotten", "released"} {
		o := r.MustBuy("sale", user)
		orders = append(orders, o)
		r.Publish(messaging.OrderReserved([]order.Order{o}))
	}
	persisted(r, 3)
	quiet(r, "sale")
	r.Exec("UPDATE orders SET status='half-paid' WHERE id IN (?, ?)", orders[0].ID.String(), orders[1].ID.String())
	r.Redis.Del(ctx(t), r.Prefix+"seckill:order:{sale:0}:"+orders[1].ID.String())
	r.Exec("UPDATE orders SET status='cancelled', reason='operator_cancelled', updated_at='2020-01-01' WHERE id = ?", orders[2].ID.String())
	r.Exec("UPDATE activity_stock SET available=available+1, live=live-1 WHERE activity_id='sale'")

	res, err := r.Reconciler.Reconcile(ctx(t), "sale", true)
	if err != nil {
		t.Fatal(err)
	}
	told := map[string]bool{}
	for _, d := range res.Differences {
		if d.Kind == adminapi.DiffContradicts && !d.Repaired && strings.Contains(d.Detail, `"half-paid"`) {
			told[d.OrderID] = true
		}
	}
	if len(told) != 2 || !told[orders[0].ID.String()] || !told[orders[1].ID.String()] {
		t.Errorf("told %+v", res)
	}
	if rec, err := r.Stock.Order(ctx(t), orders[2].ID); err != nil || rec.Status != order.Cancelled {
		t.Errorf("the order beside them: %+v %v", rec, err)
	}
	for _, o := range orders[:2] {
		if n := r.Count("SELECT COUNT(*) FROM orders WHERE id = ? AND status = 'half-paid'", o.ID.String()); n != 1 {
			t.Errorf("%s: status changed", o.ID)
		}
	}
}

// O24, R7: the database has less than Redis. What was sold too much is rejected, and the rest is brought
// in line by itself: no more is accepted.
func TestO24_RedisIsBroughtInLine(t *testing.T) {
	t.Parallel()
	r := rig.New(t, rig.Options{Reconcile: now})
	r.Sell(rig.Plan("sale", map[string]int{"national": 10}))
	r.Exec("UPDATE activity_stock SET available = 3 WHERE activity_id = 'sale'")
	r.ConsumeOrders()
	r.Go(r.Reconciler.Run)
	// Only five are bought: three get units, two are refused by the guard, five are left in Redis that
	// nobody has.
	for i := range 5 {
		o, err := r.Buy("sale", fmt.Sprintf("u%d", i), 1)
		if errors.Is(err, stock.ErrSoldOut) {
			break // the comparison was faster
		}
		if err != nil {
			t.Fatal(err)
		}
		r.Publish(messaging.OrderReserved([]order.Order{o}))
	}
	testkit.Eventually(t, time.Minute, func() error {
		if n := r.Level("sale", "national"); n != 0 {
			return fmt.Errorf("%d left in redis", n)
		}
		if n := r.Count("SELECT available FROM activity_stock WHERE activity_id = 'sale'"); n != 0 {
			return fmt.Errorf("%d left in mysql", n)
		}
		return nil
	})
	if n := r.Count("SELECT COUNT(*) FROM orders WHERE status = 'pending'"); n != 3 {
		t.Errorf("%d pending", n)
	}
	if _, err := r.Buy("sale", "late", 1); !errors.Is(err, stock.ErrSoldOut) {
		t.Errorf("one more: %v", err)
	}
	testkit.Eventually(t, time.Minute, func() error {
		if n := r.Count("SELECT COUNT(*) FROM compensations WHERE kind = 'reconcile'"); n != 0 {
			return fmt.Errorf("%d comparisons asked for", n)
		}
		return nil
	})
}

// A row that somebody gave more than was allocated is reported, and puts nothing on sale (P1).
func TestUnitsFromNowhereAreNotPutOnSale(t *testing.T) {
	t.Parallel()
	r := rig.New(t, rig.Options{Reconcile: now})
	r.Sell(rig.Plan("sale", map[string]int{"national": 10}))
	r.Exec("UPDATE activity_stock SET available = available + 3 WHERE activity_id = 'sale'")
	for range 3 {
		res, err := r.Reconciler.Reconcile(t.Context(), "sale", true)
		if err != nil {
			t.Fatal(err)
		}
		if len(res.Differences) != 1 || res.Differences[0].Kind != adminapi.DiffUnexplained || res.Differences[0].Units != -3 {
			t.Errorf("found %+v", res.Differences)
		}
	}
	if n := r.Level("sale", "national"); n != 10 {
		t.Errorf("%d on sale of 10", n)
	}
}

// R8: comparisons beside a running sale change nothing that is right.
func TestComparingARunningSaleChangesNothing(t *testing.T) {
	t.Parallel()
	r := rig.New(t, rig.Options{Reconcile: now})
	plan := rig.Plan("sale", map[string]int{"national": 300})
	plan.Buckets = 3
	r.Sell(plan)
	r.ConsumeOrders()
	stop := r.Go(func(ctx context.Context) {
		for ctx.Err() == nil {
			if _, err := r.Reconciler.Reconcile(ctx, "sale", true); err != nil && ctx.Err() == nil {
				t.Error(err)
			}
		}
	})
	sold := 0
	for i := range 150 {
		o := r.MustBuy("sale", fmt.Sprintf("u%d", i))
		r.Publish(messaging.OrderReserved([]order.Order{o}))
		sold++
	}
	persisted(r, sold)
	stop()
	testkit.Eventually(t, time.Minute, func() error {
		res, err := r.Reconciler.Reconcile(ctx2(r), "sale", false)
		if err == nil && (len(res.Differences) > 0 || !res.Stable) {
			err = fmt.Errorf("%+v", res)
		}
		return err
	})
	if n := r.Level("sale", "national"); n != 300-sold {
		t.Errorf("%d left of 300 after %d sold", n, sold)
	}
}

// A release that cannot run, since the buyer's limit is damaged, is no repair, however often it is tried.
func TestWhatChangedNothingIsNotCalledRepaired(t *testing.T) { // R8, O09
	t.Parallel()
	r := rig.New(t, rig.Options{Reconcile: now})
	r.Sell(rig.Plan("sale", map[string]int{"national": 10}))
	r.ConsumeOrders()
	o := r.MustBuy("sale", "victim")
	other := r.MustBuy("sale", "other")
	r.Publish(messaging.OrderReserved([]order.Order{o, other}))
	persisted(r, 2)
	quiet(r, "sale")
	limit := r.Prefix + "seckill:user:limit:{sale:0}:victim"
	if err := r.Redis.Set(ctx(t), limit, "hello", 0).Err(); err != nil {
		t.Fatal(err)
	}
	r.Exec("UPDATE orders SET status = 'cancelled', reason = 'user_cancelled'")
	for range 2 {
		res, err := r.Reconciler.Reconcile(ctx(t), "sale", true)
		if err != nil {
			t.Fatal(err)
		}
		repaired := map[string]bool{}
		for _, d := range res.Differences {
			if _, twice := repaired[d.OrderID]; twice && d.OrderID != "" {
				t.Errorf("listed twice: %+v", res.Differences)
			}
			repaired[d.OrderID] = d.Repaired
		}
		if done, ok := repaired[o.ID.String()]; !ok || done || res.DriftUnits == 0 || res.Passes == 10 {
			t.Errorf("%+v", res)
		}
	}
	if rec, err := r.Stock.Order(ctx(t), other.ID); err != nil || rec.Status != order.Cancelled {
		t.Errorf("its neighbour was not released: %+v, %v", rec, err)
	}
}

// A limit that says something else than its buyer's orders refuses him, or lets him have too much.
func TestLimitsAreCompared(t *testing.T) { // R8, R14
	t.Parallel()
	r := rig.New(t, rig.Options{Reconcile: now})
	plan := rig.Plan("sale", map[string]int{"national": 20})
	plan.Buckets = 2
	r.Sell(plan)
	r.ConsumeOrders()
	r.ConsumePayments()
	r.ConsumeRollbacks()
	r.ConsumeDead()
	var orders []order.Order
	for _, user := range []string{"a", "b", "b", "c", "d", "e"} {
		orders = append(orders, r.MustBuy("sale", user))
	}
	r.Publish(messaging.OrderReserved(orders))
	persisted(r, len(orders))
	testkit.Eventually(t, time.Minute, func() error {
		res, err := r.Reconciler.Reconcile(ctx2(r), "sale", false)
		if err == nil && (len(res.Differences) > 0 || !res.Stable) {
			err = fmt.Errorf("%+v", res)
		}
		return err
	})
	limit := func(user string) string {
		return fmt.Sprintf("%sseckill:user:limit:{sale:%d}:%s", r.Prefix, order.Bucket(user, 2), user)
	}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(r.Redis.HSet(ctx(t), limit("a"), "held", "4").Err())
	must(r.Redis.Del(ctx(t), limit("b")).Err())
	must(r.Redis.HSet(ctx(t), limit("nobody"), "held", "1").Err())
	for _, repair := range []bool{false, true} {
		res, err := r.Reconciler.Reconcile(ctx(t), "sale", repair)
		if err != nil {
			t.Fatal(err)
		}
		found := map[string]int64{}
		for _, d := range res.Differences {
			if d.Kind != adminapi.DiffLimit || d.Repaired {
				t.Errorf("%+v", d)
			}
			found[d.UserID] = d.Units
		}
		if want := map[string]int64{"a": 3, "b": -2, "nobody": 1}; !maps.Equal(found, want) || res.DriftUnits != 6 {
			t.Errorf("found %v (drift %d), want %v", found, res.DriftUnits, want)
		}
	}
	must(r.Redis.Set(ctx(t), limit("c"), "text", 0).Err())
	if res, err := r.Reconciler.Reconcile(ctx(t), "sale", true); err != nil || kinds(res)[adminapi.DiffLimit] != 1 || !strings.Contains(res.Differences[0].Detail, "rebuild") {
		t.Errorf("%+v, %v", res, err)
	}
	// What the report advises.
	r.Go(r.Rebuilds.Run)
	_, err := r.Rebuilds.Request(ctx(t), "sale", rig.Operator())
	must(err)
	testkit.Eventually(t, time.Minute, func() error {
		res, err := r.Reconciler.Reconcile(ctx2(r), "sale", false)
		if err == nil && len(res.Differences) > 0 {
			err = fmt.Errorf("%+v", res)
		}
		return err
	})
}

// An end marker that nobody meant closes a sale to its buyers: a comparison names it.
func TestAStrayEndMarkerIsFound(t *testing.T) { // R8
	t.Parallel()
	r := rig.New(t, rig.Options{Reconcile: now})
	r.Sell(rig.Plan("sale", map[string]int{"national": 10}))
	same(r, "sale")
	if err := r.Redis.Set(ctx(t), r.Prefix+"seckill:activity:{sale:0}:end", "junk", 0).Err(); err != nil {
		t.Fatal(err)
	}
	res, err := r.Reconciler.Reconcile(ctx(t), "sale", true)
	if err != nil || kinds(res)[adminapi.DiffContradicts] != 1 || res.Differences[0].Repaired {
		t.Errorf("%+v, %v", res, err)
	}
	if _, err := r.Ends.End(ctx(t), "sale", rig.Operator(), ""); err != nil {
		t.Fatal(err)
	}
	same(r, "sale")
}

// A sale without anything to compare.
func TestSettledSalesAreLeftAlone(t *testing.T) {
	t.Parallel()
	r := rig.New(t, rig.Options{Reconcile: now})
	if _, _, err := r.Activities.Create(ctx(t), rig.Plan("cold", map[string]int{"national": 10}), rig.Operator()); err != nil {
		t.Fatal(err)
	}
	if code, p := r.Call(rig.OperatorToken, http.MethodPost, "/admin/v1/activities/cold/reconcile", nil, nil); code != http.StatusConflict || p.Code != adminapi.CodeNothingToCompare {
		t.Errorf("%d %+v", code, p)
	}
	r.Sell(rig.Plan("lost", map[string]int{"national": 10}))
	if err := r.Redis.Del(ctx(t), r.Prefix+"seckill:activity:{lost:0}").Err(); err != nil {
		t.Fatal(err)
	}
	if code, p := r.Call(rig.OperatorToken, http.MethodPost, "/admin/v1/activities/lost/reconcile", nil, nil); code != http.StatusConflict || p.Code != adminapi.CodeRedisLost {
		t.Errorf("%d %+v", code, p)
	}
	if code, p := r.Call(rig.OperatorToken, http.MethodPost, "/admin/v1/activities/none/reconcile", nil, nil); code != http.StatusNotFound {
		t.Errorf("%d %+v", code, p)
	}
	if code, p := r.Call(rig.ViewerToken, http.MethodPost, "/admin/v1/activities/cold/reconcile", nil, nil); code != http.StatusForbidden {
		t.Errorf("%d %+v", code, p)
	}
}
