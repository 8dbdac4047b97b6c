package app

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"seckill/pkg/lifecycle"
	"seckill/pkg/messaging"
)

// redisPatience is how long Redis may be away before the process is not ready (design §5).
const redisPatience = 5 * time.Second

// health watches the stores for readiness. The broker being away or blocked never makes the process
// not ready: the same broker serves every replica, and reserving goes on without it.
type health struct {
	redis interface{ Ping(context.Context) error }
	queue interface {
		State() messaging.State
		Check(ctx context.Context) error
	}
	ready    *lifecycle.Readiness
	lastSeen atomic.Int64 // Unix nanoseconds of the last answer from Redis; 0 before the first
}

// run looks at Redis until ctx ends, and at the broker until its topology was looked at once: from
// then on the client does that by itself. The start is over with Redis' first answer.
func (h *health) run(ctx context.Context) {
	h.ready.Add("redis", func(context.Context) lifecycle.Check { return h.redisCheck(time.Now()) })
	h.ready.Add("broker", func(context.Context) lifecycle.Check { return brokerCheck(h.queue.State()) })
	h.ready.Add("topology", func(context.Context) lifecycle.Check { return topologyCheck(h.queue.State()) })
	var topology sync.WaitGroup
	defer topology.Wait()
	topology.Go(func() { h.checkTopology(ctx) })
	tick := time.NewTicker(500 * time.Millisecond)
	defer tick.Stop()
	for {
		ping, cancel := context.WithTimeout(ctx, time.Second)
		if h.redis.Ping(ping) == nil {
			h.lastSeen.Store(time.Now().UnixNano())
			h.ready.SetReady()
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

func (h *health) redisCheck(now time.Time) lifecycle.Check {
	last := h.lastSeen.Load()
	c := lifecycle.Check{OK: true, Required: true, Detail: "ok"}
	switch away := now.Sub(time.Unix(0, last)); {
	case last == 0:
		c.OK, c.Detail = false, "not reached yet"
	case away >= redisPatience:
		c.OK, c.Detail = false, "away"
	case away >= 2*time.Second:
		c.Detail = "does not answer"
	}
	return c
}

func brokerCheck(s messaging.State) lifecycle.Check {
	switch {
	case s.Blocked:
		return lifecycle.Check{Detail: "blocked: " + s.BlockedReason}
	case !s.Connected:
		return lifecycle.Check{Detail: "disconnected"}
	}
	return lifecycle.Check{OK: true, Detail: "connected"}
}

func topologyCheck(s messaging.State) lifecycle.Check {
	known := s.Topology == messaging.TopologyMissing || s.Topology == messaging.TopologyDifferent
	c := lifecycle.Check{OK: !known, Required: true, Detail: string(s.Topology)}
	if s.TopologyError != nil {
		c.Detail += ": " + s.TopologyError.Error()
	}
	return c
}
