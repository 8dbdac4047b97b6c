package rehearse

import (
	"sync"
	"time"
)

// Outcome is how one reservation attempt ended, as the client saw it.
type Outcome string

// Outcomes of an attempt.
const (
	Accepted Outcome = "accepted"      // 202 with an order id
	SoldOut  Outcome = "sold_out"      // 409 sold_out
	Limited  Outcome = "limit_reached" // 409 limit_reached
	Refused  Outcome = "refused"       // any other definite refusal: nothing may be held
	Unknown  Outcome = "unknown"       // no answer, or one that says it does not know
)

// Attempt is one POST of a buyer.
type Attempt struct {
	User    string
	Key     string // idempotency key, empty if none was sent
	Outcome Outcome
	OrderID string        // with Accepted
	Code    string        // problem code, or what went wrong
	At      time.Duration // when the answer came, since the crowd started
	Latency time.Duration // zero if there was no answer
}

// Payment is one callback, with all its retries.
type Payment struct {
	Transaction string
	OrderID     string
	Accepted    bool // answered 202 at least once
}

// Cancel is one DELETE.
type Cancel struct {
	OrderID  string
	Accepted bool
}

// Log is everything the client saw.
type Log struct {
	Attempts []Attempt
	Payments []Payment
	Cancels  []Cancel
	// Found are orders that `mine` named to a buyer whose answer had got lost: user → order ids.
	Found map[string][]string
	// Poison are the message ids of the broken messages that were put among the good ones.
	Poison []string
	// Crowd is how long the crowd took.
	Crowd time.Duration

	mu sync.Mutex
}

// unresolved lists the attempts whose outcome stayed unknown: no later answer for the same
// idempotency key named the order.
func unresolved(list []Attempt) []Attempt {
	type idem struct{ user, key string }
	told := map[idem]bool{}
	for _, a := range list {
		if a.Outcome == Accepted && a.Key != "" {
			told[idem{a.User, a.Key}] = true
		}
	}
	var out []Attempt
	for _, a := range list {
		if a.Outcome == Unknown && !told[idem{a.User, a.Key}] {
			out = append(out, a)
		}
	}
	return out
}

func (l *Log) attempts(list []Attempt) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.Attempts = append(l.Attempts, list...)
}

func (l *Log) payment(p Payment) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.Payments = append(l.Payments, p)
}

func (l *Log) cancel(c Cancel) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.Cancels = append(l.Cancels, c)
}

func (l *Log) found(user string, ids []string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.Found == nil {
		l.Found = map[string][]string{}
	}
	l.Found[user] = append(l.Found[user], ids...)
}
