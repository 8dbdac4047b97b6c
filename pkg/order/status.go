package order

import "fmt"

// Status is the state of an order. It only moves forward:
//
//	reserved → pending → paid → refunded
//	    └────────┴→ cancelled
//	    └→ rejected
//
// reserved lives in Redis alone (the row is not known to be in MySQL yet); the others are written
// to MySQL first and then to Redis.
type Status string

// The states of an order.
const (
	Reserved  Status = "reserved"  // units taken in Redis, row not known to be written
	Pending   Status = "pending"   // row written, waiting for payment
	Paid      Status = "paid"      // money applied
	Cancelled Status = "cancelled" // by the buyer, an operator, or the payment time-out
	Refunded  Status = "refunded"  // was paid, money goes back
	Rejected  Status = "rejected"  // could not become an order; the reason says why
)

// ParseStatus reads a status; an unknown word is an error, never a default.
func ParseStatus(s string) (Status, error) {
	switch st := Status(s); st {
	case Reserved, Pending, Paid, Cancelled, Refunded, Rejected:
		return st, nil
	}
	return "", fmt.Errorf("unknown order status %q", s)
}

// Live says whether an order in this state holds or has bought its units.
func (s Status) Live() bool { return s == Reserved || s == Pending || s == Paid }

// Final says whether the order's units have been given back (or were never taken) for good.
func (s Status) Final() bool { return s == Cancelled || s == Refunded || s == Rejected }

// Reasons that are stored with a final state and shown to the buyer.
const (
	ReasonUserCancelled     = "user_cancelled"
	ReasonOperatorCancelled = "operator_cancelled"
	ReasonOperatorRefunded  = "operator_refunded"
	ReasonPaymentTimeout    = "payment_timeout"
	ReasonOutOfStock        = "out_of_stock"     // MySQL's stock guard refused: units are withheld
	ReasonLimitExceeded     = "limit_exceeded"   // MySQL's per-user guard refused
	ReasonInvalidOrder      = "invalid_order"    // the content cannot be stored
	ReasonUnknownActivity   = "unknown_activity" // MySQL does not know the sale, sku or pool
	ReasonDiscarded         = "discarded"        // an operator discarded its dead letter
	ReasonOrderLost         = "order_lost"       // paid for, but the order never came
)
