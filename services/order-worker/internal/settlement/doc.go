// Package settlement ends sales (design §6): the end is recorded in MySQL (step 0), the end marker goes
// into every bucket (1), activity.ended into the delay queue (2); whoever consumes it takes the lock and
// a fencing number and waits until nothing is under way (3), takes back what was not paid in time (4),
// moves the rest of the pools to the inventory (5), cleans up in Redis (6) and makes the report final
// (7).
//
// Every step may be repeated and died in. What drives it is the row in MySQL: a scheduler publishes
// activity.ended again for an end that makes no progress, and each attempt does what is left to do.
// Nothing is removed from Redis before MySQL is settled.
package settlement
