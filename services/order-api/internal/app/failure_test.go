package app

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"seckill/pkg/messaging"
	"seckill/pkg/order"
	"seckill/pkg/stock"
	"seckill/pkg/testkit"
)

// brokerThrough is the broker's URL by way of a proxy.
func (w *world) brokerThrough() (*testkit.Proxy, string) {
	w.t.Helper()
	u, err := url.Parse(w.amqp)
	if err != nil {
		w.t.Fatal(err)
	}
	p := testkit.NewProxy(w.t, u.Host)
	u.Host = p.Addr
	return p, u.String()
}

// surely buys one piece from an impatient replica whose store is there. With a key he may ask again.
func (r *replica) surely(activity, user string) (a answer) {
	r.w.t.Helper()
	eventually(r.w.t, func() error {
		if a = r.buy(activity, user, 1, "surely"); a.status != 202 {
			return fmt.Errorf("%s", a)
		}
		return nil
	})
	return a
}

func within(t *testing.T, d time.Duration, what string, f func() answer) answer {
	t.Helper()
	start := time.Now()
	a := f()
	if took := time.Since(start); took > d {
		t.Errorf("%s took %s: %s", what, took, a)
	}
	return a
}

// P5, C1, O11 (the api's half): with the broker gone, a click is answered as ever, and its outbox entry stays.
func TestWithoutABrokerClicksAreAnsweredAndCallersThatNeedItAreToldToRetry(t *testing.T) {
	t.Parallel()
	w := newWorldWithBroker(t)
	w.declare()
	proxy, through := w.brokerThrough()
	const publish = time.Second
	r := w.replica(func(c *Config) {
		c.RabbitMQ.URL = through
		c.Checkout.PublishTimeout = publish
		c.Checkout.HandoffQueue, c.Checkout.HandoffInFlight = 16, 4
	}).ready()
	const buyers = 200
	sale := w.sale("sale", pools("mug", map[string]int{"national": buyers + 10}))
	first := r.buy("sale", "first", 1, "")
	// Stalled first: only on a connection that is there does a publish wait for its confirm.
	for _, name := range []string{"stalled", "cut"} {
		map[string]func(){"stalled": proxy.Stall, "cut": proxy.Cut}[name]()
		before := runtime.NumGoroutine()
		var got []answer
		var took [buyers / 2]time.Duration
		for round := range 5 {
			got = append(got, together(buyers/10, func(i int) answer {
				start := time.Now()
				defer func() { took[round*buyers/10+i] = time.Since(start) }()
				return within(t, inTime, "click", func() answer {
					return r.must(r.purchase("sale", fmt.Sprintf("%s-%d-%d", name, round, i), 1, ""))
				})
			})...)
		}
		// Any of them may have met a busy moment of the machine; had they waited for the broker, all would have.
		if quickest := slices.Min(took[:]); quickest >= publish {
			t.Errorf("broker %s: each click took %s or more", name, quickest)
		}
		if n := len(accepted(got)); n != buyers/2 {
			t.Fatalf("broker %s: %d of %d accepted; %s", name, n, buyers/2, got[0])
		}
		body := payment(first.orderID(), 1999, "CNY", "txn")
		a := within(t, inTime, "callback", func() answer { return r.pay(body, signed(hookSecret, "wh", time.Now(), body)) })
		if a.status != 503 || a.code() != "temporarily_unavailable" {
			t.Errorf("broker %s, callback: %s", name, a)
		}
		a = within(t, inTime, "cancel", func() answer {
			return r.do(call{method: "DELETE", path: "/v1/orders/" + first.orderID(), token: token("first")})
		})
		if a.status != 503 || a.code() != "temporarily_unavailable" {
			t.Errorf("broker %s, cancel: %s", name, a)
		}
		eventually(t, func() error { // the broker stays away meanwhile
			if code, body := r.ops("/readyz"); code != 200 {
				return fmt.Errorf("broker %s: a missing broker is no reason to be not ready: %s", name, body)
			}
			return nil
		})
		w.http.CloseIdleConnections()
		eventually(t, func() error {
			if n := runtime.NumGoroutine(); n > before+20 {
				return fmt.Errorf("%d goroutines, %d before", n, before)
			}
			return nil
		})
	}
	if left := w.left(sale); left != 9 {
		t.Errorf("%d left", left)
	}
	stats, err := w.stock.OutboxStats(context.Background(), "sale", 0)
	if err != nil || stats.Waiting != buyers+1 {
		t.Errorf("outbox: %+v %v", stats, err)
	}
	proxy.Resume()
	body := payment(first.orderID(), 1999, "CNY", "txn")
	eventually(t, func() error {
		if a := r.pay(body, signed(hookSecret, "wh", time.Now(), body)); a.status != 202 {
			return fmt.Errorf("%s", a)
		}
		return nil
	})
}

// R12, C3: the reply is lost, the buyer is given the order id, and the status call tells.
func TestAnUnknownOutcomeNamesTheOrder(t *testing.T) {
	t.Parallel()
	const buyer = "reply-is-lost"
	w := newWorld(t)
	proxy := testkit.NewProxy(t, w.env.Addr)
	r := w.replica(impatient, func(c *Config) { c.Redis.Addrs = []string{proxy.Addr} }).ready()
	sale := w.sale("sale")
	if a := r.do(call{method: "GET", path: "/v1/activities/sale"}); a.status != 200 {
		t.Fatal(a)
	}
	r.surely("sale", "first")     // from now on Redis knows the script
	proxy.DropRepliesAfter(buyer) // only his reservation names him
	a := within(t, inTime, "click", func() answer { return r.buy("sale", buyer, 1, "") })
	if a.status != 503 || a.code() != "temporarily_unavailable" || a.orderID() == "" {
		t.Fatalf("%s", a)
	}
	proxy.Resume()
	eventually(t, func() error {
		s := r.do(call{method: "GET", path: "/v1/orders/" + a.orderID(), token: token(buyer)})
		if s.status != 200 || s.fields["status"] != "reserved" {
			return fmt.Errorf("%s", s)
		}
		return nil
	})
	if left := w.left(sale); left != 18 {
		t.Errorf("%d left", left)
	}
	if b := r.buy("sale", buyer, 1, ""); b.code() != "limit_reached" || fmt.Sprint(b.fields["order_ids"]) != "["+a.orderID()+"]" {
		t.Errorf("he clicks again: %s", b)
	}
}

// C4: the client has gone; the order goes on.
func TestAClientThatHasGoneStillHasHisOrder(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	proxy := testkit.NewProxy(t, w.env.Addr)
	r := w.replica(func(c *Config) { c.Redis.Addrs = []string{proxy.Addr} }).ready()
	w.sale("sale")
	if a := r.do(call{method: "GET", path: "/v1/activities/sale"}); a.status != 200 {
		t.Fatal(a)
	}
	proxy.Stall()
	conn, err := net.Dial("tcp", r.Addr())
	if err != nil {
		t.Fatal(err)
	}
	body := `{"sku_id":"mug","quantity":1}`
	if _, err := fmt.Fprintf(conn, "POST /v1/activities/sale/orders HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s",
		token("u1"), len(body), body); err != nil {
		t.Fatal(err)
	}
	// He leaves when his request waits for the store.
	eventually(t, func() error {
		if r.checkout.InFlight() == 0 {
			return errors.New("not there yet")
		}
		return nil
	})
	_ = conn.Close()
	proxy.Resume()
	eventually(t, func() error {
		mine := r.do(call{method: "GET", path: "/v1/activities/sale/orders/mine", token: token("u1")})
		if list, _ := mine.fields["orders"].([]any); len(list) != 1 {
			return fmt.Errorf("%s", mine)
		}
		return nil
	})
	// It was handed over as any other, and its outbox entry waits for the worker.
	eventually(t, func() error {
		if n := r.metric(`seckill_handoff_orders_total{result="failed"}`); n != 1 {
			return fmt.Errorf("%v handed over", n)
		}
		return nil
	})
	if stats, err := w.stock.OutboxStats(context.Background(), "sale", 0); err != nil || stats.Waiting != 1 {
		t.Errorf("outbox: %+v %v", stats, err)
	}
}

func TestWithoutRedisEveryAnswerIsUnavailableInTimeAndReadinessFollows(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	proxy := testkit.NewProxy(t, w.env.Addr)
	r := w.replica(impatient, func(c *Config) { c.Redis.Addrs = []string{proxy.Addr} }).ready()
	w.sale("sale")
	bought := r.surely("sale", "u0")
	for name, fail := range map[string]func(){"cut": proxy.Cut, "stalled": proxy.Stall} {
		fail()
		body := payment(bought.orderID(), 1999, "CNY", "txn")
		calls := map[string]call{
			"click":        r.purchase("sale", "u1", 1, ""),
			"keyed click":  r.purchase("sale", "u1", 1, "k"),
			"other sale":   r.purchase("unknown", "u1", 1, ""),
			"status":       {method: "GET", path: "/v1/orders/" + bought.orderID(), token: token("u0")},
			"mine":         {method: "GET", path: "/v1/activities/sale/orders/mine", token: token("u0")},
			"cancel":       {method: "DELETE", path: "/v1/orders/" + bought.orderID(), token: token("u0")},
			"callback":     {method: "POST", path: "/v1/payments/callback", body: body, header: signed(hookSecret, "wh", time.Now(), body)},
			"other status": {method: "GET", path: "/v1/activities/unknown"},
		}
		var wg sync.WaitGroup
		for what, c := range calls {
			wg.Go(func() {
				a := within(t, inTime, what, func() answer { return r.must(c) })
				if a.status != 503 || a.code() != "temporarily_unavailable" {
					t.Errorf("redis %s, %s: %s", name, what, a)
				}
			})
		}
		wg.Wait()
	}
	eventually(t, func() error {
		if code, body := r.ops("/readyz"); code != 503 || !strings.Contains(body, `"detail":"away"`) {
			return fmt.Errorf("%d %s", code, body)
		}
		return nil
	})
	if code, _ := r.ops("/livez"); code != 200 {
		t.Error("a missing Redis is no reason to be killed")
	}
	proxy.Resume()
	eventually(t, func() error {
		if code, body := r.ops("/readyz"); code != 200 {
			return fmt.Errorf("%s", body)
		}
		if a := r.buy("sale", "u9", 1, "again"); a.status != 202 {
			return fmt.Errorf("%s", a)
		}
		return nil
	})
}

func TestReadinessNamesAMissingTopology(t *testing.T) {
	t.Parallel()
	w := newWorldWithBroker(t)
	r := w.replica(func(c *Config) { c.RabbitMQ.TopologyInterval = 200 * time.Millisecond })
	eventually(t, func() error {
		if code, body := r.ops("/readyz"); code != 503 || !strings.Contains(body, `"detail":"missing`) {
			return fmt.Errorf("%d %s", code, body)
		}
		return nil
	})
	w.declare()
	r.ready()
}

// O31 (the api's half), P2: no accepted answer is lost when the process is stopped under load.
func TestStoppingUnderLoadLosesNoAcceptedAnswer(t *testing.T) {
	t.Parallel()
	w := newWorldWithBroker(t)
	published := w.collect(w.declare(), messaging.QueueOrders)
	r := w.replica(func(c *Config) {
		// Clients that saturate the machine go on meanwhile, and the answer of /readyz has to come through.
		c.HTTP.DrainDelay = 5 * time.Second
		c.Checkout.HandoffQueue = 100_000 // what does not fit would be the relay's, and none runs here
	}).ready()
	w.sale("sale", pools("mug", map[string]int{"national": 100_000}))
	var (
		mu       sync.Mutex
		ids      []string
		answered atomic.Int64
		other    atomic.Value
		wg       sync.WaitGroup
		quit     = make(chan struct{})
	)
	for c := range 16 {
		wg.Go(func() {
			for i := 0; ; i++ {
				select {
				case <-quit:
					return
				default:
				}
				a, err := r.try(r.purchase("sale", fmt.Sprintf("c%d-%d", c, i), 1, ""))
				if err != nil {
					return // not accepted any more
				}
				if a.status != 202 {
					other.Store(a.String())
					return
				}
				mu.Lock()
				ids = append(ids, a.orderID())
				mu.Unlock()
				answered.Add(1)
			}
		})
	}
	eventually(t, func() error {
		if n := answered.Load(); n < 200 {
			return fmt.Errorf("%d answered", n)
		}
		return nil
	})
	stopped := make(chan error, 1)
	go func() { stopped <- r.stop() }()
	atRed := int64(-1)
	eventually(t, func() error {
		if code, body := r.ops("/readyz"); code != 503 || !strings.Contains(body, "draining") {
			return fmt.Errorf("%d %s", code, body)
		}
		atRed = answered.Load()
		return nil
	})
	if err := <-stopped; err != nil {
		t.Errorf("stop: %v", err)
	}
	close(quit)
	wg.Wait()
	if s := other.Load(); s != nil {
		t.Errorf("an answer while stopping: %v", s)
	}
	if answered.Load() == atRed {
		t.Error("nothing was answered any more after readiness went red")
	}
	stats, err := w.stock.OutboxStats(context.Background(), "sale", 0)
	if err != nil {
		t.Fatal(err)
	}
	// Each reservation was answered: no request that was read has been cut off.
	if stats.Waiting != len(ids) {
		t.Errorf("%d reserved, %d answered", stats.Waiting, len(ids))
	}
	wantPublished(t, published, ids)
}

// O31: also with the broker down at that moment.
func TestStoppingWithoutABrokerEndsInTime(t *testing.T) {
	t.Parallel()
	w := newWorldWithBroker(t)
	w.declare()
	proxy, through := w.brokerThrough()
	r := w.replica(func(c *Config) {
		c.RabbitMQ = messaging.Config{URL: through} // and the other deadlines of production
		c.Checkout.PublishTimeout, c.HTTP.StopTimeout = 0, 0
	}).ready()
	w.sale("sale")
	proxy.Stall()
	if a := r.buy("sale", "u1", 1, ""); a.status != 202 {
		t.Fatal(a)
	}
	start := time.Now()
	if err := r.stop(); err != nil {
		t.Errorf("stop: %v", err)
	}
	if took := time.Since(start); took > 14*time.Second {
		t.Errorf("took %s", took)
	}
	if stats, err := w.stock.OutboxStats(context.Background(), "sale", 0); err != nil || stats.Waiting != 1 {
		t.Errorf("outbox: %+v %v", stats, err)
	}
}

func TestTooMuchAtOnceIsRefusedAtOnce(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	proxy := testkit.NewProxy(t, w.env.Addr)
	r := w.replica(func(c *Config) {
		c.Redis.Addrs = []string{proxy.Addr}
		c.Checkout.MaxInFlight = 2
	}).ready()
	w.sale("sale", limit(100))
	if a := r.buy("sale", "u0", 1, ""); a.status != 202 {
		t.Fatal(a)
	}
	proxy.Stall()
	held := make(chan answer, 2)
	for i := range cap(held) {
		go func() { held <- r.must(r.purchase("sale", fmt.Sprintf("held%d", i), 1, "")) }()
	}
	eventually(t, func() error {
		if n := r.checkout.InFlight(); n != 2 {
			return fmt.Errorf("%d in flight", n)
		}
		return nil
	})
	a := within(t, time.Second, "a third", func() answer { return r.buy("sale", "u1", 1, "") })
	if a.status != 503 || a.code() != "temporarily_unavailable" || a.orderID() != "" {
		t.Errorf("%s", a)
	}
	proxy.Resume()
	for range cap(held) {
		<-held
	}
}

func TestAUsersRateIsBoundedIfConfigured(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	r := w.replica(func(c *Config) { c.Checkout.UserRate = 3 }).ready()
	w.sale("sale", limit(100))
	got := together(20, func(int) answer { return r.must(r.purchase("sale", "eager", 1, "")) })
	if n := count(got, 429, "rate_limited"); n == 0 || n+len(accepted(got)) != 20 {
		t.Errorf("%d limited, %d accepted; another answer: %s", n, len(accepted(got)), another(got, "", "rate_limited"))
	}
	if a := r.buy("sale", "other", 1, ""); a.status != 202 {
		t.Errorf("another user: %s", a)
	}
}

// O29: slow clients are closed, and buyers do not notice them.
func TestSlowHeadersAreClosedWhileBuyersGoOn(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	r := w.replica().ready()
	w.sale("sale", pools("mug", map[string]int{"national": 1000}))
	const slow = 500
	conns := make([]net.Conn, slow)
	for i := range conns {
		c, err := net.Dial("tcp", r.Addr())
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = c.Close() }()
		conns[i] = c
	}
	start := time.Now()
	var wg sync.WaitGroup
	closed := make([]time.Duration, slow)
	for i, c := range conns {
		wg.Go(func() {
			text := "POST /v1/activities/sale/orders HTTP/1.1\r\nX-Slow: " + strings.Repeat("a", 100)
			gone := make(chan struct{})
			wg.Go(func() {
				tick := time.NewTicker(time.Second) // the attack itself: one byte a second
				defer tick.Stop()
				for _, b := range []byte(text) {
					if _, err := c.Write([]byte{b}); err != nil {
						return
					}
					select {
					case <-tick.C:
					case <-gone:
						return
					}
				}
			})
			_ = c.SetReadDeadline(start.Add(time.Minute))
			_, _ = io.Copy(io.Discard, c)
			closed[i] = time.Since(start)
			close(gone)
			_ = c.Close()
		})
	}
	var worst time.Duration
	for i := 0; time.Since(start) < 5*time.Second; i++ {
		at := time.Now()
		if a := r.buy("sale", fmt.Sprintf("u%d", i%1000), 1, ""); a.status != 202 && a.code() != "limit_reached" {
			t.Fatalf("%s", a)
		}
		worst = max(worst, time.Since(at))
	}
	wg.Wait()
	if m := slices.Max(closed); m > 10*time.Second {
		t.Errorf("a slow connection was closed after %s", m)
	}
	if worst > 3*time.Second {
		t.Errorf("a buyer waited %s", worst)
	}
}

// O32: what is measured does not grow with users, orders or paths.
func TestSeriesDoNotGrowWithUsers(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	r := w.replica().ready()
	w.sale("sale", pools("mug", map[string]int{"national": 100}))
	series := func() (n int) {
		_, body := r.ops("/metrics")
		for line := range strings.Lines(body) {
			if !strings.HasPrefix(line, "#") {
				n++
			}
		}
		return n
	}
	crowd := func(name string, n int) {
		got := together(50, func(c int) answer {
			var last answer
			for i := range n / 50 {
				user := fmt.Sprintf("%s-%d-%d", name, c, i)
				last = r.must(r.purchase("sale", user, 1, "key-"+user))
				r.must(call{method: "GET", path: "/v1/orders/sale-0-" + fmt.Sprintf("01ARZ3NDEKTSV4RRFFQ69G%04d", c), token: token(user)})
				r.must(call{method: "GET", path: "/nothing/" + user})
				r.must(call{method: "GET", path: "/v1/activities/" + user[:min(len(user), 32)]})
				r.must(call{method: "BREW" + fmt.Sprint(c), path: "/v1/orders/x"})
			}
			return last
		})
		if got[0].status == 0 {
			t.Fatalf("%s", got[0])
		}
	}
	crowd("first", 150)
	before := series()
	crowd("then", 600)
	if after := series(); after > before+10 || before < 50 {
		t.Errorf("%d series before, %d after", before, after)
	}
	_, body := r.ops("/metrics")
	for _, word := range []string{"then-", "key-", "first-", "01ARZ3", "BREW"} {
		if strings.Contains(body, word) {
			t.Errorf("%q is in the metrics", word)
		}
	}
	for _, name := range []string{
		`seckill_reservations_total{result="accepted"} 100`, `seckill_reservations_total{result="sold_out"} `, "seckill_reserve_duration_seconds_count ",
		"seckill_handoff_queue_length ", `seckill_http_requests_total{method="other",route="unmatched",status="405"} `,
	} {
		if !strings.Contains(body, name) {
			t.Errorf("%q is not in the metrics", name)
		}
	}
}

// At most one script call per reservation, and none for the losing crowd.
func TestOneScriptCallPerReservationAndNoneForTheLosingCrowd(t *testing.T) {
	t.Parallel()
	server := testkit.StartRedis(t)
	w := newWorldOn(t, testkit.RedisEnv{Addr: server.Addr}, noBroker)
	// A busy test machine may not get to refresh five times a second.
	r := w.replica(func(c *Config) { c.Checkout.SoldOutMaxAge = 10 * time.Second }).ready()
	sale := w.sale("sale", pools("mug", map[string]int{"national": 50, "beijing": 1}), limit(50))
	calls := func() (n int) {
		t.Helper()
		text, err := w.redis.Info(context.Background(), "commandstats").Result()
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(text) {
			for _, cmd := range []string{"evalsha", "eval"} {
				if v, ok := strings.CutPrefix(line, "cmdstat_"+cmd+":calls="); ok {
					var c int
					_, _ = fmt.Sscan(strings.SplitN(v, ",", 2)[0], &c)
					n += c
				}
			}
		}
		return n
	}
	if a := r.buy("sale", "warm-up", 1, ""); a.status != 202 { // loads the script
		t.Fatal(a)
	}
	before := calls()
	got := together(49, func(i int) answer { return r.must(r.purchase("sale", fmt.Sprintf("u%d", i), 1, "")) })
	if len(accepted(got)) != 49 {
		t.Fatalf("%s", got[0])
	}
	if n := calls() - before; n < 1 || n > 49 {
		t.Errorf("%d script calls for 49 reservations", n)
	}
	// Sold out in his region: remembered within 200 ms.
	eventually(t, func() error {
		before := calls()
		if a := r.buy("sale", "late", 1, ""); a.code() != "sold_out" {
			return fmt.Errorf("%s", a)
		}
		if n := calls() - before; n != 0 {
			return fmt.Errorf("%d calls", n)
		}
		return nil
	})
	before = calls()
	got = nil
	for round := range 10 {
		got = append(got, together(20, func(i int) answer { return r.must(r.purchase("sale", fmt.Sprintf("v%d-%d", round, i), 1, "")) })...)
	}
	if n := count(got, 409, "sold_out"); n != 200 {
		t.Errorf("%d sold out; another answer: %s", n, another(got, "sold_out"))
	}
	if n := calls() - before; n > 20 {
		t.Errorf("%d script calls for a losing crowd of 200", n)
	}
	before = calls()
	if a := r.buy("sale", "late", 1, "k"); a.code() != "sold_out" {
		t.Errorf("%s", a)
	}
	// Its key is looked up by a plain read.
	if n := calls() - before; n != 0 {
		t.Errorf("%d script calls for a request with a key", n)
	}
	// The other region's pool is not sold out.
	if a := r.do(call{method: "POST", path: "/v1/activities/sale/orders", token: token("b"), body: `{"sku_id":"mug","quantity":1,"region":"beijing"}`}); a.status != 202 {
		t.Errorf("other pool: %s", a)
	}
	// A unit comes back: it is on sale again within 200 ms and a little.
	id, _ := order.ParseID(gotFirst(r, "sale", "warm-up"))
	if _, err := w.stock.Release(context.Background(), []stock.Release{{
		ID: id, User: "warm-up", SKU: "mug", Pool: "national", Quantity: 1, To: order.Cancelled, Reason: order.ReasonUserCancelled,
	}}); err != nil {
		t.Fatal(err)
	}
	eventually(t, func() error {
		if a := r.buy("sale", "lucky", 1, ""); a.status != 202 {
			return fmt.Errorf("%s", a)
		}
		return nil
	})
	if left := w.left(sale); left != 0 {
		t.Errorf("%d left", left)
	}
}

func gotFirst(r *replica, activity, user string) string {
	r.w.t.Helper()
	mine := r.do(call{method: "GET", path: "/v1/activities/" + activity + "/orders/mine", token: token(user)})
	list, _ := mine.fields["orders"].([]any)
	if len(list) == 0 {
		r.w.t.Fatalf("%s has no orders: %s", user, mine)
	}
	return list[0].(map[string]any)["order_id"].(string)
}

func TestTheDocumentAndTheHeadersOfAnswers(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	r := w.replica(func(c *Config) { c.HTTP.CORSOrigins = []string{"https://shop.example"} }).ready()
	w.sale("sale")
	if _, doc := openAPI(); doc.OpenAPI != "3.1.0" || doc.Validate(context.Background()) != nil {
		t.Errorf("document: %v", doc.Validate(context.Background()))
	}
	if a := r.do(call{method: "GET", path: "/openapi.yaml"}); a.status != 200 || !strings.HasPrefix(string(a.body), "openapi: 3.1.0") {
		t.Errorf("%d", a.status)
	}
	a := r.do(call{method: "GET", path: "/v1/activities/sale", header: http.Header{"X-Request-Id": {"req-1"}, "Origin": {"https://shop.example"}}})
	if a.header.Get("X-Request-Id") != "req-1" || a.header.Get("Access-Control-Allow-Origin") != "https://shop.example" {
		t.Errorf("%v", a.header)
	}
	a = r.do(call{method: "GET", path: "/v1/activities/sale", header: http.Header{"X-Request-Id": {"bad id\t"}, "Origin": {"https://evil.example"}}})
	if id := a.header.Get("X-Request-Id"); len(id) != 20 || a.header.Get("Access-Control-Allow-Origin") != "" {
		t.Errorf("%v", a.header)
	}
	req, err := http.NewRequest(http.MethodOptions, "http://"+r.Addr()+"/v1/activities/sale/orders", nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Origin", "https://shop.example")
	req.Header.Set("Access-Control-Request-Method", "POST")
	resp, err := w.http.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	_ = resp.Body.Close()
	if resp.StatusCode != http.StatusNoContent || !strings.Contains(resp.Header.Get("Access-Control-Allow-Headers"), "Idempotency-Key") {
		t.Errorf("preflight: %d %v", resp.StatusCode, resp.Header)
	}
}
