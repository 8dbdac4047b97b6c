// Package checkout is the buying path of order-api: it reserves units in Redis, remembers activities
// and what is sold out, hands accepted orders over to the publisher, and asks for cancels and
// payments through the broker.
//
// Reserve waits for Redis alone (P5). What happens to the order's message afterwards is never the
// buyer's matter: the outbox entry written by the same script stays until the worker has committed
// the order, so a hand-over that does not fit, fails or ends unknown is published by the relay.
//
//	c, err := checkout.New(checkout.Config{}, stockClient, messagingClient, log, registry)
//	go c.Run(ctx)                       // background refresh and publisher, until ctx ends
//	got, err := c.Reserve(ctx, checkout.Request{Activity: "spring", User: "u1", SKU: "mug", Quantity: 1, Region: "national"})
package checkout
