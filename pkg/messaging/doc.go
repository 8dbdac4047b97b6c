// Package messaging is all of AMQP: the topology, the connection that comes back, a publisher whose
// unknown outcomes never count as published, and a consumer in which only the library acks.
//
// It does not know what an order is beyond the encoding of its events (events.go).
//
// A process makes one Client:
//
//	c, err := messaging.New(messaging.Config{URL: url}, log, registerer) // no I/O
//	c.Start(ctx)                                                        // connects in the background, for ever
//	defer c.Close(stopCtx)
//	err = c.Declare(ctx)                                                // the worker; order-api calls Check
//
// Publishing never waits for the network. What Pending.Wait gives is the whole truth: nil is confirmed
// and routed; everything else is to be published again with the same id, later.
//
//	p := c.Send(ctx, messaging.ExchangeEvents, messaging.OrderReserved(orders))
//	if err := p.Wait(ctx); err != nil { ... } // ErrReturned, ErrNacked, ErrBlocked, ErrUnknownOutcome, ...
//
// A handler says what became of each delivery; retries and dead letters are copies that are confirmed
// before the original is acknowledged, so that nothing is lost between the two, at the price of a
// duplicate when the process dies there:
//
//	err = c.Consume(ctx, messaging.ConsumerConfig{Queue: messaging.QueueOrders, BatchOrders: 256},
//		func(ctx context.Context, batch []messaging.Delivery) []messaging.Result { ... })
package messaging
