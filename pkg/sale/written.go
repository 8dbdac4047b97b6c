package sale

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math"
	"strconv"

	"go.yaml.in/yaml/v3"
)

// Written is a plan as it is written, in sale.yaml or in JSON: a number that is left out is not 0 yet.
type Written struct {
	ID             string              `json:"id" yaml:"id"`
	Name           string              `json:"name" yaml:"name"`
	StartsAt       string              `json:"starts_at" yaml:"starts_at"`
	EndsAt         string              `json:"ends_at" yaml:"ends_at"`
	PerUserLimit   Whole               `json:"per_user_limit" yaml:"per_user_limit"` // 0 is refused like none
	PaymentTimeout string              `json:"payment_timeout" yaml:"payment_timeout"`
	Currency       string              `json:"currency" yaml:"currency"`
	Qualification  string              `json:"qualification" yaml:"qualification"`
	Buckets        Whole               `json:"buckets" yaml:"buckets"`
	Items          []WrittenItem       `json:"items" yaml:"items"`
	RegionFallback map[string][]string `json:"region_fallback" yaml:"region_fallback"`
	RefundAfterEnd string              `json:"refund_after_end" yaml:"refund_after_end"`
	Shadow         bool                `json:"shadow" yaml:"-"`
}

// WrittenItem is one sku of it.
type WrittenItem struct {
	SKU        string            `json:"sku_id" yaml:"sku_id"`
	PriceMinor *Whole            `json:"price_minor" yaml:"price_minor"`
	Pools      map[string]*Whole `json:"pools" yaml:"pools"`
}

// absent stands in a Sale for a number that was not written, until Validate names it.
const absent = math.MinInt

// Sale is what was written, not validated, without defaults.
func (w Written) Sale() Sale {
	s := Sale{
		ID: w.ID, Name: w.Name, StartsAt: w.StartsAt, EndsAt: w.EndsAt, PerUserLimit: int(w.PerUserLimit), PaymentTimeout: w.PaymentTimeout,
		Currency: w.Currency, Qualification: w.Qualification, Buckets: int(w.Buckets), RegionFallback: w.RegionFallback,
		RefundAfterEnd: w.RefundAfterEnd, Shadow: w.Shadow,
	}
	for _, item := range w.Items {
		out := Item{SKU: item.SKU, PriceMinor: int64(item.PriceMinor.or(absent)), Pools: map[string]int{}}
		for pool, units := range item.Pools {
			out.Pools[pool] = int(units.or(absent))
		}
		s.Items = append(s.Items, out)
	}
	return s
}

// Whole is a whole number.
type Whole int64

func (w *Whole) or(other Whole) Whole {
	if w == nil {
		return other
	}
	return *w
}

// UnmarshalYAML takes decimal digits and nothing else: YAML would read 0100 as 64, and cut 1.5 to 1.
func (w *Whole) UnmarshalYAML(n *yaml.Node) error {
	v, err := strconv.ParseInt(n.Value, 10, 64)
	if err != nil || n.Kind != yaml.ScalarNode || n.Style != 0 || strconv.FormatInt(v, 10) != n.Value {
		// Of this type, so that the others that are wrong are told, too.
		return &yaml.TypeError{Errors: []string{fmt.Sprintf("line %d: %s is not a whole number in decimal digits", n.Line, describe(n))}}
	}
	*w = Whole(v)
	return nil
}

func describe(n *yaml.Node) string {
	switch {
	case n.Kind != yaml.ScalarNode:
		return "a list or mapping"
	case n.Style != 0:
		return n.ShortTag() + " " + strconv.Quote(n.Value)
	}
	return n.Value
}

// DecodeYAML reads a sale.yaml: exactly one document, no unknown or repeated keys, whole numbers in
// decimal digits. It does not validate the values.
func DecodeYAML(r io.Reader) (Sale, error) {
	raw, err := io.ReadAll(io.LimitReader(r, MaxYAMLSize+1))
	if err != nil {
		return Sale{}, fmt.Errorf("read sale: %w", err)
	}
	if len(raw) > MaxYAMLSize {
		return Sale{}, fmt.Errorf("read sale: more than %d bytes", MaxYAMLSize)
	}
	dec := yaml.NewDecoder(bytes.NewReader(raw))
	dec.KnownFields(true)
	var w Written
	if err := dec.Decode(&w); err != nil {
		return Sale{}, fmt.Errorf("decode sale: %w", err)
	}
	if err := dec.Decode(new(yaml.Node)); !errors.Is(err, io.EOF) {
		return Sale{}, errors.New("decode sale: more than one document")
	}
	return w.Sale(), nil
}
