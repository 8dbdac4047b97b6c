package relay_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"seckill/pkg/stock"
	"seckill/pkg/testkit"
	"seckill/services/order-worker/internal/relay"
	"seckill/services/order-worker/internal/rig"
)

// One sale's outbox, or its parked set, holds something else than it should. The orders of every other sale are
// published all the same, and the error names what is wrong.
func TestADamagedOutboxDoesNotHoldUpOthers(t *testing.T) { // C1, O09
	t.Parallel()
	for _, key := range []string{"outbox", "parked"} {
		t.Run(key, func(t *testing.T) {
			t.Parallel()
			r := rig.New(t, rig.Options{})
			ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
			defer cancel()
			for _, sale := range []string{"a-damaged", "b-other"} {
				r.Sell(rig.Plan(sale, map[string]int{"national": 5}))
			}
			r.ConsumeOrders()
			if err := r.Redis.Set(ctx, r.Prefix+"seckill:"+key+":{a-damaged:0}", "hello", 0).Err(); err != nil {
				t.Fatal(err)
			}
			r.MustBuy("b-other", "u")
			re, err := relay.New(relay.Config{Age: time.Millisecond}, r.Store, r.Stock, r.Broker, testkit.Logger(t), prometheus.NewRegistry())
			if err != nil {
				t.Fatal(err)
			}
			testkit.Eventually(t, time.Minute, func() error {
				if _, err := re.Walk(ctx); !errors.Is(err, stock.ErrCorrupt) {
					t.Errorf("the damage is not told: %v", err)
				}
				if n := r.Count("SELECT COUNT(*) FROM orders WHERE activity_id = 'b-other'"); n != 1 {
					return fmt.Errorf("%d rows", n)
				}
				return nil
			})
		})
	}
}
