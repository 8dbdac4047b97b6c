package app

import (
	"context"
	"errors"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-json-experiment/json"

	"seckill/pkg/messaging"
)

// redisPatience is how long Redis may be away before the process is not ready (design §5).
const redisPatience = 5 * time.Second

// health decides readiness.
type health struct {
	redis interface{ Ping(context.Context) error }
	queue interface {
		State() messaging.State
		Check(ctx context.Context) error
	}

	draining atomic.Bool
	lastSeen atomic.Int64 // Unix nanoseconds of the last answer from Redis; 0 before the first
}

// run looks at Redis until ctx ends, and at the broker until its topology was looked at once: from
// then on the client does that by itself.
func (h *health) run(ctx context.Context) {
	var topology sync.WaitGroup
	defer topology.Wait()
	topology.Go(func() { h.checkTopology(ctx) })
	tick := time.NewTicker(500 * time.Millisecond)
	defer tick.Stop()
	for {
		ping, cancel := context.WithTimeout(ctx, time.Second)
		if h.redis.Ping(ping) == nil {
			h.lastSeen.Store(time.Now().UnixNano())
		}
		cancel()
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

func (h *health) checkTopology(ctx context.Context) {
	tick := time.NewTicker(500 * time.Millisecond)
	defer tick.Stop()
	for {
		check, cancel := context.WithTimeout(ctx, 10*time.Second)
		err := h.queue.Check(check)
		cancel()
		if err == nil || errors.Is(err, messaging.ErrTopology) {
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// status is the body of /readyz.
type status struct {
	Ready    bool   `json:"ready"`
	Reason   string `json:"reason,omitempty"`
	Redis    string `json:"redis"`
	Broker   string `json:"broker"`
	Topology string `json:"topology"`
}

// status says whether requests should be sent here. The broker being away or blocked never makes it
// red: the same broker serves every replica, and reserving goes on without it.
func (h *health) status(now time.Time) status {
	q := h.queue.State()
	s := status{Ready: true, Redis: "ok", Broker: "connected", Topology: string(q.Topology)}
	switch {
	case q.Blocked:
		s.Broker = "blocked"
	case !q.Connected:
		s.Broker = "disconnected"
	}
	last := h.lastSeen.Load()
	away := now.Sub(time.Unix(0, last))
	switch {
	case last == 0:
		s.Redis = "not reached yet"
	case away >= 2*time.Second:
		s.Redis = "away"
	}
	refuse := func(reason string) { s.Ready, s.Reason = false, reason }
	switch {
	case h.draining.Load():
		refuse("draining")
	case last == 0:
		refuse("starting")
	case away >= redisPatience:
		refuse("redis is away")
	case q.Topology == messaging.TopologyMissing || q.Topology == messaging.TopologyDifferent:
		refuse("broker topology is " + string(q.Topology))
	}
	return s
}

func (h *health) serve(w http.ResponseWriter, _ *http.Request) {
	s := h.status(time.Now())
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	if !s.Ready {
		w.WriteHeader(http.StatusServiceUnavailable)
	}
	body, err := json.Marshal(s)
	if err != nil {
		return
	}
	_, _ = w.Write(append(body, '\n'))
}
