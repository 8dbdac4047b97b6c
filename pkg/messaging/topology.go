package messaging

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"strings"
	"sync"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
)

// Argument values of the design. Each is explicit, so that 3.10 and 4.x behave alike.
const (
	deliveryLimit     = 20            // then the broker dead-letters by itself
	deadDeliveryLimit = 1_000_000_000 // absent means 20 on 4.x; -1 drops at the first requeue on 3.10
)

// TopologyMismatchError says that the broker holds a queue or exchange with other arguments. Nothing
// was changed or deleted: an operator has to decide what becomes of what lies in it.
type TopologyMismatchError struct {
	Queue    string // queue or exchange
	Argument string
	Wanted   string
	Found    string
	Text     string // the broker's own words
}

// Error names queue, argument, wanted and found.
func (e *TopologyMismatchError) Error() string {
	if e.Argument == "" {
		return fmt.Sprintf("topology: %s is declared differently: %s; nothing was changed", e.Queue, e.Text)
	}
	return fmt.Sprintf("topology: %s has %s = %s, wanted %s; nothing was changed", e.Queue, e.Argument, e.Found, e.Wanted)
}

// Unwrap makes it an ErrTopology.
func (e *TopologyMismatchError) Unwrap() error { return ErrTopology }

type exchange struct{ name, kind string }

type queue struct {
	name string
	args amqp.Table
}

type binding struct{ queue, exchange, key string }

// layout is the whole topology: the one place that knows it. It is declared in this order, queues before
// exchanges: what order-api publishes to comes last, so that on a broker where one queue is different,
// which ends the worker's start, order-api finds nothing to publish to and takes no traffic.
func layout(tiers []time.Duration) ([]exchange, []queue, []binding) {
	work := func(name, deadLetterTo string) queue {
		return queue{name, amqp.Table{
			"x-queue-type": "quorum", "x-dead-letter-exchange": deadLetterTo, "x-dead-letter-strategy": "at-least-once",
			"x-overflow": "reject-publish", "x-delivery-limit": int64(deliveryLimit),
		}}
	}
	exchanges := []exchange{{ExchangeDead, amqp.ExchangeFanout}}
	queues := []queue{
		{QueueDead, amqp.Table{"x-queue-type": "quorum", "x-delivery-limit": int64(deadDeliveryLimit)}},
		work(QueueOrders, ExchangeDead), work(QueuePayments, ExchangeDead), work(QueueRollbacks, ExchangeDead),
	}
	bindings := []binding{
		{QueueDead, ExchangeDead, ""},
		{QueueOrders, ExchangeEvents, KeyOrderReserved},
		{QueuePayments, ExchangeEvents, KeyOrderPaid},
		{QueueRollbacks, ExchangeEvents, KeyOrderExpired},
		{QueueRollbacks, ExchangeEvents, KeyOrderCancelRequested},
		{QueueRollbacks, ExchangeEvents, KeyOrderRefundRequested},
		{QueueRollbacks, ExchangeEvents, KeyActivityEnded},
	}
	for _, t := range tiers {
		// A fanout exchange keeps the routing key as it is, and without x-dead-letter-routing-key the
		// message leaves the queue under it.
		name := DelayExchange(t)
		q := work(name, ExchangeEvents)
		q.args["x-message-ttl"] = t.Milliseconds()
		exchanges = append(exchanges, exchange{name, amqp.ExchangeFanout})
		queues = append(queues, q)
		bindings = append(bindings, binding{name, name, ""})
	}
	exchanges = append(exchanges, exchange{ExchangeEvents, amqp.ExchangeTopic})
	return exchanges, queues, bindings
}

// Modes of the keeper.
const (
	keepNothing  = iota
	keepChecked  // look passively (order-api)
	keepDeclared // declare again what is gone (worker)
)

// keeper watches over the topology: after each reconnect, from time to time, and whenever a publish or
// a consumer met something that is not there. In the worker it repairs by declaring everything again.
// It uses the consuming connection, which an alarm does not block.
type keeper struct {
	cfg     Config
	log     *slog.Logger
	link    *link
	metrics *metrics
	absent  func() []string // exchanges that a publish did not find
	found   func()          // they are there

	poke chan struct{}

	mu       sync.Mutex
	mode     int
	topology Topology
	err      error
	probed   bool
	doubt    time.Time // until then a passive look is not believed: it cannot see bindings
	missed   bool      // what is said of the topology is what a publisher or consumer missed

	once chan struct{} // a token: one look at a time
}

func newKeeper(cfg Config, log *slog.Logger, l *link, m *metrics) *keeper {
	k := &keeper{cfg: cfg, log: log, link: l, metrics: m, poke: make(chan struct{}, 1), topology: TopologyUnknown, once: make(chan struct{}, 1)}
	k.once <- struct{}{}
	return k
}

// Declare declares the whole topology (worker only): it creates what is not there and changes nothing
// that is. It waits for a connection until ctx ends. A queue or exchange with other arguments is a
// *TopologyMismatchError; a broker without at-least-once dead-lettering is an ErrTopology. After it
// has succeeded once, the client declares everything again by itself after each reconnect, when a
// message was returned or something was not found, and at each Config.TopologyInterval.
func (c *Client) Declare(ctx context.Context) error { return c.keeper.ask(ctx, keepDeclared) }

// Check looks passively whether what order-api publishes to is there, waits for a connection until ctx
// ends, and sets State().Topology. From then on, whatever it found, the client looks again by itself.
// An error is ErrNotConnected or an ErrTopology.
func (c *Client) Check(ctx context.Context) error { return c.keeper.ask(ctx, keepChecked) }

func (k *keeper) ask(ctx context.Context, mode int) error {
	k.mu.Lock()
	if mode == keepChecked && k.mode < mode {
		k.mode = mode
	}
	k.mu.Unlock()
	err := k.look(ctx, mode)
	k.mu.Lock()
	if err == nil && k.mode < mode {
		k.mode = mode
	}
	k.mu.Unlock()
	if err != nil {
		k.nudge() // it looks sooner now
	}
	return err
}

// suspect is told by publishers and consumers what they missed.
func (k *keeper) suspect(err error) {
	k.mu.Lock()
	k.doubt = time.Now().Add(5 * time.Second)
	k.mu.Unlock()
	k.set(TopologyMissing, err, true)
	k.nudge()
}

func (k *keeper) nudge() {
	select {
	case k.poke <- struct{}{}:
	default:
	}
}

func (k *keeper) set(t Topology, err error, missed bool) {
	k.mu.Lock()
	changed := k.topology != t
	k.topology, k.err, k.missed = t, err, missed
	k.mu.Unlock()
	k.metrics.topology.Set(bit(t == TopologyOK))
	if !changed {
		return
	}
	if err != nil {
		k.log.Error("broker topology is not as it must be", "topology", string(t), "error", err)
	} else {
		k.log.Info("broker topology", "topology", string(t))
	}
}

func (k *keeper) state() (Topology, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.topology, k.err
}

// run looks again and again until the link has ended.
func (k *keeper) run(ctx context.Context) {
	const pace = 500 * time.Millisecond // at most one look in this time, however many messages come back
	for {
		_, changed, ended := k.link.current()
		if ended || ctx.Err() != nil {
			return
		}
		interval := k.cfg.TopologyInterval
		if t, _ := k.state(); t == TopologyMissing || t == TopologyDifferent {
			interval = min(interval, 2*pace)
		}
		t := time.NewTimer(interval)
		select {
		case <-t.C:
		case <-changed:
		case <-k.poke:
		case <-ctx.Done():
		}
		t.Stop()
		k.mu.Lock()
		mode, idle := k.mode, k.mode == keepNothing && !k.missed
		k.mu.Unlock()
		if c, _, _ := k.link.current(); c == nil || idle {
			continue
		}
		_ = k.look(ctx, mode) // the state has it
		t.Reset(pace)
		select {
		case <-t.C:
		case <-ctx.Done():
		}
		t.Stop()
	}
}

// look declares or checks once.
func (k *keeper) look(ctx context.Context, mode int) error {
	select {
	case <-k.once:
	case <-ctx.Done():
		return fmt.Errorf("%w: %w", ErrNotConnected, ctx.Err())
	}
	defer func() { k.once <- struct{}{} }()
	for {
		c, err := k.link.wait(ctx)
		if err != nil {
			return err
		}
		if err = k.lookAt(ctx, c, mode); !errors.Is(err, ErrNotConnected) {
			return err
		}
		// The connection broke meanwhile, which says nothing of the topology.
		k.log.WarnContext(ctx, "could not look at the topology, trying again", "error", err)
		t := time.NewTimer(k.cfg.ReconnectMin)
		select {
		case <-t.C:
		case <-ctx.Done():
			t.Stop()
			return err
		}
	}
}

func (k *keeper) lookAt(ctx context.Context, c *conn, mode int) error {
	var err error
	good := TopologyOK
	switch mode {
	case keepDeclared:
		err = k.declare(ctx, c)
	case keepChecked:
		err = k.check(ctx, c, append(k.absent(), ExchangeEvents), QueueOrders, QueuePayments, QueueRollbacks)
	default:
		good, err = TopologyUnknown, k.check(ctx, c, k.absent())
	}
	var mismatch *TopologyMismatchError
	switch {
	case err == nil:
		k.found()
		k.mu.Lock()
		doubted := mode != keepDeclared && time.Now().Before(k.doubt)
		// With nothing to keep, only what was missed was looked for: that says nothing of anything else.
		doubted = doubted || mode == keepNothing && !k.missed
		k.mu.Unlock()
		if !doubted {
			k.set(good, nil, false)
		}
	case errors.As(err, &mismatch):
		k.set(TopologyDifferent, err, mode == keepNothing)
	case errors.Is(err, ErrTopology):
		k.set(TopologyMissing, err, mode == keepNothing)
	default:
		err = fmt.Errorf("%w: %w", ErrNotConnected, err)
	}
	return err
}

func (k *keeper) declare(ctx context.Context, c *conn) error {
	if err := k.probe(ctx, c); err != nil {
		return err
	}
	exchanges, queues, bindings := layout(k.cfg.DelayTiers)
	var steps []func(*amqp.Channel) error
	for _, q := range queues {
		steps = append(steps, func(ch *amqp.Channel) error {
			_, err := ch.QueueDeclare(q.name, true, false, false, false, q.args)
			return refused(q.name, err)
		})
	}
	for _, e := range exchanges {
		steps = append(steps, func(ch *amqp.Channel) error {
			return refused(e.name, ch.ExchangeDeclare(e.name, e.kind, true, false, false, false, nil))
		})
	}
	for _, b := range bindings {
		steps = append(steps, func(ch *amqp.Channel) error {
			return refused(b.queue, ch.QueueBind(b.queue, b.key, b.exchange, false, nil))
		})
	}
	return k.onChannel(ctx, c, steps...)
}

// check looks whether exchanges and queues are there. A passive declare of something that is not
// closes its channel, so each has one of its own. It cannot see arguments or bindings: those show in
// Declare and in returned messages.
func (k *keeper) check(ctx context.Context, c *conn, exchanges []string, queues ...string) error {
	for _, name := range exchanges {
		err := k.onChannel(ctx, c, func(ch *amqp.Channel) error {
			return refused(name, ch.ExchangeDeclarePassive(name, amqp.ExchangeTopic, true, false, false, false, nil))
		})
		if err != nil {
			return err
		}
	}
	for _, name := range queues {
		err := k.onChannel(ctx, c, func(ch *amqp.Channel) error {
			_, err := ch.QueueDeclarePassive(name, true, false, false, false, nil)
			return refused(name, err)
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// onChannel takes steps on a channel of their own until one fails. Each has the RPC time-out for itself: a
// broker that is slow by the call, as a cluster may be that has to place each queue, is not one that is
// away. Nobody waits for the rest when ctx has ended.
func (k *keeper) onChannel(ctx context.Context, c *conn, steps ...func(*amqp.Channel) error) error {
	var ch *amqp.Channel
	err := c.bounded(k.cfg.RPCTimeout, func() (err error) {
		ch, err = c.Channel()
		return err //nolint:wrapcheck // below
	})
	if err != nil {
		return fmt.Errorf("open channel: %w", err)
	}
	for _, step := range steps {
		if err = ctx.Err(); err != nil {
			break
		}
		if err = c.bounded(k.cfg.RPCTimeout, func() error { return step(ch) }); err != nil {
			break
		}
	}
	_ = c.bounded(k.cfg.RPCTimeout, ch.Close)
	return err
}

// probe finds out, once, whether the broker really does at-least-once dead-lettering. On 3.10 and 3.11
// it silently does at-most-once unless the feature flag stream_queue is on; with the flag off it also
// refuses to declare a stream, and that is what can be seen from here. Later versions always have it.
func (k *keeper) probe(ctx context.Context, c *conn) error {
	k.mu.Lock()
	probed := k.probed
	k.mu.Unlock()
	if probed {
		return nil
	}
	version, _ := c.Properties["version"].(string)
	product, _ := c.Properties["product"].(string)
	major, minor := release(version)
	var err error
	switch {
	case product != "RabbitMQ" || major == 0:
		k.log.WarnContext(ctx, "cannot tell whether this broker dead-letters at least once", "product", product, "version", version)
	case major < 3 || major == 3 && minor < 10:
		err = fmt.Errorf("%w: RabbitMQ %s has no at-least-once dead-lettering; 3.10 is the oldest that has", ErrTopology, version)
	case major == 3 && minor < 12:
		err = k.probeStream(ctx, c, version)
	}
	if err != nil {
		return err
	}
	k.mu.Lock()
	k.probed = true
	k.mu.Unlock()
	return nil
}

func (k *keeper) probeStream(ctx context.Context, c *conn, version string) error {
	// A name of its own: two programs that declare and delete the same stream at once hang in the broker.
	name := "seckill.probe." + rand.Text()
	err := k.onChannel(ctx, c, func(ch *amqp.Channel) error {
		_, err := ch.QueueDeclare(name, true, false, false, false, amqp.Table{"x-queue-type": "stream", "x-max-length-bytes": int64(1)})
		return err //nolint:wrapcheck // judged below
	}, func(ch *amqp.Channel) error {
		_, err := ch.QueueDelete(name, false, false, false)
		return err //nolint:wrapcheck // judged below
	})
	var e *amqp.Error
	switch {
	case err == nil:
	case errors.As(err, &e) && e.Server && strings.Contains(e.Reason, "feature flag"):
		return fmt.Errorf("%w: RabbitMQ %s has the feature flag stream_queue off and would lose dead-lettered messages; run: rabbitmqctl enable_feature_flag stream_queue", ErrTopology, version)
	case errors.As(err, &e) && e.Server:
		// Not allowed to create it, or a policy in the way.
		k.log.WarnContext(ctx, "cannot tell whether this broker dead-letters at least once: look at the feature flag stream_queue", "version", version, "error", err)
	default:
		return err
	}
	return nil
}

func release(version string) (major, minor int) {
	parts := strings.SplitN(version, ".", 3)
	if len(parts) < 2 {
		return 0, 0
	}
	major, _ = strconv.Atoi(parts[0])
	minor, _ = strconv.Atoi(parts[1])
	return major, minor
}

// refused reads the broker's answer to a declare, a bind or a passive declare.
func refused(name string, err error) error {
	if err == nil {
		return nil
	}
	var e *amqp.Error
	if !errors.As(err, &e) || !e.Server {
		return fmt.Errorf("declare %s: %w", name, err)
	}
	switch e.Code {
	case amqp.PreconditionFailed:
		return mismatch(name, e.Reason)
	case amqp.NotFound:
		return fmt.Errorf("%w: %s is not there", ErrTopology, name)
	case amqp.AccessRefused, amqp.NotAllowed, amqp.NotImplemented, amqp.ResourceLocked:
		return fmt.Errorf("%w: %s: %s", ErrTopology, name, e.Reason)
	}
	return fmt.Errorf("declare %s: %w", name, err)
}

// mismatch takes argument, wanted and found out of the broker's text:
//
//	PRECONDITION_FAILED - inequivalent arg 'x-message-ttl' for queue 'q' in vhost '/': received the
//	value '1000' of type 'long' but current is the value '5000' of type 'signedint'
//
// where either side may also read "none", or be a bare quoted value.
func mismatch(name, text string) *TopologyMismatchError {
	e := &TopologyMismatchError{Queue: name, Text: text, Argument: between(text, "arg '", "'")}
	_, values, _ := strings.Cut(text, "received ")
	wanted, found, ok := strings.Cut(values, " but current is ")
	if e.Argument == "" || !ok {
		e.Argument = ""
		return e
	}
	value := func(s string) string {
		if v := between(s, "'", "'"); v != "" {
			return v
		}
		return strings.TrimSpace(s)
	}
	e.Wanted, e.Found = value(wanted), value(found)
	return e
}
