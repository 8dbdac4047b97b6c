package httpapi

import (
	"context"
	"errors"
	"math"
	"net/http"
	"strconv"
	"time"

	"github.com/go-json-experiment/json"

	"seckill/pkg/stock"
	"seckill/services/order-api/internal/checkout"
)

// problem is an RFC 9457 problem details object with this API's stable code.
type problem struct {
	Type       string   `json:"type"`
	Title      string   `json:"title"`
	Status     int      `json:"status"`
	Code       string   `json:"code"`
	Detail     string   `json:"detail,omitempty"`
	OrderID    string   `json:"order_id,omitempty"`
	OrderIDs   []string `json:"order_ids,omitzero"`
	StartsAt   string   `json:"starts_at,omitempty"`
	ServerTime string   `json:"server_time,omitempty"`

	retryAfter time.Duration
	encoded    []byte // the answer's body, where it is always the same
}

// Error lets a handler return a problem it has made itself.
func (p *problem) Error() string { return p.Code + ": " + p.Detail }

func newProblem(status int, code, title string) *problem {
	return &problem{Type: "/problems/" + code, Title: title, Status: status, Code: code}
}

// soldOut is most of the answers of a sale.
var soldOut = fixed(newProblem(http.StatusConflict, "sold_out", "Sold out"))

// fixed encodes a problem that says the same to everybody.
func fixed(p *problem) *problem {
	body, err := json.Marshal(p)
	if err != nil {
		panic(err) // a struct of texts and numbers
	}
	p.encoded = body
	return p
}

func (p *problem) with(detail string) *problem { p.Detail = detail; return p }

func invalid(detail string) *problem {
	return newProblem(http.StatusBadRequest, "invalid_request", "The request is invalid").with(detail)
}

func unauthenticated(detail string) *problem {
	return newProblem(http.StatusUnauthorized, "unauthenticated", "The caller is not authenticated").with(detail)
}

func tooLarge() *problem {
	return newProblem(http.StatusRequestEntityTooLarge, "body_too_large", "The body is too large").
		with("the body may have up to 4096 bytes")
}

func notFound() *problem {
	return newProblem(http.StatusNotFound, "not_found", "There is nothing at this path")
}

func methodNotAllowed() *problem {
	return newProblem(http.StatusMethodNotAllowed, "method_not_allowed", "The method is not allowed here")
}

func internalError() *problem {
	return newProblem(http.StatusInternalServerError, "internal", "Something went wrong here")
}

func unavailable(detail string) *problem {
	p := newProblem(http.StatusServiceUnavailable, "temporarily_unavailable", "Try again in a moment").with(detail)
	p.retryAfter = time.Second
	return p
}

// maxRetryAfter bounds how long a client is told to stay away.
const maxRetryAfter = time.Hour

// problemOf is the one place where errors become answers. What is not known here is 500 internal.
func problemOf(err error) *problem {
	if errors.Is(err, stock.ErrSoldOut) { // first, since it is most of what comes here
		return soldOut
	}
	var (
		own           *problem
		field         *checkout.InvalidError
		unknown       *checkout.UnknownOutcomeError
		notCancelable *checkout.NotCancellableError
		early         *stock.NotStartedError
		limit         *stock.LimitError
	)
	switch {
	case errors.As(err, &own):
		return own
	case errors.As(err, &field):
		return invalid(field.Error())
	case errors.As(err, &unknown):
		p := unavailable("the outcome is not known yet; ask for the order's status")
		p.OrderID = unknown.ID.String()
		return p
	case errors.As(err, &notCancelable):
		return newProblem(http.StatusConflict, "order_not_cancellable", "The order cannot be cancelled").with(notCancelable.Error())
	case errors.As(err, &early):
		p := newProblem(http.StatusConflict, "activity_not_started", "The activity has not started")
		p.StartsAt, p.ServerTime = timestamp(early.StartsAt), timestamp(early.Now)
		p.retryAfter = min(max(early.StartsAt.Sub(early.Now), time.Second), maxRetryAfter)
		return p
	case errors.As(err, &limit):
		p := newProblem(http.StatusConflict, "limit_reached", "The limit per user is reached")
		p.OrderIDs = limit.OrderIDs
		if p.OrderIDs == nil {
			p.OrderIDs = []string{}
		}
		return p
	case errors.Is(err, checkout.ErrNotPermitted):
		return unauthenticated("the token is not valid for this activity")
	case errors.Is(err, checkout.ErrRateLimited):
		p := newProblem(http.StatusTooManyRequests, "rate_limited", "Too many requests")
		p.retryAfter = time.Second
		return p
	case errors.Is(err, checkout.ErrAmountMismatch):
		return newProblem(http.StatusUnprocessableEntity, "amount_mismatch", "Amount or currency differ from the order")
	case errors.Is(err, checkout.ErrBroker):
		return unavailable("the request could not be queued in time")
	case errors.Is(err, checkout.ErrOverloaded):
		return unavailable("too many requests at once")
	case errors.Is(err, stock.ErrNotQualified):
		return newProblem(http.StatusForbidden, "not_qualified", "The user may not take part")
	case errors.Is(err, stock.ErrActivityNotFound):
		return newProblem(http.StatusNotFound, "activity_not_found", "There is no such activity")
	case errors.Is(err, stock.ErrOrderNotFound):
		return newProblem(http.StatusNotFound, "order_not_found", "There is no such order")
	case errors.Is(err, stock.ErrEnded):
		return newProblem(http.StatusGone, "activity_ended", "The activity has ended")
	case errors.Is(err, stock.ErrArchived):
		return newProblem(http.StatusGone, "order_archived", "The order is archived: the sale is settled")
	case errors.Is(err, stock.ErrPaused):
		p := newProblem(http.StatusServiceUnavailable, "activity_paused", "The activity is paused")
		p.retryAfter = time.Second
		return p
	case errors.Is(err, stock.ErrKeyReused):
		return newProblem(http.StatusUnprocessableEntity, "idempotency_key_reused", "The idempotency key was used with another request")
	case errors.Is(err, stock.ErrInvalid):
		return invalid("quantity, sku or region do not fit this activity")
	case errors.Is(err, stock.ErrNotWarmed):
		return unavailable("the activity is not warmed")
	case errors.Is(err, stock.ErrUnavailable), errors.Is(err, stock.ErrUnknownOutcome),
		errors.Is(err, context.DeadlineExceeded), errors.Is(err, context.Canceled):
		return unavailable("the store did not answer in time")
	default:
		return internalError()
	}
}

func retryAfterSeconds(d time.Duration) string {
	return strconv.Itoa(int(math.Ceil(d.Seconds())))
}
