package rehearse

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
)

// Row is an order as MySQL or Redis holds it.
type Row struct {
	OrderID   string `json:"order_id"`
	User      string `json:"user_id"`
	SKU       string `json:"sku_id"`
	Pool      string `json:"pool"`
	Quantity  int    `json:"quantity"`
	Status    string `json:"status"`
	Reason    string `json:"reason"`
	RefundDue bool   `json:"refund_due"`
	IdemKey   string `json:"idempotency_key"`
}

// PoolKey names one pool of one sku.
type PoolKey struct{ SKU, Pool string }

// StockRow is a pool as MySQL holds it.
type StockRow struct {
	SKU       string `json:"sku_id"`
	Pool      string `json:"pool"`
	Allocated int    `json:"allocated"`
	Available int    `json:"available"`
	Withheld  int    `json:"withheld"`
	Live      int    `json:"live"` // units of pending and paid orders
}

// LedgerRow is one entry of the append-only ledger; Units is the signed change of available. Ref is
// an order id, or names what else moved the units (the allocation).
type LedgerRow struct {
	Ref       string `json:"ref"`
	Operation string `json:"operation"`
	SKU       string `json:"sku_id"`
	Pool      string `json:"pool"`
	Units     int    `json:"units"`
}

// PaymentRow is a payment as MySQL holds it.
type PaymentRow struct {
	Transaction string `json:"transaction_id"`
	OrderID     string `json:"order_id"`
	Status      string `json:"status"` // kept, applied, refund_due, settled
}

// Letter is a dead letter.
type Letter struct {
	ID        int64  `json:"id"`
	MessageID string `json:"message_id"`
	OrderID   string `json:"order_id"`
	State     string `json:"state"`
	Class     string `json:"class"`
	Deaths    int    `json:"deaths"`   // how often it came in
	Replayed  bool   `json:"replayed"` // a replay has published it again
}

// Snapshot is what MySQL and Redis hold of one activity.
type Snapshot struct {
	ActivityID   string
	PerUserLimit int
	Rows         []Row // orders in MySQL
	Records      []Row // purchase records in Redis
	Stock        []StockRow
	Levels       map[PoolKey]int // units on sale in Redis, all buckets
	Holdings     map[string]int  // user → units, MySQL
	Held         map[string]int  // user → units, Redis
	Ledger       []LedgerRow
	Payments     []PaymentRow
	Letters      []Letter
	Outbox       []string // order ids whose row Redis does not know of
	Parked       []string // of those, the ones whose message lies in the dead letters
	// Compensations are orders whose units MySQL returned and Redis perhaps not yet.
	Compensations []string
}

// ReadSnapshot reads the NDJSON of the admin API. A stream without its last line is an error: half a
// snapshot looks exactly like lost orders.
func ReadSnapshot(r io.Reader) (*Snapshot, error) {
	s := &Snapshot{Levels: map[PoolKey]int{}, Holdings: map[string]int{}, Held: map[string]int{}}
	in := bufio.NewReaderSize(r, 64<<10)
	lines, complete := 0, false
	for {
		raw, err := in.ReadBytes('\n')
		if len(raw) > 0 {
			if complete {
				return nil, errors.New("read snapshot: text after its last line")
			}
			want, last, lineErr := s.line(raw)
			if lineErr != nil {
				return nil, fmt.Errorf("read snapshot line %d: %w", lines+1, lineErr)
			}
			if last {
				if want != lines {
					return nil, fmt.Errorf("read snapshot: %d lines came, %d were sent", lines, want)
				}
				complete = true
			}
			lines++
		}
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, fmt.Errorf("read snapshot: %w", err)
		}
	}
	if !complete {
		return nil, errors.New("read snapshot: cut off before its last line")
	}
	return s, nil
}

func (s *Snapshot) line(raw []byte) (lines int, last bool, err error) {
	var head struct {
		Kind         string `json:"kind"`
		ActivityID   string `json:"activity_id"`
		PerUserLimit int    `json:"per_user_limit"`
		User         string `json:"user_id"`
		OrderID      string `json:"order_id"`
		SKU          string `json:"sku_id"`
		Pool         string `json:"pool"`
		Units        int    `json:"units"`
		Lines        int    `json:"lines"`
		Error        string `json:"error"`
	}
	if err := json.Unmarshal(raw, &head); err != nil {
		return 0, false, err
	}
	switch head.Kind {
	case "activity":
		s.ActivityID, s.PerUserLimit = head.ActivityID, head.PerUserLimit
	case "order":
		return 0, false, appendLine(&s.Rows, raw)
	case "record":
		return 0, false, appendLine(&s.Records, raw)
	case "stock":
		return 0, false, appendLine(&s.Stock, raw)
	case "ledger":
		return 0, false, appendLine(&s.Ledger, raw)
	case "payment":
		return 0, false, appendLine(&s.Payments, raw)
	case "letter":
		return 0, false, appendLine(&s.Letters, raw)
	case "level":
		s.Levels[PoolKey{head.SKU, head.Pool}] += head.Units
	case "holding":
		s.Holdings[head.User] += head.Units
	case "held":
		s.Held[head.User] += head.Units
	case "outbox":
		s.Outbox = append(s.Outbox, head.OrderID)
	case "parked":
		s.Parked = append(s.Parked, head.OrderID)
	case "compensation":
		s.Compensations = append(s.Compensations, head.OrderID)
	case "error":
		return 0, false, fmt.Errorf("server: %s", head.Error)
	case "end":
		return head.Lines, true, nil
	default:
		return 0, false, fmt.Errorf("unknown kind %q", head.Kind)
	}
	return 0, false, nil
}

func appendLine[T any](list *[]T, raw []byte) error {
	var v T
	if err := json.Unmarshal(raw, &v); err != nil {
		return err
	}
	*list = append(*list, v)
	return nil
}
