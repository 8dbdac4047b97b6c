// Package alternatives holds the usual ways to sell a small stock to a crowd, each in its best plain
// form, behind the same HTTP call as this system, so that one harness can measure all of them:
//
//   - mutex: a counter in the process, the order written before the answer
//   - database: only the database, guarded by WHERE available >= n
//   - decr: Redis DECRBY, with INCRBY when it went below zero, then the database
//   - lua: stock and limit in one Redis script, then the database
//
// All of them check the same bearer token, sell at most one order to a user, and answer 202 only
// after the order's row is committed. What they do when they are killed, and when a second replica
// runs, is theirs: that is what the comparison is about.
package alternatives
