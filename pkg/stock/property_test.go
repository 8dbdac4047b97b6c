package stock

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"pgregory.net/rapid"

	"seckill/pkg/order"
)

// modelOrder is what the model knows of one order.
type modelOrder struct {
	ask      Reservation
	rec      Record
	status   order.Status
	withheld bool
	outbox   bool
	parked   bool
	due      bool
}

// saleModel is the plain Go twin of one sale in Redis.
type saleModel struct {
	b         *bench
	a         *Activity
	allocated map[string]int         // per pool
	left      map[int]map[string]int // bucket → pool
	orders    []*modelOrder
	keys      map[string]*modelOrder // user/key
}

func (m *saleModel) held(user string) int {
	n := 0
	for _, o := range m.orders {
		if o.rec.User == user && o.status.Live() {
			n += o.rec.Quantity
		}
	}
	return n
}

// reserve predicts the answer and compares.
func (m *saleModel) reserve(t *rapid.T, r Reservation) {
	got, err := m.b.Reserve(context.Background(), r)
	for _, o := range m.orders {
		if o.ask.ID == r.ID { // same id: the first answer, whatever became of the order (R4)
			if err != nil || !got.Replay || got.ID != r.ID || got.Status != o.status {
				t.Fatalf("same id %s: %+v, %v; model %s", r.ID, got, err, o.status)
			}
			return
		}
	}
	if r.IdemKey != "" {
		if o := m.keys[r.User+"/"+r.IdemKey]; o != nil {
			switch {
			case o.ask.IdemDigest != r.IdemDigest:
				if !errors.Is(err, ErrKeyReused) {
					t.Fatalf("other body: %v", err)
				}
			case err != nil || !got.Replay || got.ID != o.ask.ID || got.Status != o.status:
				t.Fatalf("same key: %+v, %v; model %s", got, err, o.status)
			}
			return
		}
	}
	if m.held(r.User)+r.Quantity > m.a.PerUserLimit {
		var limit *LimitError
		if !errors.As(err, &limit) {
			t.Fatalf("user holds %d, asks %d: %+v, %v", m.held(r.User), r.Quantity, got, err)
		}
		live := 0
		for _, o := range m.orders {
			if o.rec.User == r.User && o.status.Live() {
				live++
			}
		}
		if len(limit.OrderIDs) != live {
			t.Fatalf("limit names %v of %d orders", limit.OrderIDs, live)
		}
		return
	}
	for _, p := range r.Pools {
		if m.left[r.ID.Bucket][p] >= r.Quantity {
			if err != nil || got.Replay || got.Pool != p || got.Quantity != r.Quantity || got.Status != order.Reserved {
				t.Fatalf("pool %s has %d, asked %d: %+v, %v", p, m.left[r.ID.Bucket][p], r.Quantity, got, err)
			}
			m.left[r.ID.Bucket][p] -= r.Quantity
			o := &modelOrder{ask: r, rec: got.Record, status: order.Reserved, outbox: true}
			m.orders = append(m.orders, o)
			if r.IdemKey != "" {
				m.keys[r.User+"/"+r.IdemKey] = o
			}
			return
		}
	}
	if !errors.Is(err, ErrSoldOut) {
		t.Fatalf("no pool has %d: %+v, %v", r.Quantity, got, err)
	}
}

func (m *saleModel) confirm(t *rapid.T, o *modelOrder, to order.Status) {
	want := Already
	if o.status == order.Reserved || o.status == order.Pending && to == order.Paid {
		want, o.status = Applied, to
	}
	o.outbox, o.parked = false, false
	out, err := m.b.Confirm(context.Background(), []Confirmation{{o.ask.ID, to}})
	if err != nil || out[0] != want {
		t.Fatalf("confirm %s: %v, %v, want %v", to, out, err, want)
	}
}

func (m *saleModel) release(t *rapid.T, o *modelOrder, to order.Status, withhold, due bool) {
	want := Already
	if o.status.Live() {
		want, o.status, o.withheld = Applied, to, withhold
		if !withhold {
			m.left[o.ask.ID.Bucket][o.rec.Pool] += o.rec.Quantity
		}
	}
	o.outbox, o.parked, o.due = false, false, o.due || due
	x := releaseOf(o.rec, to)
	x.Withhold, x.RefundDue = withhold, due
	out, err := m.b.Release(context.Background(), []Release{x})
	if err != nil || out[0] != want {
		t.Fatalf("release to %s: %v, %v, want %v", to, out, err, want)
	}
}

// check compares everything that Redis holds of the sale with the model.
func (m *saleModel) check(t *rapid.T) {
	ctx := context.Background()
	live, withheld := make(map[string]int), make(map[string]int)
	users := make(map[string]bool)
	waiting, parked := make(map[string]bool), make(map[string]bool)
	ulids := make(map[int][]string)
	for _, o := range m.orders {
		ulids[o.ask.ID.Bucket] = append(ulids[o.ask.ID.Bucket], o.ask.ID.ULID)
	}
	recs := make(map[order.ID]Record)
	for bucket, us := range ulids {
		found, err := m.b.records(ctx, m.a.ID, bucket, us)
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range found {
			recs[r.ID] = r
		}
	}
	for _, o := range m.orders {
		users[o.rec.User] = true
		switch {
		case o.status.Live():
			live[o.rec.Pool] += o.rec.Quantity
		case o.withheld:
			withheld[o.rec.Pool] += o.rec.Quantity
		}
		if rec := recs[o.ask.ID]; rec.Status != o.status || rec.RefundDue != o.due {
			t.Fatalf("order %s: %+v; model %+v", o.ask.ID, rec, o)
		}
		if o.outbox {
			waiting[o.ask.ID.String()] = true
		}
		if o.parked {
			parked[o.ask.ID.String()] = true
		}
		if (o.outbox || o.parked) != (o.status == order.Reserved) {
			t.Fatalf("model: %s waits: %t", o.status, o.outbox)
		}
	}
	stock := make(map[string]int)
	for bucket, pools := range m.left {
		for pool, n := range pools {
			got := m.b.stockOf(m.a, bucket, pool)
			if got != n || got < 0 {
				t.Fatalf("bucket %d pool %s has %d, model %d", bucket, pool, got, n)
			}
			stock[pool] += got
		}
		out, in, err := m.b.OutboxIDs(ctx, m.a.ID, bucket)
		if err != nil {
			t.Fatal(err)
		}
		for set, ids := range map[*map[string]bool][]order.ID{&waiting: out, &parked: in} {
			for _, id := range ids {
				if !(*set)[id.String()] {
					t.Fatalf("%s (%s) is in outbox or parked set", id, recs[id].Status)
				}
				delete(*set, id.String())
			}
		}
	}
	if len(waiting)+len(parked) > 0 {
		t.Fatalf("missing in outbox %v, in parked %v", waiting, parked)
	}
	for pool, n := range m.allocated { // P4
		if stock[pool]+live[pool]+withheld[pool] != n {
			t.Fatalf("pool %s: %d left + %d held + %d withheld, not %d", pool, stock[pool], live[pool], withheld[pool], n)
		}
	}
	for u := range users {
		if got := m.b.held(m.a, u); got != m.held(u) || got > m.a.PerUserLimit {
			t.Fatalf("user %s holds %d, model %d", u, got, m.held(u))
		}
		mine, err := m.b.Mine(ctx, m.a.ID, order.Bucket(u, m.a.buckets()), u)
		sum := 0
		for _, r := range mine {
			if r.Status.Live() {
				sum += r.Quantity
			}
		}
		if err != nil || sum != m.held(u) {
			t.Fatalf("live orders of %s sum to %d, %v, model %d", u, sum, err, m.held(u))
		}
	}
}

// Conservation after each step of random interleavings of reserve, retries, confirm, pay, cancel,
// refund, reject, withhold, park, unpark and redelivery (P1, P3, P4, R1, R4, R7).
func TestAnyInterleavingKeepsEveryUnit(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	sales := 0
	rapid.Check(t, func(t *rapid.T) {
		sales++
		a := newSale(fmt.Sprintf("model-%d", sales), map[string]int{"beijing": rapid.IntRange(0, 3).Draw(t, "beijing"), "national": rapid.IntRange(0, 6).Draw(t, "national")})
		a.Buckets, a.PerUserLimit = rapid.IntRange(1, 3).Draw(t, "buckets"), rapid.IntRange(1, 4).Draw(t, "limit")
		b.open(a)
		m := &saleModel{b: b, a: a, allocated: a.Items[0].Pools, left: make(map[int]map[string]int), keys: make(map[string]*modelOrder)}
		for i := range a.Buckets {
			m.left[i] = make(map[string]int)
			for p, n := range a.Items[0].Pools {
				m.left[i][p] = Share(n, i, a.Buckets)
			}
		}
		user := rapid.SampledFrom([]string{"ann", "bob", "cho", "dan"})
		some := func(t *rapid.T) *modelOrder {
			if len(m.orders) == 0 {
				t.Skip("no order yet")
			}
			return rapid.SampledFrom(m.orders).Draw(t, "order")
		}
		t.Repeat(map[string]func(*rapid.T){
			"": m.check,
			"reserve": func(t *rapid.T) {
				r := b.ask(a, user.Draw(t, "user"), rapid.IntRange(1, 3).Draw(t, "quantity"))
				r.Region = rapid.SampledFrom([]string{"beijing", "national"}).Draw(t, "region")
				r.Pools = a.PoolsFor("sku-1", r.Region)
				r.IdemKey = rapid.SampledFrom([]string{"", "", "k1", "k2"}).Draw(t, "key")
				if r.IdemKey != "" {
					r.IdemDigest = rapid.SampledFrom([]string{"aa", "aa", "bb"}).Draw(t, "digest")
				}
				m.reserve(t, r)
			},
			"retry": func(t *rapid.T) { m.reserve(t, some(t).ask) },
			"confirm": func(t *rapid.T) {
				m.confirm(t, some(t), rapid.SampledFrom([]order.Status{order.Pending, order.Paid}).Draw(t, "to"))
			},
			"release": func(t *rapid.T) {
				m.release(t, some(t), rapid.SampledFrom([]order.Status{order.Cancelled, order.Refunded, order.Rejected}).Draw(t, "to"),
					rapid.IntRange(0, 4).Draw(t, "withhold") == 0, rapid.IntRange(0, 4).Draw(t, "due") == 0)
			},
			"park": func(t *rapid.T) {
				o := some(t)
				if err := b.Park(context.Background(), []order.ID{o.ask.ID}); err != nil {
					t.Fatal(err)
				}
				o.parked, o.outbox = o.status == order.Reserved, false
			},
			"unpark": func(t *rapid.T) {
				o := some(t)
				if err := b.Unpark(context.Background(), []order.ID{o.ask.ID}); err != nil {
					t.Fatal(err)
				}
				o.outbox, o.parked = o.outbox || o.parked, false
			},
			"refund due": func(t *rapid.T) {
				o := some(t)
				if err := b.MarkRefundDue(context.Background(), o.ask.ID); err != nil {
					t.Fatal(err)
				}
				o.due = true
			},
		})
	})
}
