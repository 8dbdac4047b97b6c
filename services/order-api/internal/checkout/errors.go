package checkout

import (
	"errors"
	"fmt"

	"seckill/pkg/order"
)

var (
	// ErrOverloaded: more Redis work is under way than this process allows; nothing was tried.
	ErrOverloaded = errors.New("too many requests in flight")
	// ErrRateLimited: this user sends more reservations than the configured rate.
	ErrRateLimited = errors.New("user rate limit reached")
	// ErrBroker: the broker did not confirm within the deadline; the caller has to ask again.
	ErrBroker = errors.New("broker did not confirm")
	// ErrAmountMismatch: a payment of another amount or currency than the order's.
	ErrAmountMismatch = errors.New("amount or currency differ from the order")
	// ErrNotPermitted: the token is restricted to another activity, or to one that is no rehearsal.
	ErrNotPermitted = errors.New("token is not valid for this activity")
)

// InvalidError refuses a request because one of its fields names nothing in this activity.
type InvalidError struct{ Field, Detail string }

func (e *InvalidError) Error() string { return e.Field + ": " + e.Detail }

// UnknownOutcomeError: the script may have run (R12). The status call of the order id tells.
type UnknownOutcomeError struct {
	ID  order.ID
	Err error
}

func (e *UnknownOutcomeError) Error() string {
	return fmt.Sprintf("reserve order %s: outcome unknown: %v", e.ID, e.Err)
}

func (e *UnknownOutcomeError) Unwrap() error { return e.Err }

// NotCancellableError refuses a cancel because of the order's present state.
type NotCancellableError struct{ Status order.Status }

func (e *NotCancellableError) Error() string {
	return fmt.Sprintf("order is %s and cannot be cancelled", e.Status)
}
