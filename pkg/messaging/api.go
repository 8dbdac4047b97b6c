package messaging

import (
	"context"
	"errors"
	"time"
)

// Names of the topology. All queues are durable quorum queues with every argument explicit.
const (
	ExchangeEvents = "seckill.events" // topic, no alternate exchange
	ExchangeDead   = "seckill.dlx"    // fanout

	QueueOrders    = "seckill.orders"
	QueuePayments  = "seckill.payments"
	QueueRollbacks = "seckill.rollbacks"
	QueueDead      = "seckill.dead"
)

// Routing keys; each is also the type of the event.
const (
	KeyOrderReserved        = "order.reserved"
	KeyOrderPaid            = "order.paid"
	KeyOrderExpired         = "order.expired"
	KeyOrderCancelRequested = "order.cancel_requested"
	KeyOrderRefundRequested = "order.refund_requested"
	KeyActivityEnded        = "activity.ended"
)

// MaxOrdersPerMessage bounds what order.reserved and order.expired carry.
const MaxOrdersPerMessage = 64

// What a publish can end with, besides nil (confirmed by the broker and routed to a queue).
// ErrUnknownOutcome means neither published nor not published: publish again with the same id.
var (
	ErrNotConnected   = errors.New("broker not connected")
	ErrBlocked        = errors.New("broker is blocking publishers")
	ErrReturned       = errors.New("message returned: no queue is bound for its routing key")
	ErrNacked         = errors.New("message refused by the broker")
	ErrUnknownOutcome = errors.New("publish outcome unknown")
	ErrTopology       = errors.New("broker topology missing or different")
	ErrInvalidMessage = errors.New("message cannot be published") // no id, too many orders, too large
	ErrClosed         = errors.New("messaging client closed")
)

// Message is one AMQP message as this system sees it.
type Message struct {
	ID      string            // unique message id; the same event always has the same id
	Key     string            // routing key and event type
	Body    []byte            // protobuf
	Orders  int               // orders inside; the weight of the message in a batch, at least 1
	Attempt int               // 0 for the first delivery; raised by each back-off retry
	Headers map[string]string // trace context and other text headers (all broker-made ones stripped)
	Time    time.Time         // when the event was made, UTC
}

// Delivery is a message handed to a Handler.
type Delivery struct {
	Message
	Queue         string
	Redelivered   bool
	DeliveryCount int // how often the broker has delivered it before (x-delivery-count)
	// Consumer names the channel it came on, among all processes and for all time: after a
	// reconnect it is another one.
	Consumer string
	// For letters from QueueDead: why and from where, from our own headers or from x-death.
	DeadClass, DeadError, DeadQueue string
}

// Retry asks for a copy of a message through the delay tier, with the attempt raised.
type Retry struct {
	Message Message
	After   time.Duration // rounded up to the next delay tier
	Err     error         // why; told in the dead letter when the attempts are used up; may be nil
}

// Dead asks for a message to be dead-lettered.
type Dead struct {
	Message Message
	Class   string // short and stable: "undecodable", "invalid_order", "conflict", "attempts_exhausted", ...
	Err     error
}

// Result is what a Handler says of one delivery. The consumer publishes Retries and Dead, waits for
// their confirms, runs After, and then acks. The zero Result is "done". A handler of QueueDead may
// not ask for Retries or Dead: there is no further place for a letter, so it is held.
type Result struct {
	Retries []Retry
	Dead    []Dead
	// Hold means a store is away: nothing was done, attempts are not spent. The consumer pauses,
	// keeps the deliveries (for less than the broker's consumer time-out) and hands the same
	// deliveries to the handler again. Retries and Dead are ignored when it is set.
	Hold error
	// After runs when Retries and Dead are confirmed and before the ack. If it fails the consumer
	// holds: it runs the After again, not the handler.
	After func(context.Context) error
}

// Handler handles a batch of deliveries and returns one Result for each, in order. It is never
// called with an empty batch, and has to end when ctx does. A panic inside it (or a wrong number of
// results) is a Hold with the panic as error; after the third one the deliveries are handed over one
// by one, then the orders of the culprit one by one, and what still panics is dead-lettered as "panic".
type Handler func(ctx context.Context, batch []Delivery) []Result
