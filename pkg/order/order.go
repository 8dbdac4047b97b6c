package order

import "time"

// Order is the content of one reservation as the reserve script froze it. Nothing in it changes
// afterwards; what changes is kept beside it (Status, reason).
type Order struct {
	ID             ID
	User           string
	SKU            string
	Region         string // what the buyer asked for
	Pool           string // where the units came from, and where they go back to
	Quantity       int
	UnitPriceMinor int64 // minor units of Currency
	Currency       string
	ReservedAt     time.Time     // by Redis' clock, millisecond precision, UTC
	PayBefore      time.Time     // ReservedAt + PaymentTimeout
	PaymentTimeout time.Duration // one of the delay tiers
	Epoch          uint64        // epoch of the stock; raised by a rebuild
	IdemKey        string        // empty if the client sent none
	IdemDigest     string        // hex digest of the request body that came with IdemKey
}

// AmountMinor is the price of the whole order in minor units.
func (o Order) AmountMinor() (int64, error) { return Total(o.UnitPriceMinor, o.Quantity) }
