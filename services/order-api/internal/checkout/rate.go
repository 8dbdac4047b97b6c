package checkout

import (
	"sync"
	"time"
)

// maxRatedUsers bounds the memory of one window. Beyond it users are let through: the bound is there
// to protect Redis from a few clients, not to refuse a crowd.
const maxRatedUsers = 100_000

// userRate counts each user's requests in windows of one second.
type userRate struct {
	limit  int
	mu     sync.Mutex
	window int64
	counts map[string]int
}

func newUserRate(limit int) *userRate {
	return &userRate{limit: limit, counts: make(map[string]int)}
}

func (r *userRate) allow(user string) bool {
	if r.limit <= 0 {
		return true
	}
	window := time.Now().Unix()
	r.mu.Lock()
	defer r.mu.Unlock()
	if window != r.window {
		r.window = window
		clear(r.counts)
	}
	n, known := r.counts[user]
	if !known && len(r.counts) >= maxRatedUsers {
		return true
	}
	r.counts[user] = n + 1
	return n < r.limit
}
