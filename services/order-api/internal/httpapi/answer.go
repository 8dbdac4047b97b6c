package httpapi

import (
	"strconv"
	"sync"
	"time"

	"github.com/gin-gonic/gin"
)

// answers lends out buffers for encoded orders.
type answers struct{ pool sync.Pool }

// accepted answers with an order. Its members are texts of a small alphabet and whole numbers, so it
// is written member by member; an order with anything else in it goes to the JSON library.
func (a *api) accepted(c *gin.Context, status int, b *orderBody) error {
	buf, _ := a.answers.pool.Get().(*[]byte)
	if buf == nil {
		buf = new([]byte)
	}
	defer a.answers.pool.Put(buf)
	out, plain := b.appendJSON((*buf)[:0])
	*buf = out
	if !plain {
		return a.personal(c, status, b)
	}
	c.Writer.Header()["Cache-Control"] = []string{"no-store"}
	a.send(c, status, "application/json", out)
	return nil
}

// appendJSON writes what the JSON library writes for the same value, or reports false.
func (b *orderBody) appendJSON(dst []byte) ([]byte, bool) {
	plain := true
	text := func(name, v string) {
		for i := 0; i < len(v); i++ {
			if ch := v[i]; ch < 0x20 || ch >= 0x7f || ch == '"' || ch == '\\' {
				plain = false
			}
		}
		dst = append(append(append(append(append(dst, name...), '"'), v...), '"'), ',')
	}
	some := func(name, v string) {
		if v != "" {
			text(name, v)
		}
	}
	number := func(name string, n int64) {
		dst = append(strconv.AppendInt(append(dst, name...), n, 10), ',')
	}
	dst = append(dst, '{')
	text(`"order_id":`, b.OrderID)
	text(`"status":`, b.Status)
	some(`"reason":`, b.Reason)
	if b.RefundDue {
		dst = append(dst, `"refund_due":true,`...)
	}
	text(`"activity_id":`, b.ActivityID)
	some(`"sku_id":`, b.SKUID)
	if b.Quantity != 0 {
		number(`"quantity":`, int64(b.Quantity))
	}
	some(`"region":`, b.Region)
	some(`"pool":`, b.Pool)
	number(`"unit_price_minor":`, b.UnitPriceMinor)
	number(`"amount_minor":`, b.AmountMinor)
	some(`"currency":`, b.Currency)
	some(`"reserved_at":`, b.ReservedAt)
	some(`"pay_before":`, b.PayBefore)
	dst[len(dst)-1] = '}' // in place of the last comma
	return dst, plain
}

// timestamp writes a time as the API shows it, in UTC with milliseconds; years have four digits.
func timestamp(t time.Time) string {
	t = t.UTC()
	year, month, day := t.Date()
	hour, minute, second := t.Clock()
	if year < 0 || year > 9999 {
		return t.Format("2006-01-02T15:04:05.000Z07:00")
	}
	var b [24]byte
	two := func(at, n int) { b[at], b[at+1] = byte('0'+n/10), byte('0'+n%10) }
	two(0, year/100)
	two(2, year%100)
	two(5, int(month))
	two(8, day)
	two(11, hour)
	two(14, minute)
	two(17, second)
	ms := t.Nanosecond() / 1e6
	b[20] = byte('0' + ms/100)
	two(21, ms%100)
	b[4], b[7], b[10], b[13], b[16], b[19], b[23] = '-', '-', 'T', ':', ':', '.', 'Z'
	return string(b[:])
}
