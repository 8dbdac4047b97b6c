package store

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"time"

	"seckill/pkg/order"
)

// Querier is what both the pool and a transaction can do.
type Querier interface {
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
}

const orderColumns = "id,activity_id,user_id,sku_id,region,pool,quantity,unit_price_minor,amount_minor,currency," +
	"status,reason,origin,epoch,payment_timeout_s,reserved_at,pay_before,idem_key,idem_digest,created_at,updated_at"

// NewOrder is the row of an order's content in the given state. CreatedAt and UpdatedAt are set by
// the database when it is inserted.
func NewOrder(o order.Order, status order.Status, reason, origin string) (*Order, error) {
	amount, err := o.AmountMinor()
	if err != nil {
		return nil, fmt.Errorf("order %s: %w", o.ID, err)
	}
	return &Order{
		ID: o.ID.String(), ActivityID: o.ID.Activity, UserID: o.User, SKUID: o.SKU, Region: o.Region, Pool: o.Pool,
		Quantity: o.Quantity, UnitPriceMinor: o.UnitPriceMinor, AmountMinor: amount, Currency: o.Currency,
		Status: status, Reason: reason, Origin: origin, Epoch: o.Epoch,
		PaymentTimeoutS: int(o.PaymentTimeout / time.Second), ReservedAt: o.ReservedAt, PayBefore: o.PayBefore,
		IdemKey: o.IdemKey, IdemDigest: o.IdemDigest,
	}, nil
}

// BareOrder is a tombstone of which only the id is known (R5, R18).
func BareOrder(id order.ID, status order.Status, reason string, at time.Time) *Order {
	return &Order{ID: id.String(), ActivityID: id.Activity, Status: status, Reason: reason, Origin: OriginBare, ReservedAt: at, PayBefore: at}
}

// SameContent reports whether a message that names the row's id is a duplicate of it: same user,
// activity, sku, pool and quantity. Of a bare tombstone nothing but the id is known.
func (o *Order) SameContent(c order.Order) bool {
	return o.Origin == OriginBare ||
		o.UserID == c.User && o.ActivityID == c.ID.Activity && o.SKUID == c.SKU && o.Quantity == c.Quantity && o.Pool == c.Pool
}

// Orders reads rows by id; what is not there is absent from the answer. With lock the rows stay
// locked until the transaction ends, in the order of their ids.
func Orders(ctx context.Context, q Querier, ids []string, lock bool) (map[string]*Order, error) {
	out := make(map[string]*Order, len(ids))
	err := chunks(sortedUnique(ids), func(ids []string) error {
		w := sqlBuf{}
		// The index is forced: for a small table the optimizer would rather scan it, and a locking
		// scan waits for rows that are none of ours.
		w.raw("SELECT ").raw(orderColumns).raw(" FROM orders FORCE INDEX (PRIMARY) WHERE id IN ").list(ids)
		if lock {
			w.raw(" ORDER BY id FOR UPDATE")
		}
		rows, err := q.QueryContext(ctx, w.String())
		if err != nil {
			return fmt.Errorf("read orders: %w", err)
		}
		return scanOrders(rows, func(o *Order) { out[o.ID] = o })
	})
	return out, err
}

// LockOrders is Orders with lock, for taking orders back: only what a cancel decides by and gives back
// is read, a third of the columns. Nothing else of the rows is set.
func LockOrders(ctx context.Context, q Querier, ids []string) (map[string]*Order, error) {
	out := make(map[string]*Order, len(ids))
	err := chunks(sortedUnique(ids), func(ids []string) error {
		w := sqlBuf{}
		w.raw("SELECT id,activity_id,user_id,sku_id,pool,quantity,status,reason,origin,pay_before FROM orders FORCE INDEX (PRIMARY) WHERE id IN ").
			list(ids).raw(" ORDER BY id FOR UPDATE")
		rows, err := q.QueryContext(ctx, w.String())
		if err != nil {
			return fmt.Errorf("lock orders: %w", err)
		}
		return eachOrder(rows, func(o *Order, status *string) []any {
			return []any{&o.ID, &o.ActivityID, &o.UserID, &o.SKUID, &o.Pool, &o.Quantity, status, &o.Reason, &o.Origin, &o.PayBefore}
		}, func(o *Order) { out[o.ID] = o })
	})
	return out, err
}

func sortedUnique(ids []string) []string {
	sorted := slices.Clone(ids)
	slices.Sort(sorted)
	return slices.Compact(sorted)
}

func scanOrders(rows *sql.Rows, each func(*Order)) error {
	return eachOrder(rows, func(o *Order, status *string) []any {
		return []any{
			&o.ID, &o.ActivityID, &o.UserID, &o.SKUID, &o.Region, &o.Pool, &o.Quantity, &o.UnitPriceMinor,
			&o.AmountMinor, &o.Currency, status, &o.Reason, &o.Origin, &o.Epoch, &o.PaymentTimeoutS, &o.ReservedAt,
			&o.PayBefore, &o.IdemKey, &o.IdemDigest, &o.CreatedAt, &o.UpdatedAt,
		}
	}, each)
}

// eachOrder scans each row into an order of its own, into the fields that columns names.
func eachOrder(rows *sql.Rows, columns func(o *Order, status *string) []any, each func(*Order)) error {
	defer rows.Close() //nolint:errcheck // Err says what went wrong
	for rows.Next() {
		o := &Order{}
		var status string
		if err := rows.Scan(columns(o, &status)...); err != nil {
			return fmt.Errorf("read orders: %w", err)
		}
		st, err := order.ParseStatus(status)
		if err == nil && st == order.Reserved {
			err = errors.New("a row is never reserved")
		}
		if err != nil {
			return fmt.Errorf("read order %s: %w: %w", o.ID, ErrUndecidable, err)
		}
		o.Status = st
		each(o)
	}
	if err := rows.Err(); err != nil {
		return fmt.Errorf("read orders: %w", err)
	}
	return nil
}

// InsertOrders writes rows plainly: one that is there already fails the statement with a duplicate
// key, and the caller rolls back and reads again (R13).
func InsertOrders(ctx context.Context, q Querier, rows []*Order) error {
	return chunks(rows, func(rows []*Order) error {
		w := sqlBuf{b: make([]byte, 0, 400*len(rows))}
		w.raw("INSERT INTO orders (").raw(orderColumns).raw(",room) VALUES ")
		for i, o := range rows {
			if i > 0 {
				w.comma()
			}
			w.raw("(").str(o.ID).comma().str(o.ActivityID).comma().str(o.UserID).comma().str(o.SKUID).comma().str(o.Region).comma().str(o.Pool).
				comma().num(int64(o.Quantity)).comma().num(o.UnitPriceMinor).comma().num(o.AmountMinor).comma().str(o.Currency).
				comma().str(string(o.Status)).comma().str(o.Reason).comma().str(o.Origin).comma().num(int64(o.Epoch)). //nolint:gosec // checked by the decoder
				comma().num(int64(o.PaymentTimeoutS)).comma().time(o.ReservedAt).comma().time(o.PayBefore).
				comma().str(o.IdemKey).comma().str(o.IdemDigest).raw(",UTC_TIMESTAMP(6),UTC_TIMESTAMP(6),").raw(roomFor(o.Status)).raw(")")
		}
		if _, err := q.ExecContext(ctx, w.String()); err != nil {
			return fmt.Errorf("insert %d orders: %w", len(rows), err)
		}
		return nil
	})
}

// roomFor is what the column room of a row in this state holds: as long as status and reason may still grow,
// as many spaces as they can grow by, so that the row can be changed where it lies.
func roomFor(s order.Status) string {
	if s.Final() {
		return "''"
	}
	return "'                    '"
}

// CompleteTombstone fills in the content of a bare tombstone from the order's own message.
func CompleteTombstone(ctx context.Context, q Querier, o *Order) error {
	if _, err := q.ExecContext(ctx, "UPDATE orders SET user_id=?, sku_id=?, region=?, pool=?, quantity=?, unit_price_minor=?, amount_minor=?, currency=?, "+
		"origin=?, epoch=?, payment_timeout_s=?, reserved_at=?, pay_before=?, idem_key=?, idem_digest=?, updated_at=UTC_TIMESTAMP(6) WHERE id=? AND origin=?",
		o.UserID, o.SKUID, o.Region, o.Pool, o.Quantity, o.UnitPriceMinor, o.AmountMinor, o.Currency,
		OriginTombstone, o.Epoch, o.PaymentTimeoutS, o.ReservedAt, o.PayBefore, o.IdemKey, o.IdemDigest, o.ID, OriginBare); err != nil {
		return fmt.Errorf("complete tombstone %s: %w", o.ID, err)
	}
	return nil
}

// MoveOrders sets the state of rows that are all in state from, and reports how many were.
func MoveOrders(ctx context.Context, q Querier, ids []string, from, to order.Status, reason string) (int, error) {
	total := 0
	err := chunks(ids, func(ids []string) error {
		w := sqlBuf{}
		w.raw("UPDATE orders SET status=").str(string(to)).raw(",reason=").str(reason).raw(",room=").raw(roomFor(to)).
			raw(",updated_at=UTC_TIMESTAMP(6) WHERE id IN ").list(ids).raw(" AND status=").str(string(from))
		res, err := q.ExecContext(ctx, w.String())
		if err != nil {
			return fmt.Errorf("set %d orders to %s: %w", len(ids), to, err)
		}
		n, err := res.RowsAffected()
		if err != nil {
			return fmt.Errorf("set %d orders to %s: %w", len(ids), to, err)
		}
		total += int(n)
		if to == order.Paid {
			return notePaid(ctx, q, ids)
		}
		return nil
	})
	return total, err
}

// Due is a pending order whose payment time is over.
type Due struct {
	ID        string
	PayBefore time.Time
}

// OrdersDue reads pending orders whose payment time has been over for at least grace, oldest first,
// from behind after on (the zero Due: from the first). With an activity, of that sale alone.
func (s *Store) OrdersDue(ctx context.Context, activity string, grace time.Duration, after Due, limit int) ([]Due, error) {
	w := sqlBuf{}
	w.raw("SELECT id, pay_before FROM orders WHERE status='pending' AND pay_before <= UTC_TIMESTAMP(6) - INTERVAL ").num(grace.Microseconds()).raw(" MICROSECOND")
	if activity != "" {
		w.raw(" AND activity_id=").str(activity)
	}
	if after.ID != "" {
		w.raw(" AND pay_before>=").time(after.PayBefore).raw(" AND (pay_before>").time(after.PayBefore).raw(" OR id>").str(after.ID).raw(")")
	}
	w.raw(" ORDER BY pay_before, id LIMIT ").num(int64(limit))
	rows, err := s.db.QueryContext(ctx, w.String())
	if err != nil {
		return nil, fmt.Errorf("read orders due: %w", err)
	}
	defer rows.Close() //nolint:errcheck // Err says what went wrong
	var out []Due
	for rows.Next() {
		var d Due
		if err := rows.Scan(&d.ID, &d.PayBefore); err != nil {
			return nil, fmt.Errorf("read orders due: %w", err)
		}
		out = append(out, d)
	}
	if err := rows.Err(); err != nil {
		return nil, fmt.Errorf("read orders due: %w", err)
	}
	return out, nil
}

func scanStrings(rows *sql.Rows, what string) ([]string, error) {
	defer rows.Close() //nolint:errcheck // Err says what went wrong
	var out []string
	for rows.Next() {
		var v string
		if err := rows.Scan(&v); err != nil {
			return nil, fmt.Errorf("%s: %w", what, err)
		}
		out = append(out, v)
	}
	if err := rows.Err(); err != nil {
		return nil, fmt.Errorf("%s: %w", what, err)
	}
	return out, nil
}
