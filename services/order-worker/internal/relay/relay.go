// Package relay publishes again what stays in the outbox: reservations whose message was never
// published (the process died, the hand-off was full, the broker was away) or whose publish outcome
// is unknown (C1, C2). The worker takes an order out of the outbox when its row is committed.
package relay

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"seckill/pkg/messaging"
	"seckill/pkg/order"
	"seckill/pkg/stock"
	"seckill/services/order-worker/internal/store"
)

// Config says how patient the relay is. The zero value of each field means its default.
type Config struct {
	// Interval between two walks. Default 1 s.
	Interval time.Duration `mapstructure:"interval"`
	// Age an outbox entry must have before it is published again. Default 5 s.
	Age time.Duration `mapstructure:"age"`
	// MaxBackoff bounds the pause between two publishes of one entry; it starts at Age and doubles,
	// so that a backlog in the queue is not multiplied. Default 5 min.
	MaxBackoff time.Duration `mapstructure:"max_backoff"`
}

// WithDefaults returns c with every unset field filled in.
func (c Config) WithDefaults() Config {
	if c.Interval <= 0 {
		c.Interval = time.Second
	}
	if c.Age <= 0 {
		c.Age = 5 * time.Second
	}
	if c.MaxBackoff <= 0 {
		c.MaxBackoff = 5 * time.Minute
	}
	return c
}

// outboxes is the part of stock.Client that the relay reads.
type outboxes interface {
	Now(ctx context.Context) (time.Time, error)
	OutboxStats(ctx context.Context, activity string, bucket int) (stock.OutboxStats, error)
	Outbox(ctx context.Context, activity string, bucket int, before time.Time, limit int) ([]stock.Record, error)
}

// publisher is the part of messaging.Client that the relay uses.
type publisher interface {
	Publish(ctx context.Context, exchange string, msgs ...messaging.Message) []error
}

const (
	walkTimeout = time.Minute
	minRead     = 1024  // entries read from one bucket in a walk
	maxRead     = 65536 // the same when the oldest ones are all waiting for their next turn
)

type bucket struct {
	activity string
	number   int
}

// turn is when an entry may be published next.
type turn struct {
	next  time.Time
	pause time.Duration
	walk  uint64
}

// Relay is used by one goroutine.
type Relay struct {
	cfg   Config
	st    *store.Store
	stock outboxes
	pub   publisher
	log   *slog.Logger

	sales []store.Activity // last known: MySQL may be away
	turns map[bucket]map[order.ID]turn
	read  map[bucket]int
	walk  uint64

	oldest    prometheus.Gauge
	entries   *prometheus.GaugeVec
	published *prometheus.CounterVec
}

// New makes a Relay.
func New(cfg Config, st *store.Store, outbox outboxes, pub publisher, log *slog.Logger, reg prometheus.Registerer) (*Relay, error) {
	r := &Relay{
		cfg: cfg.WithDefaults(), st: st, stock: outbox, pub: pub, log: log,
		turns: map[bucket]map[order.ID]turn{}, read: map[bucket]int{},
		oldest: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "seckill_outbox_oldest_age_seconds",
			Help: "Age of the oldest reservation that is not known to be in MySQL; 0 when there is none.",
		}),
		entries: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "seckill_outbox_entries",
			Help: "Reservations not known to be in MySQL: waiting, and parked behind a dead letter.",
		}, []string{"state"}),
		published: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "seckill_relay_orders_total",
			Help: "Orders published again from the outbox, by outcome.",
		}, []string{"result"}),
	}
	for _, c := range []prometheus.Collector{r.oldest, r.entries, r.published} {
		if err := reg.Register(c); err != nil {
			return nil, fmt.Errorf("register metrics: %w", err)
		}
	}
	r.entries.WithLabelValues("waiting")
	r.entries.WithLabelValues("parked")
	r.published.WithLabelValues("confirmed")
	r.published.WithLabelValues("failed")
	return r, nil
}

// Run walks until ctx ends.
func (r *Relay) Run(ctx context.Context) {
	for {
		round, cancel := context.WithTimeout(ctx, walkTimeout)
		_, err := r.Walk(round)
		cancel()
		if err != nil && ctx.Err() == nil {
			r.log.WarnContext(ctx, "relay could not finish its walk", "error", err)
		}
		// With jitter: replicas that walk in step would publish everything twice.
		t := time.NewTimer(r.cfg.Interval/2 + time.Duration(rand.Int64N(int64(r.cfg.Interval)))) //nolint:gosec // jitter
		select {
		case <-ctx.Done():
			t.Stop()
			return
		case <-t.C:
		}
	}
}

// Walk looks through every outbox once and says how many orders were published again.
func (r *Relay) Walk(ctx context.Context) (int, error) {
	now, err := r.stock.Now(ctx) // entries are timed by Redis' clock
	if err != nil {
		return 0, fmt.Errorf("relay: %w", err)
	}
	if err := r.refresh(ctx); err != nil {
		r.log.WarnContext(ctx, "relay works with the sales it knew before", "error", err)
	}
	r.walk++
	var waiting, parked, sent int
	var oldest time.Time
	var errs []error
	live := map[bucket]bool{}
	for _, s := range r.sales {
		buckets := s.Buckets
		if buckets < 1 || buckets > order.MaxBuckets {
			buckets = order.MaxBuckets // a damaged row: whichever there may be
		}
		for n := range buckets {
			b := bucket{s.ID, n}
			live[b] = true
			stats, err := r.stock.OutboxStats(ctx, b.activity, b.number)
			if errors.Is(err, stock.ErrCorrupt) {
				errs = append(errs, fmt.Errorf("relay: %w", err)) // nor one outbox those of other sales
				continue
			}
			if err != nil {
				return sent, fmt.Errorf("relay: %w", err)
			}
			waiting += stats.Waiting
			parked += stats.Parked
			if stats.Waiting == 0 {
				delete(r.turns, b)
				delete(r.read, b)
				continue
			}
			if oldest.IsZero() || stats.Oldest.Before(oldest) {
				oldest = stats.Oldest
			}
			if now.Sub(stats.Oldest) < r.cfg.Age {
				continue
			}
			k, err := r.bucket(ctx, b, now)
			sent += k
			if errors.Is(err, stock.ErrCorrupt) {
				errs = append(errs, err) // one record must not hide the other buckets
				continue
			}
			if err != nil {
				errs = append(errs, err)
				r.report(now, oldest, waiting, parked)
				return sent, errors.Join(errs...) // the broker is away: the rest would fail as well
			}
		}
	}
	for b := range r.turns {
		if !live[b] {
			delete(r.turns, b)
			delete(r.read, b)
		}
	}
	r.report(now, oldest, waiting, parked)
	return sent, errors.Join(errs...)
}

func (r *Relay) report(now, oldest time.Time, waiting, parked int) {
	age := 0.0
	if !oldest.IsZero() {
		age = max(0, now.Sub(oldest).Seconds())
	}
	r.oldest.Set(age)
	r.entries.WithLabelValues("waiting").Set(float64(waiting))
	r.entries.WithLabelValues("parked").Set(float64(parked))
}

// refresh reads which sales may have anything in an outbox.
func (r *Relay) refresh(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	var sales []store.Activity
	if err := r.st.DB(ctx).Select("id", "buckets").Where("state IN ?", []string{store.ActivityWarmed, store.ActivityEnded}).
		Order("id").Find(&sales).Error; err != nil {
		return fmt.Errorf("read activities: %w", err)
	}
	r.sales = sales
	return nil
}

// bucket publishes what is due in one bucket.
func (r *Relay) bucket(ctx context.Context, b bucket, now time.Time) (int, error) {
	limit := max(r.read[b], minRead)
	recs, rerr := r.stock.Outbox(ctx, b.activity, b.number, now.Add(-r.cfg.Age), limit)
	if rerr != nil && !errors.Is(rerr, stock.ErrCorrupt) {
		return 0, fmt.Errorf("relay: %w", rerr)
	}
	turns := r.turns[b]
	if turns == nil {
		turns = map[order.ID]turn{}
		r.turns[b] = turns
	}
	var due []order.Order
	for _, rec := range recs {
		t, ok := turns[rec.ID]
		if !ok {
			t = turn{pause: r.cfg.Age}
		}
		t.walk = r.walk
		turns[rec.ID] = t
		if !now.Before(t.next) {
			due = append(due, rec.Order)
		}
	}
	// When the oldest are all waiting for their turn, those behind them must not wait as well.
	if len(recs) == limit && len(due) < limit/2 {
		r.read[b] = min(2*limit, maxRead)
	} else {
		delete(r.read, b)
	}
	for id, t := range turns {
		if t.walk != r.walk {
			delete(turns, id) // out of the outbox
		}
	}
	if len(due) == 0 {
		return 0, rerr
	}
	var msgs []messaging.Message
	var parts [][]order.Order
	for len(due) > 0 {
		n := min(len(due), messaging.MaxOrdersPerMessage)
		msgs = append(msgs, messaging.OrderReserved(due[:n]))
		parts = append(parts, due[:n])
		due = due[n:]
	}
	sent := 0
	var failed error
	for i, err := range r.pub.Publish(ctx, messaging.ExchangeEvents, msgs...) {
		if err != nil {
			// Stays due: it was perhaps not published at all.
			r.published.WithLabelValues("failed").Add(float64(len(parts[i])))
			failed = err
			continue
		}
		r.published.WithLabelValues("confirmed").Add(float64(len(parts[i])))
		sent += len(parts[i])
		for _, o := range parts[i] {
			t := turns[o.ID]
			t.next = now.Add(t.pause)
			t.pause = min(2*t.pause, r.cfg.MaxBackoff)
			turns[o.ID] = t
		}
	}
	if failed != nil {
		return sent, fmt.Errorf("relay: publish orders again: %w", failed)
	}
	return sent, rerr
}
