package app

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"time"

	"seckill/pkg/lifecycle"
)

// adminServer is the admin API's listener.
type adminServer struct {
	l   net.Listener
	srv *http.Server
}

func (a *App) newAdmin(ctx context.Context) (*adminServer, error) {
	h, err := a.adminHandler()
	if err != nil {
		return nil, err
	}
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "tcp", a.cfg.Admin.Addr)
	if err != nil {
		return nil, fmt.Errorf("listen for the admin API: %w", err)
	}
	return &adminServer{l: l, srv: &http.Server{
		Handler: h, ReadHeaderTimeout: 5 * time.Second, ReadTimeout: 30 * time.Second, IdleTimeout: time.Minute, MaxHeaderBytes: 16 << 10,
		ErrorLog: slog.NewLogLogger(a.log.Handler(), slog.LevelDebug),
	}}, nil
}

func (s *adminServer) addr() string { return s.l.Addr().String() }

func (s *adminServer) components(a *App) []lifecycle.Component {
	return []lifecycle.Component{{
		Name: "admin", StopTimeout: 15 * time.Second, Stop: s.srv.Shutdown,
		Run: func(ctx context.Context) error {
			a.log.InfoContext(ctx, "listening", "for", "admin", "addr", s.addr())
			if err := s.srv.Serve(s.l); !errors.Is(err, http.ErrServerClosed) {
				return fmt.Errorf("serve the admin API: %w", err)
			}
			<-ctx.Done()
			return nil
		},
	}}
}

// adminHandler is everything behind the admin port. What is mounted here checks its callers itself.
func (a *App) adminHandler() (http.Handler, error) {
	mux := http.NewServeMux()
	return mux, nil
}
