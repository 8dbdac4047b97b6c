package checkout

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"seckill/pkg/failpoint"
	"seckill/pkg/messaging"
	"seckill/pkg/observability"
	"seckill/pkg/order"
	"seckill/pkg/stock"
)

// Config bounds the buying path. The zero value of each field means its default.
type Config struct {
	// RedisTimeout is the deadline of one request's work in Redis. Default 1s.
	RedisTimeout time.Duration `mapstructure:"redis_timeout"`
	// PublishTimeout is how long a cancel, a payment or a hand-over waits for the broker's confirm.
	// A rebuild waits longer than this (R10). Default 2s.
	PublishTimeout time.Duration `mapstructure:"publish_timeout"`
	// MaxInFlight bounds the requests that work in Redis at once; more are refused. Default 2048.
	MaxInFlight int `mapstructure:"max_in_flight"`
	// HandoffQueue is how many accepted orders may wait for the publisher; what does not fit is left
	// to the relay. Default 8192.
	HandoffQueue int `mapstructure:"handoff_queue"`
	// HandoffInFlight is how many hand-overs, of up to four messages each, may wait for their confirms
	// at once. Default 64.
	HandoffInFlight int `mapstructure:"handoff_in_flight"`
	// GatherWait is how long an order waits for company while other messages are in flight. When
	// messages fill, up to 16 ms. Default 1ms; negative: never.
	GatherWait time.Duration `mapstructure:"gather_wait"`
	// ActivityRefresh is how often the activities in use are read again. Default 100ms, so that what
	// is remembered as sold out is never older than SoldOutMaxAge.
	ActivityRefresh time.Duration `mapstructure:"activity_refresh"`
	// SoldOutMaxAge is how old a snapshot may be to refuse a buyer without asking Redis.
	// Default 200ms; negative: Redis is always asked.
	SoldOutMaxAge time.Duration `mapstructure:"sold_out_max_age"`
	// ActivityCacheSize bounds the snapshots kept. Default 1024.
	ActivityCacheSize int `mapstructure:"activity_cache_size"`
	// ActivityIdle is how long a snapshot is refreshed after it was last asked for. Default 1m.
	ActivityIdle time.Duration `mapstructure:"activity_idle"`
	// UnknownTTL is how long an unknown activity id is remembered. Default 500ms.
	UnknownTTL time.Duration `mapstructure:"unknown_ttl"`
	// UserRate bounds the reservations of one user in one second in this process. Default 0: no bound.
	UserRate int `mapstructure:"user_rate"`
}

// WithDefaults returns the configuration with every unset field filled in.
func (c Config) WithDefaults() Config {
	def(&c.RedisTimeout, time.Second)
	def(&c.PublishTimeout, 2*time.Second)
	def(&c.MaxInFlight, 2048)
	def(&c.HandoffQueue, 8192)
	def(&c.HandoffInFlight, 64)
	def(&c.GatherWait, time.Millisecond)
	def(&c.ActivityRefresh, 100*time.Millisecond)
	def(&c.SoldOutMaxAge, 200*time.Millisecond)
	def(&c.ActivityCacheSize, 1024)
	def(&c.ActivityIdle, time.Minute)
	def(&c.UnknownTTL, 500*time.Millisecond)
	return c
}

func def[T comparable](v *T, d T) {
	var zero T
	if *v == zero {
		*v = d
	}
}

func (c Config) validate() error {
	for name, v := range map[string]int{
		"max_in_flight": c.MaxInFlight, "handoff_queue": c.HandoffQueue,
		"handoff_in_flight": c.HandoffInFlight, "activity_cache_size": c.ActivityCacheSize,
	} {
		if v < 1 {
			return fmt.Errorf("checkout.%s: %d is not positive", name, v)
		}
	}
	for name, v := range map[string]time.Duration{
		"redis_timeout": c.RedisTimeout, "publish_timeout": c.PublishTimeout, "activity_refresh": c.ActivityRefresh,
		"activity_idle": c.ActivityIdle, "unknown_ttl": c.UnknownTTL,
	} {
		if v <= 0 {
			return fmt.Errorf("checkout.%s: %s is not positive", name, v)
		}
	}
	if c.UserRate < 0 {
		return fmt.Errorf("checkout.user_rate: %d is negative", c.UserRate)
	}
	return nil
}

// store is what checkout needs of stock.Client besides the activities.
type store interface {
	activityStore
	Reserve(ctx context.Context, r stock.Reservation) (stock.Reserved, error)
	Order(ctx context.Context, id order.ID) (stock.Record, error)
	MarkPaying(ctx context.Context, id order.ID) error
	Mine(ctx context.Context, activity string, bucket int, user string) ([]stock.Record, error)
	Answered(ctx context.Context, activity string, bucket int, user, key string) (bool, error)
}

// Caller is who sends a request.
type Caller struct {
	User string
	// Activity restricts a rehearsal's token to one shadow activity; empty for everybody else.
	Activity string
}

// Request asks for units of one sku. Its fields have been checked for shape, not for existence.
type Request struct {
	Caller
	ActivityID string
	SKU        string
	Quantity   int
	Region     string
	IdemKey    string              // optional
	Trace      observability.Trace // optional; travels in the message's headers
}

// digest tells a retry from a key used again for something else. The parts cannot contain NUL, so
// different requests never join to the same text.
func (r *Request) digest() string {
	buf := make([]byte, 0, 160)
	buf = append(buf, r.ActivityID...)
	buf = append(buf, 0)
	buf = append(buf, r.SKU...)
	buf = append(buf, 0)
	buf = strconv.AppendInt(buf, int64(r.Quantity), 10)
	buf = append(buf, 0)
	buf = append(buf, r.Region...)
	sum := sha256.Sum256(buf)
	return hex.EncodeToString(sum[:16])
}

// Service is the buying path. It is safe for concurrent use.
type Service struct {
	cfg     Config
	store   store
	pub     publisher
	log     *slog.Logger
	ids     *order.IDs
	known   *activities
	handoff *handoff
	slots   chan struct{}
	rate    *userRate

	deadlines deadlines

	results  map[string]prometheus.Counter
	duration prometheus.Observer
}

// Results of a reservation, as they are counted: accepted, replayed, unknown, or the code of the refusal.
const (
	resultAccepted    = "accepted"
	resultReplayed    = "replayed"
	resultSoldOut     = "sold_out"
	resultLimit       = "limit_reached"
	resultNotStarted  = "activity_not_started"
	resultEnded       = "activity_ended"
	resultPaused      = "activity_paused"
	resultNotAllowed  = "not_qualified"
	resultForbidden   = "unauthenticated"
	resultNotFound    = "activity_not_found"
	resultKeyReused   = "idempotency_key_reused"
	resultInvalid     = "invalid_request"
	resultRateLimited = "rate_limited"
	resultUnavailable = "temporarily_unavailable"
	resultUnknown     = "unknown_outcome"
	resultError       = "internal"
)

// New makes a Service without I/O. Run has to be running for activities to be refreshed and orders to
// be published.
func New(cfg Config, st store, pub publisher, log *slog.Logger, reg prometheus.Registerer) (*Service, error) {
	cfg = cfg.WithDefaults()
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	s := &Service{
		cfg:     cfg,
		store:   st,
		pub:     pub,
		log:     log,
		ids:     order.NewIDs(),
		known:   newActivities(cfg, st, log),
		handoff: newHandoff(cfg, pub, log, reg),
		slots:   make(chan struct{}, cfg.MaxInFlight),
		rate:    newUserRate(cfg.UserRate),

		deadlines: deadlines{after: cfg.RedisTimeout},

		results: make(map[string]prometheus.Counter),
	}
	total := prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "seckill_reservations_total",
		Help: "Reservations asked for, by result.",
	}, []string{"result"})
	for _, r := range []string{
		resultAccepted, resultReplayed, resultSoldOut, resultLimit, resultNotStarted, resultEnded, resultPaused, resultNotAllowed, resultForbidden, resultNotFound,
		resultKeyReused, resultInvalid, resultRateLimited, resultUnavailable, resultUnknown, resultError,
	} {
		s.results[r] = total.WithLabelValues(r)
	}
	duration := prometheus.NewHistogram(prometheus.HistogramOpts{
		Name:    "seckill_reserve_duration_seconds",
		Help:    "Time from a reservation's arrival to its decision.",
		Buckets: []float64{.0001, .00025, .0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5},
	})
	s.duration = duration
	reg.MustRegister(total, duration)
	return s, nil
}

// Run refreshes activities and publishes accepted orders until ctx ends. It then publishes what is
// still queued, waits for the confirms within the publish deadline, and returns.
func (s *Service) Run(ctx context.Context) {
	var wg sync.WaitGroup
	wg.Add(2)
	go func() { defer wg.Done(); s.known.run(ctx) }()
	go func() { defer wg.Done(); s.handoff.run(ctx) }()
	wg.Wait()
}

// acquire takes a place among the requests that work in Redis. It never waits: a queue in front of a
// slow store only makes everybody late.
func (s *Service) acquire() error {
	select {
	case s.slots <- struct{}{}:
		return nil
	default:
		return ErrOverloaded
	}
}

func (s *Service) release() { <-s.slots }

// InFlight is how many requests work in Redis right now.
func (s *Service) InFlight() int { return len(s.slots) }

// Activity returns a snapshot that is at most a second old.
func (s *Service) Activity(ctx context.Context, id string) (*Snapshot, error) {
	if !order.ValidActivityID(id) {
		return nil, stock.ErrActivityNotFound
	}
	if err := s.acquire(); err != nil {
		return nil, err
	}
	defer s.release()
	ctx, cancel := context.WithTimeout(ctx, s.cfg.RedisTimeout)
	defer cancel()
	return s.known.get(ctx, id, time.Second)
}

// permit refuses a rehearsal's token outside its own shadow activity.
func permit(c Caller, snap *Snapshot) error {
	if c.Activity != "" && (c.Activity != snap.ID || !snap.Shadow) {
		return ErrNotPermitted
	}
	return nil
}

// Reserve takes units for the caller, or gives the earlier answer to the same idempotency key again.
// The refusals are stock's sentinels and this package's errors. It does not stop when ctx is
// cancelled: the script may already run, and an accepted order has to be handed over (C4).
func (s *Service) Reserve(_ context.Context, r Request) (stock.Reserved, error) {
	start := time.Now()
	got, err := s.reserve(&r)
	s.duration.Observe(time.Since(start).Seconds())
	s.results[resultOf(got, err)].Inc()
	return got, err
}

func (s *Service) reserve(r *Request) (stock.Reserved, error) {
	if !order.ValidActivityID(r.ActivityID) {
		return stock.Reserved{}, stock.ErrActivityNotFound
	}
	if !s.rate.allow(r.User) {
		return stock.Reserved{}, ErrRateLimited
	}
	// The losing crowd costs no call, no place among those who work in Redis, and no timer.
	if r.IdemKey == "" {
		if snap := s.known.peek(r.ActivityID); snap != nil && permit(r.Caller, snap) == nil {
			if from, ok := snap.sources[offer{r.SKU, r.Region}]; ok {
				if err := s.remembered(snap, from); err != nil {
					return stock.Reserved{}, err
				}
			}
		}
	}
	if err := s.acquire(); err != nil {
		return stock.Reserved{}, err
	}
	defer s.release()
	ctx := s.deadlines.next()

	snap, err := s.known.get(ctx, r.ActivityID, 0)
	if err != nil {
		return stock.Reserved{}, err
	}
	if err := permit(r.Caller, snap); err != nil {
		return stock.Reserved{}, err
	}
	if snap.Ended && len(snap.Items) == 0 {
		return stock.Reserved{}, stock.ErrEnded // only the marker is left
	}
	from, ok := snap.sources[offer{r.SKU, r.Region}]
	if !ok {
		if !hasSKU(&snap.Activity, r.SKU) {
			return stock.Reserved{}, &InvalidError{Field: "sku_id", Detail: "not part of this activity"}
		}
		return stock.Reserved{}, &InvalidError{Field: "region", Detail: "names no pool of this sku and has no fallback"}
	}
	bucket := order.Bucket(r.User, snap.Buckets)
	if gone := s.remembered(snap, from); gone != nil {
		if r.IdemKey == "" {
			return stock.Reserved{}, gone
		}
		// A request with a key may have an earlier answer in Redis, so that is always looked up: with
		// one plain read, since the script would do much more to say the same.
		answered, err := s.store.Answered(ctx, r.ActivityID, bucket, r.User, r.IdemKey)
		if err != nil {
			return stock.Reserved{}, err
		}
		if !answered {
			return stock.Reserved{}, gone
		}
	}
	id, err := s.ids.New(r.ActivityID, bucket)
	if err != nil {
		return stock.Reserved{}, err
	}
	res := stock.Reservation{ID: id, User: r.User, SKU: r.SKU, Region: r.Region, Pools: from.pools, Quantity: r.Quantity}
	if r.IdemKey != "" {
		res.IdemKey, res.IdemDigest = r.IdemKey, r.digest()
	}
	got, err := s.store.Reserve(ctx, res)
	if err == nil {
		err = failpoint.Hit(ctx, "api.after_reserve")
		if err != nil {
			return stock.Reserved{}, &UnknownOutcomeError{ID: id, Err: err}
		}
		if !got.Replay {
			s.handoff.offer(got.Order, r.Trace)
		}
		return got, nil
	}
	switch {
	case errors.Is(err, stock.ErrActivityNotFound):
		// It was there a moment ago, so it is lost, not unknown.
		return stock.Reserved{}, stock.ErrNotWarmed
	case errors.Is(err, stock.ErrSoldOut):
		if !from.empty {
			s.known.touch(r.ActivityID)
		}
	case errors.Is(err, stock.ErrUnknownOutcome),
		errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, stock.ErrUnavailable):
		return stock.Reserved{}, &UnknownOutcomeError{ID: id, Err: err}
	}
	return stock.Reserved{}, err
}

// remembered refuses from memory what Redis said at most SoldOutMaxAge ago: the sale is over, or not
// one unit is left in any pool the buyer may use. Fewer than asked for is not nothing.
func (s *Service) remembered(snap *Snapshot, from source) error {
	if snap.Age() > s.cfg.SoldOutMaxAge {
		return nil
	}
	if snap.Ended || snap.Settled {
		return stock.ErrEnded
	}
	if snap.Opened && from.empty && snap.Phase(snap.Now()) == stock.Open {
		return stock.ErrSoldOut
	}
	return nil
}

func hasSKU(a *stock.Activity, sku string) bool {
	for i := range a.Items {
		if a.Items[i].SKU == sku {
			return true
		}
	}
	return false
}

func resultOf(got stock.Reserved, err error) string {
	switch {
	case err == nil && got.Replay:
		return resultReplayed
	case err == nil:
		return resultAccepted
	case errors.Is(err, stock.ErrSoldOut):
		return resultSoldOut
	}
	var (
		limit   *stock.LimitError
		early   *stock.NotStartedError
		invalid *InvalidError
		unknown *UnknownOutcomeError
	)
	switch {
	case errors.As(err, &limit):
		return resultLimit
	case errors.As(err, &early):
		return resultNotStarted
	case errors.Is(err, stock.ErrEnded):
		return resultEnded
	case errors.Is(err, stock.ErrPaused):
		return resultPaused
	case errors.Is(err, stock.ErrNotQualified):
		return resultNotAllowed
	case errors.Is(err, ErrNotPermitted):
		return resultForbidden
	case errors.Is(err, stock.ErrActivityNotFound):
		return resultNotFound
	case errors.Is(err, stock.ErrKeyReused):
		return resultKeyReused
	case errors.As(err, &invalid), errors.Is(err, stock.ErrInvalid):
		return resultInvalid
	case errors.Is(err, ErrRateLimited):
		return resultRateLimited
	case errors.As(err, &unknown):
		return resultUnknown
	case errors.Is(err, ErrOverloaded), errors.Is(err, stock.ErrNotWarmed), errors.Is(err, stock.ErrUnavailable):
		return resultUnavailable
	default:
		return resultError
	}
}

// Mine returns the caller's orders in an activity.
func (s *Service) Mine(ctx context.Context, c Caller, activity string) ([]stock.Record, error) {
	if !order.ValidActivityID(activity) {
		return nil, stock.ErrActivityNotFound
	}
	if err := s.acquire(); err != nil {
		return nil, err
	}
	defer s.release()
	ctx, cancel := context.WithTimeout(ctx, s.cfg.RedisTimeout)
	defer cancel()
	snap, err := s.known.get(ctx, activity, 0)
	if err != nil {
		return nil, err
	}
	if err := permit(c, snap); err != nil {
		return nil, err
	}
	list, err := s.store.Mine(ctx, activity, order.Bucket(c.User, snap.Buckets), c.User)
	if err == nil && len(list) == 0 {
		err = s.lost(ctx, activity)
	}
	return list, err
}

// lost tells a buyer of whom nothing was found whether that can be believed: a Redis that has lost an open
// sale knows nobody's orders, which MySQL has and a rebuild brings back.
func (s *Service) lost(ctx context.Context, activity string) error {
	// As old as a sale gets that is kept fresh: no read of its own on a path that buyers poll.
	snap, err := s.known.get(ctx, activity, 2*s.cfg.ActivityRefresh)
	switch {
	case errors.Is(err, stock.ErrNotWarmed):
		return err
	case err != nil:
		return nil //nolint:nilerr // an unknown sale, or no answer: what was read stands
	case !snap.Opened && !snap.Settled && snap.Phase(snap.Now()) == stock.Open:
		return stock.ErrNotWarmed
	}
	return nil
}

// Order returns one of the caller's orders. Somebody else's is stock.ErrOrderNotFound.
func (s *Service) Order(ctx context.Context, c Caller, id string) (stock.Record, error) {
	oid, err := order.ParseID(id)
	if err != nil {
		return stock.Record{}, stock.ErrOrderNotFound
	}
	if err := s.acquire(); err != nil {
		return stock.Record{}, err
	}
	defer s.release()
	ctx, cancel := context.WithTimeout(ctx, s.cfg.RedisTimeout)
	defer cancel()
	if c.Activity != "" {
		snap, err := s.known.get(ctx, oid.Activity, 0)
		if err != nil {
			return stock.Record{}, stock.ErrOrderNotFound
		}
		if err := permit(c, snap); err != nil {
			return stock.Record{}, err
		}
	}
	rec, err := s.store.Order(ctx, oid)
	if errors.Is(err, stock.ErrOrderNotFound) {
		if gone := s.lost(ctx, oid.Activity); gone != nil {
			err = gone
		}
	}
	if err != nil {
		return stock.Record{}, err
	}
	if rec.User != c.User {
		return stock.Record{}, stock.ErrOrderNotFound
	}
	return rec, nil
}

// Cancel asks for the caller's order to be cancelled and waits until the broker has taken the
// request. "Asked" is not "cancelled": a payment may still win (R16).
func (s *Service) Cancel(ctx context.Context, c Caller, id string, trace observability.Trace) (stock.Record, error) {
	rec, err := s.Order(ctx, c, id)
	if err != nil {
		return stock.Record{}, err
	}
	if rec.Receipt || (rec.Status != order.Reserved && rec.Status != order.Pending) {
		return stock.Record{}, &NotCancellableError{Status: rec.Status}
	}
	o := rec.Order
	m := messaging.CancelRequested(messaging.Cancel{
		OrderID:     rec.ID,
		Reason:      order.ReasonUserCancelled,
		Actor:       "user:" + c.User,
		RequestedAt: time.Now().UTC(),
		Order:       &o,
	})
	if err := s.publish(ctx, m, trace); err != nil {
		return stock.Record{}, fmt.Errorf("ask for cancel of order %s: %w", rec.ID, err)
	}
	return rec, nil
}

// Payment is what a provider reported.
type Payment struct {
	OrderID       order.ID
	TransactionID string
	AmountMinor   int64
	Currency      string
}

// Pay hands a payment to the worker and waits for the broker's confirm. Without a record the worker
// decides (R5); with one, another amount or currency is refused at once.
func (s *Service) Pay(ctx context.Context, p Payment, trace observability.Trace) error {
	if err := s.acquire(); err != nil {
		return err
	}
	defer s.release()
	lookup, cancel := context.WithTimeout(ctx, s.cfg.RedisTimeout)
	defer cancel()
	var content *order.Order
	rec, err := s.store.Order(lookup, p.OrderID)
	switch {
	case errors.Is(err, stock.ErrOrderNotFound), errors.Is(err, stock.ErrArchived), errors.Is(err, stock.ErrCorrupt):
		// order-worker decides by MySQL's row. The money has been taken: a record that is gone, or that
		// somebody has overwritten, is no reason to lose sight of it.
	case err != nil:
		return err
	default:
		amount, err := rec.AmountMinor()
		if err != nil || amount != p.AmountMinor || rec.Currency != p.Currency {
			return ErrAmountMismatch
		}
		o := rec.Order
		content = &o
		// Before the message: while it waits, the order must not expire. Without the mark the first of
		// both that MySQL commits wins, which is no reason to refuse the money.
		if err := s.store.MarkPaying(lookup, p.OrderID); err != nil {
			s.log.WarnContext(ctx, "could not note a payment on its way", "order_id", p.OrderID.String(), "error", err)
		}
	}
	m := messaging.OrderPaid(messaging.Payment{
		OrderID:       p.OrderID,
		TransactionID: p.TransactionID,
		AmountMinor:   p.AmountMinor,
		Currency:      p.Currency,
		ReceivedAt:    time.Now().UTC(),
		Order:         content,
	})
	if err := s.publish(ctx, m, trace); err != nil {
		return fmt.Errorf("hand over payment %s of order %s: %w", p.TransactionID, p.OrderID, err)
	}
	return nil
}

// publish waits for one confirm within the deadline, whatever the client does meanwhile.
func (s *Service) publish(ctx context.Context, m messaging.Message, trace observability.Trace) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), s.cfg.PublishTimeout)
	defer cancel()
	inject(&m, trace)
	if err := errors.Join(s.pub.Publish(ctx, messaging.ExchangeEvents, m)...); err != nil {
		return fmt.Errorf("%w: %w", ErrBroker, err)
	}
	return nil
}
