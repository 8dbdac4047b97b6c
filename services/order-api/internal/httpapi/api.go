package httpapi

import (
	"context"
	_ "embed" // the OpenAPI document
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/gin-gonic/gin"
	"github.com/go-json-experiment/json"
	"github.com/prometheus/client_golang/prometheus"

	"seckill/pkg/stock"
	"seckill/services/order-api/internal/checkout"
)

//go:embed openapi.yaml
var openAPI []byte

// Config is what the API needs besides the checkout.
type Config struct {
	Auth AuthConfig
	// PaymentSecrets are the "whsec_…" secrets of payment callbacks; each may sign.
	PaymentSecrets []string
	// PaymentTypes are the event types that mean "paid". Default payment.succeeded. Other types are
	// answered 202 and ignored, so that a provider does not send them for ever.
	PaymentTypes []string
	// CORSOrigins may call from a browser; "*" is any. Default none: no CORS headers at all.
	CORSOrigins []string
}

// service is what the handlers ask of checkout.Service.
type service interface {
	Activity(ctx context.Context, id string) (*checkout.Snapshot, error)
	Reserve(ctx context.Context, r checkout.Request) (stock.Reserved, error)
	Mine(ctx context.Context, c checkout.Caller, activity string) ([]stock.Record, error)
	Order(ctx context.Context, c checkout.Caller, id string) (stock.Record, error)
	Cancel(ctx context.Context, c checkout.Caller, id, traceparent string) (stock.Record, error)
	Pay(ctx context.Context, p checkout.Payment, traceparent string) error
}

type api struct {
	svc      service
	tokens   *tokens
	webhooks *webhooks
	types    []string
	bodies   *bodies
	log      *slog.Logger
	requests *prometheus.CounterVec
	duration *prometheus.HistogramVec
}

// Validate reports what cannot work, without keeping anything.
func (c Config) Validate() error {
	_, tokenErr := newTokens(c.Auth)
	_, hookErr := newWebhooks(c.PaymentSecrets)
	return errors.Join(tokenErr, hookErr)
}

// New builds the storefront's handler.
func New(cfg Config, svc service, log *slog.Logger, reg prometheus.Registerer) (http.Handler, error) {
	toks, err := newTokens(cfg.Auth)
	if err != nil {
		return nil, err
	}
	hooks, err := newWebhooks(cfg.PaymentSecrets)
	if err != nil {
		return nil, err
	}
	if len(cfg.PaymentTypes) == 0 {
		cfg.PaymentTypes = []string{"payment.succeeded"}
	}
	a := &api{
		svc: svc, tokens: toks, webhooks: hooks, types: cfg.PaymentTypes, bodies: newBodies(), log: log,
		requests: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "seckill_http_requests_total",
			Help: "HTTP requests by route template, method and status.",
		}, []string{"route", "method", "status"}),
		duration: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name:    "seckill_http_request_duration_seconds",
			Help:    "Time to answer an HTTP request, by route template.",
			Buckets: []float64{.0001, .00025, .0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5},
		}, []string{"route"}),
	}
	reg.MustRegister(a.requests, a.duration)

	gin.SetMode(gin.ReleaseMode)
	e := gin.New()
	e.RedirectTrailingSlash = false
	e.RedirectFixedPath = false
	e.HandleMethodNotAllowed = true
	if err := e.SetTrustedProxies(nil); err != nil {
		return nil, fmt.Errorf("set trusted proxies: %w", err)
	}
	e.Use(a.around)
	e.NoRoute(a.handle(func(*gin.Context) error { return notFound() }))
	e.NoMethod(a.handle(func(*gin.Context) error { return methodNotAllowed() }))
	e.POST("/v1/activities/:activity/orders", a.handle(a.reserve))
	e.GET("/v1/activities/:activity/orders/mine", a.handle(a.mine))
	e.GET("/v1/activities/:activity", a.handle(a.activity))
	e.GET("/v1/orders/:order", a.handle(a.order))
	e.DELETE("/v1/orders/:order", a.handle(a.cancel))
	e.POST("/v1/payments/callback", a.handle(a.callback))
	e.GET("/openapi.yaml", func(c *gin.Context) {
		c.Data(http.StatusOK, "application/yaml", openAPI)
	})
	return withCORS(cfg.CORSOrigins, e), nil
}

// handle turns a handler that returns an error into gin's kind.
func (a *api) handle(h func(*gin.Context) error) gin.HandlerFunc {
	return func(c *gin.Context) {
		if err := h(c); err != nil {
			a.fail(c, err)
		}
	}
}

// Names of gin context values.
const (
	keyRequestID = "request_id"
)

// around measures, names and guards every request.
func (a *api) around(c *gin.Context) {
	start := time.Now()
	id := c.Request.Header.Get("X-Request-Id")
	if !validRequestID(id) {
		id = newRequestID()
	}
	c.Set(keyRequestID, id)
	c.Writer.Header()["X-Request-Id"] = []string{id}
	defer func() {
		if p := recover(); p != nil {
			if p == http.ErrAbortHandler { //nolint:errorlint // the sentinel is compared as net/http does
				panic(p)
			}
			a.log.ErrorContext(c.Request.Context(), "handler panicked",
				"request_id", id, "route", c.FullPath(), "panic", fmt.Sprint(p), "stack", string(debug.Stack()))
			if !c.Writer.Written() {
				a.write(c, http.StatusInternalServerError, "application/problem+json", internalError())
			}
			c.Abort()
		}
		route := c.FullPath()
		if route == "" {
			route = "unmatched"
		}
		a.requests.WithLabelValues(route, methodLabel(c.Request.Method), strconv.Itoa(c.Writer.Status())).Inc()
		a.duration.WithLabelValues(route).Observe(time.Since(start).Seconds())
	}()
	c.Next()
}

// methodLabel bounds the label: a client may invent methods.
func methodLabel(m string) string {
	switch m {
	case http.MethodGet, http.MethodPost, http.MethodDelete, http.MethodPut, http.MethodPatch, http.MethodHead, http.MethodOptions:
		return m
	}
	return "other"
}

func validRequestID(s string) bool {
	if s == "" || len(s) > 64 {
		return false
	}
	for i := 0; i < len(s); i++ {
		c := s[i]
		if !(c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '-' || c == '_' || c == '.') {
			return false
		}
	}
	return true
}

func newRequestID() string {
	const digits = "0123456789abcdefghijklmnopqrstuv"
	var b [20]byte
	for i := 0; i < len(b); i += 10 {
		r := rand.Uint64() //nolint:gosec // names a request in logs, protects nothing
		for j := range 10 {
			b[i+j] = digits[r&31]
			r >>= 5
		}
	}
	return string(b[:])
}

// traceparent returns the request's W3C trace context if it is well formed.
func traceparent(h http.Header) string {
	v := h.Get("Traceparent")
	if len(v) != 55 || v[:3] != "00-" || v[35] != '-' || v[52] != '-' {
		return ""
	}
	for i, c := range []byte(v) {
		if i == 2 || i == 35 || i == 52 {
			continue
		}
		if !(c >= '0' && c <= '9' || c >= 'a' && c <= 'f') {
			return ""
		}
	}
	if v[3:35] == strings.Repeat("0", 32) || v[36:52] == strings.Repeat("0", 16) {
		return ""
	}
	return v
}

// fail answers with the problem an error stands for, and logs it if somebody has to look.
func (a *api) fail(c *gin.Context, err error) {
	p := problemOf(err)
	h := c.Writer.Header()
	if p.retryAfter > 0 {
		h.Set("Retry-After", retryAfterSeconds(p.retryAfter))
	}
	if p.Status == http.StatusUnauthorized {
		h.Set("WWW-Authenticate", "Bearer")
	}
	if p.Status == http.StatusRequestEntityTooLarge {
		// The rest of the body is not read: the connection is of no use any more.
		h.Set("Connection", "close")
	}
	ctx := c.Request.Context()
	switch {
	case p.Status == http.StatusInternalServerError:
		a.log.ErrorContext(ctx, "request failed", "request_id", c.GetString(keyRequestID), "route", c.FullPath(), "error", err)
	case p.OrderID != "":
		a.log.WarnContext(ctx, "reservation outcome unknown", "request_id", c.GetString(keyRequestID), "order_id", p.OrderID, "error", err)
	}
	h.Set("Cache-Control", "no-store")
	a.write(c, p.Status, "application/problem+json", p)
	c.Abort()
}

func (a *api) write(c *gin.Context, status int, contentType string, v any) {
	body, err := json.Marshal(v)
	if err != nil {
		a.log.ErrorContext(c.Request.Context(), "encode answer failed", "error", err)
		c.Writer.WriteHeader(http.StatusInternalServerError)
		return
	}
	h := c.Writer.Header()
	h["Content-Type"] = []string{contentType}
	c.Writer.WriteHeader(status)
	_, _ = c.Writer.Write(body) // a client that has gone is no error of ours
}

// personal answers with something that is only for this caller.
func (a *api) personal(c *gin.Context, status int, v any) error {
	c.Writer.Header()["Cache-Control"] = []string{"no-store"}
	a.write(c, status, "application/json", v)
	return nil
}

// withCORS answers browsers of the configured origins; without any it does nothing.
func withCORS(origins []string, next http.Handler) http.Handler {
	if len(origins) == 0 {
		return next
	}
	any := slices.Contains(origins, "*")
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		origin := r.Header.Get("Origin")
		h := w.Header()
		h.Add("Vary", "Origin")
		if origin != "" && (any || slices.Contains(origins, origin)) {
			h.Set("Access-Control-Allow-Origin", origin)
			h.Set("Access-Control-Expose-Headers", "Location, Retry-After, X-Request-Id")
			if r.Method == http.MethodOptions && r.Header.Get("Access-Control-Request-Method") != "" {
				h.Set("Access-Control-Allow-Methods", "GET, POST, DELETE")
				h.Set("Access-Control-Allow-Headers", "Authorization, Content-Type, Idempotency-Key, X-Request-Id, Traceparent")
				h.Set("Access-Control-Max-Age", "600")
				w.WriteHeader(http.StatusNoContent)
				return
			}
		}
		next.ServeHTTP(w, r)
	})
}
