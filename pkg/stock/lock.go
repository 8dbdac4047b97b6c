package stock

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/bsm/redislock"
)

// ErrLocked: somebody else holds the lock.
var ErrLocked = errors.New("lock is held by another")

// ErrLockLost ends the context of a Hold whose lock could not be renewed in time.
var ErrLockLost = errors.New("lock was lost")

// Hold runs fn while holding the lock "seckill:lock:<what>", which only its holder can renew or
// release. The lock is renewed every third of ttl; when that fails for a whole ttl the context that fn
// got ends with the cause ErrLockLost. A lock is a courtesy, not a guarantee: a process that slept
// through it still runs, and only the fencing number stops it (see Fence). ErrLocked: fn did not run.
//
// The lock is given back on every path, errors and panics included.
func (c *Client) Hold(ctx context.Context, what string, ttl time.Duration, fn func(context.Context) error) (err error) {
	key := c.cfg.Prefix + "seckill:lock:" + what
	began := time.Now() // before it is asked for: Redis' ttl does not wait for our reading of the answer
	lock, err := redislock.Obtain(ctx, c.rdb, key, ttl, nil)
	if errors.Is(err, redislock.ErrNotObtained) {
		return fmt.Errorf("lock %s: %w", what, ErrLocked)
	}
	if err != nil {
		return fmt.Errorf("lock %s: %w", what, c.classify(err))
	}
	held, cancel := context.WithCancelCause(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		c.renew(held, lock, began.Add(ttl), ttl, cancel)
	}()
	defer func() {
		cancel(nil)
		<-done
		// The caller may have given up by now; the lock goes back all the same.
		rctx, stop := context.WithTimeout(context.WithoutCancel(ctx), c.cfg.DialTimeout+c.cfg.ReadTimeout)
		defer stop()
		if rerr := lock.Release(rctx); rerr != nil && !errors.Is(rerr, redislock.ErrLockNotHeld) {
			err = errors.Join(err, fmt.Errorf("release lock %s: %w", what, c.classify(rerr)))
		}
	}()
	return fn(held)
}

// renew believes in the lock until the given time unless it is renewed.
func (c *Client) renew(ctx context.Context, lock *redislock.Lock, until time.Time, ttl time.Duration, cancel context.CancelCauseFunc) {
	tick := time.NewTicker(ttl / 3)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		began := time.Now()
		err := lock.Refresh(ctx, ttl, nil)
		switch {
		case err == nil:
			until = began.Add(ttl)
		case errors.Is(err, redislock.ErrNotObtained), time.Now().After(until):
			cancel(ErrLockLost)
			return
		}
	}
}

// Locked tells whether anybody holds a lock now.
func (c *Client) Locked(ctx context.Context, what string) (bool, error) {
	n, err := c.rdb.Exists(ctx, c.cfg.Prefix+"seckill:lock:"+what).Result()
	if err != nil {
		return false, fmt.Errorf("look at lock %s: %w", what, c.classify(err))
	}
	return n > 0, nil
}
