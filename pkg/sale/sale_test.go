package sale_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	"seckill/pkg/sale"
)

const good = `
id: double11
name: Double Eleven
starts_at: 2026-11-11T00:00:00+08:00
ends_at: 2026-11-11T02:00:00+08:00
per_user_limit: 2
payment_timeout: 15m
currency: CNY
buckets: 4
items:
  - sku_id: phone-1
    price_minor: 199900
    pools: {beijing: 100, national: 900}
region_fallback: {beijing: [national], shanghai: [national]}
`

var tiers = []time.Duration{time.Second, 5 * time.Second, 15 * time.Minute}

func TestPlanIsReadWithDefaultsAndOffsets(t *testing.T) {
	s, err := sale.DecodeYAML(strings.NewReader(good))
	if err != nil {
		t.Fatal(err)
	}
	s = s.WithDefaults()
	if err := s.Validate(tiers); err != nil {
		t.Fatal(err)
	}
	start, end, err := s.Window()
	if err != nil {
		t.Fatal(err)
	}
	if want := time.Date(2026, 11, 10, 16, 0, 0, 0, time.UTC); !start.Equal(want) || end.Sub(start) != 2*time.Hour {
		t.Errorf("window %s to %s", start, end)
	}
	if s.Qualification != "none" || s.RefundAfterEnd != "national" || s.Units() != 1000 {
		t.Errorf("defaults: %+v, units %d", s, s.Units())
	}
}

func TestEveryProblemIsReportedAtOnce(t *testing.T) {
	bad := sale.Sale{
		ID: "a b", Name: " ", StartsAt: "2026-11-11 00:00:00", EndsAt: "tomorrow", PerUserLimit: 0,
		PaymentTimeout: "7m", Currency: "cny", Qualification: "vip", Buckets: 1025, RefundAfterEnd: "moon",
		Items: []sale.Item{
			{SKU: "x", PriceMinor: -1, Pools: map[string]int{"Beijing": 1}},
			{SKU: "x", PriceMinor: 1},
			{SKU: "y", PriceMinor: 1, Pools: map[string]int{"north": -1}},
		},
		RegionFallback: map[string][]string{"north": {"north"}, "south": {"atlantis"}, "west": nil, "east": {"north", "north"}},
	}
	var p sale.Problems
	if err := bad.Validate(tiers); !errors.As(err, &p) {
		t.Fatalf("got %v", err)
	}
	got := map[string]bool{}
	for _, one := range p {
		got[one.Field] = true
	}
	for _, field := range []string{
		"id", "name", "starts_at", "ends_at", "per_user_limit", "payment_timeout", "currency", "qualification", "buckets",
		"items[0].price_minor", "items[0].pools", "items[1].sku_id", "items[1].pools", "items[2].pools.north",
		"region_fallback.north", "region_fallback.south", "region_fallback.west", "region_fallback.east", "refund_after_end",
	} {
		if !got[field] {
			t.Errorf("no problem reported for %s in %v", field, p)
		}
	}
}

func TestEndHasToBeAfterStart(t *testing.T) {
	s, err := sale.DecodeYAML(strings.NewReader(good))
	if err != nil {
		t.Fatal(err)
	}
	s = s.WithDefaults()
	s.EndsAt = "2026-11-10T17:00:00+09:00" // the same instant as the start less eight hours
	if err := s.Validate(nil); err == nil || !strings.Contains(err.Error(), "after starts_at") {
		t.Errorf("got %v", err)
	}
}

// 0100 is 64 to YAML, and a price that was forgotten would be 0.
func TestNumbersAreDecimalDigitsAndThere(t *testing.T) {
	for _, field := range []string{"per_user_limit: 2", "buckets: 4", "price_minor: 199900", "beijing: 100", "national: 900"} {
		key, _, _ := strings.Cut(field, ": ")
		for _, number := range []string{"0100", "0x10", "0o10", "0b1", "1_000", "1e3", "1.0", "+5", `"5"`, "'5'", `!!int "5"`, "!!int 5", ".inf", "[5]", "99999999999999999999"} {
			text := strings.Replace(good, field, key+": "+number, 1)
			if s, err := sale.DecodeYAML(strings.NewReader(text)); err == nil || !strings.Contains(err.Error(), "line ") {
				t.Errorf("%s: %s: %v, accepted as %+v", key, number, err, s)
			}
		}
	}
	for field, text := range map[string]string{
		"per_user_limit":         strings.Replace(good, "per_user_limit: 2\n", "", 1),
		"items[0].price_minor":   strings.Replace(good, "    price_minor: 199900\n", "", 1),
		"items[0].pools.beijing": strings.Replace(good, "beijing: 100", "beijing: ", 1),
	} {
		s, err := sale.DecodeYAML(strings.NewReader(text))
		if err != nil {
			t.Fatal(err)
		}
		var p sale.Problems
		if err := s.WithDefaults().Validate(nil); !errors.As(err, &p) || len(p) != 1 || p[0].Field != field {
			t.Errorf("without %s: %v", field, err)
		}
	}
	for price, ok := range map[string]bool{"500000000000000": true, "500000000000001": false, "9223372036854775807": false} {
		s, err := sale.DecodeYAML(strings.NewReader(strings.Replace(good, "199900", price, 1)))
		if err != nil {
			t.Fatal(err)
		}
		if err := s.WithDefaults().Validate(nil); (err == nil) != ok {
			t.Errorf("a price of %s for each of two: %v", price, err)
		}
	}
	_, err := sale.DecodeYAML(strings.NewReader(strings.NewReplacer("limit: 2", "limit: 0x2", "buckets: 4", "buckets: 04").Replace(good)))
	if err == nil || !strings.Contains(err.Error(), "line 6: 0x2 ") || !strings.Contains(err.Error(), "line 9: 04 ") {
		t.Errorf("not both are named: %v", err)
	}
	// Free is what somebody says is free; a text may look like any number.
	s, err := sale.DecodeYAML(strings.NewReader(strings.NewReplacer("price_minor: 199900", "price_minor: 0", "id: phone-1", "id: 0x10").Replace(good)))
	if err != nil || s.WithDefaults().Validate(nil) != nil || s.Items[0].SKU != "0x10" {
		t.Errorf("%v %+v", err, s)
	}
}

func TestPlanIsDecodedStrictly(t *testing.T) {
	for name, text := range map[string]string{
		"unknown key":    good + "colour: red\n",
		"repeated key":   good + "id: other\n",
		"other case":     strings.Replace(good, "name:", "Name:", 1),
		"fraction":       strings.Replace(good, "per_user_limit: 2", "per_user_limit: 2.5", 1),
		"exponent":       strings.Replace(good, "per_user_limit: 2", "per_user_limit: 1e2", 1),
		"text for count": strings.Replace(good, "per_user_limit: 2", `per_user_limit: "2"`, 1),
		"two documents":  good + "---\nid: x\n",
		"shadow":         good + "shadow: true\n",
		"empty":          "",
	} {
		t.Run(name, func(t *testing.T) {
			if s, err := sale.DecodeYAML(strings.NewReader(text)); err == nil {
				t.Errorf("accepted as %+v", s)
			}
		})
	}
}
