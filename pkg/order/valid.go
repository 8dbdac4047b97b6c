package order

import "fmt"

// Limits of identifiers and amounts.
const (
	MaxUserID         = 64
	MaxActivityID     = 32
	MaxSKUID          = 32
	MaxPool           = 32
	MaxIdempotencyKey = 64
	MaxTransactionID  = 64
	MaxQuantity       = 1_000_000
	// MaxAmountMinor is the largest amount of an order, and of a payment, in minor units: thousands of
	// them add up within 64 bits, and a double holds each.
	MaxAmountMinor = 1_000_000_000_000_000
)

// DefaultRegion is the region of a request that names none.
const DefaultRegion = "national"

func alnum(c byte) bool {
	return c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '_' || c == '-'
}

func validName(s string, limit int) bool {
	if s == "" || len(s) > limit {
		return false
	}
	for i := 0; i < len(s); i++ {
		if !alnum(s[i]) {
			return false
		}
	}
	return true
}

// ValidUserID reports whether s is 1 to 64 of A-Za-z0-9_-.
func ValidUserID(s string) bool { return validName(s, MaxUserID) }

// ValidActivityID reports whether s is 1 to 32 of A-Za-z0-9_-.
func ValidActivityID(s string) bool { return validName(s, MaxActivityID) }

// ValidSKUID reports whether s is 1 to 32 of A-Za-z0-9_-.
func ValidSKUID(s string) bool { return validName(s, MaxSKUID) }

// ValidIdempotencyKey reports whether s is 1 to 64 of A-Za-z0-9_-.
func ValidIdempotencyKey(s string) bool { return validName(s, MaxIdempotencyKey) }

// ValidTransactionID reports whether s is 1 to 64 of A-Za-z0-9_-.
func ValidTransactionID(s string) bool { return validName(s, MaxTransactionID) }

// ValidPool reports whether s is 1 to 32 of a-z0-9_- (pools and regions).
func ValidPool(s string) bool {
	if s == "" || len(s) > MaxPool {
		return false
	}
	for i := 0; i < len(s); i++ {
		c := s[i]
		if c >= 'A' && c <= 'Z' || !alnum(c) {
			return false
		}
	}
	return true
}

// ValidCurrency reports whether s looks like an ISO 4217 code.
func ValidCurrency(s string) bool {
	if len(s) != 3 {
		return false
	}
	for i := 0; i < 3; i++ {
		if s[i] < 'A' || s[i] > 'Z' {
			return false
		}
	}
	return true
}

// Total is quantity times unitPriceMinor, in minor units; more than MaxAmountMinor is an error.
func Total(unitPriceMinor int64, quantity int) (int64, error) {
	if unitPriceMinor < 0 || quantity < 1 {
		return 0, fmt.Errorf("amount of %d × %d", quantity, unitPriceMinor)
	}
	if unitPriceMinor > MaxAmountMinor/int64(quantity) {
		return 0, fmt.Errorf("amount of %d × %d is more than %d", quantity, unitPriceMinor, int64(MaxAmountMinor))
	}
	return unitPriceMinor * int64(quantity), nil
}

// Bucket is the home bucket of a user: FNV-1a of the id modulo the number of buckets. It is part of
// the key layout, so it never changes for a sale that was warmed.
func Bucket(user string, buckets int) int {
	if buckets <= 1 {
		return 0
	}
	const offset, prime = 2166136261, 16777619
	h := uint32(offset)
	for i := 0; i < len(user); i++ {
		h ^= uint32(user[i])
		h *= prime
	}
	return int(h % uint32(buckets)) //nolint:gosec // buckets is 2 to MaxBuckets
}
