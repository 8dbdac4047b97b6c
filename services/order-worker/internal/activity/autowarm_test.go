package activity_test

import (
	"errors"
	"testing"
	"time"

	"seckill/pkg/testkit"
	"seckill/services/order-worker/internal/rig"
)

func TestSalesAreWarmedBeforeTheyOpen(t *testing.T) {
	t.Parallel()
	r := rig.New(t, rig.Options{WarmBefore: 10 * time.Minute})
	now := time.Now().UTC().Truncate(time.Second)
	for id, in := range map[string]time.Duration{"soon": 5 * time.Minute, "later": time.Hour, "past": -time.Minute} {
		plan := rig.Plan(id, map[string]int{"national": 10})
		plan.StartsAt, plan.EndsAt = now.Add(in).Format(time.RFC3339), now.Add(2*time.Hour).Format(time.RFC3339)
		if _, _, err := r.Activities.Create(short(t), plan, rig.Operator()); err != nil {
			t.Fatal(err)
		}
	}
	r.Go(r.Activities.Run)
	testkit.Eventually(t, time.Minute, func() error {
		if n := r.Count("SELECT COUNT(*) FROM activities WHERE id = 'soon' AND state = 'warmed'"); n != 1 {
			return errors.New("the sale that opens soon is cold")
		}
		return nil
	})
	if n := r.Level("soon", "national"); n != 10 {
		t.Errorf("%d units", n)
	}
	if n := r.Count("SELECT COUNT(*) FROM activities WHERE state = 'warmed'"); n != 1 {
		t.Errorf("%d sales are warm", n)
	}
	if n := r.Count("SELECT COUNT(*) FROM operator_audit WHERE action = 'activity.warm' AND actor = 'worker'"); n != 1 {
		t.Errorf("%d audit rows", n)
	}
}

// A sale whose row somebody holds kept all sales behind it cold.
func TestALockedSaleKeepsNoOtherCold(t *testing.T) {
	t.Parallel()
	r := rig.New(t, rig.Options{WarmBefore: 10 * time.Minute})
	now := time.Now().UTC().Truncate(time.Second)
	for _, id := range []string{"a-locked", "b-free"} {
		plan := rig.Plan(id, map[string]int{"national": 10})
		plan.StartsAt = now.Add(5 * time.Minute).Format(time.RFC3339)
		if _, _, err := r.Activities.Create(short(t), plan, rig.Operator()); err != nil {
			t.Fatal(err)
		}
	}
	free := r.LockSale("a-locked")
	r.Go(r.Activities.Run)
	warm := func(id string) {
		t.Helper()
		testkit.Eventually(t, time.Minute, func() error {
			if n := r.Count("SELECT COUNT(*) FROM activities WHERE id = ? AND state = 'warmed'", id); n != 1 {
				return errors.New(id + " is cold")
			}
			return nil
		})
	}
	warm("b-free")
	free()
	warm("a-locked")
}
