package messaging

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// Topology is what is known about the broker's exchanges and queues.
type Topology string

// What is known about the topology.
const (
	TopologyUnknown   Topology = "unknown"   // not looked at yet, or the broker cannot be asked
	TopologyOK        Topology = "ok"        // everything that was looked at is there
	TopologyMissing   Topology = "missing"   // an exchange, queue or binding is not there
	TopologyDifferent Topology = "different" // a queue or exchange has other arguments
)

// State is a snapshot for readiness and status pages.
type State struct {
	Connected     bool // both connections stand and messages can be published
	Blocked       bool // the broker blocks publishers (memory or disk alarm)
	BlockedReason string
	Topology      Topology
	TopologyError error // why it is missing or different; nil otherwise
	// Consumers are the channels that should consume, ConsumersUp those that do at the moment. A
	// worker is not healthy while they differ.
	Consumers, ConsumersUp int
}

// Client is the connection of one process to the broker. Its methods are safe for concurrent use.
type Client struct {
	cfg     Config
	log     *slog.Logger
	metrics *metrics

	instance string // a random name of this client

	publish, consume *link
	pub              *publisher
	keeper           *keeper

	consumers, consumersUp atomic.Int64
	tags                   atomic.Int64 // numbers consumer tags

	mu      sync.Mutex
	started bool
	closed  bool
	cancel  context.CancelFunc
	closeBy atomic.Int64 // when closing connections must be over, Unix nanoseconds
	links   sync.WaitGroup
	running sync.WaitGroup
}

// closeTimeout bounds Close when its context has no deadline.
const closeTimeout = 10 * time.Second

// New checks the configuration and makes a client. It does no I/O; see Start. The metrics are
// registered with reg, which may be nil; log may not.
func New(cfg Config, log *slog.Logger, reg prometheus.Registerer) (*Client, error) {
	cfg = cfg.WithDefaults()
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	m, err := newMetrics(reg)
	if err != nil {
		return nil, err
	}
	c := &Client{cfg: cfg, log: log, metrics: m, instance: rand.Text()}
	c.publish = newLink(rolePublish, cfg, log, m)
	c.consume = newLink(roleConsume, cfg, log, m)
	c.keeper = newKeeper(cfg, log, c.consume, m)
	c.pub = newPublisher(cfg, log, c.publish, m, c.keeper.suspect)
	c.keeper.absent, c.keeper.found = c.pub.lacking, c.pub.found
	return c, nil
}

// Start begins to connect in the background and keeps at it until Close; it does not wait for a
// connection, and the end of ctx does not end the client (its values are used). A second call does
// nothing.
func (c *Client) Start(ctx context.Context) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.started || c.closed {
		return
	}
	c.started = true
	ctx, c.cancel = context.WithCancel(context.WithoutCancel(ctx))
	left := func() time.Duration { return max(time.Until(time.Unix(0, c.closeBy.Load())), time.Millisecond) }
	for _, l := range []*link{c.publish, c.consume} {
		c.links.Add(1)
		go func() {
			defer c.links.Done()
			l.run(ctx, left)
		}()
	}
	for range c.cfg.PublishChannels {
		c.running.Add(1)
		go func() {
			defer c.running.Done()
			c.pub.run(ctx)
		}()
	}
	c.running.Add(1)
	go func() {
		defer c.running.Done()
		c.keeper.run(ctx)
	}()
}

// Close lets no new publish in, waits for outstanding confirms, closes both connections and joins
// every goroutine. It ends with ctx (after 10 s if ctx has no deadline): a broker that does not answer
// (blocked, gone) loses its socket. What was not confirmed by then ends as ErrUnknownOutcome, and
// Close returns an error. Consume calls should have ended before; a second call does nothing.
func (c *Client) Close(ctx context.Context) error {
	c.mu.Lock()
	started, closed := c.started, c.closed
	c.closed = true
	c.mu.Unlock()
	if closed {
		return nil
	}
	if _, ok := ctx.Deadline(); !ok {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, closeTimeout)
		defer cancel()
	}
	// A part of the time is kept for closing the connections.
	deadline, _ := ctx.Deadline()
	wait, cancel := context.WithDeadline(ctx, deadline.Add(-time.Until(deadline)/5))
	defer cancel()
	var errs []error
	if err := c.pub.shut(wait); err != nil {
		errs = append(errs, err)
	}
	if started {
		c.closeBy.Store(deadline.UnixNano())
		c.cancel()
		c.links.Wait()
		c.running.Wait()
	} else {
		c.publish.set(nil, true)
		c.consume.set(nil, true)
	}
	c.pub.empty()
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("close messaging: %w", err)
	}
	return nil
}

// State tells how things stand. It does no I/O.
func (c *Client) State() State {
	s, _, _ := c.consume.current()
	st := State{Connected: c.pub.open.Load() > 0 && s != nil, Consumers: int(c.consumers.Load()), ConsumersUp: int(c.consumersUp.Load())}
	if err := c.pub.blocked.Load(); err != nil {
		st.Blocked, st.BlockedReason = true, (*err).Error()
	}
	st.Topology, st.TopologyError = c.keeper.state()
	return st
}
