package activity

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"reflect"
	"time"

	"seckill/pkg/sale"
	"seckill/services/order-worker/internal/audit"
	"seckill/services/order-worker/internal/store"
)

// Create makes a sale, its stock and the ledger rows that explain it in one transaction, taking the
// units from the inventory (a shadow activity never does). The same plan again is the same sale
// (existed); the same id with another plan is ErrExists. A plan that is wrong is sale.Problems.
func (s *Service) Create(ctx context.Context, plan sale.Sale, by audit.Actor) (d *Details, existed bool, err error) {
	plan = plan.WithDefaults()
	if err := plan.Validate(s.cfg.Tiers); err != nil {
		return nil, false, err
	}
	row, err := newRow(plan, by)
	if err != nil {
		return nil, false, err
	}
	err = s.st.InTx(ctx, func(tx *store.Tx) error { return insert(ctx, tx, row, plan, by) })
	switch {
	case store.IsDuplicate(err):
		existed = true
	case err != nil:
		return nil, false, fmt.Errorf("create activity %s: %w", plan.ID, err)
	}
	d, err = s.Load(ctx, plan.ID)
	if existed && errors.Is(err, ErrNotFound) {
		return nil, false, fmt.Errorf("create activity %s: %w: a sale with this id was deleted, and its ledger stays", plan.ID, ErrExists)
	}
	if err != nil {
		return nil, false, err
	}
	if existed {
		same, err := samePlan(d, plan)
		if err != nil {
			return nil, false, err
		}
		if !same {
			return nil, false, fmt.Errorf("create activity %s: %w", plan.ID, ErrExists)
		}
	}
	s.announceSoon(ctx, d)
	return d, existed, nil
}

func newRow(plan sale.Sale, by audit.Actor) (*store.Activity, error) {
	start, end, err := plan.Window()
	if err != nil {
		return nil, err
	}
	timeout, err := plan.Timeout()
	if err != nil {
		return nil, err
	}
	fallback, err := fallbackJSON(plan.RegionFallback)
	if err != nil {
		return nil, err
	}
	return &store.Activity{
		ID: plan.ID, Name: plan.Name, State: store.ActivityDraft, StartsAt: start, EndsAt: end, PerUserLimit: plan.PerUserLimit,
		PaymentTimeoutS: int(timeout / time.Second), Currency: plan.Currency, Qualification: plan.Qualification, Buckets: plan.Buckets,
		RegionFallback: fallback, RefundAfterEnd: plan.RefundAfterEnd, Shadow: plan.Shadow, Epoch: 1, CreatedBy: by.Name,
	}, nil
}

func insert(ctx context.Context, tx *store.Tx, template *store.Activity, plan sale.Sale, by audit.Actor) error {
	now, err := tx.Now(ctx)
	if err != nil {
		return err
	}
	row := *template // a restarted transaction begins with the same values
	row.CreatedAt, row.UpdatedAt = now, now
	if err := tx.DB().Create(&row).Error; err != nil {
		return fmt.Errorf("insert activity: %w", err)
	}
	// After the insert: a plan that is there already is the same plan for ever.
	if err := plan.Ahead(now); err != nil {
		return err
	}
	var items []store.ActivityItem
	var pools []store.ActivityStock
	var ledger []store.LedgerEntry
	var short ShortageError
	for i, item := range plan.Items {
		items = append(items, store.ActivityItem{ActivityID: plan.ID, SKUID: item.SKU, Position: i, PriceMinor: item.PriceMinor})
		for _, pool := range sortedKeys(item.Pools) {
			units := int64(item.Pools[pool])
			pools = append(pools, store.ActivityStock{ActivityID: plan.ID, SKUID: item.SKU, Pool: pool, Allocated: units, Available: units, UpdatedAt: now})
			entry := store.LedgerEntry{
				Ref: plan.ID + "/" + item.SKU + "/" + pool, Op: store.OpAllocate, Account: store.AccountSale,
				ActivityID: plan.ID, SKUID: item.SKU, Pool: pool, Delta: units, At: now,
			}
			ledger = append(ledger, entry)
			if plan.Shadow {
				continue
			}
			missing, taken, err := takeInventory(ctx, tx, item.SKU, pool, units)
			if err != nil {
				return err
			}
			if missing != nil {
				short = append(short, *missing)
			}
			if taken {
				entry.Account, entry.Delta = store.AccountInventory, -units
				ledger = append(ledger, entry)
			}
		}
	}
	if short != nil {
		return short
	}
	for _, rows := range []any{&items, &pools, &ledger} {
		if err := tx.DB().CreateInBatches(rows, 500).Error; err != nil {
			return fmt.Errorf("insert plan: %w", err)
		}
	}
	return audit.Write(ctx, tx, by, audit.Entry{Action: "activity.create", Subject: plan.ID, Result: "created", After: plan})
}

// takeInventory moves units out of the inventory. Rows are locked in the order of the plan; two plans
// that name the same pools the other way round deadlock, and one of them starts again (InTx).
func takeInventory(ctx context.Context, tx *store.Tx, sku, pool string, units int64) (*Shortage, bool, error) {
	var onHand int64
	err := tx.QueryRowContext(ctx, "SELECT on_hand FROM inventory WHERE sku_id = ? AND pool = ? FOR UPDATE", sku, pool).Scan(&onHand)
	switch {
	case errors.Is(err, sql.ErrNoRows):
		return nil, false, nil // this pool's stock is not kept here
	case err != nil:
		return nil, false, fmt.Errorf("read inventory: %w", err)
	case onHand < units:
		return &Shortage{SKU: sku, Pool: pool, OnHand: onHand, Wanted: units}, false, nil
	}
	_, err = tx.ExecContext(ctx, "UPDATE inventory SET on_hand = on_hand - ?, updated_at = UTC_TIMESTAMP(6) WHERE sku_id = ? AND pool = ?", units, sku, pool)
	if err != nil {
		return nil, false, fmt.Errorf("take from inventory: %w", err)
	}
	return nil, true, nil
}

// fromInventory says how many units of a pool of a sale came out of the inventory, and are not back.
func fromInventory(ctx context.Context, tx *store.Tx, id, sku, pool string) (units int64, err error) {
	err = tx.QueryRowContext(ctx, "SELECT COALESCE(-SUM(delta), 0) FROM stock_ledger WHERE ref > CONCAT(?, '/') AND ref < CONCAT(?, '0') AND account = ? AND sku_id = ? AND pool = ?",
		id, id, store.AccountInventory, sku, pool).Scan(&units)
	if err != nil {
		return 0, fmt.Errorf("read ledger: %w", err)
	}
	return max(units, 0), nil
}

// samePlan compares what is stored with a plan: as values, so that another spelling of a time or of
// a duration is the same plan.
func samePlan(d *Details, plan sale.Sale) (bool, error) {
	if d.Problem != "" {
		return false, nil
	}
	a, err := normal(d.Plan())
	if err != nil {
		return false, err
	}
	b, err := normal(plan)
	if err != nil {
		return false, err
	}
	return reflect.DeepEqual(a, b), nil
}

func normal(s sale.Sale) (sale.Sale, error) {
	start, end, err := s.Window()
	if err != nil {
		return s, err
	}
	timeout, err := s.Timeout()
	if err != nil {
		return s, err
	}
	s.StartsAt, s.EndsAt, s.PaymentTimeout = start.String(), end.String(), timeout.String()
	if len(s.RegionFallback) == 0 {
		s.RegionFallback = nil
	}
	return s, nil
}
