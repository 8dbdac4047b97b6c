// Package stock is all of Redis: it reserves, confirms and releases units with one script each,
// and knows the life of an activity there (announce, warm, pause, add, end, clean up, repair, rebuild).
//
//	c, err := stock.New(stock.Config{Addrs: []string{"127.0.0.1:6379"}}, log, registry)
//	…
//	got, err := c.Reserve(ctx, stock.Reservation{
//		ID: id, User: "u-1", SKU: "sku-1", Region: "beijing",
//		Pools: a.PoolsFor("sku-1", "beijing"), Quantity: 1,
//	})
//	var limit *stock.LimitError
//	switch {
//	case err == nil: // got.Replay tells an earlier answer from a new one
//	case errors.Is(err, stock.ErrSoldOut), errors.As(err, &limit): // nothing was taken
//	case errors.Is(err, stock.ErrUnknownOutcome): // ask again with the same id
//	}
//
// # Keys and slots
//
// Every key that one script touches carries the same hash tag {activity:bucket}; keys.go builds them
// all. A user's bucket is order.Bucket of his id, and an order id names its bucket.
//
// # Who waits for what
//
// Calls do not own a connection. They are queued, and a fixed number of flushers sends what waits, up
// to PipelineSize commands in one round trip; an idle flusher takes a call at once, so nobody waits for
// a batch to fill. In a crowd of reservations pipelines start PipelinePace apart. Each call gets its own
// answer and its own error. A caller whose context ends leaves: with ErrUnavailable if his command was
// not sent yet (it never will be), else with ErrUnknownOutcome.
//
// # Errors
//
// ErrUnavailable is a promise: the script did not run. Scripts carry a shebang, so that a Redis that is
// full, read-only, loading or without its replicas refuses them before their first line. What may have
// run is ErrUnknownOutcome; every script is idempotent, so the answer is to call again. In cluster mode
// the library may have tried before it reports a refusal, so there every refusal counts as unknown.
// ErrCorrupt means that a stored value has the wrong type or shape; nothing was written.
package stock
