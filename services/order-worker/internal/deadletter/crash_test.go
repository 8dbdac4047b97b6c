//go:build failpoints

package deadletter_test

import (
	"errors"
	"fmt"
	"testing"

	"seckill/pkg/adminapi"
	"seckill/pkg/failpoint"
	"seckill/pkg/messaging"
	"seckill/pkg/testkit"
	"seckill/services/order-worker/internal/rig"
)

// O20 b, C11: the replay breaks off right after its claim, and right after its publish; the drain
// right after its commit. What goes on afterwards knows nothing but MySQL, as after a kill -9. Not
// parallel: fail points belong to the process.
func TestO20b_BrokenOffAtEveryStep(t *testing.T) {
	for _, point := range []string{"deadletter.after_insert", "replay.after_claim", "replay.after_publish"} {
		t.Run(point, func(t *testing.T) {
			r := rig.New(t, rig.Options{})
			r.Sell(rig.Plan("sale", map[string]int{"national": 20}))
			orders := sold(r, 10)
			disarm, err := failpoint.Arm(point + "@1=error")
			if err != nil {
				t.Fatal(err)
			}
			defer disarm()
			fail := r.Consume(messaging.QueueOrders, failing(messaging.ClassAttemptsExhausted))
			r.ConsumeDead()
			r.Publish(messaging.OrderReserved(orders), broken("broken"))
			for _, o := range orders {
				r.Becomes(o.ID.String(), "open")
			}
			r.Becomes("broken", "open")
			testkit.Eventually(t, within, func() error {
				if out, parked := waiting(r); out != 0 || parked != 10 {
					return fmt.Errorf("%d in the outbox, %d parked", out, parked)
				}
				return nil
			})
			fail()
			r.ConsumeOrders()
			r.Go(r.Letters.Run)
			j := replay(r, all())
			if j.Failed != 0 || j.Sent+j.Skipped != 11 {
				t.Errorf("%+v", j)
			}
			for _, o := range orders {
				r.Becomes(o.ID.String(), "resolved")
			}
			r.Becomes("broken", "open")
			if n := r.Count("SELECT COUNT(*) FROM orders"); n != 10 {
				t.Errorf("%d rows", n)
			}
			testkit.Eventually(t, within, func() error {
				if out, parked := waiting(r); out+parked != 0 {
					return errors.New("still waiting in redis")
				}
				return nil
			})
			consistent(r, 20, 10)
			if later := replay(r, adminapi.LetterSelection{Filter: &adminapi.LetterFilter{ActivityID: "sale"}}); later.Matched != 0 {
				t.Errorf("a later replay: %+v", later)
			}
		})
	}
}
