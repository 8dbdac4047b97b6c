//go:build failpoints

package activity_test

import (
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"seckill/pkg/failpoint"
	"seckill/pkg/stock"
	"seckill/pkg/testkit"
	"seckill/services/order-worker/internal/rig"
)

// R9: a warm-up breaks off between any two of its steps; what goes on knows nothing but the two
// stores. Until then the sale sells nothing, and afterwards it has its units once. Not parallel:
// fail points belong to the process.
func TestR9_WarmingBrokenOffAtEveryStep(t *testing.T) {
	r := rig.New(t, rig.Options{})
	n := 0
	for _, point := range []string{"warm.after_prepare", "warm.after_win"} {
		for _, again := range []string{"operator", "ten operators", "loop"} {
			t.Run(point+" then "+again, func(t *testing.T) {
				n++
				id := fmt.Sprintf("sale-%d", n)
				plan := rig.Plan(id, map[string]int{"national": 41})
				plan.Buckets = 4
				if _, _, err := r.Activities.Create(short(t), plan, rig.Operator()); err != nil {
					t.Fatal(err)
				}
				disarm, err := failpoint.Arm(point + "@1=error")
				if err != nil {
					t.Fatal(err)
				}
				_, err = r.Activities.Warm(short(t), id, rig.Operator())
				disarm()
				if !errors.Is(err, failpoint.ErrInjected) {
					t.Fatalf("not broken off: %v", err)
				}
				if _, err := r.Buy(id, "early", 1); !errors.Is(err, stock.ErrNotWarmed) {
					t.Errorf("a half-done warm-up sells: %v", err)
				}
				switch again {
				case "operator":
					res, err := r.Activities.Warm(short(t), id, rig.Operator())
					if err != nil || res.Already != (point == "warm.after_win") || res.Opened != 4 {
						t.Errorf("%+v %v", res, err)
					}
				case "ten operators":
					var wg sync.WaitGroup
					for range 10 {
						wg.Add(1)
						go func() {
							defer wg.Done()
							if _, err := r.Activities.Warm(short(t), id, rig.Operator()); err != nil {
								t.Error(err)
							}
						}()
					}
					wg.Wait()
				case "loop":
					if point == "warm.after_prepare" {
						return // nobody has won: that takes an operator, or the scheduler
					}
					defer r.Go(r.Activities.Run)()
					testkit.Eventually(t, time.Minute, func() error {
						_, err := r.Buy(id, "first", 1)
						return err
					})
				}
				left := r.Level(id, "national")
				if want := 41; again == "loop" && left != want-1 || again != "loop" && left != want {
					t.Errorf("%d units after warming", left)
				}
			})
		}
	}
}
