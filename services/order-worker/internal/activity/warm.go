package activity

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"seckill/pkg/failpoint"
	"seckill/pkg/stock"
	"seckill/services/order-worker/internal/audit"
	"seckill/services/order-worker/internal/store"
)

// WarmResult says what a warm-up did.
type WarmResult struct {
	Already bool   // it was warm before
	Number  uint64 // the attempt whose stock is sold
	Opened  int    // buckets that are open now
}

// Warm brings a sale's stock into Redis and opens it (R9). It is safe to call again, from anywhere,
// at once: live stock is never overwritten, and a warm-up that died half-way is finished.
func (s *Service) Warm(ctx context.Context, id string, by audit.Actor) (WarmResult, error) {
	// No number, and no state, of what cannot be told to Redis.
	d, err := s.Load(ctx, id)
	if err == nil {
		_, err = d.Stock()
	}
	if err != nil {
		return WarmResult{}, fmt.Errorf("warm activity %s: %w", id, err)
	}
	for try := 0; ; try++ {
		r, err := s.warmOnce(ctx, id, by)
		if !errors.Is(err, errOvertaken) {
			return r, err
		}
		// A later attempt is under way. It will win, unless it died: then the number we take after a
		// while is the latest. Random, so that attempts that met once do not meet again in step.
		pause := time.Duration(20+rand.IntN(30*(min(try, 10)+1))) * time.Millisecond //nolint:gosec // jitter
		select {
		case <-ctx.Done():
			return WarmResult{}, fmt.Errorf("warm activity %s: %w", id, ctx.Err())
		case <-time.After(pause):
		}
	}
}

var errOvertaken = errors.New("a later warm-up attempt is under way")

func (s *Service) warmOnce(ctx context.Context, id string, by audit.Actor) (WarmResult, error) {
	number, amounts, winner, err := s.takeNumber(ctx, id)
	if err != nil {
		return WarmResult{}, fmt.Errorf("warm activity %s: %w", id, err)
	}
	// The plan after the number: an edit takes a later one, and then the amounts are not this plan's.
	d, err := s.Load(ctx, id)
	if err != nil {
		return WarmResult{}, err
	}
	if winner == 0 && d.WarmNumber != number {
		return WarmResult{}, errOvertaken
	}
	a, err := d.Stock()
	if err != nil {
		return WarmResult{}, err
	}
	if winner > 0 {
		return s.open(ctx, a, winner, true)
	}
	switch err := s.redis.PrepareWarm(ctx, a, number, amounts); {
	case errors.Is(err, stock.ErrEnded):
		return WarmResult{}, fmt.Errorf("warm activity %s: %w: it has ended", id, ErrState)
	case errors.Is(err, stock.ErrStaleWarm), errors.Is(err, stock.ErrAlreadyWarm):
		return WarmResult{}, errOvertaken
	case err != nil:
		return WarmResult{}, fmt.Errorf("warm activity %s, attempt %d: %w", id, number, err)
	}
	if err := failpoint.Hit(ctx, "warm.after_prepare"); err != nil {
		return WarmResult{}, err
	}
	won, err := s.win(ctx, id, number, by)
	if err != nil {
		return WarmResult{}, fmt.Errorf("warm activity %s, attempt %d: %w", id, number, err)
	}
	if !won {
		return WarmResult{}, errOvertaken
	}
	if err := failpoint.Hit(ctx, "warm.after_win"); err != nil {
		return WarmResult{}, err
	}
	return s.open(ctx, a, number, false)
}

// takeNumber takes the next attempt's number and reads what there is to sell under the pool rows'
// locks. For a sale that is warm it takes nothing and tells the winner.
func (s *Service) takeNumber(ctx context.Context, id string) (number uint64, amounts map[string]map[string]int, winner uint64, err error) {
	err = s.st.InTx(ctx, func(tx *store.Tx) error {
		number, amounts, winner = 0, nil, 0
		var state string
		var over bool
		err := tx.QueryRowContext(ctx, "SELECT state, warm_number, warm_winner, ends_at <= UTC_TIMESTAMP(6) FROM activities WHERE id = ? FOR UPDATE", id).
			Scan(&state, &number, &winner, &over)
		switch {
		case errors.Is(err, sql.ErrNoRows):
			return ErrNotFound
		case err != nil:
			return fmt.Errorf("lock activity: %w", err)
		case state != store.ActivityDraft && state != store.ActivityWarmed:
			return fmt.Errorf("%w: it is %s", ErrState, state)
		case winner > 0:
			return nil
		case over:
			return fmt.Errorf("%w: its end has passed", ErrState)
		}
		number++
		if _, err := tx.ExecContext(ctx, "UPDATE activities SET warm_number = ?, updated_at = UTC_TIMESTAMP(6) WHERE id = ?", number, id); err != nil {
			return fmt.Errorf("take number: %w", err)
		}
		amounts, err = lockAmounts(ctx, tx, id)
		return err
	})
	return number, amounts, winner, err
}

func lockAmounts(ctx context.Context, tx *store.Tx, id string) (map[string]map[string]int, error) {
	rows, err := tx.QueryContext(ctx, "SELECT sku_id, pool, available FROM activity_stock WHERE activity_id = ? ORDER BY sku_id, pool FOR UPDATE", id)
	if err != nil {
		return nil, fmt.Errorf("read stock: %w", err)
	}
	defer func() { _ = rows.Close() }()
	amounts := map[string]map[string]int{}
	for rows.Next() {
		var sku, pool string
		var units int
		if err := rows.Scan(&sku, &pool, &units); err != nil {
			return nil, fmt.Errorf("read stock: %w", err)
		}
		if amounts[sku] == nil {
			amounts[sku] = map[string]int{}
		}
		amounts[sku][pool] = units
	}
	if err := rows.Err(); err != nil {
		return nil, fmt.Errorf("read stock: %w", err)
	}
	return amounts, nil
}

// win makes the attempt the one whose stock is sold, if no later one took a number meanwhile.
func (s *Service) win(ctx context.Context, id string, number uint64, by audit.Actor) (won bool, err error) {
	err = s.st.InTx(ctx, func(tx *store.Tx) error {
		won = false
		res, err := tx.ExecContext(ctx, `UPDATE activities SET warm_winner = ?, state = ?, warmed_at = UTC_TIMESTAMP(6), updated_at = UTC_TIMESTAMP(6)
			WHERE id = ? AND warm_number = ? AND warm_winner = 0 AND state = ?`, number, store.ActivityWarmed, id, number, store.ActivityDraft)
		if err != nil {
			return fmt.Errorf("win: %w", err)
		}
		n, err := res.RowsAffected()
		if err != nil || n == 0 {
			return err
		}
		won = true
		return audit.Write(ctx, tx, by, audit.Entry{Action: "activity.warm", Subject: id, Result: "warmed", After: map[string]uint64{"number": number}})
	})
	return won, err
}

func (s *Service) open(ctx context.Context, a *stock.Activity, number uint64, already bool) (WarmResult, error) {
	opened, err := s.redis.OpenWarm(ctx, a, number)
	if err != nil {
		return WarmResult{}, fmt.Errorf("open activity %s, attempt %d: %w", a.ID, number, err)
	}
	return WarmResult{Already: already, Number: number, Opened: opened}, nil
}
