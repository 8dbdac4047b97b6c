package activity

import (
	"context"
	"fmt"
	"slices"

	"seckill/pkg/order"
	"seckill/pkg/sale"
	"seckill/pkg/stock"
	"seckill/services/order-worker/internal/audit"
	"seckill/services/order-worker/internal/store"
)

// Qualify lets users take part in a sale that asks for it: first in MySQL, from which a rebuild takes
// them, then in Redis. Repeating it is safe, and finishes what Redis did not get.
func (s *Service) Qualify(ctx context.Context, id string, users []string, by audit.Actor) (added int, err error) {
	for _, u := range users {
		if !order.ValidUserID(u) {
			return 0, fmt.Errorf("qualify user %q: %w", u, stock.ErrInvalid)
		}
	}
	users = slices.Clone(users)
	slices.Sort(users)
	users = slices.Compact(users)
	d, err := s.Load(ctx, id)
	if err != nil {
		return 0, err
	}
	switch {
	case d.Qualification != sale.QualificationList:
		return 0, fmt.Errorf("qualify users of activity %s: %w: it is open to everybody", id, ErrState)
	case d.State != store.ActivityDraft && d.State != store.ActivityWarmed:
		return 0, fmt.Errorf("qualify users of activity %s: %w: it is %s", id, ErrState, d.State)
	}
	err = s.st.InTx(ctx, func(tx *store.Tx) error {
		if added, err = store.InsertQualifications(ctx, tx, id, users); err != nil {
			return err
		}
		return audit.Write(ctx, tx, by, audit.Entry{
			Action: "qualify.import", Subject: id, Result: "done", After: map[string]int{"users": len(users), "added": added},
		})
	})
	if err != nil {
		return 0, fmt.Errorf("qualify users of activity %s: %w", id, err)
	}
	a, err := d.Stock()
	if err != nil {
		return 0, err
	}
	if err := s.redis.Qualify(ctx, a, users); err != nil {
		return added, fmt.Errorf("qualify users of activity %s in redis: %w", id, err)
	}
	return added, nil
}
