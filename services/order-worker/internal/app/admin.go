package app

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"slices"
	"strings"
	"time"

	"seckill/pkg/lifecycle"
	"seckill/services/order-worker/internal/admin"
	"seckill/services/order-worker/internal/rehearsal"
	"seckill/services/order-worker/internal/verify"
)

// adminServer is the admin API's listener.
type adminServer struct {
	l   net.Listener
	srv *http.Server
}

func (a *App) newAdmin(ctx context.Context) (*adminServer, error) {
	s, err := a.adminAPI()
	if err != nil {
		return nil, err
	}
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "tcp", a.cfg.Admin.Addr)
	if err != nil {
		return nil, fmt.Errorf("listen for the admin API: %w", err)
	}
	return &adminServer{l: l, srv: s.HTTPServer(a.cfg.Admin.Addr)}, nil
}

func (s *adminServer) addr() string { return s.l.Addr().String() }

func (s *adminServer) component(a *App) lifecycle.Component {
	return lifecycle.Component{
		Name: "admin", StopTimeout: 15 * time.Second, Stop: s.srv.Shutdown,
		Run: func(ctx context.Context) error {
			a.log.InfoContext(ctx, "listening", "for", "admin", "addr", s.addr())
			if err := s.srv.Serve(s.l); !errors.Is(err, http.ErrServerClosed) {
				return fmt.Errorf("serve the admin API: %w", err)
			}
			<-ctx.Done()
			return nil
		},
	}
}

// adminAPI is everything behind the admin port.
func (a *App) adminAPI() (*admin.Server, error) {
	texts := make([]string, len(a.cfg.Admin.Tokens))
	for i, t := range a.cfg.Admin.Tokens {
		texts[i] = t.Reveal()
	}
	tokens, err := admin.ParseTokens(strings.Join(texts, ","))
	if err != nil {
		return nil, fmt.Errorf("admin.tokens (SECKILL_ADMIN_TOKENS), needed by the role %s: %w", RoleAdmin, err)
	}
	s, err := admin.New(admin.Config{Tokens: tokens}, admin.Deps{
		Store: a.store, Activities: a.activities, Letters: a.letters, Stock: a.stock, Broker: a.broker, Log: a.log, Metrics: a.registry,
	})
	if err != nil {
		return nil, err
	}
	v := verify.New(a.store, a.stock, a.activities, a.settlement)
	for _, route := range slices.Concat(a.settlement.Routes(), a.reconcile.Routes(), a.rebuild.Routes(), v.Routes()) {
		s.Mount(route)
	}
	credentials := rehearsal.Config{JWTSecret: a.cfg.Auth.JWTSecret.Reveal()}
	if len(a.cfg.Payment.Secrets) > 0 {
		credentials.PaymentSecret = a.cfg.Payment.Secrets[0].Reveal()
	}
	r, err := rehearsal.New(credentials, a.store, a.stock, a.broker, a.log)
	if err != nil {
		return nil, err
	}
	serve := func(w http.ResponseWriter, req *http.Request) error {
		r.ServeHTTP(w, req)
		return nil
	}
	for _, method := range []string{http.MethodGet, http.MethodPost} {
		s.Mount(admin.Route{Method: method, Path: "/admin/v1/rehearsals/{activity}/{call}", Role: admin.Operator, Timeout: 3 * time.Minute, Handler: serve})
	}
	return s, nil
}
