package stock

import (
	"encoding/hex"
	"fmt"
	"strconv"
	"strings"
	"time"

	"seckill/pkg/order"
)

// The layout of a record is described in package lua.

var statusCodes = [...]struct {
	code   string
	status order.Status
}{
	{"r", order.Reserved}, {"p", order.Pending}, {"d", order.Paid},
	{"c", order.Cancelled}, {"f", order.Refunded}, {"j", order.Rejected},
}

func statusCode(s order.Status) (string, error) {
	for _, c := range statusCodes {
		if c.status == s {
			return c.code, nil
		}
	}
	return "", fmt.Errorf("unknown order status %q", s)
}

func statusOf(code string) (order.Status, error) {
	for _, c := range statusCodes {
		if c.code == code {
			return c.status, nil
		}
	}
	return "", fmt.Errorf("%w: record status %q", ErrCorrupt, code)
}

// content is the part of a record that a release must match.
func content(user, sku, pool string, quantity int) string {
	return user + "|" + sku + "|" + pool + "|" + strconv.Itoa(quantity)
}

// frozen is what a reservation fixes for good (R17).
func frozen(o order.Order) string {
	return millis(o.ReservedAt) + "|" + strconv.FormatInt(o.UnitPriceMinor, 10) + "|" + o.Currency + "|" +
		strconv.FormatInt(o.PaymentTimeout.Milliseconds(), 10) + "|" + strconv.FormatUint(o.Epoch, 10) + "|" + o.Region
}

// parseRecord reads a record's fields.
func parseRecord(id order.ID, status, o, x string) (Record, error) {
	st, err := statusOf(status)
	if err != nil {
		return Record{}, fmt.Errorf("read record of order %s: %w", id, err)
	}
	r := Record{Order: order.Order{ID: id}, Status: st}
	bad := func(what string) (Record, error) {
		return Record{}, fmt.Errorf("read record of order %s: %w: %s", id, ErrCorrupt, what)
	}
	var f [4]string
	if !split(o, f[:]) {
		return bad("content")
	}
	r.User, r.SKU, r.Pool = f[0], f[1], f[2]
	if r.Quantity, err = strconv.Atoi(f[3]); err != nil {
		return bad("quantity")
	}
	if err := r.parseFrozen(x); err != nil {
		return Record{}, err
	}
	return r, nil
}

// parseFrozen reads what the reservation fixed for good.
func (r *Record) parseFrozen(x string) error {
	bad := func(what string) error {
		return fmt.Errorf("read record of order %s: %w: %s", r.ID, ErrCorrupt, what)
	}
	var g [6]string
	if !split(x, g[:]) {
		return bad("frozen fields")
	}
	at, err := strconv.ParseInt(g[0], 10, 64)
	if err != nil {
		return bad("time")
	}
	if r.UnitPriceMinor, err = strconv.ParseInt(g[1], 10, 64); err != nil {
		return bad("price")
	}
	timeout, err := strconv.ParseInt(g[3], 10, 64)
	if err != nil {
		return bad("payment time-out")
	}
	if r.Epoch, err = strconv.ParseUint(g[4], 10, 64); err != nil {
		return bad("epoch")
	}
	r.Currency, r.Region = g[2], g[5]
	r.PaymentTimeout = time.Duration(timeout) * time.Millisecond
	r.ReservedAt = time.UnixMilli(at).UTC()
	r.PayBefore = r.ReservedAt.Add(r.PaymentTimeout)
	return nil
}

// parseHash reads a whole record or receipt.
func parseHash(id order.ID, h map[string]string) (Record, error) {
	r, err := parseRecord(id, h["s"], h["o"], h["x"])
	if err != nil {
		return Record{}, err
	}
	r.IdemKey, r.Reason, r.RefundDue = h["i"], h["w"], h["d"] == "1"
	return r, nil
}

// split cuts s at '|' into exactly len(into) parts, without allocating.
func split(s string, into []string) bool {
	for i := range len(into) - 1 {
		j := strings.IndexByte(s, '|')
		if j < 0 {
			return false
		}
		into[i], s = s[:j], s[j+1:]
	}
	into[len(into)-1] = s
	return strings.IndexByte(s, '|') < 0
}

// packDigest halves a hex digest. Redis keeps one beside every idempotency key, so its bytes count.
// What is not lower-case hex stays as it is, behind a mark.
func packDigest(d string) string {
	if b, err := hex.DecodeString(d); err == nil && hex.EncodeToString(b) == d {
		return "h" + string(b)
	}
	return "=" + d
}

func unpackDigest(d string) string {
	switch {
	case d == "":
		return ""
	case d[0] == 'h':
		return hex.EncodeToString([]byte(d[1:]))
	}
	return d[1:]
}
