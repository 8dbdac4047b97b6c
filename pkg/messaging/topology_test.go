package messaging

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"seckill/pkg/testkit"
)

func within(t testing.TB, d time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}

func TestTopologyCanBeDeclaredTwiceAndByTwo(t *testing.T) {
	t.Parallel()
	url := broker(t)
	c, other := start(t, quick(url)), start(t, quick(url))
	errs := make(chan error, 4)
	for _, x := range []*Client{c, c, other, other} {
		go func() { errs <- x.Declare(within(t, patience)) }()
	}
	for range 4 {
		if err := <-errs; err != nil {
			t.Error(err)
		}
	}
	if s := c.State(); s.Topology != TopologyOK || s.TopologyError != nil {
		t.Errorf("state %+v", s)
	}
}

// A broker whose every answer is slow, as a cluster's that has to place each queue, is not one that is
// away: the time-out is each call's.
func TestTopologyIsDeclaredOnASlowBroker(t *testing.T) {
	t.Parallel()
	url := broker(t)
	proxy := testkit.NewProxy(t, host(t, url))
	cfg := quick(through(t, url, proxy.Addr))
	cfg.RPCTimeout = 3 * time.Second
	const lag = 300 * time.Millisecond
	exchanges, queues, bindings := layout(cfg.DelayTiers)
	if all := time.Duration(len(exchanges)+len(queues)+len(bindings)) * lag; all < cfg.RPCTimeout+time.Second {
		t.Fatalf("all of it takes %s", all)
	}
	c := start(t, cfg)
	ready(t, c)
	proxy.Lag(lag)
	if err := c.Declare(within(t, patience)); err != nil {
		t.Error(err)
	}
	began := time.Now()
	if err := c.Declare(within(t, 2*lag)); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("declared without time: %v", err)
	}
	if took := time.Since(began); took > cfg.RPCTimeout {
		t.Errorf("a caller without time waited %s", took)
	}
}

// O13: a queue that exists with another argument is named with wanted and found value, stays as it is,
// and a start succeeds once it is fixed.
func TestQueueWithOtherArgumentsIsNamedAndKept(t *testing.T) {
	t.Parallel()
	_, queues, _ := layout([]time.Duration{time.Second})
	delay := queues[len(queues)-1]
	for _, tc := range []struct {
		name, argument, wanted, found string
		change                        func(amqp.Table)
	}{
		{"other time to live", "x-message-ttl", "1000", "600000", func(a amqp.Table) { a["x-message-ttl"] = int64(600000) }},
		{"argument missing", "x-dead-letter-exchange", ExchangeEvents, "none", func(a amqp.Table) {
			delete(a, "x-dead-letter-exchange")
			delete(a, "x-dead-letter-strategy")
		}},
		{"argument too many", "x-dead-letter-routing-key", "none", "elsewhere", func(a amqp.Table) { a["x-dead-letter-routing-key"] = "elsewhere" }},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			url := broker(t)
			a := newAdmin(t, url)
			args := amqp.Table{}
			for k, v := range delay.args {
				args[k] = v
			}
			tc.change(args)
			a.do(func(ch *amqp.Channel) error {
				_, err := ch.QueueDeclare(delay.name, true, false, false, false, args)
				return err
			})
			// The tier's own time to live would empty the queue under the test, so it holds no messages then.
			if args["x-message-ttl"] == int64(600000) {
				a.send("", delay.name, amqp.Publishing{Body: []byte("x")}, amqp.Publishing{Body: []byte("x")}, amqp.Publishing{Body: []byte("x")})
			}
			c := start(t, quick(url))
			err := c.Declare(within(t, patience))
			var mismatch *TopologyMismatchError
			if !errors.As(err, &mismatch) || !errors.Is(err, ErrTopology) {
				t.Fatalf("declare: %v", err)
			}
			if mismatch.Queue != delay.name || mismatch.Argument != tc.argument || mismatch.Wanted != tc.wanted || mismatch.Found != tc.found {
				t.Errorf("mismatch %+v", mismatch)
			}
			if s := c.State(); s.Topology != TopologyDifferent || s.TopologyError == nil {
				t.Errorf("state %+v", s)
			}
			if args["x-message-ttl"] == int64(600000) {
				a.has(delay.name, 3)
			}
			a.do(func(ch *amqp.Channel) error {
				_, err := ch.QueueDelete(delay.name, false, false, false)
				return err
			})
			if err := c.Declare(within(t, patience)); err != nil {
				t.Errorf("after the fix: %v", err)
			}
			if s := c.State(); s.Topology != TopologyOK {
				t.Errorf("state after the fix %+v", s)
			}
		})
	}
}

func TestExchangeOfAnotherTypeIsNamed(t *testing.T) {
	t.Parallel()
	url := broker(t)
	newAdmin(t, url).do(func(ch *amqp.Channel) error {
		return ch.ExchangeDeclare(ExchangeDead, amqp.ExchangeDirect, true, false, false, false, nil)
	})
	err := start(t, quick(url)).Declare(within(t, patience))
	var mismatch *TopologyMismatchError
	if !errors.As(err, &mismatch) || mismatch.Queue != ExchangeDead || mismatch.Argument != "type" || mismatch.Wanted != "fanout" || mismatch.Found != "direct" {
		t.Errorf("declare: %v (%+v)", err, mismatch)
	}
}

func TestCheckSeesWhatIsMissingAndWhenItComes(t *testing.T) {
	t.Parallel()
	url := broker(t)
	api := start(t, quick(url))
	if s := api.State(); s.Topology != TopologyUnknown {
		t.Errorf("before the first look: %+v", s)
	}
	if err := api.Check(within(t, patience)); !errors.Is(err, ErrTopology) {
		t.Fatalf("check of an empty broker: %v", err)
	}
	if s := api.State(); s.Topology != TopologyMissing || s.TopologyError == nil {
		t.Errorf("state %+v", s)
	}
	declared(t, quick(url))
	testkit.Eventually(t, patience, func() error {
		if s := api.State(); s.Topology != TopologyOK || s.TopologyError != nil {
			return fmt.Errorf("state %+v", s)
		}
		return nil
	})
	newAdmin(t, url).do(func(ch *amqp.Channel) error {
		_, err := ch.QueueDelete(QueuePayments, false, false, false)
		return err
	})
	// Both see it; the worker heals it.
	if err := api.Check(within(t, patience)); err != nil && !errors.Is(err, ErrTopology) {
		t.Error(err)
	}
	testkit.Eventually(t, patience, func() error { return api.Check(t.Context()) })
}

// O18: a short delay does not wait behind a long one, and what leaves a delay queue keeps its routing
// key.
func TestShortDelayDoesNotWaitBehindALongOne(t *testing.T) {
	t.Parallel()
	url := broker(t)
	cfg := quick(url)
	cfg.DelayTiers = []time.Duration{time.Second, 10 * time.Second} // far apart: long is sent a moment before short
	c := declared(t, cfg)
	if d := c.Tier(2 * time.Second); d != 10*time.Second {
		t.Fatalf("tier of 2 s is %s", d)
	}
	if d := c.Tier(time.Hour); d != 10*time.Second {
		t.Fatalf("tier of 1 h is %s", d)
	}
	long, short := OrderExpired([]orderT{anOrder(1)}), OrderExpired([]orderT{anOrder(2)})
	began := time.Now()
	must(t, c.Publish(t.Context(), DelayExchange(c.Tier(10*time.Second)), long))
	must(t, c.Publish(t.Context(), DelayExchange(c.Tier(time.Second)), short))
	a := newAdmin(t, url)
	first := a.get(QueueRollbacks)
	if e := time.Since(began); first.MessageId != short.ID || first.RoutingKey != KeyOrderExpired || e < 900*time.Millisecond || e > 20*time.Second {
		t.Errorf("first %q under %q after %s", first.MessageId, first.RoutingKey, e)
	}
	second := a.get(QueueRollbacks)
	if e := time.Since(began); second.MessageId != long.ID || e < 9900*time.Millisecond || e > 40*time.Second {
		t.Errorf("second %q after %s", second.MessageId, e)
	}
}

func TestMismatchIsReadFromTheBrokersWords(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		text string
		want TopologyMismatchError
	}{
		{
			"PRECONDITION_FAILED - inequivalent arg 'x-message-ttl' for queue 'q' in vhost '/': received the value '1000' of type 'long' but current is the value '5000' of type 'signedint'",
			TopologyMismatchError{Argument: "x-message-ttl", Wanted: "1000", Found: "5000"},
		},
		{
			"PRECONDITION_FAILED - inequivalent arg 'x-overflow' for queue 'q' in vhost '/': received none but current is the value 'drop-head' of type 'longstr'",
			TopologyMismatchError{Argument: "x-overflow", Wanted: "none", Found: "drop-head"},
		},
		{
			"PRECONDITION_FAILED - inequivalent arg 'durable' for queue 'q' in vhost '/': received 'true' but current is 'false'",
			TopologyMismatchError{Argument: "durable", Wanted: "true", Found: "false"},
		},
		{"PRECONDITION_FAILED - something new", TopologyMismatchError{}},
	} {
		got := mismatch("q", tc.text)
		tc.want.Queue, tc.want.Text = "q", tc.text
		if *got != tc.want {
			t.Errorf("%q: %+v", tc.text, *got)
		}
		if got.Error() == "" {
			t.Error("no text")
		}
	}
}
