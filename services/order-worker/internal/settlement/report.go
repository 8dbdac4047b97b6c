package settlement

import (
	"context"
	"encoding/json"
	"fmt"
	"math"
	"sort"

	"seckill/pkg/adminapi"
	"seckill/pkg/order"
	"seckill/services/order-worker/internal/store"
)

// amounts sums what each order alone keeps within bounds, expired ones included: all together they may be
// more than 64 bits hold, which must not keep a sale from closing.
const amounts = "CAST(LEAST(SUM(amount_minor), 9223372036854775807) AS SIGNED)"

// Report is what became of a sale, as MySQL has it now; once the sale is closed, as it was then, with
// the refunds since then apart. It adds up, or says where it does not.
func (s *Service) Report(ctx context.Context, id string) (adminapi.Report, error) {
	d, err := s.sales.Load(ctx, id)
	if err != nil {
		return adminapi.Report{}, err
	}
	if d.State != store.ActivityClosed || d.Report == nil {
		return s.tally(ctx, id)
	}
	var r adminapi.Report
	if err := json.Unmarshal([]byte(*d.Report), &r); err != nil {
		return adminapi.Report{}, fmt.Errorf("read final report of activity %s: %w", id, err)
	}
	var late []struct {
		SKU    string `gorm:"column:sku_id"`
		Pool   string
		Orders int
		Units  int64
		Amount int64
	}
	err = s.st.DB(ctx).Raw("SELECT sku_id AS sku_id, pool, COUNT(*) AS orders, SUM(quantity) AS units, "+amounts+" AS amount FROM orders "+
		"WHERE id > ? AND id < ? AND activity_id = ? AND status = 'refunded' AND updated_at > ? GROUP BY sku_id, pool ORDER BY sku_id, pool",
		id+"-", id+".", id, d.ClosedAt).Scan(&late).Error
	if err != nil {
		return adminapi.Report{}, fmt.Errorf("read refunds after the final report of activity %s: %w", id, err)
	}
	for _, l := range late {
		r.RefundedSince = append(r.RefundedSince, adminapi.ReportRefund{SKU: l.SKU, Pool: l.Pool, Orders: l.Orders, Units: l.Units, AmountMinor: l.Amount})
	}
	return r, nil
}

// report is the final report as it is stored.
func (s *Service) report(ctx context.Context, id string) (string, error) {
	r, err := s.tally(ctx, id)
	if err != nil {
		return "", err
	}
	r.Final, r.State = true, store.ActivityClosed
	for _, p := range r.Problems {
		s.log.ErrorContext(ctx, "final report does not add up", "activity_id", id, "problem", p)
	}
	raw, err := json.Marshal(r)
	if err != nil {
		return "", fmt.Errorf("encode report of activity %s: %w", id, err)
	}
	return string(raw), nil
}

// tally counts a sale from one snapshot of the database: rows, pools and ledger must belong to the
// same moment to be compared.
func (s *Service) tally(ctx context.Context, id string) (adminapi.Report, error) {
	r := adminapi.Report{ActivityID: id}
	tx, err := s.st.Snapshot(ctx)
	if err != nil {
		return r, err
	}
	defer func() { _ = tx.Rollback() }() // read only
	var row store.Activity
	if err := tx.DB().Select("state", "currency", "starts_at", "ends_at").Where("id = ?", id).Take(&row).Error; err != nil {
		return r, fmt.Errorf("read activity %s: %w", id, err)
	}
	if r.At, err = tx.Now(ctx); err != nil {
		return r, err
	}
	r.State, r.Currency, r.StartsAt, r.EndsAt = row.State, row.Currency, row.StartsAt.UTC(), row.EndsAt.UTC()
	lines := map[[2]string]*adminapi.ReportLine{}
	var pools []store.ActivityStock
	if err := tx.DB().Where("activity_id = ?", id).Find(&pools).Error; err != nil {
		return r, fmt.Errorf("read pools of activity %s: %w", id, err)
	}
	for _, p := range pools {
		lines[[2]string{p.SKUID, p.Pool}] = &adminapi.ReportLine{
			SKU: p.SKUID, Pool: p.Pool, Allocated: p.Allocated, Available: p.Available, Withheld: p.Withheld, Returned: p.Returned,
		}
	}
	var groups []struct {
		SKU            string `gorm:"column:sku_id"`
		Pool           string
		Status, Reason string
		Orders         int
		Units          int64
		Amount         int64
	}
	err = tx.DB().Raw("SELECT sku_id, pool, status, reason, COUNT(*) AS orders, SUM(quantity) AS units, "+amounts+" AS amount FROM orders "+
		"WHERE id > ? AND id < ? AND activity_id = ? GROUP BY sku_id, pool, status, reason", id+"-", id+".", id).Scan(&groups).Error
	if err != nil {
		return r, fmt.Errorf("count orders of activity %s: %w", id, err)
	}
	for _, g := range groups {
		l := lines[[2]string{g.SKU, g.Pool}]
		if l == nil {
			// Rejected for what they are, or tombstones of which only the id is known: they hold nothing.
			r.Unplaced += g.Orders
			if order.Status(g.Status).Live() {
				r.Problems = append(r.Problems, fmt.Sprintf("%d %s orders of sku %q in pool %q, which the sale does not have", g.Orders, g.Status, g.SKU, g.Pool))
			}
			continue
		}
		n := adminapi.ReportCount{Orders: g.Orders, Units: g.Units, AmountMinor: g.Amount}
		switch order.Status(g.Status) {
		case order.Paid:
			l.Sold.Plus(n)
		case order.Pending:
			l.Pending.Plus(n)
		case order.Refunded:
			l.Refunded.Plus(n)
		case order.Rejected:
			l.Rejected.Plus(n)
		case order.Cancelled:
			if g.Reason == order.ReasonPaymentTimeout {
				l.Expired.Plus(n)
			} else {
				l.Cancelled.Plus(n)
			}
		default:
			r.Problems = append(r.Problems, fmt.Sprintf("%d orders in state %q", g.Orders, g.Status))
		}
	}
	var ledger []struct {
		SKU   string `gorm:"column:sku_id"`
		Pool  string
		Delta int64
	}
	if err := tx.DB().Raw("SELECT sku_id, pool, SUM(delta) AS delta FROM stock_ledger WHERE account = ? AND activity_id = ? GROUP BY sku_id, pool",
		store.AccountSale, id).Scan(&ledger).Error; err != nil {
		return r, fmt.Errorf("sum ledger of activity %s: %w", id, err)
	}
	for _, g := range ledger {
		if l := lines[[2]string{g.SKU, g.Pool}]; l != nil {
			l.Ledger = g.Delta
		} else {
			r.Problems = append(r.Problems, fmt.Sprintf("the ledger knows sku %q in pool %q, which the sale does not have", g.SKU, g.Pool))
		}
	}
	var money []struct {
		Status string
		N      int
		Amount int64
	}
	// By the order's id, not by its row: money may be kept for an order that never came.
	if err := tx.DB().Raw("SELECT status, COUNT(*) AS n, "+amounts+" AS amount FROM payments WHERE "+store.PaymentsOf+" GROUP BY status",
		store.PaymentsOfArgs(id)...).Scan(&money).Error; err != nil {
		return r, fmt.Errorf("sum payments of activity %s: %w", id, err)
	}
	for _, m := range money {
		n := adminapi.ReportCount{Orders: m.N, AmountMinor: m.Amount}
		switch m.Status {
		case store.PaymentApplied:
			r.Payments.Applied.Plus(n)
		case store.PaymentRefundDue:
			r.Payments.RefundDue.Plus(n)
		case store.PaymentSettled:
			r.Payments.Settled.Plus(n)
		case store.PaymentKept:
			r.Payments.Kept.Plus(n)
		}
	}
	for _, l := range lines {
		r.Lines = append(r.Lines, *l)
	}
	sort.Slice(r.Lines, func(i, j int) bool {
		a, b := r.Lines[i], r.Lines[j]
		return a.SKU < b.SKU || a.SKU == b.SKU && a.Pool < b.Pool
	})
	r.Total.SKU, r.Total.Pool = "total", ""
	for _, l := range r.Lines {
		r.Problems = append(r.Problems, problems(l)...)
		r.Total.Add(l)
	}
	if r.Payments.Applied.AmountMinor != r.Total.Sold.AmountMinor {
		r.Problems = append(r.Problems, fmt.Sprintf("orders sold for %d, payments applied of %d", r.Total.Sold.AmountMinor, r.Payments.Applied.AmountMinor))
	}
	t := r.Total
	for what, n := range map[string]int64{
		"sold": t.Sold.AmountMinor, "pending": t.Pending.AmountMinor, "cancelled": t.Cancelled.AmountMinor, "expired": t.Expired.AmountMinor,
		"refunded": t.Refunded.AmountMinor, "rejected": t.Rejected.AmountMinor, "payments applied": r.Payments.Applied.AmountMinor,
		"refunds due": r.Payments.RefundDue.AmountMinor, "refunds settled": r.Payments.Settled.AmountMinor, "payments kept": r.Payments.Kept.AmountMinor,
	} {
		if n == math.MaxInt64 {
			r.Problems = append(r.Problems, fmt.Sprintf("%s: the amount is more than can be told, at least %d", what, n))
		}
	}
	sort.Strings(r.Problems)
	r.AddsUp = len(r.Problems) == 0
	return r, nil
}

func problems(l adminapi.ReportLine) []string {
	var out []string
	live := l.Sold.Units + l.Pending.Units
	if sum := l.Available + l.Withheld + live + l.Returned; sum != l.Allocated {
		out = append(out, fmt.Sprintf("%s/%s: allocated %d, but available %d + withheld %d + pending %d + sold %d + returned %d = %d",
			l.SKU, l.Pool, l.Allocated, l.Available, l.Withheld, l.Pending.Units, l.Sold.Units, l.Returned, sum))
	}
	if l.Ledger != l.Available {
		out = append(out, fmt.Sprintf("%s/%s: the ledger explains %d available units, the pool has %d", l.SKU, l.Pool, l.Ledger, l.Available))
	}
	return out
}
