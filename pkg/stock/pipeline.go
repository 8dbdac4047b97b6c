package stock

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
)

// States of an item.
const (
	queued    = iota // waits for a flusher
	taken            // a flusher sends it
	abandoned        // its caller left before it was sent: it never runs
)

// item is what one caller wants sent: one command or a few that belong together, or a reservation,
// which shares a script call with others.
type item struct {
	cmds  []redis.Cmder
	ask   *ask
	work  int // what it costs Redis, in single commands or orders
	state atomic.Int32
	done  chan struct{}
}

// submit has the commands sent together with whatever else waits, and returns when they were
// answered. Each command carries its own error afterwards; the returned error says that there is no
// answer: ErrUnavailable if the commands certainly never run, else ErrUnknownOutcome.
//
// Nobody waits for a batch to fill: an idle flusher takes a command at once, what arrives while all
// flushers are out shares the next pipeline, and only in a crowd of reservations are pipelines paced.
func (c *Client) submit(ctx context.Context, cmds ...redis.Cmder) error {
	return c.run(ctx, &item{cmds: cmds, work: len(cmds)})
}

// run is submit for one item.
func (c *Client) run(ctx context.Context, it *item) error {
	it.done = make(chan struct{})
	if err := c.enqueue(ctx, it); err != nil {
		return err
	}
	return c.await(ctx, it)
}

// answer is what became of one script call.
type answer struct {
	reply []string
	err   error // no reply, or one that is an error
}

// submitEach is submit for calls that each handle many orders: each is an item of its own, so that a
// pipeline stays short enough for its deadline however many there are. The answers are all that may be
// looked at afterwards: a call whose caller has left is still in a flusher's hands.
func (c *Client) submitEach(ctx context.Context, calls []*scriptCmd, orders func(int) int) []answer {
	items := make([]*item, len(calls))
	answers := make([]answer, len(calls))
	for i, call := range calls {
		items[i] = &item{cmds: []redis.Cmder{call}, work: orders(i), done: make(chan struct{})}
		answers[i].err = c.enqueue(ctx, items[i])
	}
	for i, it := range items {
		a := &answers[i]
		if a.err == nil {
			a.err = c.await(ctx, it)
		}
		if a.err == nil {
			a.reply, a.err = calls[i].reply()
		}
	}
	return answers
}

func (c *Client) enqueue(ctx context.Context, it *item) error {
	select {
	case <-c.closing:
		return fmt.Errorf("%w: client is closed", ErrUnavailable)
	default:
	}
	select {
	case c.queue <- it: // nearly always; a full select would lock channels that all callers share
	default:
		select {
		case c.queue <- it:
		case <-c.closing:
			return fmt.Errorf("%w: client is closed", ErrUnavailable)
		case <-ctx.Done():
			return fmt.Errorf("%w: %w", ErrUnavailable, ctx.Err())
		}
	}
	if c.stopped.Load() {
		// Queued behind the last flusher's back, perhaps after abandon went through the queue.
		c.abandon()
	}
	return nil
}

// abandon answers what is still queued when the flushers have gone.
func (c *Client) abandon() {
	for {
		select {
		case it := <-c.queue:
			it.state.CompareAndSwap(queued, abandoned)
			close(it.done)
		default:
			return
		}
	}
}

func (c *Client) await(ctx context.Context, it *item) error {
	select {
	case <-it.done:
		if it.state.Load() == abandoned {
			return fmt.Errorf("%w: client is closed", ErrUnavailable)
		}
		return nil
	case <-ctx.Done():
		if it.state.CompareAndSwap(queued, abandoned) {
			return fmt.Errorf("%w: %w", ErrUnavailable, ctx.Err())
		}
		return fmt.Errorf("%w: %w", ErrUnknownOutcome, ctx.Err())
	}
}

// gate lets one flusher at a time gather what waits, and paces them.
//
// A reservation that has a pipeline and a script call to itself costs Redis three times what it costs
// in company, and order-api half as much again: a crowd that comes evenly would keep both busy with
// that long before it is a large one. So when a pipeline had a crowd in it, the next one starts no
// sooner than PipelinePace after it.
type gate struct {
	sync.Mutex
	last    time.Time // when the last pipeline was gathered
	crowded bool      // it had a crowd in it
}

// crowd is how many reservations in one pipeline make those behind them wait for company.
const crowd = 3

// flush sends what waits, pipeline after pipeline, until the client closes and the queue is empty.
func (c *Client) flush() {
	batch := make([]*item, 0, c.cfg.PipelineSize)
	var asks gathered
	for {
		if batch = c.gather(batch[:0]); len(batch) == 0 {
			return
		}
		c.send(batch, &asks)
	}
}

// gather waits for something to send and takes what else waits by then; nothing when the client closes.
func (c *Client) gather(batch []*item) []*item {
	c.gate.Lock()
	defer c.gate.Unlock()
	select {
	case it := <-c.queue:
		batch = append(batch, it)
	case <-c.closing:
		select {
		case it := <-c.queue:
			batch = append(batch, it)
		default:
			return batch
		}
	}
	c.pace()
	n, asks := 0, 0
	count := func(it *item) {
		n += it.work
		if it.ask != nil {
			asks++
		}
	}
	count(batch[0])
gather:
	for n < c.cfg.PipelineSize {
		select {
		case it := <-c.queue:
			batch = append(batch, it)
			count(it)
		default:
			break gather
		}
	}
	c.gate.last, c.gate.crowded = time.Now(), asks >= crowd
	return batch
}

// pace waits until the next pipeline may start.
func (c *Client) pace() {
	if !c.gate.crowded || len(c.queue) >= c.cfg.PipelineSize {
		return
	}
	wait := c.cfg.PipelinePace - time.Since(c.gate.last)
	if wait <= 0 {
		return
	}
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-c.closing:
	}
}

// send runs one batch in one round trip and answers every caller.
func (c *Client) send(batch []*item, asks *gathered) {
	live := batch[:0]
	for _, it := range batch {
		if it.state.CompareAndSwap(queued, taken) {
			live = append(live, it)
		}
	}
	if len(live) == 0 {
		return
	}
	cmds := make([]redis.Cmder, 0, len(live)+8)
	for _, it := range live {
		if it.ask != nil {
			asks.add(it.ask)
			continue
		}
		cmds = append(cmds, it.cmds...)
	}
	for _, b := range asks.batches {
		b.call = c.reserveCall(b)
		c.metrics.asks.Observe(float64(len(b.asks)))
		cmds = append(cmds, b.call)
	}
	// The callers' deadlines differ, so the pipeline has its own: the connection's.
	ctx, cancel := context.WithTimeout(context.Background(), c.cfg.DialTimeout+c.cfg.PoolTimeout+2*c.cfg.ReadTimeout)
	c.exec(ctx, cmds)
	cancel()
	for _, b := range asks.batches {
		b.answer()
	}
	asks.reset()
	for _, it := range live {
		close(it.done)
	}
}

// exec runs commands in one pipeline. Each carries its own classified error afterwards.
//
// A script that Redis does not know is sent again with its source, for those commands alone: the
// library does not do that in pipelines. What fails on a dead connection gets one more attempt;
// that is safe because every script is idempotent, and if an attempt may have run, the outcome stays
// unknown whatever the next one says.
func (c *Client) exec(ctx context.Context, cmds []redis.Cmder) {
	started := time.Now()
	c.round(ctx, cmds)
	var again []redis.Cmder
	var maybe map[redis.Cmder]bool
	for attempt := 0; attempt < 2; attempt++ {
		again = again[:0]
		for _, cmd := range cmds {
			err := cmd.Err()
			if err == nil {
				continue
			}
			if isNoScript(err) {
				if s, ok := cmd.(*scriptCmd); ok {
					s.useSource()
					again = append(again, cmd)
				}
			} else if attempt == 0 && retryable(err) {
				if ran(err) {
					if maybe == nil {
						maybe = make(map[redis.Cmder]bool)
					}
					maybe[cmd] = true
				}
				again = append(again, cmd)
			}
		}
		if len(again) == 0 {
			break
		}
		c.metrics.retries.Add(float64(len(again)))
		c.round(ctx, again)
	}
	c.metrics.observe(len(cmds), time.Since(started))
	for _, cmd := range cmds {
		if err := cmd.Err(); err != nil {
			err = c.classify(err)
			if maybe[cmd] && errors.Is(err, ErrUnavailable) {
				err = fmt.Errorf("%w: %w", ErrUnknownOutcome, err)
			}
			cmd.SetErr(err)
		}
	}
}

func isNoScript(err error) bool {
	var reply redis.Error
	return errors.As(err, &reply) && strings.HasPrefix(reply.Error(), "NOSCRIPT")
}

func (c *Client) round(ctx context.Context, cmds []redis.Cmder) {
	p := c.rdb.Pipeline()
	for _, cmd := range cmds {
		cmd.SetErr(nil)
		_ = p.Process(ctx, cmd) // only queues
	}
	_, _ = p.Exec(ctx) // each command has its own error
}
