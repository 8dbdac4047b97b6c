package persist_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/rabbitmq/amqp091-go"

	"seckill/pkg/messaging"
	"seckill/pkg/order"
	"seckill/pkg/testkit"
	"seckill/services/order-worker/internal/workertest"
)

// O25 a, O17 b: the database is away in the middle of a backlog. The consumer holds, spends no
// attempts, nothing becomes a dead letter, and every order is written in the end.
func TestDatabaseThatIsAwayHoldsTheQueueAndLosesNothing(t *testing.T) {
	private := testkit.StartMySQL(t)
	url := testkit.RabbitMQ(t)
	b := workertest.New(t, workertest.Options{DSN: private.DSN("sale"), BrokerURL: url})
	s := b.Open(t, 200)
	orders := s.Buyers(100)
	publish := func(orders []order.Order) {
		t.Helper()
		for _, o := range orders {
			if err := b.Broker.Publish(t.Context(), messaging.ExchangeEvents, messaging.OrderReserved([]order.Order{o})); err[0] != nil {
				t.Fatal(err[0])
			}
		}
	}
	publish(orders[:50])
	ctx, cancel := context.WithCancel(t.Context())
	holds := make(chan struct{}, 1000)
	consumed := make(chan error, 1)
	go func() {
		consumed <- b.Broker.Consume(ctx, messaging.ConsumerConfig{Queue: messaging.QueueOrders, Prefetch: 20, BatchOrders: 10},
			func(ctx context.Context, batch []messaging.Delivery) []messaging.Result {
				results := b.Persist.Handle(ctx, batch)
				for _, r := range results {
					if r.Hold != nil {
						select {
						case holds <- struct{}{}:
						default:
						}
					}
				}
				return results
			})
	}()
	testkit.Eventually(t, time.Minute, func() error {
		if n := b.Int(t, "SELECT COUNT(*) FROM orders"); n != 50 {
			return fmt.Errorf("%d rows", n)
		}
		return nil
	})
	private.Kill()
	publish(orders[50:])
	for range 3 { // three rounds of holding at least
		select {
		case <-holds:
		case <-time.After(60 * time.Second):
			t.Fatal("the handler does not hold")
		}
	}
	private.Restart()
	testkit.Eventually(t, 60*time.Second, func() error {
		if n := b.Int(t, "SELECT COUNT(*) FROM orders WHERE status='pending'"); n != 100 {
			return fmt.Errorf("%d rows", n)
		}
		return nil
	})
	for _, o := range orders {
		testkit.Eventually(t, time.Minute, func() error {
			if got := b.Record(t, o.ID).Status; got != order.Pending {
				return fmt.Errorf("record of %s is %s", o.ID, got)
			}
			return nil
		})
	}
	cancel()
	if err := <-consumed; err != nil {
		t.Error(err)
	}
	conn, err := amqp091.Dial(url)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	ch, err := conn.Channel()
	if err != nil {
		t.Fatal(err)
	}
	for _, queue := range []string{messaging.QueueDead, messaging.QueueOrders} {
		testkit.Eventually(t, time.Minute, func() error { // no answer says that an ack has arrived
			q, err := ch.QueueDeclarePassive(queue, true, false, false, false, nil)
			if err == nil && q.Messages != 0 {
				err = fmt.Errorf("%d messages in %s", q.Messages, queue)
			}
			return err
		})
	}
	if n := b.Store.SQL().Stats().InUse; n != 0 {
		t.Errorf("%d connections are still in use", n)
	}
	s.Balanced()
}
