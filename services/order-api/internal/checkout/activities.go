package checkout

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/singleflight"

	"seckill/pkg/stock"
)

// activityStore is the part of stock.Client that the cache reads.
type activityStore interface {
	Activity(ctx context.Context, id string) (stock.Activity, error)
	Levels(ctx context.Context, a *stock.Activity) (map[string]map[string]int, error)
	Now(ctx context.Context) (time.Time, error)
}

// Snapshot is what this process knew of an activity at one moment. It is never changed after it
// was made.
type Snapshot struct {
	stock.Activity
	// Levels is what is left per sku and pool; a pool whose key is missing somewhere is absent.
	Levels map[string]map[string]int
	// At is when the reads began, by this process' monotonic clock: the snapshot is at least as new.
	At time.Time
	// clockOffset is Redis' clock minus this process' clock.
	clockOffset time.Duration
	offsetAt    time.Time // when clockOffset was measured
	sources     map[offer]source
}

// clockMaxAge is how long a measured clock offset is used.
const clockMaxAge = 2 * time.Second

// Now is the present time by Redis' clock, as far as the snapshot knows it.
func (s *Snapshot) Now() time.Time { return time.Now().Round(0).Add(s.clockOffset).UTC() }

// Age is how old the snapshot is at most.
func (s *Snapshot) Age() time.Duration { return time.Since(s.At) }

// Phase is the activity's phase at the given time by Redis' clock.
func (s *Snapshot) Phase(now time.Time) stock.Phase {
	switch {
	case s.Ended || s.Settled || !now.Before(s.EndsAt):
		return stock.EndedP
	case s.Paused:
		return stock.Paused
	case now.Before(s.StartsAt):
		return stock.Scheduled
	default:
		return stock.Open
	}
}

// offer is one thing a buyer can ask for.
type offer struct{ sku, region string }

// source is where an offer's units come from.
type source struct {
	pools []string // in the order they are tried
	// empty: every one of the pools is known to have nothing left. A missing level is "not warmed",
	// never "sold out".
	empty bool
}

// lookUp finds the pools of each region of each sku once, so that no request has to.
func (s *Snapshot) lookUp() {
	s.sources = make(map[offer]source)
	for i := range s.Items {
		item := &s.Items[i]
		add := func(region string) {
			pools := s.PoolsFor(item.SKU, region)
			if len(pools) > 0 {
				s.sources[offer{item.SKU, region}] = source{pools: pools, empty: s.nothingLeft(item.SKU, pools)}
			}
		}
		for pool := range item.Pools {
			add(pool)
		}
		for region := range s.RegionFallback {
			add(region)
		}
	}
}

func (s *Snapshot) nothingLeft(sku string, pools []string) bool {
	levels := s.Levels[sku]
	for _, p := range pools {
		if left, known := levels[p]; !known || left > 0 {
			return false
		}
	}
	return true
}

type entry struct {
	snap     atomic.Pointer[Snapshot]
	lastUsed atomic.Int64 // Unix nanoseconds
}

// activities keeps a snapshot of each activity that is being asked for, and reads it anew in the
// background. Unknown ids are remembered for a moment, and ids that were once known for as long as
// there is room: an activity whose hash vanished is a store that lost data, not an unknown activity.
type activities struct {
	store    activityStore
	log      *slog.Logger
	refresh  time.Duration
	deadline time.Duration
	idle     time.Duration
	unknown  time.Duration
	max      int

	group singleflight.Group
	kick  chan string

	mu      sync.RWMutex
	entries map[string]*entry
	missing map[string]time.Time // unknown ids and until when that is believed
	seen    map[string]struct{}
	order   []string // seen ids in the order of their arrival; the oldest is forgotten first
}

func newActivities(cfg Config, store activityStore, log *slog.Logger) *activities {
	return &activities{
		store:    store,
		log:      log,
		refresh:  cfg.ActivityRefresh,
		deadline: cfg.RedisTimeout,
		idle:     cfg.ActivityIdle,
		unknown:  cfg.UnknownTTL,
		max:      cfg.ActivityCacheSize,
		kick:     make(chan string, 64),
		entries:  make(map[string]*entry),
		missing:  make(map[string]time.Time),
		seen:     make(map[string]struct{}),
	}
}

// get returns a snapshot that is at most maxAge old; without one it waits for a read. maxAge 0
// takes any age: what the reserve script checks itself needs no fresh copy.
func (a *activities) get(ctx context.Context, id string, maxAge time.Duration) (*Snapshot, error) {
	a.mu.RLock()
	e := a.entries[id]
	until, miss := a.missing[id]
	a.mu.RUnlock()
	now := time.Now()
	if e != nil {
		e.lastUsed.Store(now.UnixNano())
		if s := e.snap.Load(); s != nil && (maxAge == 0 || now.Sub(s.At) <= maxAge) {
			return s, nil
		}
	} else if miss && now.Before(until) {
		return nil, stock.ErrActivityNotFound
	}
	return a.load(ctx, id)
}

// peek returns what is remembered of an activity, or nil.
func (a *activities) peek(id string) *Snapshot {
	a.mu.RLock()
	e := a.entries[id]
	a.mu.RUnlock()
	if e == nil {
		return nil
	}
	e.lastUsed.Store(time.Now().UnixNano())
	return e.snap.Load()
}

// load reads one activity, once for all who wait for it. The read goes on when the first caller
// leaves, since others may wait for the same answer.
func (a *activities) load(ctx context.Context, id string) (*Snapshot, error) {
	ch := a.group.DoChan(id, func() (any, error) {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), a.deadline)
		defer cancel()
		return a.read(ctx, id)
	})
	select {
	case r := <-ch:
		if r.Err != nil {
			return nil, r.Err
		}
		return r.Val.(*Snapshot), nil
	case <-ctx.Done():
		return nil, errors.Join(stock.ErrUnavailable, ctx.Err())
	}
}

// read takes one round trip for an activity that is known: what is left is read beside the activity
// itself, by the catalogue known so far.
func (a *activities) read(ctx context.Context, id string) (*Snapshot, error) {
	at := time.Now()
	known := a.last(id)
	var (
		levels    map[string]map[string]int
		levelsErr error
		beside    sync.WaitGroup
	)
	if known != nil {
		beside.Go(func() { levels, levelsErr = a.store.Levels(ctx, &known.Activity) })
	}
	offset, offsetAt, clockErr := time.Duration(0), at, error(nil)
	if known != nil && at.Sub(known.offsetAt) < clockMaxAge {
		offset, offsetAt = known.clockOffset, known.offsetAt
	} else {
		beside.Go(func() { offset, clockErr = a.clock(ctx) })
	}
	act, err := a.store.Activity(ctx, id)
	beside.Wait()
	if errors.Is(err, stock.ErrActivityNotFound) {
		return nil, a.vanished(id, at)
	}
	if err != nil {
		return nil, err
	}
	if act.Ended && len(act.Items) == 0 && known != nil {
		// The hash is gone and the marker is left: what was known of the sale is still true.
		last := known.Activity
		last.Ended, last.Settled = true, act.Settled
		act = last
	}
	if known == nil || !sameCells(&known.Activity, &act) {
		levels, levelsErr = a.store.Levels(ctx, &act)
	}
	if err := errors.Join(levelsErr, clockErr); err != nil {
		return nil, err
	}
	s := &Snapshot{Activity: act, Levels: levels, At: at, clockOffset: offset, offsetAt: offsetAt}
	s.lookUp()
	a.keep(id, s)
	return s, nil
}

// clock measures how far Redis' clock is ahead of this process' clock.
func (a *activities) clock(ctx context.Context) (time.Duration, error) {
	before := time.Now()
	clock, err := a.store.Now(ctx)
	if err != nil {
		return 0, err
	}
	// It was read somewhere between request and reply: the middle halves the error. Round strips the
	// monotonic reading, so that a step of the wall clock shows in the next measurement.
	after := time.Now()
	return clock.Sub(before.Add(after.Sub(before) / 2).Round(0)), nil
}

// sameCells reports whether two copies of an activity have the same stock keys.
func sameCells(x, y *stock.Activity) bool {
	if x.Buckets != y.Buckets || len(x.Items) != len(y.Items) {
		return false
	}
	for i := range x.Items {
		if x.Items[i].SKU != y.Items[i].SKU || len(x.Items[i].Pools) != len(y.Items[i].Pools) {
			return false
		}
		for pool := range x.Items[i].Pools {
			if _, ok := y.Items[i].Pools[pool]; !ok {
				return false
			}
		}
	}
	return true
}

func (a *activities) last(id string) *Snapshot {
	a.mu.RLock()
	defer a.mu.RUnlock()
	if e := a.entries[id]; e != nil {
		return e.snap.Load()
	}
	return nil
}

// vanished decides between an id nobody knows and an activity whose hash was lost.
func (a *activities) vanished(id string, now time.Time) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if e := a.entries[id]; e != nil {
		if s := e.snap.Load(); s != nil && s.Settled {
			// Settled and its marker has run out: the sale is over and forgotten by design.
			delete(a.seen, id)
		}
		delete(a.entries, id)
	}
	if _, ok := a.seen[id]; ok {
		return stock.ErrNotWarmed
	}
	if len(a.missing) >= a.max {
		for k, until := range a.missing {
			if now.After(until) || len(a.missing) >= a.max {
				delete(a.missing, k)
			}
		}
	}
	a.missing[id] = now.Add(a.unknown)
	return stock.ErrActivityNotFound
}

func (a *activities) keep(id string, s *Snapshot) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.missing, id)
	e := a.entries[id]
	if e == nil {
		if len(a.entries) >= a.max {
			a.evictOldest()
		}
		e = &entry{}
		e.lastUsed.Store(time.Now().UnixNano())
		a.entries[id] = e
	}
	e.snap.Store(s)
	if _, ok := a.seen[id]; !ok {
		if len(a.order) >= 4*a.max {
			delete(a.seen, a.order[0])
			a.order = append(a.order[:0], a.order[1:]...)
		}
		a.seen[id] = struct{}{}
		a.order = append(a.order, id)
	}
}

func (a *activities) evictOldest() {
	oldest, at := "", int64(0)
	for id, e := range a.entries {
		if used := e.lastUsed.Load(); oldest == "" || used < at {
			oldest, at = id, used
		}
	}
	delete(a.entries, oldest)
}

// touch asks for an early refresh, for instance when the script said "sold out" of something the
// snapshot still has. It never blocks; what does not fit comes with the next round.
func (a *activities) touch(id string) {
	select {
	case a.kick <- id:
	default:
	}
}

// run refreshes the snapshots in use until ctx ends.
func (a *activities) run(ctx context.Context) {
	tick := time.NewTicker(a.refresh)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case id := <-a.kick:
			if a.freshFor(id, 5*time.Millisecond) {
				continue
			}
			a.reload(ctx, id)
		case <-tick.C:
			a.round(ctx)
		}
	}
}

func (a *activities) freshFor(id string, d time.Duration) bool {
	s := a.last(id)
	return s == nil || s.Age() < d
}

// round refreshes every snapshot that was asked for lately, a few at a time.
func (a *activities) round(ctx context.Context) {
	now := time.Now()
	var due []string
	a.mu.Lock()
	for id, e := range a.entries {
		if now.Sub(time.Unix(0, e.lastUsed.Load())) > a.idle {
			delete(a.entries, id)
			continue
		}
		due = append(due, id)
	}
	a.mu.Unlock()
	const parallel = 8
	var wg sync.WaitGroup
	slots := make(chan struct{}, parallel)
	for _, id := range due {
		slots <- struct{}{}
		wg.Add(1)
		go func() {
			defer wg.Done()
			defer func() { <-slots }()
			a.reload(ctx, id)
		}()
	}
	wg.Wait()
}

func (a *activities) reload(ctx context.Context, id string) {
	if _, err := a.load(ctx, id); err != nil && ctx.Err() == nil {
		a.log.DebugContext(ctx, "refresh of activity failed", "activity_id", id, "error", err)
	}
}
