package stock_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"seckill/pkg/order"
	"seckill/pkg/stock"
	"seckill/pkg/testkit"
)

// The walks see every record and every counter of the sale, in all its buckets, once, and nothing of
// a sale whose id begins alike.
func TestWalksSeeAllBucketsOfOneSale(t *testing.T) {
	env := testkit.Redis(t)
	const patience = 10 * time.Second // a starved machine is not the subject
	c, err := stock.New(stock.Config{
		Addrs: []string{env.Addr}, DB: env.DB, Prefix: env.Prefix,
		DialTimeout: patience, ReadTimeout: patience, PoolTimeout: patience,
	}, testkit.Logger(t), nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	ids := order.NewIDs()
	made := map[string]bool{}
	for _, sale := range []string{"walk", "walk-2"} {
		a := &stock.Activity{
			ID: sale, Name: sale, StartsAt: time.Now().Add(-time.Minute), EndsAt: time.Now().Add(time.Hour), PerUserLimit: 2,
			PaymentTimeout: time.Minute, Currency: "EUR", Buckets: 3, Items: []stock.Item{{SKU: "s", PriceMinor: 1, Pools: map[string]int{"p": 300}}},
		}
		if err := c.PrepareWarm(ctx, a, 1, map[string]map[string]int{"s": {"p": 300}}); err != nil {
			t.Fatal(err)
		}
		if _, err := c.OpenWarm(ctx, a, 1); err != nil {
			t.Fatal(err)
		}
		for i := range 40 {
			user := fmt.Sprintf("u%d", i)
			id, err := ids.New(sale, order.Bucket(user, 3))
			if err != nil {
				t.Fatal(err)
			}
			if _, err := c.Reserve(ctx, stock.Reservation{ID: id, User: user, SKU: "s", Region: "p", Pools: []string{"p"}, Quantity: 1 + i%2}); err != nil {
				t.Fatal(err)
			}
			if sale == "walk" {
				made[id.String()] = true
			}
		}
	}
	seen := map[string]bool{}
	units := 0
	if err := c.EachRecord(ctx, "walk", func(r stock.Record) error {
		if seen[r.ID.String()] || r.Status != order.Reserved {
			t.Errorf("record %s twice or %s", r.ID, r.Status)
		}
		seen[r.ID.String()] = true
		units += r.Quantity
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	if len(seen) != len(made) {
		t.Errorf("saw %d records, made %d", len(seen), len(made))
	}
	for id := range made {
		if !seen[id] {
			t.Errorf("record %s was not seen", id)
		}
	}
	users, held := 0, 0
	if err := c.EachHolding(ctx, "walk", func(h stock.Holding) error {
		users++
		held += h.Units
		if h.Bucket != order.Bucket(h.User, 3) {
			t.Errorf("%s in bucket %d", h.User, h.Bucket)
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	if users != 40 || held != units {
		t.Errorf("%d users hold %d units, want 40 and %d", users, held, units)
	}
	waiting := 0
	for b := range 3 {
		ids, parked, err := c.OutboxIDs(ctx, "walk", b)
		if err != nil || len(parked) != 0 {
			t.Fatal(parked, err)
		}
		for _, id := range ids {
			waiting++
			if !made[id.String()] {
				t.Errorf("outbox names %s", id)
			}
		}
	}
	if waiting != 40 {
		t.Errorf("outbox holds %d", waiting)
	}
}
