package observability

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/pprof"
	"runtime"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"seckill/pkg/lifecycle"
)

// NewRegistry makes a registry with the figures of the Go runtime and of the process.
func NewRegistry() *prometheus.Registry {
	reg := prometheus.NewRegistry()
	reg.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return reg
}

// Server answers /livez, /readyz and /metrics on a port of its own, and pprof on another one where
// that is asked for.
type Server struct {
	log   *slog.Logger
	parts []listening
}

type listening struct {
	name string
	l    net.Listener
	srv  *http.Server
}

// NewServer listens at once, so that a port that is taken ends the start and an address with port 0
// is known. debugAddr may be empty: no profiles then.
func NewServer(ctx context.Context, metricsAddr, debugAddr string, reg *prometheus.Registry, ready *lifecycle.Readiness, log *slog.Logger) (*Server, error) {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /livez", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		_, _ = w.Write([]byte("{\"live\":true}\n"))
	})
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, r *http.Request) {
		report := ready.Report(r.Context())
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("Cache-Control", "no-store")
		if !report.Ready {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
		_ = json.NewEncoder(w).Encode(report) // the client has gone: nobody to tell
	})
	mux.Handle("GET /metrics", promhttp.HandlerFor(reg, promhttp.HandlerOpts{Registry: reg, Timeout: 10 * time.Second}))

	s := &Server{log: log}
	if err := s.listen(ctx, "metrics", metricsAddr, mux, 15*time.Second); err != nil {
		return nil, err
	}
	if debugAddr != "" {
		// Without a rate the mutex and block profiles stay empty. One contended lock in a hundred, and
		// a block for each 100 µs that were waited, cost nothing that shows.
		runtime.SetMutexProfileFraction(100)
		runtime.SetBlockProfileRate(int((100 * time.Microsecond).Nanoseconds()))
		debug := http.NewServeMux()
		debug.HandleFunc("/debug/pprof/", pprof.Index)
		debug.HandleFunc("/debug/pprof/cmdline", pprof.Cmdline)
		debug.HandleFunc("/debug/pprof/profile", pprof.Profile)
		debug.HandleFunc("/debug/pprof/symbol", pprof.Symbol)
		debug.HandleFunc("/debug/pprof/trace", pprof.Trace)
		if err := s.listen(ctx, "debug", debugAddr, debug, 0); err != nil {
			s.Close()
			return nil, err
		}
	}
	return s, nil
}

func (s *Server) listen(ctx context.Context, name, addr string, h http.Handler, writeTimeout time.Duration) error {
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "tcp", addr)
	if err != nil {
		return fmt.Errorf("listen for %s: %w", name, err)
	}
	s.parts = append(s.parts, listening{name: name, l: l, srv: &http.Server{
		Handler:           h,
		ReadHeaderTimeout: 5 * time.Second,
		ReadTimeout:       5 * time.Second,
		WriteTimeout:      writeTimeout, // none for profiles, which take as long as they were asked to
		IdleTimeout:       time.Minute,
		MaxHeaderBytes:    16 << 10,
		ErrorLog:          slog.NewLogLogger(s.log.Handler(), slog.LevelDebug),
	}})
	return nil
}

// Addr is where metrics and health are, with the port that was taken.
func (s *Server) Addr() string { return s.parts[0].l.Addr().String() }

// DebugAddr is where the profiles are; empty when they were not asked for.
func (s *Server) DebugAddr() string {
	if len(s.parts) < 2 {
		return ""
	}
	return s.parts[1].l.Addr().String()
}

// Run serves until the context ends. It is stopped last, so that the end of everything else can be
// watched.
func (s *Server) Run(ctx context.Context) error {
	ended := make(chan error, len(s.parts))
	for _, p := range s.parts {
		s.log.InfoContext(ctx, "listening", "for", p.name, "addr", p.l.Addr().String())
		go func() { ended <- p.srv.Serve(p.l) }()
	}
	left := len(s.parts)
	var err error
	select {
	case <-ctx.Done():
	case err = <-ended:
		left--
	}
	s.Close()
	for range left {
		<-ended //nolint:errcheck // the server was closed; that it says so is no news
	}
	if errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	return err
}

// Close frees the ports at once. Run does it by itself; Close is for a server that never ran.
func (s *Server) Close() {
	for _, p := range s.parts {
		_ = p.srv.Close()
		_ = p.l.Close()
	}
}
