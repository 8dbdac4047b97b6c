package rehearsal

import (
	"context"
	"fmt"

	"seckill/services/order-worker/internal/store"
)

// Letter is a dead letter in a progress answer.
type Letter struct {
	ID        int64  `json:"id"`
	MessageID string `json:"message_id"`
	OrderID   string `json:"order_id"`
	State     string `json:"state"`
	Class     string `json:"class"`
	Deaths    int    `json:"deaths"`
	Replayed  bool   `json:"replayed"`
}

// Progress is how far the work of a rehearsal is.
type Progress struct {
	Orders        map[string]int `json:"orders"`   // rows by state
	Payments      map[string]int `json:"payments"` // by state
	Outbox        int            `json:"outbox"`
	Parked        int            `json:"parked"`
	Compensations int            `json:"compensations"`
	Letters       []Letter       `json:"letters"`
}

func (h *Handler) progress(ctx context.Context, a store.Activity) (Progress, error) {
	p := Progress{Orders: map[string]int{}, Payments: map[string]int{}, Letters: []Letter{}}
	// Redis first: an order that leaves the outbox between the two reads has its row already.
	for bucket := range a.Buckets {
		s, err := h.stock.OutboxStats(ctx, a.ID, bucket)
		if err != nil {
			return p, fmt.Errorf("read outbox of activity %s: %w", a.ID, err)
		}
		p.Outbox += s.Waiting
		p.Parked += s.Parked
	}
	db := h.store.DB(ctx)
	type group struct {
		Status string
		N      int
	}
	var orders, payments []group
	if err := db.Model(&store.Order{}).Select("status, COUNT(*) AS n").Where("activity_id = ?", a.ID).Group("status").Scan(&orders).Error; err != nil {
		return p, fmt.Errorf("count orders of activity %s: %w", a.ID, err)
	}
	for _, g := range orders {
		p.Orders[g.Status] = g.N
	}
	if err := db.Model(&store.Payment{}).Select("status, COUNT(*) AS n").Where("order_id LIKE ?", likePrefix(a.ID+"-")).Group("status").Scan(&payments).Error; err != nil {
		return p, fmt.Errorf("count payments of activity %s: %w", a.ID, err)
	}
	for _, g := range payments {
		p.Payments[g.Status] = g.N
	}
	var open int64
	if err := db.Model(&store.Compensation{}).Where("activity_id = ?", a.ID).Count(&open).Error; err != nil {
		return p, fmt.Errorf("count compensations of activity %s: %w", a.ID, err)
	}
	p.Compensations = int(open)
	if err := db.Raw(letterSQL, letterArgs(a.ID)...).Scan(&p.Letters).Error; err != nil {
		return p, fmt.Errorf("read letters of activity %s: %w", a.ID, err)
	}
	return p, nil
}
