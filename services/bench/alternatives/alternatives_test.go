package alternatives_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"seckill/pkg/testkit"
	"seckill/services/bench/alternatives"
)

// One process of each design sells exactly what there is, and one order to a user: they are honest
// opponents.
func TestEachAlternativeSellsExactlyItsStockFromOneProcess(t *testing.T) {
	const units, buyers = 50, 200
	ctx := t.Context()
	db, err := alternatives.Open(testkit.MySQL(t))
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close() //nolint:errcheck // the test is over
	// No command is sent twice, however late its reply is: a DECR would take a second unit, which nobody gets.
	const patience = 30 * time.Second
	r := redis.NewClient(&redis.Options{
		Addr: testkit.Redis(t).Addr, MaxRetries: -1,
		DialTimeout: patience, ReadTimeout: patience, WriteTimeout: patience, PoolTimeout: patience,
	})
	defer r.Close() //nolint:errcheck // the test is over
	for _, kind := range []string{"mutex", "database", "decr", "lua"} {
		t.Run(kind, func(t *testing.T) {
			id := fmt.Sprintf("%s-%d", kind, time.Now().UnixNano()%1e12)
			if err := alternatives.Setup(ctx, db, id, "phone", units); err != nil {
				t.Fatal(err)
			}
			if err := alternatives.SetupRedis(ctx, r, id, "phone", units); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { cleanRedis(t, id) })
			s := seller(ctx, t, kind, alternatives.Database{DB: db}, r)
			var sold, soldOut, limited atomic.Int64
			var wg sync.WaitGroup
			for i := range buyers {
				wg.Go(func() {
					for again := range 2 {
						o := alternatives.Order{ID: fmt.Sprintf("%s-%d-%d", kind, i, again), Activity: id, User: fmt.Sprint(i), SKU: "phone", Quantity: 1}
						switch err := s.Sell(ctx, o); {
						case err == nil:
							sold.Add(1)
						case errors.Is(err, alternatives.ErrSoldOut):
							soldOut.Add(1)
						case errors.Is(err, alternatives.ErrLimit):
							limited.Add(1)
						default:
							t.Error(err)
						}
					}
				})
			}
			wg.Wait()
			// DECR takes units before it knows that there are too few, so that somebody of the crowd may have been
			// refused a unit that was there: it is left to whoever comes later.
			for late := 0; ; late++ {
				err := s.Sell(ctx, alternatives.Order{ID: fmt.Sprintf("%s-late-%d", kind, late), Activity: id, User: fmt.Sprintf("late-%d", late), SKU: "phone", Quantity: 1})
				if errors.Is(err, alternatives.ErrSoldOut) {
					break
				}
				if err != nil {
					t.Fatal(err)
				}
				sold.Add(1)
			}
			rows, _, err := alternatives.Sold(ctx, db, id)
			if err != nil {
				t.Fatal(err)
			}
			if sold.Load() != units || int64(rows) != units {
				t.Fatalf("sold %d, rows %d, sold out %d, limited %d", sold.Load(), rows, soldOut.Load(), limited.Load())
			}
		})
	}
}

func cleanRedis(t *testing.T, activity string) {
	t.Helper()
	r := redis.NewClient(&redis.Options{Addr: testkit.Redis(t).Addr})
	defer r.Close() //nolint:errcheck // the test is over
	ctx := context.Background()
	it := r.Scan(ctx, 0, "alternative:{"+activity+"}:*", 1000).Iterator()
	for it.Next(ctx) {
		if err := r.Unlink(ctx, it.Val()).Err(); err != nil {
			t.Error(err)
		}
	}
	if err := it.Err(); err != nil {
		t.Error(err)
	}
}

func seller(ctx context.Context, t *testing.T, kind string, d alternatives.Database, r *redis.Client) alternatives.Seller {
	t.Helper()
	switch kind {
	case "mutex":
		m, err := alternatives.NewMutex(ctx, d.DB)
		if err != nil {
			t.Fatal(err)
		}
		return m
	case "decr":
		return alternatives.Decr{DB: d.DB, Redis: r}
	case "lua":
		return alternatives.Lua{DB: d.DB, Redis: r}
	default:
		return d
	}
}
