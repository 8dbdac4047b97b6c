package admin

import (
	"database/sql"
	"errors"
	"fmt"
	"net/http"
	"strconv"

	"seckill/pkg/adminapi"
	"seckill/pkg/order"
	"seckill/services/order-worker/internal/audit"
	"seckill/services/order-worker/internal/store"
)

func rowToPayment(p *store.Payment) adminapi.Payment {
	out := adminapi.Payment{
		TransactionID: p.TransactionID, OrderID: p.OrderID, AmountMinor: p.AmountMinor, Currency: p.Currency, Status: p.Status, Reason: p.Reason,
		ReceivedAt: p.ReceivedAt, SettledBy: p.SettledBy, SettleReason: p.SettleReason,
	}
	if p.SettledAt != nil {
		out.SettledAt = *p.SettledAt
	}
	return out
}

func (s *Server) listPayments(w http.ResponseWriter, r *http.Request) error {
	limit, cursor, err := pageOf(r)
	if err != nil {
		return err
	}
	q := s.deps.Store.DB(r.Context()).Order("transaction_id").Limit(limit + 1)
	switch status := r.URL.Query().Get("status"); status {
	case "":
	case store.PaymentKept, store.PaymentApplied, store.PaymentRefundDue, store.PaymentSettled:
		q = q.Where("status = ?", status)
	default:
		return invalid("status must be kept, applied, refund_due or settled")
	}
	if id := r.URL.Query().Get("order_id"); id != "" {
		if _, err := order.ParseID(id); err != nil {
			return invalid("order_id is not valid")
		}
		q = q.Where("order_id = ?", id)
	}
	if query := r.URL.Query(); query.Has("transaction_id") {
		q = q.Where("transaction_id = ?", query.Get("transaction_id"))
	}
	if cursor != "" {
		q = q.Where("transaction_id > ?", cursor)
	}
	var rows []store.Payment
	if err := q.Find(&rows).Error; err != nil {
		return fmt.Errorf("list payments: %w", err)
	}
	out := adminapi.PaymentList{Payments: []adminapi.Payment{}}
	if len(rows) > limit {
		rows = rows[:limit]
		out.NextCursor = rows[limit-1].TransactionID
	}
	for i := range rows {
		out.Payments = append(out.Payments, rowToPayment(&rows[i]))
	}
	return WriteJSON(w, http.StatusOK, out)
}

// settleRefund notes that the money of a payment has been sent back, once.
func (s *Server) settleRefund(w http.ResponseWriter, r *http.Request) error {
	ctx, id := r.Context(), r.PathValue("txn")
	var in adminapi.SettleRefundRequest
	if err := Decode(r, &in); err != nil {
		return err
	}
	if err := CheckReason(in.Reason); err != nil {
		return err
	}
	unknown := NewProblem(http.StatusNotFound, adminapi.CodePaymentNotFound, "there is no such payment")
	if !order.ValidTransactionID(id) {
		return unknown
	}
	by := ActorFrom(ctx)
	changed := false
	err := s.deps.Store.InTx(ctx, func(tx *store.Tx) error {
		changed = false
		var status, of string
		err := tx.QueryRowContext(ctx, "SELECT status, order_id FROM payments WHERE transaction_id = ? FOR UPDATE", id).Scan(&status, &of)
		switch {
		case errors.Is(err, sql.ErrNoRows):
			return unknown
		case err != nil:
			return fmt.Errorf("lock payment %s: %w", id, err)
		case status == store.PaymentSettled:
			return nil
		case status != store.PaymentRefundDue:
			return NewProblem(http.StatusConflict, adminapi.CodeConflict, "no refund is due: the payment is "+status)
		}
		if _, err := tx.ExecContext(ctx, `UPDATE payments SET status = ?, settled_at = UTC_TIMESTAMP(6), settled_by = ?, settle_reason = ?, updated_at = UTC_TIMESTAMP(6)
			WHERE transaction_id = ? AND status = ?`, store.PaymentSettled, by.Name, in.Reason, id, store.PaymentRefundDue); err != nil {
			return fmt.Errorf("settle payment %s: %w", id, err)
		}
		changed = true
		// The buyer's order still says that his money is due; the sweep takes that off.
		if oid, err := order.ParseID(of); err == nil {
			if err := store.Owe(ctx, tx, store.CompensateRefundDue, []*store.Order{{ID: of, ActivityID: oid.Activity}}, 0); err != nil {
				return err
			}
		}
		return audit.Write(ctx, tx, by, audit.Entry{
			Action: "payment.settle_refund", Subject: id, Reason: in.Reason, Result: "done",
			Before: map[string]string{"status": status}, After: map[string]string{"status": store.PaymentSettled},
		})
	})
	if err != nil {
		return err
	}
	var row store.Payment
	if err := s.deps.Store.DB(ctx).Where("transaction_id = ?", id).Take(&row).Error; err != nil {
		return fmt.Errorf("read payment %s: %w", id, err)
	}
	return WriteJSON(w, http.StatusOK, adminapi.SettleRefundResult{Payment: rowToPayment(&row), Changed: changed})
}

// paidOrders is the feed that fulfilment reads. The answer always has a cursor: where to go on.
func (s *Server) paidOrders(w http.ResponseWriter, r *http.Request) error {
	limit, _, err := pageOf(r)
	if err != nil {
		return err
	}
	for name := range r.URL.Query() {
		if name != "after" && name != "limit" {
			return invalid("the feed has no parameter " + strconv.Quote(name)) // a mistyped cursor would begin it anew
		}
	}
	after := int64(0)
	if text := r.URL.Query().Get("after"); text != "" {
		if after, err = strconv.ParseInt(text, 10, 64); err != nil || after < 0 {
			return invalid("after is not a cursor of this feed")
		}
	}
	rows, err := s.deps.Store.PaidSince(r.Context(), after, limit)
	if err != nil {
		return err
	}
	out := adminapi.PaidOrderList{Orders: []adminapi.PaidOrder{}}
	for i := range rows {
		out.Orders = append(out.Orders, adminapi.PaidOrder{Order: rowToOrder(&rows[i].Order), PaidAt: rows[i].PaidAt})
		after = rows[i].Position
	}
	out.NextCursor = strconv.FormatInt(after, 10)
	return WriteJSON(w, http.StatusOK, out)
}
