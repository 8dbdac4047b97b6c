package app

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"seckill/pkg/lifecycle"
	"seckill/pkg/messaging"
	"seckill/pkg/observability"
	"seckill/pkg/stock"
	"seckill/services/order-api/internal/checkout"
	"seckill/services/order-api/internal/httpapi"
)

// App is one order-api process.
type App struct {
	cfg Config
	log *slog.Logger

	registry *prometheus.Registry
	stock    *stock.Client
	broker   *messaging.Client
	checkout *checkout.Service
	handler  http.Handler
	ready    *lifecycle.Readiness
	health   *health

	listener net.Listener
	ops      *observability.Server
}

// New builds the process and opens its listeners; it talks to no store. Run serves and closes it.
func New(ctx context.Context, cfg Config, log *slog.Logger) (_ *App, err error) {
	cfg = cfg.WithDefaults()
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	a := &App{cfg: cfg, log: log, registry: observability.NewRegistry(), ready: lifecycle.NewReadiness()}
	if a.stock, err = stock.New(cfg.Redis, log, a.registry); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			_ = a.stock.Close()
			if a.listener != nil {
				_ = a.listener.Close()
			}
		}
	}()
	if a.broker, err = messaging.New(cfg.RabbitMQ, log, a.registry); err != nil {
		return nil, err
	}
	if a.checkout, err = checkout.New(cfg.Checkout, a.stock, a.broker, log, a.registry); err != nil {
		return nil, err
	}
	if a.handler, err = httpapi.New(cfg.httpapi(), a.checkout, log, a.registry); err != nil {
		return nil, err
	}
	a.health = &health{redis: a.stock, queue: a.broker, ready: a.ready}
	var lc net.ListenConfig
	if a.listener, err = lc.Listen(ctx, "tcp", cfg.HTTP.Addr); err != nil {
		return nil, fmt.Errorf("listen for http: %w", err)
	}
	if a.ops, err = observability.NewServer(ctx, cfg.Metrics.Addr, cfg.Debug.Addr, a.registry, a.ready, log); err != nil {
		return nil, err
	}
	return a, nil
}

// Close frees what New took. Run does it by itself; Close is for an App that never ran.
func (a *App) Close() {
	_ = a.listener.Close()
	a.ops.Close()
	_ = a.stock.Close()
}

// Addr is where the storefront API listens.
func (a *App) Addr() string { return a.listener.Addr().String() }

// MetricsAddr is where health and metrics are served.
func (a *App) MetricsAddr() string { return a.ops.Addr() }

// Handler is the storefront API without its server.
func (a *App) Handler() http.Handler { return a.handler }

// brokerGoodbye bounds closing the broker's connections.
const brokerGoodbye = 2 * time.Second

// Run serves until ctx ends, and then stops in order: readiness goes red, requests that were read
// are answered, accepted orders are published and confirmed, connections are closed.
func (a *App) Run(ctx context.Context) error {
	// Each stage outlives the one before it, so each has a context of its own.
	background, stopBackground := context.WithCancel(context.WithoutCancel(ctx))
	defer stopBackground()
	checkoutCtx, stopCheckout := context.WithCancel(background)
	defer stopCheckout()

	a.broker.Start(background)
	var healthDone, checkoutDone sync.WaitGroup
	healthDone.Add(1)
	go func() { defer healthDone.Done(); a.health.run(background) }()
	checkoutDone.Add(1)
	go func() { defer checkoutDone.Done(); a.checkout.Run(checkoutCtx) }()

	front := a.server()
	failed := make(chan error, 2)
	var serving sync.WaitGroup
	serving.Go(func() {
		if err := front.Serve(a.listener); !errors.Is(err, http.ErrServerClosed) {
			failed <- fmt.Errorf("serve %s: %w", a.Addr(), err)
		}
	})
	serving.Go(func() {
		if err := a.ops.Run(background); err != nil {
			failed <- fmt.Errorf("serve %s: %w", a.MetricsAddr(), err)
		}
	})
	a.log.InfoContext(ctx, "order-api is serving", "addr", a.Addr(), "metrics_addr", a.MetricsAddr())

	var runErr error
	select {
	case <-ctx.Done():
	case runErr = <-failed:
	}

	a.ready.SetDraining()
	a.log.InfoContext(ctx, "order-api is stopping")
	stop, cancel := context.WithTimeout(context.WithoutCancel(ctx), a.cfg.HTTP.StopTimeout)
	defer cancel()
	if a.cfg.HTTP.DrainDelay > 0 && runErr == nil {
		delay := time.NewTimer(a.cfg.HTTP.DrainDelay)
		select {
		case <-delay.C:
		case <-stop.Done():
			delay.Stop()
		}
	}
	if err := front.Shutdown(stop); err != nil {
		runErr = errors.Join(runErr, fmt.Errorf("stop serving: %w", err))
		_ = front.Close()
	}
	// No handler runs any more, so nothing is offered to the publisher behind its back.
	stopCheckout()
	checkoutDone.Wait()
	// Every publish has ended by now, so a broker that does not answer the goodbye gets little time.
	goodbye, cancelGoodbye := context.WithTimeout(stop, brokerGoodbye)
	defer cancelGoodbye()
	if err := a.broker.Close(goodbye); err != nil {
		// What was not confirmed is in the outbox: the relay publishes it. Not a failed stop.
		a.log.WarnContext(ctx, "broker connection did not close in time", "error", err)
	}
	stopBackground()
	healthDone.Wait()
	serving.Wait()
	if err := a.stock.Close(); err != nil {
		a.log.WarnContext(ctx, "redis connections did not close", "error", err)
	}
	a.log.InfoContext(ctx, "order-api has stopped")
	return runErr
}

func (a *App) server() *http.Server {
	return &http.Server{
		Handler:           a.handler,
		ReadHeaderTimeout: a.cfg.HTTP.ReadHeaderTimeout,
		ReadTimeout:       a.cfg.HTTP.ReadTimeout,
		WriteTimeout:      a.cfg.HTTP.WriteTimeout,
		IdleTimeout:       a.cfg.HTTP.IdleTimeout,
		MaxHeaderBytes:    a.cfg.HTTP.MaxHeaderBytes,
		// What net/http has to say of a client's connection is no event of ours.
		ErrorLog: slog.NewLogLogger(a.log.Handler(), slog.LevelDebug),
	}
}
