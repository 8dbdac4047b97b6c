package activity_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"seckill/pkg/order"
	"seckill/pkg/sale"
	"seckill/pkg/stock"
	"seckill/pkg/testkit"
	"seckill/services/order-worker/internal/activity"
	"seckill/services/order-worker/internal/rig"
)

func short(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	t.Cleanup(cancel)
	return ctx
}

func TestSaleIsMadeWithStockAndLedgerInOneGo(t *testing.T) {
	t.Parallel()
	r := rig.New(t, rig.Options{})
	plan := rig.Plan("sale", map[string]int{"national": 90, "beijing": 10})
	plan.RegionFallback = map[string][]string{"beijing": {"national"}}
	d, existed, err := r.Activities.Create(short(t), plan, rig.Operator())
	if err != nil || existed {
		t.Fatalf("existed %v, %v", existed, err)
	}
	if d.State != "draft" || len(d.Pools) != 2 {
		t.Errorf("%+v", d)
	}
	if n := r.Count("SELECT SUM(available) FROM activity_stock WHERE activity_id = 'sale'"); n != 100 {
		t.Errorf("%d units", n)
	}
	if n := r.Count("SELECT SUM(delta) FROM stock_ledger WHERE activity_id = 'sale' AND account = 'sale'"); n != 100 {
		t.Errorf("the ledger explains %d units", n)
	}
	if n := r.Count("SELECT COUNT(*) FROM operator_audit WHERE action = 'activity.create' AND subject = 'sale' AND actor = 'tess'"); n != 1 {
		t.Errorf("%d audit rows", n)
	}
	// Known to Redis, and cold: 503 for buyers, not 404.
	if _, err := r.Buy("sale", "early", 1); !errors.Is(err, stock.ErrNotWarmed) {
		t.Errorf("buying from a cold sale: %v", err)
	}

	// The same plan in another spelling is the same sale; another plan is a conflict.
	start, end, err := plan.Window()
	if err != nil {
		t.Fatal(err)
	}
	zone := time.FixedZone("", 8*3600)
	plan.StartsAt, plan.EndsAt, plan.PaymentTimeout = start.In(zone).Format(time.RFC3339), end.In(zone).Format(time.RFC3339), "900s"
	if _, existed, err := r.Activities.Create(short(t), plan, rig.Operator()); err != nil || !existed {
		t.Errorf("same plan: existed %v, %v", existed, err)
	}
	plan.Items[0].Pools["beijing"] = 11
	if _, _, err := r.Activities.Create(short(t), plan, rig.Operator()); !errors.Is(err, activity.ErrExists) {
		t.Errorf("other plan: %v", err)
	}
	var wrong sale.Problems
	if _, _, err := r.Activities.Create(short(t), sale.Sale{ID: "x y"}, rig.Operator()); !errors.As(err, &wrong) || len(wrong) < 5 {
		t.Errorf("bad plan: %v", err)
	}
	if n := r.Count("SELECT COUNT(*) FROM operator_audit"); n != 1 {
		t.Errorf("%d audit rows after calls that changed nothing", n)
	}
}

// A window that is over takes no units and makes no sale; the plan of a sale that has been is the same plan
// for ever.
func TestAWindowThatIsOverIsRefused(t *testing.T) {
	t.Parallel()
	r := rig.New(t, rig.Options{})
	if _, err := r.Activities.SetInventory(short(t), "sku", "national", 100, rig.Operator()); err != nil {
		t.Fatal(err)
	}
	plan := rig.Plan("sale", map[string]int{"national": 60})
	over := plan
	over.StartsAt, over.EndsAt = "2025-11-11T20:00:00+08:00", "2025-11-11T21:00:00+08:00"
	refused := func(what string, err error) {
		t.Helper()
		var wrong sale.Problems
		if !errors.As(err, &wrong) || len(wrong) != 1 || wrong[0].Field != "ends_at" || !strings.Contains(wrong[0].Detail, "is over already") {
			t.Errorf("%s: %v", what, err)
		}
	}
	_, _, err := r.Activities.Create(short(t), over, rig.Operator())
	refused("create", err)
	if _, _, err := r.Activities.Create(short(t), plan, rig.Operator()); err != nil {
		t.Fatal(err)
	}
	_, _, err = r.Activities.Edit(short(t), over, rig.Operator())
	refused("edit", err)
	if n := r.Count("SELECT COUNT(*) FROM activities WHERE ends_at > UTC_TIMESTAMP()"); n != 1 || r.Count("SELECT COUNT(*) FROM activities") != 1 {
		t.Errorf("%d sales that are to come", n)
	}
	if n := r.Count("SELECT on_hand FROM inventory"); n != 40 {
		t.Errorf("%d on hand", n)
	}

	r.Exec("UPDATE activities SET starts_at = '2025-11-11 12:00:00', ends_at = '2025-11-11 13:00:00'")
	if _, existed, err := r.Activities.Create(short(t), over, rig.Operator()); err != nil || !existed {
		t.Errorf("the same plan after its end: existed %v, %v", existed, err)
	}
}

func TestUnitsComeFromTheInventory(t *testing.T) {
	t.Parallel()
	r := rig.New(t, rig.Options{})
	if _, err := r.Activities.SetInventory(short(t), "sku", "national", 100, rig.Operator()); err != nil {
		t.Fatal(err)
	}
	for id, want := range map[string]bool{"first": true, "shadow": true} {
		plan := rig.Plan(id, map[string]int{"national": 60})
		plan.Shadow = id == "shadow"
		if _, _, err := r.Activities.Create(short(t), plan, rig.Operator()); (err == nil) != want {
			t.Fatalf("%s: %v", id, err)
		}
	}
	var short_ activity.ShortageError
	_, _, err := r.Activities.Create(short(t), rig.Plan("second", map[string]int{"national": 41}), rig.Operator())
	if !errors.As(err, &short_) || short_[0].OnHand != 40 || short_[0].Wanted != 41 {
		t.Errorf("too little: %v", err)
	}
	if n := r.Count("SELECT COUNT(*) FROM activities WHERE id = 'second'"); n != 0 {
		t.Error("a refused sale left a row")
	}
	if n := r.Count("SELECT on_hand FROM inventory WHERE sku_id = 'sku' AND pool = 'national'"); n != 40 {
		t.Errorf("%d on hand", n)
	}
	if n := r.Count("SELECT SUM(delta) FROM stock_ledger WHERE account = 'inventory'"); n != 40 {
		t.Errorf("the ledger explains %d of the inventory", n)
	}
	// Twenty sales at once take no unit twice.
	var wg sync.WaitGroup
	var mu sync.Mutex
	made := 0
	for i := range 20 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			_, _, err := r.Activities.Create(short(t), rig.Plan(fmt.Sprintf("many-%d", i), map[string]int{"national": 4}), rig.Operator())
			if err == nil {
				mu.Lock()
				made++
				mu.Unlock()
			} else if !errors.As(err, new(activity.ShortageError)) {
				t.Error(err)
			}
		}()
	}
	wg.Wait()
	if n := r.Count("SELECT on_hand FROM inventory"); made != 10 || n != 0 {
		t.Errorf("%d sales of 4 out of 40, %d left", made, n)
	}
}

// O05, R9: ten warm-ups at once, before and during the sale, while buyers go on buying.
func TestO05_WarmingAgainWhileSelling(t *testing.T) {
	t.Parallel()
	r := rig.New(t, rig.Options{})
	const units = 100
	plan := rig.Plan("sale", map[string]int{"national": units})
	plan.Buckets = 4
	if _, _, err := r.Activities.Create(short(t), plan, rig.Operator()); err != nil {
		t.Fatal(err)
	}
	ten := func() (first int) {
		var wg sync.WaitGroup
		var mu sync.Mutex
		for range 10 {
			wg.Add(1)
			go func() {
				defer wg.Done()
				res, err := r.Activities.Warm(short(t), "sale", rig.Operator())
				if err != nil {
					t.Error(err)
				}
				if !res.Already {
					mu.Lock()
					first++
					mu.Unlock()
				}
			}()
		}
		wg.Wait()
		return first
	}
	if n := ten(); n != 1 {
		t.Errorf("%d of ten first warm-ups say that they did it", n)
	}
	if n := r.Level("sale", "national"); n != units {
		t.Fatalf("%d units after ten warm-ups", n)
	}
	if n := r.Count("SELECT COUNT(*) FROM operator_audit WHERE action = 'activity.warm'"); n != 1 {
		t.Errorf("%d audit rows", n)
	}

	// A second worker's loop, which knows nothing yet, is a restart.
	stopLoop := r.Go(r.Activities.Run)
	sold := make(chan int)
	go func() {
		n := 0
		for i := range 3 * units {
			switch _, err := r.Buy("sale", fmt.Sprintf("user-%d", i), 1); {
			case err == nil:
				n++
			case !errors.Is(err, stock.ErrSoldOut):
				t.Error(err)
			}
		}
		sold <- n
	}()
	for range 3 {
		if n := ten(); n != 0 {
			t.Errorf("%d warm-ups of a warm sale did something", n)
		}
	}
	n := <-sold
	stopLoop()
	if left := r.Level("sale", "national"); n > units || n+left != units {
		t.Errorf("%d sold and %d left of %d", n, left, units)
	}

	// Another sale is warmed beside it without touching it.
	before := r.Level("sale", "national")
	r.Sell(rig.Plan("other", map[string]int{"national": 7}))
	if r.Level("sale", "national") != before || r.Level("other", "national") != 7 {
		t.Error("warming a second sale touched the first")
	}
	// Purchase marks survive: the per-user limit still counts.
	if _, err := r.Buy("sale", "user-0", 5); err == nil {
		t.Error("a user got more than his limit after the warm-ups")
	}
}

// O05: the stock that a sale is warmed with is written once, even if Redis lost a key later.
func TestWarmSaleIsNeverStockedAgain(t *testing.T) {
	t.Parallel()
	r := rig.New(t, rig.Options{})
	r.Sell(rig.Plan("sale", map[string]int{"national": 10}))
	r.MustBuy("sale", "u1")
	ctx := short(t)
	keys, err := r.Redis.Keys(ctx, r.Prefix+"seckill:stock:*").Result()
	if err != nil || len(keys) != 1 {
		t.Fatalf("%v %v", keys, err)
	}
	if err := r.Redis.Del(ctx, keys...).Err(); err != nil {
		t.Fatal(err)
	}
	if res, err := r.Activities.Warm(ctx, "sale", rig.Operator()); err != nil || !res.Already {
		t.Errorf("%+v %v", res, err)
	}
	if n, err := r.Redis.Exists(ctx, keys...).Result(); err != nil || n != 0 {
		t.Error("warming again made the stock key again: units that are sold would be sold twice")
	}
	if _, err := r.Buy("sale", "u2", 1); !errors.Is(err, stock.ErrNotWarmed) {
		t.Errorf("buying without a stock key: %v", err)
	}
}

func TestLostHashIsAnnouncedAgain(t *testing.T) {
	t.Parallel()
	r := rig.New(t, rig.Options{})
	r.Sell(rig.Plan("sale", map[string]int{"national": 10}))
	ctx := short(t)
	if err := r.Redis.Del(ctx, r.Prefix+"seckill:activity:{sale:0}").Err(); err != nil {
		t.Fatal(err)
	}
	if _, err := r.Stock.Activity(ctx, "sale"); !errors.Is(err, stock.ErrActivityNotFound) {
		t.Fatalf("the hash is still there: %v", err)
	}
	r.Go(r.Activities.Run)
	testkit.Eventually(t, time.Minute, func() error {
		a, err := r.Stock.Activity(ctx, "sale")
		if err != nil {
			return err
		}
		if a.Warm != 0 || a.Opened {
			return fmt.Errorf("announced as %+v", a)
		}
		return nil
	})
	if res, err := r.Activities.Warm(ctx, "sale", rig.Operator()); err != nil || !res.Already || res.Opened != 0 {
		t.Errorf("warmed again: %+v %v", res, err)
	}
}

func TestPauseReachesEveryBucketAndSurvivesALostHash(t *testing.T) {
	t.Parallel()
	r := rig.New(t, rig.Options{})
	plan := rig.Plan("sale", map[string]int{"national": 100})
	plan.Buckets = 8
	r.Sell(plan)
	ctx := short(t)
	if changed, err := r.Activities.SetPaused(ctx, "sale", true, rig.Operator()); err != nil || !changed {
		t.Fatalf("%v %v", changed, err)
	}
	buckets := map[int]bool{}
	for i := 0; len(buckets) < 8; i++ {
		user := fmt.Sprintf("u%d", i)
		buckets[order.Bucket(user, 8)] = true
		if _, err := r.Buy("sale", user, 1); !errors.Is(err, stock.ErrPaused) {
			t.Fatalf("bucket %d sells while paused: %v", order.Bucket(user, 8), err)
		}
	}
	if changed, err := r.Activities.SetPaused(ctx, "sale", true, rig.Operator()); err != nil || changed {
		t.Errorf("paused twice: %v %v", changed, err)
	}
	// A bucket that missed the news hears it from the loop of whichever worker starts next.
	if err := r.Redis.HSet(ctx, r.Prefix+"seckill:activity:{sale:5}", "paused", "0").Err(); err != nil {
		t.Fatal(err)
	}
	stop := r.Go(r.Activities.Run)
	testkit.Eventually(t, time.Minute, func() error {
		v, err := r.Redis.HGet(ctx, r.Prefix+"seckill:activity:{sale:5}", "paused").Result()
		if err == nil && v != "1" {
			err = fmt.Errorf("paused is %s", v)
		}
		return err
	})
	stop()
	if _, err := r.Activities.SetPaused(ctx, "sale", false, rig.Operator()); err != nil {
		t.Fatal(err)
	}
	r.MustBuy("sale", "u0")
	// A bucket whose hash is lost sells nothing anyhow: the others hear it, and that is no error.
	if err := r.Redis.Del(ctx, r.Prefix+"seckill:activity:{sale:5}").Err(); err != nil {
		t.Fatal(err)
	}
	for paused, want := range map[bool]string{true: "1", false: "0"} {
		if changed, err := r.Activities.SetPaused(ctx, "sale", paused, rig.Operator()); err != nil {
			t.Errorf("with a bucket lost: %v %v", changed, err)
		}
		for b := range 8 {
			if v, err := r.Redis.HGet(ctx, fmt.Sprintf("%sseckill:activity:{sale:%d}", r.Prefix, b), "paused").Result(); b != 5 && (err != nil || v != want) {
				t.Errorf("bucket %d: paused is %s (%v), want %s", b, v, err, want)
			}
		}
	}
	if n := r.Count("SELECT COUNT(*) FROM operator_audit WHERE action IN ('activity.pause', 'activity.resume')"); n < 3 {
		t.Errorf("%d audit rows", n)
	}
	for paused, verb := range map[bool]string{true: "pause ", false: "resume "} {
		if _, err := r.Activities.SetPaused(ctx, "nosuch", paused, rig.Operator()); !errors.Is(err, activity.ErrNotFound) || !strings.HasPrefix(err.Error(), verb) {
			t.Error(err)
		}
	}
}
