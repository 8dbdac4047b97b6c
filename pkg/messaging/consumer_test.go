package messaging

import (
	"context"
	"slices"
	"sync"
	"testing"
	"time"

	"seckill/pkg/testkit"
)

// ledger remembers what a handler was given.
type ledger struct {
	mu  sync.Mutex
	ids []string
	all []Delivery
}

func (l *ledger) add(batch []Delivery) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, d := range batch {
		l.ids = append(l.ids, d.ID)
		l.all = append(l.all, d)
	}
}

func (l *ledger) seen() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.ids)
}

func (l *ledger) deliveries() []Delivery {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.all)
}

func TestMessagesArriveAsTheyWereSentAndAreAcknowledged(t *testing.T) {
	t.Parallel()
	url := testkit.RabbitMQ(t)
	c := declared(t, quick(url))
	a := newAdmin(t, url)
	var l ledger
	stop := consume(t, c, ConsumerConfig{Queue: QueueOrders, Workers: 2, BatchOrders: 16, BatchWait: 5 * time.Millisecond}, func(_ context.Context, b []Delivery) []Result {
		l.add(b)
		return done(len(b))
	})
	var msgs []Message
	for i := range 100 {
		m := reserved1(i)
		m.Headers = map[string]string{"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
		msgs = append(msgs, m)
	}
	must(t, c.Publish(t.Context(), ExchangeEvents, msgs...))
	testkit.Eventually(t, 10*time.Second, func() error {
		if n := len(l.seen()); n != 100 {
			return errorf("%d handled", n)
		}
		return nil
	})
	if err := stop(); err != nil {
		t.Error(err)
	}
	a.has(QueueOrders, 0)
	for _, d := range l.deliveries() {
		if d.Headers["traceparent"] == "" || d.Attempt != 0 || d.Orders != 1 || d.Queue != QueueOrders || d.Key != KeyOrderReserved {
			t.Fatalf("delivery %+v", d)
		}
		good, bad, err := DecodeOrderReserved(d.Message)
		if err != nil || len(bad) > 0 || len(good) != 1 || !d.Time.Equal(good[0].ReservedAt) {
			t.Fatalf("decode: %v %v %v", good, bad, err)
		}
	}
}
