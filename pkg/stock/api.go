package stock

import (
	"errors"
	"fmt"
	"time"

	"seckill/pkg/order"
)

// What a reservation can be refused for. Each is decided inside the reserve script, before any write.
var (
	ErrActivityNotFound = errors.New("activity not found")
	ErrNotWarmed        = errors.New("activity not warmed") // also: a stock key is missing
	ErrEnded            = errors.New("activity has ended")  // marker, window, or archived
	ErrPaused           = errors.New("activity is paused")
	ErrNotQualified     = errors.New("user is not qualified")
	ErrSoldOut          = errors.New("sold out")
	ErrKeyReused        = errors.New("idempotency key used with another request")
	ErrInvalid          = errors.New("invalid reservation") // quantity, unknown sku or pool
	ErrCorrupt          = errors.New("stored value has the wrong type or shape")
	// ErrUnavailable: Redis did not run the script (not connected, OOM, READONLY, BUSY, LOADING).
	ErrUnavailable = errors.New("redis unavailable")
	// ErrUnknownOutcome: the script may have run (reply lost, deadline). Ask for the order id again.
	ErrUnknownOutcome = errors.New("redis outcome unknown")

	ErrOrderNotFound = errors.New("order not found")
	ErrArchived      = errors.New("order archived: the sale is settled")
)

// NotStartedError refuses a reservation before the window opens.
type NotStartedError struct{ StartsAt, Now time.Time }

func (e *NotStartedError) Error() string {
	return fmt.Sprintf("activity starts at %s", e.StartsAt.UTC().Format(time.RFC3339))
}

// LimitError refuses a reservation that would exceed the per-user limit; it names the user's orders.
type LimitError struct{ OrderIDs []string }

func (e *LimitError) Error() string { return "per-user limit reached" }

// Reservation asks for units.
type Reservation struct {
	ID         order.ID // made by the caller; the same id again gets the first answer again
	User       string
	SKU        string
	Region     string   // as asked; stored with the order
	Pools      []string // where to look, in this order (the region's own pool, then its fallbacks)
	Quantity   int
	IdemKey    string // optional
	IdemDigest string // required with IdemKey
}

// Record is an order as Redis knows it.
type Record struct {
	order.Order
	Status    order.Status
	Reason    string
	RefundDue bool
	Receipt   bool // read from the receipt that is left after the clean-up; some fields are empty
}

// Reserved is the answer to an accepted reservation.
type Reserved struct {
	Record
	Replay bool // an earlier answer (same order id or same idempotency key); nothing was taken now
}

// Confirmation moves a record forward after its row is known to be in MySQL and takes the order out
// of the outbox and the parked set. It never creates a record (R1).
type Confirmation struct {
	ID order.ID
	To order.Status // Pending or Paid
}

// Release gives a live record's units, limit and qualification back, once, and leaves the record in
// its final state (R1, R4).
type Release struct {
	ID       order.ID
	User     string
	SKU      string
	Pool     string
	Quantity int
	To       order.Status // Cancelled, Refunded or Rejected
	Reason   string
	// Withhold frees record and limit but does not put the units back on sale (R7).
	Withhold bool
	// Over says that nothing is sold from this sale any more: the record gets its final state, whatever
	// became of the stock key, the limit and the record's content.
	Over bool
	// RefundDue marks the record: money arrived that has to go back.
	RefundDue bool
}

// Outcome says what a status script did to one order.
type Outcome int

// Outcomes of Confirm and Release. NoStockKey wrote nothing: it must be tried again (compensation).
const (
	Applied    Outcome = iota + 1 // the record moved
	Already                       // the record was there already, or further
	NoRecord                      // no record: only outbox and parked entries were removed
	NoStockKey                    // release only: the stock key is missing; nothing was written
	Mismatch                      // the record belongs to other user, sku, pool or quantity; nothing was written
)

// Phase of an activity as a buyer sees it.
type Phase string

// Phases.
const (
	Scheduled Phase = "scheduled"
	Open      Phase = "open"
	Paused    Phase = "paused"
	EndedP    Phase = "ended"
)

// Item is one sku of an activity.
type Item struct {
	SKU        string         `json:"sku_id"`
	PriceMinor int64          `json:"price_minor"`
	Pools      map[string]int `json:"pools"` // allocated units per pool
}

// Activity is what Redis and order-api have to know of a sale. MySQL owns it; Redis has a copy in
// each bucket's hash.
type Activity struct {
	ID             string
	Name           string
	StartsAt       time.Time
	EndsAt         time.Time
	PerUserLimit   int
	PaymentTimeout time.Duration
	Currency       string
	Qualified      bool // qualification: list
	Buckets        int
	Items          []Item
	RegionFallback map[string][]string
	Shadow         bool // a rehearsal's
	Epoch          uint64

	// State in Redis.
	Warm    uint64 // number of the warm-up attempt whose stock this is; 0 when only announced
	Opened  bool   // the bucket was opened by the winning attempt
	Paused  bool
	Ended   bool // end marker present
	Settled bool // marker says the clean-up is done
}

// PoolsFor resolves a region: its own pool if the sku has one by that name, then its fallback list.
// An empty answer means the region names nothing (400 to the buyer).
func (a *Activity) PoolsFor(sku, region string) []string {
	var item *Item
	for i := range a.Items {
		if a.Items[i].SKU == sku {
			item = &a.Items[i]
		}
	}
	if item == nil {
		return nil
	}
	var out []string
	if _, ok := item.Pools[region]; ok {
		out = append(out, region)
	}
	for _, p := range a.RegionFallback[region] {
		if _, ok := item.Pools[p]; ok && p != region {
			out = append(out, p)
		}
	}
	return out
}
