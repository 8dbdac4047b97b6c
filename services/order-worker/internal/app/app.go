// Package app puts order-worker together: one constructor for the program and for its tests.
package app

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"seckill/pkg/lifecycle"
	"seckill/pkg/messaging"
	"seckill/pkg/observability"
	"seckill/pkg/stock"
	"seckill/services/order-worker/internal/activity"
	"seckill/services/order-worker/internal/deadletter"
	"seckill/services/order-worker/internal/follow"
	"seckill/services/order-worker/internal/levels"
	"seckill/services/order-worker/internal/payment"
	"seckill/services/order-worker/internal/persist"
	"seckill/services/order-worker/internal/rebuild"
	"seckill/services/order-worker/internal/reconcile"
	"seckill/services/order-worker/internal/relay"
	"seckill/services/order-worker/internal/rollback"
	"seckill/services/order-worker/internal/settlement"
	"seckill/services/order-worker/internal/store"
)

// App is one order-worker process.
type App struct {
	cfg      Config
	log      *slog.Logger
	registry *prometheus.Registry
	ready    *lifecycle.Readiness

	store  *store.Store
	stock  *stock.Client
	broker *messaging.Client

	follow     *follow.Follower
	persist    *persist.Handler
	payment    *payment.Handler
	rollback   *rollback.Handler
	sweeper    *rollback.Sweeper
	relay      *relay.Relay
	levels     *levels.Levels
	activities *activity.Service
	letters    *deadletter.Service
	settlement *settlement.Service
	reconcile  *reconcile.Service
	rebuild    *rebuild.Service

	ops   *observability.Server
	admin *adminServer

	redisSeen, mysqlSeen atomic.Int64 // Unix nanoseconds of the last answer
}

// New builds the process and opens its listeners; it talks to no store. Run does the rest.
func New(ctx context.Context, cfg Config, log *slog.Logger) (_ *App, err error) {
	cfg = cfg.WithDefaults()
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	a := &App{cfg: cfg, log: log, registry: observability.NewRegistry(), ready: lifecycle.NewReadiness()}
	var undo []func()
	defer func() {
		if err != nil {
			for _, f := range undo {
				f()
			}
		}
	}()
	if a.stock, err = stock.New(cfg.Redis, log, a.registry); err != nil {
		return nil, err
	}
	undo = append(undo, func() { _ = a.stock.Close() })
	if a.store, err = store.Open(cfg.MySQL, log, a.registry); err != nil {
		return nil, err
	}
	undo = append(undo, func() { _ = a.store.Close() })
	if a.broker, err = messaging.New(cfg.RabbitMQ, log, a.registry); err != nil {
		return nil, err
	}
	if err := a.build(); err != nil {
		return nil, err
	}
	if a.ops, err = observability.NewServer(ctx, cfg.Metrics.Addr, cfg.Debug.Addr, a.registry, a.ready, log); err != nil {
		return nil, err
	}
	undo = append(undo, a.ops.Close)
	if cfg.has(RoleAdmin) {
		if a.admin, err = a.newAdmin(ctx); err != nil {
			return nil, err
		}
	}
	return a, nil
}

func (a *App) build() (err error) {
	if a.follow, err = follow.New(a.store, a.stock, a.broker, a.log, a.registry); err != nil {
		return err
	}
	if a.persist, err = persist.New(a.store, store.NewCatalogue(a.store), a.follow, a.log, a.registry); err != nil {
		return err
	}
	if a.payment, err = payment.New(a.store, a.follow, a.log, a.registry); err != nil {
		return err
	}
	if a.rollback, err = rollback.New(a.store, a.stock, a.follow, a.settle, a.log, a.registry); err != nil {
		return err
	}
	a.sweeper = rollback.NewSweeper(a.rollback, a.cfg.Sweep, a.log)
	if a.relay, err = relay.New(a.cfg.Relay, a.store, a.stock, a.broker, a.log, a.registry); err != nil {
		return err
	}
	if a.levels, err = levels.New(a.store, a.log, a.registry); err != nil {
		return err
	}
	if a.activities, err = activity.New(a.store, a.stock, activity.Config{Tiers: a.cfg.RabbitMQ.DelayTiers, WarmBefore: max(a.cfg.Activity.WarmBefore, 0)}, a.log, a.registry); err != nil {
		return err
	}
	if a.settlement, err = settlement.New(a.cfg.Settlement, a.store, a.stock, a.activities, a.rollback, a.follow, a.broker, a.log, a.registry); err != nil {
		return err
	}
	if a.reconcile, err = reconcile.New(a.cfg.Reconcile, a.store, a.stock, a.activities, a.follow, a.broker, a.log, a.registry); err != nil {
		return err
	}
	if a.rebuild, err = rebuild.New(a.cfg.Rebuild, a.store, a.stock, a.activities, a.follow, a.reconcile, a.broker, a.log, a.registry); err != nil {
		return err
	}
	a.letters, err = deadletter.New(a.store, a.stock, a.broker, a.follow, deadletter.Config{}, a.log, a.registry)
	return err
}

// settle hands activity.ended on: the rollbacks' consumer gets it, and the settlement needs the
// rollbacks.
func (a *App) settle(ctx context.Context, e messaging.Ended, m messaging.Message) messaging.Result {
	return a.settlement.Handle(ctx, e, m)
}

// MetricsAddr is where health and metrics are served.
func (a *App) MetricsAddr() string { return a.ops.Addr() }

// AdminAddr is where the admin API is served; empty without the role.
func (a *App) AdminAddr() string {
	if a.admin == nil {
		return ""
	}
	return a.admin.addr()
}

// Run works until ctx ends or a signal comes, stops in order, and returns the exit code.
//
// The order is that of dependence: connections first, then the schema and the topology, then what
// works on them. It is stopped the other way round: no new work, the batches in hand are finished and
// acked, then the connections go.
func (a *App) Run(ctx context.Context) int {
	g := lifecycle.New(a.log, lifecycle.Options{Readiness: a.ready})
	a.checks()
	g.Add(lifecycle.Component{Name: "metrics", Run: a.ops.Run})
	g.Add(lifecycle.Component{Name: "redis", Start: a.checkRedis, Stop: func(context.Context) error { return a.stock.Close() }})
	g.Add(lifecycle.Component{Name: "mysql", Start: a.migrate, Stop: func(context.Context) error { return a.store.Close() }})
	g.Add(lifecycle.Component{Name: "broker", Start: a.declare, Run: a.redeclare, Stop: a.broker.Close})
	g.Add(lifecycle.Component{Name: "health", Run: a.watch})

	w := a.cfg.Worker
	if a.cfg.has(RoleRelay) {
		g.Add(a.loop("relay", a.relay.Run))
	}
	if a.cfg.has(RoleScheduler) {
		g.Add(a.loop("sweeper", a.sweeper.Run))
		g.Add(a.loop("activities", a.activities.Run))
		g.Add(a.loop("ends", a.settlement.Run))
		g.Add(a.loop("levels", a.levels.Run))
	}
	if a.cfg.has(RoleReconciler) {
		g.Add(a.loop("reconciler", a.reconcile.Run))
		g.Add(a.loop("rebuild", a.rebuild.Run))
	}
	if a.cfg.has(RoleRollbacks) {
		g.Add(a.consumer(messaging.ConsumerConfig{
			Queue: messaging.QueueRollbacks, Workers: w.RollbackWorkers, Prefetch: w.Prefetch, BatchOrders: w.BatchOrders,
			BatchWait: w.BatchWait, StopTimeout: w.StopTimeout,
		}, a.rollback.Handle))
	}
	if a.cfg.has(RolePayments) {
		g.Add(a.consumer(messaging.ConsumerConfig{
			Queue: messaging.QueuePayments, Workers: w.PaymentWorkers, Prefetch: 256, BatchOrders: 128,
			BatchWait: w.BatchWait, StopTimeout: w.StopTimeout,
		}, a.payment.Handle))
	}
	if a.cfg.has(RoleOrders) {
		g.Add(a.consumer(messaging.ConsumerConfig{
			Queue: messaging.QueueOrders, Workers: w.OrderWorkers, Prefetch: w.Prefetch, BatchOrders: w.BatchOrders,
			BatchWait: w.BatchWait, StopTimeout: w.StopTimeout,
		}, a.persist.Handle))
	}
	if a.cfg.has(RoleDeadLetters) {
		g.Add(a.loop("deadletters", a.letters.Run))
		g.Add(a.consumer(a.letters.Consumer(), a.letters.Handle))
	}
	if a.admin != nil {
		g.Add(a.admin.component(a))
	}
	return g.Run(ctx)
}

// consumer is a role that takes messages from a queue.
func (a *App) consumer(cfg messaging.ConsumerConfig, h messaging.Handler) lifecycle.Component {
	return lifecycle.Component{
		Name: cfg.Queue, StopTimeout: max(cfg.StopTimeout, 20*time.Second) + 5*time.Second,
		Run: func(ctx context.Context) error { return a.broker.Consume(ctx, cfg, rebuild.Watch(a.store, h)) },
	}
}

// loop is a role that goes round until it is told to stop. A panic in it ends one round, not the
// other roles of the process.
func (a *App) loop(name string, run func(context.Context)) lifecycle.Component {
	return lifecycle.Component{Name: name, StopTimeout: a.cfg.Worker.StopTimeout, Run: func(ctx context.Context) error {
		for ctx.Err() == nil {
			a.guard(ctx, name, run)
			if ctx.Err() != nil {
				break
			}
			t := time.NewTimer(time.Second)
			select {
			case <-ctx.Done():
			case <-t.C:
			}
			t.Stop()
		}
		return nil //nolint:nilerr // told to stop
	}}
}

func (a *App) guard(ctx context.Context, name string, run func(context.Context)) {
	defer func() {
		if p := recover(); p != nil {
			a.log.ErrorContext(ctx, "role panicked and is started again", "role", name, "panic", fmt.Sprint(p), "stack", string(debug.Stack()))
		}
	}()
	run(ctx)
}

// checkRedis warns when a full Redis would forget sales. A Redis that is away is waited for by
// whatever needs it.
func (a *App) checkRedis(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 3*time.Second)
	defer cancel()
	policy, safe, err := a.stock.CheckPolicy(ctx)
	switch {
	case err != nil:
		a.log.WarnContext(ctx, "redis' maxmemory-policy could not be read", "error", err)
	case !safe:
		a.log.WarnContext(ctx, "redis evicts keys when it is full: stock and orders would be lost; set maxmemory-policy noeviction", "maxmemory_policy", policy)
	}
	return nil
}

// migrate brings the schema up to date, and waits for a database that is not there yet. What the
// database refuses ends the start.
func (a *App) migrate(ctx context.Context) error {
	for {
		err := a.store.Migrate(ctx)
		if err == nil || !store.IsAway(err) {
			return err
		}
		a.log.WarnContext(ctx, "waiting for mysql", "error", err)
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(time.Second):
		}
	}
}

// declare connects to the broker and declares the topology. A broker that cannot be reached does not
// hold up the start; one whose queues are different ends it.
func (a *App) declare(ctx context.Context) error {
	a.broker.Start(ctx)
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	err := a.broker.Declare(ctx)
	if err != nil && !errors.Is(err, messaging.ErrTopology) {
		a.log.WarnContext(ctx, "broker not reached yet, its topology is declared later", "error", err)
		return nil
	}
	if err != nil {
		// A component whose start failed is not stopped by the group: what it began ends here.
		done, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
		defer cancel()
		err = errors.Join(err, a.broker.Close(done))
	}
	return err
}

// redeclare goes on where declare had to give up.
func (a *App) redeclare(ctx context.Context) error {
	for ctx.Err() == nil {
		if a.broker.State().Topology != messaging.TopologyUnknown {
			break
		}
		try, cancel := context.WithTimeout(ctx, 30*time.Second)
		err := a.broker.Declare(try)
		cancel()
		if err == nil {
			break
		}
		var different *messaging.TopologyMismatchError
		if errors.As(err, &different) {
			return err
		}
		t := time.NewTimer(time.Second)
		select {
		case <-ctx.Done():
		case <-t.C:
		}
		t.Stop()
	}
	<-ctx.Done()
	return nil
}

// redisPatience is how long Redis may be away before the process is not ready (design §5).
const redisPatience = 5 * time.Second

// watch asks the stores for a sign of life, so that a health question needs no I/O.
func (a *App) watch(ctx context.Context) error {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		ping, cancel := context.WithTimeout(ctx, time.Second)
		if a.stock.Ping(ping) == nil {
			a.redisSeen.Store(time.Now().UnixNano())
		}
		if a.store.Ping(ping) == nil {
			a.mysqlSeen.Store(time.Now().UnixNano())
		}
		cancel()
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

func (a *App) checks() {
	away := func(seen *atomic.Int64) time.Duration { return time.Since(time.Unix(0, seen.Load())) }
	a.redisSeen.Store(time.Now().UnixNano())
	a.mysqlSeen.Store(time.Now().UnixNano())
	a.ready.Add("redis", func(context.Context) lifecycle.Check {
		d := away(&a.redisSeen)
		return lifecycle.Check{OK: d < redisPatience, Required: true, Detail: fmt.Sprintf("last answer %s ago", d.Round(100*time.Millisecond))}
	})
	a.ready.Add("mysql", func(context.Context) lifecycle.Check {
		d := away(&a.mysqlSeen)
		return lifecycle.Check{OK: d < redisPatience, Detail: fmt.Sprintf("last answer %s ago", d.Round(100*time.Millisecond))}
	})
	a.ready.Add("broker", func(context.Context) lifecycle.Check {
		s := a.broker.State()
		switch {
		case s.Blocked:
			return lifecycle.Check{Detail: "blocked: " + s.BlockedReason}
		case !s.Connected:
			return lifecycle.Check{Detail: "disconnected"}
		}
		return lifecycle.Check{OK: true, Detail: "connected"}
	})
	a.ready.Add("consumers", func(context.Context) lifecycle.Check {
		s := a.broker.State()
		return lifecycle.Check{OK: s.Consumers == s.ConsumersUp, Detail: fmt.Sprintf("%d of %d channels consume", s.ConsumersUp, s.Consumers)}
	})
	a.ready.Add("topology", func(context.Context) lifecycle.Check {
		s := a.broker.State()
		c := lifecycle.Check{OK: s.Topology == messaging.TopologyOK, Detail: string(s.Topology)}
		c.Required = s.Topology == messaging.TopologyMissing || s.Topology == messaging.TopologyDifferent
		return c
	})
}
