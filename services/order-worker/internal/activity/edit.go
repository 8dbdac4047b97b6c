package activity

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strconv"

	"seckill/pkg/sale"
	"seckill/pkg/stock"
	"seckill/services/order-worker/internal/audit"
	"seckill/services/order-worker/internal/store"
)

// Edit gives a draft another plan, in one transaction with what it moves between inventory and sale, and
// brings Redis up to date. changed is false when the plan was so already; Redis is told all the same, so
// that repeating an edit finishes one that broke off. Whether the sale is a rehearsal's cannot be edited.
// A plan that is wrong is sale.Problems; ErrState: the sale is not a draft any more.
//
// A warm-up that is under way may have read the old plan. The edit takes a number of its own: the attempt
// cannot win any more, and begins again.
func (s *Service) Edit(ctx context.Context, plan sale.Sale, by audit.Actor) (d *Details, changed bool, err error) {
	plan = plan.WithDefaults()
	if err := plan.Validate(s.cfg.Tiers); err != nil {
		return nil, false, err
	}
	row, err := newRow(plan, by)
	if err != nil {
		return nil, false, err
	}
	err = s.st.InTx(ctx, func(tx *store.Tx) error {
		changed = false
		number, err := lockDraft(ctx, tx, plan.ID)
		if err != nil {
			return err
		}
		was, err := s.Load(ctx, plan.ID) // of other transactions, none of which can change it now
		if err != nil {
			return err
		}
		plan.Shadow = was.Shadow
		same, err := samePlan(was, plan)
		if err != nil || same {
			return err
		}
		changed = true
		now, err := tx.Now(ctx)
		if err != nil {
			return err
		}
		if err := plan.Ahead(now); err != nil {
			return err
		}
		if err := editTx(ctx, tx, was, row, plan, number+1); err != nil {
			return err
		}
		return audit.Write(ctx, tx, by, audit.Entry{Action: "activity.edit", Subject: plan.ID, Result: "edited", Before: was.Plan(), After: plan})
	})
	if err != nil {
		return nil, false, fmt.Errorf("edit activity %s: %w", plan.ID, err)
	}
	if err := s.tellEdit(ctx, plan.ID); err != nil {
		return nil, changed, fmt.Errorf("activity %s is edited, redis is not told yet (repeat the edit): %w", plan.ID, err)
	}
	d, err = s.Load(ctx, plan.ID)
	return d, changed, err
}

// lockDraft locks a draft's row and gives the number of its last warm-up attempt.
func lockDraft(ctx context.Context, tx *store.Tx, id string) (number uint64, err error) {
	var state string
	err = tx.QueryRowContext(ctx, "SELECT state, warm_number FROM activities WHERE id = ? FOR UPDATE", id).Scan(&state, &number)
	switch {
	case errors.Is(err, sql.ErrNoRows):
		return 0, ErrNotFound
	case err != nil:
		return 0, fmt.Errorf("lock activity: %w", err)
	case state != store.ActivityDraft:
		return 0, fmt.Errorf("%w: it is %s", ErrState, state)
	}
	return number, nil
}

func editTx(ctx context.Context, tx *store.Tx, was *Details, row *store.Activity, plan sale.Sale, number uint64) error {
	if _, err := tx.ExecContext(ctx, `UPDATE activities SET name = ?, starts_at = ?, ends_at = ?, per_user_limit = ?, payment_timeout_s = ?, currency = ?, qualification = ?,
			buckets = ?, region_fallback = ?, refund_after_end = ?, warm_number = ?, updated_at = UTC_TIMESTAMP(6) WHERE id = ?`,
		row.Name, row.StartsAt, row.EndsAt, row.PerUserLimit, row.PaymentTimeoutS, row.Currency, row.Qualification,
		row.Buckets, row.RegionFallback, row.RefundAfterEnd, number, plan.ID); err != nil {
		return fmt.Errorf("update activity: %w", err)
	}
	if _, err := tx.ExecContext(ctx, "DELETE FROM activity_items WHERE activity_id = ?", plan.ID); err != nil {
		return fmt.Errorf("delete items: %w", err)
	}
	items := make([]store.ActivityItem, len(plan.Items))
	for i, item := range plan.Items {
		items[i] = store.ActivityItem{ActivityID: plan.ID, SKUID: item.SKU, Position: i, PriceMinor: item.PriceMinor}
	}
	if err := tx.DB().CreateInBatches(&items, 500).Error; err != nil {
		return fmt.Errorf("insert items: %w", err)
	}
	return editPools(ctx, tx, was, plan, number)
}

// editPools brings the pools to what the plan says, over what was added by hand, and writes the ledger's
// explanation of each difference.
func editPools(ctx context.Context, tx *store.Tx, was *Details, plan sale.Sale, number uint64) error {
	want := map[[2]string]int64{}
	for _, item := range plan.Items {
		for pool, n := range item.Pools {
			want[[2]string{item.SKU, pool}] = int64(n)
		}
	}
	var locked []store.ActivityStock
	if err := tx.DB().Raw("SELECT * FROM activity_stock WHERE activity_id = ? ORDER BY sku_id, pool FOR UPDATE", plan.ID).Scan(&locked).Error; err != nil {
		return fmt.Errorf("lock stock: %w", err)
	}
	added := map[[2]string]int64{}
	for _, p := range was.Pools {
		added[[2]string{p.SKU, p.Pool}] = p.Allocated - p.Initial
	}
	deltas := map[[2]string]int64{}
	for _, p := range locked {
		k := [2]string{p.SKUID, p.Pool}
		if p.Available != p.Allocated {
			return fmt.Errorf("%w: units of %s in %s are in use", ErrState, p.SKUID, p.Pool)
		}
		units, stays := want[k]
		if !stays && added[k] > 0 {
			return fmt.Errorf("%w: %d units were added by hand to %s in %s, which the plan does not have any more", ErrState, added[k], p.SKUID, p.Pool)
		}
		deltas[k] = units + added[k] - p.Allocated
		delete(want, k)
		stmt, args := "UPDATE activity_stock SET allocated = allocated + ?, available = available + ?, updated_at = UTC_TIMESTAMP(6) WHERE activity_id = ? AND sku_id = ? AND pool = ?",
			[]any{deltas[k], deltas[k], plan.ID, p.SKUID, p.Pool}
		if !stays {
			stmt, args = "DELETE FROM activity_stock WHERE activity_id = ? AND sku_id = ? AND pool = ?", []any{plan.ID, p.SKUID, p.Pool}
		}
		if units+added[k] > sale.MaxUnits {
			return fmt.Errorf("%w: a pool holds at most %d units", ErrState, sale.MaxUnits)
		}
		if _, err := tx.ExecContext(ctx, stmt, args...); err != nil {
			return fmt.Errorf("update stock: %w", err)
		}
	}
	for k, units := range want {
		deltas[k] = units
		if _, err := tx.ExecContext(ctx, "INSERT INTO activity_stock (activity_id, sku_id, pool, allocated, available, updated_at) VALUES (?, ?, ?, ?, ?, UTC_TIMESTAMP(6))",
			plan.ID, k[0], k[1], units, units); err != nil {
			return fmt.Errorf("insert stock: %w", err)
		}
	}
	return moveInventory(ctx, tx, plan, deltas, number)
}

// moveInventory books differences: more units come out of the inventory where that is kept, fewer go back
// as far as they came from it.
func moveInventory(ctx context.Context, tx *store.Tx, plan sale.Sale, deltas map[[2]string]int64, number uint64) error {
	var entries []store.LedgerEntry
	var short ShortageError
	for _, k := range sortedPairs(deltas) {
		delta, sku, pool := deltas[k], k[0], k[1]
		if delta == 0 {
			continue
		}
		e := store.LedgerEntry{
			Ref: plan.ID + "/" + sku + "/" + pool + "/e" + strconv.FormatUint(number, 10), Op: store.OpAllocate, Account: store.AccountSale,
			ActivityID: plan.ID, SKUID: sku, Pool: pool, Delta: delta,
		}
		entries = append(entries, e)
		if plan.Shadow {
			continue
		}
		e.Account = store.AccountInventory
		if delta > 0 {
			missing, taken, err := takeInventory(ctx, tx, sku, pool, delta)
			if err != nil {
				return err
			}
			if missing != nil {
				short = append(short, *missing)
			}
			if e.Delta = -delta; taken {
				entries = append(entries, e)
			}
			continue
		}
		moved, err := fromInventory(ctx, tx, plan.ID, sku, pool)
		if err != nil {
			return err
		}
		if e.Delta = min(-delta, moved); e.Delta > 0 {
			entries = append(entries, e)
			if err := store.ReturnToInventory(ctx, tx, sku, pool, e.Delta); err != nil {
				return err
			}
		}
	}
	if short != nil {
		return short
	}
	return store.InsertLedger(ctx, tx, entries)
}

// tellEdit brings Redis up to date with a draft: what it knows of the plan, and what no plan has any more.
// The lock of the activity's row keeps warm-ups from winning meanwhile; one that has won has done the same.
func (s *Service) tellEdit(ctx context.Context, id string) error {
	// Redis' keys are looked through under that lock, which may take a while.
	return s.st.InRestingTx(ctx, func(tx *store.Tx) error {
		number, err := lockDraft(ctx, tx, id)
		if errors.Is(err, ErrState) || errors.Is(err, ErrNotFound) {
			return nil // warmed, or deleted, since
		}
		if err != nil {
			return err
		}
		d, err := s.Load(ctx, id)
		if err != nil {
			return err
		}
		a, err := d.Stock()
		if err != nil {
			return err
		}
		if err := s.redis.Announce(ctx, a); err != nil {
			return fmt.Errorf("announce: %w", err)
		}
		if now, err := s.redis.Activity(ctx, id); err != nil {
			return fmt.Errorf("read it from redis: %w", err)
		} else if now.Warm > 0 && !now.Opened {
			// A warm-up broke off: its buckets have the old plan, and announcing leaves them alone.
			amounts, err := lockAmounts(ctx, tx, id)
			if err != nil {
				return err
			}
			if err := s.redis.PrepareWarm(ctx, a, number, amounts); err != nil && !errors.Is(err, stock.ErrStaleWarm) {
				return fmt.Errorf("close: %w", err)
			}
		}
		if err := s.redis.Trim(ctx, a); err != nil {
			return err
		}
		if !d.Qualifies() {
			return nil
		}
		for after := ""; ; {
			var users []string
			if err := s.st.DB(ctx).Raw("SELECT user_id FROM qualifications WHERE activity_id = ? AND user_id > ? ORDER BY user_id LIMIT 5000", id, after).Scan(&users).Error; err != nil {
				return fmt.Errorf("read qualifications: %w", err)
			}
			if len(users) == 0 {
				return nil
			}
			after = users[len(users)-1]
			if err := s.redis.Qualify(ctx, a, users); err != nil {
				return fmt.Errorf("qualify users: %w", err)
			}
		}
	})
}
