package activity

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"seckill/pkg/stock"
	"seckill/services/order-worker/internal/audit"
	"seckill/services/order-worker/internal/store"
)

// Delete removes a sale that was never warm, and gives its units back to the inventory they came from.
// The ledger keeps its rows, and with them the id: it cannot be used again. In Redis the sale ends and
// is cleaned up, so that a warm-up under way finds it ended.
func (s *Service) Delete(ctx context.Context, id string, by audit.Actor) error {
	d, err := s.Load(ctx, id)
	if err != nil {
		return err
	}
	err = s.st.InTx(ctx, func(tx *store.Tx) error {
		if err := deleteTx(ctx, tx, id); err != nil {
			return err
		}
		return audit.Write(ctx, tx, by, audit.Entry{Action: "activity.delete", Subject: id, Result: "deleted", Before: d.Plan()})
	})
	if err != nil {
		return fmt.Errorf("delete activity %s: %w", id, err)
	}
	if err := s.forget(ctx, d); err != nil {
		// Known and cold: nobody can buy from it, which is all that matters.
		s.log.WarnContext(ctx, "deleted activity is still announced", "activity_id", id, "error", err)
	}
	return nil
}

func deleteTx(ctx context.Context, tx *store.Tx, id string) error {
	var state string
	var shadow bool
	err := tx.QueryRowContext(ctx, "SELECT state, shadow FROM activities WHERE id = ? FOR UPDATE", id).Scan(&state, &shadow)
	switch {
	case errors.Is(err, sql.ErrNoRows):
		return ErrNotFound
	case err != nil:
		return fmt.Errorf("lock activity: %w", err)
	case state != store.ActivityDraft:
		return fmt.Errorf("%w: it is %s", ErrState, state)
	}
	var rows []store.ActivityStock
	if err := tx.DB().Raw("SELECT * FROM activity_stock WHERE activity_id = ? ORDER BY sku_id, pool FOR UPDATE", id).Scan(&rows).Error; err != nil {
		return fmt.Errorf("lock stock: %w", err)
	}
	var entries []store.LedgerEntry
	for _, p := range rows {
		if p.Available != p.Allocated {
			return fmt.Errorf("%w: units of %s in %s are in use", ErrState, p.SKUID, p.Pool)
		}
		if p.Available == 0 {
			continue
		}
		e := store.LedgerEntry{Ref: id + "/" + p.SKUID + "/" + p.Pool, Op: store.OpSettle, Account: store.AccountSale, ActivityID: id, SKUID: p.SKUID, Pool: p.Pool, Delta: -p.Available}
		entries = append(entries, e)
		// What came out of the inventory goes back: of a pool that is not kept there, nothing did.
		moved, err := fromInventory(ctx, tx, id, p.SKUID, p.Pool)
		if err != nil {
			return err
		}
		if moved == 0 {
			continue
		}
		e.Account, e.Delta = store.AccountInventory, moved
		entries = append(entries, e)
		if err := store.ReturnToInventory(ctx, tx, p.SKUID, p.Pool, moved); err != nil {
			return err
		}
	}
	if err := store.InsertLedger(ctx, tx, entries); err != nil {
		return err
	}
	for _, stmt := range []string{
		"DELETE FROM qualifications WHERE activity_id = ?", "DELETE FROM compensations WHERE activity_id = ?",
		"DELETE FROM activity_stock WHERE activity_id = ?", "DELETE FROM activity_items WHERE activity_id = ?", "DELETE FROM activities WHERE id = ?",
	} {
		if _, err := tx.ExecContext(ctx, stmt, id); err != nil {
			return fmt.Errorf("delete plan: %w", err)
		}
	}
	return nil
}

// forget lets Redis treat the sale like one that is over: marker and hash go by themselves.
func (s *Service) forget(ctx context.Context, d *Details) error {
	a, err := s.Outline(ctx, d)
	if err != nil {
		return err
	}
	if err := s.redis.End(ctx, a, time.Now()); err != nil {
		return fmt.Errorf("end activity %s in redis: %w", d.ID, err)
	}
	if _, err := s.redis.Cleanup(ctx, a, d.Fencing, stock.MarkerTTL); err != nil {
		return err
	}
	return s.redis.SettleMarker(ctx, a, d.Fencing, stock.MarkerTTL)
}
