package activity

import (
	"context"
	"fmt"

	"github.com/oklog/ulid/v2"

	"seckill/services/order-worker/internal/audit"
	"seckill/services/order-worker/internal/store"
)

// opCount is the ledger's operation of a count; it belongs to no sale.
const opCount = "count"

// Inventory lists what the warehouses hold outside sales.
func (s *Service) Inventory(ctx context.Context) ([]store.Inventory, error) {
	var rows []store.Inventory
	if err := s.st.DB(ctx).Order("sku_id, pool").Find(&rows).Error; err != nil {
		return nil, fmt.Errorf("list inventory: %w", err)
	}
	return rows, nil
}

// SetInventory says how many units of a sku a pool's warehouse holds, after a count. The ledger gets
// the difference, so that it goes on explaining every unit.
func (s *Service) SetInventory(ctx context.Context, sku, pool string, onHand int64, by audit.Actor) (store.Inventory, error) {
	var out store.Inventory
	err := s.st.InTx(ctx, func(tx *store.Tx) error {
		// The row has to be there to be locked: two first counts at once would both find nothing.
		if _, err := tx.ExecContext(ctx, "INSERT IGNORE INTO inventory (sku_id, pool, on_hand, updated_at) VALUES (?, ?, 0, UTC_TIMESTAMP(6))", sku, pool); err != nil {
			return fmt.Errorf("insert inventory: %w", err)
		}
		var before int64
		if err := tx.QueryRowContext(ctx, "SELECT on_hand FROM inventory WHERE sku_id = ? AND pool = ? FOR UPDATE", sku, pool).Scan(&before); err != nil {
			return fmt.Errorf("lock inventory: %w", err)
		}
		now, err := tx.Now(ctx)
		if err != nil {
			return err
		}
		if _, err := tx.ExecContext(ctx, "UPDATE inventory SET on_hand = ?, updated_at = ? WHERE sku_id = ? AND pool = ?", onHand, now, sku, pool); err != nil {
			return fmt.Errorf("update inventory: %w", err)
		}
		entry := store.LedgerEntry{
			Ref: "count/" + ulid.Make().String(), Op: opCount, Account: store.AccountInventory, SKUID: sku, Pool: pool, Delta: onHand - before, At: now,
		}
		if err := tx.DB().Create(&entry).Error; err != nil {
			return fmt.Errorf("insert ledger: %w", err)
		}
		out = store.Inventory{SKUID: sku, Pool: pool, OnHand: onHand, UpdatedAt: now}
		return audit.Write(ctx, tx, by, audit.Entry{
			Action: "inventory.set", Subject: sku + "/" + pool, Result: "done",
			Before: map[string]int64{"on_hand": before}, After: map[string]int64{"on_hand": onHand},
		})
	})
	if err != nil {
		return store.Inventory{}, fmt.Errorf("set inventory of %s in %s: %w", sku, pool, err)
	}
	return out, nil
}
