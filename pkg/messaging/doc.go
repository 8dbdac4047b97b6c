// Package messaging is all of AMQP: the topology, the connection that comes back, a publisher whose
// unknown outcomes never count as published, and a consumer in which only the library acks.
//
// It does not know what an order is beyond the encoding of its events (events.go).
package messaging
