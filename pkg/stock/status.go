package stock

import (
	"context"
	"errors"
	"fmt"
	"strconv"

	"seckill/pkg/order"
)

// chunk bounds how many orders one script call handles: some 15 µs each (measured, release), far
// below the 10 ms that no script may exceed.
const chunk = 32

// group splits indexes of orders by bucket into chunks.
func group(n int, id func(int) order.ID) [][]int {
	type home struct {
		activity string
		bucket   int
	}
	open := make(map[home]int)
	var out [][]int
	for i := range n {
		o := id(i)
		h := home{o.Activity, o.Bucket}
		g, ok := open[h]
		if !ok || len(out[g]) == chunk {
			g = len(out)
			out = append(out, nil)
			open[h] = g
		}
		out[g] = append(out[g], i)
	}
	return out
}

var outcomes = map[string]Outcome{
	"applied": Applied, "already": Already, "no_record": NoRecord, "no_stock": NoStockKey, "mismatch": Mismatch,
}

// Confirm moves records forward and takes the orders out of the outbox and the parked set. One
// script call per bucket and chunk, all in one pipeline; it may be repeated at will.
//
// outcomes[i] belongs to cs[i] and is 0 for an order that failed; the error joins what failed.
func (c *Client) Confirm(ctx context.Context, cs []Confirmation) ([]Outcome, error) {
	to := make([]string, len(cs))
	for i, x := range cs {
		if x.To != order.Pending && x.To != order.Paid {
			return nil, fmt.Errorf("confirm order %s: %w: to %q", x.ID, ErrInvalid, x.To)
		}
		to[i], _ = statusCode(x.To)
	}
	groups := group(len(cs), func(i int) order.ID { return cs[i].ID })
	calls := make([]*scriptCmd, len(groups))
	for g, idx := range groups {
		k := c.keys(cs[idx[0]].ID.Activity, cs[idx[0]].ID.Bucket)
		keys := append(make([]string, 0, 3+len(idx)), k.activity(), k.outbox(), k.parked())
		args := make([]string, 0, 2*len(idx))
		for _, i := range idx {
			keys = append(keys, k.order(cs[i].ID))
			args = append(args, cs[i].ID.ULID, to[i])
		}
		calls[g] = c.scripts.confirm.call(keys, args...)
	}
	return c.outcomes(ctx, "confirm", len(cs), groups, calls, func(i int) order.ID { return cs[i].ID })
}

// Release gives units, limit and outbox entry back. One script call per bucket and chunk, all in one
// pipeline; it may be repeated at will: only a live record gives anything back, once.
//
// outcomes[i] belongs to rs[i] and is 0 for an order that failed; the error joins what failed.
// NoStockKey is no error here: it wrote nothing and has to be tried again later.
func (c *Client) Release(ctx context.Context, rs []Release) ([]Outcome, error) {
	to := make([]string, len(rs))
	for i, x := range rs {
		if !x.To.Final() {
			return nil, fmt.Errorf("release order %s: %w: to %q", x.ID, ErrInvalid, x.To)
		}
		if !order.ValidUserID(x.User) || !order.ValidSKUID(x.SKU) || !order.ValidPool(x.Pool) || x.Quantity < 1 || x.Quantity > order.MaxQuantity {
			return nil, fmt.Errorf("release order %s: %w: content", x.ID, ErrInvalid)
		}
		to[i], _ = statusCode(x.To)
	}
	groups := group(len(rs), func(i int) order.ID { return rs[i].ID })
	calls := make([]*scriptCmd, len(groups))
	for g, idx := range groups {
		k := c.keys(rs[idx[0]].ID.Activity, rs[idx[0]].ID.Bucket)
		keys := append(make([]string, 0, 3+3*len(idx)), k.activity(), k.outbox(), k.parked())
		args := make([]string, 0, 7*len(idx))
		for _, i := range idx {
			r := rs[i]
			keys = append(keys, k.order(r.ID), k.limit(r.User), k.stock(r.SKU, r.Pool))
			args = append(args, r.ID.ULID, content(r.User, r.SKU, r.Pool, r.Quantity), strconv.Itoa(r.Quantity),
				to[i], r.Reason, withhold(r), flag(r.RefundDue))
		}
		calls[g] = c.scripts.release.call(keys, args...)
	}
	return c.outcomes(ctx, "release", len(rs), groups, calls, func(i int) order.ID { return rs[i].ID })
}

func withhold(r Release) string {
	if r.Over {
		return "2"
	}
	return flag(r.Withhold)
}

func flag(b bool) string {
	if b {
		return "1"
	}
	return "0"
}

func (c *Client) outcomes(ctx context.Context, what string, n int, groups [][]int, calls []*scriptCmd, id func(int) order.ID) ([]Outcome, error) {
	out := make([]Outcome, n)
	var failed failures
	for g, a := range c.submitEach(ctx, calls, func(g int) int { return len(groups[g]) }) {
		reply, err := a.reply, a.err
		switch {
		case err != nil:
		case reply[0] == "bad_key":
			err = corrupt(reply)
		case len(reply) != len(groups[g]):
			err = unknownCode(what, reply)
		}
		if err != nil {
			failed.add(fmt.Errorf("%s order %s: %w", what, id(groups[g][0]), err), len(groups[g]))
			continue
		}
		for j, i := range groups[g] {
			o, ok := outcomes[reply[j]]
			switch {
			case ok:
				out[i] = o
			case reply[j] == "corrupt":
				failed.add(fmt.Errorf("%s order %s: %w", what, id(i), ErrCorrupt), 1)
			default:
				failed.add(fmt.Errorf("%s order %s: %w", what, id(i), unknownCode(what, reply[j:])), 1)
			}
		}
	}
	return out, failed.join()
}

// failures joins the errors of many orders: one of each kind, and how many there were.
type failures struct {
	first [4]error
	count [4]int
}

func (f *failures) add(err error, orders int) {
	kind := 0
	for i, k := range []error{ErrUnavailable, ErrUnknownOutcome, ErrCorrupt} {
		if errors.Is(err, k) {
			kind = i + 1
		}
	}
	if f.first[kind] == nil {
		f.first[kind] = err
	}
	f.count[kind] += orders
}

func (f *failures) join() error {
	var errs []error
	for i, err := range f.first {
		switch {
		case err == nil:
		case f.count[i] > 1:
			errs = append(errs, fmt.Errorf("%w (one of %d)", err, f.count[i]))
		default:
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// Park takes orders out of the relay's sight while their message lies in the dead letters. An order
// that is not reserved any more only leaves the outbox.
func (c *Client) Park(ctx context.Context, ids []order.ID) error {
	return c.move(ctx, "park", c.scripts.park, ids)
}

// Unpark puts parked orders back into the outbox.
func (c *Client) Unpark(ctx context.Context, ids []order.ID) error {
	return c.move(ctx, "unpark", c.scripts.unpark, ids)
}

func (c *Client) move(ctx context.Context, what string, s script, ids []order.ID) error {
	if len(ids) == 0 {
		return nil
	}
	groups := group(len(ids), func(i int) order.ID { return ids[i] })
	calls := make([]*scriptCmd, len(groups))
	for g, idx := range groups {
		k := c.keys(ids[idx[0]].Activity, ids[idx[0]].Bucket)
		keys := append(make([]string, 0, 2+len(idx)), k.outbox(), k.parked())
		args := make([]string, 0, len(idx))
		for _, i := range idx {
			keys = append(keys, k.order(ids[i]))
			args = append(args, ids[i].ULID)
		}
		calls[g] = s.call(keys, args...)
	}
	return c.runAll(ctx, what, calls, nil)
}

// runAll runs calls that answer {ok} or a code; meaning maps the other codes to errors (nil for a
// code that is fine too).
func (c *Client) runAll(ctx context.Context, what string, calls []*scriptCmd, meaning map[string]error) error {
	_, err := c.askAll(ctx, what, calls, meaning)
	return err
}

// askAll is runAll, and gives the code that each call answered, "" for one without an answer.
func (c *Client) askAll(ctx context.Context, what string, calls []*scriptCmd, meaning map[string]error) ([]string, error) {
	codes := make([]string, len(calls))
	var failed failures
	for i, a := range c.submitEach(ctx, calls, func(int) int { return chunk }) {
		err := a.err
		if err == nil {
			codes[i] = a.reply[0]
			err = codeError(what, a.reply, meaning)
		}
		if err != nil {
			failed.add(fmt.Errorf("%s: %w", what, err), 1)
		}
	}
	return codes, failed.join()
}

func codeError(what string, reply []string, meaning map[string]error) error {
	switch reply[0] {
	case "ok":
		return nil
	case "corrupt":
		return corrupt(reply)
	}
	if err, ok := meaning[reply[0]]; ok {
		return err
	}
	return unknownCode(what, reply)
}

// MarkPaying notes that money for an order has come and is on its way to MySQL. An order that Redis does
// not know, or that waits for no money any more, is left alone without an error.
func (c *Client) MarkPaying(ctx context.Context, id order.ID) error {
	k := c.keys(id.Activity, id.Bucket)
	call := c.scripts.paying.call([]string{k.order(id)})
	return c.runAll(ctx, "note payment of order "+id.String(), []*scriptCmd{call},
		map[string]error{"applied": nil, "already": nil, "no_record": nil})
}

// MarkRefundDue marks an order's record or receipt: money arrived that has to go back. An order that
// Redis does not know is left alone without an error: MySQL holds what is due.
func (c *Client) MarkRefundDue(ctx context.Context, id order.ID) error {
	return c.refundDue(ctx, id, true)
}

// ClearRefundDue takes the mark off: the money has been sent back.
func (c *Client) ClearRefundDue(ctx context.Context, id order.ID) error {
	return c.refundDue(ctx, id, false)
}

func (c *Client) refundDue(ctx context.Context, id order.ID, due bool) error {
	k := c.keys(id.Activity, id.Bucket)
	call := c.scripts.refundDue.call([]string{k.activity(), k.order(id), k.receipt(id)}, flag(due))
	return c.runAll(ctx, "mark refund due of order "+id.String(), []*scriptCmd{call},
		map[string]error{"applied": nil, "already": nil, "no_record": nil})
}

// RefundReceipt moves the receipt of a paid order to refunded, and notes that its money has to go back:
// the order was refunded after its sale was settled, when there is no record any more to release. Without
// a receipt there is nothing to do, and no error.
func (c *Client) RefundReceipt(ctx context.Context, id order.ID, reason string) error {
	k := c.keys(id.Activity, id.Bucket)
	call := c.scripts.refundReceipt.call([]string{k.receipt(id)}, reason)
	return c.runAll(ctx, "refund receipt of order "+id.String(), []*scriptCmd{call},
		map[string]error{"applied": nil, "already": nil, "no_record": nil})
}
