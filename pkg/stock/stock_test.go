package stock

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"seckill/pkg/order"
	"seckill/pkg/testkit"
)

func TestMain(m *testing.M) { testkit.VerifyNoLeaks(m) }

// bench is a client with a raw connection beside it, on the shared Redis under an own prefix.
type bench struct {
	*Client
	t   testing.TB
	raw *redis.Client
	ids *order.IDs
}

// patience is how long tests that are not about deadlines wait for Redis: a machine that compiles other
// tests beside this one starves it for longer than a buyer would wait.
const patience = 10 * time.Second

// patient gives a client that patience. A time-out is never tried again, so that one stall longer than
// the default would be an unknown outcome.
func patient(cfg Config) Config {
	cfg.DialTimeout, cfg.ReadTimeout, cfg.PoolTimeout = patience, patience, patience
	return cfg
}

func newBench(t testing.TB) *bench {
	t.Helper()
	env := testkit.Redis(t)
	return benchOn(t, patient(Config{Addrs: []string{env.Addr}, DB: env.DB, Prefix: env.Prefix}))
}

func benchOn(t testing.TB, cfg Config) *bench {
	t.Helper()
	c, err := New(cfg, testkit.Logger(t), nil)
	if err != nil {
		t.Fatal(err)
	}
	raw := redis.NewClient(&redis.Options{
		Addr: cfg.Addrs[0], DB: cfg.DB, Protocol: 2, MaxRetries: -1,
		DialTimeout: patience, ReadTimeout: patience, WriteTimeout: patience, PoolTimeout: patience,
	})
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
		if err := raw.Close(); err != nil {
			t.Error(err)
		}
	})
	return &bench{Client: c, t: t, raw: raw, ids: order.NewIDs()}
}

func ctxFor(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	t.Cleanup(cancel)
	return ctx
}

// newSale describes a sale that is open now: one sku in the pools given.
func newSale(id string, pools map[string]int) *Activity {
	now := time.Now().UTC().Truncate(time.Millisecond)
	return &Activity{
		ID: id, Name: "Sale " + id, StartsAt: now.Add(-time.Hour), EndsAt: now.Add(time.Hour),
		PerUserLimit: 2, PaymentTimeout: 15 * time.Minute, Currency: "CNY", Buckets: 1, Epoch: 1,
		Items:          []Item{{SKU: "sku-1", PriceMinor: 1999, Pools: pools}},
		RegionFallback: map[string][]string{"beijing": {"national"}},
	}
}

func amounts(a *Activity) map[string]map[string]int {
	out := make(map[string]map[string]int)
	for _, it := range a.Items {
		out[it.SKU] = it.Pools
	}
	return out
}

// open announces, warms and opens a sale.
func (b *bench) open(a *Activity) *Activity {
	b.t.Helper()
	ctx := ctxFor(b.t)
	if err := b.Announce(ctx, a); err != nil {
		b.t.Fatal(err)
	}
	if err := b.PrepareWarm(ctx, a, 1, amounts(a)); err != nil {
		b.t.Fatal(err)
	}
	n, err := b.OpenWarm(ctx, a, 1)
	if err != nil || n != a.buckets() {
		b.t.Fatalf("opened %d buckets: %v", n, err)
	}
	return a
}

// ask makes a reservation of quantity units of sku-1 in pool national.
func (b *bench) ask(a *Activity, user string, quantity int) Reservation {
	b.t.Helper()
	id, err := b.ids.New(a.ID, order.Bucket(user, a.buckets()))
	if err != nil {
		b.t.Fatal(err)
	}
	return Reservation{ID: id, User: user, SKU: "sku-1", Region: "national", Pools: []string{"national"}, Quantity: quantity}
}

func (b *bench) must(r Reservation) Reserved {
	b.t.Helper()
	out, err := b.Reserve(ctxFor(b.t), r)
	if err != nil {
		b.t.Fatal(err)
	}
	return out
}

// stockOf reads what one bucket has; -1 without a key.
func (b *bench) stockOf(a *Activity, bucket int, pool string) int {
	b.t.Helper()
	n, err := b.raw.Get(ctxFor(b.t), b.keys(a.ID, bucket).stock("sku-1", pool)).Int()
	if err == redis.Nil {
		return -1
	}
	if err != nil {
		b.t.Fatal(err)
	}
	return n
}

func (b *bench) held(a *Activity, user string) int {
	b.t.Helper()
	n, err := b.raw.HGet(ctxFor(b.t), b.keys(a.ID, order.Bucket(user, a.buckets())).limit(user), "held").Int()
	if err != nil && err != redis.Nil {
		b.t.Fatal(err)
	}
	return n
}

func (b *bench) outboxOf(a *Activity) int {
	b.t.Helper()
	n := 0
	for i := range a.buckets() {
		s, err := b.OutboxStats(ctxFor(b.t), a.ID, i)
		if err != nil {
			b.t.Fatal(err)
		}
		n += s.Waiting
	}
	return n
}

// dump reads every key of the sale, to show that nothing was written.
func (b *bench) dump(a *Activity) string {
	b.t.Helper()
	ctx := ctxFor(b.t)
	var out strings.Builder
	names := make(map[string]bool)
	var cursor uint64
	for {
		found, next, err := b.raw.Scan(ctx, cursor, b.cfg.Prefix+"*{"+a.ID+":*", 1000).Result()
		if err != nil {
			b.t.Fatal(err)
		}
		for _, k := range found {
			names[k] = true
		}
		if cursor = next; cursor == 0 {
			break
		}
	}
	for _, k := range sorted(names) {
		v, err := b.raw.Dump(ctx, k).Result()
		if err != nil {
			b.t.Fatal(err)
		}
		fmt.Fprintf(&out, "%s %x\n", k, v)
	}
	return out.String()
}

func (b *bench) confirm(to order.Status, ids ...order.ID) []Outcome {
	b.t.Helper()
	cs := make([]Confirmation, len(ids))
	for i, id := range ids {
		cs[i] = Confirmation{ID: id, To: to}
	}
	out, err := b.Confirm(ctxFor(b.t), cs)
	if err != nil {
		b.t.Fatal(err)
	}
	return out
}

func releaseOf(r Record, to order.Status) Release {
	return Release{ID: r.ID, User: r.User, SKU: r.SKU, Pool: r.Pool, Quantity: r.Quantity, To: to, Reason: order.ReasonUserCancelled}
}

func (b *bench) release(rs ...Release) []Outcome {
	b.t.Helper()
	out, err := b.Release(ctxFor(b.t), rs)
	if err != nil {
		b.t.Fatal(err)
	}
	return out
}

func (b *bench) status(id order.ID) order.Status {
	b.t.Helper()
	r, err := b.Order(ctxFor(b.t), id)
	if err != nil {
		b.t.Fatal(err)
	}
	return r.Status
}
