package stock

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"seckill/pkg/order"
)

type outcome struct {
	Reserved
	err error
}

// together sends reservations in one pipeline, which asks for them in as few calls as it can.
func (b *bench) together(rs ...Reservation) []outcome {
	b.t.Helper()
	items := make([]*item, len(rs))
	for i := range rs {
		a := &ask{r: &rs[i]}
		if rs[i].IdemKey != "" {
			a.digest = packDigest(rs[i].IdemDigest)
		}
		items[i] = &item{ask: a, work: 1, done: make(chan struct{})}
	}
	var g gathered
	b.send(items, &g)
	out := make([]outcome, len(rs))
	for i, it := range items {
		<-it.done
		out[i].Reserved, out[i].err = b.outcome(ctxFor(b.t), it.ask)
	}
	return out
}

// One user's refusal, or damage to what is kept of him, never touches another's reservation.
func TestReservationsOfOneCallAreDecidedOneByOne(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	a := newSale("mixed", map[string]int{"beijing": 2, "national": 3})
	b.open(a)
	k := b.keys(a.ID, 0)
	ctx := ctxFor(t)
	bought := b.ask(a, "buyer-again", 1)
	bought.IdemKey, bought.IdemDigest = "k", "d"
	first := b.must(bought) // national: 2 left
	full := b.must(b.ask(a, "full", 2))
	again := b.ask(a, "buyer-again", 1)
	again.IdemKey, again.IdemDigest = "k", "d"
	reused := b.ask(a, "buyer-reuses", 1)
	reused.IdemKey, reused.IdemDigest = "k", "other"
	other := b.ask(a, "buyer-reuses", 1)
	other.IdemKey, other.IdemDigest = "k", "d"
	b.release(releaseOf(full.Record, order.Cancelled)) // and so "full" holds nothing; national: 2
	hurtLimit, hurtRecord, hurtKey := b.ask(a, "hurt-limit", 1), b.ask(a, "hurt-record", 1), b.ask(a, "hurt-key", 1)
	hurtKey.IdemKey, hurtKey.IdemDigest = "k", "d"
	for key := range map[string]bool{k.limit("hurt-limit"): true, k.order(hurtRecord.ID): true, k.idem("hurt-key", "k"): true} {
		if err := b.raw.SAdd(ctx, key, "x").Err(); err != nil {
			t.Fatal(err)
		}
	}
	noSKU := b.ask(a, "no-sku", 1)
	noSKU.SKU = "other"
	noPool := b.ask(a, "no-pool", 1)
	noPool.Pools = []string{"nowhere"}
	beijing := func(user string, n int) Reservation {
		r := b.ask(a, user, n)
		r.Region, r.Pools = "beijing", []string{"beijing", "national"}
		return r
	}
	limit := &LimitError{}
	cases := []struct {
		name string
		r    Reservation
		pool string
		want error
	}{
		{"key of an earlier order", again, "national", nil},
		{"limit of the wrong type", hurtLimit, "", ErrCorrupt},
		{"record of the wrong type", hurtRecord, "", ErrCorrupt},
		{"key of the wrong type", hurtKey, "", ErrCorrupt},
		{"more than the limit", b.ask(a, "greedy", 3), "", limit},
		{"negative", b.ask(a, "negative", -5), "", ErrInvalid},
		{"unknown sku", noSKU, "", ErrInvalid},
		{"unknown pool", noPool, "", ErrNotWarmed},
		{"first pool", beijing("b1", 2), "beijing", nil},
		{"fallback", beijing("b2", 1), "national", nil},
		{"last unit", other, "national", nil},
		{"nothing left", b.ask(a, "late", 1), "", ErrSoldOut},
		{"key reused, after what was decided before it", reused, "", ErrKeyReused},
		{"order asked for again", bought, "national", nil},
	}
	rs := make([]Reservation, len(cases))
	for i, c := range cases {
		rs[i] = c.r
	}
	for i, got := range b.together(rs...) {
		c := cases[i]
		switch {
		case c.want == limit && !errors.As(got.err, new(*LimitError)), c.want != limit && !errors.Is(got.err, c.want):
			t.Errorf("%s: error %v, want %v", c.name, got.err, c.want)
		case got.Pool != c.pool:
			t.Errorf("%s: pool %q, want %q", c.name, got.Pool, c.pool)
		}
		if replay := i == 0 || i == len(cases)-1; replay != got.Replay || (replay && got.ID != first.ID) {
			t.Errorf("%s: replay %t of %s", c.name, got.Replay, got.ID)
		}
	}
	if b.stockOf(a, 0, "beijing") != 0 || b.stockOf(a, 0, "national") != 0 || b.held(a, "b1") != 2 || b.outboxOf(a) != 4 {
		t.Errorf("stock %d and %d, held %d, outbox %d", b.stockOf(a, 0, "beijing"), b.stockOf(a, 0, "national"), b.held(a, "b1"), b.outboxOf(a))
	}
}

// Whatever is asked for in one pipeline gets the answers, and leaves the state, that it would get one
// after the other.
func TestTogetherIsLikeOneAfterTheOther(t *testing.T) { // O01 O02 O03
	t.Parallel()
	b := newBench(t)
	rnd := rand.New(rand.NewPCG(1, uint64(time.Now().UnixNano())))
	for round := range 30 {
		alone, crowd := newSale(fmt.Sprintf("alone-%d", round), nil), newSale(fmt.Sprintf("crowd-%d", round), nil)
		for _, a := range []*Activity{alone, crowd} {
			a.PerUserLimit = 3
			a.Items = []Item{{SKU: "sku-1", PriceMinor: 1, Pools: map[string]int{"beijing": 5, "national": 9}}}
			b.open(a)
		}
		n := 1 + rnd.IntN(100)
		one, many := make([]Reservation, n), make([]Reservation, n)
		for i := range n {
			r := Reservation{User: fmt.Sprintf("u%d", rnd.IntN(25)), SKU: "sku-1", Region: "national", Pools: []string{"national"}, Quantity: 1 + rnd.IntN(3)}
			if rnd.IntN(2) == 0 {
				r.Region, r.Pools = "beijing", []string{"beijing", "national"}
			}
			if rnd.IntN(2) == 0 {
				r.IdemKey, r.IdemDigest = fmt.Sprintf("k%d", rnd.IntN(3)), fmt.Sprintf("d%d", r.Quantity)
			}
			one[i], many[i] = r, r
			one[i].ID, many[i].ID = b.ask(alone, r.User, 1).ID, b.ask(crowd, r.User, 1).ID
			if i > 0 && rnd.IntN(10) == 0 { // a retry of the same order
				one[i], many[i] = one[i-1], many[i-1]
			}
		}
		got := b.together(many...)
		for i := range n {
			want, err := b.Reserve(ctxFor(t), one[i])
			if (err == nil) != (got[i].err == nil) || want.Pool != got[i].Pool || want.Replay != got[i].Replay || want.User != got[i].User ||
				want.Quantity != got[i].Quantity || want.IdemKey != got[i].IdemKey || codeOf(err) != codeOf(got[i].err) {
				t.Fatalf("round %d, request %d %+v: together %+v, alone %+v %v", round, i, many[i], got[i], want, err)
			}
		}
		for _, pool := range []string{"beijing", "national"} {
			if x, y := b.stockOf(alone, 0, pool), b.stockOf(crowd, 0, pool); x != y {
				t.Errorf("round %d: %d and %d left in %s", round, x, y, pool)
			}
		}
		for u := range 25 {
			user := fmt.Sprintf("u%d", u)
			if x, y := b.held(alone, user), b.held(crowd, user); x != y {
				t.Errorf("round %d: %s holds %d and %d", round, user, x, y)
			}
		}
		if x, y := b.outboxOf(alone), b.outboxOf(crowd); x != y {
			t.Errorf("round %d: %d and %d in the outbox", round, x, y)
		}
	}
}

// codeOf tells errors apart by what they are, whatever order they speak of.
func codeOf(err error) string {
	for _, e := range []error{ErrSoldOut, ErrInvalid, ErrKeyReused, ErrNotWarmed, ErrCorrupt} {
		if errors.Is(err, e) {
			return e.Error()
		}
	}
	var limit *LimitError
	if errors.As(err, &limit) {
		return fmt.Sprintf("limit with %d orders", len(limit.OrderIDs))
	}
	return ""
}

// What one call decides is bounded, and a user has one request in it at most.
func TestGatheredReservationsAreCutIntoCalls(t *testing.T) {
	t.Parallel()
	id := func(bucket, n int) order.ID {
		return order.ID{Activity: "a", Bucket: bucket, ULID: fmt.Sprintf("01JDXQ7K9W%016d", n)}
	}
	var g gathered
	n := 0
	add := func(bucket int, user string) {
		n++
		g.add(&ask{r: &Reservation{ID: id(bucket, n), User: user, SKU: "s", Pools: []string{"p"}}})
	}
	for i := range 70 {
		add(0, fmt.Sprintf("u%d", i))
	}
	add(0, "u66") // he is in the second call, and so this is in a third
	add(0, "u1")  // nor is it put in front of what came before it
	add(1, "u1")
	var sizes []int
	for _, c := range g.batches {
		sizes = append(sizes, len(c.asks))
	}
	if fmt.Sprint(sizes) != "[32 32 6 2 1]" {
		t.Errorf("calls of %v", sizes)
	}
	if g.reset(); len(g.batches) != 0 {
		t.Error("kept batches")
	}
}

// The script defends itself against a caller that does not keep to that.
func TestOneUserTwiceInOneCallIsRefused(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	a := b.open(newSale("twice", map[string]int{"national": 9}))
	r1, r2, r3 := b.ask(a, "u", 1), b.ask(a, "u", 1), b.ask(a, "v", 1)
	r3.ID = r1.ID
	one := newBatch(r1.ID)
	for _, r := range []*Reservation{&r1, &r2, &r3} {
		one.add(&ask{r: r})
	}
	one.call = b.reserveCall(one)
	if err := b.submit(ctxFor(t), one.call); err != nil {
		t.Fatal(err)
	}
	one.answer()
	got := fmt.Sprint(one.asks[0].reply, one.asks[1].reply, one.asks[2].reply)
	if got != "ok|nationalinvalidinvalid" && got != "ok|national invalid invalid" {
		t.Errorf("answers %q", got)
	}
	if b.stockOf(a, 0, "national") != 8 || b.held(a, "u") != 1 || b.held(a, "v") != 0 {
		t.Error("units taken for a refused request")
	}
}
