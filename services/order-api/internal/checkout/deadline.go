package checkout

import (
	"context"
	"sync/atomic"
	"time"
)

// deadlines gives contexts that end after a fixed time, a little late: calls that begin within one
// slack share a context. A timer and a context for each reservation were a fifth of what its handler cost.
type deadlines struct {
	after time.Duration
	last  atomic.Pointer[deadline]
}

type deadline struct {
	ctx    context.Context //nolint:containedctx // it is what is shared
	cancel context.CancelFunc
	until  time.Time // no call that begins later may have it
}

// next returns a context that ends between after and after+slack from now. It outlives the caller's
// own context, and nobody cancels it: its timer frees it.
func (d *deadlines) next() context.Context {
	const slack = 10 * time.Millisecond
	now := time.Now()
	last := d.last.Load()
	if last != nil && now.Before(last.until) {
		return last.ctx
	}
	fresh := &deadline{until: now.Add(slack)}
	fresh.ctx, fresh.cancel = context.WithTimeout(context.Background(), d.after+slack) //nolint:gosec // its timer ends it; others may still use it
	d.last.CompareAndSwap(last, fresh)                                                 // whoever loses has a context of his own
	return fresh.ctx
}
