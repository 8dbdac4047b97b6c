// Package observability is what a program shows of itself: its log, its metrics, its health, and
// the trace context that follows an order from the buyer's request to the database row.
package observability
