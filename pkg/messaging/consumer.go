package messaging

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"seckill/pkg/failpoint"
)

// ConsumerConfig describes one consumer. The zero value of each field but Queue means its default.
type ConsumerConfig struct {
	Queue string `mapstructure:"queue"`
	// Workers each have a channel of their own and handle one batch at a time. Default 1.
	Workers int `mapstructure:"workers"`
	// Prefetch bounds the unacknowledged messages of one worker. Default 64, at most 65535.
	Prefetch int `mapstructure:"prefetch"`
	// BatchOrders is how many orders (sum of Message.Orders) one batch may hold; a single message that
	// holds more is a batch of its own. Default 1.
	BatchOrders int `mapstructure:"batch_orders"`
	// BatchWait is how long a batch waits for more after its first message; with 0 it takes what is
	// already here. Default 0.
	BatchWait time.Duration `mapstructure:"batch_wait"`
	// HoldLimit is how long deliveries are kept while a handler says Hold, or while its retries and
	// dead letters cannot be published; then they go back to the broker. It must stay below the
	// broker's consumer time-out (30 min by default). Default 10 min.
	HoldLimit time.Duration `mapstructure:"hold_limit"`
	// StopTimeout is how long the batches in hand may take after the context has ended. Default 20s.
	StopTimeout time.Duration `mapstructure:"stop_timeout"`
}

// How a consumer behaves where nobody needed to configure it.
const (
	holdMin       = 200 * time.Millisecond
	holdMax       = 5 * time.Second
	panicsAllowed = 3 // then a batch is taken apart to find the culprit
	// rescueFrom is the delivery count from which a message that was held to the limit is copied
	// instead of given back: each giving back counts, and at deliveryLimit the broker dead-letters.
	rescueFrom = deliveryLimit / 2
)

// Classes of dead letters that the consumer itself makes.
const (
	ClassAttemptsExhausted = "attempts_exhausted"
	ClassPanic             = "panic"
)

// errLeft says that deliveries went back to the broker.
var errLeft = errors.New("deliveries left to the broker")

func (c ConsumerConfig) withDefaults() (ConsumerConfig, error) {
	num := func(n *int, v int) {
		if *n == 0 {
			*n = v
		}
	}
	num(&c.Workers, 1)
	num(&c.Prefetch, 64)
	num(&c.BatchOrders, 1)
	if c.HoldLimit == 0 {
		c.HoldLimit = 10 * time.Minute
	}
	if c.StopTimeout == 0 {
		c.StopTimeout = 20 * time.Second
	}
	switch {
	case c.Queue == "":
		return c, errors.New("consumer configuration: no queue")
	case c.Workers < 1 || c.BatchOrders < 1 || c.BatchWait < 0 || c.HoldLimit < 0 || c.StopTimeout < 0:
		return c, fmt.Errorf("consumer configuration of %s: negative value", c.Queue)
	case c.Prefetch < 1 || c.Prefetch > 65535:
		return c, fmt.Errorf("consumer configuration of %s: prefetch %d: must be 1 to 65535", c.Queue, c.Prefetch)
	}
	return c, nil
}

// Consume handles the messages of a queue until ctx ends. It survives every kind of loss: channel
// closed, consumer cancelled, connection gone, queue missing. Nothing is acknowledged before the
// handler has said what became of it and its retries and dead letters are confirmed, and never on
// another channel than the one it came on; so everything may be delivered again.
//
// When ctx ends it stops consuming, finishes the batches in hand (the handler's context ends
// StopTimeout later), acknowledges and closes its channels; what was only prefetched goes back to the
// queue. The error is nil after a clean stop. It is not nil for a wrong configuration, when batches in
// hand had to be left to the broker, and ErrClosed when the client was closed meanwhile.
func (c *Client) Consume(ctx context.Context, cfg ConsumerConfig, h Handler) error {
	cfg, err := cfg.withDefaults()
	if err != nil {
		return err
	}
	// Work in hand outlives ctx by StopTimeout.
	work, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	var timer atomic.Pointer[time.Timer]
	unhook := context.AfterFunc(ctx, func() { timer.Store(time.AfterFunc(cfg.StopTimeout, stop)) })
	defer func() {
		unhook()
		if t := timer.Load(); t != nil {
			t.Stop()
		}
	}()
	c.consumers.Add(int64(cfg.Workers))
	defer c.consumers.Add(-int64(cfg.Workers))
	errs := make([]error, cfg.Workers)
	var all sync.WaitGroup
	for i := range cfg.Workers {
		all.Add(1)
		go func() {
			defer all.Done()
			w := &worker{c: c, cfg: cfg, handler: h, log: c.log.With("queue", cfg.Queue, "worker", i)}
			errs[i] = w.run(ctx, work)
		}()
	}
	all.Wait()
	return errors.Join(errs...)
}

// worker handles one batch at a time.
type worker struct {
	c       *Client
	cfg     ConsumerConfig
	handler Handler
	log     *slog.Logger
}

// subscription is one consuming channel. Deliveries, and the right to acknowledge them, end with it.
type subscription struct {
	conn       *conn
	ch         *amqp.Channel
	tag        string
	name       string // of this channel, unique among all processes
	deliveries <-chan amqp.Delivery
	next       *amqp.Delivery // did not fit into the batch before
	dead       chan struct{}  // closed when the channel is, or the consumer was cancelled
	watched    sync.WaitGroup
}

func (w *worker) run(ctx, work context.Context) error {
	pause := backoff{min: w.c.cfg.ReconnectMin, max: min(5*time.Second, w.c.cfg.ReconnectMax)}
	told := false
	for ctx.Err() == nil {
		c, err := w.c.consume.wait(ctx)
		if err != nil {
			if ctx.Err() != nil {
				return nil //nolint:nilerr // told to stop
			}
			return err
		}
		s, err := w.subscribe(c)
		if err != nil {
			if !told {
				told = true
				w.log.WarnContext(ctx, "cannot consume, trying again", "error", err)
			}
			pause.wait(ctx)
			continue
		}
		told = false
		since := time.Now()
		err = w.serve(ctx, work, s)
		if ctx.Err() != nil {
			return err
		}
		w.log.WarnContext(ctx, "consumer interrupted, starting anew", "error", err)
		if time.Since(since) > 5*time.Second {
			pause.reset()
		}
		pause.wait(ctx)
	}
	return nil
}

func (w *worker) subscribe(c *conn) (*subscription, error) {
	s := &subscription{conn: c, dead: make(chan struct{}), tag: fmt.Sprintf("seckill-%d", w.c.tags.Add(1))}
	s.name = w.c.instance + "/" + s.tag
	err := c.bounded(w.c.cfg.RPCTimeout, func() (err error) {
		if s.ch, err = c.Channel(); err != nil {
			return err //nolint:wrapcheck // wrapped below
		}
		if err = s.ch.Qos(w.cfg.Prefetch, 0, false); err != nil {
			return err //nolint:wrapcheck // wrapped below
		}
		closed := s.ch.NotifyClose(make(chan *amqp.Error, 1))
		cancelled := s.ch.NotifyCancel(make(chan string, 1))
		s.deliveries, err = s.ch.Consume(w.cfg.Queue, s.tag, false, false, false, false, nil)
		if err != nil {
			_ = s.ch.Close()
			return err //nolint:wrapcheck // wrapped below
		}
		s.watched.Add(1)
		go func() {
			defer s.watched.Done()
			w.watch(s, closed, cancelled)
		}()
		return nil
	})
	if err == nil {
		return s, nil
	}
	var e *amqp.Error
	if errors.As(err, &e) && e.Server && e.Code == amqp.NotFound {
		w.c.keeper.suspect(fmt.Errorf("%w: no queue %s", ErrTopology, w.cfg.Queue))
	}
	return nil, fmt.Errorf("consume %s: %w", w.cfg.Queue, err)
}

// watch counts the worker as up until its channel is closed or its consumer cancelled, so that health
// is red from that moment on, and not only when the batch in hand is done.
func (w *worker) watch(s *subscription, closed <-chan *amqp.Error, cancelled <-chan string) {
	up := w.c.metrics.consumersUp.WithLabelValues(w.cfg.Queue)
	w.c.consumersUp.Add(1)
	up.Inc()
	select {
	case e := <-closed:
		if e != nil {
			w.log.Warn("consuming channel closed by the broker", "error", e)
		}
	case _, ok := <-cancelled:
		if ok {
			w.log.Warn("consumer cancelled by the broker")
		}
	}
	w.c.consumersUp.Add(-1)
	up.Dec()
	close(s.dead)
	for range cancelled { //nolint:revive // until the channel is closed nothing may wait for us
	}
}

// serve handles batch after batch until the subscription or ctx ends.
func (w *worker) serve(ctx, work context.Context, s *subscription) error {
	// Stop the flow of deliveries at once, while the batch in hand is still being worked on.
	cancelled := make(chan struct{})
	unhook := context.AfterFunc(ctx, func() {
		defer close(cancelled)
		_ = s.conn.bounded(w.c.cfg.RPCTimeout, func() error { return s.ch.Cancel(s.tag, false) })
	})
	defer func() {
		if !unhook() {
			<-cancelled
		}
		_ = s.conn.bounded(w.c.cfg.RPCTimeout, s.ch.Close)
		s.watched.Wait()
	}()
	for {
		batch, err := w.gather(ctx, s)
		if len(batch) == 0 {
			return err
		}
		if err := w.process(ctx, work, s, batch); err != nil {
			return err
		}
	}
}

var errSubscriptionLost = errors.New("subscription lost")

// gather takes deliveries until the batch is full or its time is over. It gives none when the
// subscription is lost (with an error) or ctx has ended.
func (w *worker) gather(ctx context.Context, s *subscription) ([]*item, error) {
	var batch []*item
	orders := 0
	add := func(d *amqp.Delivery) bool {
		in := received(d, w.cfg.Queue)
		in.Consumer = s.name
		if len(batch) > 0 && orders+in.Orders > w.cfg.BatchOrders {
			s.next = d
			return false
		}
		batch = append(batch, &item{tag: d.DeliveryTag, in: in})
		orders += in.Orders
		return orders < w.cfg.BatchOrders && len(batch) < w.cfg.Prefetch
	}
	var more bool
	if s.next != nil {
		d := s.next
		s.next = nil
		if ctx.Err() != nil {
			return nil, nil
		}
		more = add(d)
	} else {
		if ctx.Err() != nil {
			return nil, nil
		}
		select {
		case d, ok := <-s.deliveries:
			if !ok {
				if ctx.Err() != nil {
					return nil, nil
				}
				return nil, errSubscriptionLost
			}
			more = add(&d)
		case <-ctx.Done():
			return nil, nil
		}
	}
	if !more {
		return batch, nil
	}
	var over <-chan time.Time
	if w.cfg.BatchWait > 0 {
		t := time.NewTimer(w.cfg.BatchWait)
		defer t.Stop()
		over = t.C
	}
	for more {
		if over == nil {
			// What is already here. The library hands over one by one, so give it the chance.
			select {
			case d, ok := <-s.deliveries:
				more = ok && add(&d)
			default:
				more = false
			}
			continue
		}
		select {
		case d, ok := <-s.deliveries:
			more = ok && add(&d)
		case <-over:
			more = false
		case <-ctx.Done():
			more = false
		}
	}
	return batch, nil
}

// Steps of an item, in order.
const (
	stepHandle = iota
	stepPublish
	stepAfter
	stepDone // may be acknowledged
	stepAcked
)

// item is one delivery on its way to the ack.
type item struct {
	tag  uint64
	in   Delivery
	step int
	out  []outgoing
	res  Result
	hold error // why it does not get on
}

// outgoing is a retry or a dead letter that has to be confirmed before the ack.
type outgoing struct {
	exchange, key string
	msg           amqp.Publishing
	confirmed     bool
}

// process takes a batch through handler, publishes, After and ack. An error means that the
// subscription must be given up, and what is not acknowledged with it.
func (w *worker) process(ctx, work context.Context, s *subscription, batch []*item) error {
	held := w.c.metrics.held.WithLabelValues(w.cfg.Queue)
	defer held.Set(0)
	pause := backoff{min: holdMin, max: holdMax}
	started := time.Now()
	panics := 0
	told := false
	for {
		w.handle(work, batch, &panics)
		w.publishAll(work, batch)
		w.afterAll(work, batch)
		if err := w.ack(work, s, batch); err != nil {
			return w.left(batch, err)
		}
		waiting := 0
		var why error
		for _, it := range batch {
			if it.step < stepDone {
				waiting++
				why = it.hold
			}
		}
		if waiting == 0 {
			return nil
		}
		held.Set(float64(waiting))
		if !told {
			told = true
			w.log.WarnContext(ctx, "holding deliveries", "count", waiting, "error", why)
		}
		if time.Since(started) > w.cfg.HoldLimit {
			if w.rescue(work, batch) {
				continue
			}
			return w.left(batch, fmt.Errorf("held for %s: %w", w.cfg.HoldLimit, why))
		}
		t := time.NewTimer(min(pause.pause(), max(time.Millisecond, w.cfg.HoldLimit-time.Since(started))))
		select {
		case <-t.C:
		case <-s.dead:
			t.Stop()
			return w.left(batch, errSubscriptionLost)
		case <-ctx.Done():
			t.Stop()
			return w.left(batch, fmt.Errorf("stopped while holding: %w", why))
		}
	}
}

func (w *worker) left(batch []*item, err error) error {
	n := 0
	for _, it := range batch {
		if it.step != stepAcked {
			n++
		}
	}
	w.c.metrics.consumed.WithLabelValues(w.cfg.Queue, "left").Add(float64(n))
	return fmt.Errorf("%w: %d of %s: %w", errLeft, n, w.cfg.Queue, err)
}

// handle hands to the handler what it has not settled yet.
func (w *worker) handle(ctx context.Context, batch []*item, panics *int) {
	var todo []*item
	for _, it := range batch {
		if it.step == stepHandle {
			todo = append(todo, it)
		}
	}
	if len(todo) == 0 {
		return
	}
	if *panics < panicsAllowed {
		in := make([]Delivery, len(todo))
		for i, it := range todo {
			in[i] = it.in
		}
		results, err := w.call(ctx, in)
		if err == nil {
			for i, it := range todo {
				w.take(it, results[i])
			}
			return
		}
		*panics++
		w.log.ErrorContext(ctx, "handler failed", "error", err, "deliveries", len(todo), "time", *panics)
		if *panics < panicsAllowed {
			for _, it := range todo {
				it.hold = err
			}
			return
		}
	}
	// One of them breaks the handler: each by itself, so that only the culprit pays.
	for _, it := range todo {
		w.take(it, w.alone(ctx, it.in))
	}
}

// call runs the handler; a panic, or results that do not fit the batch, are an error.
func (w *worker) call(ctx context.Context, in []Delivery) (results []Result, err error) {
	ctx, cancel := context.WithTimeout(ctx, w.cfg.HoldLimit)
	defer cancel()
	defer func() {
		if r := recover(); r != nil {
			w.log.ErrorContext(ctx, "handler panicked", "panic", fmt.Sprint(r), "stack", string(debug.Stack()))
			results, err = nil, fmt.Errorf("handler panicked: %v", r)
		}
	}()
	results = w.handler(ctx, in)
	if len(results) != len(in) {
		return nil, fmt.Errorf("handler gave %d results for %d deliveries", len(results), len(in))
	}
	return results, nil
}

// alone handles one delivery by itself and, when it still breaks the handler, each order in it by
// itself: what is dead-lettered is a single order.
func (w *worker) alone(ctx context.Context, d Delivery) Result {
	results, err := w.call(ctx, []Delivery{d})
	if err == nil {
		return results[0]
	}
	parts, splitErr := Split(d.Message)
	if splitErr != nil || len(parts) < 2 {
		return Result{Dead: []Dead{{Message: d.Message, Class: ClassPanic, Err: err}}}
	}
	var sum Result
	var afters []func(context.Context) error
	for _, p := range parts {
		one := d
		one.Message = p
		results, err := w.call(ctx, []Delivery{one})
		if err != nil {
			sum.Dead = append(sum.Dead, Dead{Message: p, Class: ClassPanic, Err: err})
			continue
		}
		r := results[0]
		if r.Hold != nil {
			return Result{Hold: r.Hold}
		}
		sum.Retries = append(sum.Retries, r.Retries...)
		sum.Dead = append(sum.Dead, r.Dead...)
		if r.After != nil {
			afters = append(afters, r.After)
		}
	}
	if len(afters) > 0 {
		sum.After = func(ctx context.Context) error {
			for len(afters) > 0 {
				if err := afters[0](ctx); err != nil {
					return err
				}
				afters = afters[1:]
			}
			return nil
		}
	}
	return sum
}

// take turns a result into what has to be published.
func (w *worker) take(it *item, r Result) {
	if r.Hold != nil {
		it.hold = r.Hold
		return
	}
	if w.cfg.Queue == QueueDead && len(r.Retries)+len(r.Dead) > 0 {
		// There is no further place for a letter: dead-lettered again it would only go round, and
		// retried it would come out among the events.
		it.hold = errors.New("a dead letter can be neither retried nor dead-lettered")
		for _, d := range r.Dead {
			it.hold = errors.Join(it.hold, d.Err)
		}
		return
	}
	it.res, it.step = r, stepPublish
	for _, d := range r.Dead {
		it.out = append(it.out, outgoing{exchange: ExchangeDead, key: d.Message.Key, msg: deadLetter(named(d.Message, it), d.Class, d.Err, w.cfg.Queue)})
	}
	for _, t := range r.Retries {
		m := named(t.Message, it)
		m.Attempt++
		if m.Attempt >= w.c.cfg.MaxAttempts {
			m.Attempt--
			cause := fmt.Errorf("handled %d times", w.c.cfg.MaxAttempts)
			if t.Err != nil {
				cause = fmt.Errorf("handled %d times: %w", w.c.cfg.MaxAttempts, t.Err)
			}
			it.out = append(it.out, outgoing{exchange: ExchangeDead, key: m.Key, msg: deadLetter(m, ClassAttemptsExhausted, cause, w.cfg.Queue)})
			continue
		}
		it.out = append(it.out, outgoing{exchange: DelayExchange(w.c.Tier(t.After)), key: m.Key, msg: publishing(m)})
	}
}

// named makes sure that a copy has an id: one without could never be published.
func named(m Message, it *item) Message {
	if m.ID == "" {
		m.ID = it.in.ID
	}
	return m
}

// publishAll sends every copy that is not confirmed yet and waits for all.
func (w *worker) publishAll(ctx context.Context, batch []*item) {
	type sent struct {
		out *outgoing
		p   *Pending
		it  *item
	}
	var pending []sent
	for _, it := range batch {
		if it.step != stepPublish {
			continue
		}
		it.hold = nil
		for i := range it.out {
			if o := &it.out[i]; !o.confirmed {
				pending = append(pending, sent{o, w.c.pub.send(ctx, o.exchange, o.msg, o.key, nil, true), it})
			}
		}
	}
	for _, s := range pending {
		if err := s.p.Wait(ctx); err != nil {
			s.it.hold = fmt.Errorf("publish %s to %s: %w", s.out.msg.MessageId, s.out.exchange, err)
		} else {
			s.out.confirmed = true
		}
	}
	for _, it := range batch {
		if it.step == stepPublish && it.hold == nil {
			it.step = stepAfter
		}
	}
}

func (w *worker) afterAll(ctx context.Context, batch []*item) {
	for _, it := range batch {
		if it.step != stepAfter {
			continue
		}
		if it.res.After != nil {
			if err := w.after(ctx, it.res.After); err != nil {
				it.hold = err
				continue
			}
		}
		it.step = stepDone
	}
}

func (w *worker) after(ctx context.Context, f func(context.Context) error) (err error) {
	ctx, cancel := context.WithTimeout(ctx, w.cfg.HoldLimit)
	defer cancel()
	defer func() {
		if r := recover(); r != nil {
			w.log.ErrorContext(ctx, "after panicked", "panic", fmt.Sprint(r), "stack", string(debug.Stack()))
			err = fmt.Errorf("after panicked: %v", r)
		}
	}()
	return f(ctx)
}

// ack acknowledges what is done: in one frame as far as the batch is done without a gap (everything
// before it on this channel is acknowledged already), one by one behind that.
func (w *worker) ack(ctx context.Context, s *subscription, batch []*item) error {
	if !slices.ContainsFunc(batch, func(it *item) bool { return it.step == stepDone }) {
		return nil
	}
	if err := failpoint.Hit(ctx, "consumer.before_ack"); err != nil {
		return fmt.Errorf("before ack: %w", err)
	}
	prefix := 0
	for prefix < len(batch) && batch[prefix].step >= stepDone {
		prefix++
	}
	for i := prefix - 1; i >= 0; i-- {
		if batch[i].step == stepDone {
			if err := s.ch.Ack(batch[i].tag, true); err != nil {
				return fmt.Errorf("ack: %w", err)
			}
			break
		}
	}
	for _, it := range batch[prefix:] {
		if it.step == stepDone {
			if err := s.ch.Ack(it.tag, false); err != nil {
				return fmt.Errorf("ack: %w", err)
			}
		}
	}
	for _, it := range batch {
		if it.step == stepDone {
			it.step = stepAcked
			w.count(it)
		}
	}
	return nil
}

func (w *worker) count(it *item) {
	result := "done"
	switch {
	case len(it.res.Dead) > 0:
		result = "dead"
	case len(it.res.Retries) > 0:
		result = "retry"
	}
	w.c.metrics.consumed.WithLabelValues(w.cfg.Queue, result).Inc()
}

// rescue puts copies of long-held messages, attempts unspent, into a delay queue, so that the broker
// does not dead-letter them for being given back too often. It says whether it did so for any; the
// others are given back.
func (w *worker) rescue(ctx context.Context, batch []*item) bool {
	if w.cfg.Queue == QueueDead {
		return false // no limit to speak of
	}
	copied := false
	for _, it := range batch {
		if it.step == stepHandle && it.in.DeliveryCount >= rescueFrom {
			it.out = append(it.out, outgoing{exchange: DelayExchange(w.c.Tier(time.Minute)), key: it.in.Key, msg: publishing(it.in.Message)})
			it.step = stepPublish
			copied = true
		}
	}
	if copied {
		w.log.WarnContext(ctx, "copying long-held messages into the delay queue")
	}
	return copied
}
