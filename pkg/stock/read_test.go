package stock

import (
	"errors"
	"testing"
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
