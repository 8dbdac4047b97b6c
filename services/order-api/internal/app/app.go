package app

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/pprof"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"seckill/pkg/messaging"
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
	health   *health

	listener, metricsListener, debugListener net.Listener
}

// New builds the process and opens its listeners; it talks to no store. Run serves and closes it.
func New(cfg Config, log *slog.Logger) (_ *App, err error) {
	cfg = cfg.WithDefaults()
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	a := &App{cfg: cfg, log: log, registry: prometheus.NewRegistry()}
	a.registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	if a.stock, err = stock.New(cfg.Redis, log, a.registry); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			_ = a.stock.Close()
			a.closeListeners()
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
	a.health = &health{redis: a.stock, queue: a.broker}
	if a.listener, err = listen(cfg.HTTP.Addr); err != nil {
		return nil, err
	}
	if a.metricsListener, err = listen(cfg.Metrics.Addr); err != nil {
		return nil, err
	}
	if cfg.Debug.Addr != "" {
		if a.debugListener, err = listen(cfg.Debug.Addr); err != nil {
			return nil, err
		}
	}
	return a, nil
}

func listen(addr string) (net.Listener, error) {
	l, err := net.Listen("tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w", addr, err)
	}
	return l, nil
}

func (a *App) closeListeners() {
	for _, l := range []net.Listener{a.listener, a.metricsListener, a.debugListener} {
		if l != nil {
			_ = l.Close()
		}
	}
}

// Addr is where the storefront API listens.
func (a *App) Addr() string { return a.listener.Addr().String() }

// MetricsAddr is where health and metrics are served.
func (a *App) MetricsAddr() string { return a.metricsListener.Addr().String() }

// Handler is the storefront API without its server.
func (a *App) Handler() http.Handler { return a.handler }

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

	front := a.server(a.handler)
	ops := a.server(a.opsHandler())
	servers := []*http.Server{front, ops}
	listeners := []net.Listener{a.listener, a.metricsListener}
	if a.debugListener != nil {
		dbg := a.server(debugHandler())
		dbg.WriteTimeout = 0 // a profile takes as long as it was asked to
		servers, listeners = append(servers, dbg), append(listeners, a.debugListener)
	}
	failed := make(chan error, len(servers))
	var serving sync.WaitGroup
	for i := range servers {
		serving.Add(1)
		go func() {
			defer serving.Done()
			if err := servers[i].Serve(listeners[i]); !errors.Is(err, http.ErrServerClosed) {
				failed <- fmt.Errorf("serve %s: %w", listeners[i].Addr(), err)
			}
		}()
	}
	a.log.InfoContext(ctx, "order-api is serving", "addr", a.Addr(), "metrics_addr", a.MetricsAddr())

	var runErr error
	select {
	case <-ctx.Done():
	case runErr = <-failed:
	}

	a.health.draining.Store(true)
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
	if err := a.broker.Close(stop); err != nil {
		// What was not confirmed is in the outbox: the relay publishes it. Not a failed stop.
		a.log.WarnContext(ctx, "broker connection did not close in time", "error", err)
	}
	stopBackground()
	healthDone.Wait()
	for _, s := range servers[1:] {
		if err := s.Shutdown(stop); err != nil {
			_ = s.Close()
		}
	}
	serving.Wait()
	if err := a.stock.Close(); err != nil {
		a.log.WarnContext(ctx, "redis connections did not close", "error", err)
	}
	a.log.InfoContext(ctx, "order-api has stopped")
	return runErr
}

func (a *App) server(h http.Handler) *http.Server {
	return &http.Server{
		Handler:           h,
		ReadHeaderTimeout: a.cfg.HTTP.ReadHeaderTimeout,
		ReadTimeout:       a.cfg.HTTP.ReadTimeout,
		WriteTimeout:      a.cfg.HTTP.WriteTimeout,
		IdleTimeout:       a.cfg.HTTP.IdleTimeout,
		MaxHeaderBytes:    a.cfg.HTTP.MaxHeaderBytes,
		// What net/http has to say of a client's connection is no event of ours.
		ErrorLog: slog.NewLogLogger(a.log.Handler(), slog.LevelDebug),
	}
}

func (a *App) opsHandler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /livez", func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("ok\n")) })
	mux.HandleFunc("GET /readyz", a.health.serve)
	mux.Handle("GET /metrics", promhttp.HandlerFor(a.registry, promhttp.HandlerOpts{Registry: a.registry}))
	return mux
}

func debugHandler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("/debug/pprof/", pprof.Index)
	mux.HandleFunc("/debug/pprof/cmdline", pprof.Cmdline)
	mux.HandleFunc("/debug/pprof/profile", pprof.Profile)
	mux.HandleFunc("/debug/pprof/symbol", pprof.Symbol)
	mux.HandleFunc("/debug/pprof/trace", pprof.Trace)
	return mux
}
