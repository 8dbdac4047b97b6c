package activity_test

import (
	"fmt"
	"net/http"
	"testing"

	"seckill/pkg/adminapi"
	"seckill/services/order-worker/internal/activity"
	"seckill/services/order-worker/internal/rig"
)

func TestDraftIsDeletedAndItsUnitsGoBack(t *testing.T) {
	t.Parallel()
	r := rig.New(t, rig.Options{})
	ctx := short(t)
	if _, err := r.Activities.SetInventory(ctx, "sku", "national", 100, rig.Operator()); err != nil {
		t.Fatal(err)
	}
	plan := rig.Plan("sale", map[string]int{"national": 60, "beijing": 7})
	plan.Buckets = 2
	d, _, err := r.Activities.Create(ctx, plan, rig.Operator())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := r.Activities.AddStock(ctx, "sale", activity.Addition{Op: "op", SKU: "sku", Pool: "national", Units: 5}, rig.Operator()); err != nil {
		t.Fatal(err)
	}
	if n := r.Count("SELECT on_hand FROM inventory WHERE pool = 'national'"); n != 35 {
		t.Fatalf("%d on hand", n)
	}
	// An attempt to warm it has written its stock, closed.
	a, err := d.Stock()
	if err != nil {
		t.Fatal(err)
	}
	if err := r.Stock.PrepareWarm(ctx, a, 1, map[string]map[string]int{"sku": {"national": 60, "beijing": 7}}); err != nil {
		t.Fatal(err)
	}
	if status, p := r.Call(rig.OperatorToken, http.MethodDelete, "/admin/v1/activities/sale", nil, nil); status != http.StatusOK {
		t.Fatalf("%d %+v", status, p)
	}
	if n := r.Count("SELECT on_hand FROM inventory WHERE pool = 'national'") + 1000*r.Count("SELECT COUNT(*) FROM inventory WHERE pool = 'beijing'"); n != 100 {
		t.Errorf("on hand: %d", n)
	}
	if n := r.Count("SELECT SUM(delta) FROM stock_ledger WHERE activity_id = 'sale' AND account = 'sale'"); n != 0 {
		t.Errorf("the ledger leaves %d units in the sale", n)
	}
	if n := r.Count("SELECT COALESCE(SUM(delta), 0) FROM stock_ledger WHERE account = 'inventory'"); n != 100 {
		t.Errorf("the ledger explains %d units of the inventory", n)
	}
	if left, err := r.Stock.KeysLeft(ctx, a); err != nil || len(left) != 0 {
		t.Errorf("keys left: %v %v", left, err)
	}
	// A loop that had read the draft before announces it afterwards: nothing stays in Redis for ever.
	if err := r.Stock.Announce(ctx, a); err != nil {
		t.Error(err)
	}
	for b := range 2 {
		hash := fmt.Sprintf("%sseckill:activity:{sale:%d}", r.Prefix, b)
		if ttl := r.Redis.TTL(ctx, hash).Val(); ttl == -1 {
			t.Errorf("%s stays", hash)
		}
	}
	if status, _ := r.Call(rig.OperatorToken, http.MethodDelete, "/admin/v1/activities/sale", nil, nil); status != http.StatusNotFound {
		t.Errorf("again: %d", status)
	}
	if status, p := r.Call(rig.OperatorToken, http.MethodPost, "/admin/v1/activities", plan, nil); status != http.StatusConflict || p.Code != adminapi.CodeActivityExists {
		t.Errorf("the id of a deleted sale: %d %+v", status, p)
	}
	r.Sell(rig.Plan("warm", map[string]int{"national": 1}))
	if status, _ := r.Call(rig.OperatorToken, http.MethodDelete, "/admin/v1/activities/warm", nil, nil); status != http.StatusConflict {
		t.Errorf("a warm sale: %d", status)
	}
}
