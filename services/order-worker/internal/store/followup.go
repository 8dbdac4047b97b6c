package store

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"seckill/pkg/order"
)

// Owe notes work that the transaction's commit leaves to be done (R3). It comes up again by itself
// after the given time, unless Paid has removed it by then.
func Owe(ctx context.Context, q Querier, kind string, due []*Order, after time.Duration) error {
	return chunks(due, func(due []*Order) error {
		w := sqlBuf{b: make([]byte, 0, 160*len(due))}
		w.raw("INSERT INTO compensations (kind,subject,activity_id,next_at,created_at) VALUES ")
		for i, o := range due {
			if i > 0 {
				w.comma()
			}
			w.raw("(").str(kind).comma().str(o.ID).comma().str(o.ActivityID).raw(",UTC_TIMESTAMP(6)+INTERVAL ").num(after.Microseconds()).raw(" MICROSECOND,UTC_TIMESTAMP(6))")
		}
		w.raw(" ON DUPLICATE KEY UPDATE next_at=GREATEST(next_at,VALUES(next_at))")
		if _, err := q.ExecContext(ctx, w.String()); err != nil {
			return fmt.Errorf("note %d compensations: %w", len(due), err)
		}
		return nil
	})
}

// OweBatch is Owe for all orders of a transaction in one row per sale, and gives the rows' subjects for
// Paid. A row per order cost as much as everything else that a rollback does.
func OweBatch(ctx context.Context, q Querier, kind string, due []*Order, after time.Duration) ([]string, error) {
	var subjects []string
	of := map[string][]string{}
	for _, o := range due {
		if of[o.ActivityID] == nil {
			subjects = append(subjects, o.ActivityID)
		}
		of[o.ActivityID] = append(of[o.ActivityID], o.ID)
	}
	for i, activity := range subjects {
		ids := of[activity]
		// An order becomes final once, so its id names one batch only.
		var detail any
		subjects[i] = ids[0]
		if len(ids) > 1 {
			subjects[i] += "+" + strconv.Itoa(len(ids)-1)
			detail = strings.Join(ids, " ")
		}
		if _, err := q.ExecContext(ctx, "INSERT INTO compensations (kind,subject,activity_id,next_at,detail,created_at) "+
			"VALUES (?,?,?,UTC_TIMESTAMP(6)+INTERVAL ? MICROSECOND,?,UTC_TIMESTAMP(6)) ON DUPLICATE KEY UPDATE next_at=VALUES(next_at), detail=VALUES(detail)",
			kind, subjects[i], activity, after.Microseconds(), detail); err != nil {
			return nil, fmt.Errorf("note compensation for %d orders: %w", len(ids), err)
		}
	}
	return subjects, nil
}

// OweReconcile asks for a comparison of a sale: a guard that never fires has fired (R7).
func OweReconcile(ctx context.Context, q Querier, activity, why string) error {
	if _, err := q.ExecContext(ctx, "INSERT INTO compensations (kind,subject,activity_id,next_at,last_error,created_at) "+
		"VALUES (?,?,?,UTC_TIMESTAMP(6),?,UTC_TIMESTAMP(6)) ON DUPLICATE KEY UPDATE next_at=VALUES(next_at), last_error=VALUES(last_error)",
		CompensateReconcile, activity, activity, why); err != nil {
		return fmt.Errorf("ask for reconciliation of %s: %w", activity, err)
	}
	return nil
}

// Paid removes compensations that have been carried out.
func (s *Store) Paid(ctx context.Context, kind string, subjects []string) error {
	return chunks(subjects, func(subjects []string) error {
		w := sqlBuf{}
		w.raw("DELETE FROM compensations WHERE kind=").str(kind).raw(" AND subject IN ").list(subjects)
		if _, err := s.db.ExecContext(ctx, w.String()); err != nil {
			return fmt.Errorf("remove %d compensations: %w", len(subjects), err)
		}
		return nil
	})
}

// CompensationsDue reads compensations whose time has come, oldest first. Each is pushed into the
// future in the same step, growing with its attempts, so that several sweepers share the work and a
// sweeper that dies only delays it.
func (s *Store) CompensationsDue(ctx context.Context, kinds []string, limit int) ([]Compensation, error) {
	var due []Compensation
	err := s.InTx(ctx, func(tx *Tx) error {
		due = nil
		w := sqlBuf{}
		w.raw("SELECT kind,subject,activity_id,attempts,next_at,last_error,detail,created_at FROM compensations WHERE next_at<=UTC_TIMESTAMP(6) AND kind IN ").
			list(kinds).raw(" ORDER BY next_at LIMIT ").num(int64(limit)).raw(" FOR UPDATE SKIP LOCKED")
		rows, err := tx.QueryContext(ctx, w.String())
		if err != nil {
			return fmt.Errorf("read compensations due: %w", err)
		}
		defer rows.Close() //nolint:errcheck // Err says what went wrong
		for rows.Next() {
			var c Compensation
			if err := rows.Scan(&c.Kind, &c.Subject, &c.ActivityID, &c.Attempts, &c.NextAt, &c.LastError, &c.Detail, &c.CreatedAt); err != nil {
				return fmt.Errorf("read compensations due: %w", err)
			}
			due = append(due, c)
		}
		if err := rows.Err(); err != nil {
			return fmt.Errorf("read compensations due: %w", err)
		}
		byKind := map[string][]string{}
		for _, c := range due {
			byKind[c.Kind] = append(byKind[c.Kind], c.Subject)
		}
		for kind, subjects := range byKind {
			w := sqlBuf{}
			// 2 s, 4 s, 8 s … 5 min
			w.raw("UPDATE compensations SET attempts=attempts+1, next_at=UTC_TIMESTAMP(6)+INTERVAL LEAST(300, POW(2, LEAST(attempts, 10))) SECOND WHERE kind=").
				str(kind).raw(" AND subject IN ").list(subjects)
			if _, err := tx.ExecContext(ctx, w.String()); err != nil {
				return fmt.Errorf("put off compensations: %w", err)
			}
		}
		return nil
	})
	return due, err
}

// CompensationFailed keeps the last error of compensations that stay.
func (s *Store) CompensationFailed(ctx context.Context, kind string, subjects []string, cause error) error {
	text := cause.Error()
	if len(text) > 500 {
		text = text[:500]
	}
	return chunks(subjects, func(subjects []string) error {
		w := sqlBuf{}
		w.raw("UPDATE compensations SET last_error=").str(text).raw(" WHERE kind=").str(kind).raw(" AND subject IN ").list(subjects)
		if _, err := s.db.ExecContext(ctx, w.String()); err != nil {
			return fmt.Errorf("note failed compensations: %w", err)
		}
		return nil
	})
}

// Waiting says in one statement whether there is anything at all to look for after a commit: kept
// payments (R5), dead letters that may be resolved. Both are rare, and asking by order id each time
// would cost as much as writing the orders.
func (s *Store) Waiting(ctx context.Context) (payments, letters bool, err error) {
	row := s.db.QueryRowContext(ctx, "SELECT EXISTS(SELECT 1 FROM payments WHERE status='kept'), "+
		"EXISTS(SELECT 1 FROM dead_letters WHERE state='open' OR state='claimed' OR state='sent')")
	if err := row.Scan(&payments, &letters); err != nil {
		return false, false, fmt.Errorf("look for kept payments and letters: %w", err)
	}
	return payments, letters, nil
}

// ResolveLetters closes the dead letters of orders whose message of that kind has been handled now
// (R15: guarded, so that a late "sent" finds them closed). A letter that contradicts the row stays.
func (s *Store) ResolveLetters(ctx context.Context, queue string, orderIDs []string) error {
	return chunks(orderIDs, func(ids []string) error {
		return s.resolveLetters(ctx, queue, ids, nil)
	})
}

// ResolvePayments closes the letters of payments that were booked now, by the ids of their messages: an
// order may be paid twice, and what was booked says nothing about the payment that lies there.
func (s *Store) ResolvePayments(ctx context.Context, queue string, orderIDs, messageIDs []string) error {
	return s.resolveLetters(ctx, queue, orderIDs, messageIDs)
}

func (s *Store) resolveLetters(ctx context.Context, queue string, orderIDs, messageIDs []string) error {
	if len(orderIDs) == 0 {
		return nil
	}
	w := sqlBuf{}
	w.raw("UPDATE dead_letters SET state='resolved', parked=0, updated_at=UTC_TIMESTAMP(6) WHERE order_id IN ").list(orderIDs).
		raw(" AND source_queue=").str(queue).raw(" AND state IN ('open','claimed','sent') AND class<>'conflict'")
	for i, id := range messageIDs {
		// As bytes: a foreign id may be anything, and the column's collation takes A for a.
		w.raw([]string{" AND CAST(message_id AS BINARY) IN (", ","}[min(i, 1)]).bytes([]byte(id))
	}
	if len(messageIDs) > 0 {
		w.raw(")")
	}
	if _, err := s.db.ExecContext(ctx, w.String()); err != nil {
		return fmt.Errorf("resolve dead letters: %w", err)
	}
	return nil
}

// Reasons why a payment is due for refund.
const (
	DueLate     = "late_payment"    // its order was over already
	DueSecond   = "second_payment"  // its order was paid by another transaction
	DueAmount   = "amount_mismatch" // other amount or currency than the order's
	DueLost     = "order_lost"      // its order never came
	DueRefunded = "order_refunded"  // its order was paid by it and refunded
)

// Decide says what becomes of a payment that meets the row o, and whether it pays it (R5).
func (p *Payment) Decide(o *Order) (status, reason string, pays bool) {
	switch {
	case o.Status == order.Pending && o.AmountMinor == p.AmountMinor && o.Currency == p.Currency:
		return PaymentApplied, "", true
	case o.Status == order.Pending:
		return PaymentRefundDue, DueAmount, false
	case o.Status == order.Paid:
		return PaymentRefundDue, DueSecond, false
	case o.Status == order.Refunded:
		return PaymentRefundDue, DueRefunded, false
	case o.Reason == order.ReasonOrderLost:
		return PaymentRefundDue, DueLost, false
	default:
		return PaymentRefundDue, DueLate, false
	}
}

const paymentColumns = "transaction_id,order_id,amount_minor,currency,status,reason,received_at,content,created_at,updated_at"

// Payments reads payments by transaction id.
func Payments(ctx context.Context, q Querier, ids []string) (map[string]*Payment, error) {
	out := map[string]*Payment{}
	if len(ids) == 0 {
		return out, nil
	}
	w := sqlBuf{}
	w.raw("SELECT ").raw(paymentColumns).raw(" FROM payments WHERE transaction_id IN ").list(ids)
	err := queryPayments(ctx, q, w.String(), func(p *Payment) { out[p.TransactionID] = p })
	return out, err
}

func queryPayments(ctx context.Context, q Querier, query string, each func(*Payment)) error {
	rows, err := q.QueryContext(ctx, query)
	if err != nil {
		return fmt.Errorf("read payments: %w", err)
	}
	defer rows.Close() //nolint:errcheck // Err says what went wrong
	for rows.Next() {
		p := &Payment{}
		if err := rows.Scan(&p.TransactionID, &p.OrderID, &p.AmountMinor, &p.Currency, &p.Status, &p.Reason, &p.ReceivedAt, &p.Content, &p.CreatedAt, &p.UpdatedAt); err != nil {
			return fmt.Errorf("read payments: %w", err)
		}
		each(p)
	}
	if err := rows.Err(); err != nil {
		return fmt.Errorf("read payments: %w", err)
	}
	return nil
}

// PaymentsOf selects the payments of a sale, those for orders without a row among them: the first two
// conditions use the index, the third tells a sale from another whose id goes on where this one's ends.
const PaymentsOf = "order_id > ? AND order_id < ? AND order_id REGEXP ?"

// PaymentsOfArgs are its arguments.
func PaymentsOfArgs(activity string) []any {
	return []any{activity + "-", activity + ".", "^" + activity + "-[0-9]+-[0-9A-Z]{26}$"}
}

// RefundsDue says for which of the orders money has to go back.
func (s *Store) RefundsDue(ctx context.Context, orderIDs []string) (map[string]bool, error) {
	out := map[string]bool{}
	err := chunks(orderIDs, func(ids []string) error {
		w := sqlBuf{}
		w.raw("SELECT DISTINCT order_id FROM payments WHERE order_id IN ").list(ids).raw(" AND status=").str(PaymentRefundDue)
		rows, err := s.db.QueryContext(ctx, w.String())
		if err != nil {
			return fmt.Errorf("read refunds due: %w", err)
		}
		due, err := scanStrings(rows, "read refunds due")
		for _, id := range due {
			out[id] = true
		}
		return err
	})
	return out, err
}

// InsertPayments writes payments plainly; see InsertOrders.
func InsertPayments(ctx context.Context, q Querier, ps []*Payment) error {
	return chunks(ps, func(ps []*Payment) error {
		w := sqlBuf{}
		w.raw("INSERT INTO payments (").raw(paymentColumns).raw(") VALUES ")
		for i, p := range ps {
			if i > 0 {
				w.comma()
			}
			w.raw("(").str(p.TransactionID).comma().str(p.OrderID).comma().num(p.AmountMinor).comma().str(p.Currency).comma().str(p.Status).
				comma().str(p.Reason).comma().time(p.ReceivedAt).comma().bytes(p.Content).raw(",UTC_TIMESTAMP(6),UTC_TIMESTAMP(6))")
		}
		if _, err := q.ExecContext(ctx, w.String()); err != nil {
			return fmt.Errorf("insert %d payments: %w", len(ps), err)
		}
		return nil
	})
}

// SetPayment moves a kept payment on.
func SetPayment(ctx context.Context, q Querier, id, from, to, reason string) error {
	if _, err := q.ExecContext(ctx, "UPDATE payments SET status=?, reason=?, updated_at=UTC_TIMESTAMP(6) WHERE transaction_id=? AND status=?", to, reason, id, from); err != nil {
		return fmt.Errorf("set payment %s to %s: %w", id, to, err)
	}
	return nil
}

// RefundPayments makes the money of refunded orders due.
func RefundPayments(ctx context.Context, q Querier, rows []*Order) error {
	ids := make([]string, len(rows))
	for i, o := range rows {
		ids[i] = o.ID
	}
	return chunks(ids, func(ids []string) error {
		w := sqlBuf{}
		w.raw("UPDATE payments SET status='refund_due', reason=").str(DueRefunded).raw(", updated_at=UTC_TIMESTAMP(6) WHERE order_id IN ").list(ids).raw(" AND status='applied'")
		if _, err := q.ExecContext(ctx, w.String()); err != nil {
			return fmt.Errorf("make payments of %d refunded orders due: %w", len(ids), err)
		}
		return nil
	})
}

// TouchPayment lets a kept payment wait once more.
func (s *Store) TouchPayment(ctx context.Context, id string) error {
	if _, err := s.db.ExecContext(ctx, "UPDATE payments SET updated_at=UTC_TIMESTAMP(6) WHERE transaction_id=? AND status='kept'", id); err != nil {
		return fmt.Errorf("let payment %s wait: %w", id, err)
	}
	return nil
}

// ApplyKept applies the kept payments of orders whose rows are known, in a transaction of its own
// with locking reads. Both sides call it after their own commit, the one that writes the order and
// the one that writes the payment: whichever commits second sees the other's work (R5). It gives
// back the rows of the orders it met a payment for, as they are now, and which of them are due for a
// refund.
func (s *Store) ApplyKept(ctx context.Context, orderIDs []string) (rows map[string]*Order, due map[string]bool, err error) {
	err = s.InTx(ctx, func(tx *Tx) error {
		rows, due = map[string]*Order{}, map[string]bool{}
		var kept []*Payment
		err := chunks(orderIDs, func(ids []string) error {
			w := sqlBuf{}
			w.raw("SELECT ").raw(paymentColumns).raw(" FROM payments FORCE INDEX (payments_order) WHERE order_id IN ").list(ids).raw(" AND status='kept'")
			return queryPayments(ctx, tx, w.String(), func(p *Payment) { kept = append(kept, p) })
		})
		if err != nil || len(kept) == 0 {
			return err
		}
		var ids []string
		for _, p := range kept {
			ids = append(ids, p.OrderID)
		}
		locked, err := Orders(ctx, tx, ids, true)
		if err != nil {
			return err
		}
		slices.SortFunc(kept, func(a, b *Payment) int { return a.ReceivedAt.Compare(b.ReceivedAt) })
		for _, p := range kept {
			o := locked[p.OrderID]
			if o == nil {
				continue
			}
			status, reason, pays := p.Decide(o)
			// Guarded by the state: another holder of the same payment may have been first.
			res, err := tx.ExecContext(ctx, "UPDATE payments SET status=?, reason=?, updated_at=UTC_TIMESTAMP(6) WHERE transaction_id=? AND status='kept'", status, reason, p.TransactionID)
			if err != nil {
				return fmt.Errorf("apply payment %s: %w", p.TransactionID, err)
			}
			if n, err := res.RowsAffected(); err != nil {
				return fmt.Errorf("apply payment %s: %w", p.TransactionID, err)
			} else if n == 0 {
				continue
			}
			if pays {
				if _, err := MoveOrders(ctx, tx, []string{o.ID}, order.Pending, order.Paid, ""); err != nil {
					return err
				}
				o.Status = order.Paid
			} else {
				due[o.ID] = true
			}
			rows[o.ID] = o
		}
		owed := make([]*Order, 0, len(due))
		for id := range due {
			owed = append(owed, rows[id])
		}
		// The message that brings us here may be the order's: when it comes again nothing is kept
		// any more, so what is still to be told to Redis is noted.
		return Owe(ctx, tx, CompensateRefundDue, owed, 30*time.Second)
	})
	if err != nil {
		return nil, nil, err
	}
	return rows, due, nil
}

// OrphanPayments reads kept payments that have waited longer than age.
func (s *Store) OrphanPayments(ctx context.Context, age time.Duration, limit int) ([]*Payment, error) {
	w := sqlBuf{}
	w.raw("SELECT ").raw(paymentColumns).raw(" FROM payments WHERE status='kept' AND updated_at<UTC_TIMESTAMP(6)-INTERVAL ").num(age.Microseconds()).
		raw(" MICROSECOND ORDER BY updated_at LIMIT ").num(int64(limit))
	var out []*Payment
	err := queryPayments(ctx, s.db, w.String(), func(p *Payment) { out = append(out, p) })
	return out, err
}
