package stock

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"

	"github.com/redis/go-redis/v9"
)

// Beginnings of replies with which Redis refuses a command before running it. Scripts carry a
// shebang, so this holds for them too: OOM and READONLY come before their first line.
var refusals = []string{
	"OOM", "READONLY", "BUSY", "LOADING", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN", "MOVED", "ASK",
	"NOREPLICAS", "MISCONF", "NOAUTH", "NOPERM", "WRONGPASS", "UNKILLABLE", "NOSCRIPT",
	"ERR max number of clients reached",
}

// ran says whether the command behind this error may have been executed.
func ran(err error) bool {
	var reply redis.Error
	if errors.As(err, &reply) {
		return false
	}
	if errors.Is(err, redis.ErrPoolTimeout) || errors.Is(err, redis.ErrPoolExhausted) || errors.Is(err, redis.ErrClosed) {
		return false
	}
	var op *net.OpError
	return !errors.As(err, &op) || op.Op != "dial"
}

// classify gives a library error its meaning: ErrUnavailable when Redis certainly did not run the
// command, ErrUnknownOutcome when it may have. The cause stays in the chain.
func (c *Client) classify(err error) error {
	var reply redis.Error
	switch {
	case err == nil:
		return nil
	case errors.Is(err, ErrUnavailable), errors.Is(err, ErrUnknownOutcome), errors.Is(err, redis.Nil):
		return err
	case errors.As(err, &reply):
		msg := reply.Error()
		if strings.HasPrefix(msg, "WRONGTYPE") {
			return fmt.Errorf("%w: %w", ErrCorrupt, err)
		}
		for _, p := range refusals {
			if strings.HasPrefix(msg, p) {
				if c.cfg.Mode == Cluster { // an earlier attempt inside the library may have run
					return fmt.Errorf("%w: %w", ErrUnknownOutcome, err)
				}
				return fmt.Errorf("%w: %w", ErrUnavailable, err)
			}
		}
		return err
	case ran(err) || c.cfg.Mode == Cluster:
		return fmt.Errorf("%w: %w", ErrUnknownOutcome, err)
	}
	return fmt.Errorf("%w: %w", ErrUnavailable, err)
}

// retryable says whether one more attempt on another connection makes sense at once: a pooled
// connection that the server had closed, or one that leads to a former master.
func retryable(err error) bool {
	if err == nil || errors.Is(err, redis.Nil) || errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return false
	}
	var reply redis.Error
	if errors.As(err, &reply) {
		return strings.HasPrefix(reply.Error(), "READONLY")
	}
	var timeout net.Error
	if errors.As(err, &timeout) && timeout.Timeout() {
		return false
	}
	return ran(err)
}
