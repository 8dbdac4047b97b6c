package admin

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"seckill/pkg/adminapi"
	"seckill/pkg/messaging"
	"seckill/pkg/order"
	"seckill/pkg/stock"
	"seckill/services/order-worker/internal/audit"
	"seckill/services/order-worker/internal/store"
)

// confirmWait bounds how long a caller waits for the broker.
const confirmWait = 5 * time.Second

func rowToOrder(o *store.Order) adminapi.Order {
	return adminapi.Order{
		OrderID: o.ID, ActivityID: o.ActivityID, UserID: o.UserID, SKU: o.SKUID, Region: o.Region, Pool: o.Pool, Quantity: o.Quantity,
		UnitPriceMinor: o.UnitPriceMinor, AmountMinor: o.AmountMinor, Currency: o.Currency, Status: string(o.Status), Reason: o.Reason,
		ReservedAt: o.ReservedAt, PayBefore: o.PayBefore, CreatedAt: o.CreatedAt, UpdatedAt: o.UpdatedAt, Source: "mysql",
	}
}

func recordToOrder(rec stock.Record) adminapi.Order {
	amount, _ := rec.AmountMinor() // 0 for a receipt that does not hold the price any more
	return adminapi.Order{
		OrderID: rec.ID.String(), ActivityID: rec.ID.Activity, UserID: rec.User, SKU: rec.SKU, Region: rec.Region, Pool: rec.Pool,
		Quantity: rec.Quantity, UnitPriceMinor: rec.UnitPriceMinor, AmountMinor: amount, Currency: rec.Currency, Status: string(rec.Status),
		Reason: rec.Reason, RefundDue: rec.RefundDue, ReservedAt: rec.ReservedAt, PayBefore: rec.PayBefore, Source: "redis",
	}
}

func (s *Server) listOrders(w http.ResponseWriter, r *http.Request) error {
	limit, cursor, err := pageOf(r)
	if err != nil {
		return err
	}
	query := r.URL.Query()
	q := s.deps.Store.DB(r.Context()).Order("id").Limit(limit + 1)
	if id := query.Get("activity_id"); id != "" {
		if !order.ValidActivityID(id) {
			return invalid("activity_id is not valid")
		}
		// Ids begin with their activity, so this is a range of the primary key; '.' follows '-'.
		q = q.Where("id > ? AND id < ? AND activity_id = ?", id+"-", id+".", id)
	}
	if status := query.Get("status"); status != "" {
		if _, err := order.ParseStatus(status); err != nil {
			return invalid(err.Error())
		}
		q = q.Where("status = ?", status)
	}
	if user := query.Get("user_id"); user != "" {
		q = q.Where("user_id = ?", user)
	}
	if cursor != "" {
		q = q.Where("id > ?", cursor)
	}
	var rows []store.Order
	if err := q.Find(&rows).Error; err != nil {
		return fmt.Errorf("list orders: %w", err)
	}
	if id := query.Get("activity_id"); id != "" && len(rows) == 0 && cursor == "" {
		// An empty list for a mistyped sale would read as "nobody bought".
		if _, err := s.deps.Activities.Load(r.Context(), id); err != nil {
			return err
		}
	}
	out := adminapi.OrderList{Orders: []adminapi.Order{}}
	if len(rows) > limit {
		rows = rows[:limit]
		out.NextCursor = rows[limit-1].ID
	}
	due, err := s.refundDue(r.Context(), rows)
	if err != nil {
		return err
	}
	for i := range rows {
		o := rowToOrder(&rows[i])
		o.RefundDue = due[o.OrderID]
		out.Orders = append(out.Orders, o)
	}
	return WriteJSON(w, http.StatusOK, out)
}

func (s *Server) refundDue(ctx context.Context, rows []store.Order) (map[string]bool, error) {
	if len(rows) == 0 {
		return nil, nil
	}
	ids := make([]string, len(rows))
	for i := range rows {
		ids[i] = rows[i].ID
	}
	var due []string
	err := s.deps.Store.DB(ctx).Model(&store.Payment{}).Where("order_id IN ? AND status = ?", ids, store.PaymentRefundDue).Pluck("order_id", &due).Error
	if err != nil {
		return nil, fmt.Errorf("list refunds due: %w", err)
	}
	out := map[string]bool{}
	for _, id := range due {
		out[id] = true
	}
	return out, nil
}

// findOrder looks in MySQL, then in Redis: an accepted order may be on its way between the two.
func (s *Server) findOrder(ctx context.Context, text string) (adminapi.Order, *order.Order, error) {
	unknown := NewProblem(http.StatusNotFound, adminapi.CodeOrderNotFound, "there is no such order")
	id, err := order.ParseID(text)
	if err != nil {
		return adminapi.Order{}, nil, unknown
	}
	var rows []store.Order
	if err := s.deps.Store.DB(ctx).Where("id = ?", text).Limit(1).Find(&rows).Error; err != nil {
		return adminapi.Order{}, nil, fmt.Errorf("read order %s: %w", text, err)
	}
	if len(rows) == 1 {
		out := rowToOrder(&rows[0])
		var payments []store.Payment
		if err := s.deps.Store.DB(ctx).Where("order_id = ?", text).Order("received_at").Find(&payments).Error; err != nil {
			return adminapi.Order{}, nil, fmt.Errorf("read payments of order %s: %w", text, err)
		}
		for _, p := range payments {
			out.RefundDue = out.RefundDue || p.Status == store.PaymentRefundDue
			out.Payments = append(out.Payments, rowToPayment(&p))
		}
		if rows[0].Origin == store.OriginBare {
			return out, nil, nil
		}
		content, err := rows[0].Content()
		if err != nil {
			return adminapi.Order{}, nil, err
		}
		return out, &content, nil
	}
	rec, err := s.deps.Stock.Order(ctx, id)
	switch {
	case errors.Is(err, stock.ErrOrderNotFound), errors.Is(err, stock.ErrArchived):
		return adminapi.Order{}, nil, unknown
	case err != nil:
		return adminapi.Order{}, nil, fmt.Errorf("read order %s: %w", text, err)
	}
	if rec.Receipt {
		return recordToOrder(rec), nil, nil
	}
	return recordToOrder(rec), &rec.Order, nil
}

func (s *Server) showOrder(w http.ResponseWriter, r *http.Request) error {
	o, _, err := s.findOrder(r.Context(), r.PathValue("id"))
	if err != nil {
		return err
	}
	return WriteJSON(w, http.StatusOK, o)
}

// cancelOrder asks for the cancel like a buyer does: through the queue, where the one consumer of
// rollbacks decides. 202 means asked.
func (s *Server) cancelOrder(w http.ResponseWriter, r *http.Request) error {
	ctx := r.Context()
	var in adminapi.CancelRequest
	if err := Decode(r, &in); err != nil {
		return err
	}
	if err := CheckReason(in.Reason); err != nil {
		return err
	}
	o, content, err := s.findOrder(ctx, r.PathValue("id"))
	if err != nil {
		return err
	}
	switch status := order.Status(o.Status); {
	case status == order.Cancelled:
		return WriteJSON(w, http.StatusOK, adminapi.CancelResult{OrderID: o.OrderID, Status: o.Status, Reason: o.Reason})
	case status == order.Paid || status.Final():
		return NewProblem(http.StatusConflict, adminapi.CodeNotCancellable, "the order is "+o.Status)
	}
	id, err := order.ParseID(o.OrderID)
	if err != nil {
		return err
	}
	by := ActorFrom(ctx)
	entry := audit.Entry{Action: "order.cancel", Subject: o.OrderID, Reason: in.Reason, Result: "asked", Before: map[string]string{"status": o.Status}}
	if err := audit.Write(ctx, s.deps.Store.SQL(), by, entry); err != nil {
		return err
	}
	wait, cancel := context.WithTimeout(ctx, confirmWait)
	defer cancel()
	m := messaging.CancelRequested(messaging.Cancel{
		OrderID: id, Reason: order.ReasonOperatorCancelled, Actor: "operator:" + by.Name, RequestedAt: time.Now().UTC(), Order: content,
	})
	if err := s.deps.Broker.Publish(wait, messaging.ExchangeEvents, m)[0]; err != nil {
		return fmt.Errorf("ask for the cancel of order %s: %w", o.OrderID, err)
	}
	return WriteJSON(w, http.StatusAccepted, adminapi.CancelResult{OrderID: o.OrderID, Status: o.Status, Changed: true, Queued: true})
}

// refundOrder asks for the refund of a paid order, through the queue like a cancel. Where the units go
// is decided by the consumer, under the lock of the pool's row (R6). The operator's words are kept in
// the audit; the row and the buyer get a code.
func (s *Server) refundOrder(w http.ResponseWriter, r *http.Request) error {
	ctx := r.Context()
	var in adminapi.RefundRequest
	if err := Decode(r, &in); err != nil {
		return err
	}
	if err := CheckReason(in.Reason); err != nil {
		return err
	}
	o, _, err := s.findOrder(ctx, r.PathValue("id"))
	if err != nil {
		return err
	}
	switch order.Status(o.Status) {
	case order.Refunded:
		return WriteJSON(w, http.StatusOK, adminapi.RefundResult{OrderID: o.OrderID, Status: o.Status, Reason: o.Reason})
	case order.Paid:
	default:
		return NewProblem(http.StatusConflict, adminapi.CodeNotRefundable, "only a paid order can be refunded; this one is "+o.Status)
	}
	id, err := order.ParseID(o.OrderID)
	if err != nil {
		return err
	}
	by := ActorFrom(ctx)
	entry := audit.Entry{Action: "order.refund", Subject: o.OrderID, Reason: in.Reason, Result: "asked", Before: map[string]string{"status": o.Status}}
	if err := audit.Write(ctx, s.deps.Store.SQL(), by, entry); err != nil {
		return err
	}
	wait, cancel := context.WithTimeout(ctx, confirmWait)
	defer cancel()
	m := messaging.RefundRequested(messaging.Refund{
		OrderID: id, Reason: order.ReasonOperatorRefunded, Actor: "operator:" + by.Name, RequestedAt: time.Now().UTC(),
	})
	if err := s.deps.Broker.Publish(wait, messaging.ExchangeEvents, m)[0]; err != nil {
		return fmt.Errorf("ask for the refund of order %s: %w", o.OrderID, err)
	}
	return WriteJSON(w, http.StatusAccepted, adminapi.RefundResult{OrderID: o.OrderID, Status: o.Status, Changed: true, Queued: true})
}

// CheckReason bounds an operator's words by what the audit can hold, in any language.
func CheckReason(reason string) error {
	if strings.TrimSpace(reason) == "" || utf8.RuneCountInString(reason) > 200 || strings.ContainsFunc(reason, unicode.IsControl) {
		return invalid("reason must be 1 to 200 characters, without control characters")
	}
	return nil
}
