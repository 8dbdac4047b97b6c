package app

import (
	"bytes"
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/getkin/kin-openapi/openapi3"
	"github.com/getkin/kin-openapi/openapi3filter"
	"github.com/getkin/kin-openapi/routers"
	"github.com/getkin/kin-openapi/routers/gorillamux"
	"github.com/golang-jwt/jwt/v5"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/redis/go-redis/v9"

	"seckill/pkg/config"
	"seckill/pkg/messaging"
	"seckill/pkg/order"
	"seckill/pkg/stock"
	"seckill/pkg/testkit"
	"seckill/services/order-api/internal/checkout"
)

func TestMain(m *testing.M) { testkit.VerifyNoLeaks(m) }

const (
	testSecret  = "0123456789abcdef0123456789abcdef"
	hookSecret  = "whsec_MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3"
	otherSecret = "whsec_YWJjZGVmMDEyMzQ1Njc4OTAxMjM0NTY3"
)

// world is the stores of one test, and what it needs to look into them.
type world struct {
	t     testing.TB
	env   testkit.RedisEnv
	amqp  string
	stock *stock.Client
	redis *redis.Client
	http  *http.Client
}

// noBroker is where nothing listens: what does not look at messages does without a broker, as the
// click does.
const noBroker = "amqp://guest:guest@127.0.0.1:1/"

func newWorld(t testing.TB) *world {
	t.Helper()
	return newWorldOn(t, testkit.Redis(t), noBroker)
}

func newWorldWithBroker(t testing.TB) *world {
	t.Helper()
	return newWorldOn(t, testkit.Redis(t), testkit.RabbitMQ(t))
}

// patience is how long tests that are not about deadlines wait for a store: test machines are busy, and
// stand still for longer than a buyer would wait.
const patience = 10 * time.Second

func newWorldOn(t testing.TB, env testkit.RedisEnv, amqpURL string) *world {
	t.Helper()
	w := &world{t: t, env: env, amqp: amqpURL}
	var err error
	w.stock, err = stock.New(w.stockConfig(), testkit.Logger(t), prometheus.NewRegistry())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = w.stock.Close() })
	w.redis = redis.NewClient(&redis.Options{Addr: env.Addr, DB: env.DB, DialTimeout: patience, ReadTimeout: patience, PoolTimeout: patience})
	t.Cleanup(func() { _ = w.redis.Close() })
	transport := &http.Transport{MaxIdleConnsPerHost: 256}
	w.http = &http.Client{Transport: transport, Timeout: time.Minute}
	t.Cleanup(transport.CloseIdleConnections)
	return w
}

func (w *world) stockConfig() stock.Config {
	return stock.Config{
		Addrs: []string{w.env.Addr}, DB: w.env.DB, Prefix: w.env.Prefix,
		DialTimeout: patience, ReadTimeout: patience, PoolTimeout: patience,
	}
}

func (w *world) brokerConfig() messaging.Config {
	return messaging.Config{URL: w.amqp, RPCTimeout: 3 * patience, ConfirmTimeout: patience}
}

// declare makes the topology, as a worker would have.
func (w *world) declare() *messaging.Client {
	w.t.Helper()
	c := w.broker()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if err := c.Declare(ctx); err != nil {
		w.t.Fatalf("declare topology: %v", err)
	}
	return c
}

// broker is a client of its own, beside those of the replicas.
func (w *world) broker() *messaging.Client {
	w.t.Helper()
	c, err := messaging.New(w.brokerConfig(), testkit.Logger(w.t), prometheus.NewRegistry())
	if err != nil {
		w.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	c.Start(ctx)
	w.t.Cleanup(func() {
		stop, done := context.WithTimeout(context.Background(), 10*time.Second)
		defer done()
		_ = c.Close(stop)
		cancel()
	})
	return c
}

// inbox collects what is published to a queue.
type inbox struct {
	mu   sync.Mutex
	msgs []messaging.Message
}

func (w *world) collect(c *messaging.Client, queue string) *inbox {
	in := &inbox{}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = c.Consume(ctx, messaging.ConsumerConfig{Queue: queue, BatchOrders: 64}, func(_ context.Context, batch []messaging.Delivery) []messaging.Result {
			in.mu.Lock()
			defer in.mu.Unlock()
			for _, d := range batch {
				// When the connection is lost before the broker has our ack, it delivers again what was published once.
				again := func(m messaging.Message) bool { return m.ID == d.ID }
				if !d.Redelivered || !slices.ContainsFunc(in.msgs, again) {
					in.msgs = append(in.msgs, d.Message)
				}
			}
			return make([]messaging.Result, len(batch))
		})
	}()
	w.t.Cleanup(func() { cancel(); <-done })
	return in
}

func (i *inbox) all() []messaging.Message {
	i.mu.Lock()
	defer i.mu.Unlock()
	return slices.Clone(i.msgs)
}

// orders decodes every order.reserved that has arrived.
func (i *inbox) orders(t *testing.T) []order.Order {
	t.Helper()
	var out []order.Order
	for _, m := range i.all() {
		good, bad, err := messaging.DecodeOrderReserved(m)
		if err != nil || len(bad) > 0 {
			t.Fatalf("message %s: %v %v", m.ID, bad, err)
		}
		out = append(out, good...)
	}
	return out
}

// replica is one running order-api.
type replica struct {
	*App
	w    *world
	stop func() error
}

func (w *world) config() Config {
	c := Config{
		HTTP:     HTTPConfig{Addr: "127.0.0.1:0", WriteTimeout: 3 * patience, StopTimeout: time.Minute},
		Metrics:  MetricsConfig{Addr: "127.0.0.1:0"},
		Redis:    w.stockConfig(),
		RabbitMQ: w.brokerConfig(),
		Auth:     AuthConfig{JWTSecret: testSecret},
		Payment:  PaymentConfig{Secrets: []config.Secret{hookSecret}},
		Checkout: checkout.Config{RedisTimeout: patience},
	}
	if w.amqp != noBroker { // without one there is nothing to be patient for
		c.Checkout.PublishTimeout = patience // no relay runs here: what is confirmed too late is never published
	}
	return c
}

func (w *world) replica(change ...func(*Config)) *replica {
	w.t.Helper()
	cfg := w.config()
	for _, f := range change {
		f(&cfg)
	}
	a, err := New(context.Background(), cfg, testkit.Logger(w.t))
	if err != nil {
		w.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- a.Run(ctx) }()
	r := &replica{App: a, w: w}
	r.stop = sync.OnceValue(func() error {
		w.http.CloseIdleConnections()
		cancel()
		return <-done
	})
	w.t.Cleanup(func() {
		if err := r.stop(); err != nil {
			w.t.Errorf("stop replica: %v", err)
		}
	})
	return r
}

// ready waits until the replica says so.
func (r *replica) ready() *replica {
	r.w.t.Helper()
	testkit.Eventually(r.w.t, time.Minute, func() error {
		code, body := r.ops("/readyz")
		if code != http.StatusOK {
			return fmt.Errorf("not ready: %s", body)
		}
		if r.w.amqp != noBroker && !strings.Contains(body, `"detail":"connected"`) {
			return fmt.Errorf("broker not connected: %s", body)
		}
		return nil
	})
	return r
}

func (r *replica) ops(path string) (int, string) {
	r.w.t.Helper()
	resp, err := r.w.http.Get("http://" + r.MetricsAddr() + path)
	if err != nil {
		return 0, err.Error()
	}
	defer func() { _ = resp.Body.Close() }()
	body, _ := io.ReadAll(resp.Body)
	return resp.StatusCode, string(body)
}

// sale announces, warms and opens an activity.
func (w *world) sale(id string, change ...func(*stock.Activity)) *stock.Activity {
	w.t.Helper()
	a := w.announce(id, change...)
	ctx := context.Background()
	amounts := make(map[string]map[string]int)
	for _, it := range a.Items {
		amounts[it.SKU] = it.Pools
	}
	if err := w.stock.PrepareWarm(ctx, a, 1, amounts); err != nil {
		w.t.Fatal(err)
	}
	if n, err := w.stock.OpenWarm(ctx, a, 1); err != nil || n != max(a.Buckets, 1) {
		w.t.Fatalf("opened %d buckets: %v", n, err)
	}
	return a
}

func (w *world) announce(id string, change ...func(*stock.Activity)) *stock.Activity {
	w.t.Helper()
	now := time.Now().UTC()
	a := &stock.Activity{
		ID: id, Name: "Sale " + id, StartsAt: now.Add(-time.Minute), EndsAt: now.Add(time.Hour), PerUserLimit: 1,
		PaymentTimeout: time.Minute, Currency: "CNY", Buckets: 1, Epoch: 1,
		Items: []stock.Item{{SKU: "mug", PriceMinor: 1999, Pools: map[string]int{"national": 20}}},
	}
	for _, f := range change {
		f(a)
	}
	if err := w.stock.Announce(context.Background(), a); err != nil {
		w.t.Fatal(err)
	}
	return a
}

// impatient gives a replica its deadlines of production.
func impatient(c *Config) {
	c.Redis.ReadTimeout, c.Checkout.RedisTimeout = 0, 0
}

// inTime is within which every buyer has his answer.
const inTime = 3 * time.Second

func pools(sku string, levels map[string]int) func(*stock.Activity) {
	return func(a *stock.Activity) { a.Items = []stock.Item{{SKU: sku, PriceMinor: 1999, Pools: levels}} }
}

func limit(n int) func(*stock.Activity) { return func(a *stock.Activity) { a.PerUserLimit = n } }

// left is what is on sale of the mug, all pools and buckets.
func (w *world) left(a *stock.Activity) int {
	w.t.Helper()
	levels, err := w.stock.Levels(context.Background(), a)
	if err != nil {
		w.t.Fatal(err)
	}
	sum := 0
	for _, n := range levels["mug"] {
		sum += n
	}
	return sum
}

// fingerprint is every key of the test with its value, to show that nothing was written.
func (w *world) fingerprint() map[string]string {
	w.t.Helper()
	ctx := context.Background()
	out := make(map[string]string)
	it := w.redis.Scan(ctx, 0, w.env.Prefix+"*", 1000).Iterator()
	for it.Next(ctx) {
		dump, err := w.redis.Dump(ctx, it.Val()).Result()
		if err != nil {
			w.t.Fatal(err)
		}
		out[it.Val()] = dump
	}
	if err := it.Err(); err != nil {
		w.t.Fatal(err)
	}
	return out
}

// token signs a buyer's token.
func token(user string, change ...func(jwt.MapClaims)) string {
	claims := jwt.MapClaims{"sub": user, "exp": time.Now().Add(time.Hour).Unix()}
	for _, f := range change {
		f(claims)
	}
	s, err := jwt.NewWithClaims(jwt.SigningMethodHS256, claims).SignedString([]byte(testSecret))
	if err != nil {
		panic(err)
	}
	return s
}

// answer is a response, its body read and checked against the OpenAPI document.
type answer struct {
	status int
	header http.Header
	body   []byte
	fields map[string]any
}

func (a answer) code() string    { s, _ := a.fields["code"].(string); return s }
func (a answer) orderID() string { s, _ := a.fields["order_id"].(string); return s }

func (a answer) String() string { return fmt.Sprintf("%d %s", a.status, a.body) }

// call is one request. What is empty is left out.
type call struct {
	method, path, token, key, contentType, body string
	header                                      http.Header
}

func (r *replica) do(c call) answer {
	r.w.t.Helper()
	a, err := r.try(c)
	if err != nil {
		r.w.t.Fatalf("%s %s: %v", c.method, c.path, err)
	}
	return a
}

func (r *replica) try(c call) (answer, error) {
	req, err := http.NewRequest(c.method, "http://"+r.Addr()+c.path, strings.NewReader(c.body))
	if err != nil {
		return answer{}, err
	}
	for k, v := range c.header {
		req.Header[k] = v
	}
	if c.token != "" {
		req.Header.Set("Authorization", "Bearer "+c.token)
	}
	if c.key != "" {
		req.Header.Set("Idempotency-Key", c.key)
	}
	switch {
	case c.contentType != "":
		req.Header.Set("Content-Type", c.contentType)
	case c.body != "":
		req.Header.Set("Content-Type", "application/json")
	}
	resp, err := r.w.http.Do(req)
	if err != nil {
		return answer{}, err
	}
	defer func() { _ = resp.Body.Close() }()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		return answer{}, err
	}
	a := answer{status: resp.StatusCode, header: resp.Header, body: body}
	if strings.Contains(resp.Header.Get("Content-Type"), "json") {
		if err := json.Unmarshal(body, &a.fields); err != nil {
			return a, fmt.Errorf("answer %s: %w", body, err)
		}
	}
	return a, checkAnswer(req, a)
}

var openAPI = sync.OnceValues(func() (routers.Router, *openapi3.T) {
	doc, err := openapi3.NewLoader().LoadFromFile("../httpapi/openapi.yaml")
	if err != nil {
		panic(err)
	}
	router, err := gorillamux.NewRouter(doc)
	if err != nil {
		panic(err)
	}
	return router, doc
})

// checkAnswer holds an answer against the OpenAPI document. What the document has no operation for
// has to be a problem.
func checkAnswer(req *http.Request, a answer) error {
	if a.status >= 400 {
		if ct := a.header.Get("Content-Type"); ct != "application/problem+json" {
			return fmt.Errorf("answer %s is %s and no problem", a, ct)
		}
		if a.fields["type"] != "/problems/"+a.code() || a.fields["status"] != float64(a.status) || a.fields["title"] == "" {
			return fmt.Errorf("answer %s does not agree with itself", a)
		}
	}
	if (a.status == http.StatusServiceUnavailable || a.status == http.StatusTooManyRequests) && a.header.Get("Retry-After") == "" {
		return fmt.Errorf("answer %s has no Retry-After", a)
	}
	router, _ := openAPI()
	plain := req.Clone(req.Context())
	plain.URL.Scheme, plain.URL.Host, plain.Host = "", "", ""
	route, params, err := router.FindRoute(plain)
	if err != nil {
		if a.status == http.StatusNotFound || a.status == http.StatusMethodNotAllowed {
			return nil
		}
		return fmt.Errorf("answer %s to a call that is not in the document: %w", a, err)
	}
	in := &openapi3filter.ResponseValidationInput{
		RequestValidationInput: &openapi3filter.RequestValidationInput{Request: plain, PathParams: params, Route: route},
		Status:                 a.status,
		Header:                 a.header,
		Body:                   io.NopCloser(bytes.NewReader(a.body)),
		Options:                &openapi3filter.Options{IncludeResponseStatus: true, MultiError: true},
	}
	if err := openapi3filter.ValidateResponse(context.Background(), in); err != nil {
		return fmt.Errorf("answer %s is not what the document says: %w", a, err)
	}
	return nil
}

// buy asks for mugs.
func (r *replica) buy(activity, user string, quantity int, key string) answer {
	r.w.t.Helper()
	return r.do(r.purchase(activity, user, quantity, key))
}

func (r *replica) purchase(activity, user string, quantity int, key string) call {
	return call{
		method: http.MethodPost, path: "/v1/activities/" + activity + "/orders", token: token(user), key: key,
		body: fmt.Sprintf(`{"sku_id":"mug","quantity":%d}`, quantity),
	}
}

// signed makes a payment callback's headers.
func signed(secret, id string, at time.Time, body string) http.Header {
	key, err := base64.StdEncoding.DecodeString(strings.TrimPrefix(secret, "whsec_"))
	if err != nil {
		panic(err)
	}
	ts := fmt.Sprint(at.Unix())
	return http.Header{
		"Webhook-Id":        {id},
		"Webhook-Timestamp": {ts},
		"Webhook-Signature": {"v1," + base64.StdEncoding.EncodeToString(hmacSHA256(key, id+"."+ts+"."+body))},
	}
}

func payment(orderID string, amount int64, currency, txn string) string {
	return fmt.Sprintf(`{"type":"payment.succeeded","order_id":%q,"transaction_id":%q,"amount_minor":%d,"currency":%q}`, orderID, txn, amount, currency)
}

func (r *replica) pay(body string, h http.Header) answer {
	r.w.t.Helper()
	return r.do(call{method: http.MethodPost, path: "/v1/payments/callback", body: body, header: h})
}

// metric reads one series from the metrics page; -1 when it is not there.
func (r *replica) metric(series string) float64 {
	r.w.t.Helper()
	_, body := r.ops("/metrics")
	for line := range strings.Lines(body) {
		if v, ok := strings.CutPrefix(line, series+" "); ok {
			var f float64
			if _, err := fmt.Sscan(v, &f); err == nil {
				return f
			}
		}
	}
	return -1
}

func hmacSHA256(key []byte, text string) []byte {
	mac := hmac.New(sha256.New, key)
	mac.Write([]byte(text))
	return mac.Sum(nil)
}

func eventually(t testing.TB, cond func() error) {
	t.Helper()
	testkit.Eventually(t, time.Minute, cond)
}
