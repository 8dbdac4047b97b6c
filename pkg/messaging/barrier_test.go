package messaging

import (
	"context"
	"errors"
	"sync"
	"testing"

	"seckill/pkg/testkit"
)

// A barrier goes straight into a queue and is told from events; each channel has a name of its own.
func TestBarriersReachEveryChannelOfAQueue(t *testing.T) {
	t.Parallel()
	c := declared(t, quick(broker(t)))
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
	testkit.Eventually(t, patience, func() error {
		st, err := c.Inspect(within(t, patience), QueueOrders)
		if err == nil && st.Consumers != 3 {
			err = errorf("%+v", st)
		}
		return err
	})
	must(t, c.Publish(within(t, patience), ExchangeEvents, reserved1(1)))
	must(t, c.Publish(within(t, patience), "", Barrier(QueueOrders, "tok", 7, 0), Barrier(QueueOrders, "tok", 7, 1), Barrier(QueueOrders, "tok", 7, 2)))
	testkit.Eventually(t, patience, func() error {
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
	if _, err := c.Inspect(within(t, patience), "seckill.nosuch"); !errors.Is(err, ErrTopology) {
		t.Error(err)
	}
}
