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
	"sync/atomic"
	"time"

	"github.com/gin-gonic/gin"
	"github.com/go-json-experiment/json"
	"github.com/prometheus/client_golang/prometheus"

	"seckill/pkg/observability"
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
	Cancel(ctx context.Context, c checkout.Caller, id string, trace observability.Trace) (stock.Record, error)
	Pay(ctx context.Context, p checkout.Payment, trace observability.Trace) error
}

type api struct {
	svc      service
	tokens   *tokens
	webhooks *webhooks
	types    []string
	bodies   *bodies
	wishes   wishes
	answers  answers
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
	e.NoRoute(a.unmatched(notFound()))
	e.NoMethod(a.unmatched(methodNotAllowed()))
	a.route(e, http.MethodPost, "/v1/activities/:activity/orders", a.reserve)
	a.route(e, http.MethodGet, "/v1/activities/:activity/orders/mine", a.mine)
	a.route(e, http.MethodGet, "/v1/activities/:activity", a.activity)
	a.route(e, http.MethodGet, "/v1/orders/:order", a.order)
	a.route(e, http.MethodDelete, "/v1/orders/:order", a.cancel)
	a.route(e, http.MethodPost, "/v1/payments/callback", a.callback)
	a.route(e, http.MethodGet, "/openapi.yaml", func(c *gin.Context) error {
		c.Data(http.StatusOK, "application/yaml", openAPI)
		return nil
	})
	return withCORS(cfg.CORSOrigins, e), nil
}

// route registers a handler that may return an error. Its series are looked up once, not with each
// request.
func (a *api) route(e *gin.Engine, method, path string, h func(*gin.Context) error) {
	duration := a.duration.WithLabelValues(path)
	var byStatus [600]atomic.Pointer[prometheus.Counter]
	measure := func(status int, took time.Duration) {
		duration.Observe(took.Seconds())
		if status < 0 || status >= len(byStatus) {
			return
		}
		n := byStatus[status].Load()
		if n == nil {
			c := a.requests.WithLabelValues(path, method, strconv.Itoa(status))
			n = &c
			byStatus[status].Store(n)
		}
		(*n).Inc()
	}
	e.Handle(method, path, a.guard(h, measure))
}

// unmatched answers what has no route, in series that do not depend on what was asked for.
func (a *api) unmatched(p *problem) gin.HandlerFunc {
	return func(c *gin.Context) {
		a.guard(func(*gin.Context) error { return p }, func(status int, took time.Duration) {
			a.duration.WithLabelValues("unmatched").Observe(took.Seconds())
			a.requests.WithLabelValues("unmatched", methodLabel(c.Request.Method), strconv.Itoa(status)).Inc()
		})(c)
	}
}

// guard names, measures and protects a handler, and answers with the problem its error stands for.
func (a *api) guard(h func(*gin.Context) error, measure func(status int, took time.Duration)) gin.HandlerFunc {
	return func(c *gin.Context) {
		start := time.Now()
		id := ""
		if v := c.Request.Header["X-Request-Id"]; len(v) == 1 && validRequestID(v[0]) {
			id = v[0]
		} else {
			id = newRequestID()
		}
		c.Writer.Header()["X-Request-Id"] = []string{id}
		defer func() {
			if p := recover(); p != nil {
				a.panicked(c, p)
			}
			measure(c.Writer.Status(), time.Since(start))
		}()
		if err := h(c); err != nil {
			a.fail(c, err)
		}
	}
}

func (a *api) panicked(c *gin.Context, p any) {
	if p == http.ErrAbortHandler { //nolint:errorlint // the sentinel is compared as net/http does
		panic(p)
	}
	a.log.ErrorContext(c.Request.Context(), "handler panicked",
		"request_id", requestID(c), "route", c.FullPath(), "panic", fmt.Sprint(p), "stack", string(debug.Stack()))
	if !c.Writer.Written() {
		a.write(c, http.StatusInternalServerError, "application/problem+json", internalError())
	}
	c.Abort()
}

// requestID is the name that around gave the request. It is kept in the answer's header alone.
func requestID(c *gin.Context) string { return c.Writer.Header().Get("X-Request-Id") }

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

// trace reads the request's W3C trace context; most requests have none.
func trace(h http.Header) observability.Trace {
	v := h["Traceparent"]
	if len(v) != 1 {
		return observability.Trace{}
	}
	return observability.ParseTrace(v[0], h.Get("Tracestate"))
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
	ctx := observability.WithTrace(c.Request.Context(), trace(c.Request.Header))
	switch {
	case p.Status == http.StatusInternalServerError:
		a.log.ErrorContext(ctx, "request failed", "request_id", requestID(c), "route", c.FullPath(), "error", err)
	case p.OrderID != "":
		a.log.WarnContext(ctx, "reservation outcome unknown", "request_id", requestID(c), "order_id", p.OrderID, "error", err)
	}
	h["Cache-Control"] = []string{"no-store"}
	if p.encoded != nil {
		a.send(c, p.Status, "application/problem+json", p.encoded)
	} else {
		a.write(c, p.Status, "application/problem+json", p)
	}
	c.Abort()
}

func (a *api) write(c *gin.Context, status int, contentType string, v any) {
	body, err := json.Marshal(v)
	if err != nil {
		a.log.ErrorContext(c.Request.Context(), "encode answer failed", "error", err)
		c.Writer.WriteHeader(http.StatusInternalServerError)
		return
	}
	a.send(c, status, contentType, body)
}

func (a *api) send(c *gin.Context, status int, contentType string, body []byte) {
	c.Writer.Header()["Content-Type"] = []string{contentType}
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
