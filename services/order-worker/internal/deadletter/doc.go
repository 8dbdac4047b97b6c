// Package deadletter drains seckill.dead into the table dead_letters and lets operators look at the
// letters, replay them and give them up.
//
// A letter is open, claimed by a replay job, sent (published again, not seen to have worked yet),
// resolved or discarded. It changes state by guarded steps only: whoever comes late finds another
// state and does nothing (R15).
//
// The drain writes the letter, commits, and looks at the order's row after that: whoever writes the row
// looks for letters after his own commit, so one of the two sees the other. A reservation that failed for
// good by its content gets a rejected row and its units back; one that failed for any other cause is
// parked, so that the relay does not publish it round and round. What the broker dead-lettered for its
// delivery count stays in the outbox: nothing is known against it.
//
// A replay is a job in MySQL: claim rows → publish with the same message id → confirm → unpark → sent. A
// job that was killed goes on where it was; what it published twice is a duplicate like any other.
package deadletter
