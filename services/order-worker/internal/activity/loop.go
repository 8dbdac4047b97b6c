package activity

import (
	"context"
	"errors"
	"fmt"
	"time"

	"seckill/pkg/stock"
	"seckill/services/order-worker/internal/audit"
	"seckill/services/order-worker/internal/store"
)

const (
	pageSize = 200
	// saleTimeout bounds what a round does for one sale: one that is locked, by a rebuild or by a session
	// that somebody has forgotten, must not keep the others from being warmed or ended.
	saleTimeout = 10 * time.Second
)

// Run announces again and again what Redis does not know, opens what a dead warm-up left closed and
// tells buckets that missed it whether the sale is paused, until ctx ends.
func (s *Service) Run(ctx context.Context) {
	seen := map[string]time.Time{} // sales looked after by this process, by the time of their last change
	tick := time.NewTicker(s.cfg.Interval)
	defer tick.Stop()
	for {
		if err := s.sweep(ctx, seen); err != nil && ctx.Err() == nil {
			s.log.WarnContext(ctx, "announcing activities failed, trying again", "error", err)
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

func (s *Service) sweep(ctx context.Context, seen map[string]time.Time) error {
	var now time.Time
	err := Bounded(ctx, func(ctx context.Context) (err error) {
		now, err = s.st.Now(ctx)
		return err
	})
	if err != nil {
		return err
	}
	cold := 0
	var failed []error
	for after := ""; ; {
		var page []*Details
		err := Bounded(ctx, func(ctx context.Context) (err error) {
			page, err = s.List(ctx, after, pageSize)
			return err
		})
		if err != nil {
			return err
		}
		for _, d := range page {
			after = d.ID
			if d.State != store.ActivityDraft && d.State != store.ActivityWarmed {
				continue
			}
			var warm bool
			err := Bounded(ctx, func(ctx context.Context) (err error) {
				warm, err = s.tend(ctx, d, seen)
				if s.due(d, now) {
					_, werr := s.Warm(ctx, d.ID, audit.System())
					warm = warm || werr == nil
					err = errors.Join(err, werr)
				}
				return err
			})
			if err != nil {
				failed = append(failed, err)
			}
			if !warm && now.After(d.StartsAt.Add(-s.cfg.WarmBefore/2)) && now.Before(d.EndsAt) {
				cold++
			}
		}
		if len(page) < pageSize {
			break
		}
	}
	s.cold.Set(float64(cold))
	// After the buckets were opened: an addition needs an open one.
	if err := s.finishAdds(ctx); err != nil {
		failed = append(failed, err)
	}
	return errors.Join(failed...)
}

// Bounded gives f the time that a round may spend on one sale.
func Bounded(ctx context.Context, f func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, saleTimeout)
	defer cancel()
	return f(ctx)
}

// due says that it is time to warm a sale that was planned ahead.
func (s *Service) due(d *Details, now time.Time) bool {
	return s.cfg.WarmBefore > 0 && d.Problem == "" && d.WarmWinner == 0 && !d.Shadow && d.CreatedAt.Before(d.StartsAt) &&
		now.After(d.StartsAt.Add(-s.cfg.WarmBefore)) && now.Before(d.EndsAt)
}

// tend brings Redis up to date with one sale. All of it is safe to do at any time, by any number of
// workers: announcing writes cold hashes only, opening only what carries the winner's number.
func (s *Service) tend(ctx context.Context, d *Details, seen map[string]time.Time) (warm bool, err error) {
	a, err := d.Stock()
	if err != nil {
		// A pause that did not reach Redis still has to, where the sale can be sold.
		if d.WarmWinner > 0 {
			err = errors.Join(err, s.PushPaused(ctx, d.ID))
		}
		return d.WarmWinner > 0, err
	}
	if err := s.redis.Announce(ctx, a); err != nil {
		return false, fmt.Errorf("announce activity %s: %w", d.ID, err)
	}
	if d.WarmWinner == 0 {
		return false, nil
	}
	now, err := s.redis.Activity(ctx, d.ID)
	if err != nil {
		return false, fmt.Errorf("read activity %s: %w", d.ID, err)
	}
	warm = now.Opened && now.Warm > 0
	// Bucket 0 answers for all of them only if nobody died between two buckets, so each process goes
	// through all of them once after each change.
	if changed, ok := seen[d.ID]; ok && changed.Equal(d.UpdatedAt) && warm && now.Paused == d.Paused {
		return warm, nil
	}
	if _, err := s.redis.OpenWarm(ctx, a, d.WarmWinner); err != nil && !errors.Is(err, stock.ErrNotWarmed) {
		return warm, fmt.Errorf("open activity %s: %w", d.ID, err)
	}
	if err := s.PushPaused(ctx, d.ID); err != nil {
		return warm, err
	}
	seen[d.ID] = d.UpdatedAt
	return warm, nil
}

// announceSoon announces a new sale right away; if it cannot, the loop will.
func (s *Service) announceSoon(ctx context.Context, d *Details) {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	a, err := d.Stock()
	if err == nil {
		err = s.redis.Announce(ctx, a)
	}
	if err != nil {
		s.log.WarnContext(ctx, "activity not announced yet", "activity_id", d.ID, "error", err)
	}
}
