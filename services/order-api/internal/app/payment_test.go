package app

import (
	"context"
	"encoding/base64"
	"fmt"
	"math"
	"net/http"
	"strings"
	"testing"
	"time"

	"seckill/pkg/config"
	"seckill/pkg/messaging"
	"seckill/pkg/observability"
	"seckill/pkg/order"
	"seckill/pkg/stock"
)

func TestAPaymentIsQueuedWithTheOrdersContent(t *testing.T) {
	t.Parallel()
	w := newWorldWithBroker(t)
	payments := w.collect(w.declare(), messaging.QueuePayments)
	r := w.replica(func(c *Config) { c.Payment.Secrets = []config.Secret{otherSecret, hookSecret} }).ready()
	w.sale("sale", limit(5))
	bought := r.buy("sale", "u1", 3, "")
	good := payment(bought.orderID(), 3*1999, "CNY", "txn-1")
	now := time.Now()
	sig := func(secret, body string) string { return signed(secret, "wh-1", now, body).Get("Webhook-Signature") }
	headers := func(change func(http.Header)) http.Header {
		h := signed(hookSecret, "wh-1", now, good)
		change(h)
		return h
	}
	none := func(http.Header) {}
	strange := payment("sale-0-01ARZ3NDEKTSV4RRFFQ69G5FAV", 1, "EUR", "txn-2")
	broken := r.buy("sale", "u2", 1, "").orderID()
	if err := w.redis.Rename(t.Context(), w.env.Prefix+"seckill:order:{sale:0}:"+broken, w.env.Prefix+"lost").Err(); err != nil {
		t.Fatal(err)
	}
	if err := w.redis.Set(t.Context(), w.env.Prefix+"seckill:order:{sale:0}:"+broken, "text", 0).Err(); err != nil {
		t.Fatal(err)
	}
	damaged := payment(broken, 1999, "CNY", "txn-3")
	failed := strings.Replace(good, "payment.succeeded", "payment.failed", 1)

	for name, tc := range map[string]struct {
		body    string
		headers http.Header
		status  int
		code    string
		queued  string // transaction
	}{
		"good":                    {good, headers(none), 202, "", "txn-1"},
		"the older secret":        {good, signed(otherSecret, "wh-2", now, good), 202, "", "txn-1"},
		"several signatures":      {good, headers(func(h http.Header) { h.Set("Webhook-Signature", "v1,AAAA v1a,xyz "+sig(otherSecret, good)) }), 202, "", "txn-1"},
		"sent again":              {good, headers(none), 202, "", "txn-1"},
		"four minutes old":        {good, signed(hookSecret, "wh-1", now.Add(-4*time.Minute), good), 202, "", "txn-1"},
		"an order nobody knows":   {strange, signed(hookSecret, "wh-1", now, strange), 202, "", "txn-2"},
		"a record overwritten":    {damaged, signed(hookSecret, "wh-1", now, damaged), 202, "", "txn-3"},
		"of another type":         {failed, signed(hookSecret, "wh-1", now, failed), 202, "", ""},
		"six minutes old":         {good, signed(hookSecret, "wh-1", now.Add(-6*time.Minute), good), 401, "unauthenticated", ""},
		"from the future":         {good, signed(hookSecret, "wh-1", now.Add(6*time.Minute), good), 401, "unauthenticated", ""},
		"of an unknown secret":    {good, signed("whsec_"+base64.StdEncoding.EncodeToString(make([]byte, 24)), "wh-1", now, good), 401, "unauthenticated", ""},
		"signed for another body": {good + " ", headers(none), 401, "unauthenticated", ""},
		"signed for another id":   {good, headers(func(h http.Header) { h.Set("Webhook-Id", "wh-9") }), 401, "unauthenticated", ""},
		"signed for another time": {good, headers(func(h http.Header) { h.Set("Webhook-Timestamp", fmt.Sprint(now.Unix()+1)) }), 401, "unauthenticated", ""},
		"without id":              {good, headers(func(h http.Header) { h.Del("Webhook-Id") }), 401, "unauthenticated", ""},
		"without time":            {good, headers(func(h http.Header) { h.Del("Webhook-Timestamp") }), 401, "unauthenticated", ""},
		"without signature":       {good, headers(func(h http.Header) { h.Del("Webhook-Signature") }), 401, "unauthenticated", ""},
		"signature of noise":      {good, headers(func(h http.Header) { h.Set("Webhook-Signature", "v1,%%%") }), 401, "unauthenticated", ""},
		"signature of another kind": {good, headers(func(h http.Header) {
			h.Set("Webhook-Signature", strings.Replace(sig(hookSecret, good), "v1,", "v2,", 1))
		}), 401, "unauthenticated", ""},
	} {
		t.Run(name, func(t *testing.T) {
			before := len(payments.all())
			got := r.pay(tc.body, tc.headers)
			if got.status != tc.status || got.code() != tc.code {
				t.Fatalf("%s, want %d %s", got, tc.status, tc.code)
			}
			if tc.queued == "" {
				return
			}
			eventually(t, func() error {
				if n := len(payments.all()); n != before+1 {
					return fmt.Errorf("%d queued", n-before)
				}
				return nil
			})
			p, err := messaging.DecodeOrderPaid(payments.all()[before])
			if err != nil || p.TransactionID != tc.queued {
				t.Fatalf("%+v %v", p, err)
			}
			if known := tc.queued == "txn-1"; known != (p.Order != nil) || known && (p.Order.User != "u1" || p.AmountMinor != 5997 || p.Currency != "CNY") {
				t.Errorf("%+v", p)
			}
		})
	}

	// Until it is there, the order must not expire.
	id, err := order.ParseID(bought.orderID())
	if err != nil {
		t.Fatal(err)
	}
	if noted, err := w.stock.Paying(t.Context(), []order.ID{id}); err != nil || noted[id].Before(now.Add(-time.Minute)) {
		t.Errorf("money on its way: %v %v", noted, err)
	}

	most := payment("sale-0-01ARZ3NDEKTSV4RRFFQ69G5FAV", order.MaxAmountMinor, "EUR", "txn-4")
	if got := r.pay(most, signed(hookSecret, "wh", now, most)); got.status != 202 {
		t.Errorf("as much as an order can cost: %s", got)
	}
	eventually(t, func() error {
		if all := payments.all(); !strings.HasSuffix(all[len(all)-1].ID, "txn-4") {
			return fmt.Errorf("queued: %s", all[len(all)-1].ID)
		}
		return nil
	})
	queued := len(payments.all())
	for name, body := range map[string]string{
		"less":              payment(bought.orderID(), 3*1999-1, "CNY", "t"),
		"more":              payment(bought.orderID(), 3*1999+1, "CNY", "t"),
		"one piece's price": payment(bought.orderID(), 1999, "CNY", "t"),
		"another currency":  payment(bought.orderID(), 3*1999, "USD", "t"),
		"nothing":           payment(bought.orderID(), 0, "CNY", "t"),
	} {
		if got := r.pay(body, signed(hookSecret, "wh", now, body)); got.status != 422 || got.code() != "amount_mismatch" {
			t.Errorf("%s: %s", name, got)
		}
	}
	for name, body := range map[string]string{
		"fraction":        strings.Replace(good, "5997", "5997.0", 1),
		"text":            strings.Replace(good, "5997", `"5997"`, 1),
		"null":            strings.Replace(good, "5997", "null", 1),
		"negative":        strings.Replace(good, "5997", "-5997", 1),
		"too much":        payment("sale-0-01ARZ3NDEKTSV4RRFFQ69G5FAV", order.MaxAmountMinor+1, "CNY", "t"),
		"63 bits":         payment("sale-0-01ARZ3NDEKTSV4RRFFQ69G5FAV", math.MaxInt64, "CNY", "t"),
		"no amount":       strings.Replace(good, `"amount_minor":5997,`, "", 1),
		"small currency":  strings.Replace(good, "CNY", "cny", 1),
		"order of noise":  strings.Replace(good, bought.orderID(), "nothing", 1),
		"odd transaction": strings.Replace(good, "txn-1", "txn 1", 1),
		"no transaction":  strings.Replace(good, "txn-1", "", 1),
		"no type":         strings.Replace(good, "payment.succeeded", "", 1),
		"unknown member":  strings.Replace(good, "{", `{"x":1,`, 1),
		"repeated member": strings.Replace(good, "{", `{"type":"payment.succeeded",`, 1),
		"cut":             good[:30],
	} {
		if got := r.pay(body, signed(hookSecret, "wh", now, body)); got.status != 400 || got.code() != "invalid_request" {
			t.Errorf("%s: %s", name, got)
		}
	}
	large := good + strings.Repeat(" ", 5000)
	if got := r.pay(large, signed(hookSecret, "wh", now, large)); got.status != 413 {
		t.Errorf("large: %s", got)
	}
	// One more good one comes behind whatever might have been published.
	if got := r.pay(good, signed(hookSecret, "wh", now, good)); got.status != 202 {
		t.Fatal(got)
	}
	eventually(t, func() error {
		if n := len(payments.all()); n != queued+1 {
			return fmt.Errorf("%d queued, want one", n-queued)
		}
		return nil
	})
}

func TestACancelIsQueuedUnlessTheOrderIsPaidOrOver(t *testing.T) {
	t.Parallel()
	w := newWorldWithBroker(t)
	rollbacks := w.collect(w.declare(), messaging.QueueRollbacks)
	r := w.replica().ready()
	w.sale("sale")
	ctx := context.Background()
	cancel := func(a answer, user string) answer {
		return r.do(call{method: "DELETE", path: "/v1/orders/" + a.orderID(), token: token(user),
			header: http.Header{"Traceparent": {"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}}})
	}
	reserved, pending, paid := r.buy("sale", "u1", 1, ""), r.buy("sale", "u2", 1, ""), r.buy("sale", "u3", 1, "")
	for a, to := range map[string]order.Status{pending.orderID(): order.Pending, paid.orderID(): order.Paid} {
		id, _ := order.ParseID(a)
		if _, err := w.stock.Confirm(ctx, []stock.Confirmation{{ID: id, To: to}}); err != nil {
			t.Fatal(err)
		}
	}
	if a := cancel(reserved, "u1"); a.status != 202 || a.fields["status"] != "reserved" {
		t.Errorf("%s", a)
	}
	if a := cancel(pending, "u2"); a.status != 202 || a.fields["status"] != "pending" {
		t.Errorf("%s", a)
	}
	if a := cancel(paid, "u3"); a.status != 409 || a.code() != "order_not_cancellable" {
		t.Errorf("%s", a)
	}
	eventually(t, func() error {
		if n := len(rollbacks.all()); n != 2 {
			return fmt.Errorf("%d queued", n)
		}
		return nil
	})
	for _, m := range rollbacks.all() {
		if tr := observability.Extract(m.Headers); tr.TraceID() != "0af7651916cd43dd8448eb211c80319c" {
			t.Errorf("headers: %v", m.Headers)
		}
	}
}

// What a buyer sees of a sale that is settled: receipts of what was paid, nothing of the rest.
func TestAfterTheSettlementOrdersAreReceiptsOrArchived(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	r := w.replica().ready()
	ctx := context.Background()
	sale := w.sale("sale")
	paid, cancelled := r.buy("sale", "u1", 1, "k1"), r.buy("sale", "u2", 1, "")
	id, _ := order.ParseID(paid.orderID())
	if _, err := w.stock.Confirm(ctx, []stock.Confirmation{{ID: id, To: order.Paid}}); err != nil {
		t.Fatal(err)
	}
	id, _ = order.ParseID(cancelled.orderID())
	if _, err := w.stock.Release(ctx, []stock.Release{{
		ID: id, User: "u2", SKU: "mug", Pool: "national", Quantity: 1, To: order.Cancelled, Reason: order.ReasonUserCancelled,
	}}); err != nil {
		t.Fatal(err)
	}
	if err := w.stock.End(ctx, sale, time.Now()); err != nil {
		t.Fatal(err)
	}
	status := func(a answer, user string) answer {
		return r.do(call{method: "GET", path: "/v1/orders/" + a.orderID(), token: token(user)})
	}
	if s := status(cancelled, "u2"); s.fields["status"] != "cancelled" {
		t.Errorf("ended, not settled: %s", s)
	}
	if err := w.stock.Fence(ctx, sale, 1); err != nil {
		t.Fatal(err)
	}
	if _, err := w.stock.Cleanup(ctx, sale, 1, 25*time.Hour); err != nil {
		t.Fatal(err)
	}
	if err := w.stock.SettleMarker(ctx, sale, 1, 25*time.Hour); err != nil {
		t.Fatal(err)
	}
	if s := status(paid, "u1"); s.status != 200 || s.fields["status"] != "paid" || s.fields["amount_minor"] != 1999.0 {
		t.Errorf("receipt: %s", s)
	}
	if s := status(paid, "u2"); s.status != 404 {
		t.Errorf("somebody else's receipt: %s", s)
	}
	if s := status(cancelled, "u2"); s.status != 410 || s.code() != "order_archived" {
		t.Errorf("archived: %s", s)
	}
	if c := r.do(call{method: "DELETE", path: "/v1/orders/" + paid.orderID(), token: token("u1")}); c.status != 409 {
		t.Errorf("cancel of a receipt: %s", c)
	}
	for _, key := range []string{"", "k1", "k2"} {
		if a := r.buy("sale", "u1", 1, key); a.status != 410 || a.code() != "activity_ended" {
			t.Errorf("click with key %q: %s", key, a)
		}
	}
	mine := r.do(call{method: "GET", path: "/v1/activities/sale/orders/mine", token: token("u1")})
	if list, _ := mine.fields["orders"].([]any); mine.status != 200 || len(list) != 0 {
		t.Errorf("mine: %s", mine)
	}
	eventually(t, func() error { // what is shown may be up to a second old
		if s := r.do(call{method: "GET", path: "/v1/activities/sale"}); s.status != 200 || s.fields["phase"] != "ended" {
			return fmt.Errorf("state: %s", s)
		}
		return nil
	})
}
