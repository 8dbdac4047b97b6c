package rehearsal

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"strings"
	"time"

	"github.com/oklog/ulid/v2"
	"gorm.io/gorm"

	"seckill/pkg/messaging"
	"seckill/pkg/order"
	"seckill/pkg/stock"
	"seckill/services/order-worker/internal/admin"
	"seckill/services/order-worker/internal/audit"
	"seckill/services/order-worker/internal/store"
)

// Limits of one request.
const (
	MaxUsers    = 5000
	MaxPayloads = 1000
	maxBody     = 4 << 20
)

// Deadlines: a call, and a snapshot.
const (
	callTimeout     = 20 * time.Second
	snapshotTimeout = 2 * time.Minute
)

// publisher is the part of messaging.Client that sends the broken message.
type publisher interface {
	Publish(ctx context.Context, exchange string, msgs ...messaging.Message) []error
}

// Config holds what credentials are made with.
type Config struct {
	JWTSecret     string // the key that order-api checks HS256 tokens with; empty: no tokens
	PaymentSecret string // "whsec_…": one of order-api's payment secrets; empty: no signatures
}

// Handler serves the routes below /admin/v1/rehearsals/{activity}/. Who may call them is decided
// where it is mounted: they are for operators.
type Handler struct {
	store  *store.Store
	stock  *stock.Client
	broker publisher
	secret []byte
	key    []byte
	log    *slog.Logger
	mux    *http.ServeMux
}

// New makes the handler.
func New(cfg Config, st *store.Store, stk *stock.Client, broker publisher, log *slog.Logger) (*Handler, error) {
	h := &Handler{store: st, stock: stk, broker: broker, secret: []byte(cfg.JWTSecret), log: log, mux: http.NewServeMux()}
	if cfg.PaymentSecret != "" {
		key, err := signingKey(cfg.PaymentSecret)
		if err != nil {
			return nil, fmt.Errorf("make rehearsal handler: %w", err)
		}
		h.key = key
	}
	h.route(http.MethodPost, "tokens", h.tokens)
	h.route(http.MethodPost, "sign", h.sign)
	h.route(http.MethodPost, "poison", h.poison)
	h.route(http.MethodGet, "progress", func(ctx context.Context, a store.Activity, _ *http.Request) (any, error) {
		return h.progress(ctx, a)
	})
	h.mux.HandleFunc("GET /admin/v1/rehearsals/{activity}/snapshot", h.serveSnapshot)
	return h, nil
}

// ServeHTTP implements http.Handler.
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request) { h.mux.ServeHTTP(w, r) }

// problem is an RFC 9457 answer.
type problem struct {
	Type   string `json:"type"`
	Title  string `json:"title"`
	Status int    `json:"status"`
	Code   string `json:"code"`
	Detail string `json:"detail,omitempty"`
}

// refusal is an error that the caller is told.
type refusal struct {
	status int
	code   string
	detail string
}

func (e *refusal) Error() string { return e.detail }

func (h *Handler) route(method, name string, fn func(context.Context, store.Activity, *http.Request) (any, error)) {
	h.mux.HandleFunc(method+" /admin/v1/rehearsals/{activity}/"+name, func(w http.ResponseWriter, r *http.Request) {
		ctx, cancel := context.WithTimeout(r.Context(), callTimeout)
		defer cancel()
		r.Body = http.MaxBytesReader(w, r.Body, maxBody)
		a, err := h.activity(ctx, r.PathValue("activity"))
		var out any
		if err == nil {
			out, err = fn(ctx, a, r)
		}
		if err != nil {
			h.fail(ctx, w, err)
			return
		}
		h.write(ctx, w, http.StatusOK, "application/json", out)
	})
}

func (h *Handler) write(ctx context.Context, w http.ResponseWriter, status int, kind string, v any) {
	w.Header().Set("Content-Type", kind)
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(status)
	if err := json.NewEncoder(w).Encode(v); err != nil {
		h.log.DebugContext(ctx, "rehearsal answer not delivered", "error", err)
	}
}

func (h *Handler) fail(ctx context.Context, w http.ResponseWriter, err error) {
	p := problem{Status: http.StatusInternalServerError, Code: "internal"}
	var known *refusal
	var tooLarge *http.MaxBytesError
	switch {
	case errors.As(err, &known):
		p.Status, p.Code, p.Detail = known.status, known.code, known.detail
	case errors.As(err, &tooLarge):
		p.Status, p.Code = http.StatusRequestEntityTooLarge, "body_too_large"
	case errors.Is(err, ErrNoKey):
		p.Status, p.Code, p.Detail = http.StatusConflict, "conflict", err.Error()
	case errors.Is(err, stock.ErrUnavailable), errors.Is(err, stock.ErrUnknownOutcome), errors.Is(err, context.DeadlineExceeded):
		p.Status, p.Code = http.StatusServiceUnavailable, "temporarily_unavailable"
		h.log.WarnContext(ctx, "rehearsal call failed", "error", err)
	default:
		h.log.ErrorContext(ctx, "rehearsal call failed", "error", err)
	}
	p.Type, p.Title = "/problems/"+p.Code, http.StatusText(p.Status)
	h.write(ctx, w, p.Status, "application/problem+json", p)
}

// activity finds a shadow activity; every other is refused.
func (h *Handler) activity(ctx context.Context, id string) (store.Activity, error) {
	var a store.Activity
	if !order.ValidActivityID(id) {
		return a, &refusal{http.StatusNotFound, "activity_not_found", "no such activity"}
	}
	err := h.store.DB(ctx).Where("id = ?", id).Take(&a).Error
	switch {
	case errors.Is(err, gorm.ErrRecordNotFound):
		return a, &refusal{http.StatusNotFound, "activity_not_found", "no such activity"}
	case err != nil:
		return a, fmt.Errorf("read activity %s: %w", id, err)
	case !a.Shadow:
		return a, &refusal{http.StatusForbidden, "forbidden", "not a shadow activity: rehearsals never touch a real sale"}
	}
	return a, nil
}

func decode(r *http.Request, into any) error {
	dec := json.NewDecoder(r.Body)
	dec.DisallowUnknownFields()
	if err := dec.Decode(into); err != nil {
		var tooLarge *http.MaxBytesError
		if errors.As(err, &tooLarge) {
			return err
		}
		return &refusal{http.StatusBadRequest, "invalid_request", "body: " + err.Error()}
	}
	return nil
}

// tokens makes one buyer's token for each user.
func (h *Handler) tokens(ctx context.Context, a store.Activity, r *http.Request) (any, error) {
	var in struct {
		Users []string `json:"users"`
		TTL   string   `json:"ttl"`
	}
	if err := decode(r, &in); err != nil {
		return nil, err
	}
	ttl := time.Hour
	if in.TTL != "" {
		var err error
		if ttl, err = time.ParseDuration(in.TTL); err != nil {
			return nil, &refusal{http.StatusBadRequest, "invalid_request", "ttl is not a duration such as 1h"}
		}
	}
	if len(in.Users) == 0 || len(in.Users) > MaxUsers || ttl <= 0 || ttl > MaxTTL {
		return nil, &refusal{http.StatusBadRequest, "invalid_request", fmt.Sprintf("1 to %d users, ttl up to %s", MaxUsers, MaxTTL)}
	}
	now := time.Now()
	out := make([]string, len(in.Users))
	for i, u := range in.Users {
		t, err := token(h.secret, u, a.ID, now, ttl)
		if errors.Is(err, ErrNoKey) {
			return nil, err
		}
		if err != nil {
			return nil, &refusal{http.StatusBadRequest, "invalid_request", err.Error()}
		}
		out[i] = t
	}
	if err := h.record(ctx, a, "rehearsal.tokens", fmt.Sprintf("%d tokens for %s", len(out), ttl)); err != nil {
		return nil, err
	}
	return struct {
		Tokens []string `json:"tokens"`
	}{out}, nil
}

// record keeps what an operator was given. Signatures are not kept: they are good for a shadow
// activity's own orders only, and there are thousands.
func (h *Handler) record(ctx context.Context, a store.Activity, action, what string) error {
	return audit.Write(ctx, h.store.SQL(), admin.ActorFrom(ctx), audit.Entry{Action: action, Subject: a.ID, Result: "done", After: what})
}

// sign signs callbacks. Only payments for orders of this very activity are signed: with anything
// else the route would be a key to real money.
func (h *Handler) sign(_ context.Context, a store.Activity, r *http.Request) (any, error) {
	var in struct {
		Payloads []string `json:"payloads"`
	}
	if err := decode(r, &in); err != nil {
		return nil, err
	}
	if h.key == nil {
		return nil, fmt.Errorf("sign callback: %w", ErrNoKey)
	}
	if len(in.Payloads) == 0 || len(in.Payloads) > MaxPayloads {
		return nil, &refusal{http.StatusBadRequest, "invalid_request", fmt.Sprintf("1 to %d payloads", MaxPayloads)}
	}
	now := time.Now()
	out := make([]Signature, len(in.Payloads))
	for i, p := range in.Payloads {
		if err := ownPayment(p, a.ID); err != nil {
			return nil, &refusal{http.StatusForbidden, "forbidden", fmt.Sprintf("payload %d: %s", i, err)}
		}
		out[i] = sign(h.key, p, now)
	}
	return out, nil
}

// ownPayment accepts exactly the callback's JSON, with an order of the activity. What a lenient
// reader could take for another order (a key given twice, other letter case, more text) is refused.
func ownPayment(payload, activity string) error {
	var p struct {
		Type          string `json:"type"`
		OrderID       string `json:"order_id"`
		TransactionID string `json:"transaction_id"`
		AmountMinor   int64  `json:"amount_minor"`
		Currency      string `json:"currency"`
	}
	dec := json.NewDecoder(strings.NewReader(payload))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&p); err != nil {
		return errors.New("not a payment callback")
	}
	canonical, err := json.Marshal(p)
	if err != nil || string(canonical) != payload {
		return errors.New("not a payment callback in its plain form")
	}
	id, err := order.ParseID(p.OrderID)
	if err != nil || id.Activity != activity {
		return errors.New("not an order of this activity")
	}
	return nil
}

func poisonPrefix(activity string) string { return "poison-" + activity + "-" }

// poison puts a message that nobody can decode among the orders.
func (h *Handler) poison(ctx context.Context, a store.Activity, _ *http.Request) (any, error) {
	m := messaging.Message{
		ID: poisonPrefix(a.ID) + ulid.Make().String(), Key: messaging.KeyOrderReserved, Orders: 1, Time: time.Now().UTC(),
		// Field 1 says that it is longer than the message: cut off in transit, as it were.
		Body: []byte("\x0a\x7fbroken on purpose by rehearsal " + a.ID),
	}
	if err := errors.Join(h.broker.Publish(ctx, messaging.ExchangeEvents, m)...); err != nil {
		h.log.WarnContext(ctx, "broken message not sent", "activity_id", a.ID, "error", err)
		return nil, &refusal{http.StatusServiceUnavailable, "temporarily_unavailable", "the broker did not take it"}
	}
	if err := h.record(ctx, a, "rehearsal.poison", m.ID); err != nil {
		return nil, err
	}
	return struct {
		MessageID string `json:"message_id"`
	}{m.ID}, nil
}

func (h *Handler) serveSnapshot(w http.ResponseWriter, r *http.Request) {
	ctx, cancel := context.WithTimeout(r.Context(), snapshotTimeout)
	defer cancel()
	a, err := h.activity(ctx, r.PathValue("activity"))
	if err != nil {
		h.fail(ctx, w, err)
		return
	}
	// The admin server's write time-out is meant for short answers.
	_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(snapshotTimeout)) // not every writer has one
	w.Header().Set("Content-Type", "application/x-ndjson")
	w.Header().Set("Cache-Control", "no-store")
	out := bufio.NewWriterSize(w, 64<<10)
	if err := h.snapshot(ctx, a, out); err == nil {
		err = out.Flush()
		if err != nil {
			h.log.DebugContext(ctx, "snapshot not delivered", "activity_id", a.ID, "error", err)
		}
	}
}
