package admin

import (
	"context"
	"database/sql/driver"
	"errors"
	"net"
	"net/http"

	"github.com/go-sql-driver/mysql"

	"seckill/pkg/adminapi"
	"seckill/pkg/messaging"
	"seckill/pkg/sale"
	"seckill/pkg/stock"
	"seckill/services/order-worker/internal/activity"
	"seckill/services/order-worker/internal/deadletter"
)

// Problem is an error that says how it is to be answered.
type Problem struct{ adminapi.Problem }

// Error implements error.
func (p *Problem) Error() string { return p.Code + ": " + p.Detail }

// NewProblem makes an answer for a handler to return.
func NewProblem(status int, code, detail string) *Problem {
	return &Problem{adminapi.Problem{Status: status, Code: code, Detail: detail}}
}

func invalid(detail string) *Problem {
	return NewProblem(http.StatusBadRequest, adminapi.CodeInvalidRequest, detail)
}

// toProblem is the one place where errors become answers.
func toProblem(err error) *Problem {
	var p *Problem
	var wrong sale.Problems
	var short activity.ShortageError
	switch {
	case errors.As(err, &p):
		return p
	case errors.As(err, &wrong):
		p = invalid("the sale is not valid")
		p.Problems = wrong
		return p
	case errors.As(err, &short):
		return NewProblem(http.StatusConflict, adminapi.CodeTooLittle, short.Error())
	case errors.Is(err, activity.ErrNotFound):
		return NewProblem(http.StatusNotFound, adminapi.CodeActivityNotFound, "there is no such activity")
	case errors.Is(err, activity.ErrExists):
		return NewProblem(http.StatusConflict, adminapi.CodeActivityExists, "an activity with this id exists and is another one")
	case errors.Is(err, activity.ErrState), errors.Is(err, activity.ErrDamaged), errors.Is(err, activity.ErrOpReused):
		return NewProblem(http.StatusConflict, adminapi.CodeConflict, err.Error())
	case errors.Is(err, deadletter.ErrNotFound):
		return NewProblem(http.StatusNotFound, adminapi.CodeLetterNotFound, "there is no such dead letter")
	case errors.Is(err, deadletter.ErrJobNotFound):
		return NewProblem(http.StatusNotFound, adminapi.CodeJobNotFound, "there is no such replay job")
	case errors.Is(err, deadletter.ErrSelection):
		return invalid(err.Error())
	case errors.Is(err, stock.ErrCorrupt):
		return NewProblem(http.StatusConflict, adminapi.CodeConflict, err.Error()+"; a rebuild of the sale writes its keys anew")
	case unavailable(err):
		return NewProblem(http.StatusServiceUnavailable, adminapi.CodeUnavailable, "a store or the broker does not answer; the call may be repeated")
	}
	return NewProblem(http.StatusInternalServerError, adminapi.CodeInternal, "something went wrong; the log has it under the request id")
}

func unavailable(err error) bool {
	var network *net.OpError
	if errors.As(err, &network) {
		return true
	}
	for _, cause := range []error{
		stock.ErrUnavailable, stock.ErrUnknownOutcome, context.DeadlineExceeded, driver.ErrBadConn, mysql.ErrInvalidConn,
		messaging.ErrNotConnected, messaging.ErrBlocked, messaging.ErrUnknownOutcome, messaging.ErrReturned, messaging.ErrNacked, messaging.ErrTopology,
	} {
		if errors.Is(err, cause) {
			return true
		}
	}
	return false
}
