package rebuild

import (
	"context"
	"fmt"
	"maps"
	"time"

	"seckill/pkg/messaging"
	"seckill/services/order-worker/internal/store"
)

// Watch lets a consumer's handler pass barriers: what it does not settle is not passed by a barrier either.
func Watch(st *store.Store, h messaging.Handler) messaging.Handler {
	return func(ctx context.Context, batch []messaging.Delivery) []messaging.Result {
		marks := map[int]mark{}
		for i, d := range batch {
			if d.Key != d.Queue {
				continue // the cheap look: it is made for every message
			}
			if token, round, ok := messaging.ReadBarrier(d); ok {
				marks[i] = mark{token: token, queue: d.Queue, round: round, consumer: d.Consumer}
			}
		}
		if len(marks) == 0 {
			return h(ctx, batch)
		}
		rest := make([]messaging.Delivery, 0, len(batch))
		for i, d := range batch {
			if _, ok := marks[i]; !ok {
				rest = append(rest, d)
			}
		}
		var inner []messaging.Result
		if len(rest) > 0 {
			if inner = h(ctx, rest); len(inner) != len(rest) {
				return inner // the consumer knows what to do with that
			}
		}
		var held error
		for _, r := range inner {
			if r.Hold != nil {
				held = r.Hold
			}
		}
		out := make([]messaging.Result, len(batch))
		for i := range batch {
			m, ok := marks[i]
			switch {
			case !ok:
				out[i], inner = inner[0], inner[1:]
			case held != nil:
				out[i].Hold = held
			default:
				out[i].After = func(ctx context.Context) error { return m.report(ctx, st) }
			}
		}
		return out
	}
}

// mark is a barrier that has come to a channel.
type mark struct {
	token, queue, consumer string
	round                  int
}

// report notes that the barrier was passed, if anybody still waits for it.
func (m mark) report(ctx context.Context, st *store.Store) error {
	_, err := st.SQL().ExecContext(ctx, "INSERT INTO rebuild_barriers (token, queue, round, consumer, at) "+
		"SELECT token, ?, ?, ?, UTC_TIMESTAMP(6) FROM rebuilds WHERE token = ? AND state = ? LIMIT 1 ON DUPLICATE KEY UPDATE at = VALUES(at)",
		m.queue, m.round, m.consumer, m.token, store.RebuildRunning)
	if err != nil {
		return fmt.Errorf("report barrier of %s: %w", m.queue, err)
	}
	return nil
}

// pass sends barriers through a queue until everything that was in it before has been handled (see the
// package's comment).
func (a *attempt) pass(ctx context.Context, queue string) error {
	var before map[string]bool
	for {
		a.round++
		reported, err := a.oneRound(ctx, queue)
		if err != nil {
			return err
		}
		now, err := a.s.broker.Inspect(ctx, queue)
		if err != nil {
			return fmt.Errorf("pass %s: %w", queue, err)
		}
		alone := now.Consumers == len(reported)
		if alone && maps.Equal(before, reported) {
			return nil
		}
		before = nil
		if alone {
			before = reported
		}
	}
}

// oneRound publishes barriers until as many channels have reported as consume.
func (a *attempt) oneRound(ctx context.Context, queue string) (map[string]bool, error) {
	sent := 0
	for {
		st, err := a.s.broker.Inspect(ctx, queue)
		if err != nil {
			return nil, fmt.Errorf("pass %s: %w", queue, err)
		}
		seen, err := a.reports(ctx, queue)
		if err != nil {
			return nil, err
		}
		if st.Consumers > 0 && len(seen) >= st.Consumers {
			return seen, nil
		}
		if st.Consumers == 0 {
			a.say(ctx, "%s has no consumer: start a worker with that role", queue)
		} else {
			a.say(ctx, "%s: %d messages ready, %d of %d channels have handled theirs", queue, st.Ready, len(seen), st.Consumers)
		}
		// Some channel may get two of them; what lies in the queue already will be handed out first.
		if missing := st.Consumers - len(seen); missing > 0 && st.Ready < 2*st.Consumers || sent == 0 {
			msgs := make([]messaging.Message, max(missing, 1))
			for i := range msgs {
				msgs[i] = messaging.Barrier(queue, a.token, a.round, sent+i)
			}
			for _, err := range a.s.broker.Publish(ctx, "", msgs...) {
				if err != nil {
					return nil, fmt.Errorf("publish barrier to %s: %w", queue, err)
				}
			}
			sent += len(msgs)
		}
		if err := sleep(ctx, a.s.cfg.Poll); err != nil {
			return nil, err
		}
	}
}

func (a *attempt) reports(ctx context.Context, queue string) (map[string]bool, error) {
	rows, err := a.s.st.SQL().QueryContext(ctx, "SELECT consumer FROM rebuild_barriers WHERE token = ? AND queue = ? AND round = ?", a.token, queue, a.round)
	if err != nil {
		return nil, fmt.Errorf("read barriers of %s: %w", queue, err)
	}
	defer func() { _ = rows.Close() }()
	seen := map[string]bool{}
	for rows.Next() {
		var c string
		if err := rows.Scan(&c); err != nil {
			return nil, fmt.Errorf("read barriers of %s: %w", queue, err)
		}
		seen[c] = true
	}
	if err := rows.Err(); err != nil {
		return nil, fmt.Errorf("read barriers of %s: %w", queue, err)
	}
	return seen, nil
}

// drain lets everything that was published so far reach MySQL.
func (a *attempt) drain(ctx context.Context) error {
	for {
		// The dead letters last: what the handlers gave up lies there.
		for _, q := range []string{messaging.QueueOrders, messaging.QueuePayments, messaging.QueueRollbacks, messaging.QueueDead} {
			if err := a.pass(ctx, q); err != nil {
				return err
			}
		}
		n, err := a.publishRest(ctx)
		if err != nil || n == 0 {
			return err
		}
		a.say(ctx, "%d reservations of which only redis knew are on their way", n)
	}
}

func sleep(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return fmt.Errorf("rebuild: %w", ctx.Err())
	case <-t.C:
		return nil
	}
}
