package store

import (
	"encoding/json"
	"fmt"
	"strings"
	"time"

	"seckill/pkg/order"
)

// States of an activity. They only move forward.
const (
	ActivityDraft   = "draft"   // created, not sold yet
	ActivityWarmed  = "warmed"  // a warm-up has won; the window decides whether it is open
	ActivityEnded   = "ended"   // the end is recorded; orders are being finished
	ActivitySettled = "settled" // the rest has gone back to inventory
	ActivityClosed  = "closed"  // cleaned up in Redis, report final
)

// Activity is a sale.
type Activity struct {
	ID              string `gorm:"primaryKey"`
	Name            string
	State           string
	StartsAt        time.Time
	EndsAt          time.Time
	PerUserLimit    int
	PaymentTimeoutS int
	Currency        string
	Qualification   string // none, list
	Buckets         int
	RegionFallback  string // JSON object: region → list of pools
	RefundAfterEnd  string // national, region
	Shadow          bool   // a rehearsal's: never touches inventory
	Paused          bool
	Epoch           uint64
	WarmNumber      uint64
	WarmWinner      uint64
	Fencing         uint64
	CreatedBy       string
	CreatedAt       time.Time
	UpdatedAt       time.Time
	WarmedAt        *time.Time
	EndedAt         *time.Time
	SettledAt       *time.Time
	ClosedAt        *time.Time
	Report          *string
}

// TableName implements gorm's Tabler.
func (Activity) TableName() string { return "activities" }

// PaymentTimeout is how long an order of the sale can be paid.
func (a *Activity) PaymentTimeout() time.Duration {
	return time.Duration(a.PaymentTimeoutS) * time.Second
}

// Fallback reads RegionFallback.
func (a *Activity) Fallback() (map[string][]string, error) {
	out := map[string][]string{}
	if a.RegionFallback == "" {
		return out, nil
	}
	if err := json.Unmarshal([]byte(a.RegionFallback), &out); err != nil {
		return nil, fmt.Errorf("read region fallback of activity %s: %w", a.ID, err)
	}
	return out, nil
}

// ActivityItem is one sku of a sale.
type ActivityItem struct {
	ActivityID string `gorm:"primaryKey"`
	SKUID      string `gorm:"column:sku_id;primaryKey"`
	Position   int
	PriceMinor int64
}

// TableName implements gorm's Tabler.
func (ActivityItem) TableName() string { return "activity_items" }

// ActivityStock is a pool of a sale. Allocated = Available + Withheld + Live + Returned.
type ActivityStock struct {
	ActivityID string `gorm:"primaryKey"`
	SKUID      string `gorm:"column:sku_id;primaryKey"`
	Pool       string `gorm:"primaryKey"`
	Allocated  int64
	Available  int64
	Withheld   int64 // found missing by the stock guard (R7)
	Live       int64 // units of pending and paid orders
	Returned   int64 // gone back to inventory
	SettledAt  *time.Time
	UpdatedAt  time.Time
}

// TableName implements gorm's Tabler.
func (ActivityStock) TableName() string { return "activity_stock" }

// Unexplained is how many of the allocated units the row says nothing about; below zero where it claims
// more than was ever allocated.
func (s *ActivityStock) Unexplained() int64 {
	return s.Allocated - s.Available - s.Withheld - s.Live - s.Returned
}

// Sellable is how many units may be in Redis. A row that claims more than was ever allocated is wrong, and
// bringing Redis in line with it would oversell; one that claims too little is what the guard goes by (O24).
func (s *ActivityStock) Sellable() int64 { return s.Available + min(s.Unexplained(), 0) }

// Inventory is what the warehouses hold outside of any sale.
type Inventory struct {
	SKUID     string `gorm:"column:sku_id;primaryKey"`
	Pool      string `gorm:"primaryKey"`
	OnHand    int64
	UpdatedAt time.Time
}

// TableName implements gorm's Tabler.
func (Inventory) TableName() string { return "inventory" }

// Origins of an order row.
const (
	OriginOrder     = "order"     // written from its own message
	OriginTombstone = "tombstone" // a cancel, refusal or orphan payment came first; took no stock
	OriginBare      = "bare"      // a tombstone of which only the id was known
)

// Order is an order's row.
type Order struct {
	ID              string `gorm:"primaryKey"`
	ActivityID      string
	UserID          string
	SKUID           string `gorm:"column:sku_id"`
	Region          string
	Pool            string
	Quantity        int
	UnitPriceMinor  int64
	AmountMinor     int64
	Currency        string
	Status          order.Status
	Reason          string
	Origin          string
	Epoch           uint64
	PaymentTimeoutS int
	ReservedAt      time.Time
	PayBefore       time.Time
	IdemKey         string
	IdemDigest      string
	CreatedAt       time.Time
	UpdatedAt       time.Time
}

// TableName implements gorm's Tabler.
func (Order) TableName() string { return "orders" }

// Content is the row's content as every other part of the system knows it.
func (o *Order) Content() (order.Order, error) {
	id, err := order.ParseID(o.ID)
	if err != nil {
		return order.Order{}, fmt.Errorf("read order %s: %w", o.ID, err)
	}
	return order.Order{
		ID: id, User: o.UserID, SKU: o.SKUID, Region: o.Region, Pool: o.Pool, Quantity: o.Quantity,
		UnitPriceMinor: o.UnitPriceMinor, Currency: o.Currency, ReservedAt: o.ReservedAt, PayBefore: o.PayBefore,
		PaymentTimeout: time.Duration(o.PaymentTimeoutS) * time.Second, Epoch: o.Epoch,
		IdemKey: o.IdemKey, IdemDigest: o.IdemDigest,
	}, nil
}

// States of a payment.
const (
	PaymentKept      = "kept"       // its order is not known yet (R5)
	PaymentApplied   = "applied"    // it paid its order
	PaymentRefundDue = "refund_due" // the money has to go back
	PaymentSettled   = "settled"    // an operator has sent it back
)

// Payment is one transaction of the payment provider.
type Payment struct {
	TransactionID string `gorm:"primaryKey"`
	OrderID       string
	AmountMinor   int64
	Currency      string
	Status        string
	Reason        string
	ReceivedAt    time.Time
	Content       []byte // the order as the callback knew it, or nil
	CreatedAt     time.Time
	UpdatedAt     time.Time
	SettledAt     *time.Time
	SettledBy     string
	SettleReason  string
}

// TableName implements gorm's Tabler.
func (Payment) TableName() string { return "payments" }

// Operations and accounts of the ledger.
const (
	OpAllocate = "allocate" // sale +, inventory −
	OpAdd      = "add"      // the same in mid-sale
	OpSell     = "sell"     // an order took units
	OpCancel   = "cancel"   // a pending order gave them back
	OpRefund   = "refund"   // a paid order gave them back
	OpWithhold = "withhold" // units that the stock guard found missing
	OpSettle   = "settle"   // what was left: sale −, inventory +

	AccountSale      = "sale"
	AccountInventory = "inventory"
)

// LedgerEntry explains one movement of units. Append-only; unique per reference and operation.
type LedgerEntry struct {
	Ref        string `gorm:"primaryKey"`
	Op         string `gorm:"primaryKey"`
	Account    string `gorm:"primaryKey"`
	ActivityID string
	SKUID      string `gorm:"column:sku_id"`
	Pool       string
	Delta      int64
	At         time.Time
}

// TableName implements gorm's Tabler.
func (LedgerEntry) TableName() string { return "stock_ledger" }

// Kinds of compensation.
const (
	CompensateRelease   = "release"    // subject: order id, or a batch; Redis has to follow the rows
	CompensateRefundDue = "refund_due" // subject: order id; the record has to carry the mark
	CompensateStockAdd  = "stock_add"  // subject: "<activity>/add/<operation>/<epoch>"; Redis has to get units that MySQL has added
	CompensateReconcile = "reconcile"  // subject: activity id; the stock guard has fired
)

// Compensation is work that a committed transaction still owes (R3).
type Compensation struct {
	Kind       string `gorm:"primaryKey"`
	Subject    string `gorm:"primaryKey"`
	ActivityID string
	Attempts   int
	NextAt     time.Time
	LastError  string
	Detail     *string // of a batch: its order ids, separated by spaces
	CreatedAt  time.Time
}

// Orders are the ids of the orders that the compensation is about.
func (c *Compensation) Orders() []string {
	if c.Detail != nil {
		return strings.Fields(*c.Detail)
	}
	return []string{c.Subject}
}

// TableName implements gorm's Tabler.
func (Compensation) TableName() string { return "compensations" }

// UserHolding counts the units a user holds or bought in a sale (R14).
type UserHolding struct {
	ActivityID string `gorm:"primaryKey"`
	UserID     string `gorm:"primaryKey"`
	Held       int
}

// TableName implements gorm's Tabler.
func (UserHolding) TableName() string { return "user_holdings" }

// Qualification lets a user take part in a sale that asks for it.
type Qualification struct {
	ActivityID string `gorm:"primaryKey"`
	UserID     string `gorm:"primaryKey"`
}

// TableName implements gorm's Tabler.
func (Qualification) TableName() string { return "qualifications" }

// States of a dead letter.
const (
	LetterOpen      = "open"
	LetterClaimed   = "claimed" // by a replay job
	LetterSent      = "sent"    // published again, outcome not known yet
	LetterResolved  = "resolved"
	LetterDiscarded = "discarded"
)

// DeadLetter is a message that failed for good; a batch is split into one letter per order.
type DeadLetter struct {
	ID          int64 `gorm:"primaryKey"`
	DedupeKey   string
	MessageID   string
	RoutingKey  string
	SourceQueue string
	Class       string
	Error       string
	Attempt     int
	ActivityID  string
	OrderID     string
	Body        []byte
	Headers     string
	State       string
	Parked      bool
	Occurrences int
	JobID       string
	Note        string
	PublishedAt *time.Time
	CreatedAt   time.Time
	UpdatedAt   time.Time
}

// TableName implements gorm's Tabler.
func (DeadLetter) TableName() string { return "dead_letters" }

// ReplayJob is an operator's request to replay or discard letters.
type ReplayJob struct {
	ID          string `gorm:"primaryKey"`
	Kind        string
	State       string
	Filter      string
	Reason      string
	RequestedBy string
	Total       int
	Sent        int
	Skipped     int
	Failed      int
	CreatedAt   time.Time
	UpdatedAt   time.Time
	FinishedAt  *time.Time
}

// TableName implements gorm's Tabler.
func (ReplayJob) TableName() string { return "replay_jobs" }

// ReplayItem is one letter in a job.
type ReplayItem struct {
	JobID     string `gorm:"primaryKey"`
	LetterID  int64  `gorm:"primaryKey"`
	State     string
	Verdict   string
	Error     string
	UpdatedAt time.Time
}

// TableName implements gorm's Tabler.
func (ReplayItem) TableName() string { return "replay_items" }

// Audit is one change an operator made.
type Audit struct {
	ID      int64 `gorm:"primaryKey"`
	At      time.Time
	Actor   string
	Role    string
	Action  string
	Subject string
	Reason  string
	Result  string
	Detail  string
	Remote  string
}

// TableName implements gorm's Tabler.
func (Audit) TableName() string { return "operator_audit" }
