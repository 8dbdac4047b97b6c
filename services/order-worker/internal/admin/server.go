package admin

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"mime"
	"net"
	"net/http"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	strict "github.com/go-json-experiment/json"
	"github.com/prometheus/client_golang/prometheus"

	"seckill/pkg/adminapi"
	"seckill/pkg/messaging"
	"seckill/pkg/order"
	"seckill/pkg/stock"
	"seckill/services/order-worker/internal/activity"
	"seckill/services/order-worker/internal/audit"
	"seckill/services/order-worker/internal/deadletter"
	"seckill/services/order-worker/internal/store"
)

const (
	maxBody        = 1 << 20
	defaultTimeout = 30 * time.Second
	defaultLimit   = 50
	maxLimit       = 1000
)

// Config of a Server.
type Config struct {
	Tokens []Token // at least one
}

// Deps are what a Server stands on.
type Deps struct {
	Store      *store.Store
	Activities *activity.Service
	Letters    *deadletter.Service
	Stock      *stock.Client
	Broker     *messaging.Client
	Log        *slog.Logger
	Metrics    prometheus.Registerer
}

// Server is the admin API and the console.
type Server struct {
	cfg      Config
	deps     Deps
	mux      *http.ServeMux
	console  *console
	requests *prometheus.CounterVec
}

// HandlerFunc answers a request, or returns an error that becomes a problem.
type HandlerFunc func(w http.ResponseWriter, r *http.Request) error

// Route is a handler with its place and who may call it.
type Route struct {
	Method  string
	Path    string // a pattern of net/http, below /admin/v1/
	Role    Role
	Timeout time.Duration // of the request's context; 30 s if 0
	Handler HandlerFunc
}

// New makes a Server with the routes of this package.
func New(cfg Config, deps Deps) (*Server, error) {
	if len(cfg.Tokens) == 0 {
		return nil, errors.New("admin server: no tokens")
	}
	s := &Server{cfg: cfg, deps: deps, mux: http.NewServeMux(), requests: prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "seckill_admin_requests_total",
		Help: "Requests to the admin API by status code.",
	}, []string{"code"})}
	if err := deps.Metrics.Register(s.requests); err != nil {
		return nil, fmt.Errorf("register metrics: %w", err)
	}
	var err error
	if s.console, err = newConsole(s); err != nil {
		return nil, err
	}
	s.mux.HandleFunc("/", s.noRoute)
	s.Mount(s.routes()...)
	return s, nil
}

// Mount adds routes. It panics on a path that is not below /admin/v1/ or is taken, like net/http.
func (s *Server) Mount(routes ...Route) {
	for _, rt := range routes {
		if !strings.HasPrefix(rt.Path, "/admin/v1/") {
			panic("admin route outside /admin/v1/: " + rt.Path)
		}
		if rt.Timeout == 0 {
			rt.Timeout = defaultTimeout
		}
		s.mux.HandleFunc(rt.Method+" "+rt.Path, func(w http.ResponseWriter, r *http.Request) { s.serve(w, r, rt) })
	}
}

// MountHandler adds a handler for everything below a path that ends with "/", for callers with the
// role. Body limits, deadlines and errors are the handler's own affair.
func (s *Server) MountHandler(path string, role Role, h http.Handler) {
	if !strings.HasPrefix(path, "/admin/v1/") || !strings.HasSuffix(path, "/") {
		panic("admin handler outside /admin/v1/: " + path)
	}
	s.mux.HandleFunc(path, func(w http.ResponseWriter, r *http.Request) {
		if !s.allowed(w, r, role) {
			return
		}
		h.ServeHTTP(w, r)
	})
}

func (s *Server) allowed(w http.ResponseWriter, r *http.Request, role Role) bool {
	if Role(ActorFrom(r.Context()).Role).may(role) {
		return true
	}
	s.writeProblem(w, r, NewProblem(http.StatusForbidden, adminapi.CodeForbidden, "this needs the role "+string(role)))
	return false
}

// HTTPServer gives a server for the address with every time-out set; the caller starts and stops it.
func (s *Server) HTTPServer(addr string) *http.Server {
	return &http.Server{
		Addr: addr, Handler: s.Handler(), ReadHeaderTimeout: 5 * time.Second, ReadTimeout: 30 * time.Second,
		IdleTimeout: 2 * time.Minute, MaxHeaderBytes: 16 << 10,
		ErrorLog: slog.NewLogLogger(s.deps.Log.Handler(), slog.LevelWarn),
	}
}

// Handler serves the API.
func (s *Server) Handler() http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		id := r.Header.Get("X-Request-Id")
		if !validRequestID(id) {
			id = rand.Text()
		}
		h := w.Header()
		h.Set("X-Request-Id", id)
		h.Set("X-Content-Type-Options", "nosniff")
		h.Set("Cache-Control", "no-store")
		rec := &recorder{ResponseWriter: w}
		defer func() {
			if p := recover(); p != nil {
				if p == http.ErrAbortHandler { //nolint:errorlint // net/http compares it so, too
					panic(p)
				}
				s.deps.Log.ErrorContext(r.Context(), "admin handler panicked", "request_id", id, "panic", fmt.Sprint(p), "stack", string(debug.Stack()))
				if rec.status == 0 {
					s.writeProblem(rec, r, NewProblem(http.StatusInternalServerError, adminapi.CodeInternal, "something went wrong; the log has it under the request id"))
				}
			}
			s.requests.WithLabelValues(strconv.Itoa(max(rec.status, 200))).Inc()
		}()
		if r.URL.Path == "/console" || strings.HasPrefix(r.URL.Path, "/console/") {
			s.console.ServeHTTP(rec, r)
			return
		}
		s.enter(rec, r, id)
	})
}

// enter lets holders of a token in; nobody else learns which paths there are.
func (s *Server) enter(w http.ResponseWriter, r *http.Request, requestID string) {
	scheme, token, _ := strings.Cut(r.Header.Get("Authorization"), " ")
	who, ok := find(s.cfg.Tokens, strings.TrimSpace(token))
	if !ok || !strings.EqualFold(scheme, "Bearer") {
		w.Header().Set("WWW-Authenticate", "Bearer")
		s.writeProblem(w, r, NewProblem(http.StatusUnauthorized, adminapi.CodeUnauthenticated, "a valid admin token is needed"))
		return
	}
	actor := audit.Actor{Name: who.Name, Role: string(who.Role), Remote: remote(r), RequestID: requestID}
	r = r.WithContext(context.WithValue(r.Context(), actorKey{}, actor))
	if p := foreign(r); p != nil {
		s.writeProblem(w, r, p)
		return
	}
	s.mux.ServeHTTP(w, r)
}

// freeText are parameters that are looked for in text, or shown, of any language.
var freeText = map[string]bool{"q": true, "actor": true, "action": true, "target": true, "said": true} //nolint:gochecknoglobals // a constant

// foreign answers requests for what no id, name or number can be, instead of MySQL, which refuses to compare it.
func foreign(r *http.Request) *Problem {
	if !order.ASCII(r.URL.Path) {
		for _, kind := range []struct{ name, code, what string }{
			{"/activities/", adminapi.CodeActivityNotFound, "activity"}, {"/orders/", adminapi.CodeOrderNotFound, "order"},
			{"/payments/", adminapi.CodePaymentNotFound, "payment"}, {"/dead-letters/", adminapi.CodeLetterNotFound, "dead letter"},
			{"/replay-jobs/", adminapi.CodeJobNotFound, "replay job"},
		} {
			if strings.HasPrefix(r.URL.Path, "/admin/v1"+kind.name) || strings.HasPrefix(r.URL.Path, "/console"+kind.name) {
				return NewProblem(http.StatusNotFound, kind.code, "there is no such "+kind.what)
			}
		}
		return NewProblem(http.StatusNotFound, adminapi.CodeNotFound, "there is nothing at this path")
	}
	for name, values := range r.URL.Query() {
		for _, v := range values {
			switch {
			case freeText[name] && !utf8.ValidString(v):
				return invalid(name + " is not UTF-8")
			case !freeText[name] && !order.ASCII(v):
				return invalid(name + " has other characters than ASCII")
			}
		}
	}
	return nil
}

// remote is the address a request comes from, without its port.
func remote(r *http.Request) string {
	host, _, err := net.SplitHostPort(r.RemoteAddr)
	if err != nil {
		return r.RemoteAddr
	}
	return host
}

type actorKey struct{}

// ActorFrom says who makes the request.
func ActorFrom(ctx context.Context) audit.Actor {
	a, _ := ctx.Value(actorKey{}).(audit.Actor)
	return a
}

func (s *Server) serve(w http.ResponseWriter, r *http.Request, rt Route) {
	if !s.allowed(w, r, rt.Role) {
		return
	}
	ctx, cancel := context.WithTimeout(r.Context(), rt.Timeout)
	defer cancel()
	r = r.WithContext(ctx)
	r.Body = http.MaxBytesReader(w, r.Body, maxBody)
	// The server has no time limit for writing as a whole, since some answers are long streams.
	_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(rt.Timeout + 5*time.Second))
	err := rt.Handler(w, r)
	if err == nil {
		return
	}
	p := toProblem(err)
	if p.Status >= http.StatusInternalServerError {
		s.deps.Log.ErrorContext(ctx, "admin request failed", "request_id", w.Header().Get("X-Request-Id"),
			"route", rt.Method+" "+rt.Path, "code", p.Code, "error", err)
	}
	if rec, ok := w.(*recorder); ok && rec.status != 0 {
		return // the answer had begun: all that is left is to cut it off, which the client notices
	}
	s.writeProblem(w, r, p)
}

func (s *Server) noRoute(w http.ResponseWriter, r *http.Request) {
	var allowed []string
	for _, method := range []string{http.MethodGet, http.MethodPost, http.MethodPut, http.MethodPatch, http.MethodDelete} {
		other := r.Clone(r.Context())
		other.Method = method
		if _, pattern := s.mux.Handler(other); pattern != "/" {
			allowed = append(allowed, method)
		}
	}
	if len(allowed) > 0 && !slices.Contains(allowed, r.Method) {
		w.Header().Set("Allow", strings.Join(allowed, ", "))
		s.writeProblem(w, r, NewProblem(http.StatusMethodNotAllowed, adminapi.CodeMethodNotAllowed, "allowed here: "+strings.Join(allowed, ", ")))
		return
	}
	s.writeProblem(w, r, NewProblem(http.StatusNotFound, adminapi.CodeNotFound, "there is nothing at this path"))
}

func (s *Server) writeProblem(w http.ResponseWriter, r *http.Request, p *Problem) {
	body := p.Problem
	body.Type = "/problems/" + body.Code
	body.Title = http.StatusText(body.Status)
	body.RequestID = w.Header().Get("X-Request-Id")
	if body.Status == http.StatusServiceUnavailable {
		w.Header().Set("Retry-After", "1")
	}
	w.Header().Set("Content-Type", "application/problem+json")
	w.WriteHeader(body.Status)
	if err := json.NewEncoder(w).Encode(body); err != nil {
		s.deps.Log.DebugContext(r.Context(), "client did not take the answer", "error", err)
	}
}

// WriteJSON answers with v.
func WriteJSON(w http.ResponseWriter, status int, v any) error {
	raw, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("encode answer: %w", err)
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_, _ = w.Write(append(raw, '\n')) // a client that has gone needs no answer
	return nil
}

// Decode reads the request's body strictly: one JSON object, no unknown or repeated names, names by
// case, nothing behind it.
func Decode(r *http.Request, v any) error {
	kind, _, err := mime.ParseMediaType(r.Header.Get("Content-Type"))
	if err != nil || kind != "application/json" {
		return NewProblem(http.StatusUnsupportedMediaType, adminapi.CodeUnsupportedMedia, "the body has to be application/json")
	}
	raw, err := io.ReadAll(r.Body)
	var tooLarge *http.MaxBytesError
	switch {
	case errors.As(err, &tooLarge):
		return NewProblem(http.StatusRequestEntityTooLarge, adminapi.CodeBodyTooLarge, fmt.Sprintf("more than %d bytes", tooLarge.Limit))
	case err != nil:
		return invalid("the body could not be read")
	}
	if err := strict.Unmarshal(raw, v, strict.RejectUnknownMembers(true)); err != nil {
		return invalid("the body is not what this call takes: " + jsonReason(err))
	}
	return nil
}

func jsonReason(err error) string {
	var semantic *strict.SemanticError
	switch {
	case errors.Is(err, strict.ErrUnknownName):
		return "a name is unknown"
	case errors.As(err, &semantic):
		return "the value at " + strconv.Quote(string(semantic.JSONPointer)) + " has the wrong type"
	}
	return "not one JSON object without repeated names"
}

// pageOf reads limit and cursor.
func pageOf(r *http.Request) (limit int, cursor string, err error) {
	q := r.URL.Query()
	limit = defaultLimit
	if text := q.Get("limit"); text != "" {
		limit, err = strconv.Atoi(text)
		if err != nil || limit < 1 || limit > maxLimit {
			return 0, "", invalid(fmt.Sprintf("limit must be 1 to %d", maxLimit))
		}
	}
	return limit, q.Get("cursor"), nil
}

func validRequestID(s string) bool {
	return len(s) >= 1 && len(s) <= 64 && !strings.ContainsFunc(s, func(r rune) bool {
		return !(r >= '0' && r <= '9' || r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r == '-' || r == '_')
	})
}

// recorder remembers the status, for metrics and to know whether an answer has begun.
type recorder struct {
	http.ResponseWriter
	status int
}

func (r *recorder) WriteHeader(status int) {
	if r.status == 0 {
		r.status = status
	}
	r.ResponseWriter.WriteHeader(status)
}

func (r *recorder) Write(p []byte) (int, error) {
	if r.status == 0 {
		r.status = http.StatusOK
	}
	return r.ResponseWriter.Write(p)
}

// Unwrap lets http.ResponseController reach the connection.
func (r *recorder) Unwrap() http.ResponseWriter { return r.ResponseWriter }
