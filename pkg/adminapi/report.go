package adminapi

import (
	"math"
	"time"
)

// Report is what became of a sale: what finance reads. GET /admin/v1/activities/{id}/report.
type Report struct {
	ActivityID string    `json:"activity_id"`
	State      string    `json:"state"`
	Final      bool      `json:"final"` // the sale is closed; refunds since then are in RefundedSince
	At         time.Time `json:"at"`
	StartsAt   time.Time `json:"starts_at"`
	EndsAt     time.Time `json:"ends_at"`
	Currency   string    `json:"currency"`

	Lines []ReportLine `json:"lines"` // by sku and pool
	Total ReportLine   `json:"total"`
	// Unplaced are orders of no sku and pool of the sale: rejected for their content, or cancelled
	// before anything but their id was known.
	Unplaced int            `json:"unplaced_orders"`
	Payments ReportPayments `json:"payments"`

	RefundedSince []ReportRefund `json:"refunded_since,omitempty"`
	AddsUp        bool           `json:"adds_up"`
	Problems      []string       `json:"problems,omitempty"` // where it does not
}

// ReportLine is one pool of one sku. Units: allocated = available + withheld + pending + sold + returned.
type ReportLine struct {
	SKU       string      `json:"sku_id"`
	Pool      string      `json:"pool"`
	Allocated int64       `json:"allocated"`
	Available int64       `json:"available"`
	Withheld  int64       `json:"withheld"`
	Returned  int64       `json:"returned"` // to the inventory, by the settlement and by refunds after it
	Ledger    int64       `json:"ledger"`   // sum of the ledger, must be what is available
	Sold      ReportCount `json:"sold"`
	Pending   ReportCount `json:"pending"`
	Cancelled ReportCount `json:"cancelled"`
	Expired   ReportCount `json:"expired"`
	Refunded  ReportCount `json:"refunded"`
	Rejected  ReportCount `json:"rejected"`
}

// Add adds another line.
func (l *ReportLine) Add(o ReportLine) {
	l.Allocated += o.Allocated
	l.Available += o.Available
	l.Withheld += o.Withheld
	l.Returned += o.Returned
	l.Ledger += o.Ledger
	l.Sold.Plus(o.Sold)
	l.Pending.Plus(o.Pending)
	l.Cancelled.Plus(o.Cancelled)
	l.Expired.Plus(o.Expired)
	l.Refunded.Plus(o.Refunded)
	l.Rejected.Plus(o.Rejected)
}

// ReportCount counts orders. AmountMinor is in minor units of the report's currency; math.MaxInt64 stands
// for that and all above it.
type ReportCount struct {
	Orders      int   `json:"orders"`
	Units       int64 `json:"units"`
	AmountMinor int64 `json:"amount_minor"`
}

// Plus adds another count.
func (c *ReportCount) Plus(o ReportCount) {
	c.Orders += o.Orders
	c.Units += o.Units
	if c.AmountMinor > math.MaxInt64-o.AmountMinor {
		c.AmountMinor = math.MaxInt64
		return
	}
	c.AmountMinor += o.AmountMinor
}

// ReportPayments sums the payments of a sale's orders by state; Orders counts payments.
type ReportPayments struct {
	Applied   ReportCount `json:"applied"`
	RefundDue ReportCount `json:"refund_due"`
	Settled   ReportCount `json:"settled"` // refunds that an operator has sent back
	Kept      ReportCount `json:"kept"`    // money whose order has not come yet
}

// ReportRefund is a line of refunds after the final report.
type ReportRefund struct {
	SKU         string `json:"sku_id"`
	Pool        string `json:"pool"`
	Orders      int    `json:"orders"`
	Units       int64  `json:"units"`
	AmountMinor int64  `json:"amount_minor"`
}

// EndRequest ends a sale: POST /admin/v1/activities/{id}/end.
type EndRequest struct {
	Reason string `json:"reason,omitempty"`
}

// EndResult answers it.
type EndResult struct {
	ActivityID string `json:"activity_id"`
	Already    bool   `json:"already"` // it had ended before; the end was taken up again
	State      string `json:"state"`
}
