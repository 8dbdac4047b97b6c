package stock

import (
	"errors"
	"strings"
	"testing"
	"time"
)

func TestAnsweredKnowsWhetherAKeyHasAnOrder(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	a := b.open(newSale("answered", map[string]int{"national": 5}))
	r := b.ask(a, "u1", 1)
	r.IdemKey, r.IdemDigest = "k1", "d"
	for _, want := range []bool{false, true} {
		got, err := b.Answered(ctxFor(t), a.ID, 0, "u1", "k1")
		if err != nil || got != want {
			t.Fatalf("answered %v, %v; want %v", got, err, want)
		}
		b.must(r)
	}
	if got, err := b.Answered(ctxFor(t), a.ID, 0, "u2", "k1"); err != nil || got {
		t.Errorf("somebody else's key: %v, %v", got, err)
	}
	if _, err := b.Answered(ctxFor(t), a.ID, 0, "u1", "a:b"); !errors.Is(err, ErrInvalid) {
		t.Errorf("odd key: %v", err)
	}
}

// One buyer's overwritten idempotency key stopped the relay, the end and the rebuild of his sale.
func TestADamagedIdempotencyKeyHidesNoOther(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	a := b.open(newSale("keys", map[string]int{"national": 10}))
	var recs []Record
	for _, user := range []string{"u1", "u2", "u3"} {
		ask := b.ask(a, user, 1)
		ask.IdemKey, ask.IdemDigest = "key", strings.Repeat("ab", 32)
		recs = append(recs, b.must(ask).Record)
	}
	damaged := b.cfg.Prefix + "seckill:idem:{keys:0}:u2:key"
	if err := b.raw.Del(ctxFor(t), damaged).Err(); err != nil {
		t.Fatal(err)
	}
	if err := b.raw.LPush(ctxFor(t), damaged, "x").Err(); err != nil {
		t.Fatal(err)
	}
	waiting, err := b.Outbox(ctxFor(t), "keys", 0, time.Now().Add(time.Hour), 10)
	if err != nil || len(waiting) != 3 {
		t.Fatalf("%d orders wait, %v", len(waiting), err)
	}
	for i := range recs {
		recs[i].IdemDigest = ""
	}
	if err := b.Digests(ctxFor(t), recs); err != nil {
		t.Fatal(err)
	}
	for i, want := range []bool{true, false, true} {
		if (recs[i].IdemDigest != "") != want {
			t.Errorf("order %d: digest %q", i, recs[i].IdemDigest)
		}
	}
}
