package messaging

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"seckill/pkg/testkit"
)

// A barrier goes straight into a queue and is told from events; each channel has a name of its own.
func TestBarriersReachEveryChannelOfAQueue(t *testing.T) {
	t.Parallel()
	c := declared(t, quick(broker(t)))
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	var mu sync.Mutex
	names := map[string]int{}
	events := 0
	stop := consume(t, c, ConsumerConfig{Queue: QueueOrders, Workers: 3, Prefetch: 8}, func(_ context.Context, batch []Delivery) []Result {
		mu.Lock()
		defer mu.Unlock()
		for _, d := range batch {
			token, round, ok := ReadBarrier(d)
			if !ok {
				events++
			} else if token == "tok" && round == 7 {
				names[d.Consumer]++
			}
		}
		return done(len(batch))
	})
	up(t, c, 3)
	testkit.Eventually(t, 20*time.Second, func() error {
		st, err := c.Inspect(ctx, QueueOrders)
		if err == nil && st.Consumers != 3 {
			err = errorf("%+v", st)
		}
		return err
	})
	must(t, c.Publish(ctx, ExchangeEvents, reserved1(1)))
	must(t, c.Publish(ctx, "", Barrier(QueueOrders, "tok", 7, 0), Barrier(QueueOrders, "tok", 7, 1), Barrier(QueueOrders, "tok", 7, 2)))
	testkit.Eventually(t, 20*time.Second, func() error {
		mu.Lock()
		defer mu.Unlock()
		if len(names) != 3 || events != 1 {
			return errorf("%v, %d events", names, events)
		}
		return nil
	})
	if err := stop(); err != nil {
		t.Error(err)
	}
	if _, err := c.Inspect(ctx, "seckill.nosuch"); !errors.Is(err, ErrTopology) {
		t.Error(err)
	}
}
