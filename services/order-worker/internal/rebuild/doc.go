// Package rebuild brings a sale that Redis has lost back from MySQL (R10), while nothing is lost, sold
// twice or given out twice.
//
// What a Redis that is empty cannot tell any more is what has not reached MySQL yet: reservations in
// queues, in the hands of consumers, in dead letters. Counting the units of MySQL alone would sell theirs
// again. So a rebuild goes
//
//	pause   The sale is paused in MySQL, and in Redis where that still knows it (a cold one refuses by
//	        itself). Then it waits longer than the api's publish deadline: what an api holds in its memory
//	        is published after that, or never.
//	drain   Barriers go through the work queues, then through the queue of dead letters, into which those
//	        before may have written. What they prove is below. Then every live record that Redis still
//	        has must have a row or a dead letter; one that has neither is published, and the drain is done
//	        again.
//	close   A number is taken, as for a warm-up. All buckets are closed under it, and emptied.
//	write   One transaction holds the locks of the activity, of its pools and of its open dead letters. It
//	        raises the epoch, reads what is available, and writes Redis: stock, records with limits and
//	        idempotency keys, qualifications. Units of orders that lie in dead letters and have no row are
//	        not on sale: these orders become records, too, parked while their letter is open. The commit
//	        makes the number the one whose stock is sold.
//	open    Records follow what rows have become since they were read. The buckets are opened, both
//	        stores are compared once, and the sale goes on unless it was paused before.
//
// # Barriers
//
// A barrier is a message straight into a queue. A worker takes no batch in hand before all of the last one
// is acknowledged, so a channel that handles a barrier has handled all that was delivered to it before. One
// channel says nothing of the others. In each round as many barriers are published as there are channels
// that consume, and more, until so many different channels have reported; a queue serves them in turn. A
// round says nothing of a channel that died meanwhile, whose deliveries went back to the queue. So the drain
// is over when two rounds in a row were reported by the same channels, and the broker counts no others: all
// of them lived from the first round to the second, so between the rounds nobody but them had anything in
// hand, what had been given back was ready, and what was ready then was handed out before any barrier of the
// second round. (What is left is a channel that comes and dies within one round with messages of this sale
// in hand, and the copy of an order that was held for ten minutes and waits in a delay queue. They are late
// orders, below.)
//
// # Late orders
//
// Nothing rests on the drain but that no buyer is disappointed. An order that is written after the rebuild
// read MySQL takes its unit from the pool's row, guarded as always: no unit is sold twice. Redis has no record
// of it, and one unit too many on sale; the comparison restores the first and takes the second, now or at its
// next round. If that unit was sold before, the guard rejects the later order, reports drift, and tells its
// buyer why (R7). An order of an older epoch is never compared with a counter: it is a row, or it is not.
//
// What commits while the transaction reads cannot be counted twice. Units leave a pool, or come back to it,
// under its row's lock: either before, then the rows that are read say so, or after, then Redis is told after
// it was written. A release that was owed finds a record in its final state and gives nothing; a payment or a
// tombstone that needs no pool is found by the step "open". Additions of stock (R6) that the amounts hold are
// known to the new buckets by their operation ids, whoever tells of them later.
//
// # Killed anywhere
//
// The rebuild is a row in MySQL, and an attempt a walk through all steps, under a lock that goes with its
// process. Whoever finds a running rebuild and no lock begins again: closed buckets under another number,
// an old epoch. Only after the commit is there nothing to be done again but the last step, which the
// background loop that opens buckets would do as well. A process that lost its lock and does not know it has
// an older number: the transaction refuses it, and so do the scripts.
package rebuild
