package app

import (
	"context"
	"encoding/base64"
	"fmt"
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
