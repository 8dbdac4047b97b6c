package store

import (
	"context"
	"fmt"
	"time"

	"seckill/pkg/order"
)

// PaidOrder is one entry of the feed of paid orders. Its order may have been refunded since.
type PaidOrder struct {
	Order
	PaidAt   time.Time
	Position int64
}

// notePaid writes orders that this transaction has set to paid into the feed. A rehearsal's orders are
// shipped by nobody.
func notePaid(ctx context.Context, q Querier, ids []string) error {
	w := sqlBuf{}
	w.raw("INSERT INTO paid_orders (order_id,paid_at) SELECT o.id,UTC_TIMESTAMP(6) FROM orders o FORCE INDEX (PRIMARY) JOIN activities a ON a.id=o.activity_id WHERE o.id IN ").
		list(ids).raw(" AND o.status=").str(string(order.Paid)).raw(" AND a.shadow=0 ON DUPLICATE KEY UPDATE order_id=VALUES(order_id)")
	if _, err := q.ExecContext(ctx, w.String()); err != nil {
		return fmt.Errorf("note %d paid orders: %w", len(ids), err)
	}
	return nil
}

// PaidSince reads up to limit entries of the feed behind a position, in its order. Entries that have
// none yet get theirs here: only what is committed can be seen, and one reader at a time gives
// positions, so a payment that commits late comes later in the feed, never behind a cursor.
func (s *Store) PaidSince(ctx context.Context, after int64, limit int) ([]PaidOrder, error) {
	if err := s.numberPaid(ctx); err != nil {
		return nil, err
	}
	var out []PaidOrder
	err := s.DB(ctx).Raw("SELECT o.*, p.paid_at, p.position FROM paid_orders p JOIN orders o ON o.id = p.order_id WHERE p.position > ? ORDER BY p.position LIMIT ?",
		after, limit).Scan(&out).Error
	if err != nil {
		return nil, fmt.Errorf("read paid orders after %d: %w", after, err)
	}
	return out, nil
}

func (s *Store) numberPaid(ctx context.Context) error {
	return s.InTx(ctx, func(tx *Tx) error {
		var last int64
		if err := tx.QueryRowContext(ctx, "SELECT last FROM feed_positions WHERE feed='paid' FOR UPDATE").Scan(&last); err != nil {
			return fmt.Errorf("lock feed of paid orders: %w", err)
		}
		rows, err := tx.QueryContext(ctx, "SELECT order_id FROM paid_orders WHERE position IS NULL ORDER BY paid_at, order_id LIMIT ?", chunkRows)
		if err != nil {
			return fmt.Errorf("read new paid orders: %w", err)
		}
		ids, err := scanStrings(rows, "read new paid orders")
		if err != nil || len(ids) == 0 {
			return err
		}
		w := sqlBuf{}
		w.raw("UPDATE paid_orders SET position=CASE order_id")
		for i, id := range ids {
			w.raw(" WHEN ").str(id).raw(" THEN ").num(last + int64(i) + 1)
		}
		w.raw(" END WHERE order_id IN ").list(ids)
		if _, err := tx.ExecContext(ctx, w.String()); err != nil {
			return fmt.Errorf("number %d paid orders: %w", len(ids), err)
		}
		if _, err := tx.ExecContext(ctx, "UPDATE feed_positions SET last=? WHERE feed='paid'", last+int64(len(ids))); err != nil {
			return fmt.Errorf("number %d paid orders: %w", len(ids), err)
		}
		return nil
	})
}
