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

func TestConfirmMovesForwardOnlyAndNeverCreates(t *testing.T) { // R1
	t.Parallel()
	b := newBench(t)
	a := b.open(newSale("confirm", map[string]int{"national": 10}))
	r := b.must(b.ask(a, "u1", 1))
	step := func(to order.Status, want Outcome, status order.Status) {
		t.Helper()
		if got := b.confirm(to, r.ID); got[0] != want || b.status(r.ID) != status {
			t.Errorf("confirm %s: %v, now %s", to, got, b.status(r.ID))
		}
	}
	step(order.Pending, Applied, order.Pending)
	if b.outboxOf(a) != 0 {
		t.Error("still in the outbox")
	}
	step(order.Pending, Already, order.Pending)
	step(order.Paid, Applied, order.Paid)
	step(order.Pending, Already, order.Paid)
	if b.held(a, "u1") != 1 {
		t.Error("confirm touched the limit")
	}
	// reserved → paid in one step: the payment overtook the order's own confirm.
	r = b.must(b.ask(a, "u2", 1))
	step(order.Paid, Applied, order.Paid)

	ghost := b.ask(a, "u3", 1).ID
	before := b.dump(a)
	if got := b.confirm(order.Paid, ghost); got[0] != NoRecord || b.dump(a) != before {
		t.Errorf("confirm of an unknown order: %v", got)
	}
	if _, err := b.Order(ctxFor(t), ghost); !errors.Is(err, ErrOrderNotFound) {
		t.Error(err)
	}
}

func TestLateConfirmDoesNotReviveAReleasedOrder(t *testing.T) { // R1
	t.Parallel()
	b := newBench(t)
	a := b.open(newSale("revive", map[string]int{"national": 1}))
	r := b.must(b.ask(a, "u1", 1))
	b.release(releaseOf(r.Record, order.Cancelled))
	for _, to := range []order.Status{order.Pending, order.Paid} {
		if got := b.confirm(to, r.ID); got[0] != Already || b.status(r.ID) != order.Cancelled {
			t.Errorf("confirm %s after release: %v, %s", to, got, b.status(r.ID))
		}
	}
	if b.stockOf(a, 0, "national") != 1 || b.held(a, "u1") != 0 {
		t.Error("units moved")
	}
}

func TestReleaseReturnsUnitsOnceHoweverOftenItRuns(t *testing.T) { // O27, R1, R4
	t.Parallel()
	b := newBench(t)
	a := b.open(newSale("twice", map[string]int{"national": 5}))
	req := b.ask(a, "u1", 1)
	r := b.must(req)
	b.confirm(order.Pending, r.ID)
	var wg sync.WaitGroup
	var mu sync.Mutex
	count := make(map[Outcome]int)
	for i := range 20 {
		wg.Go(func() {
			to := []order.Status{order.Cancelled, order.Refunded, order.Rejected}[i%3]
			out, err := b.Release(ctxFor(t), []Release{releaseOf(r.Record, to)})
			if err != nil {
				t.Error(err)
				return
			}
			mu.Lock()
			defer mu.Unlock()
			count[out[0]]++
		})
	}
	wg.Wait()
	if count[Applied] != 1 || count[Already] != 19 || b.stockOf(a, 0, "national") != 5 || b.held(a, "u1") != 0 {
		t.Errorf("%v, stock %d", count, b.stockOf(a, 0, "national"))
	}
	final := b.status(r.ID)
	if !final.Final() {
		t.Errorf("status %s", final)
	}
	// A late retry of the reserve call with the same id takes nothing (R4).
	if got := b.must(req); !got.Replay || got.Status != final || b.stockOf(a, 0, "national") != 5 {
		t.Errorf("retry after release: %+v", got)
	}
	// The user may buy again, and a rollback for an order that never existed changes nothing.
	b.must(b.ask(a, "u1", 2))
	before := b.dump(a)
	ghost := releaseOf(r.Record, order.Cancelled)
	ghost.ID = b.ask(a, "u1", 1).ID
	if got := b.release(ghost); got[0] != NoRecord || b.dump(a) != before {
		t.Errorf("release of an unknown order: %v", got)
	}
}

func TestReleaseOfOtherContentIsRefused(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	a := b.open(newSale("content", map[string]int{"national": 5, "beijing": 5}))
	r := b.must(b.ask(a, "u1", 1))
	before := b.dump(a)
	for _, change := range []func(*Release){
		func(x *Release) { x.Quantity = 2 },
		func(x *Release) { x.User = "u2" },
		func(x *Release) { x.Pool = "beijing" },
		func(x *Release) { x.SKU = "sku-2" },
	} {
		x := releaseOf(r.Record, order.Cancelled)
		change(&x)
		if got := b.release(x); got[0] != Mismatch {
			t.Errorf("release %+v: %v", x, got)
		}
	}
	if b.dump(a) != before {
		t.Error("something was written")
	}
}

func TestWithheldUnitsStayOffSaleAndFreeTheLimit(t *testing.T) { // R7, O24 (up to the realignment)
	t.Parallel()
	b := newBench(t)
	a := b.open(newSale("withheld", map[string]int{"national": 5}))
	r := b.must(b.ask(a, "u1", 2))
	x := releaseOf(r.Record, order.Rejected)
	x.Withhold, x.Reason = true, order.ReasonOutOfStock
	if got := b.release(x); got[0] != Applied || b.stockOf(a, 0, "national") != 3 || b.held(a, "u1") != 0 {
		t.Errorf("%v, stock %d, held %d", got, b.stockOf(a, 0, "national"), b.held(a, "u1"))
	}
	rec, err := b.Order(ctxFor(t), r.ID)
	if err != nil || rec.Status != order.Rejected || rec.Reason != order.ReasonOutOfStock || b.outboxOf(a) != 0 {
		t.Errorf("%+v, %v", rec, err)
	}
	// Nothing gives them back later.
	x.Withhold = false
	if got := b.release(x); got[0] != Already || b.stockOf(a, 0, "national") != 3 {
		t.Errorf("%v, stock %d", got, b.stockOf(a, 0, "national"))
	}
}

func TestManyOrdersOfManyBucketsInOneCall(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	a := newSale("many", map[string]int{"national": 400})
	a.Buckets = 4
	b.open(a)
	var recs []Record
	var ids []order.ID
	for i := range 300 {
		r := b.must(b.ask(a, fmt.Sprintf("u%d", i), 1))
		recs, ids = append(recs, r.Record), append(ids, r.ID)
	}
	ghost := b.ask(a, "nobody", 1).ID
	for i, o := range b.confirm(order.Pending, append(ids, ghost)...) {
		if want := map[bool]Outcome{true: Applied, false: NoRecord}[i < 300]; o != want {
			t.Fatalf("order %d: %v", i, o)
		}
	}
	if b.outboxOf(a) != 0 {
		t.Error("outbox not empty")
	}
	var rs []Release
	for _, r := range recs {
		rs = append(rs, releaseOf(r, order.Cancelled))
	}
	rs = append(rs, rs[0]) // the same order twice in one call
	out := b.release(rs...)
	for i, o := range out[:300] {
		if o != Applied && !(i == 0 && o == Already) {
			t.Fatalf("release %d: %v", i, o)
		}
	}
	levels, err := b.Levels(ctxFor(t), a)
	if err != nil || levels["sku-1"]["national"] != 400 {
		t.Errorf("levels %v, %v", levels, err)
	}
}

func TestOneCorruptRecordDoesNotTouchTheOthers(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	a := b.open(newSale("neighbours", map[string]int{"national": 10}))
	good := b.must(b.ask(a, "u1", 1))
	bad := b.must(b.ask(a, "u2", 1))
	key := b.keys(a.ID, 0).order(bad.ID)
	b.raw.Del(ctxFor(t), key)
	b.raw.Set(ctxFor(t), key, "x", 0)
	out, err := b.Confirm(ctxFor(t), []Confirmation{{bad.ID, order.Pending}, {good.ID, order.Pending}})
	if !errors.Is(err, ErrCorrupt) || out[0] != 0 || out[1] != Applied {
		t.Errorf("confirm: %v, %v", out, err)
	}
	if n := b.outboxOf(a); n != 0 {
		t.Errorf("%d orders whose rows are in MySQL wait in the outbox", n)
	}
	rel, err := b.Release(ctxFor(t), []Release{releaseOf(bad.Record, order.Cancelled), releaseOf(good.Record, order.Cancelled)})
	if !errors.Is(err, ErrCorrupt) || rel[0] != 0 || rel[1] != Applied || b.stockOf(a, 0, "national") != 9 {
		t.Errorf("release: %v, %v", rel, err)
	}
	// A spoiled outbox stops the whole call before anything is written.
	r := b.must(b.ask(a, "u3", 1))
	b.raw.Del(ctxFor(t), b.keys(a.ID, 0).outbox())
	b.raw.Set(ctxFor(t), b.keys(a.ID, 0).outbox(), "x", 0)
	before := b.dump(a)
	if _, err := b.Confirm(ctxFor(t), []Confirmation{{r.ID, order.Pending}}); !errors.Is(err, ErrCorrupt) {
		t.Error(err)
	}
	if _, err := b.Release(ctxFor(t), []Release{releaseOf(r.Record, order.Cancelled)}); !errors.Is(err, ErrCorrupt) {
		t.Error(err)
	}
	if b.dump(a) != before {
		t.Error("something was written")
	}
}

// Once nothing is sold any more only the record counts: no other key, however damaged, keeps it from its
// final state, and no unit comes back through it.
func TestReleaseAfterTheEndNeedsNothingButTheRecord(t *testing.T) { // O09, R1
	t.Parallel()
	b := newBench(t)
	a := b.open(newSale("over", map[string]int{"national": 10}))
	k := b.keys(a.ID, 0)
	damage := map[string]func(rec Record){
		"limit of another type": func(rec Record) { b.raw.Set(ctxFor(t), k.limit(rec.User), "x", 0) },
		"limit is no number":    func(rec Record) { b.raw.HSet(ctxFor(t), k.limit(rec.User), "held", "x") },
		"content":               func(rec Record) { b.raw.HSet(ctxFor(t), k.order(rec.ID), "o", "somebody|else") },
		"record of another type": func(rec Record) {
			b.raw.Del(ctxFor(t), k.order(rec.ID))
			b.raw.Set(ctxFor(t), k.order(rec.ID), "x", 0)
		},
		"stock": func(Record) { b.raw.Set(ctxFor(t), k.stock("sku-1", "national"), "x", 0) },
	}
	for _, name := range slices.Sorted(maps.Keys(damage)) { // the stock last: nobody buys after it
		rec := b.must(b.ask(a, "u-"+strings.ReplaceAll(name, " ", "-"), 1)).Record
		damage[name](rec)
		x := releaseOf(rec, order.Cancelled)
		out, err := b.Release(ctxFor(t), []Release{x})
		if err == nil && out[0] != Mismatch {
			t.Errorf("%s: %v while the sale goes on", name, out)
		}
		level := b.raw.Get(ctxFor(t), k.stock("sku-1", "national")).Val()
		x.Over = true
		want := Applied
		if name == "record of another type" {
			want = NoRecord
		}
		for range 2 {
			if out, err := b.Release(ctxFor(t), []Release{x}); err != nil || out[0] != want {
				t.Errorf("%s: %v, %v, want %v", name, out, err, want)
			}
			if want == Applied {
				want = Already
			}
		}
		if now := b.raw.Get(ctxFor(t), k.stock("sku-1", "national")).Val(); now != level {
			t.Errorf("%s: stock %s, was %s", name, now, level)
		}
		if b.outboxOf(a) != 0 {
			t.Errorf("%s: still in the outbox", name)
		}
	}
}

func TestParkedOrdersLeaveTheOutboxAndComeBack(t *testing.T) { // R15
	t.Parallel()
	b := newBench(t)
	a := b.open(newSale("parked", map[string]int{"national": 10}))
	r := b.must(b.ask(a, "u1", 1))
	done := b.must(b.ask(a, "u2", 1))
	b.confirm(order.Pending, done.ID)
	stats := func(waiting, parked int) {
		t.Helper()
		s, err := b.OutboxStats(ctxFor(t), a.ID, 0)
		if err != nil || s.Waiting != waiting || s.Parked != parked || s.Oldest.IsZero() != (waiting == 0) {
			t.Errorf("%+v, %v", s, err)
		}
	}
	stats(1, 0)
	for range 2 {
		if err := b.Park(ctxFor(t), []order.ID{r.ID, done.ID}); err != nil {
			t.Fatal(err)
		}
		stats(0, 1)
	}
	parked, err := b.Parked(ctxFor(t), a.ID, 0, time.Now().Add(time.Minute), 10)
	if err != nil || len(parked) != 1 || parked[0].ID != r.ID || b.status(r.ID) != order.Reserved {
		t.Errorf("%+v, %v", parked, err)
	}
	for range 2 {
		if err := b.Unpark(ctxFor(t), []order.ID{r.ID, done.ID}); err != nil {
			t.Fatal(err)
		}
		stats(1, 0)
	}
	if err := b.Park(ctxFor(t), []order.ID{r.ID}); err != nil {
		t.Fatal(err)
	}
	b.confirm(order.Pending, r.ID)
	stats(0, 0)
	r = b.must(b.ask(a, "u3", 1))
	if err := b.Park(ctxFor(t), []order.ID{r.ID}); err != nil {
		t.Fatal(err)
	}
	b.release(releaseOf(r.Record, order.Rejected))
	stats(0, 0)
	if err := b.Unpark(ctxFor(t), []order.ID{r.ID}); err != nil {
		t.Fatal(err)
	}
	stats(0, 0)
}

func TestRefundDueIsMarkedAndNeverCreatesARecord(t *testing.T) { // R1
	t.Parallel()
	b := newBench(t)
	a := b.open(newSale("due", map[string]int{"national": 10}))
	r := b.must(b.ask(a, "u1", 1))
	b.release(releaseOf(r.Record, order.Cancelled))
	for range 2 {
		if err := b.MarkRefundDue(ctxFor(t), r.ID); err != nil {
			t.Fatal(err)
		}
	}
	rec, err := b.Order(ctxFor(t), r.ID)
	if err != nil || !rec.RefundDue || rec.Status != order.Cancelled {
		t.Errorf("%+v, %v", rec, err)
	}
	ghost := b.ask(a, "u1", 1).ID
	before := b.dump(a)
	if err := b.MarkRefundDue(ctxFor(t), ghost); err != nil || b.dump(a) != before {
		t.Errorf("unknown order: %v", err)
	}
	// A late mark reaches a record that is final already.
	r2 := b.must(b.ask(a, "u2", 1))
	b.release(releaseOf(r2.Record, order.Cancelled))
	x := releaseOf(r2.Record, order.Cancelled)
	x.RefundDue = true
	if got := b.release(x); got[0] != Already {
		t.Error(got)
	}
	if rec, err := b.Order(ctxFor(t), r2.ID); err != nil || !rec.RefundDue {
		t.Errorf("%+v, %v", rec, err)
	}
}

// Money on its way is noted in records that wait for money, and nowhere else (R1).
func TestMoneyOnItsWayIsNoted(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	a := b.open(newSale("paying", map[string]int{"national": 10}))
	var ids []order.ID
	for i := range 5 {
		ids = append(ids, b.must(b.ask(a, fmt.Sprintf("u%d", i), 1)).ID)
	}
	reserved, pending, paid, unpaid, broken := ids[0], ids[1], ids[2], ids[3], ids[4]
	b.confirm(order.Pending, pending, paid, unpaid)
	b.confirm(order.Paid, paid)
	ghost := b.ask(a, "u1", 1).ID
	began, err := b.Now(ctxFor(t))
	if err != nil {
		t.Fatal(err)
	}
	for _, id := range []order.ID{reserved, pending, paid, ghost} {
		if err := b.MarkPaying(ctxFor(t), id); err != nil {
			t.Errorf("%s: %v", id, err)
		}
	}
	if err := b.raw.Set(ctxFor(t), b.keys(a.ID, 0).order(broken), "text", 0).Err(); err != nil {
		t.Fatal(err)
	}
	if err := b.MarkPaying(ctxFor(t), broken); !errors.Is(err, ErrCorrupt) {
		t.Errorf("overwritten record: %v", err)
	}
	noted := func(want ...order.ID) {
		t.Helper()
		got, err := b.Paying(ctxFor(t), append(slices.Clone(ids), ghost))
		if err != nil || len(got) != len(want) {
			t.Errorf("%v, %v", got, err)
		}
		for _, id := range want {
			if since, ok := got[id]; !ok || since.Before(began.Truncate(time.Millisecond)) || since.After(began.Add(time.Minute)) {
				t.Errorf("%s: %s %v", id, since, ok)
			}
		}
	}
	noted(reserved, pending)
	if n := b.raw.Exists(ctxFor(t), b.keys(a.ID, 0).order(ghost)).Val(); n != 0 {
		t.Error("a record was made")
	}
	b.confirm(order.Pending, reserved) // its row is written; the money is still on its way
	noted(reserved, pending)
	b.confirm(order.Paid, reserved)
	noted(pending)
}

func TestEachChangeRaisesTheVersion(t *testing.T) { // R8
	t.Parallel()
	b := newBench(t)
	a := b.open(newSale("version", map[string]int{"national": 10}))
	version := func() int64 {
		t.Helper()
		v, err := b.raw.HGet(ctxFor(t), b.keys(a.ID, 0).activity(), "version").Int64()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
	last := version()
	raised := func(what string, want bool) {
		t.Helper()
		v := version()
		if (v > last) != want || v < last {
			t.Errorf("%s: version %d after %d", what, v, last)
		}
		last = v
	}
	req := b.ask(a, "u1", 1)
	r := b.must(req)
	raised("reserve", true)
	b.must(req)
	raised("replay", false)
	b.confirm(order.Pending, r.ID)
	raised("confirm", true)
	b.confirm(order.Pending, r.ID)
	raised("confirm again", false)
	b.release(releaseOf(r.Record, order.Cancelled))
	raised("release", true)
	b.release(releaseOf(r.Record, order.Cancelled))
	raised("release again", false)
	if err := b.MarkRefundDue(ctxFor(t), r.ID); err != nil {
		t.Fatal(err)
	}
	raised("refund due", true)
	// A lost hash is not made again from a version alone.
	r = b.must(b.ask(a, "u2", 1))
	b.raw.Del(ctxFor(t), b.keys(a.ID, 0).activity())
	b.confirm(order.Pending, r.ID)
	b.release(releaseOf(r.Record, order.Cancelled))
	if n := b.raw.Exists(ctxFor(t), b.keys(a.ID, 0).activity()).Val(); n != 0 {
		t.Error("activity hash made again")
	}
}

// The buyer whose answer got lost finds his order whatever became of it; a released one does not count
// against the limit, and who cancels again and again leaves a bounded trace.
func TestReleasedOrdersAreStillTheirBuyers(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	plan := newSale("s", map[string]int{"national": 1000})
	plan.PerUserLimit = 1
	a := b.open(plan)
	for i := range 70 {
		res := b.must(b.ask(a, "u", 1))
		out, err := b.Release(ctxFor(t), []Release{{
			ID: res.ID, User: "u", SKU: res.SKU, Pool: res.Pool, Quantity: 1, To: order.Cancelled, Reason: order.ReasonUserCancelled,
		}})
		if err != nil || out[0] != Applied {
			t.Fatalf("release %d: %v %v", i, out, err)
		}
	}
	live := b.must(b.ask(a, "u", 1))
	mine, err := b.Mine(ctxFor(t), a.ID, 0, "u")
	if err != nil || len(mine) < 60 || len(mine) > 66 {
		t.Fatalf("%d orders, %v", len(mine), err)
	}
	var limit *LimitError
	if _, err := b.Reserve(ctxFor(t), b.ask(a, "u", 1)); !errors.As(err, &limit) || len(limit.OrderIDs) != 1 || limit.OrderIDs[0] != live.ID.String() {
		t.Errorf("limit: %v", err)
	}
}
