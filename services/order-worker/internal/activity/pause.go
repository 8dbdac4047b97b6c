package activity

import (
	"context"
	"database/sql"
	"errors"
	"fmt"

	"seckill/pkg/stock"
	"seckill/services/order-worker/internal/audit"
	"seckill/services/order-worker/internal/store"
)

// SetPaused stops or resumes a sale: first in MySQL, then in every bucket. changed is false when MySQL
// had it so already; the buckets are told all the same.
func (s *Service) SetPaused(ctx context.Context, id string, paused bool, by audit.Actor) (changed bool, err error) {
	verb := "resume"
	if paused {
		verb = "pause"
	}
	err = s.st.InTx(ctx, func(tx *store.Tx) error {
		changed = false
		var state string
		var now bool
		err := tx.QueryRowContext(ctx, "SELECT state, paused <> 0 FROM activities WHERE id = ? FOR UPDATE", id).Scan(&state, &now)
		switch {
		case errors.Is(err, sql.ErrNoRows):
			return ErrNotFound
		case err != nil:
			return fmt.Errorf("lock activity: %w", err)
		case state != store.ActivityDraft && state != store.ActivityWarmed:
			return fmt.Errorf("%w: it is %s", ErrState, state)
		}
		// A rebuild has stopped it and lets it go on by itself, unless somebody wants it paused.
		busy, err := store.Rebuilding(ctx, tx, id)
		switch {
		case err != nil:
			return err
		case paused:
			if _, err := tx.ExecContext(ctx, "UPDATE rebuilds SET resume = 0 WHERE activity_id = ?", id); err != nil {
				return fmt.Errorf("update rebuild: %w", err)
			}
		case busy:
			return fmt.Errorf("%w: a rebuild is under way, it goes on after that", ErrState)
		}
		if now == paused {
			return nil
		}
		if _, err := tx.ExecContext(ctx, "UPDATE activities SET paused = ?, updated_at = UTC_TIMESTAMP(6) WHERE id = ?", paused, id); err != nil {
			return fmt.Errorf("update activity: %w", err)
		}
		changed = true
		return audit.Write(ctx, tx, by, audit.Entry{
			Action: "activity." + verb, Subject: id, Result: "done", Before: map[string]bool{"paused": now}, After: map[string]bool{"paused": paused},
		})
	})
	if err != nil {
		return false, fmt.Errorf("%s activity %s: %w", verb, id, err)
	}
	err = s.PushPaused(ctx, id)
	if errors.Is(err, stock.ErrActivityNotFound) {
		// Redis has lost the sale, or a part of it: the rest has been told, and whatever brings the lost
		// part back asks MySQL first.
		s.log.WarnContext(ctx, "redis has lost a part of a sale that was told whether it is paused", "activity_id", id, "error", err)
		err = nil
	}
	return changed, err
}

// PushPaused tells every bucket what MySQL says, and looks again afterwards: somebody who pushed an
// older value meanwhile did so before his own second look, so the last push is the right one.
func (s *Service) PushPaused(ctx context.Context, id string) error {
	d, err := s.Load(ctx, id)
	if err != nil {
		return err
	}
	for {
		a, err := s.Outline(ctx, d)
		if err != nil {
			return err
		}
		if err := s.redis.SetPaused(ctx, a, d.Paused); err != nil {
			return fmt.Errorf("tell redis whether activity %s is paused: %w", id, err)
		}
		again, err := s.Load(ctx, id)
		if err != nil {
			return err
		}
		if again.Paused == d.Paused {
			return nil
		}
		d = again
	}
}
