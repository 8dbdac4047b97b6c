package deadletter

import (
	"context"
	"fmt"
	"strconv"

	"gorm.io/gorm/clause"

	"seckill/pkg/adminapi"
	"seckill/pkg/order"
	"seckill/services/order-worker/internal/audit"
	"seckill/services/order-worker/internal/store"
)

func forUpdate() clause.Locking { return clause.Locking{Strength: "UPDATE"} }

// Discard gives open letters up. The order of a reservation becomes rejected and its units go back;
// an order that turns out to be alive is left alone, and its letter resolved. Each letter is a
// transaction of its own, with its audit row.
func (s *Service) Discard(ctx context.Context, sel adminapi.LetterSelection, reason string, dryRun bool, by audit.Actor) (adminapi.DiscardResult, error) {
	q, err := open(s.st.DB(ctx), sel)
	if err != nil {
		return adminapi.DiscardResult{}, err
	}
	var ids []int64
	if err := q.Pluck("id", &ids).Error; err != nil {
		return adminapi.DiscardResult{}, fmt.Errorf("select dead letters: %w", err)
	}
	out := adminapi.DiscardResult{Matched: len(ids), DryRun: dryRun}
	if dryRun {
		return out, nil
	}
	for _, id := range ids {
		o, err := s.reject(ctx, id, order.ReasonDiscarded, reason, func(tx *store.Tx, l *store.DeadLetter, o outcome) error {
			result := store.LetterDiscarded
			if o == resolved {
				result = store.LetterResolved
			}
			return audit.Write(ctx, tx, by, audit.Entry{
				Action: "dead_letter.discard", Subject: strconv.FormatInt(id, 10), Reason: reason, Result: result,
				Before: map[string]string{"state": l.State, "class": l.Class, "order_id": l.OrderID, "message_id": l.MessageID},
				After:  map[string]string{"state": result},
			})
		})
		switch o {
		case discarded:
			out.Discarded++
		case resolved:
			out.Resolved++
		case skipped:
			out.Skipped++
		}
		switch {
		case err == nil:
		case ctx.Err() != nil:
			return out, fmt.Errorf("discard dead letters: %w", err)
		case o == 0:
			out.Failed++
			s.log.ErrorContext(ctx, "dead letter not discarded", "letter_id", id, "error", err)
		default: // committed; the compensation carries out what is left
			s.log.WarnContext(ctx, "release of a discarded order is left to its compensation", "letter_id", id, "error", err)
		}
	}
	return out, nil
}
