package rehearse

import (
	"fmt"
	"slices"
	"sort"
	"time"
)

// maxFindings bounds the examples kept for each broken promise; the figures count all of them.
const maxFindings = 10

// checker joins a log with a snapshot. Each finding adds to one figure and tells one example.
type checker struct {
	log  *Log
	snap *Snapshot
	rep  *Report

	rows     map[string][]Row // by order id
	records  map[string][]Row
	accepted map[string]Attempt // order id → the attempt that was answered with it
}

// Check computes the figures of a rehearsal from what the clients were told and what the stores
// hold. It expects a quiet system: whatever is still on its way counts as a broken promise.
func Check(log *Log, snap *Snapshot) Report {
	c := &checker{log: log, snap: snap, rep: &Report{},
		rows: byOrder(snap.Rows), records: byOrder(snap.Records), accepted: map[string]Attempt{}}
	c.count()
	c.answers()
	c.refusals()
	c.twice()
	c.payments()
	c.letters()
	c.pools()
	c.users()
	c.stores()
	return *c.rep
}

func byOrder(list []Row) map[string][]Row {
	m := make(map[string][]Row, len(list))
	for _, r := range list {
		m[r.OrderID] = append(m[r.OrderID], r)
	}
	return m
}

func live(status string) bool {
	return status == "reserved" || status == "pending" || status == "paid"
}

func final(status string) bool {
	return status == "paid" || status == "cancelled" || status == "refunded" || status == "rejected"
}

func (c *checker) finding(figure *int, n int, format string, args ...any) {
	if n <= 0 {
		return
	}
	*figure += n
	if len(c.rep.Findings) < 4*maxFindings {
		c.rep.Findings = append(c.rep.Findings, fmt.Sprintf(format, args...))
	}
}

// count fills the figures that are no promise: what was answered and what became of it.
func (c *checker) count() {
	last := map[string]Attempt{}
	latencies := make([]time.Duration, 0, len(c.log.Attempts))
	for _, a := range c.log.Attempts {
		if a.Outcome == Accepted {
			if _, ok := c.accepted[a.OrderID]; !ok {
				c.accepted[a.OrderID] = a
			}
		}
		if a.Latency > 0 {
			latencies = append(latencies, a.Latency)
		}
		if was, ok := last[a.User]; !ok || a.At >= was.At {
			last[a.User] = a
		}
	}
	c.rep.Buyers = len(last)
	c.rep.Accepted = len(c.accepted)
	for _, a := range last {
		if a.Outcome == SoldOut {
			c.rep.SoldOut++
		}
	}
	c.rep.Persisted = len(c.snap.Rows)
	for _, r := range c.snap.Rows {
		switch {
		case r.Status == "paid":
			c.rep.Paid++
		case r.Status == "cancelled" && r.Reason == "payment_timeout":
			c.rep.Expired++
		case r.Status == "cancelled" || r.Status == "refunded":
			c.rep.Cancelled++
		case r.Status == "rejected":
			c.rep.Rejected++
		}
	}
	for _, l := range c.snap.Letters {
		c.rep.DeadLettered++
		if l.Replayed {
			c.rep.Replayed++
		}
	}
	slices.Sort(latencies)
	c.rep.P50 = percentile(latencies, 50)
	c.rep.P99 = percentile(latencies, 99)
	c.rep.AcceptedPerSecond = c.rate()
}

// rate is accepted orders per second while the first stock lasted: what expired and was sold again
// later came at the pace of the expiries, not at that of the system.
func (c *checker) rate() float64 {
	times := make([]time.Duration, 0, len(c.accepted))
	for _, a := range c.accepted {
		times = append(times, a.At)
	}
	slices.Sort(times)
	allocated := 0
	for _, s := range c.snap.Stock {
		allocated += s.Allocated
	}
	n := min(len(times), allocated)
	if n == 0 || times[n-1] <= 0 {
		return 0
	}
	return float64(n) / times[n-1].Seconds()
}

func percentile(sorted []time.Duration, p int) float64 {
	if len(sorted) == 0 {
		return 0
	}
	i := (len(sorted)*p+99)/100 - 1
	return float64(sorted[max(i, 0)].Microseconds()) / 1000
}

// answers: each 202 has exactly one row, in one final state.
func (c *checker) answers() {
	check := func(id, user string) {
		rows := c.rows[id]
		switch {
		case len(rows) == 0:
			c.finding(&c.rep.Lost, 1, "lost: order %s of %s was accepted and has no row", id, user)
			return
		case len(rows) > 1:
			return // counted as duplicated
		}
		r := rows[0]
		switch {
		case r.User != user:
			c.finding(&c.rep.Lost, 1, "lost: order %s was accepted for %s and belongs to %s", id, user, r.User)
		case !final(r.Status):
			c.finding(&c.rep.Lost, 1, "lost: order %s is still %s", id, r.Status)
		case r.Status == "rejected" && r.Reason == "":
			c.finding(&c.rep.Lost, 1, "lost: order %s was rejected without a reason", id)
		}
	}
	for id, a := range c.accepted {
		check(id, a.User)
	}
	for user, ids := range c.log.Found {
		for _, id := range ids {
			if _, ok := c.accepted[id]; !ok {
				check(id, user)
			}
		}
	}
}

// refusals: who was refused holds nothing. Buyers with an unknown outcome may hold an order that
// they were not told of; buyers without one may not.
func (c *checker) refusals() {
	unsure := map[string]bool{}
	told := map[string]bool{}
	for _, a := range unresolved(c.log.Attempts) {
		unsure[a.User] = true
	}
	for _, a := range c.log.Attempts {
		if a.Outcome == Accepted {
			told[a.OrderID] = true
		}
	}
	for _, ids := range c.log.Found {
		for _, id := range ids {
			told[id] = true
		}
	}
	seen := map[string]bool{}
	for _, list := range [][]Row{c.snap.Rows, c.snap.Records} {
		for _, r := range list {
			if told[r.OrderID] || unsure[r.User] || seen[r.OrderID] {
				continue
			}
			seen[r.OrderID] = true
			c.finding(&c.rep.Drift, max(r.Quantity, 1), "drift: order %s (%s, %s) exists and nobody was told of it", r.OrderID, r.User, r.Status)
		}
	}
}

// twice: one row per order, one order per idempotency key, one ledger entry per order and
// operation, one payment per transaction.
func (c *checker) twice() {
	for id, rows := range c.rows {
		c.finding(&c.rep.Duplicated, len(rows)-1, "duplicated: order %s has %d rows", id, len(rows))
	}
	type idem struct{ user, key string }
	orders := map[idem]map[string]bool{}
	note := func(user, key, id string) {
		if key == "" {
			return
		}
		k := idem{user, key}
		if orders[k] == nil {
			orders[k] = map[string]bool{}
		}
		orders[k][id] = true
	}
	for _, a := range c.log.Attempts {
		if a.Outcome == Accepted {
			note(a.User, a.Key, a.OrderID)
		}
	}
	for _, r := range c.snap.Rows {
		note(r.User, r.IdemKey, r.OrderID)
	}
	for _, r := range c.snap.Records {
		note(r.User, r.IdemKey, r.OrderID)
	}
	for k, ids := range orders {
		c.finding(&c.rep.Duplicated, len(ids)-1, "duplicated: key %s of %s made the orders %v", k.key, k.user, sorted(ids))
	}
	type step struct{ ref, operation string }
	steps := map[step]int{}
	for _, l := range c.snap.Ledger {
		steps[step{l.Ref, l.Operation}]++
	}
	for s, n := range steps {
		c.finding(&c.rep.Duplicated, n-1, "duplicated: ledger has %s of %s %d times", s.operation, s.ref, n)
	}
	transactions := map[string]int{}
	applied := map[string]int{}
	for _, p := range c.snap.Payments {
		transactions[p.Transaction]++
		if p.Status == "applied" {
			applied[p.OrderID]++
		}
	}
	for t, n := range transactions {
		c.finding(&c.rep.Duplicated, n-1, "duplicated: transaction %s is booked %d times", t, n)
	}
	for id, n := range applied {
		c.finding(&c.rep.Duplicated, n-1, "duplicated: order %s is paid %d times", id, n)
	}
}

func sorted(set map[string]bool) []string {
	out := make([]string, 0, len(set))
	for k := range set {
		out = append(out, k)
	}
	sort.Strings(out)
	return out
}

// payments: each callback answered 202 is booked, and either its order is paid or the money is
// marked to go back. No order is paid without money.
func (c *checker) payments() {
	booked := map[string]PaymentRow{}
	paidBy := map[string]bool{}
	for _, p := range c.snap.Payments {
		booked[p.Transaction] = p
		if p.Status == "applied" {
			paidBy[p.OrderID] = true
		}
	}
	seen := map[string]bool{}
	for _, p := range c.log.Payments {
		if !p.Accepted || seen[p.Transaction] {
			continue
		}
		seen[p.Transaction] = true
		b, ok := booked[p.Transaction]
		switch {
		case !ok:
			c.finding(&c.rep.Lost, 1, "lost: payment %s of order %s was accepted and is not booked", p.Transaction, p.OrderID)
		case b.OrderID != p.OrderID:
			c.finding(&c.rep.Lost, 1, "lost: payment %s of order %s is booked for %s", p.Transaction, p.OrderID, b.OrderID)
		case b.Status == "applied":
			rows := c.rows[p.OrderID]
			if len(rows) == 1 && rows[0].Status != "paid" && rows[0].Status != "refunded" {
				c.finding(&c.rep.Lost, 1, "lost: payment %s is applied and order %s is %s", p.Transaction, p.OrderID, rows[0].Status)
			}
		case b.Status == "refund_due" || b.Status == "settled":
		default:
			c.finding(&c.rep.Lost, 1, "lost: payment %s of order %s is neither applied nor due for refund (%s)", p.Transaction, p.OrderID, b.Status)
		}
	}
	for _, r := range c.snap.Rows {
		if r.Status == "paid" && !paidBy[r.OrderID] {
			c.finding(&c.rep.Drift, max(r.Quantity, 1), "drift: order %s is paid and no payment is applied to it", r.OrderID)
		}
	}
}

// letters: a broken message does not vanish; it lies in the dead letters, also after a replay.
func (c *checker) letters() {
	for _, id := range c.log.Poison {
		letter, ok := findLetter(c.snap.Letters, id)
		switch {
		case !ok:
			c.finding(&c.rep.Lost, 1, "lost: the broken message %s is not among the dead letters", id)
		case letter.State != "open":
			c.finding(&c.rep.Lost, 1, "lost: the broken message %s did not come back from its replay (%s)", id, letter.State)
		}
	}
}

// pools: units are conserved in each pool, in both stores, and nothing is sold twice.
func (c *checker) pools() {
	type sums struct{ rows, records, ledger int }
	by := map[PoolKey]*sums{}
	at := func(sku, pool string) *sums {
		k := PoolKey{sku, pool}
		if by[k] == nil {
			by[k] = &sums{}
		}
		return by[k]
	}
	for _, r := range c.snap.Rows {
		if live(r.Status) {
			at(r.SKU, r.Pool).rows += r.Quantity
		}
	}
	for _, r := range c.snap.Records {
		if live(r.Status) {
			at(r.SKU, r.Pool).records += r.Quantity
		}
	}
	for _, l := range c.snap.Ledger {
		at(l.SKU, l.Pool).ledger += l.Units
	}
	known := map[PoolKey]bool{}
	for _, s := range c.snap.Stock {
		k := PoolKey{s.SKU, s.Pool}
		known[k] = true
		sum := at(s.SKU, s.Pool)
		c.finding(&c.rep.Oversold, max(sum.rows, sum.records)-s.Allocated,
			"oversold: %s/%s has %d units allocated, %d live in MySQL, %d in Redis", s.SKU, s.Pool, s.Allocated, sum.rows, sum.records)
		c.finding(&c.rep.Oversold, -s.Available, "oversold: %s/%s has %d units available in MySQL", s.SKU, s.Pool, s.Available)
		c.finding(&c.rep.Drift, abs(s.Allocated-(s.Available+s.Withheld+sum.rows)),
			"drift: %s/%s in MySQL: %d allocated, but %d available + %d withheld + %d live or sold", s.SKU, s.Pool, s.Allocated, s.Available, s.Withheld, sum.rows)
		level, ok := c.snap.Levels[k]
		if !ok {
			c.finding(&c.rep.Drift, max(s.Available, 1), "drift: %s/%s has no level in Redis", s.SKU, s.Pool)
		} else {
			c.finding(&c.rep.Drift, abs(level-s.Available),
				"drift: %s/%s has %d units available in MySQL and %d on sale in Redis", s.SKU, s.Pool, s.Available, level)
			c.finding(&c.rep.Drift, abs(s.Allocated-(level+s.Withheld+sum.records)),
				"drift: %s/%s in Redis: %d allocated, but %d on sale + %d withheld + %d live or sold", s.SKU, s.Pool, s.Allocated, level, s.Withheld, sum.records)
			c.finding(&c.rep.Oversold, -level, "oversold: %s/%s has %d units on sale in Redis", s.SKU, s.Pool, level)
		}
		c.finding(&c.rep.Drift, abs(s.Live-sum.rows), "drift: %s/%s counts %d live units and its orders have %d", s.SKU, s.Pool, s.Live, sum.rows)
		c.finding(&c.rep.Drift, abs(s.Available-sum.ledger),
			"drift: %s/%s has %d units available and the ledger explains %d", s.SKU, s.Pool, s.Available, sum.ledger)
	}
	for k, sum := range by {
		if !known[k] && (sum.rows != 0 || sum.records != 0) {
			c.finding(&c.rep.Oversold, max(sum.rows, sum.records), "oversold: %s/%s is no pool of the sale and has live orders", k.SKU, k.Pool)
		}
	}
}

// users: nobody holds more than the limit, and each store's counter is the sum of its live orders.
func (c *checker) users() {
	sum := func(list []Row) map[string]int {
		m := map[string]int{}
		for _, r := range list {
			if live(r.Status) {
				m[r.User] += r.Quantity
			}
		}
		return m
	}
	rows, records := sum(c.snap.Rows), sum(c.snap.Records)
	for _, side := range []struct {
		store          string
		orders, counts map[string]int
	}{{"MySQL", rows, c.snap.Holdings}, {"Redis", records, c.snap.Held}} {
		users := map[string]bool{}
		for u := range side.orders {
			users[u] = true
		}
		for u := range side.counts {
			users[u] = true
		}
		for _, u := range sorted(users) {
			c.finding(&c.rep.Drift, abs(side.orders[u]-side.counts[u]),
				"drift: %s holds %d units by his orders in %s and %d by the counter", u, side.orders[u], side.store, side.counts[u])
		}
	}
	for u, n := range rows {
		c.finding(&c.rep.Oversold, max(n, records[u])-c.snap.PerUserLimit, "oversold: %s holds %d units, the limit is %d", u, max(n, records[u]), c.snap.PerUserLimit)
	}
	for u, n := range records {
		if _, ok := rows[u]; !ok {
			c.finding(&c.rep.Oversold, n-c.snap.PerUserLimit, "oversold: %s holds %d units, the limit is %d", u, n, c.snap.PerUserLimit)
		}
	}
}

// stores: what both hold of an order is the same, and nothing is left half-way.
func (c *checker) stores() {
	for id, rows := range c.rows {
		row := rows[0]
		records := c.records[id]
		if len(records) == 0 {
			if row.Status != "rejected" && row.Status != "cancelled" { // a tombstone needs no record
				c.finding(&c.rep.Drift, max(row.Quantity, 1), "drift: order %s is %s in MySQL and unknown in Redis", id, row.Status)
			}
			continue
		}
		rec := records[0]
		if rec.Status != row.Status || rec.User != row.User || rec.SKU != row.SKU || rec.Pool != row.Pool || rec.Quantity != row.Quantity {
			c.finding(&c.rep.Drift, max(row.Quantity, 1), "drift: order %s is %s (%s %s/%s ×%d) in MySQL and %s (%s %s/%s ×%d) in Redis",
				id, row.Status, row.User, row.SKU, row.Pool, row.Quantity, rec.Status, rec.User, rec.SKU, rec.Pool, rec.Quantity)
		}
	}
	for id, records := range c.records {
		if _, ok := c.rows[id]; !ok {
			if _, told := c.accepted[id]; !told { // else counted as lost
				c.finding(&c.rep.Drift, max(records[0].Quantity, 1), "drift: order %s is %s in Redis and unknown in MySQL", id, records[0].Status)
			}
		}
	}
	for _, id := range c.snap.Outbox {
		c.finding(&c.rep.Drift, 1, "drift: order %s still waits in the outbox", id)
	}
	for _, id := range c.snap.Parked {
		c.finding(&c.rep.Drift, 1, "drift: order %s is still parked", id)
	}
	for _, id := range c.snap.Compensations {
		c.finding(&c.rep.Drift, 1, "drift: a compensation for order %s is still open", id)
	}
}

func abs(n int) int {
	if n < 0 {
		return -n
	}
	return n
}
