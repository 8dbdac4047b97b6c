package sale

import (
	"fmt"
	"slices"
	"sort"
	"strings"
	"time"

	"seckill/pkg/order"
)

// Values of Qualification and RefundAfterEnd.
const (
	QualificationNone = "none" // everybody may buy
	QualificationList = "list" // only imported users may buy

	RefundNational = "national" // units refunded after the end go to the national inventory
	RefundRegion   = "region"   // ... to the inventory of the pool they came from
)

// Limits of a plan.
const (
	MaxName     = 128           // characters
	MaxItems    = 256           // skus in one sale
	MaxUnits    = 1_000_000_000 // units in one pool
	MaxYAMLSize = 1 << 20       // bytes of a sale.yaml
)

// Sale is a plan. Times and durations stay the text that was written until they are asked for, so
// that a bad one is reported together with everything else that is wrong.
type Sale struct {
	ID             string              `json:"id"`
	Name           string              `json:"name"`
	StartsAt       string              `json:"starts_at"`       // RFC 3339 with offset
	EndsAt         string              `json:"ends_at"`         // RFC 3339 with offset
	PerUserLimit   int                 `json:"per_user_limit"`  // units one user may hold
	PaymentTimeout string              `json:"payment_timeout"` // "15m"; one of the delay tiers
	Currency       string              `json:"currency"`        // ISO 4217
	Qualification  string              `json:"qualification"`   // none (default) or list
	Buckets        int                 `json:"buckets"`         // 1 (default) to 1024
	Items          []Item              `json:"items"`
	RegionFallback map[string][]string `json:"region_fallback,omitempty"`
	RefundAfterEnd string              `json:"refund_after_end"` // national (default) or region
	// Shadow marks a rehearsal: it never touches the inventory. Not a field of sale.yaml.
	Shadow bool `json:"shadow,omitempty"`
}

// Item is one sku of a sale.
type Item struct {
	SKU        string         `json:"sku_id"`
	PriceMinor int64          `json:"price_minor"` // minor units of the sale's currency
	Pools      map[string]int `json:"pools"`       // units per pool
}

// Problem is one thing that is wrong with a plan.
type Problem struct {
	Field  string `json:"field"`
	Detail string `json:"detail"`
}

// Problems is everything that is wrong with a plan.
type Problems []Problem

// Error lists the problems in the order of the fields.
func (p Problems) Error() string {
	parts := make([]string, len(p))
	for i, one := range p {
		parts[i] = one.Field + ": " + one.Detail
	}
	return "invalid sale: " + strings.Join(parts, "; ")
}

// WithDefaults fills what may be left out.
func (s Sale) WithDefaults() Sale {
	if s.Qualification == "" {
		s.Qualification = QualificationNone
	}
	if s.Buckets == 0 {
		s.Buckets = 1
	}
	if s.RefundAfterEnd == "" {
		s.RefundAfterEnd = RefundNational
	}
	return s
}

// Window gives start and end in UTC, cut to microseconds (what MySQL keeps).
func (s Sale) Window() (start, end time.Time, err error) {
	if start, err = parseTime(s.StartsAt); err != nil {
		return time.Time{}, time.Time{}, fmt.Errorf("starts_at: %w", err)
	}
	if end, err = parseTime(s.EndsAt); err != nil {
		return time.Time{}, time.Time{}, fmt.Errorf("ends_at: %w", err)
	}
	return start, end, nil
}

// Timeout gives the payment time-out.
func (s Sale) Timeout() (time.Duration, error) {
	d, err := time.ParseDuration(s.PaymentTimeout)
	if err != nil {
		return 0, fmt.Errorf("payment_timeout: %w", err)
	}
	return d, nil
}

func parseTime(text string) (time.Time, error) {
	t, err := time.Parse(time.RFC3339Nano, text)
	if err != nil {
		return time.Time{}, fmt.Errorf("%q is not an RFC 3339 time with offset (2026-12-01T10:00:00+08:00)", text)
	}
	if y := t.UTC().Year(); y < 2000 || y > 9000 {
		return time.Time{}, fmt.Errorf("%q is out of range", text)
	}
	return t.UTC().Truncate(time.Microsecond), nil
}

// Validate names everything that is wrong; nil means the plan can be made. tiers are the delay
// queues that exist: the payment time-out has to be one of them, since each has one fixed TTL. With
// no tiers (a client that does not know them) only the sign is looked at.
func (s Sale) Validate(tiers []time.Duration) error {
	var p Problems
	add := func(field, format string, args ...any) {
		p = append(p, Problem{Field: field, Detail: fmt.Sprintf(format, args...)})
	}
	if !order.ValidActivityID(s.ID) {
		add("id", "must be 1 to %d of A-Za-z0-9_-", order.MaxActivityID)
	}
	if n := len([]rune(s.Name)); n == 0 || n > MaxName || strings.TrimSpace(s.Name) == "" || !validText(s.Name) {
		add("name", "must be 1 to %d printable characters", MaxName)
	}
	start, errStart := parseTime(s.StartsAt)
	if errStart != nil {
		add("starts_at", "%s", errStart)
	}
	end, errEnd := parseTime(s.EndsAt)
	if errEnd != nil {
		add("ends_at", "%s", errEnd)
	}
	if errStart == nil && errEnd == nil && !end.After(start) {
		add("ends_at", "must be after starts_at")
	}
	if s.PerUserLimit < 1 || s.PerUserLimit > order.MaxQuantity {
		add("per_user_limit", "must be 1 to %d", order.MaxQuantity)
	}
	if d, err := time.ParseDuration(s.PaymentTimeout); err != nil {
		add("payment_timeout", "%q is not a duration such as 15m", s.PaymentTimeout)
	} else if d <= 0 {
		add("payment_timeout", "must be positive")
	} else if len(tiers) > 0 && !slices.Contains(tiers, d) {
		add("payment_timeout", "%s has no delay queue; one of %s", d, joinDurations(tiers))
	}
	if !order.ValidCurrency(s.Currency) {
		add("currency", "must be three capital letters (ISO 4217)")
	}
	if s.Qualification != QualificationNone && s.Qualification != QualificationList {
		add("qualification", "must be none or list")
	}
	if s.Buckets < 1 || s.Buckets > order.MaxBuckets {
		add("buckets", "must be 1 to %d", order.MaxBuckets)
	}
	pools := s.validateItems(add)
	s.validateFallback(add, pools)
	if s.RefundAfterEnd != RefundNational && s.RefundAfterEnd != RefundRegion {
		add("refund_after_end", "must be national or region")
	}
	if len(p) == 0 {
		return nil
	}
	return p
}

func (s Sale) validateItems(add func(field, format string, args ...any)) map[string]bool {
	pools := map[string]bool{}
	if len(s.Items) == 0 || len(s.Items) > MaxItems {
		add("items", "must name 1 to %d skus", MaxItems)
	}
	seen := map[string]bool{}
	for i, item := range s.Items {
		at := fmt.Sprintf("items[%d]", i)
		switch {
		case !order.ValidSKUID(item.SKU):
			add(at+".sku_id", "must be 1 to %d of A-Za-z0-9_-", order.MaxSKUID)
		case seen[item.SKU]:
			add(at+".sku_id", "%s stands twice", item.SKU)
		}
		seen[item.SKU] = true
		switch {
		case item.PriceMinor == absent:
			add(at+".price_minor", "has to be given, 0 included")
		case item.PriceMinor < 0:
			add(at+".price_minor", "must not be negative")
		case s.PerUserLimit >= 1:
			if _, err := order.Total(item.PriceMinor, s.PerUserLimit); err != nil {
				add(at+".price_minor", "times per_user_limit is more than %d", int64(order.MaxAmountMinor))
			}
		}
		if len(item.Pools) == 0 {
			add(at+".pools", "must name at least one pool")
		}
		for _, pool := range sortedKeys(item.Pools) {
			if !order.ValidPool(pool) {
				add(at+".pools", "%q: a pool is 1 to %d of a-z0-9_-", pool, order.MaxPool)
			}
			if n := item.Pools[pool]; n == absent {
				add(at+".pools."+pool, "its units have to be given, 0 included")
			} else if n < 0 || n > MaxUnits {
				add(at+".pools."+pool, "must be 0 to %d units", MaxUnits)
			}
			pools[pool] = true
		}
	}
	return pools
}

func (s Sale) validateFallback(add func(field, format string, args ...any), pools map[string]bool) {
	for _, region := range sortedKeys(s.RegionFallback) {
		at := "region_fallback." + region
		if !order.ValidPool(region) {
			add("region_fallback", "%q: a region is 1 to %d of a-z0-9_-", region, order.MaxPool)
		}
		list := s.RegionFallback[region]
		if len(list) == 0 {
			add(at, "must name at least one pool")
		}
		for i, pool := range list {
			switch {
			case pool == region:
				add(at, "must not name itself")
			case !pools[pool]:
				add(at, "no sku has a pool %q", pool)
			case slices.Contains(list[:i], pool):
				add(at, "%q stands twice", pool)
			}
		}
	}
}

// Ahead refuses a window that is over: such a sale would never open, and most likely its year or its offset
// is wrong.
func (s Sale) Ahead(now time.Time) error {
	_, end, err := s.Window()
	if err != nil {
		return err
	}
	if end.After(now) {
		return nil
	}
	return Problems{{Field: "ends_at", Detail: "is over already: it is " + now.UTC().Format(time.RFC3339) + " now"}}
}

// Units is the number of units the plan allocates, over all skus and pools.
func (s Sale) Units() int64 {
	var n int64
	for _, item := range s.Items {
		for _, units := range item.Pools {
			n += int64(units)
		}
	}
	return n
}

func validText(s string) bool {
	for _, r := range s {
		if r < 0x20 || r == 0x7f || r == '\uFFFD' {
			return false
		}
	}
	return true
}

func sortedKeys[V any](m map[string]V) []string {
	keys := make([]string, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	sort.Strings(keys)
	return keys
}

func joinDurations(ds []time.Duration) string {
	parts := make([]string, len(ds))
	for i, d := range ds {
		parts[i] = d.String()
	}
	return strings.Join(parts, ", ")
}
