package deadletter

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"seckill/pkg/messaging"
	"seckill/pkg/order"
	"seckill/services/order-worker/internal/store"
)

// What can be wrong with a request.
var (
	ErrNotFound    = errors.New("dead letter not found")
	ErrJobNotFound = errors.New("replay job not found")
	ErrSelection   = errors.New("invalid selection of dead letters")
)

// parker is the part of stock.Client that moves outbox entries out of the relay's way and back.
type parker interface {
	Park(ctx context.Context, ids []order.ID) error
	Unpark(ctx context.Context, ids []order.ID) error
}

// publisher is the part of messaging.Client that replays.
type publisher interface {
	Publish(ctx context.Context, exchange string, msgs ...messaging.Message) []error
}

// follower is the part of follow.Follower that carries out what a final row asks for, and applies the
// payments that came before it.
type follower interface {
	Rows(ctx context.Context, rows []*store.Order) error
	Kept(ctx context.Context, orderIDs []string) error
}

// Config of a Service. Zero values mean the defaults.
type Config struct {
	Interval  time.Duration // between looks for jobs, sent letters and figures; default 1 s
	SentLimit time.Duration // after which a sent letter without effect is open again; default 15 min
}

// Service is safe for concurrent use, also by several workers on one database.
type Service struct {
	st     *store.Store
	redis  parker
	broker publisher
	follow follower
	cfg    Config
	log    *slog.Logger
	gauge  *prometheus.GaugeVec
	wake   chan struct{} // a job was made in this process
}

// New makes a Service; it does no I/O.
func New(st *store.Store, redis parker, broker publisher, f follower, cfg Config, log *slog.Logger, reg prometheus.Registerer) (*Service, error) {
	if cfg.Interval == 0 {
		cfg.Interval = time.Second
	}
	if cfg.SentLimit == 0 {
		cfg.SentLimit = 15 * time.Minute
	}
	s := &Service{
		st: st, redis: redis, broker: broker, follow: f, cfg: cfg, log: log, wake: make(chan struct{}, 1),
		gauge: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "seckill_dead_letters",
			Help: "Dead letters by state and class.",
		}, []string{"state", "class"}),
	}
	s.gauge.WithLabelValues(store.LetterOpen, "undecodable")
	if err := reg.Register(s.gauge); err != nil {
		return nil, fmt.Errorf("register metrics: %w", err)
	}
	return s, nil
}

// Consumer configures the consumer that Handle is for.
func (s *Service) Consumer() messaging.ConsumerConfig {
	return messaging.ConsumerConfig{Queue: messaging.QueueDead, Workers: 1, Prefetch: 32, BatchOrders: 32}
}

// Run carries out replay jobs, resolves what was sent and has worked, and keeps the figures, until
// ctx ends.
func (s *Service) Run(ctx context.Context) {
	tick := time.NewTicker(s.cfg.Interval)
	defer tick.Stop()
	for {
		for _, step := range []struct {
			name string
			do   func(context.Context) error
		}{{"replay", s.runJobs}, {"resolve", s.resolveSent}, {"count", s.count}} {
			if err := step.do(ctx); err != nil && ctx.Err() == nil {
				s.log.WarnContext(ctx, "dead letter work failed, trying again", "step", step.name, "error", err)
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		case <-s.wake:
		}
	}
}

// classes that are labels; a foreign program could write anything into the header.
var classes = map[string]bool{ //nolint:gochecknoglobals // a constant
	"undecodable": true, "invalid_order": true, "unknown_activity": true, "conflict": true, "refused": true, "unknown_event": true,
	messaging.ClassAttemptsExhausted: true, messaging.ClassPanic: true,
	classDeliveryLimit: true, "expired": true, "rejected": true, "maxlen": true,
}

func (s *Service) count(ctx context.Context) error {
	var rows []struct {
		State, Class string
		N            float64
	}
	if err := s.st.DB(ctx).Raw("SELECT state, class, COUNT(*) AS n FROM dead_letters GROUP BY state, class").Scan(&rows).Error; err != nil {
		return fmt.Errorf("count dead letters: %w", err)
	}
	s.gauge.Reset()
	s.gauge.WithLabelValues(store.LetterOpen, "undecodable")
	for _, r := range rows {
		if !classes[r.Class] {
			r.Class = "other"
		}
		s.gauge.WithLabelValues(r.State, r.Class).Add(r.N)
	}
	return nil
}
