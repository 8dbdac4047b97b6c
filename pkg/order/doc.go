// Package order holds what every part of the system agrees on about an order: its id, its states
// and the shapes of the identifiers and amounts around it. It does no I/O.
package order
