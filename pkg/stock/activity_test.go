package stock

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"sync"
	"testing"
	"time"

	"seckill/pkg/order"
)

func TestActivityIsReadBackAsItWasAnnounced(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	a := newSale("catalogue", map[string]int{"beijing": 3, "national": 7})
	a.Buckets, a.Qualified, a.Shadow, a.Epoch = 3, true, true, 4
	a.Items = append(a.Items, Item{SKU: "sku-2", PriceMinor: 5, Pools: map[string]int{"national": 1}})
	if err := b.Announce(ctxFor(t), a); err != nil {
		t.Fatal(err)
	}
	got, err := b.Activity(ctxFor(t), a.ID)
	if err != nil || !reflect.DeepEqual(got, *a) {
		t.Errorf("got %+v\nwant %+v, %v", got, *a, err)
	}
	b.open(a)
	want := *a
	want.Warm, want.Opened = 1, true
	if got, err = b.Activity(ctxFor(t), a.ID); err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v\nwant %+v, %v", got, want, err)
	}
	levels, err := b.Levels(ctxFor(t), a)
	if err != nil || !reflect.DeepEqual(levels, map[string]map[string]int{"sku-1": {"beijing": 3, "national": 7}, "sku-2": {"national": 1}}) {
		t.Errorf("levels %v, %v", levels, err)
	}
	if b.stockOf(a, 0, "national") != 3 || b.stockOf(a, 1, "national") != 2 || b.stockOf(a, 2, "national") != 2 {
		t.Error("the remainder belongs to the first buckets")
	}
	end := time.Now().UTC().Truncate(time.Millisecond)
	if err := b.End(ctxFor(t), a, end); err != nil {
		t.Fatal(err)
	}
	if got, err = b.Activity(ctxFor(t), a.ID); err != nil || !got.Ended || got.Settled || !got.EndsAt.Equal(end) {
		t.Errorf("after the end %+v, %v", got, err)
	}
	if _, err := b.Activity(ctxFor(t), "nothing"); !errors.Is(err, ErrActivityNotFound) {
		t.Error(err)
	}
}

func TestAnnouncingNeverTouchesAWarmSale(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	a := b.open(newSale("warm", map[string]int{"national": 5}))
	b.must(b.ask(a, "u", 1))
	before := b.dump(a)
	edited := newSale("warm", map[string]int{"national": 50})
	edited.PerUserLimit = 9
	if err := b.Announce(ctxFor(t), edited); err != nil || b.dump(a) != before {
		t.Errorf("announce changed a warm sale: %v", err)
	}
	cold := newSale("cold", map[string]int{"national": 5})
	if err := b.Announce(ctxFor(t), cold); err != nil {
		t.Fatal(err)
	}
	cold.PerUserLimit, cold.Items = 7, []Item{{SKU: "sku-9", PriceMinor: 1, Pools: map[string]int{"national": 1}}}
	if err := b.Announce(ctxFor(t), cold); err != nil {
		t.Fatal(err)
	}
	got, err := b.Activity(ctxFor(t), "cold")
	if err != nil || got.PerUserLimit != 7 || len(got.Items) != 1 || got.Items[0].SKU != "sku-9" {
		t.Errorf("edited %+v, %v", got, err)
	}
	if b.raw.HExists(ctxFor(t), b.keys("cold", 0).activity(), "frozen:sku-1").Val() {
		t.Error("a sku that was dropped can still be bought")
	}
}

func TestWarmingAgainNeverOverwritesLiveStock(t *testing.T) { // O05, R9
	t.Parallel()
	b := newBench(t)
	a := newSale("again", map[string]int{"national": 100})
	a.Buckets = 2
	if err := b.Announce(ctxFor(t), a); err != nil {
		t.Fatal(err)
	}
	// Ten first warm-ups at once, as MySQL orders them: each takes a number, the last number wins.
	var wg sync.WaitGroup
	for n := uint64(1); n <= 10; n++ {
		wg.Go(func() {
			if err := b.PrepareWarm(ctxFor(t), a, n, amounts(a)); err != nil && !errors.Is(err, ErrStaleWarm) {
				t.Errorf("attempt %d: %v", n, err)
			}
		})
	}
	wg.Wait()
	if n, err := b.OpenWarm(ctxFor(t), a, 3); err != nil || n != 0 {
		t.Errorf("a number that did not win opened %d buckets, %v", n, err)
	}
	for range 2 {
		if n, err := b.OpenWarm(ctxFor(t), a, 10); err != nil || n != 2 {
			t.Fatalf("opened %d, %v", n, err)
		}
	}
	total := func() int {
		levels, err := b.Levels(ctxFor(t), a)
		if err != nil {
			t.Fatal(err)
		}
		return levels["sku-1"]["national"]
	}
	if total() != 100 {
		t.Fatalf("%d units", total())
	}
	for i := range 40 {
		b.must(b.ask(a, fmt.Sprintf("u%d", i), 1))
	}
	for n := range 10 {
		wg.Go(func() {
			err := b.PrepareWarm(ctxFor(t), a, uint64(5+n), amounts(a)) // older and newer numbers
			if !errors.Is(err, ErrAlreadyWarm) {
				t.Errorf("warm again: %v", err)
			}
		})
	}
	wg.Wait()
	if total() != 60 || b.held(a, "u7") != 1 {
		t.Errorf("%d units", total())
	}
	// A second sale is warmed without touching the first.
	b.open(newSale("other", map[string]int{"national": 9}))
	if total() != 60 {
		t.Errorf("%d units", total())
	}
}

func TestHalfDoneWarmUpSellsNothing(t *testing.T) { // R9, model m5
	t.Parallel()
	b := newBench(t)
	a := newSale("half", map[string]int{"national": 4})
	a.Buckets = 2
	whole := *a
	sold := func(when string, want error) {
		t.Helper()
		for i := range 8 {
			if _, err := b.Reserve(ctxFor(t), b.ask(&whole, fmt.Sprintf("%s-%d", when, i), 1)); !errors.Is(err, want) {
				t.Errorf("%s: %v, want %v", when, err, want)
			}
		}
	}
	sold("nothing", ErrActivityNotFound)
	if err := b.Announce(ctxFor(t), a); err != nil {
		t.Fatal(err)
	}
	// Killed after the first bucket: attempt 1 wrote bucket 0 only.
	first := *a
	first.Buckets = 1
	if err := b.PrepareWarm(ctxFor(t), &first, 1, map[string]map[string]int{"sku-1": {"national": 2}}); err != nil {
		t.Fatal(err)
	}
	sold("half", ErrNotWarmed)
	// Killed between prepare and win; then an older attempt wakes up, and one opens without having won.
	if err := b.PrepareWarm(ctxFor(t), a, 2, amounts(a)); err != nil {
		t.Fatal(err)
	}
	sold("prepared", ErrNotWarmed)
	if err := b.PrepareWarm(ctxFor(t), a, 1, amounts(a)); !errors.Is(err, ErrStaleWarm) {
		t.Error(err)
	}
	if n, err := b.OpenWarm(ctxFor(t), a, 1); err != nil || n != 0 {
		t.Errorf("opened %d, %v", n, err)
	}
	sold("stale", ErrNotWarmed)
	// Killed between the buckets: bucket 0 open, bucket 1 not. The next run opens the rest and the
	// open one keeps what it sold.
	if n, err := b.OpenWarm(ctxFor(t), &first, 2); err != nil || n != 1 {
		t.Fatalf("opened %d, %v", n, err)
	}
	if err := b.PrepareWarm(ctxFor(t), &first, 3, map[string]map[string]int{"sku-1": {"national": 2}}); !errors.Is(err, ErrAlreadyWarm) {
		t.Error(err)
	}
	if n, err := b.OpenWarm(ctxFor(t), a, 2); err != nil || n != 2 {
		t.Fatalf("opened %d, %v", n, err)
	}
	if b.stockOf(a, 0, "national") != 2 || b.stockOf(a, 1, "national") != 2 {
		t.Error("stock was split wrong")
	}
	// Once the end marker is there nothing is warmed any more.
	late := newSale("late", map[string]int{"national": 4})
	if err := b.End(ctxFor(t), late, time.Now()); err != nil {
		t.Fatal(err)
	}
	if err := b.PrepareWarm(ctxFor(t), late, 1, amounts(late)); !errors.Is(err, ErrEnded) {
		t.Error(err)
	}
}

func TestPauseAndResumeReachEveryBucket(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	a := newSale("pause", map[string]int{"national": 40})
	a.Buckets = 4
	b.open(a)
	for _, paused := range []bool{true, true, false} {
		if err := b.SetPaused(ctxFor(t), a, paused); err != nil {
			t.Fatal(err)
		}
		for i := range 8 {
			_, err := b.Reserve(ctxFor(t), b.ask(a, fmt.Sprintf("%t-%d", paused, i), 1))
			if paused && !errors.Is(err, ErrPaused) || !paused && err != nil {
				t.Errorf("paused %t: %v", paused, err)
			}
		}
	}
	if err := b.SetPaused(ctxFor(t), newSale("none", nil), true); !errors.Is(err, ErrActivityNotFound) {
		t.Error(err)
	}
}

func TestNothingIsReservedAfterTheEndMarkerEvenWithTheWindowOpen(t *testing.T) { // P6, m3
	t.Parallel()
	b := newBench(t)
	a := b.open(newSale("marker", map[string]int{"national": 4}))
	if err := b.End(ctxFor(t), a, time.Now().Add(time.Hour)); err != nil { // a window that claims to be open
		t.Fatal(err)
	}
	if _, err := b.Reserve(ctxFor(t), b.ask(a, "u", 1)); !errors.Is(err, ErrEnded) {
		t.Error(err)
	}
	if ttl := b.raw.TTL(ctxFor(t), b.keys(a.ID, 0).end()).Val(); ttl != -1 {
		t.Errorf("marker has TTL %s before the sale is settled", ttl)
	}
}

func TestBadCataloguesAreRefused(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	for name, spoil := range map[string]func(*Activity){
		"id": func(a *Activity) { a.ID = "a b" }, "limit": func(a *Activity) { a.PerUserLimit = 0 },
		"buckets": func(a *Activity) { a.Buckets = order.MaxBuckets + 1 }, "window": func(a *Activity) { a.EndsAt = a.StartsAt },
		"pool": func(a *Activity) { a.Items[0].Pools = map[string]int{"Bad": 1} }, "sku": func(a *Activity) { a.Items[0].SKU = "s|k" },
		"units": func(a *Activity) { a.Items[0].Pools = map[string]int{"national": -1} }, "currency": func(a *Activity) { a.Currency = "cny" },
	} {
		a := newSale("bad", map[string]int{"national": 1})
		spoil(a)
		if err := b.Announce(context.Background(), a); !errors.Is(err, ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
