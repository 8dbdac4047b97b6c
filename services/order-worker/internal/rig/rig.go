// Package rig puts the worker's parts together on real servers for the tests of the packages that
// operators use. Nothing consumes before a test says so.
package rig

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/redis/go-redis/v9"

	"seckill/pkg/adminapi"
	"seckill/pkg/messaging"
	"seckill/pkg/order"
	"seckill/pkg/sale"
	"seckill/pkg/stock"
	"seckill/pkg/testkit"
	"seckill/services/order-worker/internal/activity"
	"seckill/services/order-worker/internal/admin"
	"seckill/services/order-worker/internal/audit"
	"seckill/services/order-worker/internal/deadletter"
	"seckill/services/order-worker/internal/follow"
	"seckill/services/order-worker/internal/payment"
	"seckill/services/order-worker/internal/persist"
	"seckill/services/order-worker/internal/rebuild"
	"seckill/services/order-worker/internal/reconcile"
	"seckill/services/order-worker/internal/rollback"
	"seckill/services/order-worker/internal/settlement"
	"seckill/services/order-worker/internal/store"
	"seckill/services/order-worker/internal/verify"
)

// Tokens of the rig's admin API.
const (
	OperatorToken = "rig-operator-token" //nolint:gosec // of a server that lives as long as a test
	ViewerToken   = "rig-viewer-token"   //nolint:gosec // likewise
)

// Options change what the rig stands on.
type Options struct {
	RabbitURL string // a private broker instead of a vhost on the shared one
	Deaths    deadletter.Config
	Interval  time.Duration // of the activity loop
	Ends      settlement.Config
	// WarmBefore is how long before their start the activity loop warms sales; 0: never.
	WarmBefore time.Duration
	Reconcile  reconcile.Config
}

// Rig is one worker in pieces.
type Rig struct {
	T          testing.TB
	Store      *store.Store
	Stock      *stock.Client
	Redis      *redis.Client // to look past stock.Client
	Prefix     string
	Broker     *messaging.Client
	Activities *activity.Service
	Letters    *deadletter.Service
	Orders     *persist.Handler
	Follow     *follow.Follower
	Payments   *payment.Handler
	Rollbacks  *rollback.Handler
	Ends       *settlement.Service
	Reconciler *reconcile.Service
	Rebuilds   *rebuild.Service
	Verifier   *verify.Verifier
	Registry   *prometheus.Registry
	Admin      *httptest.Server
	RabbitURL  string

	ids *order.IDs
}

// Operator is the actor of calls that do not go over HTTP.
func Operator() audit.Actor { return audit.Actor{Name: "tess", Role: "operator", RequestID: "rig"} }

// New puts a rig together, with its own schema, key prefix and vhost.
func New(t testing.TB, o Options) *Rig {
	t.Helper()
	log := testkit.Logger(t)
	r := &Rig{T: t, Registry: prometheus.NewRegistry(), ids: order.NewIDs()}
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
	r.Store, err = store.Open(store.Config{DSN: testkit.MySQL(t)}, log, r.Registry)
	must(err)
	t.Cleanup(func() { _ = r.Store.Close() })
	call(r.Store.Migrate)
	env := testkit.Redis(t)
	r.Prefix = env.Prefix
	r.Stock, err = stock.New(stock.Config{Mode: stock.Single, Addrs: []string{env.Addr}, DB: env.DB, Prefix: env.Prefix, ReadTimeout: 5 * time.Second}, log, r.Registry)
	must(err)
	t.Cleanup(func() { _ = r.Stock.Close() })
	r.Redis = redis.NewClient(&redis.Options{Addr: env.Addr, DB: env.DB})
	t.Cleanup(func() { _ = r.Redis.Close() })
	if o.RabbitURL == "" {
		o.RabbitURL = testkit.RabbitMQ(t)
	}
	r.RabbitURL = o.RabbitURL
	r.Broker, err = messaging.New(messaging.Config{URL: o.RabbitURL, TopologyInterval: time.Second}, log, r.Registry)
	must(err)
	r.Broker.Start(context.Background())
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		_ = r.Broker.Close(ctx)
	})
	call(r.Broker.Declare)
	f, err := follow.New(r.Store, r.Stock, r.Broker, log, r.Registry)
	must(err)
	r.Follow = f
	r.Orders, err = persist.New(r.Store, store.NewCatalogue(r.Store), f, log, r.Registry)
	must(err)
	if o.Interval == 0 {
		o.Interval = 50 * time.Millisecond
	}
	r.Activities, err = activity.New(r.Store, r.Stock, activity.Config{Tiers: r.Broker.Tiers(), Interval: o.Interval, WarmBefore: o.WarmBefore}, log, r.Registry)
	must(err)
	r.Payments, err = payment.New(r.Store, f, log, r.Registry)
	must(err)
	r.Rollbacks, err = rollback.New(r.Store, r.Stock, f, func(ctx context.Context, e messaging.Ended, m messaging.Message) messaging.Result {
		return r.Ends.Handle(ctx, e, m)
	}, log, r.Registry)
	must(err)
	r.Ends, err = settlement.New(o.Ends, r.Store, r.Stock, r.Activities, r.Rollbacks, f, r.Broker, log, r.Registry)
	must(err)
	if o.Deaths.Interval == 0 {
		o.Deaths.Interval = 50 * time.Millisecond
	}
	r.Letters, err = deadletter.New(r.Store, r.Stock, r.Broker, f, o.Deaths, log, r.Registry)
	must(err)
	tokens, err := admin.ParseTokens("tess:operator:" + admin.HashToken(OperatorToken) + ",vic:viewer:" + admin.HashToken(ViewerToken))
	must(err)
	api, err := admin.New(admin.Config{Tokens: tokens}, admin.Deps{
		Store: r.Store, Activities: r.Activities, Letters: r.Letters, Stock: r.Stock, Broker: r.Broker, Log: log, Metrics: r.Registry,
	})
	must(err)
	r.Reconciler, err = reconcile.New(o.Reconcile, r.Store, r.Stock, r.Activities, f, r.Broker, log, r.Registry)
	must(err)
	r.Rebuilds, err = rebuild.New(rebuild.Config{Interval: 50 * time.Millisecond, PublishWait: 10 * time.Millisecond, Poll: 20 * time.Millisecond},
		r.Store, r.Stock, r.Activities, f, r.Reconciler, r.Broker, log, r.Registry)
	must(err)
	r.Verifier = verify.New(r.Store, r.Stock, r.Activities, r.Ends)
	for _, route := range slices.Concat(r.Ends.Routes(), r.Reconciler.Routes(), r.Rebuilds.Routes(), r.Verifier.Routes()) {
		api.Mount(route)
	}
	r.Admin = httptest.NewServer(api.Handler())
	t.Cleanup(r.Admin.Close)
	return r
}

// Go runs fn until the returned stop is called or the test ends; stop waits for it.
func (r *Rig) Go(fn func(ctx context.Context)) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Add(1)
	go func() {
		defer wg.Done()
		fn(ctx)
	}()
	stop = func() { cancel(); wg.Wait() }
	r.T.Cleanup(stop)
	return stop
}

// ConsumeOrders persists orders.
func (r *Rig) ConsumeOrders() (stop func()) {
	return r.consume(messaging.ConsumerConfig{Queue: messaging.QueueOrders, BatchOrders: 64, StopTimeout: 5 * time.Second}, r.Orders.Handle)
}

// ConsumeRollbacks cancels, refunds and settles.
func (r *Rig) ConsumeRollbacks() (stop func()) {
	return r.consume(messaging.ConsumerConfig{Queue: messaging.QueueRollbacks, StopTimeout: 5 * time.Second}, r.Rollbacks.Handle)
}

// ConsumePayments books payments.
func (r *Rig) ConsumePayments() (stop func()) {
	return r.Consume(messaging.QueuePayments, r.Payments.Handle)
}

// ConsumeDead drains dead letters.
func (r *Rig) ConsumeDead() (stop func()) {
	cfg := r.Letters.Consumer()
	cfg.StopTimeout = 5 * time.Second
	return r.consume(cfg, r.Letters.Handle)
}

// Consume runs a handler of the test's own.
func (r *Rig) Consume(queue string, h messaging.Handler) (stop func()) {
	return r.consume(messaging.ConsumerConfig{Queue: queue, StopTimeout: 5 * time.Second}, h)
}

func (r *Rig) consume(cfg messaging.ConsumerConfig, h messaging.Handler) (stop func()) {
	return r.Go(func(ctx context.Context) {
		if err := r.Broker.Consume(ctx, cfg, rebuild.Watch(r.Store, h)); err != nil {
			r.T.Logf("consumer of %s: %v", cfg.Queue, err)
		}
	})
}

// Plan is a sale that is open now, of one sku "sku" in pools of the given sizes.
func Plan(id string, pools map[string]int) sale.Sale {
	now := time.Now().UTC().Truncate(time.Second)
	return sale.Sale{
		ID: id, Name: "Sale " + id, StartsAt: now.Add(-time.Minute).Format(time.RFC3339), EndsAt: now.Add(time.Hour).Format(time.RFC3339),
		PerUserLimit: 5, PaymentTimeout: "15m", Currency: "EUR", Qualification: "none", Buckets: 1,
		Items: []sale.Item{{SKU: "sku", PriceMinor: 1999, Pools: pools}}, RefundAfterEnd: "national",
	}
}

// Sell makes and warms a sale.
func (r *Rig) Sell(p sale.Sale) {
	r.T.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	if _, _, err := r.Activities.Create(ctx, p, Operator()); err != nil {
		r.T.Fatal(err)
	}
	if _, err := r.Activities.Warm(ctx, p.ID, Operator()); err != nil {
		r.T.Fatal(err)
	}
}

// LockSale holds the rows of a sale as a session does that somebody has forgotten, until the test ends
// or the returned function is called.
func (r *Rig) LockSale(id string) (free func()) {
	r.T.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	tx, err := r.Store.SQL().BeginTx(ctx, nil)
	if err != nil {
		cancel()
		r.T.Fatal(err)
	}
	var once sync.Once
	free = func() { once.Do(func() { _ = tx.Rollback(); cancel() }) }
	r.T.Cleanup(free)
	for _, query := range []string{"SELECT id FROM activities WHERE id = ? FOR UPDATE", "SELECT MAX(sku_id) FROM activity_stock WHERE activity_id = ? FOR UPDATE"} {
		var s string
		if err := tx.QueryRowContext(ctx, query, id).Scan(&s); err != nil {
			r.T.Fatal(err)
		}
	}
	return free
}

// Buy reserves units for a user.
func (r *Rig) Buy(activity, user string, quantity int) (order.Order, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	a, err := r.Stock.Activity(ctx, activity)
	if err != nil {
		return order.Order{}, err
	}
	id, err := r.ids.New(activity, order.Bucket(user, a.Buckets))
	if err != nil {
		return order.Order{}, err
	}
	res, err := r.Stock.Reserve(ctx, stock.Reservation{
		ID: id, User: user, SKU: "sku", Region: "national", Pools: a.PoolsFor("sku", "national"), Quantity: quantity,
	})
	return res.Order, err
}

// MustBuy is Buy of one unit that has to succeed.
func (r *Rig) MustBuy(activity, user string) order.Order {
	r.T.Helper()
	o, err := r.Buy(activity, user, 1)
	if err != nil {
		r.T.Fatalf("buy for %s: %v", user, err)
	}
	return o
}

// Publish publishes events and waits for the confirms.
func (r *Rig) Publish(msgs ...messaging.Message) {
	r.T.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	for i, err := range r.Broker.Publish(ctx, messaging.ExchangeEvents, msgs...) {
		if err != nil {
			r.T.Fatalf("publish %s: %v", msgs[i].ID, err)
		}
	}
}

// Level is what Redis has left of the sku in a pool.
func (r *Rig) Level(activity, pool string) int {
	r.T.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	a, err := r.Stock.Activity(ctx, activity)
	if err != nil {
		r.T.Fatal(err)
	}
	levels, err := r.Stock.Levels(ctx, &a)
	if err != nil {
		r.T.Fatal(err)
	}
	return levels["sku"][pool]
}

// Count runs a SELECT COUNT(*).
func (r *Rig) Count(query string, args ...any) int {
	r.T.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	var n int
	if err := r.Store.SQL().QueryRowContext(ctx, query, args...).Scan(&n); err != nil {
		r.T.Fatalf("%s: %v", query, err)
	}
	return n
}

// Exec changes MySQL behind the system's back.
func (r *Rig) Exec(query string, args ...any) {
	r.T.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	if _, err := r.Store.SQL().ExecContext(ctx, query, args...); err != nil {
		r.T.Fatalf("%s: %v", query, err)
	}
}

// Call calls the admin API as the holder of token and decodes the answer into out, if not nil.
func (r *Rig) Call(token, method, path string, in, out any) (status int, problem adminapi.Problem) {
	r.T.Helper()
	var body io.Reader
	switch v := in.(type) {
	case nil:
	case string:
		body = bytes.NewReader([]byte(v))
	default:
		raw, err := json.Marshal(v)
		if err != nil {
			r.T.Fatal(err)
		}
		body = bytes.NewReader(raw)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, method, r.Admin.URL+path, body)
	if err != nil {
		r.T.Fatal(err)
	}
	if token != "" {
		req.Header.Set("Authorization", "Bearer "+token)
	}
	if body != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	res, err := r.Admin.Client().Do(req)
	if err != nil {
		r.T.Fatalf("%s %s: %v", method, path, err)
	}
	defer func() { _ = res.Body.Close() }()
	raw, err := io.ReadAll(res.Body)
	if err != nil {
		r.T.Fatal(err)
	}
	if res.StatusCode >= 300 {
		if err := json.Unmarshal(raw, &problem); err != nil || res.Header.Get("Content-Type") != "application/problem+json" {
			r.T.Fatalf("%s %s: %d with %q is not a problem", method, path, res.StatusCode, raw)
		}
		return res.StatusCode, problem
	}
	if out != nil {
		if err := json.Unmarshal(raw, out); err != nil {
			r.T.Fatalf("%s %s: %v in %s", method, path, err, raw)
		}
	}
	return res.StatusCode, problem
}

// Letter finds the only dead letter of an order, or of a message if orderOrMessage is its id.
func (r *Rig) Letter(orderOrMessage string) (store.DeadLetter, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	var rows []store.DeadLetter
	if err := r.Store.DB(ctx).Where("order_id = ? OR message_id = ?", orderOrMessage, orderOrMessage).Find(&rows).Error; err != nil {
		return store.DeadLetter{}, err
	}
	if len(rows) != 1 {
		return store.DeadLetter{}, fmt.Errorf("%d dead letters for %s", len(rows), orderOrMessage)
	}
	return rows[0], nil
}

// Becomes waits until the letter is in a state.
func (r *Rig) Becomes(orderOrMessage, state string) store.DeadLetter {
	r.T.Helper()
	var l store.DeadLetter
	testkit.Eventually(r.T, 2*time.Minute, func() (err error) {
		if l, err = r.Letter(orderOrMessage); err != nil {
			return err
		}
		if l.State != state {
			return fmt.Errorf("letter of %s is %s (%s), want %s", orderOrMessage, l.State, l.Note, state)
		}
		return nil
	})
	return l
}
