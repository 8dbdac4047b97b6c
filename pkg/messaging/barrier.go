package messaging

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
)

// A barrier is a message that carries nothing. It is published straight into a queue, under the queue's
// own name, which is no event's; who handles it knows that everything that was delivered on the same
// channel before it has been handled: a worker takes no delivery in hand before the whole batch before it
// is acknowledged.

const (
	headerBarrier = "barrier"
	headerRound   = "barrier-round"
)

// Barrier makes one barrier message for a queue; publish it on the exchange "". token and round come back
// with it, number tells apart the barriers of one round.
func Barrier(queue, token string, round, number int) Message {
	return Message{
		ID: strings.Join([]string{"barrier", token, queue, strconv.Itoa(round), strconv.Itoa(number)}, ":"), Key: queue, Orders: 1, Time: time.Now(),
		Headers: map[string]string{headerBarrier: token, headerRound: strconv.Itoa(round)},
	}
}

// ReadBarrier says whether a delivery is a barrier, and which.
func ReadBarrier(d Delivery) (token string, round int, ok bool) {
	if d.Key != d.Queue || d.Headers[headerBarrier] == "" {
		return "", 0, false
	}
	round, err := strconv.Atoi(d.Headers[headerRound])
	return d.Headers[headerBarrier], round, err == nil
}

// QueueState is what the broker says of a queue.
type QueueState struct {
	Ready     int // messages that nobody has in hand
	Consumers int // channels that consume from it, of all processes
}

// Inspect looks at a queue. It waits for a connection until ctx ends. ErrTopology: it is not there.
func (c *Client) Inspect(ctx context.Context, queue string) (QueueState, error) {
	conn, err := c.consume.wait(ctx)
	if err != nil {
		return QueueState{}, err
	}
	var st QueueState
	err = c.keeper.onChannel(ctx, conn, func(ch *amqp.Channel) error {
		q, err := ch.QueueDeclarePassive(queue, true, false, false, false, nil)
		st = QueueState{Ready: q.Messages, Consumers: q.Consumers}
		return refused(queue, err)
	})
	if err != nil {
		return QueueState{}, fmt.Errorf("inspect queue: %w", err)
	}
	return st, nil
}
