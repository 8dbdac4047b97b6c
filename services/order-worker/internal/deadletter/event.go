package deadletter

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"seckill/pkg/adminapi"
	"seckill/pkg/messaging"
	"seckill/pkg/order"
	orderv1 "seckill/proto/seckill/order/v1"
	"seckill/services/order-worker/internal/store"
)

// event is what a letter's message says.
type event struct {
	key      string
	err      error              // it cannot be read, or is invalid
	id       order.ID           // if known
	known    bool               // id is set
	activity string             // if known
	content  *order.Order       // of order.reserved and order.expired, if valid
	payment  *messaging.Payment // of order.paid, if valid
}

func (e *event) orderID() string {
	if !e.known {
		return ""
	}
	return e.id.String()
}

// reservation says whether the message carries an order on its way into MySQL, valid or not.
func (e *event) reservation() bool { return e.key == messaging.KeyOrderReserved && e.known }

func (e *event) of(id order.ID) { e.id, e.known, e.activity = id, true, id.Activity }

var (
	errUnknownKey = errors.New("no event has this routing key")
	errCut        = fmt.Errorf("the body was larger than %d bytes and is not kept whole: it cannot be sent again", maxLetterBody)
)

// decode reads a message that carries a single order. It never fails: what cannot be read is said in
// err, and an order id that can be read all the same is kept.
func decode(m messaging.Message) event {
	e := event{key: m.Key}
	switch m.Key {
	case messaging.KeyOrderReserved, messaging.KeyOrderExpired:
		read := messaging.DecodeOrderReserved
		if m.Key == messaging.KeyOrderExpired {
			read = messaging.DecodeOrderExpired
		}
		good, bad, err := read(m)
		switch {
		case err != nil:
			e.err = err
		case len(bad) > 0:
			e.err = bad[0].Err
			if bad[0].HasID {
				e.of(bad[0].ID)
			}
		default:
			e.of(good[0].ID)
			e.content = &good[0]
		}
	case messaging.KeyOrderPaid:
		p, err := messaging.DecodeOrderPaid(m)
		if e.err = err; err == nil {
			e.of(p.OrderID)
			e.payment = &p
		}
	case messaging.KeyOrderCancelRequested:
		c, err := messaging.DecodeCancelRequested(m)
		if e.err = err; err == nil {
			e.of(c.OrderID)
		}
	case messaging.KeyOrderRefundRequested:
		r, err := messaging.DecodeRefundRequested(m)
		if e.err = err; err == nil {
			e.of(r.OrderID)
		}
	case messaging.KeyActivityEnded:
		a, err := messaging.DecodeActivityEnded(m)
		if e.err = err; err == nil {
			e.activity = a.Activity
		}
	default:
		e.err = errUnknownKey
	}
	var de *messaging.DecodeError
	if !e.known && errors.As(e.err, &de) {
		if id, err := order.ParseID(de.Order); err == nil {
			e.of(id)
		}
	}
	return e
}

// asJSON gives the event for people, or nil.
func asJSON(m messaging.Message) json.RawMessage {
	var p proto.Message
	switch m.Key {
	case messaging.KeyOrderReserved:
		p = &orderv1.OrderReserved{}
	case messaging.KeyOrderExpired:
		p = &orderv1.OrderExpired{}
	case messaging.KeyOrderPaid:
		p = &orderv1.OrderPaid{}
	case messaging.KeyOrderCancelRequested:
		p = &orderv1.OrderCancelRequested{}
	case messaging.KeyOrderRefundRequested:
		p = &orderv1.OrderRefundRequested{}
	case messaging.KeyActivityEnded:
		p = &orderv1.ActivityEnded{}
	default:
		return nil
	}
	if proto.Unmarshal(m.Body, p) != nil {
		return nil
	}
	raw, err := protojson.MarshalOptions{UseProtoNames: true}.Marshal(p)
	if err != nil {
		return nil
	}
	return raw
}

// message gives the letter's message as it would be published again: attempt 0, the broker's and
// our own dead-letter headers gone.
func message(l *store.DeadLetter) messaging.Message {
	m := messaging.Message{ID: l.MessageID, Key: l.RoutingKey, Body: l.Body, Orders: 1, Time: l.CreatedAt}
	if json.Unmarshal([]byte(l.Headers), &m.Headers) != nil {
		m.Headers = nil
	}
	return m
}

// Verdicts; the names are those of the API.
const (
	willApply   = adminapi.WillApply
	alreadyDone = adminapi.AlreadyDone
	inConflict  = adminapi.InConflict
	undecodable = adminapi.Undecodable
)

// verdict is what a replay of a letter would come to.
type verdict struct {
	is     string
	detail string
	event  event
	row    *store.Order // the order's row, if there is one
}

// judge looks at the rows that letters are about: one statement per kind, however many letters.
func (s *Service) judge(ctx context.Context, letters []*store.DeadLetter) ([]verdict, error) {
	out := make([]verdict, len(letters))
	var orderIDs, transactions, activities []string
	for i, l := range letters {
		out[i].event = decode(message(l))
		ev := &out[i].event
		if cutBody(l) {
			ev.err = errCut
		}
		if ev.known {
			orderIDs = append(orderIDs, ev.orderID())
		}
		if ev.payment != nil {
			transactions = append(transactions, ev.payment.TransactionID)
		}
		if ev.key == messaging.KeyActivityEnded && ev.activity != "" {
			activities = append(activities, ev.activity)
		}
	}
	orders, err := store.Orders(ctx, s.st.SQL(), orderIDs, false)
	if err != nil {
		return nil, err
	}
	payments, err := store.Payments(ctx, s.st.SQL(), transactions)
	if err != nil {
		return nil, err
	}
	states := map[string]string{}
	if len(activities) > 0 {
		var rows []store.Activity
		if err := s.st.DB(ctx).Select("id", "state").Where("id IN ?", activities).Find(&rows).Error; err != nil {
			return nil, fmt.Errorf("read activities: %w", err)
		}
		for _, a := range rows {
			states[a.ID] = a.State
		}
	}
	for i := range out {
		v := &out[i]
		v.row = orders[v.event.orderID()]
		var booked *store.Payment
		if p := v.event.payment; p != nil {
			booked = payments[p.TransactionID]
		}
		v.is, v.detail = v.decide(booked, states)
	}
	return out, nil
}

func (v *verdict) decide(paid *store.Payment, states map[string]string) (is, detail string) {
	ev, row := &v.event, v.row
	if ev.err != nil {
		if ev.reservation() && row != nil {
			return alreadyDone, "the order is " + string(row.Status)
		}
		return undecodable, ev.err.Error()
	}
	is, detail = willApply, "the order has no row yet"
	if row != nil {
		detail = "the order is " + string(row.Status)
	}
	switch ev.key {
	case messaging.KeyOrderReserved:
		if row != nil && row.SameContent(*ev.content) {
			is = alreadyDone
		} else if row != nil {
			is, detail = inConflict, "the order is stored with other content"
		}
	case messaging.KeyOrderExpired:
		if row != nil && row.Status != order.Pending {
			is = alreadyDone
		}
	case messaging.KeyOrderCancelRequested:
		if row != nil && row.Status == order.Paid {
			is = inConflict
		} else if row != nil && row.Status.Final() {
			is = alreadyDone
		}
	case messaging.KeyOrderRefundRequested:
		switch {
		case row != nil && row.Status == order.Refunded:
			is = alreadyDone
		case row == nil || row.Status != order.Paid:
			is = inConflict
		}
	case messaging.KeyOrderPaid:
		switch {
		case paid == nil:
		case paid.OrderID != ev.orderID():
			is, detail = inConflict, "the transaction is booked for another order"
		case paid.AmountMinor != ev.payment.AmountMinor || paid.Currency != ev.payment.Currency:
			is, detail = inConflict, fmt.Sprintf("the transaction is booked with %d %s", paid.AmountMinor, paid.Currency)
		default:
			is, detail = alreadyDone, "the payment is "+paid.Status
		}
	case messaging.KeyActivityEnded:
		switch state := states[ev.activity]; state {
		case "":
			is, detail = inConflict, "the activity is not known"
		case store.ActivitySettled, store.ActivityClosed:
			is, detail = alreadyDone, "the activity is "+state
		default:
			detail = "the activity is " + state
		}
	}
	return is, detail
}
