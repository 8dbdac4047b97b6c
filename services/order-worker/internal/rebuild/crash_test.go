//go:build failpoints

package rebuild_test

import (
	"errors"
	"fmt"
	"testing"

	"seckill/pkg/adminapi"
	"seckill/pkg/failpoint"
	"seckill/pkg/messaging"
	"seckill/pkg/order"
	"seckill/pkg/stock"
	"seckill/pkg/testkit"
	"seckill/services/order-worker/internal/rig"
	"seckill/services/order-worker/internal/store"
)

// R10: a rebuild breaks off at every step, and another worker, which knows nothing but the two stores, goes
// on. Until the sale is complete it sells nothing. Not parallel: fail points belong to the process.
func TestR10_BrokenOffAtEveryStep(t *testing.T) {
	r := rig.New(t, rig.Options{})
	plan := rig.Plan("sale", map[string]int{"national": 30})
	plan.Buckets = 2
	r.Sell(plan)
	consumeAll(r)
	user := 0
	units := 30
	for _, point := range []string{
		"rebuild.pause", "rebuild.drain", "rebuild.close", "rebuild.records", "rebuild.before_commit", "rebuild.write",
		"rebuild.caught_up", "rebuild.open", "rebuild.resumed",
	} {
		for _, lost := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s lost %v", point, lost), func(t *testing.T) {
				user++
				if _, err := r.Rebuilds.Show(short(t), "sale"); err == nil && r.Level("sale", "national") != units {
					t.Fatalf("%d on sale before, want %d", r.Level("sale", "national"), units)
				}
				o, err := buyWith(r, "sale", fmt.Sprintf("u%d", user), "key")
				if err != nil {
					t.Fatal(err)
				}
				r.Publish(messaging.OrderReserved([]order.Order{o.Order}))
				units--
				if lost {
					forget(t, r)
				}
				disarm, err := failpoint.Arm(point + "@1=error")
				if err != nil {
					t.Fatal(err)
				}
				if _, err := r.Rebuilds.Request(short(t), "sale", rig.Operator()); err != nil {
					t.Fatal(err)
				}
				err = r.Rebuilds.Round(short(t))
				disarm()
				if !errors.Is(err, failpoint.ErrInjected) {
					t.Fatalf("not broken off: %v", err)
				}
				if _, err := r.Buy("sale", "early", 1); err == nil && point != "rebuild.resumed" {
					t.Error("a half-done rebuild sells")
				} else if err == nil {
					units--
				}
				if point == "rebuild.write" || point == "rebuild.caught_up" {
					// The loop would open it; it stays paused.
					a, err := r.Stock.Activity(short(t), "sale")
					if err != nil {
						t.Fatal(err)
					}
					if _, err := r.Activities.Warm(short(t), "sale", rig.Operator()); err != nil {
						t.Fatal(err)
					}
					if _, err := r.Buy("sale", "early", 1); !errors.Is(err, stock.ErrPaused) {
						t.Errorf("%v in %+v", err, a)
					}
				}
				if err := r.Rebuilds.Round(short(t)); err != nil {
					t.Fatal(err)
				}
				j := show(t, r)
				if j.State != store.RebuildDone || j.Attempts != 2 {
					t.Fatalf("%+v", j)
				}
				if again, err := buyWith(r, "sale", o.User, "key"); err != nil || !again.Replay || again.ID != o.ID {
					t.Errorf("%+v, %v", again, err)
				}
				if n := r.Level("sale", "national"); n != units {
					t.Errorf("%d on sale, want %d", n, units)
				}
				testkit.Eventually(t, within, func() error {
					if n := r.Count("SELECT COUNT(*) FROM orders WHERE status = 'pending' AND user_id LIKE 'u%'"); n != user {
						return fmt.Errorf("%d orders of %d", n, user)
					}
					return nil
				})
			})
		}
	}
	if j := show(t, r); j.State != adminapi.RebuildDone {
		t.Errorf("%+v", j)
	}
}
