package stock

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"seckill/pkg/order"
)

func sorted(m map[string]bool) []string { return slices.Sorted(maps.Keys(m)) }

func TestReserveFreezesWhatTheOrderIs(t *testing.T) { // R17
	t.Parallel()
	b := newBench(t)
	a := newSale("spring-sale", map[string]int{"beijing": 1, "national": 5})
	a.Epoch = 7
	b.open(a)
	r := b.ask(a, "u1", 1)
	r.Region, r.Pools = "beijing", a.PoolsFor("sku-1", "beijing")
	r.IdemKey, r.IdemDigest = "k-1", strings.Repeat("ab", 32)
	before := time.Now().Add(-time.Second)
	got := b.must(r)
	if got.Replay || got.Status != order.Reserved || got.Pool != "beijing" || got.Region != "beijing" || got.Quantity != 1 ||
		got.UnitPriceMinor != 1999 || got.Currency != "CNY" || got.Epoch != 7 || got.PaymentTimeout != 15*time.Minute ||
		got.IdemKey != "k-1" || got.IdemDigest != r.IdemDigest || got.User != "u1" || got.SKU != "sku-1" || got.ID != r.ID {
		t.Errorf("got %+v", got)
	}
	if got.ReservedAt.Before(before) || got.PayBefore.Sub(got.ReservedAt) != 15*time.Minute {
		t.Errorf("reserved at %s, pay before %s", got.ReservedAt, got.PayBefore)
	}
	// The region's own pool is empty now: the next one comes from its fallback.
	r2 := b.ask(a, "u2", 1)
	r2.Region, r2.Pools = "beijing", r.Pools
	if got := b.must(r2); got.Pool != "national" || got.Region != "beijing" {
		t.Errorf("pool %s for region %s", got.Pool, got.Region)
	}
	rec, err := b.Order(ctxFor(t), r.ID)
	if err != nil {
		t.Fatal(err)
	}
	want := got.Record
	want.IdemDigest = "" // not read for a status
	if rec != want {
		t.Errorf("record %+v, want %+v", rec, want)
	}
	out, err := b.Outbox(ctxFor(t), a.ID, 0, time.Now().Add(time.Second), 10)
	if err != nil || len(out) != 2 || out[0] != got.Record {
		t.Errorf("outbox %+v, %v", out, err)
	}
	if b.stockOf(a, 0, "beijing") != 0 || b.stockOf(a, 0, "national") != 4 || b.held(a, "u1") != 1 {
		t.Error("stock or limit wrong")
	}
}

func TestQuantityThatIsNoSmallPositiveWholeNumberTakesNothing(t *testing.T) { // O03
	t.Parallel()
	b := newBench(t)
	a := b.open(newSale("qty", map[string]int{"national": 10}))
	b.must(b.ask(a, "first", 1))
	before := b.dump(a)
	for _, q := range []string{"-5", "0", "1.5", "2.0", "1e1", "1e2", "0x5", "", " ", "1 ", "+1", "01", "null", "one",
		"1000001", "1000000000", "9223372036854775808", strings.Repeat("9", 400), "1\n", "٣"} {
		r := b.ask(a, "u", 1)
		one := newBatch(r.ID)
		one.add(&ask{r: &r})
		call := b.reserveCall(one)
		*call.Args()[3+7+3].(*string) = q // behind 7 keys: number of offers, sku, region
		if err := b.submit(ctxFor(t), call); err != nil {
			t.Fatal(err)
		}
		reply, err := call.reply()
		if err != nil || len(reply) != 2 || reply[1] != "invalid" {
			t.Errorf("quantity %q: %q, %v", q, reply, err)
		}
	}
	for _, q := range []int{-5, 0, 1_000_001} {
		if _, err := b.Reserve(ctxFor(t), b.ask(a, "u", q)); !errors.Is(err, ErrInvalid) {
			t.Errorf("quantity %d: %v", q, err)
		}
	}
	var limit *LimitError
	if _, err := b.Reserve(ctxFor(t), b.ask(a, "u", a.PerUserLimit+1)); !errors.As(err, &limit) {
		t.Errorf("limit+1: %v", err)
	}
	if after := b.dump(a); after != before {
		t.Errorf("something was written:\n%s\n%s", before, after)
	}
}

func TestRefusalsWriteNothing(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	now := time.Now().UTC().Truncate(time.Millisecond)
	cases := []struct {
		name string
		make func(a *Activity)
		ask  func(r *Reservation)
		want error
	}{
		{"early", func(a *Activity) { a.StartsAt, a.EndsAt = now.Add(time.Hour), now.Add(2*time.Hour) }, nil, &NotStartedError{}},
		{"late", func(a *Activity) { a.StartsAt, a.EndsAt = now.Add(-2*time.Hour), now.Add(-time.Hour) }, nil, ErrEnded},
		{"paused", func(a *Activity) { a.Paused = true }, nil, ErrPaused},
		{"unqualified", func(a *Activity) { a.Qualified = true }, nil, ErrNotQualified},
		{"too-many", func(a *Activity) { a.PerUserLimit = 9 }, func(r *Reservation) { r.Quantity = 6 }, ErrSoldOut},
		{"no-sku", nil, func(r *Reservation) { r.SKU = "other" }, ErrInvalid},
		{"no-pool", nil, func(r *Reservation) { r.Pools = []string{"nowhere"} }, ErrNotWarmed},
	}
	for _, tc := range cases {
		a := newSale(tc.name, map[string]int{"national": 5})
		if tc.make != nil {
			tc.make(a)
		}
		b.open(a)
		before := b.dump(a)
		r := b.ask(a, "u", 1)
		if tc.ask != nil {
			tc.ask(&r)
		}
		_, err := b.Reserve(ctxFor(t), r)
		var early *NotStartedError
		switch {
		case errors.As(tc.want, &early):
			if !errors.As(err, &early) || !early.StartsAt.Equal(a.StartsAt) || early.Now.Before(now.Add(-time.Minute)) {
				t.Errorf("%s: %v", tc.name, err)
			}
		case !errors.Is(err, tc.want):
			t.Errorf("%s: %v", tc.name, err)
		}
		if b.dump(a) != before {
			t.Errorf("%s: something was written", tc.name)
		}
	}
	if _, err := b.Reserve(ctxFor(t), b.ask(newSale("unknown", nil), "u", 1)); !errors.Is(err, ErrActivityNotFound) {
		t.Errorf("unknown activity: %v", err)
	}
	cold := newSale("cold", map[string]int{"national": 5})
	if err := b.Announce(ctxFor(t), cold); err != nil {
		t.Fatal(err)
	}
	if _, err := b.Reserve(ctxFor(t), b.ask(cold, "u", 1)); !errors.Is(err, ErrNotWarmed) {
		t.Errorf("announced only: %v", err)
	}
	if err := b.PrepareWarm(ctxFor(t), cold, 3, amounts(cold)); err != nil {
		t.Fatal(err)
	}
	if _, err := b.Reserve(ctxFor(t), b.ask(cold, "u", 1)); !errors.Is(err, ErrNotWarmed) {
		t.Errorf("prepared only: %v", err)
	}
}

func TestQualifiedUsersMayTakePart(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	a := newSale("list", map[string]int{"national": 8})
	a.Qualified, a.Buckets = true, 3
	b.open(a)
	var users []string
	for i := range 250 {
		users = append(users, fmt.Sprintf("guest-%d", i))
	}
	if err := b.Qualify(ctxFor(t), a, users); err != nil {
		t.Fatal(err)
	}
	b.must(b.ask(a, "guest-77", 1))
	if _, err := b.Reserve(ctxFor(t), b.ask(a, "stranger", 1)); !errors.Is(err, ErrNotQualified) {
		t.Errorf("stranger: %v", err)
	}
}

func TestSameOrderIDAHundredTimesTakesOnce(t *testing.T) { // C3, O02
	t.Parallel()
	b := newBench(t)
	a := b.open(newSale("again", map[string]int{"national": 10}))
	r := b.ask(a, "u1", 1)
	var wg sync.WaitGroup
	var mu sync.Mutex
	fresh := 0
	for range 100 {
		wg.Go(func() {
			got, err := b.Reserve(ctxFor(t), r)
			if err != nil || got.ID != r.ID || got.Quantity != 1 {
				t.Errorf("%+v, %v", got, err)
			}
			mu.Lock()
			defer mu.Unlock()
			if !got.Replay {
				fresh++
			}
		})
	}
	wg.Wait()
	if fresh != 1 || b.stockOf(a, 0, "national") != 9 || b.held(a, "u1") != 1 || b.outboxOf(a) != 1 {
		t.Errorf("%d taken, stock %d", fresh, b.stockOf(a, 0, "national"))
	}
}

func TestFiftyClicksOfOneBuyerCostOneUnit(t *testing.T) { // O02
	t.Parallel()
	b := newBench(t)
	a := newSale("clicks", map[string]int{"national": 10})
	a.PerUserLimit = 1
	b.open(a)
	var wg sync.WaitGroup
	var mu sync.Mutex
	var won []string
	var refused []*LimitError
	for range 50 {
		wg.Go(func() {
			got, err := b.Reserve(ctxFor(t), b.ask(a, "u1", 1))
			mu.Lock()
			defer mu.Unlock()
			var limit *LimitError
			switch {
			case err == nil:
				won = append(won, got.ID.String())
			case errors.As(err, &limit):
				refused = append(refused, limit)
			default:
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if len(won) != 1 || len(refused) != 49 || b.stockOf(a, 0, "national") != 9 {
		t.Fatalf("%d accepted, %d refused, stock %d", len(won), len(refused), b.stockOf(a, 0, "national"))
	}
	for _, e := range refused {
		if !slices.Equal(e.OrderIDs, won) {
			t.Fatalf("limit names %v, not %v", e.OrderIDs, won)
		}
	}
	// Variant b: the limit counts units, not orders.
	a2 := newSale("units", map[string]int{"national": 10})
	a2.PerUserLimit = 3
	b.open(a2)
	b.must(b.ask(a2, "u1", 2))
	if _, err := b.Reserve(ctxFor(t), b.ask(a2, "u1", 2)); err == nil || b.stockOf(a2, 0, "national") != 8 {
		t.Errorf("second order of two: %v, stock %d", err, b.stockOf(a2, 0, "national"))
	}
	b.must(b.ask(a2, "u1", 1))
}

func TestIdempotencyKeyGivesTheSameOrderWhateverBecameOfIt(t *testing.T) { // O02 c, R4
	t.Parallel()
	b := newBench(t)
	a := b.open(newSale("idem", map[string]int{"national": 10}))
	ask := func(digest string) Reservation {
		r := b.ask(a, "u1", 1)
		r.IdemKey, r.IdemDigest = "key", digest
		return r
	}
	first := b.must(ask("aa"))
	again := b.must(ask("aa"))
	if !again.Replay || again.ID != first.ID || again.Record != first.Record {
		t.Errorf("replay %+v, first %+v", again, first)
	}
	if _, err := b.Reserve(ctxFor(t), ask("bb")); !errors.Is(err, ErrKeyReused) {
		t.Errorf("other body: %v", err)
	}
	// Another user's key of the same name is another key.
	other := b.ask(a, "u2", 1)
	other.IdemKey, other.IdemDigest = "key", "bb"
	if got := b.must(other); got.Replay {
		t.Error("keys of two users mixed up")
	}
	if got := b.release(releaseOf(first.Record, order.Cancelled)); got[0] != Applied {
		t.Fatal(got)
	}
	before := b.dump(a)
	cancelled := b.must(ask("aa"))
	if !cancelled.Replay || cancelled.ID != first.ID || cancelled.Status != order.Cancelled || cancelled.Reason != order.ReasonUserCancelled {
		t.Errorf("after the cancel: %+v", cancelled)
	}
	if b.dump(a) != before {
		t.Error("a replay wrote something")
	}
	// A key whose record is gone never reserves again.
	if err := b.raw.Del(ctxFor(t), b.keys(a.ID, 0).order(first.ID)).Err(); err != nil {
		t.Fatal(err)
	}
	before = b.dump(a)
	if _, err := b.Reserve(ctxFor(t), ask("aa")); !errors.Is(err, ErrArchived) {
		t.Errorf("record gone: %v", err)
	}
	if b.dump(a) != before {
		t.Error("a key without record wrote something")
	}
}

func TestReplayComesBeforeEveryRefusal(t *testing.T) { // C3
	t.Parallel()
	b := newBench(t)
	a := newSale("first", map[string]int{"national": 1})
	a.PerUserLimit = 1
	b.open(a)
	r := b.ask(a, "u1", 1)
	r.IdemKey, r.IdemDigest = "k", "d"
	b.must(r)
	same := r
	same.ID = b.ask(a, "u1", 1).ID
	if err := b.SetPaused(ctxFor(t), a, true); err != nil {
		t.Fatal(err)
	}
	if err := b.End(ctxFor(t), a, time.Now()); err != nil {
		t.Fatal(err)
	}
	for _, x := range []Reservation{r, same} {
		if got := b.must(x); !got.Replay || got.ID != r.ID {
			t.Errorf("%+v", got)
		}
	}
	if _, err := b.Reserve(ctxFor(t), b.ask(a, "u2", 1)); !errors.Is(err, ErrEnded) {
		t.Errorf("new buyer after the end: %v", err)
	}
}

func TestNineteenDigitIdsKeepEveryDigit(t *testing.T) { // O07
	t.Parallel()
	b := newBench(t)
	a := b.open(newSale("1759812345678901", map[string]int{"national": 20}))
	users := []string{"1759812345678901234", "1759812345678901235", "9007199254740991", "9007199254740993", "9223372036854775807"}
	var recs []Record
	for _, u := range users {
		r := b.ask(a, u, 1)
		r.SKU = "sku-1"
		recs = append(recs, b.must(r).Record)
	}
	for i, rec := range recs {
		got, err := b.Order(ctxFor(t), rec.ID)
		if err != nil || got.User != users[i] || got.ID != rec.ID {
			t.Errorf("user %s: %+v, %v", users[i], got, err)
		}
		mine, err := b.Mine(ctxFor(t), a.ID, 0, users[i])
		if err != nil || len(mine) != 1 || mine[0].ID != rec.ID {
			t.Errorf("orders of %s: %+v, %v", users[i], mine, err)
		}
		exists, err := b.raw.Exists(ctxFor(t), b.cfg.Prefix+"seckill:order:{1759812345678901:0}:"+rec.ID.String(),
			b.cfg.Prefix+"seckill:user:limit:{1759812345678901:0}:"+users[i]).Result()
		if err != nil || exists != 2 {
			t.Errorf("%d keys of user %s, %v", exists, users[i], err)
		}
	}
	if b.stockOf(a, 0, "national") != 15 {
		t.Error("stock wrong")
	}
}

func TestWrongTypesStopTheScriptBeforeItsFirstWrite(t *testing.T) { // O09
	t.Parallel()
	b := newBench(t)
	for i, tc := range []struct {
		name, value string // of the key that is spoiled; "" makes a list
		key         func(k keys, r Reservation) string
	}{
		{"limit is a string", "x", func(k keys, r Reservation) string { return k.limit(r.User) }},
		{"stock is a word", "abc", func(k keys, _ Reservation) string { return k.stock("sku-1", "national") }},
		{"stock is a fraction", "1.5", func(k keys, _ Reservation) string { return k.stock("sku-1", "national") }},
		{"stock is a list", "", func(k keys, _ Reservation) string { return k.stock("sku-1", "national") }},
		{"outbox is a string", "x", func(k keys, _ Reservation) string { return k.outbox() }},
		{"record is a string", "x", func(k keys, r Reservation) string { return k.order(r.ID) }},
		{"idempotency key is a list", "", func(k keys, r Reservation) string { return k.idem(r.User, r.IdemKey) }},
		{"activity is a string", "x", func(k keys, _ Reservation) string { return k.activity() }},
	} {
		a := b.open(newSale(fmt.Sprintf("type-%d", i), map[string]int{"national": 10}))
		r := b.ask(a, "u1", 1)
		r.IdemKey, r.IdemDigest = "k", "d"
		key := tc.key(b.keys(a.ID, 0), r)
		b.raw.Del(ctxFor(t), key)
		var err error
		if tc.value == "" {
			err = b.raw.RPush(ctxFor(t), key, "x").Err()
		} else {
			err = b.raw.Set(ctxFor(t), key, tc.value, 0).Err()
		}
		if err != nil {
			t.Fatal(err)
		}
		before := b.dump(a)
		for range 2 {
			if _, err := b.Reserve(ctxFor(t), r); !errors.Is(err, ErrCorrupt) {
				t.Errorf("%s: %v", tc.name, err)
			}
		}
		if b.dump(a) != before {
			t.Errorf("%s: something was written", tc.name)
		}
	}
}

func TestMissingStockKeyIsNotWarmedAndStaysMissing(t *testing.T) { // O04 up to the repair
	t.Parallel()
	b := newBench(t)
	a := b.open(newSale("gone", map[string]int{"national": 100}))
	var recs []Record
	for i := range 4 {
		recs = append(recs, b.must(b.ask(a, fmt.Sprintf("u%d", i), 1)).Record)
	}
	// Variant b: nothing that holds live stock or records has a TTL.
	for _, key := range []string{b.keys(a.ID, 0).stock("sku-1", "national"), b.keys(a.ID, 0).activity(), b.keys(a.ID, 0).order(recs[0].ID)} {
		if ttl := b.raw.TTL(ctxFor(t), key).Val(); ttl != -1 {
			t.Errorf("%s has TTL %s", key, ttl)
		}
	}
	if err := b.raw.Del(ctxFor(t), b.keys(a.ID, 0).stock("sku-1", "national")).Err(); err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for i := range 50 {
		wg.Go(func() {
			if _, err := b.Reserve(ctxFor(t), b.ask(a, fmt.Sprintf("late%d", i), 1)); !errors.Is(err, ErrNotWarmed) {
				t.Errorf("stock key gone: %v", err)
			}
		})
	}
	wg.Wait()
	before := b.dump(a)
	if got := b.release(releaseOf(recs[0], order.Cancelled)); got[0] != NoStockKey {
		t.Errorf("release without stock key: %v", got)
	}
	if b.dump(a) != before || b.stockOf(a, 0, "national") != -1 {
		t.Error("something was written")
	}
	levels, err := b.Levels(ctxFor(t), a)
	if err != nil || len(levels) != 0 {
		t.Errorf("levels %v, %v: a missing key must be absent", levels, err)
	}
}
