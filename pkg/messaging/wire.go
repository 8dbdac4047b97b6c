package messaging

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
)

// Our own headers. They are not part of Message.Headers.
const (
	headerAttempt = "seckill-attempt"
	headerOrders  = "seckill-orders"
	headerTime    = "seckill-time-us" // the timestamp property holds whole seconds only
	headerClass   = "seckill-dead-class"
	headerError   = "seckill-dead-error"
	headerQueue   = "seckill-dead-queue"
	headerKey     = "seckill-dead-key"
)

const maxErrorText = 1024

// maxHeaders bounds the text headers of a message that is published: with its properties and our own
// headers they have to fit into one frame, and the broker closes the connection over one that does not.
const maxHeaders = 64 << 10

// reserved says whether a header is ours or the broker's. None of these is carried on by a retry or a
// replay: RabbitMQ 3.10 takes an x-death that a client sends for a cycle and drops the message.
func reserved(name string) bool {
	return strings.HasPrefix(name, "seckill-") || strings.HasPrefix(name, "x-death") ||
		strings.HasPrefix(name, "x-first-death") || strings.HasPrefix(name, "x-last-death") ||
		name == "x-delivery-count" || name == "x-acquired-count" || name == "x-opt-deaths" ||
		name == "CC" || name == "BCC"
}

// check says whether the message can be published at all.
func (m *Message) check() error {
	switch {
	case m.ID == "":
		return fmt.Errorf("%w: no message id", ErrInvalidMessage)
	case len(m.ID) > maxShortString || len(m.Key) > maxShortString:
		return fmt.Errorf("%w: id or routing key longer than %d bytes", ErrInvalidMessage, maxShortString)
	case m.Orders > MaxOrdersPerMessage:
		return fmt.Errorf("%w: %d orders, more than %d", ErrInvalidMessage, m.Orders, MaxOrdersPerMessage)
	case len(m.Body) > maxMessage:
		return fmt.Errorf("%w: body of %d bytes", ErrInvalidMessage, len(m.Body))
	}
	for k := range m.Headers {
		if len(k) > maxShortString {
			return fmt.Errorf("%w: header name longer than %d bytes", ErrInvalidMessage, maxShortString)
		}
	}
	return nil
}

// publishing writes a message as AMQP sees it: persistent, with its id, attempt, weight and time.
func publishing(m Message) amqp.Publishing {
	at := m.Time
	if at.IsZero() {
		at = time.Now()
	}
	h := make(amqp.Table, 3+len(m.Headers))
	if dropped := carry(h, m.Headers); dropped != "" {
		h[headerError] = dropped
	}
	if m.Attempt > 0 {
		h[headerAttempt] = int64(m.Attempt)
	}
	if m.Orders > 1 {
		h[headerOrders] = int64(m.Orders)
	}
	h[headerTime] = at.UnixMicro()
	return amqp.Publishing{
		Headers: h, ContentType: "application/x-protobuf", DeliveryMode: amqp.Persistent,
		MessageId: m.ID, Timestamp: at, Type: cut(m.Key, maxShortString), AppId: "seckill", Body: m.Body,
	}
}

// carry copies the headers that are not reserved; where they are too large it drops the largest, which are
// not ours, and says so.
func carry(into amqp.Table, headers map[string]string) (dropped string) {
	total := 0
	for k, v := range headers {
		if !reserved(k) {
			into[k] = v
			total += headerSize(k, v)
		}
	}
	if total <= maxHeaders {
		return ""
	}
	names := slices.SortedFunc(maps.Keys(into), func(a, b string) int {
		return cmp.Or(cmp.Compare(headerSize(b, headers[b]), headerSize(a, headers[a])), cmp.Compare(a, b))
	})
	n, left := 0, total
	for ; left > maxHeaders; n++ {
		delete(into, names[n])
		left -= headerSize(names[n], headers[names[n]])
	}
	return fmt.Sprintf("headers dropped: %d with %d bytes, the first %q", n, total-left, cut(names[0], 80))
}

// headerSize is what a text header takes in a frame: both lengths and the type come on top.
func headerSize(name, value string) int { return len(name) + len(value) + 6 }

// deadLetter adds to a message why it failed for good, and where.
func deadLetter(m Message, class string, cause error, queue string) amqp.Publishing {
	p := publishing(m)
	p.Headers[headerClass] = cut(class, maxShortString)
	dropped, _ := p.Headers[headerError].(string)
	switch {
	case cause != nil && dropped != "":
		p.Headers[headerError] = cut(cause.Error(), maxErrorText-len(dropped)-2) + "; " + dropped
	case cause != nil:
		p.Headers[headerError] = cut(cause.Error(), maxErrorText)
	}
	p.Headers[headerQueue] = queue
	p.Headers[headerKey] = m.Key
	p.Headers[headerAttempt] = int64(m.Attempt)
	return p
}

// received reads a delivery. Whatever foreign programs put into a queue comes out as something that
// can be dead-lettered: with an id and a weight.
func received(d *amqp.Delivery, queue string) Delivery {
	out := Delivery{
		Message: Message{
			ID: d.MessageId, Key: d.RoutingKey, Body: d.Body,
			Orders:  int(min(max(number(d.Headers[headerOrders]), 1), MaxOrdersPerMessage)),
			Attempt: int(min(max(number(d.Headers[headerAttempt]), 0), 1<<20)),
		},
		Queue: queue, Redelivered: d.Redelivered, DeliveryCount: int(min(max(number(d.Headers["x-delivery-count"]), 0), 1<<30)),
	}
	if out.ID == "" {
		out.ID = "unnamed:" + digest(d.RoutingKey, string(d.Body))[:32]
	}
	if us := number(d.Headers[headerTime]); us > 0 {
		out.Time = time.UnixMicro(us).UTC()
	} else if !d.Timestamp.IsZero() {
		out.Time = d.Timestamp.UTC()
	}
	for k, v := range d.Headers {
		s, ok := v.(string)
		if !ok || reserved(k) {
			continue
		}
		if out.Headers == nil {
			out.Headers = make(map[string]string, len(d.Headers))
		}
		out.Headers[k] = s
	}
	if class, ok := d.Headers[headerClass].(string); ok {
		out.DeadClass = class
		out.DeadError, _ = d.Headers[headerError].(string)
		out.DeadQueue, _ = d.Headers[headerQueue].(string)
		return out
	}
	out.DeadClass, out.DeadQueue = death(d.Headers)
	if queue == QueueDead && out.DeadClass != "" {
		out.DeadError = fmt.Sprintf("dead-lettered by the broker: %s", out.DeadClass)
	}
	return out
}

// death reads why and where the broker dead-lettered a message last: "delivery_limit", "expired",
// "rejected", "maxlen".
func death(h amqp.Table) (reason, queue string) {
	if r, ok := h["x-last-death-reason"].(string); ok {
		q, _ := h["x-last-death-queue"].(string)
		return r, q
	}
	if list, ok := h["x-death"].([]any); ok && len(list) > 0 {
		if t, ok := list[0].(amqp.Table); ok {
			r, _ := t["reason"].(string)
			q, _ := t["queue"].(string)
			return r, q
		}
	}
	return "", ""
}

func number(v any) int64 {
	switch n := v.(type) {
	case int64:
		return n
	case int32:
		return int64(n)
	case int16:
		return int64(n)
	case int8:
		return int64(n)
	case int:
		return int64(n)
	case uint8:
		return int64(n)
	case uint16:
		return int64(n)
	case uint32:
		return int64(n)
	}
	return 0
}

// between gives the text between two marks, or "".
func between(s, from, to string) string {
	_, s, ok := strings.Cut(s, from)
	if !ok {
		return ""
	}
	s, _, ok = strings.Cut(s, to)
	if !ok {
		return ""
	}
	return s
}
