package deadletter

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"seckill/pkg/failpoint"
	"seckill/pkg/messaging"
	"seckill/pkg/order"
	"seckill/services/order-worker/internal/follow"
	"seckill/services/order-worker/internal/store"
)

// classDeliveryLimit is the broker's reason for a message that was delivered too often.
const classDeliveryLimit = "delivery_limit"

// Classes that blame the content of a reservation: trying again cannot help, its buyer gets a final
// answer and the units go back.
var contentReasons = map[string]string{ //nolint:gochecknoglobals // a constant
	"invalid_order":    order.ReasonInvalidOrder,
	"unknown_activity": order.ReasonUnknownActivity,
}

// maxLetterBody bounds the body of a letter. No event comes near (messaging.MaxBody); what somebody else put
// into a queue may be larger than MySQL takes in one packet, and would hold up every letter behind it.
const maxLetterBody = 1 << 20

// cutBody says whether only the beginning of a letter's body is kept: one byte more than a whole one may have.
func cutBody(l *store.DeadLetter) bool { return len(l.Body) > maxLetterBody }

const drainTimeout = 30 * time.Second

// Handle drains deliveries of seckill.dead: it is a messaging.Handler. Letters are committed before
// it returns; what follows (R15, rejection, parking) runs before the ack, again and again if it fails.
func (s *Service) Handle(ctx context.Context, batch []messaging.Delivery) []messaging.Result {
	results := make([]messaging.Result, len(batch))
	for i, d := range batch {
		ids, err := s.insert(ctx, d)
		if err == nil {
			err = failpoint.Hit(ctx, "deadletter.after_insert")
		}
		if err != nil {
			results[i].Hold = err
			continue
		}
		results[i].After = func(ctx context.Context) error { return s.settle(ctx, ids) }
	}
	return results
}

// insert writes the letters of one delivery, or reopens them, and gives their ids.
func (s *Service) insert(ctx context.Context, d messaging.Delivery) (ids []int64, err error) {
	ctx, cancel := context.WithTimeout(ctx, drainTimeout)
	defer cancel()
	parts, err := messaging.Split(d.Message)
	var undecodable *messaging.DecodeError
	switch {
	case errors.As(err, &undecodable):
		parts = []messaging.Message{d.Message}
	case err != nil:
		return nil, fmt.Errorf("split dead letter %s: %w", d.ID, err)
	}
	letters := make([]*store.DeadLetter, len(parts))
	for i, m := range parts {
		letters[i] = newLetter(d, m)
	}
	err = s.st.InTx(ctx, func(tx *store.Tx) error {
		ids = ids[:0]
		for _, l := range letters {
			// A discarded letter stays discarded: an operator has decided. Everything else is open
			// again, also what a job has in hand, whose later step then finds another state.
			_, err := tx.ExecContext(ctx, `INSERT INTO dead_letters (dedupe_key, message_id, routing_key, source_queue, class, error, attempt,
					activity_id, order_id, body, headers, state, created_at, updated_at)
				VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 'open', UTC_TIMESTAMP(6), UTC_TIMESTAMP(6))
				ON DUPLICATE KEY UPDATE occurrences = occurrences + 1, class = VALUES(class), error = VALUES(error), attempt = VALUES(attempt),
					source_queue = VALUES(source_queue), state = IF(state = 'discarded', state, 'open'), updated_at = VALUES(updated_at)`,
				l.DedupeKey, l.MessageID, l.RoutingKey, l.SourceQueue, l.Class, l.Error, l.Attempt, l.ActivityID, l.OrderID, l.Body, l.Headers)
			if err != nil {
				return fmt.Errorf("insert dead letter of message %s: %w", l.MessageID, err)
			}
			var id int64
			if err := tx.QueryRowContext(ctx, "SELECT id FROM dead_letters WHERE dedupe_key = ?", l.DedupeKey).Scan(&id); err != nil {
				return fmt.Errorf("read dead letter of message %s: %w", l.MessageID, err)
			}
			ids = append(ids, id)
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	for _, l := range letters {
		s.log.WarnContext(ctx, "dead letter", "message_id", l.MessageID, "class", l.Class, "queue", l.SourceQueue,
			"order_id", l.OrderID, "attempt", l.Attempt, "cause", l.Error)
	}
	return ids, nil
}

func newLetter(d messaging.Delivery, m messaging.Message) *store.DeadLetter {
	ev := decode(m)
	class := d.DeadClass
	if class == "" {
		class = "unknown"
	}
	headers := m.Headers
	raw, err := json.Marshal(headers)
	if err != nil || len(raw) > 60_000 { // of a foreign message; the column holds 64 KiB
		raw = []byte("{}")
	}
	if headers == nil {
		raw = []byte("{}")
	}
	sum := sha256.New()
	for _, part := range []string{m.Key, m.ID, string(m.Body)} {
		_, _ = fmt.Fprintf(sum, "%d:%s", len(part), part)
	}
	body, cause := m.Body, d.DeadError
	if n := len(body); n > maxLetterBody {
		body = body[:maxLetterBody+1]
		cause = strings.TrimSuffix(fmt.Sprintf("the body is cut, it had %d bytes: %s", n, cause), ": ")
	}
	return &store.DeadLetter{
		DedupeKey: hex.EncodeToString(sum.Sum(nil)), MessageID: text(m.ID, 255), RoutingKey: text(m.Key, 64), SourceQueue: text(d.DeadQueue, 64),
		Class: ascii(class, 32), Error: text(cause, 1000), Attempt: m.Attempt, ActivityID: ev.activity, OrderID: ev.orderID(),
		Body: body, Headers: string(raw),
	}
}

// settle does for letters that were just written what their cause asks for. It may run again, and
// what is not open any more is left alone.
func (s *Service) settle(ctx context.Context, ids []int64) error {
	ctx, cancel := context.WithTimeout(ctx, drainTimeout)
	defer cancel()
	letters, err := s.letters(ctx, ids)
	if err != nil {
		return err
	}
	verdicts, err := s.judge(ctx, letters)
	if err != nil {
		return err
	}
	var park []order.ID
	var parked []int64
	for i, l := range letters {
		if l.State != store.LetterOpen {
			continue
		}
		v := verdicts[i]
		if v.is == alreadyDone {
			if err := s.resolve(ctx, l.ID, v.detail, store.LetterOpen); err != nil {
				return err
			}
			continue
		}
		if !v.event.reservation() || v.row != nil {
			continue
		}
		if reason, ok := contentReasons[l.Class]; ok {
			_, err := s.reject(ctx, l.ID, reason, "", nil)
			if err == nil {
				continue
			}
			if !store.Refuses(err) {
				return err
			}
			// MySQL will not write the rejection either: the letter stays open and the order is parked.
			s.log.ErrorContext(ctx, "order cannot be rejected", "order_id", l.OrderID, "error", err)
		}
		if l.Class == classDeliveryLimit {
			continue
		}
		park = append(park, v.event.id)
		parked = append(parked, l.ID)
	}
	if len(park) == 0 {
		return nil
	}
	if err := s.redis.Park(ctx, park); err != nil {
		return fmt.Errorf("park %d orders: %w", len(park), err)
	}
	return s.mark(ctx, parked)
}

func (s *Service) mark(ctx context.Context, ids []int64) error {
	err := s.st.DB(ctx).Exec("UPDATE dead_letters SET parked = 1 WHERE id IN ? AND state IN ('open', 'claimed', 'sent')", ids).Error
	if err != nil {
		return fmt.Errorf("mark parked letters: %w", err)
	}
	return nil
}

// resolve moves a letter from one state to resolved, if it is still in it.
func (s *Service) resolve(ctx context.Context, id int64, note, from string) error {
	_, err := s.st.SQL().ExecContext(ctx, "UPDATE dead_letters SET state = 'resolved', parked = 0, note = ?, updated_at = UTC_TIMESTAMP(6) WHERE id = ? AND state = ?",
		text(note, 500), id, from)
	if err != nil {
		return fmt.Errorf("resolve dead letter %d: %w", id, err)
	}
	return nil
}

// letters reads rows in the order of ids; what is not there is left out.
func (s *Service) letters(ctx context.Context, ids []int64) ([]*store.DeadLetter, error) {
	if len(ids) == 0 {
		return nil, nil
	}
	var rows []*store.DeadLetter
	if err := s.st.DB(ctx).Where("id IN ?", ids).Order("id").Find(&rows).Error; err != nil {
		return nil, fmt.Errorf("read dead letters: %w", err)
	}
	return rows, nil
}

// outcome of giving a letter's order up.
type outcome int

const (
	discarded outcome = iota + 1
	resolved          // the order is alive, or was rejected: there is nothing to give up
	skipped           // the letter is not open any more
)

// reject ends an open letter and the order it carries: where the order has no row it gets a rejected
// one, and its units go back after the commit (R7). For an operator (audited) the letter is discarded
// then, for the drain it is resolved. A live order is left alone, and its letter resolved.
func (s *Service) reject(ctx context.Context, id int64, reason, note string, audited func(tx *store.Tx, l *store.DeadLetter, o outcome) error) (outcome, error) {
	var out outcome
	var row *store.Order
	end := func(tx *store.Tx) error {
		out, row = skipped, nil
		var l store.DeadLetter
		if err := tx.DB().Raw("SELECT * FROM dead_letters WHERE id = ? FOR UPDATE", id).Scan(&l).Error; err != nil {
			return fmt.Errorf("lock dead letter %d: %w", id, err)
		}
		if l.State != store.LetterOpen {
			return nil
		}
		state, why := store.LetterDiscarded, note
		out = discarded
		if ev := decode(message(&l)); ev.reservation() {
			rows, err := store.Orders(ctx, tx, []string{l.OrderID}, true)
			if err != nil {
				return err
			}
			row = rows[l.OrderID]
			switch {
			case row == nil:
				if row, err = tombstone(ctx, tx, ev, reason); err != nil {
					return err
				}
				if audited == nil {
					state, why, out = store.LetterResolved, "rejected: "+reason, resolved
				}
			case row.Status.Final():
			case ev.content != nil && !row.SameContent(*ev.content):
				row = nil // the letter contradicts a living order: only the letter goes
			default:
				state, why, out = store.LetterResolved, "the order is "+string(row.Status), resolved
			}
		}
		_, err := tx.ExecContext(ctx, "UPDATE dead_letters SET state = ?, parked = 0, note = ?, updated_at = UTC_TIMESTAMP(6) WHERE id = ? AND state = 'open'",
			state, text(why, 500), id)
		if err != nil {
			return fmt.Errorf("end dead letter %d: %w", id, err)
		}
		if audited == nil {
			return nil
		}
		return audited(tx, &l, out)
	}
	err := s.st.InTx(ctx, end)
	for try := 0; store.IsDuplicate(err) && try < 5; try++ { // the order was written meanwhile: look again
		err = s.st.InTx(ctx, end)
	}
	if err != nil {
		return 0, fmt.Errorf("end dead letter %d: %w", id, err)
	}
	if row == nil || !row.Status.Final() {
		return out, nil
	}
	if err := s.follow.Rows(ctx, []*store.Order{row}); err != nil {
		return out, fmt.Errorf("release order %s: %w", row.ID, err)
	}
	// Money may have come before this row, and be kept for it (R5).
	if err := s.follow.Kept(ctx, []string{row.ID}); err != nil {
		return out, fmt.Errorf("apply kept payments of order %s: %w", row.ID, err)
	}
	return out, nil
}

// tombstone writes the rejected row of an order that has none, and the compensation that stands for
// the release (R3).
func tombstone(ctx context.Context, tx *store.Tx, ev event, reason string) (*store.Order, error) {
	now, err := tx.Now(ctx)
	if err != nil {
		return nil, err
	}
	row := store.BareOrder(ev.id, order.Rejected, reason, now)
	if ev.content != nil {
		if row, err = store.NewOrder(*ev.content, order.Rejected, reason, store.OriginTombstone); err != nil {
			return nil, err
		}
	}
	if err := store.InsertOrders(ctx, tx, []*store.Order{row}); err != nil {
		return nil, err
	}
	return row, store.Owe(ctx, tx, store.CompensateRelease, []*store.Order{row}, follow.CompensationDelay())
}

// text makes a text fit a column of n characters.
func text(s string, n int) string {
	s = strings.ToValidUTF8(s, "?")
	if len(s) <= n {
		return s
	}
	if r := []rune(s); len(r) > n {
		return string(r[:n])
	}
	return s
}

func ascii(s string, n int) string {
	s = strings.Map(func(r rune) rune {
		if r < ' ' || r > '~' {
			return '?'
		}
		return r
	}, s)
	return s[:min(len(s), n)]
}
