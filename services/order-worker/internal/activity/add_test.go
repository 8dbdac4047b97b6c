package activity_test

import (
	"errors"
	"fmt"
	"net/http"
	"sync"
	"testing"
	"time"

	"seckill/pkg/adminapi"
	"seckill/pkg/stock"
	"seckill/pkg/testkit"
	"seckill/services/order-worker/internal/activity"
	"seckill/services/order-worker/internal/rig"
)

// R6: by operation id, from the inventory, refused after the end.
func TestStockIsAddedToARunningSaleOnce(t *testing.T) {
	t.Parallel()
	r := rig.New(t, rig.Options{})
	if _, err := r.Activities.SetInventory(short(t), "sku", "national", 20, rig.Operator()); err != nil {
		t.Fatal(err)
	}
	plan := rig.Plan("sale", map[string]int{"national": 1})
	plan.Buckets = 3
	r.Sell(plan)
	add := func(in any, want int) (out adminapi.AddStockResult) {
		t.Helper()
		if status, p := r.Call(rig.OperatorToken, http.MethodPost, "/admin/v1/activities/sale/stock", in, &out); status != want {
			t.Errorf("%+v: %d %+v, want %d", in, status, p, want)
		}
		return out
	}
	body := adminapi.AddStockRequest{OpID: "op-1", SKU: "sku", Pool: "national", Quantity: 5}
	if out := add(body, http.StatusOK); out.Already || out.Waiting || out.Allocated != 6 || out.Available != 6 {
		t.Errorf("%+v", out)
	}
	if out := add(body, http.StatusOK); !out.Already || out.Allocated != 6 {
		t.Errorf("again: %+v", out)
	}
	if n := r.Level("sale", "national"); n != 6 {
		t.Errorf("%d units in redis", n)
	}
	other := body
	other.Quantity = 6
	add(other, http.StatusConflict)
	add(adminapi.AddStockRequest{OpID: "op-2", SKU: "sku", Pool: "beijing", Quantity: 1}, http.StatusConflict)
	add(adminapi.AddStockRequest{OpID: "op-2", SKU: "sku", Pool: "national", Quantity: 15}, http.StatusConflict) // 14 on hand
	add(adminapi.AddStockRequest{OpID: "op-2", SKU: "sku", Pool: "national", Quantity: 0}, http.StatusBadRequest)
	add(adminapi.AddStockRequest{OpID: "a b", SKU: "sku", Pool: "national", Quantity: 1}, http.StatusBadRequest)
	if n := r.Count("SELECT on_hand FROM inventory"); n != 14 {
		t.Errorf("%d on hand", n)
	}
	if n := r.Count("SELECT SUM(delta) FROM stock_ledger WHERE activity_id = 'sale' AND account = 'sale'"); n != 6 {
		t.Errorf("the ledger explains %d units", n)
	}
	if n := r.Count("SELECT COUNT(*) FROM operator_audit WHERE action = 'stock.add'") + 10*r.Count("SELECT COUNT(*) FROM compensations"); n != 1 {
		t.Errorf("audit rows and notes: %d", n)
	}
	for i := range 6 {
		if _, err := r.Buy("sale", fmt.Sprintf("u%d", i), 1); err != nil && !errors.Is(err, stock.ErrSoldOut) {
			t.Error(err)
		}
	}
	r.Exec("UPDATE activities SET ends_at = UTC_TIMESTAMP(6) WHERE id = 'sale'")
	add(adminapi.AddStockRequest{OpID: "op-3", SKU: "sku", Pool: "national", Quantity: 1}, http.StatusConflict)
	add(body, http.StatusOK) // what was done stays done
}

// R6: a crash, or a Redis that is away, between the commit and the script. The loop finishes it once.
func TestAdditionThatRedisMissedIsFinishedByTheLoop(t *testing.T) {
	t.Parallel()
	r := rig.New(t, rig.Options{})
	r.Sell(rig.Plan("sale", map[string]int{"national": 10}))
	ctx := short(t)
	hash := r.Prefix + "seckill:activity:{sale:0}"
	if err := r.Redis.HSet(ctx, hash, "open", "0").Err(); err != nil {
		t.Fatal(err)
	}
	add := activity.Addition{Op: "op_1", SKU: "sku", Pool: "national", Units: 5}
	if out, err := r.Activities.AddStock(ctx, "sale", add, rig.Operator()); err != nil || !out.Waiting || out.Allocated != 15 {
		t.Fatalf("%+v %v", out, err)
	}
	if n := r.Count("SELECT COUNT(*) FROM compensations WHERE kind = 'stock_add' AND activity_id = 'sale'"); n != 1 {
		t.Fatalf("%d notes", n)
	}
	if out, err := r.Activities.AddStock(ctx, "sale", add, rig.Operator()); err != nil || !out.Already || !out.Waiting {
		t.Errorf("again: %+v %v", out, err)
	}
	r.Exec("UPDATE compensations SET next_at = UTC_TIMESTAMP(6)")
	r.Go(r.Activities.Run) // opens the bucket again, too
	testkit.Eventually(t, time.Minute, func() error {
		if n := r.Count("SELECT COUNT(*) FROM compensations"); n != 0 {
			return fmt.Errorf("%d notes are left", n)
		}
		return nil
	})
	if n := r.Level("sale", "national"); n != 15 {
		t.Errorf("%d units in redis", n)
	}
	if out, err := r.Activities.AddStock(ctx, "sale", add, rig.Operator()); err != nil || !out.Already || out.Waiting || r.Level("sale", "national") != 15 {
		t.Errorf("afterwards: %+v %v", out, err)
	}
}

// R6, R9: an addition between a warm-up's reading of the amounts and its win is neither lost nor doubled.
func TestAdditionDuringAWarmUpIsInItOnce(t *testing.T) {
	t.Parallel()
	r := rig.New(t, rig.Options{})
	ctx := short(t)
	d, _, err := r.Activities.Create(ctx, rig.Plan("sale", map[string]int{"national": 10}), rig.Operator())
	if err != nil {
		t.Fatal(err)
	}
	a, err := d.Stock()
	if err != nil {
		t.Fatal(err)
	}
	// Another worker's attempt has taken number 1, read 10 units and written them.
	r.Exec("UPDATE activities SET warm_number = 1 WHERE id = 'sale'")
	if err := r.Stock.PrepareWarm(ctx, a, 1, map[string]map[string]int{"sku": {"national": 10}}); err != nil {
		t.Fatal(err)
	}
	if out, err := r.Activities.AddStock(ctx, "sale", activity.Addition{Op: "op", SKU: "sku", Pool: "national", Units: 5}, rig.Operator()); err != nil || out.Waiting {
		t.Fatalf("%+v %v", out, err)
	}
	if n := r.Count("SELECT COUNT(*) FROM activities WHERE id = 'sale' AND warm_number = 1"); n != 0 {
		t.Fatal("the attempt that read too little can still win")
	}
	if _, err := r.Activities.Warm(ctx, "sale", rig.Operator()); err != nil {
		t.Fatal(err)
	}
	if n := r.Level("sale", "national"); n != 15 {
		t.Errorf("%d units in redis, 15 in mysql", n)
	}

	// And all at once.
	if _, _, err := r.Activities.Create(ctx, rig.Plan("busy", map[string]int{"national": 10}), rig.Operator()); err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for i := range 4 {
		wg.Add(2)
		go func() {
			defer wg.Done()
			if _, err := r.Activities.Warm(short(t), "busy", rig.Operator()); err != nil {
				t.Error(err)
			}
		}()
		go func() {
			defer wg.Done()
			add := activity.Addition{Op: fmt.Sprintf("op-%d", i), SKU: "sku", Pool: "national", Units: 3}
			if _, err := r.Activities.AddStock(short(t), "busy", add, rig.Operator()); err != nil {
				t.Error(err)
			}
		}()
	}
	wg.Wait()
	r.Exec("UPDATE compensations SET next_at = UTC_TIMESTAMP(6)")
	r.Go(r.Activities.Run)
	testkit.Eventually(t, time.Minute, func() error {
		if n, left := r.Level("busy", "national"), r.Count("SELECT COUNT(*) FROM compensations"); n != 22 || left != 0 {
			return fmt.Errorf("%d units in redis, %d notes", n, left)
		}
		return nil
	})
}
