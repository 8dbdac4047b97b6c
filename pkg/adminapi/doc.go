// Package adminapi is the wire form of the admin API: what order-worker serves under /admin/v1 and
// what seckillctl and other operator tools send and receive. Types only, no I/O.
//
// Times are UTC in RFC 3339; amounts are integers in minor units. Errors are RFC 9457 problems
// (Problem) with a stable code.
package adminapi
