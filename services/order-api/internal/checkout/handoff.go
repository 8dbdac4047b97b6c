package checkout

import (
	"context"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"seckill/pkg/failpoint"
	"seckill/pkg/messaging"
	"seckill/pkg/observability"
	"seckill/pkg/order"
)

// publisher is the part of messaging.Client that the hand-over needs.
type publisher interface {
	Publish(ctx context.Context, exchange string, msgs ...messaging.Message) []error
}

// handed is one accepted order on its way to the broker.
type handed struct {
	order order.Order
	trace observability.Trace
}

// handoff carries accepted orders from the handlers to the broker. It is bounded twice: by its queue
// and by the messages in flight. Whatever does not fit, fails or ends unknown is left to the relay
// (C1, C2); a dead broker therefore costs neither memory nor a handler's time.
type handoff struct {
	queue    chan handed
	slots    chan struct{} // one token per message in flight
	wait     time.Duration
	deadline time.Duration
	pub      publisher
	log      *slog.Logger

	length    prometheus.GaugeFunc
	results   *prometheus.CounterVec
	confirmed prometheus.Counter
	overflow  prometheus.Counter
	failed    prometheus.Counter
	published sync.WaitGroup

	// Of run alone: how many orders came per nanosecond when they were last gathered, and when that was.
	rate     float64
	gathered time.Time
}

func newHandoff(cfg Config, pub publisher, log *slog.Logger, reg prometheus.Registerer) *handoff {
	h := &handoff{
		queue:    make(chan handed, cfg.HandoffQueue),
		slots:    make(chan struct{}, cfg.HandoffInFlight),
		wait:     cfg.GatherWait,
		deadline: cfg.PublishTimeout,
		pub:      pub,
		log:      log,
	}
	h.length = prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "seckill_handoff_queue_length",
		Help: "Accepted orders in this process that wait for the publisher.",
	}, func() float64 { return float64(len(h.queue)) })
	h.results = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "seckill_handoff_orders_total",
		Help: "Accepted orders by what became of their hand-over: confirmed, left to the relay because the queue was full (overflow), or because publishing failed or ended unknown (failed).",
	}, []string{"result"})
	h.confirmed, h.overflow, h.failed = h.results.WithLabelValues("confirmed"), h.results.WithLabelValues("overflow"), h.results.WithLabelValues("failed")
	reg.MustRegister(h.length, h.results)
	return h
}

// offer never blocks.
func (h *handoff) offer(o order.Order, trace observability.Trace) {
	select {
	case h.queue <- handed{order: o, trace: trace}:
	default:
		h.overflow.Inc()
	}
}

// run gathers and publishes until ctx ends; then it publishes what is still queued and waits for
// every confirm. The caller makes sure that nobody offers any more by then.
func (h *handoff) run(ctx context.Context) {
	// A publish that is under way when the process is told to stop has to reach its confirm.
	pubCtx := context.WithoutCancel(ctx)
	timer := time.NewTimer(time.Hour)
	timer.Stop()
	defer timer.Stop()
	stopping := false
	for {
		var first handed
		if stopping {
			select {
			case first = <-h.queue:
			default:
				h.published.Wait()
				return
			}
		} else {
			select {
			case first = <-h.queue:
			case <-ctx.Done():
				stopping = true
				continue
			}
		}
		batch := h.gather(first, timer, stopping)
		// The slot is awaited before the next batch is gathered, so that under load the queue, not
		// memory, takes the excess.
		h.slots <- struct{}{}
		h.published.Add(1)
		go func() {
			defer h.published.Done()
			defer func() { <-h.slots }()
			h.publish(pubCtx, batch)
		}()
	}
}

// Under load messages are full, and they are written several at a time: what a message costs the broker
// is for the most part being woken up (measured with quorum queues: 1.1 ms of CPU for one message every
// 4 ms, 0.5 ms when four come every 16 ms, however large they are).
const (
	longGather = 16 * time.Millisecond
	maxGather  = 4 * messaging.MaxOrdersPerMessage
)

// gather collects what comes within the gathering time. With nothing in flight an order leaves
// alone and at once, for waiting pays only while the broker is busy anyway. A crowd that fills a message
// within the long time is given that time: nobody waits for this but the worker.
func (h *handoff) gather(first handed, timer *time.Timer, stopping bool) []handed {
	batch := make([]handed, 1, messaging.MaxOrdersPerMessage)
	batch[0] = first
	wait := h.wait
	switch {
	case stopping || wait < 0:
		wait = 0
	case h.rate*float64(longGather) >= messaging.MaxOrdersPerMessage:
		wait = max(wait, longGather)
	case len(h.slots) == 0:
		wait = 0
	}
	armed := false
	for len(batch) < maxGather {
		select {
		case o := <-h.queue:
			batch = append(batch, o)
			continue
		default:
		}
		if wait == 0 {
			break
		}
		if !armed {
			timer.Reset(wait)
			armed = true
		}
		select {
		case o := <-h.queue:
			batch = append(batch, o)
			continue
		case <-timer.C:
			armed = false
		}
		break
	}
	if armed {
		timer.Stop()
	}
	now := time.Now()
	h.rate = float64(len(batch)) / float64(max(now.Sub(h.gathered), time.Microsecond))
	h.gathered = now
	return batch
}

func (h *handoff) publish(ctx context.Context, batch []handed) {
	ctx, cancel := context.WithTimeout(ctx, h.deadline)
	defer cancel()
	err := failpoint.Hit(ctx, "api.before_publish")
	if err != nil {
		h.failed.Add(float64(len(batch)))
	} else {
		msgs := make([]messaging.Message, 0, maxGather/messaging.MaxOrdersPerMessage)
		for part := range slices.Chunk(batch, messaging.MaxOrdersPerMessage) {
			msgs = append(msgs, message(part))
		}
		for i, failed := range h.pub.Publish(ctx, messaging.ExchangeEvents, msgs...) {
			n := min(len(batch)-i*messaging.MaxOrdersPerMessage, messaging.MaxOrdersPerMessage)
			if failed == nil {
				h.confirmed.Add(float64(n))
				continue
			}
			h.failed.Add(float64(n))
			h.log.DebugContext(ctx, "publish left to the relay", "orders", n, "error", failed)
		}
		err = failpoint.Hit(ctx, "api.after_publish")
	}
	if err != nil {
		h.log.DebugContext(ctx, "publishing interrupted", "orders", len(batch), "error", err)
	}
}

func message(batch []handed) messaging.Message {
	orders := make([]order.Order, len(batch))
	var trace observability.Trace // a message has one: the first that came with one of its orders
	for i := range batch {
		orders[i] = batch[i].order
		if !trace.IsValid() {
			trace = batch[i].trace
		}
	}
	m := messaging.OrderReserved(orders)
	inject(&m, trace)
	return m
}

// inject gives a message the trace it belongs to, or begins one.
func inject(m *messaging.Message, t observability.Trace) {
	if t.IsValid() {
		t = t.Child()
	} else {
		t = observability.NewTrace()
	}
	if m.Headers == nil {
		m.Headers = make(map[string]string, 1)
	}
	t.Inject(m.Headers)
}
