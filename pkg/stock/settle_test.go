package stock

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"seckill/pkg/order"
	"seckill/pkg/testkit"
)

func TestCleanupFollowsTheOrderAndLeavesReceipts(t *testing.T) { // design §6 steps 6 and 7, P6
	t.Parallel()
	b := newBench(t)
	a := newSale("cleanup", map[string]int{"beijing": 50, "national": 400})
	a.Buckets, a.Qualified = 3, true
	b.open(a)
	ctx := ctxFor(t)
	var users []string
	for i := range 260 {
		users = append(users, fmt.Sprintf("u%d", i))
	}
	if err := b.Qualify(ctx, a, users); err != nil {
		t.Fatal(err)
	}
	recs := make([]Record, len(users))
	var wg sync.WaitGroup
	for w := range 8 {
		wg.Go(func() {
			for i := w; i < len(users); i += 8 {
				r := b.ask(a, users[i], 1)
				r.IdemKey, r.IdemDigest = "k", "d"
				got, err := b.Reserve(ctx, r)
				if err != nil {
					t.Error(err)
					return
				}
				recs[i] = got.Record
			}
		})
	}
	wg.Wait()
	var paid, due, cancelled, pending []Record
	for i, r := range recs {
		switch {
		case i < 100:
			paid = append(paid, r)
		case i < 150:
			due = append(due, r)
		case i < 255:
			cancelled = append(cancelled, r)
		default:
			pending = append(pending, r)
		}
	}
	for _, r := range paid {
		b.confirm(order.Paid, r.ID)
	}
	for _, r := range due {
		x := releaseOf(r, order.Cancelled)
		x.RefundDue = true
		b.release(x)
	}
	for _, r := range cancelled {
		b.release(releaseOf(r, order.Cancelled))
	}
	// Nothing is removed without fencing number and end marker.
	if _, err := b.Cleanup(ctx, a, 1, MarkerTTL); !errors.Is(err, ErrFenced) {
		t.Errorf("without a fencing number: %v", err)
	}
	if err := b.Fence(ctx, a, 7); err != nil {
		t.Fatal(err)
	}
	if _, err := b.Cleanup(ctx, a, 7, MarkerTTL); !errors.Is(err, ErrNoMarker) {
		t.Errorf("without the marker: %v", err)
	}
	if err := b.End(ctx, a, time.Now()); err != nil {
		t.Fatal(err)
	}
	if _, err := b.Cleanup(ctx, a, 7, time.Hour); !errors.Is(err, ErrInvalid) {
		t.Errorf("receipts for an hour: %v", err)
	}
	// Live records stay, and so does everything that comes after records.
	got, err := b.Cleanup(ctx, a, 7, MarkerTTL)
	if err != nil || got.Records != 255 || got.Receipts != 150 || len(got.Live) != 5 || got.Keys != 0 {
		t.Fatalf("%+v, %v", got, err)
	}
	left, err := b.KeysLeft(ctx, a)
	if err != nil || left["order"] != 5 || left["stock"] != 6 || left["user:limit"] != 260 || left["idem"] != 260 || left["user:qualify"] != 260 {
		t.Errorf("%v, %v", left, err)
	}
	// A key whose record became a receipt still gets its answer; one whose record is gone reserves nothing.
	for _, r := range []Record{paid[0], due[0]} {
		same := b.ask(a, r.User, 1)
		same.IdemKey, same.IdemDigest = "k", "d"
		if x, err := b.Reserve(ctx, same); err != nil || x.ID != r.ID || !x.Receipt || x.RefundDue != (r.ID == due[0].ID) {
			t.Errorf("%+v, %v", x, err)
		}
	}
	same := b.ask(a, cancelled[0].User, 1)
	same.IdemKey, same.IdemDigest = "k", "d"
	if _, err := b.Reserve(ctx, same); !errors.Is(err, ErrArchived) {
		t.Error(err)
	}
	for _, r := range pending {
		b.confirm(order.Pending, r.ID)
		b.release(releaseOf(r, order.Cancelled))
	}
	// A later settlement takes over: the earlier one can do nothing any more.
	if err := b.Fence(ctx, a, 9); err != nil {
		t.Fatal(err)
	}
	if err := b.Fence(ctx, a, 8); !errors.Is(err, ErrFenced) {
		t.Error(err)
	}
	if _, err := b.Cleanup(ctx, a, 7, MarkerTTL); !errors.Is(err, ErrFenced) {
		t.Error(err)
	}
	if err := b.SettleMarker(ctx, a, 7, MarkerTTL); !errors.Is(err, ErrFenced) {
		t.Error(err)
	}
	for range 2 { // repeated after a kill
		if got, err = b.Cleanup(ctx, a, 9, 2*MarkerTTL); err != nil || len(got.Live) != 0 {
			t.Fatalf("%+v, %v", got, err)
		}
	}
	left, err = b.KeysLeft(ctx, a)
	if err != nil || !maps.Equal(left, map[string]int{"receipt": 150}) {
		t.Errorf("%v, %v", left, err)
	}
	marks, err := b.Markers(ctx, a)
	if err != nil || len(marks) != 3 || marks[1] != (Marker{Ended: true}) {
		t.Errorf("%+v, %v", marks, err)
	}
	if err := b.SettleMarker(ctx, a, 9, 2*MarkerTTL); err != nil {
		t.Fatal(err)
	}
	marks, err = b.Markers(ctx, a)
	if err != nil || !marks[2].Settled || marks[2].TTL < MarkerTTL || marks[2].TTL > 2*MarkerTTL {
		t.Errorf("%+v, %v", marks, err)
	}
	if err := b.End(ctx, a, time.Now()); err != nil { // a late end changes nothing
		t.Fatal(err)
	}
	if again, err := b.Markers(ctx, a); err != nil || !again[0].Settled || again[0].TTL == 0 {
		t.Errorf("%+v, %v", again, err)
	}
	if err := b.Qualify(ctx, a, users[:1]); !errors.Is(err, ErrEnded) {
		t.Error(err)
	}
	for r, want := range map[order.ID]error{paid[0].ID: nil, due[1].ID: nil, cancelled[0].ID: ErrArchived} {
		if x, err := b.Order(ctx, r); !errors.Is(err, want) || err == nil && !x.Receipt {
			t.Errorf("order %s: %+v, %v", r, x, err)
		}
	}
	if err := b.MarkRefundDue(ctx, paid[0].ID); err != nil { // paid twice
		t.Fatal(err)
	}
	if x, err := b.Order(ctx, paid[0].ID); err != nil || !x.RefundDue || x.Status != order.Paid {
		t.Errorf("%+v, %v", x, err)
	}
	for range 2 {
		if err := b.RefundReceipt(ctx, paid[1].ID, "operator_refunded"); err != nil { // a refund after the end
			t.Fatal(err)
		}
	}
	if x, err := b.Order(ctx, paid[1].ID); err != nil || !x.RefundDue || x.Status != order.Refunded || x.Reason != "operator_refunded" || !x.Receipt {
		t.Errorf("%+v, %v", x, err)
	}
	if ttl := b.raw.TTL(ctx, b.keys(a.ID, paid[1].ID.Bucket).receipt(paid[1].ID)).Val(); ttl < MarkerTTL-time.Minute {
		t.Errorf("the receipt of a refunded order lives for %s", ttl)
	}
	// Only a paid order's receipt can become a refunded one's, and none is made.
	still := b.dump(a)
	for _, r := range []Record{due[0], cancelled[0]} {
		if err := b.RefundReceipt(ctx, r.ID, "operator_refunded"); err != nil || b.dump(a) != still {
			t.Errorf("order %s: %v", r.ID, err)
		}
	}
	if _, err := b.Reserve(ctx, b.ask(a, "u0", 1)); !errors.Is(err, ErrEnded) {
		t.Error(err)
	}
	// A late confirm or release of a cleaned order creates nothing.
	before := b.dump(a)
	b.confirm(order.Paid, cancelled[0].ID)
	if got := b.release(releaseOf(cancelled[0], order.Cancelled)); got[0] != NoRecord || b.dump(a) != before {
		t.Error(got)
	}
	if err := b.AddStock(ctx, a, "late", "sku-1", "national", 5); !errors.Is(err, ErrEnded) || b.dump(a) != before {
		t.Error(err)
	}
}

func TestStockIsAddedOncePerOperation(t *testing.T) { // R6
	t.Parallel()
	b := newBench(t)
	a := newSale("add", map[string]int{"national": 5})
	a.Buckets = 2
	ctx := ctxFor(t)
	if err := b.AddStock(ctx, a, "op-1", "sku-1", "national", 5); !errors.Is(err, ErrActivityNotFound) {
		t.Error(err)
	}
	if err := b.Announce(ctx, a); err != nil {
		t.Fatal(err)
	}
	if err := b.AddStock(ctx, a, "op-1", "sku-1", "national", 5); !errors.Is(err, ErrNotWarmed) {
		t.Error(err)
	}
	b.open(a)
	var wg sync.WaitGroup
	for range 10 {
		wg.Go(func() {
			if err := b.AddStock(ctx, a, "op-1", "sku-1", "national", 5); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if b.stockOf(a, 0, "national") != 6 || b.stockOf(a, 1, "national") != 4 {
		t.Errorf("%d and %d", b.stockOf(a, 0, "national"), b.stockOf(a, 1, "national"))
	}
	b.raw.Del(ctx, b.keys(a.ID, 1).stock("sku-1", "national"))
	for range 2 { // bucket 0 is served once, bucket 1 is not made again
		if err := b.AddStock(ctx, a, "op-2", "sku-1", "national", 2); !errors.Is(err, ErrNotWarmed) {
			t.Error(err)
		}
	}
	if b.stockOf(a, 0, "national") != 7 || b.stockOf(a, 1, "national") != -1 {
		t.Errorf("%d and %d", b.stockOf(a, 0, "national"), b.stockOf(a, 1, "national"))
	}
	if err := b.End(ctx, a, time.Now()); err != nil {
		t.Fatal(err)
	}
	if err := b.AddStock(ctx, a, "op-3", "sku-1", "national", 2); !errors.Is(err, ErrEnded) {
		t.Error(err)
	}
}

func TestRepairOnlyIfNothingChanged(t *testing.T) { // R8, O24 (realignment)
	t.Parallel()
	b := newBench(t)
	a := b.open(newSale("repair", map[string]int{"beijing": 3, "national": 10}))
	ctx := ctxFor(t)
	kept := b.must(b.ask(a, "u1", 1))
	lost := b.must(b.ask(a, "u2", 2))
	b.confirm(order.Pending, kept.ID, lost.ID)
	// Redis forgets u2's order, as a failover would: record, limit and the units.
	b.raw.Del(ctx, b.keys(a.ID, 0).order(lost.ID), b.keys(a.ID, 0).limit("u2"))
	b.raw.IncrBy(ctx, b.keys(a.ID, 0).stock("sku-1", "national"), 2)
	lost.Status = order.Pending
	snap, err := b.Snapshot(ctx, a, 0)
	if err != nil || !reflect.DeepEqual(snap.Stock, map[string]map[string]int{"sku-1": {"beijing": 3, "national": 9}}) || len(snap.Waiting) != 0 {
		t.Fatalf("%+v, %v", snap, err)
	}
	fix := Repair{Records: []Record{lost.Record, kept.Record}, Stock: map[string]map[string]int{"sku-1": {"national": 6}}}
	b.must(b.ask(a, "u3", 1)) // something changes
	before := b.dump(a)
	if _, err := b.Repair(ctx, a, 0, snap.Version, fix); !errors.Is(err, ErrChanged) || b.dump(a) != before {
		t.Fatalf("changed bucket: %v", err)
	}
	version, err := b.Version(ctx, a.ID, 0)
	if err != nil {
		t.Fatal(err)
	}
	next, err := b.Repair(ctx, a, 0, version, fix)
	if err != nil || next == version {
		t.Fatalf("%s, %v", next, err)
	}
	got, err := b.Order(ctx, lost.ID)
	if err != nil || got.Status != order.Pending || got.PayBefore != lost.PayBefore || got.UnitPriceMinor != 1999 {
		t.Errorf("%+v, %v", got, err)
	}
	if b.held(a, "u2") != 2 || b.held(a, "u1") != 1 || b.stockOf(a, 0, "national") != 6 {
		t.Errorf("held %d and %d, stock %d", b.held(a, "u2"), b.held(a, "u1"), b.stockOf(a, 0, "national"))
	}
	if recs, err := b.Records(ctx, a.ID, 0, []order.ID{kept.ID, lost.ID, b.ask(a, "x", 1).ID}); err != nil || len(recs) != 2 {
		t.Errorf("%v, %v", recs, err)
	}
	// The same repair again: the version tells that it is done.
	if _, err := b.Repair(ctx, a, 0, version, fix); !errors.Is(err, ErrChanged) {
		t.Error(err)
	}
	// A restored order is released like any other.
	if out := b.release(releaseOf(lost.Record, order.Cancelled)); out[0] != Applied || b.held(a, "u2") != 0 || b.stockOf(a, 0, "national") != 8 {
		t.Errorf("%v, stock %d", out, b.stockOf(a, 0, "national"))
	}
	// A missing stock key is a rebuild's work.
	b.raw.Del(ctx, b.keys(a.ID, 0).stock("sku-1", "national"))
	if version, err = b.Version(ctx, a.ID, 0); err != nil {
		t.Fatal(err)
	}
	if _, err := b.Repair(ctx, a, 0, version, fix); !errors.Is(err, ErrNotWarmed) || b.stockOf(a, 0, "national") != -1 {
		t.Error(err)
	}
	if err := errors.Join(b.Fence(ctx, a, 1), b.End(ctx, a, time.Now()), b.SettleMarker(ctx, a, 1, MarkerTTL)); err != nil {
		t.Fatal(err)
	}
	if _, err := b.Repair(ctx, a, 0, version, fix); !errors.Is(err, ErrArchived) {
		t.Error(err)
	}
}

func TestRebuildAfterATotalLoss(t *testing.T) { // O04 (repair), R10
	t.Parallel()
	b := newBench(t)
	a := newSale("rebuild", map[string]int{"national": 100})
	a.Buckets, a.PerUserLimit = 2, 1
	b.open(a)
	ctx := ctxFor(t)
	var rs []Rebuilt
	left := []int{50, 50}
	for i := range 40 {
		r := b.ask(a, fmt.Sprintf("u%d", i), 1)
		if i%4 == 0 {
			r.IdemKey, r.IdemDigest = "k", "aa"
		}
		got := b.must(r)
		x := Rebuilt{Record: got.Record}
		switch {
		case i < 25:
			x.Status = order.Pending
		case i < 30:
			x.Status, x.Reason = order.Cancelled, order.ReasonUserCancelled
		case i == 39:
			x.Parked = true
		}
		if x.Status.Live() {
			left[r.ID.Bucket]--
		}
		rs = append(rs, x)
	}
	// One bucket loses everything, the other all but a few keys.
	var cursor uint64
	for {
		names, next, err := b.raw.Scan(ctx, cursor, b.cfg.Prefix+"*{rebuild:*", 100).Result()
		if err != nil {
			t.Fatal(err)
		}
		for _, n := range names {
			if n != b.keys(a.ID, 1).activity() && n != b.keys(a.ID, 1).order(rs[0].ID) {
				b.raw.Del(ctx, n)
			}
		}
		if cursor = next; cursor == 0 {
			break
		}
	}
	stray := b.keys(a.ID, 1).limit("stranger")
	b.raw.HSet(ctx, stray, "held", 1)
	if _, err := b.Reserve(ctx, b.ask(a, "new", 1)); !errors.Is(err, ErrActivityNotFound) && !errors.Is(err, ErrNotWarmed) {
		t.Fatal(err)
	}
	a.Epoch, a.Paused = 2, true
	stock := []map[string]map[string]int{{"sku-1": {"national": left[0]}}, {"sku-1": {"national": left[1]}}}
	if err := b.WriteRebuild(ctx, a, 2, rs); !errors.Is(err, ErrStaleWarm) {
		t.Errorf("records before the buckets are closed: %v", err)
	}
	for range 2 { // killed and started again
		if err := errors.Join(b.PrepareRebuild(ctx, a, 2, stock, []Added{{Op: "before", Units: 3}}), b.WipeRebuild(ctx, a, 2), b.WriteRebuild(ctx, a, 2, rs[:20])); err != nil {
			t.Fatal(err)
		}
	}
	for range 2 {
		if err := b.WriteRebuild(ctx, a, 2, rs); err != nil {
			t.Fatal(err)
		}
	}
	if b.raw.Exists(ctx, stray).Val() != 0 {
		t.Error("what an earlier life left is still there")
	}
	if n, err := b.OpenWarm(ctx, a, 2); err != nil || n != 2 {
		t.Fatalf("%d, %v", n, err)
	}
	if _, err := b.Reserve(ctx, b.ask(a, "new", 1)); !errors.Is(err, ErrPaused) {
		t.Error(err)
	}
	if err := b.SetPaused(ctx, a, false); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(b.WipeRebuild(ctx, a, 2), b.PrepareRebuild(ctx, a, 2, stock, []Added{{Op: "before", Units: 3}})); !errors.Is(err, ErrStaleWarm) || !errors.Is(err, ErrAlreadyWarm) {
		t.Errorf("an open sale: %v", err)
	}
	levels, err := b.Levels(ctx, a)
	if err != nil || levels["sku-1"]["national"] != 65 { // 100 minus everything held
		t.Errorf("%v, %v", levels, err)
	}
	// An addition that the amounts hold comes late, and one that they do not.
	if err := errors.Join(b.AddStock(ctx, a, "before", "sku-1", "national", 3), b.AddStock(ctx, a, "after", "sku-1", "national", 3)); err != nil {
		t.Error(err)
	}
	if levels, err := b.Levels(ctx, a); err != nil || levels["sku-1"]["national"] != 68 {
		t.Errorf("%v, %v", levels, err)
	}
	for _, x := range rs {
		got, err := b.Order(ctx, x.ID)
		if err != nil || got.Status != x.Status || got.Reason != x.Reason {
			t.Errorf("%+v, %v", got, err)
		}
		if held := b.held(a, x.User); held != map[bool]int{true: 1}[x.Status.Live()] {
			t.Errorf("user %s holds %d", x.User, held)
		}
	}
	waiting, parked := 0, 0
	for i := range 2 {
		s, err := b.OutboxStats(ctx, a.ID, i)
		if err != nil {
			t.Fatal(err)
		}
		waiting += s.Waiting
		parked += s.Parked
	}
	if waiting != 9 || parked != 1 {
		t.Errorf("%d waiting, %d parked", waiting, parked)
	}
	out, err := b.Outbox(ctx, a.ID, rs[32].ID.Bucket, time.Now().Add(time.Minute), 100)
	found := false
	for _, r := range out {
		found = found || r == rs[32].Record // with its digest
	}
	if err != nil || !found {
		t.Errorf("%+v, %v", out, err)
	}
	// Idempotency keys and limits are back: nobody buys twice.
	same := b.ask(a, "u0", 1)
	same.IdemKey, same.IdemDigest = "k", "aa"
	if got := b.must(same); !got.Replay || got.ID != rs[0].ID {
		t.Errorf("%+v", got)
	}
	var limit *LimitError
	if _, err := b.Reserve(ctx, b.ask(a, "u1", 1)); !errors.As(err, &limit) {
		t.Error(err)
	}
	if got := b.must(b.ask(a, "new", 1)); got.Epoch != 2 {
		t.Errorf("epoch %d", got.Epoch)
	}
}

func TestLockIsRenewedAndGivenBackOnEveryPath(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	ctx := ctxFor(t)
	key := b.cfg.Prefix + "seckill:lock:end:a"
	const ttl = 9 * time.Second // a starved machine is late with a renewal, and still in time
	boom := errors.New("boom")
	err := b.Hold(ctx, "end:a", ttl, func(held context.Context) error {
		renewed, left := 0, ttl
		testkit.Eventually(t, patience*2, func() error {
			if err := b.Hold(ctx, "end:a", ttl, func(context.Context) error { return nil }); !errors.Is(err, ErrLocked) {
				t.Fatalf("second holder after %d renewals: %v", renewed, err)
			}
			now, err := b.raw.PTTL(ctx, key).Result()
			if err != nil {
				return err
			}
			if now > left { // nothing else makes it longer
				renewed++
			}
			if left = now; renewed < 2 {
				return fmt.Errorf("renewed %d times", renewed)
			}
			return nil
		})
		if held.Err() != nil {
			t.Error(context.Cause(held))
		}
		return boom
	})
	if !errors.Is(err, boom) || b.raw.Exists(ctx, key).Val() != 0 {
		t.Errorf("%v, lock left: %d", err, b.raw.Exists(ctx, key).Val())
	}
	func() {
		defer func() { _ = recover() }()
		_ = b.Hold(ctx, "end:a", ttl, func(context.Context) error { panic("boom") })
	}()
	if b.raw.Exists(ctx, key).Val() != 0 {
		t.Error("a panic left the lock")
	}
	// Somebody else's lock: the holder is told, and does not remove it.
	err = b.Hold(ctx, "end:a", ttl, func(held context.Context) error {
		if err := b.raw.Set(ctx, key, "another", time.Minute).Err(); err != nil {
			t.Error(err)
		}
		<-held.Done()
		return context.Cause(held)
	})
	if !errors.Is(err, ErrLockLost) || b.raw.Get(ctx, key).Val() != "another" {
		t.Errorf("%v", err)
	}
}

func TestSlowScriptsAndFiguresOfTheServer(t *testing.T) {
	t.Parallel()
	b, _ := privateBench(t, "--slowlog-log-slower-than", "0")
	a := b.open(newSale("slow", map[string]int{"national": 5}))
	b.open(newSale("other", map[string]int{"national": 5}))
	b.must(b.ask(a, "u", 1))
	slow, err := b.SlowScripts(ctxFor(t), a.ID, 0)
	if err != nil || len(slow) == 0 {
		t.Fatalf("%v, %v", slow, err)
	}
	for _, s := range slow {
		if s.Key != b.keys(a.ID, 0).activity() || s.Took <= 0 || s.At.IsZero() {
			t.Errorf("%+v", s)
		}
	}
	if none, err := b.SlowScripts(ctxFor(t), a.ID, time.Hour); err != nil || len(none) != 0 {
		t.Errorf("%v, %v", none, err)
	}
	if n, err := b.MemoryUsed(ctxFor(t)); err != nil || n < 100_000 {
		t.Errorf("%d, %v", n, err)
	}
	if use := b.PoolUse(); use < 0 || use > 1 {
		t.Errorf("pool use %f", use)
	}
}

func TestModeDecidesTheClient(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		cfg  Config
		want any // nil: refused
	}{
		"default":            {Config{}, &redis.Client{}},
		"one cluster node":   {Config{Mode: Cluster, Addrs: []string{"127.0.0.1:1"}}, &redis.ClusterClient{}},
		"sentinel":           {Config{Mode: Sentinel, Addrs: []string{"127.0.0.1:1"}, MasterName: "m"}, &redis.Client{}},
		"two addresses":      {Config{Addrs: []string{"127.0.0.1:1", "127.0.0.1:2"}}, nil},
		"no master":          {Config{Mode: Sentinel}, nil},
		"database 3 of many": {Config{Mode: Cluster, DB: 3}, nil},
		"unknown":            {Config{Mode: "auto"}, nil},
		"negative":           {Config{PoolSize: -1}, nil},
		"missing CA":         {Config{TLS: true, TLSCAFile: "/nonexistent.pem"}, nil},
	} {
		c, err := New(tc.cfg, testkit.Logger(t), nil)
		if tc.want == nil {
			if err == nil {
				t.Errorf("%s: accepted", name)
				_ = c.Close()
			}
			continue
		}
		if err != nil || reflect.TypeOf(c.rdb) != reflect.TypeOf(tc.want) {
			t.Errorf("%s: %v, %T", name, err, c)
			continue
		}
		if err := c.Close(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}
