package adminapi

import (
	"encoding/json"
	"time"

	"seckill/pkg/sale"
)

// Problem is an error answer (application/problem+json).
type Problem struct {
	Type      string         `json:"type"` // "/problems/<code>"
	Title     string         `json:"title"`
	Status    int            `json:"status"`
	Code      string         `json:"code"`
	Detail    string         `json:"detail,omitempty"`
	RequestID string         `json:"request_id,omitempty"`
	Problems  []sale.Problem `json:"problems,omitempty"` // with invalid_request: everything that is wrong
}

// Codes of problems.
const (
	CodeInvalidRequest   = "invalid_request"        // 400
	CodeUnauthenticated  = "unauthenticated"        // 401
	CodeForbidden        = "forbidden"              // 403: the role may not do this
	CodeNotFound         = "not_found"              // 404: no such route
	CodeActivityNotFound = "activity_not_found"     // 404
	CodeOrderNotFound    = "order_not_found"        // 404
	CodePaymentNotFound  = "payment_not_found"      // 404
	CodeLetterNotFound   = "dead_letter_not_found"  // 404
	CodeJobNotFound      = "replay_job_not_found"   // 404
	CodeRebuildNotFound  = "rebuild_not_found"      // 404
	CodeMethodNotAllowed = "method_not_allowed"     // 405
	CodeConflict         = "conflict"               // 409: the state does not allow it
	CodeNothingToCompare = "nothing_to_compare"     // 409: settled, or never warm
	CodeRedisLost        = "redis_lost"             // 409: Redis has lost the sale
	CodeActivityExists   = "activity_exists"        // 409: same id, other content
	CodeTooLittle        = "insufficient_inventory" // 409
	CodeNotCancellable   = "order_not_cancellable"  // 409
	CodeNotRefundable    = "order_not_refundable"   // 409
	CodeBodyTooLarge     = "body_too_large"         // 413
	CodeUnsupportedMedia = "unsupported_media_type" // 415
	CodeInternal         = "internal"               // 500
	CodeUnavailable      = "temporarily_unavailable"
)

// States of an activity.
const (
	ActivityDraft   = "draft"   // made, not warmed: sells nothing
	ActivityWarmed  = "warmed"  // stock is in Redis; sells within its window unless paused
	ActivityEnded   = "ended"   // its end was recorded
	ActivitySettled = "settled" // what was left went back to the inventory
	ActivityClosed  = "closed"  // cleaned up in Redis, report final
)

// Activity is a sale: its plan and what became of it.
type Activity struct {
	sale.Sale
	State      string    `json:"state"`
	Paused     bool      `json:"paused"`
	WarmNumber uint64    `json:"warm_number"` // attempt that won; 0 while it is a draft
	Epoch      uint64    `json:"epoch"`
	CreatedAt  time.Time `json:"created_at"`
	// Problem names what is wrong with the activity's row, which somebody has written into.
	Problem string `json:"problem,omitempty"`
	// Redis is what Redis says; only in the answer for a single activity.
	Redis *ActivityRedis `json:"redis,omitempty"`
}

// EditResult answers PUT /admin/v1/activities/{id}, which gives a draft another plan.
type EditResult struct {
	Activity
	Changed bool `json:"changed"` // false: the plan was so already
}

// ActivityRedis is the activity as Redis has it. Error says why it could not be read.
type ActivityRedis struct {
	Announced bool   `json:"announced"`
	Warm      uint64 `json:"warm_number"`
	Opened    bool   `json:"opened"`
	Paused    bool   `json:"paused"`
	Ended     bool   `json:"ended"`
	Error     string `json:"error,omitempty"`
}

// ActivityList is a page of activities.
type ActivityList struct {
	Activities []Activity `json:"activities"`
	NextCursor string     `json:"next_cursor,omitempty"`
}

// WarmResult says what a warm-up did.
type WarmResult struct {
	ActivityID string `json:"activity_id"`
	Already    bool   `json:"already"` // it was warm before this call
	Number     uint64 `json:"number"`  // the attempt that won
	Opened     int    `json:"opened"`  // buckets that are open now; fewer than the sale has: Redis has lost some
}

// DeleteResult answers the deletion of a draft.
type DeleteResult struct {
	ActivityID string `json:"activity_id"`
	Deleted    bool   `json:"deleted"`
}

// PauseResult answers pause and resume.
type PauseResult struct {
	ActivityID string `json:"activity_id"`
	Paused     bool   `json:"paused"`
	Changed    bool   `json:"changed"` // false: it was so already
}

// StockRow is one pool of one sku of a sale. RedisAvailable is absent where the key is missing.
type StockRow struct {
	SKU            string `json:"sku_id"`
	Pool           string `json:"pool"`
	Allocated      int64  `json:"allocated"`
	Available      int64  `json:"available"` // in MySQL
	Withheld       int64  `json:"withheld"`
	RedisAvailable *int64 `json:"redis_available,omitempty"`
}

// AddStockRequest adds units to a pool of a sale. The operation id makes it safe to repeat.
type AddStockRequest struct {
	OpID     string `json:"op_id"` // 1 to 64 of A-Za-z0-9_-
	SKU      string `json:"sku_id"`
	Pool     string `json:"pool"`
	Quantity int64  `json:"quantity"`
}

// AddStockResult answers it.
type AddStockResult struct {
	ActivityID string `json:"activity_id"`
	OpID       string `json:"op_id"`
	SKU        string `json:"sku_id"`
	Pool       string `json:"pool"`
	Quantity   int64  `json:"quantity"`
	Already    bool   `json:"already"` // this operation was done before
	Waiting    bool   `json:"waiting"` // booked; Redis does not sell the units yet, and will by itself
	Allocated  int64  `json:"allocated"`
	Available  int64  `json:"available"`
}

// MaxQualify is how many users one call may name.
const MaxQualify = 5000

// QualifyRequest lets users take part in a sale whose qualification is "list".
type QualifyRequest struct {
	Users []string `json:"users"`
}

// QualifyResult answers it.
type QualifyResult struct {
	ActivityID string `json:"activity_id"`
	Users      int    `json:"users"` // named
	Added      int    `json:"added"` // of these, how many could not take part before
}

// InventoryRow is what the warehouses hold outside sales.
type InventoryRow struct {
	SKU    string `json:"sku_id"`
	Pool   string `json:"pool"`
	OnHand int64  `json:"on_hand"`
}

// SetInventoryRequest sets one row of it. A pointer, since 0 is an amount like any other: one that is
// left out must not read as "nothing is there".
type SetInventoryRequest struct {
	SKU    string `json:"sku_id"`
	Pool   string `json:"pool"`
	OnHand *int64 `json:"on_hand"`
}

// InventoryList is the whole inventory.
type InventoryList struct {
	Inventory []InventoryRow `json:"inventory"`
}

// Order is an order row.
type Order struct {
	OrderID        string    `json:"order_id"`
	ActivityID     string    `json:"activity_id"`
	UserID         string    `json:"user_id"`
	SKU            string    `json:"sku_id"`
	Region         string    `json:"region"`
	Pool           string    `json:"pool"`
	Quantity       int       `json:"quantity"`
	UnitPriceMinor int64     `json:"unit_price_minor"`
	AmountMinor    int64     `json:"amount_minor"`
	Currency       string    `json:"currency"`
	Status         string    `json:"status"`
	Reason         string    `json:"reason,omitempty"`
	RefundDue      bool      `json:"refund_due"`
	ReservedAt     time.Time `json:"reserved_at"`
	PayBefore      time.Time `json:"pay_before"`
	CreatedAt      time.Time `json:"created_at,omitzero"` // zero while the row is not in MySQL
	UpdatedAt      time.Time `json:"updated_at,omitzero"`
	// Source is "mysql", or "redis" for an order whose row is not written yet.
	Source   string    `json:"source,omitempty"`
	Payments []Payment `json:"payments,omitempty"`
}

// States of a payment.
const (
	PaymentKept      = "kept"       // its order is not known yet
	PaymentApplied   = "applied"    // it paid its order
	PaymentRefundDue = "refund_due" // the money has to go back
	PaymentSettled   = "settled"    // it was sent back
)

// Payment is one booked transaction of an order.
type Payment struct {
	TransactionID string    `json:"transaction_id"`
	OrderID       string    `json:"order_id"`
	AmountMinor   int64     `json:"amount_minor"`
	Currency      string    `json:"currency"`
	Status        string    `json:"status"`
	Reason        string    `json:"reason,omitempty"` // why it is due: late_payment, second_payment, amount_mismatch, order_lost, order_refunded
	ReceivedAt    time.Time `json:"received_at"`
	SettledAt     time.Time `json:"settled_at,omitzero"`
	SettledBy     string    `json:"settled_by,omitempty"`
	SettleReason  string    `json:"settle_reason,omitempty"`
}

// PaymentList is a page of payments.
type PaymentList struct {
	Payments   []Payment `json:"payments"`
	NextCursor string    `json:"next_cursor,omitempty"`
}

// SettleRefundRequest notes that the money of a payment has been sent back.
type SettleRefundRequest struct {
	Reason string `json:"reason"`
}

// SettleRefundResult answers it. Changed is false when it had been settled before.
type SettleRefundResult struct {
	Payment
	Changed bool `json:"changed"`
}

// PaidOrder is an entry of the feed of paid orders. Status says what the order is now: it may have
// been refunded since it was paid.
type PaidOrder struct {
	Order
	PaidAt time.Time `json:"paid_at"`
}

// PaidOrderList is a page of that feed. NextCursor is always there, also when nothing new has come:
// keep it once the page has been dealt with, and ask again with it.
type PaidOrderList struct {
	Orders     []PaidOrder `json:"orders"`
	NextCursor string      `json:"next_cursor"`
}

// OrderList is a page of orders.
type OrderList struct {
	Orders     []Order `json:"orders"`
	NextCursor string  `json:"next_cursor,omitempty"`
}

// CancelRequest asks for an order to be cancelled.
type CancelRequest struct {
	Reason string `json:"reason"`
}

// CancelResult answers it. Changed is false when the order had been cancelled before.
type CancelResult struct {
	OrderID string `json:"order_id"`
	Status  string `json:"status"`
	Reason  string `json:"reason,omitempty"`
	Changed bool   `json:"changed"`
	Queued  bool   `json:"queued"` // the cancel goes through the queue: the status may still be the old one
}

// RefundRequest asks for a paid order to be taken back. The reason is the operator's own words, in any
// language: it goes into the audit; the order itself carries a code.
type RefundRequest struct {
	Reason string `json:"reason"`
}

// RefundResult answers it. Changed is false when the order had been refunded before.
type RefundResult struct {
	OrderID string `json:"order_id"`
	Status  string `json:"status"`
	Reason  string `json:"reason,omitempty"`
	Changed bool   `json:"changed"`
	Queued  bool   `json:"queued"` // the refund goes through the queue: the status may still be the old one
}

// States of a dead letter.
const (
	LetterOpen      = "open"
	LetterClaimed   = "claimed" // a replay job has it in hand
	LetterSent      = "sent"    // published again, not seen to have worked yet
	LetterResolved  = "resolved"
	LetterDiscarded = "discarded"
)

// Verdicts: what a replay of the letter would come to.
const (
	WillApply   = "will_apply"
	AlreadyDone = "already_done" // the order's row says that the message has had its effect
	InConflict  = "conflict"     // the row contradicts the message
	Undecodable = "undecodable"
)

// DeadLetter is a message that failed for good.
type DeadLetter struct {
	ID         int64     `json:"id"`
	State      string    `json:"state"`
	Class      string    `json:"class"`
	Error      string    `json:"error"`
	Queue      string    `json:"queue"`
	RoutingKey string    `json:"routing_key"`
	MessageID  string    `json:"message_id"`
	ActivityID string    `json:"activity_id,omitempty"`
	OrderID    string    `json:"order_id,omitempty"`
	Attempt    int       `json:"attempt"`
	Deaths     int       `json:"deaths"` // how often this letter came in
	FirstAt    time.Time `json:"first_at"`
	LastAt     time.Time `json:"last_at"`
	Parked     bool      `json:"parked"`         // its outbox entry waits for this letter
	Note       string    `json:"note,omitempty"` // why it was discarded or counts as resolved
	// Only in the answer for a single letter:
	Verdict string            `json:"verdict,omitempty"`
	Detail  string            `json:"verdict_detail,omitempty"`
	Headers map[string]string `json:"headers,omitempty"`
	Decoded json.RawMessage   `json:"decoded,omitempty"` // the event as JSON
	Body    []byte            `json:"body,omitempty"`    // base64
}

// DeadLetterList is a page of letters.
type DeadLetterList struct {
	DeadLetters []DeadLetter `json:"dead_letters"`
	NextCursor  string       `json:"next_cursor,omitempty"`
}

// DeadLetterGroup counts letters that look alike.
type DeadLetterGroup struct {
	State  string    `json:"state"`
	Class  string    `json:"class"`
	Queue  string    `json:"queue"`
	Error  string    `json:"error"`
	Count  int64     `json:"count"`
	Oldest time.Time `json:"oldest"`
	Newest time.Time `json:"newest"`
}

// DeadLetterGroups is the answer of groups.
type DeadLetterGroups struct {
	Groups []DeadLetterGroup `json:"groups"`
}

// LetterFilter selects letters. Empty fields do not matter; an empty filter selects everything.
type LetterFilter struct {
	State      string `json:"state,omitempty"`
	Class      string `json:"class,omitempty"`
	Queue      string `json:"queue,omitempty"`
	ActivityID string `json:"activity_id,omitempty"`
	OrderID    string `json:"order_id,omitempty"`
	Query      string `json:"q,omitempty"` // part of the error, the order id or the body
}

// LetterSelection names letters by id or by filter, never both. Only open letters are taken. By
// filter, only letters that will apply are sent and the others are skipped; named ids are sent even
// in conflict or undecodable (they come back as letters if they fail again).
type LetterSelection struct {
	IDs    []int64       `json:"ids,omitempty"`
	Filter *LetterFilter `json:"filter,omitempty"`
}

// ReplayRequest makes a replay job.
type ReplayRequest struct {
	LetterSelection
	DryRun bool `json:"dry_run,omitempty"`
}

// States of a replay job.
const (
	JobRunning = "running"
	JobDone    = "done"
)

// ReplayJob is a replay. With dry_run nothing was made (no id) and Verdicts says what would happen.
type ReplayJob struct {
	ID         string         `json:"job_id"`
	State      string         `json:"state"`
	Actor      string         `json:"actor"`
	Matched    int            `json:"matched"`
	Sent       int            `json:"sent"`    // published again and confirmed
	Skipped    int            `json:"skipped"` // already done, or not fit to be sent
	Failed     int            `json:"failed"`  // broker did not take it; open again
	DryRun     bool           `json:"dry_run,omitempty"`
	Verdicts   map[string]int `json:"verdicts,omitempty"`
	CreatedAt  time.Time      `json:"created_at,omitzero"`
	FinishedAt time.Time      `json:"finished_at,omitzero"`
}

// ReplayJobList is the latest jobs, newest first.
type ReplayJobList struct {
	Jobs []ReplayJob `json:"jobs"`
}

// DiscardRequest gives letters up: their orders become rejected and their units go back.
type DiscardRequest struct {
	LetterSelection
	Reason string `json:"reason"`
	DryRun bool   `json:"dry_run,omitempty"`
}

// DiscardResult answers it.
type DiscardResult struct {
	Matched   int  `json:"matched"`
	Discarded int  `json:"discarded"`
	Resolved  int  `json:"resolved"` // the order was found alive: nothing to discard
	Skipped   int  `json:"skipped"`  // not open any more
	Failed    int  `json:"failed"`
	DryRun    bool `json:"dry_run,omitempty"`
}

// AuditEntry is one change made by an operator.
type AuditEntry struct {
	ID        string          `json:"id"`
	At        time.Time       `json:"at"`
	Actor     string          `json:"actor"`
	Role      string          `json:"role"`
	Action    string          `json:"action"`
	Target    string          `json:"target"`
	Reason    string          `json:"reason,omitempty"`
	Result    string          `json:"result,omitempty"`
	RequestID string          `json:"request_id"`
	Before    json.RawMessage `json:"before,omitempty"`
	After     json.RawMessage `json:"after,omitempty"`
	Remote    string          `json:"remote,omitempty"`
}

// AuditList is a page of the audit, newest first.
type AuditList struct {
	Entries    []AuditEntry `json:"entries"`
	NextCursor string       `json:"next_cursor,omitempty"`
}
