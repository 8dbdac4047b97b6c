package deadletter_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	amqp "github.com/rabbitmq/amqp091-go"

	"seckill/pkg/adminapi"
	"seckill/pkg/messaging"
	"seckill/pkg/order"
	"seckill/pkg/stock"
	"seckill/pkg/testkit"
	"seckill/services/order-worker/internal/deadletter"
	"seckill/services/order-worker/internal/rig"
)

const within = 2 * time.Minute

func short(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	t.Cleanup(cancel)
	return ctx
}

// failing is a consumer for which everything fails for good, as class.
func failing(class string) messaging.Handler {
	return func(_ context.Context, batch []messaging.Delivery) []messaging.Result {
		out := make([]messaging.Result, len(batch))
		for i, d := range batch {
			parts, err := messaging.Split(d.Message)
			if err != nil {
				out[i].Dead = []messaging.Dead{{Message: d.Message, Class: "undecodable", Err: err}}
				continue
			}
			for _, m := range parts {
				out[i].Dead = append(out[i].Dead, messaging.Dead{Message: m, Class: class, Err: errors.New("made to fail")})
			}
		}
		return out
	}
}

func broken(id string) messaging.Message {
	return messaging.Message{ID: id, Key: messaging.KeyOrderReserved, Body: []byte("not an order"), Orders: 1}
}

func sold(r *rig.Rig, n int) []order.Order {
	r.T.Helper()
	out := make([]order.Order, n)
	for i := range out {
		out[i] = r.MustBuy("sale", fmt.Sprintf("user-%d", i))
	}
	return out
}

func waiting(r *rig.Rig) (outbox, parked int) {
	r.T.Helper()
	s, err := r.Stock.OutboxStats(short(r.T.(*testing.T)), "sale", 0)
	if err != nil {
		r.T.Fatal(err)
	}
	return s.Waiting, s.Parked
}

func status(r *rig.Rig, id order.ID) order.Status {
	r.T.Helper()
	rec, err := r.Stock.Order(short(r.T.(*testing.T)), id)
	if err != nil {
		r.T.Fatal(err)
	}
	return rec.Status
}

func replay(r *rig.Rig, sel adminapi.LetterSelection) adminapi.ReplayJob {
	r.T.Helper()
	ctx := short(r.T.(*testing.T))
	j, err := r.Letters.Replay(ctx, sel, rig.Operator())
	if err != nil {
		r.T.Fatal(err)
	}
	testkit.Eventually(r.T, within, func() (err error) {
		if j, err = r.Letters.Job(ctx, j.ID); err == nil && j.State != adminapi.JobDone {
			err = fmt.Errorf("job is %+v", j)
		}
		return err
	})
	return j
}

func all() adminapi.LetterSelection {
	return adminapi.LetterSelection{Filter: &adminapi.LetterFilter{}}
}

// consistent checks P1 to P4 for the sale as far as this package goes: units are where they belong.
func consistent(r *rig.Rig, units, live int) {
	r.T.Helper()
	if n := r.Level("sale", "national"); n != units-live {
		r.T.Errorf("redis has %d units left, want %d", n, units-live)
	}
	if n := r.Count("SELECT available FROM activity_stock WHERE activity_id = 'sale'"); n != units-live {
		r.T.Errorf("mysql has %d units left, want %d", n, units-live)
	}
	if n := r.Count("SELECT SUM(delta) FROM stock_ledger WHERE activity_id = 'sale' AND account = 'sale'"); n != units-live {
		r.T.Errorf("the ledger explains %d units, want %d", n, units-live)
	}
}

// O20: ten orders dead-lettered because a store was down, and one message that nobody can read. Two
// replays at once, another one later.
func TestO20_ReplayTwiceAtOnceAndAgainLater(t *testing.T) {
	t.Parallel()
	r := rig.New(t, rig.Options{})
	r.Sell(rig.Plan("sale", map[string]int{"national": 20}))
	orders := sold(r, 10)
	fail := r.Consume(messaging.QueueOrders, failing(messaging.ClassAttemptsExhausted))
	r.ConsumeDead()
	r.Go(r.Letters.Run)
	r.Publish(messaging.OrderReserved(orders[:6]), broken("broken"), messaging.OrderReserved(orders[6:]))
	for _, o := range orders {
		if l := r.Becomes(o.ID.String(), "open"); l.Class != messaging.ClassAttemptsExhausted || l.ActivityID != "sale" {
			t.Errorf("letter %+v", l)
		}
	}
	r.Becomes("broken", "open")
	testkit.Eventually(t, within, func() error {
		if out, parked := waiting(r); out != 0 || parked != 10 {
			return fmt.Errorf("%d in the outbox, %d parked", out, parked)
		}
		return nil
	})
	if s := status(r, orders[0].ID); s != order.Reserved {
		t.Errorf("the buyer of a parked order sees %s", s)
	}
	fail()
	r.ConsumeOrders()

	preview, err := r.Letters.Preview(short(t), all())
	if err != nil || preview.Matched != 11 || preview.Verdicts[adminapi.WillApply] != 10 || preview.Verdicts[adminapi.Undecodable] != 1 {
		t.Errorf("preview %+v %v", preview, err)
	}
	var jobs [2]adminapi.ReplayJob
	var wg sync.WaitGroup
	for i := range jobs {
		wg.Add(1)
		go func() {
			defer wg.Done()
			j, err := r.Letters.Replay(short(t), all(), rig.Operator())
			if err != nil {
				t.Error(err)
			}
			jobs[i] = j
		}()
	}
	wg.Wait()
	testkit.Eventually(t, within, func() error {
		sent, skipped, matched := 0, 0, 0
		for _, j := range jobs {
			j, err := r.Letters.Job(short(t), j.ID)
			if err != nil {
				return err
			}
			if j.State != adminapi.JobDone {
				return fmt.Errorf("job %s is running", j.ID)
			}
			sent, skipped, matched = sent+j.Sent, skipped+j.Skipped, matched+j.Matched
		}
		// Each order is one job's alone. The unreadable one is looked at by both, where the first has put
		// it back before the second comes.
		if sent != 10 || skipped < 1 || skipped > 2 || matched != sent+skipped {
			return fmt.Errorf("sent %d, skipped %d of %d", sent, skipped, matched)
		}
		return nil
	})
	for _, o := range orders {
		r.Becomes(o.ID.String(), "resolved")
	}
	if l := r.Becomes("broken", "open"); l.Occurrences != 1 {
		t.Errorf("the broken one went round %d times", l.Occurrences)
	}
	if n := r.Count("SELECT COUNT(*) FROM orders WHERE status = 'pending'"); n != 10 {
		t.Errorf("%d rows", n)
	}
	testkit.Eventually(t, within, func() error {
		if out, parked := waiting(r); out+parked != 0 {
			return fmt.Errorf("%d in the outbox, %d parked", out, parked)
		}
		return nil
	})
	consistent(r, 20, 10)
	if n := r.Count("SELECT SUM(occurrences) FROM dead_letters WHERE order_id <> ''"); n != 10 {
		t.Errorf("%d deaths of ten letters: something was sent twice, or failed", n)
	}

	later := replay(r, all())
	if later.Sent != 0 || later.Matched != 1 || later.Skipped != 1 {
		t.Errorf("a later replay: %+v", later)
	}
	none := replay(r, adminapi.LetterSelection{Filter: &adminapi.LetterFilter{Class: "nosuch"}})
	if none.Matched != 0 || none.Sent != 0 || none.State != adminapi.JobDone {
		t.Errorf("a replay of nothing: %+v", none)
	}
	// Named, it is sent, and is back after one round.
	l := r.Becomes("broken", "open")
	if j := replay(r, adminapi.LetterSelection{IDs: []int64{l.ID}}); j.Sent != 1 {
		t.Errorf("named: %+v", j)
	}
	testkit.Eventually(t, within, func() error {
		if l := r.Becomes("broken", "open"); l.Occurrences != 2 {
			return fmt.Errorf("%d deaths", l.Occurrences)
		}
		return nil
	})
	if n := r.Count("SELECT COUNT(*) FROM operator_audit WHERE action = 'dead_letter.replay'"); n != 5 {
		t.Errorf("%d audit rows for five jobs", n)
	}
}

// racing publishes and then lets the test do something before the replay goes on.
type racing struct {
	*messaging.Client
	after func()
}

func (p racing) Publish(ctx context.Context, exchange string, msgs ...messaging.Message) []error {
	errs := p.Client.Publish(ctx, exchange, msgs...)
	p.after()
	return errs
}

// R15: the message fails again, and is drained, before the replay gets to say "sent". The late
// "sent" must not hide the reopened letter.
func TestR15_LateSentDoesNotHideAReopenedLetter(t *testing.T) {
	t.Parallel()
	r := rig.New(t, rig.Options{})
	r.Sell(rig.Plan("sale", map[string]int{"national": 5}))
	o := r.MustBuy("sale", "u")
	r.Consume(messaging.QueueOrders, failing(messaging.ClassAttemptsExhausted))
	r.ConsumeDead()
	r.Publish(messaging.OrderReserved([]order.Order{o}))
	r.Becomes(o.ID.String(), "open")
	slow, err := deadletter.New(r.Store, r.Stock, racing{r.Broker, func() {
		testkit.Eventually(t, within, func() error {
			if l, err := r.Letter(o.ID.String()); err != nil || l.Occurrences != 2 || l.State != "open" {
				return fmt.Errorf("%+v %w", l, err)
			}
			return nil
		})
	}}, r.Follow, deadletter.Config{Interval: 50 * time.Millisecond}, testkit.Logger(t), prometheus.NewRegistry())
	if err != nil {
		t.Fatal(err)
	}
	r.Go(slow.Run)
	if j := replay(r, all()); j.Sent != 1 {
		t.Errorf("%+v", j)
	}
	if l := r.Becomes(o.ID.String(), "open"); l.Occurrences != 2 {
		t.Errorf("%+v", l)
	}
}

// R15: a message that the broker dead-letters for its delivery count says nothing against the order:
// it stays in the outbox, and the relay's next copy resolves the letter.
func TestR15_DeliveryCountLettersStayInTheOutbox(t *testing.T) {
	t.Parallel()
	r := rig.New(t, rig.Options{})
	r.Sell(rig.Plan("sale", map[string]int{"national": 5}))
	orders := sold(r, 3)
	r.Publish(messaging.OrderReserved(orders))
	returnUntilDead(t, r.RabbitURL)
	r.ConsumeDead()
	for _, o := range orders { // a batch that the broker dead-lettered is one letter per order
		if l := r.Becomes(o.ID.String(), "open"); l.Class != "delivery_limit" || l.SourceQueue != messaging.QueueOrders || l.Parked {
			t.Errorf("letter %+v", l)
		}
	}
	if out, parked := waiting(r); out != 3 || parked != 0 {
		t.Errorf("%d in the outbox, %d parked", out, parked)
	}
	r.ConsumeOrders()
	r.Publish(messaging.OrderReserved(orders)) // as the relay does
	for _, o := range orders {
		r.Becomes(o.ID.String(), "resolved")
	}
	consistent(r, 5, 3)
}

// returnUntilDead gives the messages of seckill.orders back until the broker has had enough.
func returnUntilDead(t *testing.T, url string) {
	t.Helper()
	conn, err := amqp.Dial(url)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	ch, err := conn.Channel()
	if err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, within, func() error {
		for {
			d, ok, err := ch.Get(messaging.QueueOrders, false)
			if err != nil {
				t.Fatal(err)
			}
			if !ok {
				break
			}
			if err := d.Nack(false, true); err != nil {
				t.Fatal(err)
			}
		}
		q, err := ch.QueueDeclarePassive(messaging.QueueDead, true, false, false, false, nil)
		if err == nil && q.Messages == 0 {
			err = errors.New("not dead yet")
		}
		return err
	})
}

// R15: the drain looks at the order's row first. An order that is in MySQL needs no letter, and is
// not parked; a message that contradicts it stays for an operator.
func TestR15_DrainLooksAtTheRowFirst(t *testing.T) {
	t.Parallel()
	r := rig.New(t, rig.Options{})
	r.Sell(rig.Plan("sale", map[string]int{"national": 5}))
	o := r.MustBuy("sale", "u")
	stop := r.ConsumeOrders()
	r.Publish(messaging.OrderReserved([]order.Order{o}))
	testkit.Eventually(t, within, func() error {
		if status(r, o.ID) != order.Pending {
			return errors.New("not pending")
		}
		return nil
	})
	stop()
	r.Consume(messaging.QueueOrders, failing(messaging.ClassAttemptsExhausted))
	r.ConsumeDead()
	r.Publish(messaging.OrderReserved([]order.Order{o}))
	r.Becomes(o.ID.String(), "resolved")
	other := o
	other.Quantity = 2
	m := messaging.OrderReserved([]order.Order{other})
	m.ID = "other-content"
	r.Publish(m)
	l := r.Becomes("other-content", "open")
	if l.Parked {
		t.Error("a contradicting message parked the order")
	}
	show, err := r.Letters.Show(short(t), l.ID)
	if err != nil || show.Verdict != adminapi.InConflict || !strings.Contains(string(show.Decoded), o.ID.String()) {
		t.Errorf("%+v %v", show, err)
	}
	// Discarding it must not touch the living order.
	res, err := r.Letters.Discard(short(t), adminapi.LetterSelection{IDs: []int64{l.ID}}, "wrong copy", false, rig.Operator())
	if err != nil || res.Discarded != 1 {
		t.Errorf("%+v %v", res, err)
	}
	if s := status(r, o.ID); s != order.Pending {
		t.Errorf("the order is %s", s)
	}
	consistent(r, 5, 1)
}

// R15: discard against replay, in both orders, and a copy of the message that comes late.
func TestR15_DiscardAgainstReplay(t *testing.T) {
	t.Parallel()
	r := rig.New(t, rig.Options{})
	r.Sell(rig.Plan("sale", map[string]int{"national": 5}))
	orders := sold(r, 2)
	fail := r.Consume(messaging.QueueOrders, failing(messaging.ClassAttemptsExhausted))
	r.ConsumeDead()
	r.Publish(messaging.OrderReserved(orders))
	first, second := r.Becomes(orders[0].ID.String(), "open"), r.Becomes(orders[1].ID.String(), "open")
	fail()
	ctx := short(t)

	// Claimed by a job that does not run yet: discard finds nothing open.
	job, err := r.Letters.Replay(ctx, adminapi.LetterSelection{IDs: []int64{first.ID}}, rig.Operator())
	if err != nil || job.Matched != 1 {
		t.Fatalf("%+v %v", job, err)
	}
	if res, err := r.Letters.Discard(ctx, adminapi.LetterSelection{IDs: []int64{first.ID}}, "r", false, rig.Operator()); err != nil || res.Matched != 0 {
		t.Errorf("discard of a claimed letter: %+v %v", res, err)
	}
	// Discarded: nothing to replay, the buyer has his answer, the unit is back, once.
	if res, err := r.Letters.Discard(ctx, adminapi.LetterSelection{IDs: []int64{second.ID}}, "given up", false, rig.Operator()); err != nil || res.Discarded != 1 {
		t.Errorf("discard: %+v %v", res, err)
	}
	if j, err := r.Letters.Replay(ctx, adminapi.LetterSelection{IDs: []int64{second.ID}}, rig.Operator()); err != nil || j.Matched != 0 || j.State != adminapi.JobDone {
		t.Errorf("replay of a discarded letter: %+v %v", j, err)
	}
	if s := status(r, orders[1].ID); s != order.Rejected {
		t.Errorf("the discarded order is %s", s)
	}
	if n := r.Level("sale", "national"); n != 4 {
		t.Errorf("%d units", n)
	}
	if n := r.Count("SELECT COUNT(*) FROM operator_audit WHERE action = 'dead_letter.discard' AND reason = 'given up'"); n != 1 {
		t.Errorf("%d audit rows", n)
	}
	if n := r.Count("SELECT COUNT(*) FROM compensations"); n != 0 {
		t.Errorf("%d compensations are left", n)
	}
	// A late copy finds the rejected row, and takes nothing. The job goes on.
	r.ConsumeOrders()
	r.Go(r.Letters.Run)
	r.Publish(messaging.OrderReserved(orders[1:]))
	r.Becomes(orders[0].ID.String(), "resolved")
	testkit.Eventually(t, within, func() error {
		if s := status(r, orders[0].ID); s != order.Pending {
			return fmt.Errorf("replayed order is %s", s)
		}
		return nil
	})
	if l := r.Becomes(orders[1].ID.String(), "discarded"); l.Note != "given up" {
		t.Errorf("%+v", l)
	}
	consistent(r, 5, 1)
	// A dead copy that comes after the decision does not undo it.
	r.Consume("seckill.payments", failing("x"))
	dead(t, r, messaging.OrderReserved(orders[1:]))
	testkit.Eventually(t, within, func() error {
		if l := r.Becomes(orders[1].ID.String(), "discarded"); l.Occurrences < 2 {
			return errors.New("not drained yet")
		}
		return nil
	})
	if r.Level("sale", "national") != 4 {
		t.Error("units moved")
	}
}

// R5: money that came while the order waited behind its letter is due for refund as soon as the letter is
// given up. It stayed kept until a sweep, and the sale could close over it.
func TestR5_AKeptPaymentIsDueForRefundWhenItsLetterEndsTheOrder(t *testing.T) {
	t.Parallel()
	r := rig.New(t, rig.Options{})
	r.Sell(rig.Plan("sale", map[string]int{"national": 5}))
	orders := sold(r, 2)
	pay := func(o order.Order) {
		t.Helper()
		r.Publish(messaging.OrderPaid(messaging.Payment{OrderID: o.ID, TransactionID: "t-" + o.User, AmountMinor: 1999, Currency: "EUR", ReceivedAt: time.Now().UTC()}))
		testkit.Eventually(t, within, func() error {
			if n := r.Count("SELECT COUNT(*) FROM payments WHERE order_id = ? AND status = 'kept'", o.ID.String()); n != 1 {
				return fmt.Errorf("%d payments are kept", n)
			}
			return nil
		})
	}
	due := func(o order.Order) {
		t.Helper()
		testkit.Eventually(t, within, func() error {
			if n := r.Count("SELECT COUNT(*) FROM payments WHERE order_id = ? AND status = 'refund_due'", o.ID.String()); n != 1 {
				return fmt.Errorf("%d payments are due for refund", n)
			}
			rec, err := r.Stock.Order(short(t), o.ID)
			if err == nil && (rec.Status != order.Rejected || !rec.RefundDue) {
				err = fmt.Errorf("the record is %s, refund due %t", rec.Status, rec.RefundDue)
			}
			return err
		})
	}
	r.ConsumePayments()
	r.ConsumeDead()
	pay(orders[0])
	pay(orders[1])

	fail := r.Consume(messaging.QueueOrders, failing(messaging.ClassAttemptsExhausted))
	r.Publish(messaging.OrderReserved(orders[:1]))
	l := r.Becomes(orders[0].ID.String(), "open")
	if res, err := r.Letters.Discard(short(t), adminapi.LetterSelection{IDs: []int64{l.ID}}, "given up", false, rig.Operator()); err != nil || res.Discarded != 1 {
		t.Errorf("%+v %v", res, err)
	}
	due(orders[0])
	fail()

	r.Consume(messaging.QueueOrders, failing("invalid_order")) // rejected by the drain itself
	r.Publish(messaging.OrderReserved(orders[1:]))
	r.Becomes(orders[1].ID.String(), "resolved")
	due(orders[1])
	consistent(r, 5, 0)
}

// dead puts a message straight among the dead letters, as a consumer of order.reserved would.
func dead(t *testing.T, r *rig.Rig, m messaging.Message) {
	t.Helper()
	for i, err := range r.Broker.Publish(short(t), messaging.ExchangeDead, m) {
		if err != nil {
			t.Fatalf("%d: %v", i, err)
		}
	}
}

// O34: one order's message fails for good by its content. He is told so and his piece is back; the
// other buyer notices nothing.
func TestO34_ContentThatFailsForGoodIsRejectedAndReleased(t *testing.T) {
	t.Parallel()
	r := rig.New(t, rig.Options{})
	r.Sell(rig.Plan("sale", map[string]int{"national": 5}))
	orders := sold(r, 3)
	for _, o := range orders {
		if s := status(r, o.ID); s != order.Reserved {
			t.Errorf("before the consumer: %s", s)
		}
	}
	r.ConsumeDead()
	// The first: a consumer says that the content is wrong. The second: it really is.
	stop := r.Consume(messaging.QueueOrders, failing("invalid_order"))
	r.Publish(messaging.OrderReserved(orders[:1]))
	if l := r.Becomes(orders[0].ID.String(), "resolved"); !strings.Contains(l.Note, order.ReasonInvalidOrder) {
		t.Errorf("%+v", l)
	}
	stop()
	r.ConsumeOrders()
	wrong := orders[1]
	wrong.Quantity = 0
	r.Publish(messaging.OrderReserved([]order.Order{wrong, orders[2]}))
	r.Becomes(orders[1].ID.String(), "resolved")
	for i, want := range []order.Status{order.Rejected, order.Rejected, order.Pending} {
		testkit.Eventually(t, within, func() error {
			rec, err := r.Stock.Order(short(t), orders[i].ID)
			if err != nil {
				return err
			}
			if rec.Status != want || want == order.Rejected && rec.Reason != order.ReasonInvalidOrder {
				return fmt.Errorf("order %d is %s (%s), want %s", i, rec.Status, rec.Reason, want)
			}
			return nil
		})
	}
	consistent(r, 5, 1)
	if out, parked := waiting(r); out+parked != 0 {
		t.Errorf("%d in the outbox, %d parked", out, parked)
	}
	if n := r.Count("SELECT COUNT(*) FROM compensations"); n != 0 {
		t.Errorf("%d compensations are left", n)
	}
	unknown := orders[0].ID
	unknown.ULID = "01ARZ3NDEKTSV4RRFFQ69G5FAV"
	if _, err := r.Stock.Order(short(t), unknown); !errors.Is(err, stock.ErrOrderNotFound) {
		t.Errorf("an order that never was: %v", err)
	}
}

// A rejection that MySQL refuses to write held the drain, and with it every other letter.
func TestARejectionThatMySQLRefusesHoldsUpNoOtherLetter(t *testing.T) {
	t.Parallel()
	r := rig.New(t, rig.Options{})
	r.Sell(rig.Plan("sale", map[string]int{"national": 5}))
	orders := sold(r, 2)
	ctx := short(t)
	exec := func(query string) {
		t.Helper()
		if _, err := r.Store.SQL().ExecContext(ctx, query); err != nil {
			t.Fatal(err)
		}
	}
	exec("CREATE TRIGGER refuse BEFORE INSERT ON orders FOR EACH ROW IF NEW.id='" + orders[0].ID.String() +
		"' THEN SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT='not in this shop'; END IF")
	r.ConsumeDead()
	stop := r.Consume(messaging.QueueOrders, failing("invalid_order"))
	r.Publish(messaging.OrderReserved(orders))
	r.Becomes(orders[1].ID.String(), "resolved")
	testkit.Eventually(t, within, func() error {
		if out, parked := waiting(r); out != 0 || parked != 1 {
			return fmt.Errorf("%d in the outbox, %d parked", out, parked)
		}
		return nil
	})
	r.Becomes(orders[0].ID.String(), "open")
	stop()

	// Mended and sent again, it becomes an order like any other.
	exec("DROP TRIGGER refuse")
	r.ConsumeOrders()
	r.Go(r.Letters.Run)
	if j := replay(r, all()); j.Sent != 1 {
		t.Errorf("%+v", j)
	}
	r.Becomes(orders[0].ID.String(), "resolved")
	testkit.Eventually(t, within, func() error {
		if s := status(r, orders[0].ID); s != order.Pending {
			return fmt.Errorf("the order is %s", s)
		}
		return nil
	})
	consistent(r, 5, 1)
}

// A body that MySQL does not take in one packet held up the drain for good.
func TestABodyOfAnySizeHoldsUpNoOtherLetter(t *testing.T) {
	t.Parallel()
	r := rig.New(t, rig.Options{})
	r.ConsumeDead()
	r.Go(r.Letters.Run)
	foreign := func(id string, body []byte) messaging.Message {
		return messaging.Message{ID: id, Key: messaging.KeyOrderReserved, Body: body, Orders: 1}
	}
	xs := bytes.Repeat([]byte{'x'}, 17<<20)
	ys := append(bytes.Clone(xs[:len(xs)-1]), 'y')
	whole := bytes.Repeat([]byte{'z'}, 1<<20)
	// NULs are two bytes each in a statement. Two bodies that differ only where they are cut are two letters.
	for _, m := range []messaging.Message{foreign("nul", make([]byte, 9_500_000)), foreign("x", xs), foreign("x", xs), foreign("y", ys), foreign("whole", whole), broken("small")} {
		dead(t, r, m)
	}
	r.Becomes("small", "open")
	if l := r.Becomes("whole", "open"); !bytes.Equal(l.Body, whole) || strings.Contains(l.Error, "cut") {
		t.Errorf("a body of 1 MiB: %d bytes are kept, %q", len(l.Body), l.Error)
	}
	for id, want := range map[string]struct {
		size, deaths int
		body         []byte
	}{"nul": {9_500_000, 1, make([]byte, 1<<20)}, "x": {17 << 20, 2, xs[:1<<20]}, "y": {17 << 20, 1, ys[:1<<20]}} {
		l := r.Becomes(id, "open")
		if len(l.Body) > 1<<20+1 || !bytes.HasPrefix(l.Body, want.body) || l.Occurrences != want.deaths || !strings.Contains(l.Error, fmt.Sprintf("cut, it had %d bytes", want.size)) {
			t.Errorf("%s: %d bytes are kept, %d deaths, %q", id, len(l.Body), l.Occurrences, l.Error)
		}
		show, err := r.Letters.Show(short(t), l.ID)
		if err != nil || show.Verdict != adminapi.Undecodable || !strings.Contains(show.Detail, "not kept whole") {
			t.Errorf("%s: %s (%s), %v", id, show.Verdict, show.Detail, err)
		}
		if j := replay(r, adminapi.LetterSelection{IDs: []int64{l.ID}}); j.Sent != 0 || j.Skipped != 1 {
			t.Errorf("%s, named: %+v", id, j)
		}
		r.Becomes(id, "open")
	}
}

// O14: the dead-letter exchange is gone, or kept without a binding. A broken message is not lost.
func TestO14_DeadLetterExchangeGone(t *testing.T) {
	t.Parallel()
	for name, damage := range map[string]func(ch *amqp.Channel) error{
		"deleted": func(ch *amqp.Channel) error { return ch.ExchangeDelete(messaging.ExchangeDead, false, false) },
		"unbound": func(ch *amqp.Channel) error {
			return ch.QueueUnbind(messaging.QueueDead, "", messaging.ExchangeDead, nil)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := rig.New(t, rig.Options{})
			conn, err := amqp.Dial(r.RabbitURL)
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = conn.Close() }()
			ch, err := conn.Channel()
			if err != nil {
				t.Fatal(err)
			}
			if err := damage(ch); err != nil {
				t.Fatal(err)
			}
			r.ConsumeOrders()
			r.ConsumeDead()
			r.Publish(broken("lost?"))
			if l := r.Becomes("lost?", "open"); string(l.Body) != "not an order" || l.Class != "undecodable" {
				t.Errorf("%+v", l)
			}
		})
	}
}

func TestLettersCanBeFoundGroupedAndLookedInto(t *testing.T) {
	t.Parallel()
	r := rig.New(t, rig.Options{})
	r.Sell(rig.Plan("sale", map[string]int{"national": 5}))
	orders := sold(r, 2)
	r.Consume(messaging.QueueOrders, failing(messaging.ClassAttemptsExhausted))
	r.ConsumeDead()
	m := messaging.OrderReserved(orders)
	m.Headers = map[string]string{"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
	r.Publish(m, broken("one"), messaging.Message{ID: "two", Key: messaging.KeyOrderReserved, Body: []byte{0x0a, 0x7f, 'x', '%'}, Orders: 1})
	for _, id := range []string{orders[0].ID.String(), orders[1].ID.String(), "one", "two"} {
		r.Becomes(id, "open")
	}
	ctx := short(t)
	for _, c := range []struct {
		filter adminapi.LetterFilter
		want   int
	}{
		{adminapi.LetterFilter{}, 4},
		{adminapi.LetterFilter{Class: "undecodable"}, 2},
		{adminapi.LetterFilter{State: "resolved"}, 0},
		{adminapi.LetterFilter{ActivityID: "sale"}, 2},
		{adminapi.LetterFilter{OrderID: orders[1].ID.String()}, 1},
		{adminapi.LetterFilter{Queue: messaging.QueueOrders}, 4},
		{adminapi.LetterFilter{Query: "user-1"}, 1},       // in a body
		{adminapi.LetterFilter{Query: "made to fail"}, 2}, // in an error
		{adminapi.LetterFilter{Query: "%"}, 1},            // no wildcard
		{adminapi.LetterFilter{Query: "' OR 1=1 --"}, 0},
	} {
		got, err := r.Letters.List(ctx, c.filter, 0, 100)
		if err != nil || len(got) != c.want {
			t.Errorf("%+v: %d letters, want %d, %v", c.filter, len(got), c.want, err)
		}
	}
	page, err := r.Letters.List(ctx, adminapi.LetterFilter{}, 0, 3)
	if err != nil || len(page) != 3 {
		t.Fatal(err)
	}
	if rest, err := r.Letters.List(ctx, adminapi.LetterFilter{}, page[2].ID, 3); err != nil || len(rest) != 1 || rest[0].ID >= page[2].ID {
		t.Errorf("second page %+v %v", rest, err)
	}
	l := r.Becomes(orders[0].ID.String(), "open")
	show, err := r.Letters.Show(ctx, l.ID)
	if err != nil || show.Verdict != adminapi.WillApply || show.Headers["traceparent"] == "" || !strings.Contains(string(show.Decoded), `"user_id":"user-0"`) {
		t.Errorf("%s %s %v %v", show.Verdict, show.Decoded, show.Headers, err)
	}
	if _, err := r.Letters.Show(ctx, 1<<40); !errors.Is(err, deadletter.ErrNotFound) {
		t.Error(err)
	}
	groups, err := r.Letters.Groups(ctx, adminapi.LetterFilter{})
	if err != nil || len(groups) < 2 || groups[0].Count != 2 {
		t.Errorf("%+v %v", groups, err)
	}
	r.Go(r.Letters.Run)
	testkit.Eventually(t, within, func() error {
		return testutil.GatherAndCompare(r.Registry, strings.NewReader(`
# HELP seckill_dead_letters Dead letters by state and class.
# TYPE seckill_dead_letters gauge
seckill_dead_letters{class="attempts_exhausted",state="open"} 2
seckill_dead_letters{class="undecodable",state="open"} 2
`), "seckill_dead_letters")
	})
}

// A payment, a cancel and an expiry that were dead-lettered are judged by what the rows say.
// An order that is paid twice: the one payment that was booked does not close the letter of the other, whose
// money nobody has seen yet. Its own booking does.
func TestALetterOfAPaymentIsClosedByThatPaymentOnly(t *testing.T) { // O20, R5
	t.Parallel()
	r := rig.New(t, rig.Options{})
	r.Sell(rig.Plan("sale", map[string]int{"national": 5}))
	o := sold(r, 1)[0]
	r.ConsumeOrders()
	r.Publish(messaging.OrderReserved([]order.Order{o}))
	testkit.Eventually(t, within, func() error { // or its first payment waits for it
		if s := status(r, o.ID); s != order.Pending {
			return fmt.Errorf("the order is %s", s)
		}
		return nil
	})
	r.ConsumeDead()
	payment := func(txn string) messaging.Message {
		return messaging.OrderPaid(messaging.Payment{OrderID: o.ID, TransactionID: txn, AmountMinor: 1999, Currency: "EUR", ReceivedAt: time.Now().UTC()})
	}
	lost := payment("lost")
	unreadable := messaging.OrderPaid(messaging.Payment{OrderID: o.ID, TransactionID: "unreadable", AmountMinor: -1, Currency: "EUR", ReceivedAt: time.Now().UTC()})
	fail := r.Consume(messaging.QueuePayments, failing(messaging.ClassAttemptsExhausted))
	r.Publish(lost, unreadable)
	for _, m := range []messaging.Message{lost, unreadable} {
		if l := r.Becomes(m.ID, "open"); l.OrderID != o.ID.String() {
			t.Errorf("letter %+v", l)
		}
	}
	fail()
	r.ConsumePayments()
	for n, txn := range []string{"LOST", "other"} { // ids are told apart by their case, too
		r.Publish(payment(txn))
		testkit.Eventually(t, within, func() error {
			if got := r.Count("SELECT COUNT(*) FROM payments"); got != n+1 {
				return fmt.Errorf("%d payments are booked", got)
			}
			return nil
		})
	}
	r.Publish(lost)
	r.Becomes(lost.ID, "resolved")
	r.Becomes(unreadable.ID, "open")
	if n := r.Count("SELECT COUNT(*) FROM payments WHERE transaction_id = 'lost' COLLATE utf8mb4_bin AND status = 'refund_due'"); n != 1 {
		t.Errorf("the second payment is booked %d times", n)
	}
}

// A transaction that comes again with another amount or currency is in conflict with what is booked, and an
// operator's to decide: its letter used to be closed because the order was the same.
func TestALetterOfAPaymentThatContradictsItsBookingStaysOpen(t *testing.T) { // R5
	t.Parallel()
	r := rig.New(t, rig.Options{})
	r.Sell(rig.Plan("sale", map[string]int{"national": 5}))
	o := r.MustBuy("sale", "u") // has no row: the payment is kept
	callback := func(id string, amount int64, currency string) messaging.Message {
		m := messaging.OrderPaid(messaging.Payment{OrderID: o.ID, TransactionID: "T", AmountMinor: amount, Currency: currency, ReceivedAt: time.Now().UTC()})
		m.ID = id
		return m
	}
	r.ConsumePayments()
	r.ConsumeDead()
	r.Publish(callback("first", 100, "EUR"))
	testkit.Eventually(t, within, func() error {
		if n := r.Count("SELECT COUNT(*) FROM payments WHERE status = 'kept'"); n != 1 {
			return fmt.Errorf("%d payments are kept", n)
		}
		return nil
	})
	r.Publish(callback("amount", 777, "EUR"), callback("currency", 100, "USD"))
	r.Becomes("amount", "open")
	r.Becomes("currency", "open")
	dead(t, r, callback("same", 100, "EUR"))
	r.Becomes("same", "resolved") // and with it the drain has looked at those before it
	for id, want := range map[string]string{"amount": adminapi.InConflict, "currency": adminapi.InConflict, "same": adminapi.AlreadyDone} {
		l, err := r.Letter(id)
		if err != nil || (l.State == "open") != (want == adminapi.InConflict) {
			t.Errorf("%s: %+v %v", id, l, err)
		}
		show, err := r.Letters.Show(short(t), l.ID)
		if err != nil || show.Verdict != want {
			t.Errorf("%s: %s (%s), want %s, %v", id, show.Verdict, show.Detail, want, err)
		}
	}
}

func TestVerdictsOfOtherEvents(t *testing.T) {
	t.Parallel()
	r := rig.New(t, rig.Options{})
	r.Sell(rig.Plan("sale", map[string]int{"national": 5}))
	orders := sold(r, 2)
	r.ConsumeOrders()
	r.Publish(messaging.OrderReserved(orders))
	testkit.Eventually(t, within, func() error {
		if status(r, orders[1].ID) != order.Pending || status(r, orders[0].ID) != order.Pending {
			return errors.New("not pending")
		}
		return nil
	})
	r.Exec("UPDATE orders SET status = 'paid' WHERE id = ?", orders[1].ID.String())
	r.ConsumeDead()
	now := time.Now().UTC()
	for want, msgs := range map[string][]messaging.Message{
		adminapi.WillApply: {
			messaging.OrderExpired(orders[:1]),
			messaging.OrderPaid(messaging.Payment{OrderID: orders[0].ID, TransactionID: "t1", AmountMinor: 1999, Currency: "EUR", ReceivedAt: now}),
			messaging.CancelRequested(messaging.Cancel{OrderID: orders[0].ID, Reason: "user_cancelled", Actor: "user:user-0", RequestedAt: now}),
			messaging.RefundRequested(messaging.Refund{OrderID: orders[1].ID, Reason: "r", Actor: "operator:tess", RequestedAt: now}),
			messaging.ActivityEnded("sale", now),
		},
		adminapi.InConflict: {
			messaging.CancelRequested(messaging.Cancel{OrderID: orders[1].ID, Reason: "user_cancelled", Actor: "user:user-1", RequestedAt: now}),
			messaging.RefundRequested(messaging.Refund{OrderID: orders[0].ID, Reason: "r", Actor: "operator:tess", RequestedAt: now}),
			messaging.ActivityEnded("nosuch", now),
		},
		adminapi.Undecodable: {{ID: "foreign", Key: "nobody.knows", Body: []byte("{}"), Orders: 1}},
	} {
		for _, m := range msgs {
			dead(t, r, m)
			l := r.Becomes(m.ID, "open")
			show, err := r.Letters.Show(short(t), l.ID)
			if err != nil || show.Verdict != want {
				t.Errorf("%s: %s (%s), want %s, %v", m.ID, show.Verdict, show.Detail, want, err)
			}
			if l.Parked {
				t.Errorf("%s parked an order", m.ID)
			}
		}
	}
	m := messaging.OrderExpired(orders[1:]) // of a paid order
	dead(t, r, m)
	r.Becomes(m.ID, "resolved")
}
