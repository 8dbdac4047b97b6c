package rehearsal

import (
	"context"
	"database/sql"
	"encoding/json"
	"fmt"
	"io"

	"seckill/pkg/order"
	"seckill/pkg/stock"
	"seckill/services/order-worker/internal/store"
)

// line is one line of the snapshot. Kind says which fields it has; the numbers stand even when they
// are zero, because zero is a finding of its own.
type line map[string]any

// snapshot writes everything that both stores hold of an activity, one JSON object a line, and last
// a line with the number of the others: without it the reader knows that it was cut off.
//
// The stores are read one after the other: only of a quiet system this is one picture.
func (h *Handler) snapshot(ctx context.Context, a store.Activity, w io.Writer) error {
	enc := json.NewEncoder(w)
	n := 0
	put := func(l line) error {
		n++
		return enc.Encode(l)
	}
	err := put(line{"kind": "activity", "activity_id": a.ID, "per_user_limit": a.PerUserLimit, "buckets": a.Buckets, "epoch": a.Epoch})
	if err == nil {
		err = h.rows(ctx, a, put)
	}
	if err == nil {
		err = h.redis(ctx, a, put)
	}
	if err != nil {
		// The status was sent long ago; the reader takes this line for what it is.
		return enc.Encode(line{"kind": "error", "error": err.Error()})
	}
	return enc.Encode(line{"kind": "end", "lines": n})
}

// rows reads MySQL in one consistent snapshot.
func (h *Handler) rows(ctx context.Context, a store.Activity, put func(line) error) error {
	tx, err := h.store.SQL().BeginTx(ctx, &sql.TxOptions{Isolation: sql.LevelRepeatableRead, ReadOnly: true})
	if err != nil {
		return fmt.Errorf("read rows of activity %s: %w", a.ID, err)
	}
	defer func() { _ = tx.Rollback() }() // nothing was written
	for _, q := range queries(a.ID) {
		if err := query(ctx, tx, q, put); err != nil {
			return fmt.Errorf("read %ss of activity %s: %w", q.kind, a.ID, err)
		}
	}
	return nil
}

// table is one query and the kind of line that its rows become; columns keep their names.
type table struct {
	kind string
	sql  string
	args []any
}

func queries(activity string) []table {
	return []table{
		{"stock", `SELECT sku_id, pool, allocated, available, withheld, live FROM activity_stock WHERE activity_id = ?`, []any{activity}},
		{"order", `SELECT id AS order_id, user_id, sku_id, pool, quantity, status, reason, idem_key AS idempotency_key FROM orders WHERE activity_id = ?`, []any{activity}},
		{"holding", `SELECT user_id, held AS units FROM user_holdings WHERE activity_id = ?`, []any{activity}},
		{"ledger", `SELECT ref, op AS operation, sku_id, pool, delta AS units FROM stock_ledger WHERE activity_id = ? AND account = ?`, []any{activity, store.AccountSale}},
		{"payment", `SELECT transaction_id, order_id, status FROM payments WHERE order_id LIKE ?`, []any{likePrefix(activity + "-")}},
		{"letter", letterSQL, letterArgs(activity)},
		{"compensation", `SELECT kind AS work, subject AS order_id FROM compensations WHERE activity_id = ?`, []any{activity}},
	}
}

// The letters of the activity and the broken messages that were sent for it: those name no activity.
const letterSQL = `SELECT id, message_id, order_id, state, class, occurrences AS deaths, published_at IS NOT NULL AS replayed
	FROM dead_letters WHERE activity_id = ? OR message_id LIKE ?`

func letterArgs(activity string) []any { return []any{activity, likePrefix(poisonPrefix(activity))} }

// likePrefix makes a LIKE pattern of a text; ids may hold the wildcard "_".
func likePrefix(s string) string {
	out := make([]byte, 0, len(s)+4)
	for i := range len(s) {
		if s[i] == '_' || s[i] == '%' || s[i] == '\\' {
			out = append(out, '\\')
		}
		out = append(out, s[i])
	}
	return string(append(out, '%'))
}

func query(ctx context.Context, tx *sql.Tx, q table, put func(line) error) error {
	rows, err := tx.QueryContext(ctx, q.sql, q.args...)
	if err != nil {
		return err
	}
	defer rows.Close() //nolint:errcheck // rows.Err tells
	names, err := rows.Columns()
	if err != nil {
		return err
	}
	values := make([]any, len(names))
	into := make([]any, len(names))
	for i := range values {
		into[i] = &values[i]
	}
	for rows.Next() {
		if err := rows.Scan(into...); err != nil {
			return err
		}
		l := line{"kind": q.kind}
		for i, v := range values {
			if b, ok := v.([]byte); ok {
				v = string(b)
			}
			if names[i] == "replayed" {
				v = v != int64(0) && v != "0"
			}
			l[names[i]] = v
		}
		if err := put(l); err != nil {
			return err
		}
	}
	return rows.Err()
}

// redis reads records, counters, levels and what waits.
func (h *Handler) redis(ctx context.Context, a store.Activity, put func(line) error) error {
	err := h.stock.EachRecord(ctx, a.ID, func(r stock.Record) error {
		return put(line{
			"kind": "record", "order_id": r.ID.String(), "user_id": r.User, "sku_id": r.SKU, "pool": r.Pool, "quantity": r.Quantity,
			"status": string(r.Status), "reason": r.Reason, "refund_due": r.RefundDue, "idempotency_key": r.IdemKey,
		})
	})
	if err != nil {
		return err
	}
	if err := h.stock.EachHolding(ctx, a.ID, func(o stock.Holding) error {
		return put(line{"kind": "held", "user_id": o.User, "units": o.Units})
	}); err != nil {
		return err
	}
	sale, err := h.stock.Activity(ctx, a.ID)
	if err != nil {
		return fmt.Errorf("read activity %s: %w", a.ID, err)
	}
	levels, err := h.stock.Levels(ctx, &sale)
	if err != nil {
		return fmt.Errorf("read levels of activity %s: %w", a.ID, err)
	}
	for sku, pools := range levels {
		for pool, units := range pools {
			if err := put(line{"kind": "level", "sku_id": sku, "pool": pool, "units": units}); err != nil {
				return err
			}
		}
	}
	for bucket := range a.Buckets {
		waiting, parked, err := h.stock.OutboxIDs(ctx, a.ID, bucket)
		if err != nil {
			return err
		}
		for kind, ids := range map[string][]order.ID{"outbox": waiting, "parked": parked} {
			for _, id := range ids {
				if err := put(line{"kind": kind, "order_id": id.String()}); err != nil {
					return err
				}
			}
		}
	}
	return nil
}
