package messaging

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"math"
	"sort"
	"strings"
	"time"
	"unicode/utf8"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"seckill/pkg/order"
	orderv1 "seckill/proto/seckill/order/v1"
)

// MaxBody bounds the body of a message that is decoded; what is larger is undecodable. The largest
// batch of real orders is some 25 KiB.
const MaxBody = 256 << 10

// Limits of the free texts inside events, in characters: what the columns they end in can hold.
const (
	maxReason = 64
	maxActor  = 128
)

// Times outside of this window are typing errors or a clock gone mad, and would not fit everywhere
// they are stored.
var (
	earliest = time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC)
	latest   = time.Date(2200, 1, 1, 0, 0, 0, 0, time.UTC)
)

const maxPaymentTimeout = 7 * 24 * time.Hour

// DecodeError says what is wrong with the body of a message, or with one order in it. Trying again
// cannot help: the message, or the order, is dead-lettered.
type DecodeError struct {
	Key    string // routing key of the message
	Order  string // order id as it stands in the message, if it could be read
	Field  string // proto field, or "body"
	Reason string
	Err    error // what refused it, or nil
}

// Error names the event, the order, the field and the reason.
func (e *DecodeError) Error() string {
	s := "decode " + e.Key
	if e.Order != "" {
		s += fmt.Sprintf(" order %q", cut(e.Order, 80))
	}
	s += ": " + e.Field + ": " + e.Reason
	if e.Err != nil {
		s += ": " + e.Err.Error()
	}
	return s
}

// Unwrap gives the cause.
func (e *DecodeError) Unwrap() error { return e.Err }

// InvalidOrder is one order of a batch that cannot become an order, in a message of its own that is
// ready to be dead-lettered.
type InvalidOrder struct {
	OrderID string // as it stands in the message; valid only if ID is set
	ID      order.ID
	HasID   bool // the order id itself is valid, so that the order can be rejected and released
	Message Message
	Err     *DecodeError
}

// Payment is the content of order.paid.
type Payment struct {
	OrderID       order.ID
	TransactionID string
	AmountMinor   int64
	Currency      string
	ReceivedAt    time.Time
	Order         *order.Order // the order's content if the callback found a record
}

// Cancel is the content of order.cancel_requested.
type Cancel struct {
	OrderID     order.ID
	Reason      string
	Actor       string // "user:<id>" or "operator:<name>"
	RequestedAt time.Time
	Order       *order.Order // the order's content if the asker knew it
}

// Refund is the content of order.refund_requested.
type Refund struct {
	OrderID     order.ID
	Reason      string
	Actor       string // "operator:<name>"
	RequestedAt time.Time
}

// Ended is the content of activity.ended.
type Ended struct {
	Activity string
	At       time.Time
}

// OrderReserved makes the order.reserved message of 1 to MaxOrdersPerMessage orders. The id is
// derived from the orders' ids, so that publishing the same orders again gives the same id.
// Send refuses a message with more orders.
func OrderReserved(orders []order.Order) Message {
	m := orderv1.OrderReserved{Orders: allToProto(orders)}
	first := time.Time{}
	for i := range orders {
		if at := orders[i].ReservedAt; first.IsZero() || at.Before(first) {
			first = at
		}
	}
	return Message{ID: batchID(KeyOrderReserved, m.GetOrders()), Key: KeyOrderReserved, Body: marshal(&m), Orders: max(1, len(orders)), Time: first}
}

// OrderExpired makes the order.expired message of 1 to MaxOrdersPerMessage orders; see OrderReserved.
// All orders in one message should have the same payment time-out, since they share a delay queue.
func OrderExpired(orders []order.Order) Message {
	m := orderv1.OrderExpired{Orders: allToProto(orders)}
	return Message{ID: batchID(KeyOrderExpired, m.GetOrders()), Key: KeyOrderExpired, Body: marshal(&m), Orders: max(1, len(orders))}
}

// OrderPaid makes the order.paid message; its id is the transaction's.
func OrderPaid(p Payment) Message {
	m := orderv1.OrderPaid{
		OrderId: p.OrderID.String(), TransactionId: p.TransactionID, AmountMinor: p.AmountMinor, Currency: p.Currency,
		ReceivedAt: timestamppb.New(p.ReceivedAt), Order: optional(p.Order),
	}
	return Message{ID: KeyOrderPaid + ":" + p.TransactionID, Key: KeyOrderPaid, Body: marshal(&m), Orders: 1, Time: p.ReceivedAt}
}

// CancelRequested makes the order.cancel_requested message. One order, reason and actor give one id,
// however often it is asked.
func CancelRequested(c Cancel) Message {
	m := orderv1.OrderCancelRequested{
		OrderId: c.OrderID.String(), Reason: c.Reason, Actor: c.Actor, RequestedAt: timestamppb.New(c.RequestedAt), Order: optional(c.Order),
	}
	return Message{ID: KeyOrderCancelRequested + ":" + c.OrderID.String() + ":" + digest(c.Reason, c.Actor)[:16], Key: KeyOrderCancelRequested, Body: marshal(&m), Orders: 1, Time: c.RequestedAt}
}

// RefundRequested makes the order.refund_requested message; see CancelRequested for its id.
func RefundRequested(r Refund) Message {
	m := orderv1.OrderRefundRequested{OrderId: r.OrderID.String(), Reason: r.Reason, Actor: r.Actor, RequestedAt: timestamppb.New(r.RequestedAt)}
	return Message{ID: KeyOrderRefundRequested + ":" + r.OrderID.String() + ":" + digest(r.Reason, r.Actor)[:16], Key: KeyOrderRefundRequested, Body: marshal(&m), Orders: 1, Time: r.RequestedAt}
}

// ActivityEnded makes the activity.ended message.
func ActivityEnded(activity string, at time.Time) Message {
	m := orderv1.ActivityEnded{ActivityId: activity, EndedAt: timestamppb.New(at)}
	return Message{ID: fmt.Sprintf("%s:%s:%d", KeyActivityEnded, activity, at.UnixMicro()), Key: KeyActivityEnded, Body: marshal(&m), Orders: 1, Time: at}
}

// DecodeOrderReserved reads an order.reserved message. There are three outcomes:
//
//   - err != nil (always a *DecodeError): the message as a whole cannot be read, or holds no order, or
//     more than MaxOrdersPerMessage; good and bad are empty. It is dead-lettered whole ("undecodable").
//   - bad is not empty: the message can be read, but these orders in it are invalid (the first wrong
//     field is named). Each comes in a message of its own for the dead letters; the good ones go on.
//   - else all orders are good.
//
// Every field of a good order is checked: ids and names by the rules of package order, activity and
// bucket against the order id, quantity 1 to order.MaxQuantity, an amount up to order.MaxAmountMinor, the
// currency's form, both times present, in range and in order. Orders keep the order of the message;
// one id may stand in it more than once (the consumer decides what that means).
func DecodeOrderReserved(m Message) (good []order.Order, bad []InvalidOrder, err error) {
	var p orderv1.OrderReserved
	if err := unmarshal(m, KeyOrderReserved, &p); err != nil {
		return nil, nil, err
	}
	return fromBatch(m, p.GetOrders())
}

// DecodeOrderExpired reads an order.expired message; see DecodeOrderReserved for its outcomes.
func DecodeOrderExpired(m Message) (good []order.Order, bad []InvalidOrder, err error) {
	var p orderv1.OrderExpired
	if err := unmarshal(m, KeyOrderExpired, &p); err != nil {
		return nil, nil, err
	}
	return fromBatch(m, p.GetOrders())
}

// DecodeOrderPaid reads an order.paid message. An error is a *DecodeError. The order inside is
// optional; if it is there it must be valid and be the one that was paid for.
func DecodeOrderPaid(m Message) (Payment, error) {
	var p orderv1.OrderPaid
	if err := unmarshal(m, KeyOrderPaid, &p); err != nil {
		return Payment{}, err
	}
	c := checker{key: m.Key, order: p.GetOrderId()}
	out := Payment{
		OrderID: c.id(p.GetOrderId()), TransactionID: p.GetTransactionId(), AmountMinor: p.GetAmountMinor(),
		Currency: p.GetCurrency(), ReceivedAt: c.time("received_at", p.GetReceivedAt()),
	}
	c.must(order.ValidTransactionID(out.TransactionID), "transaction_id", "not 1 to 64 of A-Za-z0-9_-")
	c.must(out.AmountMinor >= 0, "amount_minor", "negative")
	c.must(out.AmountMinor <= order.MaxAmountMinor, "amount_minor", "more than an order can cost")
	c.must(order.ValidCurrency(out.Currency), "currency", "not three capital letters")
	out.Order = c.inner(p.GetOrder(), out.OrderID)
	if c.err != nil {
		return Payment{}, c.err
	}
	return out, nil
}

// DecodeCancelRequested reads an order.cancel_requested message. An error is a *DecodeError.
func DecodeCancelRequested(m Message) (Cancel, error) {
	var p orderv1.OrderCancelRequested
	if err := unmarshal(m, KeyOrderCancelRequested, &p); err != nil {
		return Cancel{}, err
	}
	c := checker{key: m.Key, order: p.GetOrderId()}
	out := Cancel{OrderID: c.id(p.GetOrderId()), Reason: c.text("reason", p.GetReason(), maxReason), Actor: c.text("actor", p.GetActor(), maxActor), RequestedAt: c.time("requested_at", p.GetRequestedAt())}
	out.Order = c.inner(p.GetOrder(), out.OrderID)
	if c.err != nil {
		return Cancel{}, c.err
	}
	return out, nil
}

// DecodeRefundRequested reads an order.refund_requested message. An error is a *DecodeError.
func DecodeRefundRequested(m Message) (Refund, error) {
	var p orderv1.OrderRefundRequested
	if err := unmarshal(m, KeyOrderRefundRequested, &p); err != nil {
		return Refund{}, err
	}
	c := checker{key: m.Key, order: p.GetOrderId()}
	out := Refund{OrderID: c.id(p.GetOrderId()), Reason: c.text("reason", p.GetReason(), maxReason), Actor: c.text("actor", p.GetActor(), maxActor), RequestedAt: c.time("requested_at", p.GetRequestedAt())}
	if c.err != nil {
		return Refund{}, c.err
	}
	return out, nil
}

// DecodeActivityEnded reads an activity.ended message. An error is a *DecodeError.
func DecodeActivityEnded(m Message) (Ended, error) {
	var p orderv1.ActivityEnded
	if err := unmarshal(m, KeyActivityEnded, &p); err != nil {
		return Ended{}, err
	}
	c := checker{key: m.Key}
	out := Ended{Activity: p.GetActivityId(), At: c.time("ended_at", p.GetEndedAt())}
	c.must(order.ValidActivityID(out.Activity), "activity_id", "not 1 to 32 of A-Za-z0-9_-")
	if c.err != nil {
		return Ended{}, c.err
	}
	return out, nil
}

// Split makes one message per order out of an order.reserved or order.expired message, good and
// invalid orders alike, with the attempt, headers and time of m. A message that carries one order, or
// an event that always does, is given back as it is, with its id. An error is a *DecodeError.
func Split(m Message) ([]Message, error) {
	var raw []*orderv1.Order
	switch m.Key {
	case KeyOrderReserved:
		var p orderv1.OrderReserved
		if err := unmarshal(m, m.Key, &p); err != nil {
			return nil, err
		}
		raw = p.GetOrders()
	case KeyOrderExpired:
		var p orderv1.OrderExpired
		if err := unmarshal(m, m.Key, &p); err != nil {
			return nil, err
		}
		raw = p.GetOrders()
	default:
		m.Orders = 1
		return []Message{m}, nil
	}
	if len(raw) == 0 {
		return nil, &DecodeError{Key: m.Key, Field: "orders", Reason: "no order in it"}
	}
	if len(raw) == 1 {
		m.Orders = 1
		return []Message{m}, nil
	}
	out := make([]Message, len(raw))
	for i, o := range raw {
		out[i] = single(m, o)
	}
	return out, nil
}

// single wraps one order of m in a message of its own.
func single(m Message, o *orderv1.Order) Message {
	s := Message{Key: m.Key, Orders: 1, Attempt: m.Attempt, Headers: m.Headers, Time: m.Time}
	if m.Key == KeyOrderExpired {
		s.Body = marshal(&orderv1.OrderExpired{Orders: []*orderv1.Order{o}})
	} else {
		s.Body = marshal(&orderv1.OrderReserved{Orders: []*orderv1.Order{o}})
	}
	if _, err := order.ParseID(o.GetOrderId()); err == nil {
		s.ID = m.Key + ":" + o.GetOrderId()
	} else {
		s.ID = m.Key + ":invalid:" + digest(string(s.Body))[:32]
	}
	return s
}

func fromBatch(m Message, raw []*orderv1.Order) (good []order.Order, bad []InvalidOrder, err error) {
	switch {
	case len(raw) == 0:
		return nil, nil, &DecodeError{Key: m.Key, Field: "orders", Reason: "no order in it"}
	case len(raw) > MaxOrdersPerMessage:
		return nil, nil, &DecodeError{Key: m.Key, Field: "orders", Reason: fmt.Sprintf("%d orders, more than %d", len(raw), MaxOrdersPerMessage)}
	}
	good = make([]order.Order, 0, len(raw))
	for _, p := range raw {
		c := checker{key: m.Key, order: p.GetOrderId()}
		o := c.content(p)
		if c.err == nil {
			good = append(good, o)
			continue
		}
		inv := InvalidOrder{OrderID: cut(p.GetOrderId(), 80), Message: single(m, p), Err: c.err}
		if id, err := order.ParseID(p.GetOrderId()); err == nil {
			inv.ID, inv.HasID = id, true
		}
		bad = append(bad, inv)
	}
	return good, bad, nil
}

func toProto(o *order.Order) *orderv1.Order { return allToProto([]order.Order{*o})[0] }

// allToProto makes the orders of one message in one piece: they live and die together.
func allToProto(orders []order.Order) []*orderv1.Order {
	type whole struct {
		order         orderv1.Order
		reserved, pay timestamppb.Timestamp
	}
	room := make([]whole, len(orders))
	out := make([]*orderv1.Order, len(orders))
	for i := range orders {
		o, w := &orders[i], &room[i]
		p := &w.order
		p.OrderId, p.UserId, p.ActivityId = o.ID.String(), o.User, o.ID.Activity
		p.Bucket = uint32(max(0, o.ID.Bucket)) //nolint:gosec // bounded, and what is out of range is refused by the decoder
		p.SkuId, p.Region, p.Pool = o.SKU, o.Region, o.Pool
		p.Quantity = uint32(min(max(0, o.Quantity), math.MaxUint32)) //nolint:gosec // likewise
		p.UnitPriceMinor, p.Currency = o.UnitPriceMinor, o.Currency
		p.ReservedAt, p.PayBefore = stamp(&w.reserved, o.ReservedAt), stamp(&w.pay, o.PayBefore)
		p.PaymentTimeoutSeconds = uint32(min(max(0, (o.PaymentTimeout+time.Second-1)/time.Second), math.MaxUint32)) //nolint:gosec // likewise
		p.Epoch, p.IdempotencyKey, p.IdempotencyDigest = o.Epoch, o.IdemKey, o.IdemDigest
		out[i] = p
	}
	return out
}

// stamp is timestamppb.New into a place that is there already.
func stamp(into *timestamppb.Timestamp, t time.Time) *timestamppb.Timestamp {
	into.Seconds, into.Nanos = t.Unix(), int32(t.Nanosecond()) //nolint:gosec // below 1e9
	return into
}

func optional(o *order.Order) *orderv1.Order {
	if o == nil {
		return nil
	}
	return toProto(o)
}

// checker keeps the first thing that is wrong.
type checker struct {
	key, order string
	err        *DecodeError
}

func (c *checker) fail(field, reason string, err error) {
	if c.err == nil {
		c.err = &DecodeError{Key: c.key, Order: c.order, Field: field, Reason: reason, Err: err}
	}
}

func (c *checker) must(ok bool, field, reason string) {
	if !ok {
		c.fail(field, reason, nil)
	}
}

func (c *checker) id(s string) order.ID {
	id, err := order.ParseID(s)
	if err != nil {
		// The parser's text quotes the id again; the reason says enough.
		c.fail("order_id", "not an order id", order.ErrInvalidID)
	}
	return id
}

func (c *checker) time(field string, ts *timestamppb.Timestamp) time.Time {
	if ts == nil {
		c.fail(field, "missing", nil)
		return time.Time{}
	}
	if err := ts.CheckValid(); err != nil {
		c.fail(field, "not a time", nil)
		return time.Time{}
	}
	t := ts.AsTime()
	c.must(!t.Before(earliest) && t.Before(latest), field, "not between the years 2000 and 2200")
	return t
}

func (c *checker) text(field, s string, limit int) string {
	c.must(s != "", field, "missing")
	c.must(utf8.RuneCountInString(s) <= limit, field, fmt.Sprintf("longer than %d characters", limit))
	for _, r := range s {
		if r < 0x20 || r == 0x7f || r == utf8.RuneError {
			c.fail(field, "control or broken characters in it", nil)
			break
		}
	}
	return s
}

func (c *checker) content(p *orderv1.Order) order.Order {
	if p == nil {
		c.fail("orders", "empty order", nil)
		return order.Order{}
	}
	o := order.Order{
		ID: c.id(p.GetOrderId()), User: p.GetUserId(), SKU: p.GetSkuId(), Region: p.GetRegion(), Pool: p.GetPool(),
		UnitPriceMinor: p.GetUnitPriceMinor(), Currency: p.GetCurrency(),
		ReservedAt: c.time("reserved_at", p.GetReservedAt()), PayBefore: c.time("pay_before", p.GetPayBefore()),
		PaymentTimeout: time.Duration(p.GetPaymentTimeoutSeconds()) * time.Second,
		Epoch:          p.GetEpoch(), IdemKey: p.GetIdempotencyKey(), IdemDigest: p.GetIdempotencyDigest(),
	}
	c.must(order.ValidUserID(o.User), "user_id", "not 1 to 64 of A-Za-z0-9_-")
	c.must(p.GetActivityId() == o.ID.Activity, "activity_id", "not the one in the order id")
	c.must(int64(p.GetBucket()) == int64(o.ID.Bucket), "bucket", "not the one in the order id")
	c.must(order.ValidSKUID(o.SKU), "sku_id", "not 1 to 32 of A-Za-z0-9_-")
	c.must(order.ValidPool(o.Region), "region", "not 1 to 32 of a-z0-9_-")
	c.must(order.ValidPool(o.Pool), "pool", "not 1 to 32 of a-z0-9_-")
	if q := p.GetQuantity(); q >= 1 && q <= order.MaxQuantity {
		o.Quantity = int(q)
		if _, err := o.AmountMinor(); err != nil {
			c.fail("unit_price_minor", "amount out of range", err)
		}
	} else {
		c.fail("quantity", fmt.Sprintf("%d is not between 1 and %d", q, order.MaxQuantity), nil)
	}
	c.must(order.ValidCurrency(o.Currency), "currency", "not three capital letters")
	c.must(!o.PayBefore.Before(o.ReservedAt), "pay_before", "before reserved_at")
	c.must(o.PaymentTimeout >= time.Second && o.PaymentTimeout <= maxPaymentTimeout, "payment_timeout_seconds", "not between 1 second and 7 days")
	c.must(o.Epoch <= math.MaxInt64, "epoch", "out of range")
	c.must(o.IdemKey == "" || order.ValidIdempotencyKey(o.IdemKey), "idempotency_key", "not 1 to 64 of A-Za-z0-9_-")
	c.must(validDigest(o.IdemDigest), "idempotency_digest", "not at most 64 lower-case hex digits")
	return o
}

func (c *checker) inner(p *orderv1.Order, id order.ID) *order.Order {
	if p == nil {
		return nil
	}
	o := c.content(p)
	c.must(o.ID == id, "order", "not the order that order_id names")
	return &o
}

func validDigest(s string) bool {
	if len(s) > 64 {
		return false
	}
	for i := 0; i < len(s); i++ {
		if c := s[i]; (c < '0' || c > '9') && (c < 'a' || c > 'f') {
			return false
		}
	}
	return true
}

func marshal(m proto.Message) []byte {
	b, err := proto.MarshalOptions{Deterministic: true}.Marshal(m)
	if err != nil {
		// The only cause is text that is not UTF-8. An order with such text is made nowhere (all names
		// are ASCII by rule); what would be lost silently is made undecodable instead.
		return protowire.AppendTag(nil, 1, protowire.EndGroupType)
	}
	return b
}

func unmarshal(m Message, key string, into proto.Message) error {
	if m.Key != key {
		return &DecodeError{Key: key, Field: "routing key", Reason: fmt.Sprintf("message is a %q", cut(m.Key, 80))}
	}
	if len(m.Body) == 0 {
		return &DecodeError{Key: key, Field: "body", Reason: "empty"}
	}
	if len(m.Body) > MaxBody {
		return &DecodeError{Key: key, Field: "body", Reason: fmt.Sprintf("%d bytes, more than %d", len(m.Body), MaxBody)}
	}
	if err := proto.Unmarshal(m.Body, into); err != nil {
		return &DecodeError{Key: key, Field: "body", Reason: "not protobuf of this event", Err: errors.New(cut(err.Error(), 200))}
	}
	return nil
}

// batchID names a set of orders: the order's own id for one, a digest over the sorted ids for more.
func batchID(key string, orders []*orderv1.Order) string {
	if len(orders) == 1 {
		return key + ":" + orders[0].GetOrderId()
	}
	ids := make([]string, len(orders))
	for i, o := range orders {
		ids[i] = o.GetOrderId()
	}
	sort.Strings(ids)
	return key + ":" + digest(ids...)[:32]
}

// digest is the hex SHA-256 over the parts, each ended by a zero byte.
func digest(parts ...string) string {
	h := sha256.New()
	for _, p := range parts {
		h.Write([]byte(p))
		h.Write([]byte{0})
	}
	return hex.EncodeToString(h.Sum(nil))
}

// cut shortens s to at most n bytes of valid UTF-8.
func cut(s string, n int) string {
	if len(s) > n {
		s = s[:n]
	}
	return strings.ToValidUTF8(s, "?")
}
