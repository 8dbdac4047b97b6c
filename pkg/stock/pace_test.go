package stock

import (
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
)

// Nobody waits for company but those who come behind a crowd, and they do not wait for ever.
func TestOnlyACrowdIsPaced(t *testing.T) {
	c := &Client{
		cfg: Config{PipelineSize: 4, PipelinePace: time.Hour}, queue: make(chan *item, 16), closing: make(chan struct{}),
	}
	reservation := func() *item { return &item{ask: &ask{}, work: 1} }
	queue := func(items ...*item) {
		for _, it := range items {
			c.queue <- it
		}
	}
	takes := func(want int, what string) {
		t.Helper()
		if got := len(c.gather(nil)); got != want {
			t.Errorf("%s: %d together, want %d", what, got, want)
		}
	}
	queue(reservation())
	takes(1, "the first")
	queue(reservation(), reservation())
	takes(2, "behind one alone")
	queue(&item{cmds: make([]redis.Cmder, 3), work: 3})
	takes(1, "behind two")
	queue(reservation(), reservation(), reservation())
	takes(3, "behind something else") // a crowd
	queue(reservation(), reservation(), reservation(), reservation(), reservation())
	takes(4, "a full pipeline behind a crowd")

	// The one that was left behind waits, and the wait ends with the client.
	done := make(chan int)
	go func() { done <- len(c.gather(nil)) }()
	for len(c.queue) > 0 {
		time.Sleep(time.Millisecond)
	}
	queue(reservation(), reservation())
	close(c.closing)
	if n := <-done; n != 3 {
		t.Errorf("behind a crowd: %d together, want 3", n)
	}
	takes(0, "closed and empty")

	// Once the time has passed there is nothing to wait for.
	c.closing = make(chan struct{})
	c.gate.last = c.gate.last.Add(-time.Hour)
	queue(reservation())
	takes(1, "long after a crowd")

	c.cfg.PipelinePace = -1
	queue(reservation(), reservation(), reservation())
	takes(3, "without a pace")
	queue(reservation())
	takes(1, "behind a crowd, without a pace")
}

func TestAPaceThatBuyersWouldNoticeIsRefused(t *testing.T) {
	if err := (Config{PipelinePace: time.Second}).Validate(); err == nil {
		t.Error("a second between pipelines was accepted")
	}
	for _, pace := range []time.Duration{-1, 0, maxPace} {
		if err := (Config{PipelinePace: pace}).Validate(); err != nil {
			t.Errorf("%s: %v", pace, err)
		}
	}
}
