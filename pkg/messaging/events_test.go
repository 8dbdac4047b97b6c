package messaging

import (
	"errors"
	"math"
	"reflect"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"seckill/pkg/order"
	orderv1 "seckill/proto/seckill/order/v1"
)

func TestEventsComeBackAsTheyWere(t *testing.T) {
	t.Parallel()
	orders := []orderT{anOrder(2), anOrder(1)}
	orders[1].IdemKey, orders[1].IdemDigest = "", ""
	for name, f := range map[string]func() (any, any, error){
		"reserved": func() (any, any, error) {
			good, bad, err := DecodeOrderReserved(OrderReserved(orders))
			return good, orders, errors.Join(err, none(bad))
		},
		"expired": func() (any, any, error) {
			good, bad, err := DecodeOrderExpired(OrderExpired(orders))
			return good, orders, errors.Join(err, none(bad))
		},
		"paid the most": func() (any, any, error) {
			p := Payment{OrderID: anOrder(1).ID, TransactionID: "t-1", AmountMinor: order.MaxAmountMinor, Currency: "CNY", ReceivedAt: at(5)}
			got, err := DecodeOrderPaid(OrderPaid(p))
			return got, p, err
		},
		"paid": func() (any, any, error) {
			o := anOrder(1)
			p := Payment{OrderID: o.ID, TransactionID: "t-1", AmountMinor: 19800, Currency: "CNY", ReceivedAt: at(5), Order: &o}
			got, err := DecodeOrderPaid(OrderPaid(p))
			return got, p, err
		},
		"cancel": func() (any, any, error) {
			c := Cancel{OrderID: anOrder(1).ID, Reason: order.ReasonUserCancelled, Actor: "user:u1", RequestedAt: at(5)}
			got, err := DecodeCancelRequested(CancelRequested(c))
			return got, c, err
		},
		"refund": func() (any, any, error) {
			r := Refund{OrderID: anOrder(1).ID, Reason: "broken goods", Actor: "operator:ann", RequestedAt: at(5)}
			got, err := DecodeRefundRequested(RefundRequested(r))
			return got, r, err
		},
		"ended": func() (any, any, error) {
			got, err := DecodeActivityEnded(ActivityEnded("sale-1", at(5)))
			return got, Ended{Activity: "sale-1", At: at(5)}, err
		},
	} {
		got, want, err := f()
		if err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if !reflect.DeepEqual(got, want) {
			t.Errorf("%s: got %+v, want %+v", name, got, want)
		}
	}
}

func none(bad []InvalidOrder) error {
	for _, b := range bad {
		return b.Err
	}
	return nil
}

// The same event always has the same id, whatever the order of its orders and the time of asking.
func TestMessageIDsAreDerivedFromTheContent(t *testing.T) {
	t.Parallel()
	a, b, c := anOrder(1), anOrder(2), anOrder(3)
	if id := OrderReserved([]orderT{a}).ID; id != "order.reserved:"+a.ID.String() {
		t.Errorf("single: %s", id)
	}
	ab, ba, ac := OrderReserved([]orderT{a, b}).ID, OrderReserved([]orderT{b, a}).ID, OrderReserved([]orderT{a, c}).ID
	if ab != ba || ab == ac || len(ab) != len("order.reserved:")+32 {
		t.Errorf("batches: %s %s %s", ab, ba, ac)
	}
	if OrderExpired([]orderT{a, b}).ID == ab {
		t.Error("two events share an id")
	}
	x := CancelRequested(Cancel{OrderID: a.ID, Reason: "r", Actor: "user:1", RequestedAt: at(1)}).ID
	y := CancelRequested(Cancel{OrderID: a.ID, Reason: "r", Actor: "user:1", RequestedAt: at(2)}).ID
	z := CancelRequested(Cancel{OrderID: a.ID, Reason: "r", Actor: "operator:1", RequestedAt: at(1)}).ID
	if x != y || x == z {
		t.Errorf("cancels: %s %s %s", x, y, z)
	}
	if m := OrderReserved([]orderT{a, b}); m.Orders != 2 || !m.Time.Equal(a.ReservedAt) {
		t.Errorf("message %+v", m)
	}
}

// O03, O07, O17: what is wrong in one order is named, and costs that order only.
func TestInvalidOrdersAreToldApartFromGoodOnes(t *testing.T) {
	t.Parallel()
	for field, spoil := range map[string]func(*orderv1.Order){
		"order_id":                func(o *orderv1.Order) { o.OrderId = "123" },
		"user_id":                 func(o *orderv1.Order) { o.UserId = "" },
		"activity_id":             func(o *orderv1.Order) { o.ActivityId = "other" },
		"bucket":                  func(o *orderv1.Order) { o.Bucket = 4 },
		"sku_id":                  func(o *orderv1.Order) { o.SkuId = strings.Repeat("x", 33) },
		"region":                  func(o *orderv1.Order) { o.Region = "Beijing" },
		"pool":                    func(o *orderv1.Order) { o.Pool = "" },
		"quantity":                func(o *orderv1.Order) { o.Quantity = 0 },
		"unit_price_minor":        func(o *orderv1.Order) { o.UnitPriceMinor, o.Quantity = math.MaxInt64, 2 },
		"currency":                func(o *orderv1.Order) { o.Currency = "cny" },
		"reserved_at":             func(o *orderv1.Order) { o.ReservedAt = nil },
		"pay_before":              func(o *orderv1.Order) { o.PayBefore = timestamppb.New(o.GetReservedAt().AsTime().Add(-time.Second)) },
		"payment_timeout_seconds": func(o *orderv1.Order) { o.PaymentTimeoutSeconds = 0 },
		"epoch":                   func(o *orderv1.Order) { o.Epoch = math.MaxUint64 },
		"idempotency_key":         func(o *orderv1.Order) { o.IdempotencyKey = "a b" },
		"idempotency_digest":      func(o *orderv1.Order) { o.IdempotencyDigest = "XYZ" },
	} {
		good, spoilt := toProto(ptr(anOrder(1))), toProto(ptr(anOrder(2)))
		spoil(spoilt)
		m := Message{ID: "batch", Key: KeyOrderReserved, Body: marshal(&orderv1.OrderReserved{Orders: []*orderv1.Order{spoilt, good}}), Attempt: 2, Headers: map[string]string{"traceparent": "t"}}
		got, bad, err := DecodeOrderReserved(m)
		if err != nil || len(got) != 1 || got[0].ID != anOrder(1).ID || len(bad) != 1 {
			t.Errorf("%s: %v %v %v", field, got, bad, err)
			continue
		}
		b := bad[0]
		if b.Err.Field != field || b.Err.Order != spoilt.GetOrderId() || b.Err.Key != KeyOrderReserved || b.Err.Error() == "" {
			t.Errorf("%s: named %q of %q: %v", field, b.Err.Field, b.Err.Order, b.Err)
		}
		if b.HasID == (field == "order_id") || b.OrderID != spoilt.GetOrderId() || b.Message.ID == "" || b.Message.Orders != 1 || b.Message.Attempt != 2 || b.Message.Headers["traceparent"] != "t" {
			t.Errorf("%s: %+v", field, b)
		}
		// The message of its own still says the same.
		if _, again, err := DecodeOrderReserved(b.Message); err != nil || len(again) != 1 || again[0].Err.Field != field || again[0].Message.ID != b.Message.ID {
			t.Errorf("%s: again %v %v", field, again, err)
		}
	}
	for name, change := range map[string]func(*orderv1.Order){
		"amount too large":    func(o *orderv1.Order) { o.UnitPriceMinor, o.Quantity = order.MaxAmountMinor/2+1, 2 },
		"lower-case order id": func(o *orderv1.Order) { o.OrderId = strings.ToLower(o.GetOrderId()) },
		"quantity too large":  func(o *orderv1.Order) { o.Quantity = order.MaxQuantity + 1 },
		"quantity wraps":      func(o *orderv1.Order) { o.Quantity = math.MaxUint32 },
		"year 1":              func(o *orderv1.Order) { o.ReservedAt = timestamppb.New(time.Time{}) },
		"year 9999":           func(o *orderv1.Order) { o.PayBefore = &timestamppb.Timestamp{Seconds: 253402300799} },
		"negative nanos":      func(o *orderv1.Order) { o.ReservedAt.Nanos = -1 },
		"negative price":      func(o *orderv1.Order) { o.UnitPriceMinor = -1 },
	} {
		o := toProto(ptr(anOrder(1)))
		change(o)
		if good, bad, err := DecodeOrderReserved(Message{Key: KeyOrderReserved, Body: marshal(&orderv1.OrderReserved{Orders: []*orderv1.Order{o}})}); err != nil || len(good) != 0 || len(bad) != 1 {
			t.Errorf("%s: %v %v %v", name, good, bad, err)
		}
	}
}

func ptr[T any](v T) *T { return &v }

// O17: a message that cannot be read says why, and never panics.
func TestUndecodableMessagesSayWhy(t *testing.T) {
	t.Parallel()
	many := make([]orderT, MaxOrdersPerMessage+1)
	for i := range many {
		many[i] = anOrder(i)
	}
	for name, m := range map[string]Message{
		"empty":          {Key: KeyOrderReserved},
		"text":           {Key: KeyOrderReserved, Body: []byte(`{"order_id":"1"}`)},
		"other event":    OrderExpired([]orderT{anOrder(1)}),
		"no orders":      {Key: KeyOrderReserved, Body: []byte{0x12, 0x00}}, // an unknown field only
		"too many":       OrderReserved(many),
		"huge":           {Key: KeyOrderReserved, Body: make([]byte, 2<<20)},
		"broken text":    {Key: KeyOrderReserved, Body: []byte{0x0a, 0x04, 0x0a, 0x02, 0xff, 0xfe}},
		"nothing at all": {},
	} {
		good, bad, err := DecodeOrderReserved(m)
		var d *DecodeError
		if !errors.As(err, &d) || d.Reason == "" || d.Field == "" || len(good)+len(bad) > 0 {
			t.Errorf("%s: %v %v %v", name, good, bad, err)
		}
	}
	for name, err := range map[string]error{
		"paid without transaction": second(DecodeOrderPaid(OrderPaid(Payment{OrderID: anOrder(1).ID, Currency: "CNY", ReceivedAt: at(0)}))),
		"paid with a negative":     second(DecodeOrderPaid(OrderPaid(Payment{OrderID: anOrder(1).ID, TransactionID: "t", AmountMinor: -1, Currency: "CNY", ReceivedAt: at(0)}))),
		"paid with too much":       second(DecodeOrderPaid(OrderPaid(Payment{OrderID: anOrder(1).ID, TransactionID: "t", AmountMinor: order.MaxAmountMinor + 1, Currency: "CNY", ReceivedAt: at(0)}))),
		"paid for another order":   second(DecodeOrderPaid(OrderPaid(Payment{OrderID: anOrder(1).ID, TransactionID: "t", Currency: "CNY", ReceivedAt: at(0), Order: ptr(anOrder(2))}))),
		"cancel without actor":     second(DecodeCancelRequested(CancelRequested(Cancel{OrderID: anOrder(1).ID, Reason: "r", RequestedAt: at(0)}))),
		"cancel with a bell":       second(DecodeCancelRequested(CancelRequested(Cancel{OrderID: anOrder(1).ID, Reason: "r\a", Actor: "user:1", RequestedAt: at(0)}))),
		"refund of nothing":        second(DecodeRefundRequested(RefundRequested(Refund{Reason: "r", Actor: "a", RequestedAt: at(0)}))),
		"refund without a time":    second(DecodeRefundRequested(Message{Key: KeyOrderRefundRequested, Body: marshal(&orderv1.OrderRefundRequested{OrderId: anOrder(1).ID.String(), Reason: "r", Actor: "a"})})),
		"end of no activity":       second(DecodeActivityEnded(ActivityEnded("no/such", at(0)))),
		"text that is not UTF-8":   second(DecodeCancelRequested(CancelRequested(Cancel{OrderID: anOrder(1).ID, Reason: "\xff", Actor: "user:1", RequestedAt: at(0)}))),
	} {
		var d *DecodeError
		if !errors.As(err, &d) {
			t.Errorf("%s: %v", name, err)
		}
	}
	// What an operator reads is short and valid text, whatever was sent.
	_, bad, _ := DecodeOrderReserved(Message{Key: KeyOrderReserved, Body: marshal(&orderv1.OrderReserved{Orders: []*orderv1.Order{{OrderId: strings.Repeat("é", 5000)}}})})
	if len(bad) != 1 || len(bad[0].OrderID) > 80 || len(bad[0].Err.Error()) > 400 {
		t.Errorf("%v", bad)
	}
}

func second[T any](_ T, err error) error { return err }

func TestSplitGivesOneMessagePerOrder(t *testing.T) {
	t.Parallel()
	m := OrderReserved([]orderT{anOrder(1), anOrder(2), anOrder(3)})
	m.Attempt, m.Headers = 4, map[string]string{"traceparent": "t"}
	parts, err := Split(m)
	if err != nil || len(parts) != 3 {
		t.Fatal(parts, err)
	}
	for i, p := range parts {
		want := reserved1(i + 1)
		if p.ID != want.ID || string(p.Body) != string(want.Body) || p.Attempt != 4 || p.Orders != 1 || p.Headers["traceparent"] != "t" {
			t.Errorf("part %d: %+v", i, p)
		}
	}
	single := Message{ID: "odd id", Key: KeyOrderReserved, Body: reserved1(1).Body}
	if parts, err := Split(single); err != nil || len(parts) != 1 || parts[0].ID != "odd id" {
		t.Errorf("single: %v %v", parts, err)
	}
	if parts, err := Split(ActivityEnded("a", at(0))); err != nil || len(parts) != 1 {
		t.Errorf("ended: %v %v", parts, err)
	}
	if _, err := Split(Message{Key: KeyOrderReserved, Body: []byte("x")}); err == nil {
		t.Error("undecodable message was split")
	}
}

// Decoding never panics, gives back everything it was given in one of its three outcomes, and what it
// calls good encodes and decodes to itself.
func FuzzDecode(f *testing.F) {
	keys := []string{KeyOrderReserved, KeyOrderExpired, KeyOrderPaid, KeyOrderCancelRequested, KeyOrderRefundRequested, KeyActivityEnded}
	o := anOrder(1)
	f.Add(uint8(0), OrderReserved([]orderT{o, anOrder(2)}).Body)
	f.Add(uint8(1), OrderExpired([]orderT{o}).Body)
	f.Add(uint8(2), OrderPaid(Payment{OrderID: o.ID, TransactionID: "t", Currency: "CNY", ReceivedAt: at(0), Order: &o}).Body)
	f.Add(uint8(3), CancelRequested(Cancel{OrderID: o.ID, Reason: "r", Actor: "user:1", RequestedAt: at(0), Order: &o}).Body)
	f.Add(uint8(4), RefundRequested(Refund{OrderID: o.ID, Reason: "r", Actor: "a", RequestedAt: at(0)}).Body)
	f.Add(uint8(5), ActivityEnded("a", at(0)).Body)
	f.Add(uint8(0), []byte{0x0a, 0x00})
	f.Fuzz(func(t *testing.T, kind uint8, body []byte) {
		m := Message{ID: "x", Key: keys[int(kind)%len(keys)], Body: body}
		var again Message
		var want, got any
		var err, err2 error
		switch m.Key {
		case KeyOrderReserved, KeyOrderExpired:
			decode, encode := DecodeOrderReserved, OrderReserved
			var n int
			var p orderv1.OrderReserved // both have the same shape
			if m.Key == KeyOrderExpired {
				decode, encode = DecodeOrderExpired, OrderExpired
			}
			good, bad, err := decode(m)
			if err != nil {
				return
			}
			if err := proto.Unmarshal(body, &p); err != nil {
				t.Fatal(err)
			}
			n = len(p.GetOrders())
			if len(good)+len(bad) != n {
				t.Fatalf("%d good, %d bad of %d", len(good), len(bad), n)
			}
			parts, err := Split(m)
			if err != nil || len(parts) != n {
				t.Fatalf("split into %d of %d: %v", len(parts), n, err)
			}
			for _, b := range bad {
				if b.Err == nil || b.Message.check() != nil {
					t.Fatalf("%+v", b)
				}
			}
			if len(good) == 0 {
				return
			}
			back, bad2, err := decode(encode(good))
			if err != nil || len(bad2) > 0 || !reflect.DeepEqual(good, back) {
				t.Fatalf("%v %v %v", back, bad2, err)
			}
			return
		case KeyOrderPaid:
			v, e := DecodeOrderPaid(m)
			want, err, again = v, e, OrderPaid(v)
			got, err2 = DecodeOrderPaid(again)
		case KeyOrderCancelRequested:
			v, e := DecodeCancelRequested(m)
			want, err, again = v, e, CancelRequested(v)
			got, err2 = DecodeCancelRequested(again)
		case KeyOrderRefundRequested:
			v, e := DecodeRefundRequested(m)
			want, err, again = v, e, RefundRequested(v)
			got, err2 = DecodeRefundRequested(again)
		case KeyActivityEnded:
			v, e := DecodeActivityEnded(m)
			want, err, again = v, e, ActivityEnded(v.Activity, v.At)
			got, err2 = DecodeActivityEnded(again)
		}
		if err != nil {
			var d *DecodeError
			if !errors.As(err, &d) {
				t.Fatal(err)
			}
			return
		}
		if err2 != nil || !reflect.DeepEqual(want, got) || again.check() != nil {
			t.Fatalf("%+v comes back as %+v: %v", want, got, err2)
		}
	})
}
