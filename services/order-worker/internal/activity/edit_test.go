package activity_test

import (
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"sync"
	"testing"
	"time"

	"seckill/pkg/adminapi"
	"seckill/pkg/sale"
	"seckill/services/order-worker/internal/activity"
	"seckill/services/order-worker/internal/rig"
)

func TestDraftGetsAnotherPlan(t *testing.T) {
	t.Parallel()
	r := rig.New(t, rig.Options{})
	for pool, n := range map[string]int64{"national": 100, "beijing": 30} {
		if _, err := r.Activities.SetInventory(short(t), "sku", pool, n, rig.Operator()); err != nil {
			t.Fatal(err)
		}
	}
	plan := rig.Plan("sale", map[string]int{"national": 60, "beijing": 10})
	if _, _, err := r.Activities.Create(short(t), plan, rig.Operator()); err != nil {
		t.Fatal(err)
	}
	put := func(plan sale.Sale, want int, changed bool) {
		t.Helper()
		var out adminapi.EditResult
		status, p := r.Call(rig.OperatorToken, http.MethodPut, "/admin/v1/activities/sale", plan, &out)
		if status != want || status == http.StatusOK && out.Changed != changed {
			t.Errorf("%d %+v, changed %v; want %d, %v", status, p, out.Changed, want, changed)
		}
	}
	// holds checks units: of the sale by pool, by the ledger, and what the inventory keeps.
	holds := func(national, beijing, inNational, inBeijing int) {
		t.Helper()
		for pool, want := range map[string][2]int{"national": {national, inNational}, "beijing": {beijing, inBeijing}} {
			if n := r.Count("SELECT COALESCE(SUM(available), 0) FROM activity_stock WHERE pool = ? AND available = allocated", pool); n != want[0] {
				t.Errorf("%d units in %s, want %d", n, pool, want[0])
			}
			if n := r.Count("SELECT SUM(delta) FROM stock_ledger WHERE account = 'sale' AND pool = ?", pool); n != want[0] {
				t.Errorf("the ledger explains %d units in %s, want %d", n, pool, want[0])
			}
			if n := r.Count("SELECT on_hand FROM inventory WHERE pool = ?", pool); n != want[1] {
				t.Errorf("%d on hand in %s, want %d", n, pool, want[1])
			}
			if n := r.Count("SELECT SUM(delta) FROM stock_ledger WHERE account = 'inventory' AND pool = ?", pool); n != want[1] {
				t.Errorf("the ledger explains %d on hand in %s, want %d", n, pool, want[1])
			}
		}
	}
	audits := func(want int) {
		t.Helper()
		if n := r.Count("SELECT COUNT(*) FROM operator_audit WHERE action = 'activity.edit'"); n != want {
			t.Errorf("%d audit rows, want %d", n, want)
		}
	}
	put(plan, http.StatusOK, false)
	plan.Name, plan.Items[0].Pools["national"], plan.Items[0].PriceMinor = "Another name", 80, 1499
	put(plan, http.StatusOK, true)
	put(plan, http.StatusOK, false)
	holds(80, 10, 20, 20)
	audits(1)
	d, err := r.Activities.Load(short(t), "sale")
	if err != nil || d.Name != "Another name" || d.Items[0].PriceMinor != 1499 || d.Epoch != 1 {
		t.Errorf("%+v, %v", d, err)
	}
	if a, err := r.Activities.InRedis(short(t), "sale"); err != nil || a.Name != "Another name" || a.Items[0].PriceMinor != 1499 {
		t.Errorf("in redis: %+v, %v", a, err)
	}
	// Too much of one pool changes nothing at all.
	plan.Items[0].Pools = map[string]int{"national": 50, "beijing": 31}
	put(plan, http.StatusConflict, false)
	holds(80, 10, 20, 20)
	// Fewer units, and a pool that goes and comes back.
	plan.Items[0].Pools = map[string]int{"national": 5}
	put(plan, http.StatusOK, true)
	holds(5, 0, 95, 30)
	plan.Items[0].Pools = map[string]int{"national": 5, "beijing": 7}
	put(plan, http.StatusOK, true)
	holds(5, 7, 95, 23)
	// What was added by hand stays on top of the plan, and cannot be planned away.
	if _, err := r.Activities.AddStock(short(t), "sale", activity.Addition{Op: "op", SKU: "sku", Pool: "beijing", Units: 3}, rig.Operator()); err != nil {
		t.Fatal(err)
	}
	put(plan, http.StatusOK, false)
	plan.Items[0].Pools["beijing"] = 8
	put(plan, http.StatusOK, true)
	holds(5, 11, 95, 19)
	plan.Items[0].Pools = map[string]int{"national": 5}
	put(plan, http.StatusConflict, false)
	plan.Items[0].Pools = map[string]int{"national": 5, "beijing": 8}
	// What is wrong, and what is not a draft any more.
	other := plan
	other.PerUserLimit = 0
	put(other, http.StatusBadRequest, false)
	other = plan
	other.ID = "other"
	put(other, http.StatusBadRequest, false)
	if status, _ := r.Call(rig.OperatorToken, http.MethodPut, "/admin/v1/activities/other", other, nil); status != http.StatusNotFound {
		t.Errorf("a sale that is not there: %d", status)
	}
	if status, _ := r.Call(rig.ViewerToken, http.MethodPut, "/admin/v1/activities/sale", plan, nil); status != http.StatusForbidden {
		t.Errorf("a viewer: %d", status)
	}
	audits(4)
	if _, err := r.Activities.Warm(short(t), "sale", rig.Operator()); err != nil {
		t.Fatal(err)
	}
	put(plan, http.StatusConflict, false)
	if n, m := r.Level("sale", "national"), r.Level("sale", "beijing"); n != 5 || m != 11 {
		t.Errorf("%d and %d on sale", n, m)
	}
	if got := d.Plan(); got.Items[0].Pools["national"] != 80 {
		t.Errorf("%+v, %v", got, err)
	}
}

// Units that did not come out of the inventory do not go into it, and a rehearsal's never do.
func TestEditReturnsOnlyWhatCameFromTheInventory(t *testing.T) {
	t.Parallel()
	r := rig.New(t, rig.Options{})
	plan := rig.Plan("sale", map[string]int{"national": 50})
	shadow := rig.Plan("shadow", map[string]int{"national": 50})
	shadow.Shadow = true
	for _, p := range []sale.Sale{plan, shadow} {
		if _, _, err := r.Activities.Create(short(t), p, rig.Operator()); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := r.Activities.SetInventory(short(t), "sku", "national", 30, rig.Operator()); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ units, onHand int }{{60, 20}, {45, 30}, {10, 30}} {
		for _, p := range []sale.Sale{plan, shadow} {
			p.Items = []sale.Item{{SKU: "sku", PriceMinor: 1999, Pools: map[string]int{"national": c.units}}}
			p.Shadow = false // not the plan's to say
			if _, changed, err := r.Activities.Edit(short(t), p, rig.Operator()); err != nil || !changed {
				t.Fatalf("%v, %v", changed, err)
			}
		}
		if n := r.Count("SELECT on_hand FROM inventory"); n != c.onHand {
			t.Errorf("%d units: %d on hand, want %d", c.units, n, c.onHand)
		}
	}
	if n := r.Count("SELECT COUNT(*) FROM activities WHERE shadow = 1"); n != 1 {
		t.Errorf("%d rehearsals", n)
	}
	if err := errors.Join(r.Activities.Delete(short(t), "sale", rig.Operator()), r.Activities.Delete(short(t), "shadow", rig.Operator())); err != nil {
		t.Fatal(err)
	}
	if n := r.Count("SELECT on_hand FROM inventory"); n != 30 {
		t.Errorf("%d on hand after the drafts were deleted", n)
	}
	if n := r.Count("SELECT SUM(delta) FROM stock_ledger WHERE account = 'sale'"); n != 0 {
		t.Errorf("the ledger holds %d units of sales that are gone", n)
	}
}

// Buckets that are gone leave nothing behind, and who may buy may buy in his new bucket.
func TestEditMovesWhatLiesInBuckets(t *testing.T) {
	t.Parallel()
	r := rig.New(t, rig.Options{})
	plan := rig.Plan("sale", map[string]int{"national": 40, "beijing": 4})
	plan.Buckets, plan.Qualification = 8, "list"
	d, _, err := r.Activities.Create(short(t), plan, rig.Operator())
	if err != nil {
		t.Fatal(err)
	}
	users := make([]string, 20)
	for i := range users {
		users[i] = fmt.Sprintf("u%d", i)
	}
	if _, err := r.Activities.Qualify(short(t), "sale", users, rig.Operator()); err != nil {
		t.Fatal(err)
	}
	// A warm-up that died half-way has written all buckets, closed.
	a, err := d.Stock()
	if err != nil {
		t.Fatal(err)
	}
	r.Exec("UPDATE activities SET warm_number = 1 WHERE id = 'sale'")
	if err := r.Stock.PrepareWarm(short(t), a, 1, map[string]map[string]int{"sku": {"national": 40, "beijing": 4}}); err != nil {
		t.Fatal(err)
	}
	plan.Buckets, plan.Name = 2, "Smaller"
	plan.Items[0].Pools = map[string]int{"national": 30}
	if _, _, err := r.Activities.Edit(short(t), plan, rig.Operator()); err != nil {
		t.Fatal(err)
	}
	keys, err := r.Redis.Keys(short(t), r.Prefix+"*").Result()
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]bool{}
	for b := range 2 {
		want[fmt.Sprintf("%sseckill:activity:{sale:%d}", r.Prefix, b)] = true
		want[fmt.Sprintf("%sseckill:stock:{sale:%d}:sku:national", r.Prefix, b)] = true
	}
	quals := 0
	for _, k := range keys {
		if len(k) > len(r.Prefix)+20 && k[len(r.Prefix):len(r.Prefix)+20] == "seckill:user:qualify" {
			quals++
		} else if !want[k] {
			t.Errorf("left behind: %s", k)
		}
		delete(want, k)
	}
	if quals != len(users) || len(want) != 0 {
		t.Errorf("%d qualifications, missing %v", quals, slices.Collect(maps.Keys(want)))
	}
	if now, err := r.Activities.InRedis(short(t), "sale"); err != nil || now.Name != "Smaller" || now.Opened {
		t.Errorf("%+v, %v", now, err)
	}
	if _, err := r.Activities.Warm(short(t), "sale", rig.Operator()); err != nil {
		t.Fatal(err)
	}
	for _, u := range users {
		r.MustBuy("sale", u)
	}
	if n := r.Level("sale", "national"); n != 10 {
		t.Errorf("%d on sale", n)
	}
}

// R9: an edit and a warm-up at once. Whoever is first, the sale sells one plan, and all of it.
func TestEditRacesAWarmUp(t *testing.T) {
	t.Parallel()
	r := rig.New(t, rig.Options{})
	edited := 0
	for i := range 12 {
		id := fmt.Sprintf("sale-%d", i)
		plan := rig.Plan(id, map[string]int{"national": 30, "beijing": 3})
		plan.Buckets = 3
		if _, _, err := r.Activities.Create(short(t), plan, rig.Operator()); err != nil {
			t.Fatal(err)
		}
		plan.Buckets, plan.Name = 2, "Edited"
		plan.Items = []sale.Item{{SKU: "sku", PriceMinor: 100, Pools: map[string]int{"national": 7}}}
		var wg sync.WaitGroup
		wg.Go(func() {
			time.Sleep(time.Duration(i) * time.Millisecond)
			if _, _, err := r.Activities.Edit(short(t), plan, rig.Operator()); err != nil && !errors.Is(err, activity.ErrState) {
				t.Error(err)
			}
		})
		for range 2 {
			wg.Go(func() {
				if _, err := r.Activities.Warm(short(t), id, rig.Operator()); err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		d, err := r.Activities.Load(short(t), id)
		if err != nil {
			t.Fatal(err)
		}
		a, err := r.Activities.InRedis(short(t), id)
		if err != nil {
			t.Fatal(err)
		}
		if a.Name != d.Name || a.Buckets != d.Buckets || !a.Opened || a.Items[0].PriceMinor != d.Items[0].PriceMinor || len(a.Items[0].Pools) != len(d.Pools) {
			t.Errorf("%s: %+v in redis, %+v in mysql", id, a, d)
		}
		levels, err := r.Stock.Levels(short(t), &a)
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range d.Pools {
			if n := levels[p.SKU][p.Pool]; int64(n) != p.Available {
				t.Errorf("%s: %d of %s on sale, %d in mysql", id, n, p.Pool, p.Available)
			}
		}
		if d.Name == "Edited" {
			edited++
		}
	}
	t.Logf("%d of 12 edits came before the warm-up", edited)
}
