// Package workertest is the ground that tests of the worker's handlers stand on: real MySQL, Redis
// and RabbitMQ, each in a corner of its own, sales that are open, and the sums that must be right.
package workertest

import (
	"context"
	"fmt"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/redis/go-redis/v9"

	"seckill/pkg/messaging"
	"seckill/pkg/order"
	"seckill/pkg/sale"
	"seckill/pkg/stock"
	"seckill/pkg/testkit"
	"seckill/services/order-worker/internal/activity"
	"seckill/services/order-worker/internal/audit"
	"seckill/services/order-worker/internal/follow"
	"seckill/services/order-worker/internal/payment"
	"seckill/services/order-worker/internal/persist"
	"seckill/services/order-worker/internal/rollback"
	"seckill/services/order-worker/internal/store"
)

// SKU and Pool of the sales that Open makes.
const (
	SKU        = "book"
	Pool       = "national"
	PriceMinor = 1999999
	Currency   = "EUR"
)

// Bench holds real services and the handlers on top of them.
type Bench struct {
	Store    *store.Store
	Stock    *stock.Client
	Broker   *messaging.Client
	Registry *prometheus.Registry

	Catalogue *store.Catalogue
	Follow    *follow.Follower
	Persist   *persist.Handler
	Payment   *payment.Handler
	Rollback  *rollback.Handler

	redis stock.Config
	ids   *order.IDs
	sales *activity.Service
}

// Options change what a Bench stands on.
type Options struct {
	DSN       string // default: a schema on the shared server
	RedisAddr string // default: a prefix on the shared server
	BrokerURL string // default: a vhost on the shared broker
	Redis     *testkit.RedisEnv
	MySQL     store.Config
}

// New makes a Bench. It is torn down when the test ends.
func New(t testing.TB, o Options) *Bench {
	t.Helper()
	b := &Bench{Registry: prometheus.NewRegistry(), ids: order.NewIDs()}
	log := testkit.Logger(t)
	var err error
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	// The time of a call begins with it: testkit's servers may take minutes.
	call := func(f func(context.Context) error) {
		t.Helper()
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
		defer cancel()
		must(f(ctx))
	}
	cfg := o.MySQL
	if cfg.DSN = o.DSN; cfg.DSN == "" {
		cfg.DSN = testkit.MySQL(t)
	}
	b.Store, err = store.Open(cfg, log, b.Registry)
	must(err)
	t.Cleanup(func() { _ = b.Store.Close() })
	call(b.Store.Migrate)

	at := stock.Config{Addrs: []string{o.RedisAddr}}
	if o.RedisAddr == "" {
		env := o.Redis
		if env == nil {
			own := testkit.Redis(t)
			env = &own
		}
		at = stock.Config{Addrs: []string{env.Addr}, DB: env.DB, Prefix: env.Prefix}
	}
	at.ReadTimeout = 5 * time.Second // as many tests share the machine as will
	b.redis = at
	b.Stock, err = stock.New(at, log, b.Registry)
	must(err)
	t.Cleanup(func() { _ = b.Stock.Close() })

	url := o.BrokerURL
	if url == "" {
		url = testkit.RabbitMQ(t)
	}
	b.Broker, err = messaging.New(messaging.Config{URL: url}, log, b.Registry)
	must(err)
	b.Broker.Start(context.Background())
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		_ = b.Broker.Close(ctx)
	})
	call(b.Broker.Declare)

	b.Catalogue = store.NewCatalogue(b.Store)
	b.Follow, err = follow.New(b.Store, b.Stock, b.Broker, log, b.Registry)
	must(err)
	b.Persist, err = persist.New(b.Store, b.Catalogue, b.Follow, log, b.Registry)
	must(err)
	b.Payment, err = payment.New(b.Store, b.Follow, log, b.Registry)
	must(err)
	b.Rollback, err = rollback.New(b.Store, b.Stock, b.Follow, nil, log, b.Registry)
	must(err)
	b.sales, err = activity.New(b.Store, b.Stock, activity.Config{Tiers: b.Broker.Tiers()}, log, b.Registry)
	must(err)
	return b
}

var saleNumber atomic.Int64 //nolint:gochecknoglobals // names must differ within a test process

// Sale is one that is open.
type Sale struct {
	t  testing.TB
	b  *Bench
	ID string
	n  atomic.Int64
}

// Open makes a sale of SKU with the given units in each pool ("national" only, by default), opens it,
// and checks when the test ends that its sums are right.
func (b *Bench) Open(t testing.TB, units int, change ...func(*sale.Sale)) *Sale {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	plan := sale.Sale{
		ID: "s" + strconv.FormatInt(saleNumber.Add(1), 10), Name: "Test",
		StartsAt: time.Now().Add(-time.Minute).Format(time.RFC3339), EndsAt: time.Now().Add(time.Hour).Format(time.RFC3339),
		PerUserLimit: 1, PaymentTimeout: "15m", Currency: Currency, Shadow: true,
		Items: []sale.Item{{SKU: SKU, PriceMinor: PriceMinor, Pools: map[string]int{Pool: units}}},
	}
	for _, f := range change {
		f(&plan)
	}
	if _, _, err := b.sales.Create(ctx, plan, audit.System()); err != nil {
		t.Fatal(err)
	}
	if _, err := b.sales.Warm(ctx, plan.ID, audit.System()); err != nil {
		t.Fatal(err)
	}
	return &Sale{t: t, b: b, ID: plan.ID}
}

// Limit, Timeout and Pools are changes for Open.
func Limit(n int) func(*sale.Sale) { return func(s *sale.Sale) { s.PerUserLimit = n } }

// Timeout sets the payment time-out.
func Timeout(d string) func(*sale.Sale) { return func(s *sale.Sale) { s.PaymentTimeout = d } }

// Pools sets the units of each pool.
func Pools(p map[string]int) func(*sale.Sale) { return func(s *sale.Sale) { s.Items[0].Pools = p } }

// User gives a user nobody else has.
func (s *Sale) User() string { return fmt.Sprintf("u%06d", s.n.Add(1)) }

// Reserve takes units in Redis, as order-api does, and gives the order as its message will carry it.
func (s *Sale) Reserve(user, pool string, quantity int) order.Order {
	s.t.Helper()
	id, err := s.b.ids.New(s.ID, 0)
	if err != nil {
		s.t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	r, err := s.b.Stock.Reserve(ctx, stock.Reservation{ID: id, User: user, SKU: SKU, Region: pool, Pools: []string{pool}, Quantity: quantity})
	if err != nil {
		s.t.Errorf("reserve: %v", err)
	}
	return r.Order
}

// Buyers reserves one unit for each of n new users.
func (s *Sale) Buyers(n int) []order.Order {
	s.t.Helper()
	out := make([]order.Order, n)
	var wg sync.WaitGroup
	for w := range min(n, 32) {
		wg.Add(1)
		go func() {
			defer wg.Done()
			for i := w; i < n; i += 32 {
				out[i] = s.Reserve(s.User(), Pool, 1)
			}
		}()
	}
	wg.Wait()
	return out
}

// HideStock takes a pool's stock key away, as an eviction would, and returns what brings it back.
func (s *Sale) HideStock(pool string) (restore func()) {
	s.t.Helper()
	c := s.raw()
	key := s.b.redis.Prefix + "seckill:stock:{" + s.ID + ":0}:" + SKU + ":" + pool
	rename := func(from, to string) {
		s.t.Helper()
		if err := c.Rename(context.Background(), from, to).Err(); err != nil {
			s.t.Fatalf("rename %s: %v", from, err)
		}
	}
	rename(key, key+":hidden")
	return func() { s.t.Helper(); rename(key+":hidden", key) }
}

// raw is a connection past the stock client.
func (s *Sale) raw() *redis.Client {
	c := redis.NewClient(&redis.Options{Addr: s.b.redis.Addrs[0], DB: s.b.redis.DB})
	s.t.Cleanup(func() { _ = c.Close() })
	return c
}

// Damage writes a text where an order's purchase record was, and gives what puts the record back.
func (s *Sale) Damage(id order.ID) (restore func()) {
	s.t.Helper()
	c := s.raw()
	key := s.b.redis.Prefix + "seckill:order:{" + s.ID + ":0}:" + id.String()
	must := func(err error) {
		s.t.Helper()
		if err != nil {
			s.t.Fatalf("damage record of order %s: %v", id, err)
		}
	}
	must(c.Rename(context.Background(), key, key+":hidden").Err())
	must(c.Set(context.Background(), key, "text", 0).Err())
	return func() { s.t.Helper(); must(c.Rename(context.Background(), key+":hidden", key).Err()) }
}

// Noted makes money on its way to an order look as if it had come at that time.
func (s *Sale) Noted(id order.ID, since time.Time) {
	s.t.Helper()
	key := s.b.redis.Prefix + "seckill:order:{" + s.ID + ":0}:" + id.String()
	if err := s.raw().HSet(context.Background(), key, "m", since.UnixMilli()).Err(); err != nil {
		s.t.Fatalf("change record of order %s: %v", id, err)
	}
}

// Forge gives an order that Redis knows nothing of.
func (s *Sale) Forge(user string, quantity int) order.Order {
	s.t.Helper()
	id, err := s.b.ids.New(s.ID, 0)
	if err != nil {
		s.t.Fatal(err)
	}
	now := time.Now().UTC().Truncate(time.Millisecond)
	return order.Order{
		ID: id, User: user, SKU: SKU, Region: Pool, Pool: Pool, Quantity: quantity, UnitPriceMinor: PriceMinor, Currency: Currency,
		ReservedAt: now, PayBefore: now.Add(15 * time.Minute), PaymentTimeout: 15 * time.Minute,
	}
}

// Deliver makes deliveries of messages.
func Deliver(msgs ...messaging.Message) []messaging.Delivery {
	out := make([]messaging.Delivery, len(msgs))
	for i, m := range msgs {
		out[i] = messaging.Delivery{Message: m}
	}
	return out
}

// Each makes one order.reserved message per order.
func Each(orders []order.Order) []messaging.Delivery {
	out := make([]messaging.Delivery, len(orders))
	for i := range orders {
		out[i] = messaging.Delivery{Message: messaging.OrderReserved(orders[i : i+1]), Queue: messaging.QueueOrders}
	}
	return out
}

// Handle runs a handler and fails the test if it holds.
func Handle(t testing.TB, h messaging.Handler, batch []messaging.Delivery) []messaging.Result {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	defer cancel()
	results := h(ctx, batch)
	if len(results) != len(batch) {
		t.Fatalf("%d results for %d deliveries", len(results), len(batch))
	}
	for i, r := range results {
		if r.Hold != nil {
			t.Fatalf("delivery %d is held: %v", i, r.Hold)
		}
		if r.After != nil {
			if err := r.After(ctx); err != nil {
				t.Fatalf("after delivery %d: %v", i, err)
			}
		}
	}
	return results
}

// Work runs a handler as the consumer does: deliveries that are held are handled again. What it
// returns asks for nothing but the ack, or the test fails.
func Work(t testing.TB, h messaging.Handler, batch []messaging.Delivery) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	defer cancel()
	for ctx.Err() == nil {
		var again []messaging.Delivery
		for i, r := range h(ctx, batch) {
			switch {
			case r.Hold != nil:
				t.Logf("held: %v", r.Hold)
				again = append(again, batch[i])
			case len(r.Dead)+len(r.Retries) > 0:
				t.Errorf("delivery %d: dead %v, retries %v", i, r.Dead, r.Retries)
			}
		}
		if batch = again; len(batch) == 0 {
			return
		}
		time.Sleep(100 * time.Millisecond)
	}
	t.Error("deliveries are still held")
}

// Done fails the test unless the results ask for nothing but the ack.
func Done(t testing.TB, results []messaging.Result) {
	t.Helper()
	for i, r := range results {
		if len(r.Dead)+len(r.Retries) > 0 {
			t.Fatalf("delivery %d: dead %v, retries %v", i, r.Dead, r.Retries)
		}
	}
}

// Row reads an order's row; nil if there is none.
func (b *Bench) Row(t testing.TB, id order.ID) *store.Order {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	rows, err := store.Orders(ctx, b.Store.SQL(), []string{id.String()}, false)
	if err != nil {
		t.Fatal(err)
	}
	return rows[id.String()]
}

// Record reads an order's record.
func (b *Bench) Record(t testing.TB, id order.ID) stock.Record {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	r, err := b.Stock.Order(ctx, id)
	if err != nil {
		t.Fatalf("record of %s: %v", id, err)
	}
	return r
}

// WantStatus fails the test unless row and record agree on the status.
func (b *Bench) WantStatus(t testing.TB, id order.ID, want order.Status) {
	t.Helper()
	row := b.Row(t, id)
	if row == nil || row.Status != want {
		t.Fatalf("row of %s is %+v, want %s", id, row, want)
	}
	if got := b.Record(t, id).Status; got != want {
		t.Fatalf("record of %s is %s, want %s", id, got, want)
	}
}

// Int runs a query that gives one number.
func (b *Bench) Int(t testing.TB, query string, args ...any) int {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	var n int
	if err := b.Store.SQL().QueryRowContext(ctx, query, args...).Scan(&n); err != nil {
		t.Fatalf("%s: %v", query, err)
	}
	return n
}

// Exec runs a statement, as somebody at the database's prompt would.
func (b *Bench) Exec(t testing.TB, query string, args ...any) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	if _, err := b.Store.SQL().ExecContext(ctx, query, args...); err != nil {
		t.Fatalf("%s: %v", query, err)
	}
}

// Refuse puts a trigger of the shop's own in the way of one kind of statement ("UPDATE ON orders") for
// the rows that condition is true of, until the test ends or the returned function is called.
func (b *Bench) Refuse(t testing.TB, what, condition string) (stop func()) {
	t.Helper()
	return b.Trigger(t, what, condition, "SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT='not in this shop'")
}

// Trigger is Refuse by another statement.
func (b *Bench) Trigger(t testing.TB, what, condition, then string) (stop func()) {
	t.Helper()
	name := fmt.Sprintf("refuse%d", saleNumber.Add(1))
	b.Exec(t, "CREATE TRIGGER "+name+" BEFORE "+what+" FOR EACH ROW IF "+condition+" THEN "+then+"; END IF")
	var once sync.Once
	stop = func() { once.Do(func() { b.Exec(t, "DROP TRIGGER "+name) }) }
	t.Cleanup(stop)
	return stop
}

// Left is what Redis still sells of a pool.
func (s *Sale) Left(pool string) int {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	a, err := s.b.Stock.Activity(ctx, s.ID)
	if err != nil {
		s.t.Fatal(err)
	}
	levels, err := s.b.Stock.Levels(ctx, &a)
	if err != nil {
		s.t.Fatal(err)
	}
	n, ok := levels[SKU][pool]
	if !ok {
		s.t.Fatalf("pool %s has no stock key", pool)
	}
	return n
}

// Balanced fails the test unless every unit is where the books say (P1, P4): in MySQL pool rows,
// orders, ledger and holdings agree; in Redis what is left and what live records hold is what MySQL
// has, but for withheld units; and nothing is owed any more.
func (s *Sale) Balanced() {
	s.t.Helper()
	pools := s.BalancedInMySQL()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	held := map[string]int{}
	err := s.b.Stock.EachRecord(ctx, s.ID, func(r stock.Record) error {
		if r.Status.Live() {
			held[r.Pool] += r.Quantity
		}
		return nil
	})
	if err != nil {
		s.t.Fatal(err)
	}
	for _, p := range pools {
		left := s.Left(p.Pool)
		if left < 0 || left+held[p.Pool]+int(p.Withheld) != int(p.Allocated) {
			s.t.Errorf("pool %s in redis: %d left + %d held + %d withheld, %d allocated", p.Pool, left, held[p.Pool], p.Withheld, p.Allocated)
		}
	}
}

// BalancedInMySQL is the part of Balanced that looks at MySQL alone.
func (s *Sale) BalancedInMySQL() []store.ActivityStock {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	var pools []store.ActivityStock
	if err := s.b.Store.DB(ctx).Where("activity_id = ?", s.ID).Find(&pools).Error; err != nil {
		s.t.Fatal(err)
	}
	for _, p := range pools {
		live := s.b.Int(s.t, "SELECT COALESCE(SUM(quantity),0) FROM orders WHERE activity_id=? AND sku_id=? AND pool=? AND status IN ('pending','paid')", s.ID, p.SKUID, p.Pool)
		ledger := s.b.Int(s.t, "SELECT COALESCE(SUM(delta),0) FROM stock_ledger WHERE account='sale' AND activity_id=? AND sku_id=? AND pool=?", s.ID, p.SKUID, p.Pool)
		if p.Allocated != p.Available+p.Withheld+p.Live+p.Returned || p.Available < 0 {
			s.t.Errorf("pool %s: %d allocated, but %d available + %d withheld + %d live + %d returned", p.Pool, p.Allocated, p.Available, p.Withheld, p.Live, p.Returned)
		}
		if int(p.Live) != live {
			s.t.Errorf("pool %s: counter says %d live units, orders say %d", p.Pool, p.Live, live)
		}
		if int(p.Available) != ledger {
			s.t.Errorf("pool %s: %d available, ledger explains %d", p.Pool, p.Available, ledger)
		}
	}
	if n := s.b.Int(s.t, `SELECT COUNT(*) FROM user_holdings h LEFT JOIN (SELECT user_id, SUM(quantity) q FROM orders
		WHERE activity_id=? AND status IN ('pending','paid') GROUP BY user_id) o USING (user_id) WHERE h.activity_id=? AND h.held<>COALESCE(o.q,0)`, s.ID, s.ID); n != 0 {
		s.t.Errorf("%d users' holdings differ from their live orders", n)
	}
	if n := s.b.Int(s.t, "SELECT COUNT(*) FROM compensations WHERE activity_id=? AND kind<>'reconcile'", s.ID); n != 0 {
		s.t.Errorf("%d compensations are left", n)
	}
	return pools
}
