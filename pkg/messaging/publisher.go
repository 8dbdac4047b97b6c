package messaging

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
)

// What every message must keep to, so that the broker (or the client library, by closing the whole
// connection) does not refuse it after it was taken for sent.
const (
	maxShortString = 255
	maxMessage     = 128 << 20
)

var errQueueFull = fmt.Errorf("%w: hand-over queue full", ErrBlocked)

// Stages of a Pending. Whoever wins the step to settled gives the outcome.
const (
	stageQueued int32 = iota
	stageWriting
	stageSettled
)

// Pending is a publish under way.
type Pending struct {
	exchange, key string
	msg           amqp.Publishing
	began         time.Time

	stage    atomic.Int32
	returned bool // owned by the collector
	err      error
	done     chan struct{}
	owner    *publisher
}

// Done is closed when the outcome is known; Wait gives it.
func (p *Pending) Done() <-chan struct{} { return p.done }

// Wait gives the outcome: nil means confirmed by the broker and routed to a queue. If ctx ends first
// it is ErrUnknownOutcome (with the context's error) while the publish goes on. Every Pending is
// settled within about the confirm time-out, so that waiting without a deadline ends too.
func (p *Pending) Wait(ctx context.Context) error {
	select {
	case <-p.done:
		return p.err
	default:
	}
	select {
	case <-p.done:
		return p.err
	case <-ctx.Done():
		return fmt.Errorf("%w: %w", ErrUnknownOutcome, ctx.Err())
	}
}

// publisher writes messages on confirm channels and matches confirms and returns to them. Its callers
// never wait for the network: a bounded queue stands between, and when it is full, or the broker is
// away or blocked, they get that as the outcome at once.
type publisher struct {
	cfg     Config
	log     *slog.Logger
	link    *link
	metrics *metrics
	suspect func(error) // tells the topology keeper what is missing

	queue   chan *Pending
	open    atomic.Int32 // channels that publish
	blocked atomic.Pointer[error]
	absent  atomic.Pointer[map[string]error] // exchanges the broker does not know

	mu          sync.Mutex // guards closed and the step from 0 outstanding
	closed      bool
	outstanding sync.WaitGroup
	settled     chan struct{} // set by shut; closed when nothing is outstanding
}

func newPublisher(cfg Config, log *slog.Logger, l *link, m *metrics, suspect func(error)) *publisher {
	p := &publisher{cfg: cfg, log: log, link: l, metrics: m, suspect: suspect, queue: make(chan *Pending, cfg.PublishQueue)}
	l.onBlocked = func(reason string) {
		if reason == "" {
			p.blocked.Store(nil)
			return
		}
		err := fmt.Errorf("%w: %s", ErrBlocked, reason)
		p.blocked.Store(&err)
	}
	return p
}

// Send hands a message over for publishing (persistent, mandatory, confirmed) and returns at once,
// whatever state the broker is in. The body must not be changed until the outcome is known. A message
// that is sent again after any outcome but nil keeps its id.
func (c *Client) Send(ctx context.Context, exchange string, m Message) *Pending {
	return c.pub.send(ctx, exchange, publishing(m), m.Key, m.check(), false)
}

// Publish sends all messages and waits for all outcomes; the errors are in the order of the messages,
// nil for each one that is confirmed and routed. Unlike Send it waits for room in the hand-over queue.
func (c *Client) Publish(ctx context.Context, exchange string, msgs ...Message) []error {
	pending := make([]*Pending, len(msgs))
	for i, m := range msgs {
		pending[i] = c.pub.send(ctx, exchange, publishing(m), m.Key, m.check(), true)
	}
	errs := make([]error, len(msgs))
	for i, p := range pending {
		errs[i] = p.Wait(ctx)
	}
	return errs
}

func (p *publisher) send(ctx context.Context, exchange string, msg amqp.Publishing, key string, invalid error, wait bool) *Pending {
	d := &Pending{exchange: exchange, key: key, msg: msg, began: time.Now(), done: make(chan struct{}), owner: p}
	p.mu.Lock()
	if p.closed {
		p.mu.Unlock()
		d.stage.Store(stageSettled)
		d.err = ErrClosed
		close(d.done)
		return d
	}
	p.outstanding.Add(1)
	p.mu.Unlock()
	if err := ctx.Err(); err != nil && invalid == nil {
		// Nothing was sent, and the caller no longer wants it sent.
		invalid = fmt.Errorf("%w: %w", ErrNotConnected, err)
	}
	if invalid == nil && len(exchange) > maxShortString {
		invalid = fmt.Errorf("%w: exchange name too long", ErrInvalidMessage)
	}
	if invalid != nil {
		d.settle(invalid)
		return d
	}
	if err := p.refusal(exchange); err != nil {
		d.settle(err)
		return d
	}
	select {
	case p.queue <- d:
		return d
	default:
	}
	if !wait {
		d.settle(errQueueFull)
		return d
	}
	select {
	case p.queue <- d:
	case <-ctx.Done():
		d.settle(fmt.Errorf("%w: %w", errQueueFull, ctx.Err()))
	}
	return d
}

// refusal says why nothing can be published to the exchange right now.
func (p *publisher) refusal(exchange string) error {
	if p.open.Load() == 0 {
		return ErrNotConnected
	}
	if err := p.blocked.Load(); err != nil {
		return *err
	}
	if absent := p.absent.Load(); absent != nil {
		if err := (*absent)[exchange]; err != nil {
			return err
		}
	}
	return nil
}

// settle gives the outcome, once.
func (d *Pending) settle(err error) {
	if d.stage.Swap(stageSettled) == stageSettled {
		return
	}
	d.finish(err)
}

// settleFrom gives the outcome if the Pending is still in the given stage.
func (d *Pending) settleFrom(stage int32, err error) {
	if d.stage.CompareAndSwap(stage, stageSettled) {
		d.finish(err)
	}
}

func (d *Pending) finish(err error) {
	d.err = err
	r := resultOf(err)
	d.owner.metrics.published[r].Inc()
	if r == resultConfirmed || r == resultReturned {
		d.owner.metrics.confirm.Observe(time.Since(d.began).Seconds())
	}
	close(d.done)
	d.owner.outstanding.Done()
}

func resultOf(err error) int {
	switch {
	case err == nil:
		return resultConfirmed
	case errors.Is(err, ErrUnknownOutcome):
		return resultUnknown
	case errors.Is(err, ErrReturned):
		return resultReturned
	case errors.Is(err, ErrNacked):
		return resultNacked
	case errors.Is(err, ErrBlocked):
		return resultBlocked
	case errors.Is(err, ErrTopology):
		return resultTopology
	case errors.Is(err, ErrInvalidMessage):
		return resultInvalid
	}
	return resultNotConnected
}

// run serves the queue with one channel after the other until the link has ended.
func (p *publisher) run(ctx context.Context) {
	pause := backoff{min: 10 * time.Millisecond, max: time.Second}
	for {
		c, changed, ended := p.link.current()
		if p.open.Load() == 0 {
			p.drain(ErrNotConnected)
		}
		if ended {
			return
		}
		if c == nil {
			select {
			case d := <-p.queue:
				d.settle(ErrNotConnected)
			case <-changed:
			}
			continue
		}
		since := time.Now()
		err := p.serve(c)
		select {
		case <-c.gone:
			continue
		default:
		}
		if ctx.Err() == nil {
			// The channel alone was closed, by a publish to an exchange that is not there.
			p.log.WarnContext(ctx, "publishing channel closed", "error", err)
		}
		if time.Since(since) > 5*time.Second {
			pause.reset()
		}
		t := time.NewTimer(pause.pause())
		select {
		case <-t.C:
		case <-c.gone:
		}
		t.Stop()
	}
}

// drain settles all that is queued.
func (p *publisher) drain(err error) {
	for {
		select {
		case d := <-p.queue:
			d.settle(err)
		default:
			return
		}
	}
}

// session is one confirm channel.
type session struct {
	p       *publisher
	conn    *conn
	ch      *amqp.Channel
	returns chan amqp.Return
	in      chan entry
	slots   chan struct{} // one for each message between write and confirm
	writing atomic.Pointer[Pending]
	closed  chan *amqp.Error // the collector's; filled before the library gives up the confirms
}

// entry is a written message.
type entry struct {
	d       *Pending
	confirm *amqp.DeferredConfirmation
}

// serve publishes what is queued on a new channel until that is closed.
func (p *publisher) serve(c *conn) error {
	var ch *amqp.Channel
	err := c.bounded(p.cfg.RPCTimeout, func() (err error) {
		if ch, err = c.Channel(); err != nil {
			return err //nolint:wrapcheck // wrapped below
		}
		return ch.Confirm(false) //nolint:wrapcheck // wrapped below
	})
	if err != nil {
		return fmt.Errorf("open publishing channel: %w", err)
	}
	s := &session{
		p: p, conn: c, ch: ch,
		returns: ch.NotifyReturn(make(chan amqp.Return, 256)),
		in:      make(chan entry, 64),
		slots:   make(chan struct{}, p.cfg.PublishWindow),
		closed:  ch.NotifyClose(make(chan *amqp.Error, 1)),
	}
	closed := ch.NotifyClose(make(chan *amqp.Error, 1))
	var collector sync.WaitGroup
	collector.Add(1)
	go func() {
		defer collector.Done()
		s.collect()
	}()
	defer collector.Wait()
	defer close(s.in)
	p.open.Add(1)
	defer p.open.Add(-1)
	for {
		select {
		case e := <-closed:
			return s.ended(e)
		case d := <-p.queue:
			s.writing.Store(d)
			select {
			case s.slots <- struct{}{}:
			case e := <-closed:
				s.writing.Store(nil)
				d.settleFrom(stageQueued, ErrNotConnected)
				return s.ended(e)
			}
			s.write(d)
			s.writing.Store(nil)
		}
	}
}

func (s *session) ended(e *amqp.Error) error {
	if e == nil {
		return errors.New("closed")
	}
	s.note(e)
	return e
}

// note remembers an exchange that is not there.
func (s *session) note(e *amqp.Error) {
	if e.Code == amqp.NotFound {
		if name := between(e.Reason, "no exchange '", "'"); name != "" {
			s.p.lost(name, fmt.Errorf("%w: no exchange %s", ErrTopology, name))
		}
	}
}

// lost keeps an exchange that is not there from taking the channel, and with it everything in
// flight, down again and again: until the keeper has found or declared it, nothing is sent there.
func (p *publisher) lost(exchange string, err error) {
	next := map[string]error{exchange: err}
	if old := p.absent.Load(); old != nil {
		next = maps.Clone(*old)
		next[exchange] = err
	}
	p.absent.Store(&next)
	p.suspect(err)
}

// lacking names those exchanges.
func (p *publisher) lacking() []string {
	if old := p.absent.Load(); old != nil {
		return slices.Collect(maps.Keys(*old))
	}
	return nil
}

// found lets everything be sent again.
func (p *publisher) found() { p.absent.Store(nil) }

func (s *session) write(d *Pending) {
	if err := s.p.refusal(d.exchange); err != nil {
		d.settleFrom(stageQueued, err)
		<-s.slots
		return
	}
	if !d.stage.CompareAndSwap(stageQueued, stageWriting) {
		<-s.slots
		return // given up while it waited for a slot
	}
	dc, err := s.ch.PublishWithDeferredConfirm(d.exchange, d.key, true, false, d.msg)
	switch {
	case err == nil:
		s.in <- entry{d, dc}
		return
	case errors.Is(err, amqp.ErrClosed):
		d.settle(ErrNotConnected) // refused before a byte was written
	default:
		d.settle(fmt.Errorf("%w: %w", ErrUnknownOutcome, err))
	}
	<-s.slots
}

// collect waits for the confirms of a channel, in the order of the writes, until it is closed and
// all are settled. It also gives up what takes too long, be it unconfirmed, or still in the hands of a
// writer that the network holds up.
//
// A return reaches us before its confirm (the broker sends it first, the library's one reader passes
// it on first), so a confirm is only believed when all returns that are there have been looked at.
func (s *session) collect() {
	var (
		fifo    []entry // from head on: not resolved yet
		head    int
		expired int // entries before it are settled
		orphans []amqp.Return
	)
	limit := s.p.cfg.ConfirmTimeout
	tick := time.NewTicker(min(max(limit/10, 5*time.Millisecond), 250*time.Millisecond))
	defer tick.Stop()
	match := func(r amqp.Return) bool {
		for i := head; i < len(fifo); i++ {
			d := fifo[i].d
			if !d.returned && d.msg.MessageId == r.MessageId && d.key == r.RoutingKey && d.exchange == r.Exchange {
				d.returned = true
				s.p.suspect(fmt.Errorf("%w: nothing is bound to %s for %s", ErrTopology, r.Exchange, r.RoutingKey))
				return true
			}
		}
		return false
	}
	onReturn := func(r amqp.Return) {
		r.Body = nil
		if !match(r) {
			orphans = append(orphans, r) // its writer has not told us yet
		}
	}
	in, returns := s.in, s.returns
	for in != nil || head < len(fifo) {
		var done <-chan struct{}
		if head < len(fifo) {
			done = fifo[head].confirm.Done()
		}
		select {
		case e, ok := <-in:
			if !ok {
				in = nil
				continue
			}
			fifo = append(fifo, e)
			for i, r := range orphans {
				if match(r) {
					orphans = append(orphans[:i], orphans[i+1:]...)
					break
				}
			}
		case r, ok := <-returns:
			if !ok {
				returns = nil
				continue
			}
			onReturn(r)
		case <-done:
			for head < len(fifo) && resolved(fifo[head].confirm) {
				for len(returns) > 0 {
					if r, ok := <-returns; ok {
						onReturn(r)
					}
				}
				e := fifo[head]
				fifo[head] = entry{}
				head++
				e.d.settle(s.outcome(e))
				<-s.slots
			}
			if head == len(fifo) || head > s.p.cfg.PublishWindow {
				n := copy(fifo, fifo[head:])
				clear(fifo[n:])
				fifo, expired, head = fifo[:n], max(0, expired-head), 0
			}
		case now := <-tick.C:
			for expired = max(expired, head); expired < len(fifo) && now.Sub(fifo[expired].d.began) > limit; expired++ {
				fifo[expired].d.settle(fmt.Errorf("%w: not confirmed within %s", ErrUnknownOutcome, limit))
			}
			s.relieve(now, limit)
			if head < len(fifo) && s.p.blocked.Load() == nil && now.Sub(fifo[head].d.began) > 6*limit {
				// Neither an alarm nor an answer: a broken channel, or a queue without a majority. A new
				// connection gets rid of what the library keeps for each unconfirmed message.
				s.p.log.Warn("broker does not confirm, connecting anew", "waiting", len(fifo)-head)
				s.conn.kill()
			}
		}
	}
}

func resolved(c *amqp.DeferredConfirmation) bool {
	select {
	case <-c.Done():
		return true
	default:
		return false
	}
}

// relieve settles what waits behind a writer that does not get on.
func (s *session) relieve(now time.Time, limit time.Duration) {
	d := s.writing.Load()
	if d == nil || now.Sub(d.began) <= limit {
		return
	}
	d.settleFrom(stageQueued, errQueueFull)
	d.settleFrom(stageWriting, fmt.Errorf("%w: not written within %s", ErrUnknownOutcome, limit))
	s.p.drain(errQueueFull)
}

// outcome reads a resolved confirm. The library resolves everything as refused when a channel is
// closed; only while it is open a refusal is the broker's word.
func (s *session) outcome(e entry) error {
	switch {
	case e.confirm.Acked() && e.d.returned:
		return fmt.Errorf("%w: exchange %s, key %s", ErrReturned, e.d.exchange, e.d.key)
	case e.confirm.Acked():
		return nil
	case !s.ch.IsClosed():
		return ErrNacked
	}
	select {
	case e := <-s.closed:
		if e != nil {
			s.note(e)
		}
	default:
	}
	if absent := s.p.absent.Load(); absent != nil {
		if err := (*absent)[e.d.exchange]; err != nil {
			return fmt.Errorf("%w: %w", ErrUnknownOutcome, err)
		}
	}
	return fmt.Errorf("%w: channel closed before the confirm", ErrUnknownOutcome)
}

// shut lets nothing new in and waits until everything that was handed over has its outcome.
func (p *publisher) shut(ctx context.Context) error {
	p.mu.Lock()
	p.closed = true
	p.mu.Unlock()
	p.settled = make(chan struct{})
	go func() {
		p.outstanding.Wait()
		close(p.settled)
	}()
	select {
	case <-p.settled:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("wait for confirms: %w", ctx.Err())
	}
}

// empty settles what a Send that raced with shut has left in the queue after the channels ended.
func (p *publisher) empty() {
	for {
		select {
		case d := <-p.queue:
			d.settle(ErrClosed)
		case <-p.settled:
			return
		}
	}
}
