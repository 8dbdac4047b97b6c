package app

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/golang-jwt/jwt/v5"

	"seckill/pkg/messaging"
	"seckill/pkg/order"
	"seckill/pkg/stock"
	"seckill/pkg/testkit"
)

// together runs f n times at once and returns the answers.
func together(n int, f func(i int) answer) []answer {
	out := make([]answer, n)
	start := make(chan struct{})
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() {
			<-start
			out[i] = f(i)
		})
	}
	close(start)
	wg.Wait()
	return out
}

// must is do for goroutines: a broken call becomes an answer that fits nothing.
func (r *replica) must(c call) answer {
	a, err := r.try(c)
	if err != nil {
		return answer{body: []byte(err.Error())}
	}
	return a
}

func count(as []answer, status int, code string) (n int) {
	for _, a := range as {
		if a.status == status && a.code() == code {
			n++
		}
	}
	return n
}

// another is the first answer with none of these codes.
func another(as []answer, codes ...string) answer {
	for _, a := range as {
		if a.status == 0 || !slices.Contains(codes, a.code()) {
			return a
		}
	}
	return answer{}
}

func accepted(as []answer) (ids []string) {
	for _, a := range as {
		if a.status == http.StatusAccepted {
			ids = append(ids, a.orderID())
		}
	}
	return ids
}

// wantPublished waits until exactly these orders have been published, each once.
func wantPublished(t *testing.T, in *inbox, ids []string) {
	t.Helper()
	want := slices.Sorted(slices.Values(ids))
	eventually(t, func() error {
		var got []string
		for _, o := range in.orders(t) {
			got = append(got, o.ID.String())
		}
		slices.Sort(got)
		if !slices.Equal(got, want) {
			return fmt.Errorf("%d published, %d wanted", len(got), len(want))
		}
		return nil
	})
}

// O01 (the api's half).
func TestTwoHundredBuyersTwentyPieces(t *testing.T) {
	t.Parallel()
	w := newWorldWithBroker(t)
	published := w.collect(w.declare(), messaging.QueueOrders)
	replicas := []*replica{w.replica().ready(), w.replica().ready()}
	for name, tc := range map[string]struct{ quantity, limit, accepted, left int }{
		"one each":   {1, 1, 20, 0},
		"three each": {3, 3, 6, 2},
	} {
		t.Run(name, func(t *testing.T) {
			id := strings.ReplaceAll(name, " ", "-")
			sale := w.sale(id, limit(tc.limit))
			got := together(200, func(i int) answer {
				return replicas[i%2].must(replicas[i%2].purchase(id, fmt.Sprintf("u%d", i), tc.quantity, ""))
			})
			ids := accepted(got)
			if len(ids) != tc.accepted || count(got, 409, "sold_out") != 200-tc.accepted {
				t.Fatalf("%d accepted, %d sold out, %d limit_reached; another answer: %s", len(ids), count(got, 409, "sold_out"),
					count(got, 409, "limit_reached"), another(got, "", "sold_out", "limit_reached"))
			}
			slices.Sort(ids)
			if len(slices.Compact(ids)) != tc.accepted {
				t.Error("an order id was given twice")
			}
			if left := w.left(sale); left != tc.left {
				t.Errorf("%d left, want %d", left, tc.left)
			}
			if tc.left > 0 {
				// Asking for more than is left does not close the sale for others.
				if a := replicas[0].buy(id, "late", tc.left, ""); a.status != 202 {
					t.Errorf("a later buyer of what is left: %s", a)
				}
			}
			for i, a := range got {
				if a.status == 202 {
					s := replicas[i%2].do(call{method: "GET", path: a.header.Get("Location"), token: token(fmt.Sprintf("u%d", i))})
					if s.status != 200 || s.orderID() != a.orderID() {
						t.Errorf("buyer %d asks for his order: %s", i, s)
					}
				}
			}
		})
	}
	eventually(t, func() error {
		if n := len(published.orders(t)); n != 27 {
			return fmt.Errorf("%d published", n)
		}
		return nil
	})
}

// O02, with its variants.
func TestTheSameBuyerClicksFiftyTimes(t *testing.T) {
	t.Parallel()
	w := newWorldWithBroker(t)
	published := w.collect(w.declare(), messaging.QueueOrders)
	a, b := w.replica().ready(), w.replica().ready()
	var all []string

	sale := w.sale("clicks", pools("mug", map[string]int{"national": 10}))
	got := together(50, func(i int) answer {
		r := []*replica{a, b}[i%2]
		return r.must(r.purchase("clicks", "u1", 1, ""))
	})
	ids := accepted(got)
	if len(ids) != 1 || count(got, 409, "limit_reached") != 49 || w.left(sale) != 9 {
		t.Fatalf("%d accepted, %d limit_reached, %d left; another answer: %s", len(ids), count(got, 409, "limit_reached"), w.left(sale),
			another(got, "", "limit_reached"))
	}
	all = append(all, ids...)
	for _, g := range got {
		if g.code() == "limit_reached" && fmt.Sprint(g.fields["order_ids"]) != fmt.Sprint(ids) {
			t.Errorf("limit_reached does not name %v: %s", ids, g)
		}
	}
	if other := a.buy("clicks", "u2", 1, ""); other.status != 202 {
		t.Errorf("another buyer: %s", other)
	} else {
		all = append(all, other.orderID())
	}

	sale = w.sale("twice-two", limit(3), pools("mug", map[string]int{"national": 10}))
	got = together(2, func(i int) answer {
		r := []*replica{a, b}[i]
		return r.must(r.purchase("twice-two", "u1", 2, ""))
	})
	if n := len(accepted(got)); n != 1 || count(got, 409, "limit_reached") != 1 || w.left(sale) != 8 {
		t.Errorf("limit 3, twice two: %s and %s, %d left", got[0], got[1], w.left(sale))
	}
	all = append(all, accepted(got)...)

	sale = w.sale("one-key", limit(3), pools("mug", map[string]int{"national": 10}))
	got = together(20, func(i int) answer {
		r := []*replica{a, b}[i%2]
		return r.must(r.purchase("one-key", "u1", 1, "click-1"))
	})
	ids = slices.Compact(slices.Sorted(slices.Values(accepted(got))))
	if len(accepted(got)) != 20 || len(ids) != 1 || w.left(sale) != 9 {
		t.Errorf("one key: %d accepted, orders %v, %d left", len(accepted(got)), ids, w.left(sale))
	}
	all = append(all, ids...)
	// What was answered again was not handed over again.
	wantPublished(t, published, all)
}

// O02 variant c: the first request hangs in replica A, the proxy sends it to B as well.
func TestTheSameKeyAtTwoReplicasIsOneOrder(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	proxy := testkit.NewProxy(t, w.env.Addr)
	a := w.replica(func(c *Config) { c.Redis.Addrs = []string{proxy.Addr} }).ready()
	b := w.replica().ready()
	sale := w.sale("sale")
	if g := a.do(call{method: "GET", path: "/v1/activities/sale"}); g.status != 200 {
		t.Fatal(g)
	}
	proxy.Stall()
	first := make(chan answer, 1)
	go func() { first <- a.must(a.purchase("sale", "u1", 1, "k")) }()
	second := b.buy("sale", "u1", 1, "k")
	proxy.Resume()
	held := <-first
	if second.status != 202 || held.status != 202 || held.orderID() != second.orderID() {
		t.Errorf("A: %s, B: %s", held, second)
	}
	if w.left(sale) != 19 {
		t.Errorf("%d left", w.left(sale))
	}
}

func TestAnIdempotencyKeyGivesTheFirstAnswerAgain(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	r := w.replica().ready()
	sale := w.sale("sale", limit(5), pools("mug", map[string]int{"national": 3}))
	first := r.buy("sale", "u1", 1, "abc")
	quoted := r.buy("sale", "u1", 1, `"abc"`)
	explicit := r.do(call{method: "POST", path: "/v1/activities/sale/orders", token: token("u1"), key: "abc",
		body: ` {"region":"national", "quantity":1, "sku_id":"mug"} `})
	for _, a := range []answer{first, quoted, explicit} {
		if a.status != 202 || a.orderID() != first.orderID() || a.header.Get("Location") != "/v1/orders/"+first.orderID() {
			t.Errorf("%s, want order %s", a, first.orderID())
		}
	}
	if a := r.buy("sale", "u1", 2, "abc"); a.status != 422 || a.code() != "idempotency_key_reused" {
		t.Errorf("the same key, another body: %s", a)
	}
	if a := r.buy("sale", "u2", 2, "abc"); a.status != 202 || a.orderID() == first.orderID() {
		t.Errorf("another user's key of the same name: %s", a)
	}
	if left := w.left(sale); left != 0 {
		t.Fatalf("%d left", left)
	}
	// Sold out by now: memory answers for those without an earlier answer only.
	eventually(t, func() error {
		if a := r.buy("sale", "u3", 1, ""); a.code() != "sold_out" {
			return fmt.Errorf("%s", a)
		}
		return nil
	})
	if a := r.buy("sale", "u1", 1, "abc"); a.status != 202 || a.orderID() != first.orderID() {
		t.Errorf("earlier answer after the sale was sold out: %s", a)
	}
	// The order has moved on: the same order, its present status.
	id, _ := order.ParseID(first.orderID())
	if _, err := w.stock.Confirm(context.Background(), []stock.Confirmation{{ID: id, To: order.Pending}}); err != nil {
		t.Fatal(err)
	}
	if a := r.buy("sale", "u1", 1, "abc"); a.status != 202 || a.fields["status"] != "pending" {
		t.Errorf("replay after the confirm: %s", a)
	}
}

func TestTheUnitsComeFromTheRegionsPoolThenFromItsFallbacks(t *testing.T) {
	t.Parallel()
	w := newWorldWithBroker(t)
	published := w.collect(w.declare(), messaging.QueueOrders)
	r := w.replica().ready()
	w.sale("sale", limit(9), pools("mug", map[string]int{"beijing": 1, "national": 1}), func(a *stock.Activity) {
		a.RegionFallback = map[string][]string{"beijing": {"national"}, "tianjin": {"beijing", "national"}}
		a.Buckets = 4
		for i := range a.Items {
			for p := range a.Items[i].Pools {
				a.Items[i].Pools[p] = 4 // one in each bucket
			}
		}
	})
	in := func(region string) answer {
		return r.do(call{method: "POST", path: "/v1/activities/sale/orders", token: token("u1"),
			body: fmt.Sprintf(`{"sku_id":"mug","quantity":1,"region":%q}`, region)})
	}
	var pools []any
	var got []answer
	for range 2 {
		a := in("tianjin")
		got = append(got, a)
		pools = append(pools, a.fields["pool"])
		if a.fields["region"] != "tianjin" {
			t.Errorf("region: %s", a)
		}
	}
	if fmt.Sprint(pools) != "[beijing national]" {
		t.Errorf("pools: %v", pools)
	}
	if a := in("tianjin"); a.code() != "sold_out" {
		t.Errorf("all pools of his bucket empty: %s", a)
	}
	wantPublished(t, published, accepted(got))
	for _, o := range published.orders(t) {
		if o.Region != "tianjin" || o.User != "u1" || o.UnitPriceMinor != 1999 || o.Currency != "CNY" || o.PaymentTimeout != time.Minute || o.ID.Bucket != order.Bucket("u1", 4) {
			t.Errorf("published content: %+v", o)
		}
	}
}

// O07: ids keep every digit, everywhere.
func TestNineteenDigitIdsKeepTheirDigits(t *testing.T) {
	t.Parallel()
	w := newWorldWithBroker(t)
	published := w.collect(w.declare(), messaging.QueueOrders)
	rollbacks := w.collect(w.broker(), messaging.QueueRollbacks)
	r := w.replica().ready()
	sale := w.sale("sale")
	users := []string{"1759812345678901234", "1759812345678901235", "9007199254740991", "9007199254740993", "9223372036854775807"}
	var got []answer
	for _, u := range users {
		a := r.buy("sale", u, 1, "")
		if a.status != 202 {
			t.Fatalf("user %s: %s", u, a)
		}
		got = append(got, a)
	}
	if left := w.left(sale); left != 15 {
		t.Errorf("%d left", left)
	}
	wantPublished(t, published, accepted(got))
	for i, u := range users {
		a := got[i]
		if a.fields["order_id"] != any(a.orderID()) || a.orderID() == "" {
			t.Errorf("order id is no text: %s", a)
		}
		id, err := order.ParseID(a.orderID())
		if err != nil {
			t.Fatal(err)
		}
		rec, err := w.stock.Order(context.Background(), id)
		if err != nil || rec.User != u || rec.ID.String() != a.orderID() {
			t.Errorf("record of %s: %+v %v", u, rec, err)
		}
		if c := r.do(call{method: "DELETE", path: "/v1/orders/" + a.orderID(), token: token(u)}); c.status != 202 {
			t.Errorf("cancel: %s", c)
		}
	}
	eventually(t, func() error {
		if n := len(rollbacks.all()); n != len(users) {
			return fmt.Errorf("%d cancels", n)
		}
		return nil
	})
	for _, m := range rollbacks.all() {
		c, err := messaging.DecodeCancelRequested(m)
		if err != nil || c.Order == nil {
			t.Fatalf("%+v %v", c, err)
		}
		i := slices.Index(users, c.Order.User)
		if i < 0 || c.OrderID.String() != got[i].orderID() || c.Reason != order.ReasonUserCancelled || c.Actor != "user:"+users[i] {
			t.Errorf("cancel message: %+v", c)
		}
	}
}

// O04: a Redis that has lost an open sale knows nobody's orders. It does not say that there are none.
func TestOrdersOfALostSaleAreNotSaidToBeUnknown(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	r := w.replica().ready()
	sale := w.sale("sale", func(a *stock.Activity) { a.Buckets = 2 })
	order := r.buy("sale", "u0", 1, "")
	if order.status != 202 {
		t.Fatal(order)
	}
	ctx := context.Background()
	ask := func() []answer {
		return []answer{
			r.do(call{method: "GET", path: "/v1/orders/" + order.orderID(), token: token("u0")}),
			r.do(call{method: "DELETE", path: "/v1/orders/" + order.orderID(), token: token("u0")}),
			r.do(call{method: "GET", path: "/v1/activities/sale/orders/mine", token: token("u0")}),
		}
	}
	it := w.redis.Scan(ctx, 0, w.env.Prefix+"*", 10_000).Iterator()
	for it.Next(ctx) {
		w.redis.Del(ctx, it.Val())
	}
	if err := it.Err(); err != nil {
		t.Fatal(err)
	}
	lost := func() error {
		for _, a := range ask() {
			if a.status != 503 || a.code() != "temporarily_unavailable" {
				return fmt.Errorf("%s", a)
			}
		}
		return nil
	}
	eventually(t, lost)
	// The worker makes the sale known again, cold.
	if err := w.stock.Announce(ctx, sale); err != nil {
		t.Fatal(err)
	}
	eventually(t, lost)
	if a := r.do(call{method: "GET", path: "/v1/orders/other-0-01JDXQ7K9W00000000000000AB", token: token("u0")}); a.status != 404 {
		t.Errorf("unknown sale: %s", a)
	}
}

// O04 (the api's half): lost keys are "temporarily unavailable", never "sold out" and never unknown.
func TestLostKeysAreUnavailableAndNotSoldOut(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	r := w.replica().ready()
	ctx := context.Background()
	w.sale("sale", func(a *stock.Activity) { a.Buckets = 2 })
	if a := r.buy("sale", "u0", 1, ""); a.status != 202 {
		t.Fatal(a)
	}
	unavailable := func(what string) {
		t.Helper()
		// Longer than every memory in the process: what it remembers must not turn into another answer.
		for end := time.Now().Add(time.Second); time.Now().Before(end); {
			got := together(20, func(i int) answer {
				key := ""
				if i%2 == 0 {
					key = fmt.Sprintf("k%d", i)
				}
				return r.must(r.purchase("sale", fmt.Sprintf("v%d", i), 1, key))
			})
			if n := count(got, 503, "temporarily_unavailable"); n != 20 {
				t.Fatalf("%s: %d of 20 unavailable; %s", what, n, got[0])
			}
		}
	}
	keys := func(match string) []string {
		t.Helper()
		var ks []string
		it := w.redis.Scan(ctx, 0, w.env.Prefix+match, 10_000).Iterator()
		for it.Next(ctx) {
			ks = append(ks, it.Val())
		}
		if err := it.Err(); err != nil {
			t.Fatal(err)
		}
		return ks
	}
	stocks := keys("seckill:stock:*")
	if len(stocks) != 2 {
		t.Fatalf("stock keys: %v", stocks)
	}
	if err := w.redis.Del(ctx, stocks...).Err(); err != nil {
		t.Fatal(err)
	}
	unavailable("stock keys deleted")
	if got := keys("seckill:stock:*"); len(got) != 0 {
		t.Errorf("re-created: %v", got)
	}
	for _, k := range keys("*") {
		if err := w.redis.Del(ctx, k).Err(); err != nil {
			t.Fatal(err)
		}
	}
	unavailable("everything deleted")
	if a := r.do(call{method: "GET", path: "/v1/activities/sale"}); a.status != 503 {
		t.Errorf("state of a lost activity: %s", a)
	}
	if got := keys("*"); len(got) != 0 {
		t.Errorf("written: %v", got)
	}
}

// O09: a key of the wrong type or content is an error, and nothing is half done.
func TestAKeyOfTheWrongTypeLeavesEverythingAsItWas(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	r := w.replica().ready()
	ctx := context.Background()
	sale := w.sale("sale")
	if err := w.redis.Set(ctx, w.env.Prefix+"seckill:user:limit:{sale:0}:u1", "x", 0).Err(); err != nil {
		t.Fatal(err)
	}
	before := w.fingerprint()
	for range 2 {
		if a := r.buy("sale", "u1", 1, ""); a.status != 500 || a.code() != "internal" {
			t.Errorf("%s", a)
		}
	}
	if left := w.left(sale); left != 20 {
		t.Errorf("%d left", left)
	}
	if err := w.redis.Set(ctx, w.env.Prefix+"seckill:stock:{sale:0}:mug:national", "abc", 0).Err(); err != nil {
		t.Fatal(err)
	}
	if a := r.buy("sale", "u2", 1, ""); a.status != 500 || a.code() != "internal" {
		t.Errorf("%s", a)
	}
	after := w.fingerprint()
	if len(after) != len(before) {
		t.Errorf("%d keys, %d before", len(after), len(before))
	}
	for k := range after {
		if strings.Contains(k, ":outbox:") || strings.Contains(k, ":order:") {
			t.Errorf("%s was written", k)
		}
	}
}

// O28 (the api's half): the window opens and closes by Redis' clock, on every replica alike.
func TestTheWindowGoesByRedisClock(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	rs := []*replica{w.replica().ready(), w.replica().ready()}
	now := func() time.Time {
		t.Helper()
		at, err := w.stock.Now(context.Background())
		if err != nil {
			t.Fatal(err)
		}
		return at
	}
	// Far enough away for warming and a first click, and open for long enough to be met.
	starts := now().Add(6 * time.Second).Truncate(time.Millisecond)
	ends := starts.Add(6 * time.Second)
	sale := w.sale("sale", limit(20), pools("mug", map[string]int{"national": 100}), func(a *stock.Activity) { a.StartsAt, a.EndsAt = starts, ends })
	// look asks one replica for the sale's state. Its phase goes with the time that it tells.
	nearest := time.Hour
	look := func(r *replica) answer {
		t.Helper()
		before := now()
		state := r.do(call{method: "GET", path: "/v1/activities/sale"})
		after := now()
		clock, err := time.Parse(time.RFC3339, fmt.Sprint(state.fields["server_time"]))
		if err != nil {
			t.Fatal(err)
		}
		// The replica knows Redis' clock but for half of the round trip in which it last read it.
		off := max(before.Sub(clock), clock.Sub(after), 0)
		if nearest = min(nearest, off); off > 2*time.Second {
			t.Errorf("server_time is %s away from Redis' clock", off)
		}
		want := "open"
		switch {
		case clock.Before(starts):
			want = "scheduled"
		case !clock.Before(ends):
			want = "ended"
		}
		if state.fields["phase"] != want {
			t.Errorf("phase at %s, not %s: %s", clock, want, state)
		}
		return state
	}
	held := 0
	seen := map[string]bool{}
	for i := 0; !seen["activity_ended"]; i++ {
		r := rs[i%2]
		before := now()
		a := r.buy("sale", "u1", 1, "")
		after := now()
		seen[a.code()] = true
		switch {
		case a.status == 202:
			held++
			if after.Before(starts) || !before.Before(ends) {
				t.Fatalf("accepted outside of the window at %s", after)
			}
		case a.code() == "activity_not_started":
			if !before.Before(starts) {
				t.Fatalf("not started at %s, starts at %s", before, starts)
			}
		case a.code() == "activity_ended":
			if after.Before(ends) {
				t.Fatalf("ended at %s, ends at %s", after, ends)
			}
		case a.code() == "limit_reached" && held == 20:
		default:
			t.Fatalf("%s", a)
		}
		look(r)
		time.Sleep(20 * time.Millisecond) // paces the crowd; what is checked does not depend on it
	}
	for _, r := range rs {
		eventually(t, func() error {
			if state := look(r); state.fields["phase"] != "ended" {
				return fmt.Errorf("phase after the end: %s", state)
			}
			return nil
		})
	}
	if !seen["activity_not_started"] || held == 0 {
		t.Errorf("seen %v, %d accepted", seen, held)
	}
	if nearest > 500*time.Millisecond {
		t.Errorf("server_time was never nearer than %s to Redis' clock", nearest)
	}
	if left := w.left(sale); left != 100-held {
		t.Errorf("%d left after %d", left, held)
	}
}

// O34: asked before the worker has done anything, an order is being processed; a stranger sees nothing.
func TestTheStatusIsThereBeforeTheWorkerIs(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	r := w.replica().ready()
	w.sale("sale")
	a, b := r.buy("sale", "u1", 1, ""), r.buy("sale", "u2", 1, "")
	status := func(id, user string) answer {
		return r.do(call{method: "GET", path: "/v1/orders/" + id, token: token(user)})
	}
	for id, user := range map[string]string{a.orderID(): "u1", b.orderID(): "u2"} {
		if s := status(id, user); s.status != 200 || s.fields["status"] != "reserved" || s.header.Get("Cache-Control") != "no-store" {
			t.Errorf("%s", s)
		}
		if s := status(id, "u3"); s.status != 404 || s.code() != "order_not_found" {
			t.Errorf("somebody else's order: %s", s)
		}
		if c := r.do(call{method: "DELETE", path: "/v1/orders/" + id, token: token("u3")}); c.status != 404 {
			t.Errorf("cancel of somebody else's order: %s", c)
		}
	}
	mine := r.do(call{method: "GET", path: "/v1/activities/sale/orders/mine", token: token("u1")})
	if list, _ := mine.fields["orders"].([]any); len(list) != 1 || list[0].(map[string]any)["order_id"] != a.orderID() {
		t.Errorf("mine: %s", mine)
	}
	if mine := r.do(call{method: "GET", path: "/v1/activities/sale/orders/mine", token: token("u3")}); mine.status != 200 || len(mine.fields["orders"].([]any)) != 0 {
		t.Errorf("mine of somebody without orders: %s", mine)
	}
	id, _ := order.ParseID(a.orderID())
	if _, err := w.stock.Release(context.Background(), []stock.Release{{
		ID: id, User: "u1", SKU: "mug", Pool: "national", Quantity: 1, To: order.Rejected, Reason: order.ReasonInvalidOrder,
	}}); err != nil {
		t.Fatal(err)
	}
	if s := status(a.orderID(), "u1"); s.fields["status"] != "rejected" || s.fields["reason"] != order.ReasonInvalidOrder {
		t.Errorf("rejected order: %s", s)
	}
	if s := status(b.orderID(), "u2"); s.fields["status"] != "reserved" {
		t.Errorf("the other order: %s", s)
	}
	if c := r.do(call{method: "DELETE", path: "/v1/orders/" + a.orderID(), token: token("u1")}); c.status != 409 || c.code() != "order_not_cancellable" {
		t.Errorf("cancel of a rejected order: %s", c)
	}
}

func TestActivityStateAndPause(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	r := w.replica().ready()
	ctx := context.Background()
	sale := w.sale("sale", pools("mug", map[string]int{"beijing": 3, "national": 5}), func(a *stock.Activity) {
		a.RegionFallback = map[string][]string{"beijing": {"national"}, "tianjin": {"national"}}
	})
	state := func() answer { return r.do(call{method: "GET", path: "/v1/activities/sale"}) }
	s := state()
	item := s.fields["items"].([]any)[0].(map[string]any)
	if s.fields["phase"] != "open" || item["price_minor"] != 1999.0 ||
		fmt.Sprint(item["pools"]) != "map[beijing:3 national:5]" || fmt.Sprint(item["regions"]) != "map[beijing:8 national:5 tianjin:5]" {
		t.Errorf("%s", s)
	}
	if cc := s.header.Get("Cache-Control"); cc != "public, max-age=1" {
		t.Errorf("Cache-Control %q", cc)
	}
	if err := w.stock.SetPaused(ctx, sale, true); err != nil {
		t.Fatal(err)
	}
	if a := r.buy("sale", "u1", 1, ""); a.status != 503 || a.code() != "activity_paused" {
		t.Errorf("while paused: %s", a)
	}
	eventually(t, func() error { // what is shown may be up to a second old
		if s := state(); s.fields["phase"] != "paused" {
			return fmt.Errorf("%s", s)
		}
		return nil
	})
	if err := w.stock.SetPaused(ctx, sale, false); err != nil {
		t.Fatal(err)
	}
	if a := r.buy("sale", "u1", 1, ""); a.status != 202 {
		t.Errorf("after the pause: %s", a)
	}
	if err := w.stock.End(ctx, sale, time.Now()); err != nil {
		t.Fatal(err)
	}
	if a := r.buy("sale", "u2", 1, ""); a.status != 410 || a.code() != "activity_ended" {
		t.Errorf("after the end: %s", a)
	}
	eventually(t, func() error { // what is shown may be up to a second old
		if s := state(); s.fields["phase"] != "ended" {
			return fmt.Errorf("%s", s)
		}
		return nil
	})
	w.announce("cold", func(a *stock.Activity) { a.StartsAt = time.Now().Add(30 * time.Minute) })
	if s := r.do(call{method: "GET", path: "/v1/activities/cold"}); s.status != 200 || s.fields["phase"] != "scheduled" {
		t.Errorf("announced, not warmed, not started: %s", s)
	}
}

// Rehearsal tokens work in their own shadow activity and nowhere else.
func TestARehearsalsTokenWorksInItsShadowActivityOnly(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	r := w.replica().ready()
	w.sale("shadow", func(a *stock.Activity) { a.Shadow = true })
	w.sale("real")
	tok := func(activity string) string {
		return token("u1", func(c jwt.MapClaims) { c["activity"] = activity })
	}
	buy := func(activity, claim string) answer {
		c := r.purchase(activity, "u1", 1, "")
		c.token = tok(claim)
		return r.do(c)
	}
	a := buy("shadow", "shadow")
	if a.status != 202 {
		t.Fatalf("%s", a)
	}
	if s := r.do(call{method: "GET", path: "/v1/orders/" + a.orderID(), token: tok("shadow")}); s.status != 200 {
		t.Errorf("%s", s)
	}
	real := r.buy("real", "u1", 1, "")
	for name, got := range map[string]answer{
		"a real sale":     buy("real", "shadow"),
		"claimed to be":   buy("real", "real"),
		"order of a sale": r.do(call{method: "GET", path: "/v1/orders/" + real.orderID(), token: tok("shadow")}),
		"mine of a sale":  r.do(call{method: "GET", path: "/v1/activities/real/orders/mine", token: tok("shadow")}),
		"cancel":          r.do(call{method: "DELETE", path: "/v1/orders/" + real.orderID(), token: tok("real")}),
	} {
		if got.status != 401 {
			t.Errorf("%s: %s", name, got)
		}
	}
}
