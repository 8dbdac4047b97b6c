package acceptance

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"database/sql"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"
	"github.com/golang-jwt/jwt/v5"
	amqp "github.com/rabbitmq/amqp091-go"
	"github.com/redis/go-redis/v9"

	"seckill/pkg/sale"
	"seckill/pkg/stock"
	"seckill/pkg/testkit"
)

const (
	jwtSecret  = "acceptance-tests-secret-of-32-by"
	hookKey    = "acceptance tests: callback key 1"
	adminToken = "acceptance-admin-token"
)

// within is how long a test waits for something that the system does by itself: the slowest of these
// is the relay, which looks after entries that are older than its threshold.
const within = 60 * time.Second

// options of a stack; the zero value is one replica of each on the shared servers.
type options struct {
	apis, workers int
	redis         *testkit.Server       // private
	rabbit        *testkit.RabbitServer // private
	redisEnv      *testkit.RedisEnv     // made by the test
	amqpURL       string                // likewise
	redisAddr     string                // what order-api dials, e.g. a proxy
	rabbitURL     string                // likewise
	mysqlProxy    bool                  // the workers dial MySQL through stack.mysql
	apiEnv        map[string]string
	workerEnv     map[string]string
	cold          bool // start nothing: the test does
}

// stack is the running system with everything that a test needs to talk to it.
type stack struct {
	t       testing.TB
	apis    []*process
	workers []*process
	db      *sql.DB
	rdb     *redis.Client
	stock   *stock.Client
	mysql   *testkit.Proxy // with options.mysqlProxy
	prefix  string
	amqpURL string
	client  *http.Client

	tokenFile string
	names     *atomic.Int64
	counting  *sync.Mutex // while the inventory is counted for a sale
}

func newStack(t testing.TB, o options) *stack {
	t.Helper()
	s := &stack{t: t, names: &atomic.Int64{}, counting: &sync.Mutex{}}
	redisEnv := testkit.RedisEnv{}
	if o.redis != nil {
		redisEnv.Addr = o.redis.Addr
	} else if o.redisEnv != nil {
		redisEnv = *o.redisEnv
	} else {
		redisEnv = testkit.Redis(t)
	}
	s.prefix = redisEnv.Prefix
	if o.rabbit != nil {
		s.amqpURL = o.rabbit.URL
	} else if o.amqpURL != "" {
		s.amqpURL = o.amqpURL
	} else {
		s.amqpURL = testkit.RabbitMQ(t)
	}
	dsn := testkit.MySQL(t)
	s.openMySQL(dsn)
	s.rdb = redis.NewClient(&redis.Options{Addr: redisEnv.Addr, DB: redisEnv.DB, ReadTimeout: 10 * time.Second})
	t.Cleanup(func() { _ = s.rdb.Close() })
	var err error
	s.stock, err = stock.New(stock.Config{Addrs: []string{redisEnv.Addr}, DB: redisEnv.DB, Prefix: redisEnv.Prefix, ReadTimeout: 10 * time.Second, PoolTimeout: 10 * time.Second}, testkit.Logger(t), nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.stock.Close() })
	s.client = &http.Client{Timeout: 15 * time.Second, Transport: &http.Transport{MaxIdleConnsPerHost: 64}}
	t.Cleanup(s.client.CloseIdleConnections)
	s.tokenFile = filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(s.tokenFile, []byte(adminToken+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}

	sum := sha256.Sum256([]byte(adminToken))
	common := map[string]string{
		"SECKILL_REDIS_MODE": "single", "SECKILL_REDIS_ADDRS": redisEnv.Addr, "SECKILL_REDIS_DB": strconv.Itoa(redisEnv.DB),
		"SECKILL_REDIS_PREFIX": redisEnv.Prefix, "SECKILL_RABBITMQ_URL": s.amqpURL, "SECKILL_LOG_LEVEL": "debug",
		"SECKILL_AUTH_JWT_SECRET": jwtSecret, "SECKILL_PAYMENT_SECRETS": "whsec_" + base64.StdEncoding.EncodeToString([]byte(hookKey)),
	}
	for i := range max(o.apis, 1) {
		env := maps.Clone(common)
		if o.redisAddr != "" {
			env["SECKILL_REDIS_ADDRS"] = o.redisAddr
		}
		if o.rabbitURL != "" {
			env["SECKILL_RABBITMQ_URL"] = o.rabbitURL
		}
		env["SECKILL_HTTP_ADDR"], env["SECKILL_METRICS_ADDR"] = s.address(), s.address()
		// Several tests at once on a small machine, race detector on: a slow answer is not what most
		// of them are about.
		env["SECKILL_REDIS_READ_TIMEOUT"], env["SECKILL_CHECKOUT_REDIS_TIMEOUT"] = "3s", "4s"
		env["SECKILL_CHECKOUT_PUBLISH_TIMEOUT"] = "5s"
		maps.Copy(env, o.apiEnv)
		s.apis = append(s.apis, newProcess(t, "order-api-"+strconv.Itoa(i), built.api, env["SECKILL_METRICS_ADDR"], env))
	}
	if o.mysqlProxy {
		cfg, err := mysql.ParseDSN(dsn)
		if err != nil {
			t.Fatal(err)
		}
		s.mysql = testkit.NewProxy(t, cfg.Addr)
		cfg.Addr = s.mysql.Addr
		dsn = cfg.FormatDSN()
	}
	for i := range max(o.workers, 1) {
		env := maps.Clone(common)
		env["SECKILL_MYSQL_DSN"] = dsn
		env["SECKILL_ADMIN_TOKENS"] = "tester:operator:" + hex.EncodeToString(sum[:])
		env["SECKILL_ADMIN_ADDR"], env["SECKILL_METRICS_ADDR"] = s.address(), s.address()
		maps.Copy(env, fastWorker())
		maps.Copy(env, o.workerEnv)
		s.workers = append(s.workers, newProcess(t, "order-worker-"+strconv.Itoa(i), built.worker, env["SECKILL_METRICS_ADDR"], env))
	}
	if !o.cold {
		for _, w := range s.workers {
			w.launch("")
		}
		for _, w := range s.workers {
			w.ready()
		}
		for _, a := range s.apis {
			a.launch("")
		}
		for _, a := range s.apis {
			a.ready()
		}
	}
	return s
}

// with is the same stack, speaking to a subtest.
func (s *stack) with(t testing.TB) *stack {
	c := *s
	c.t = t
	return &c
}

// fastWorker shortens the intervals that a test would have to sit through.
func fastWorker() map[string]string {
	return map[string]string{
		"SECKILL_RELAY_INTERVAL": "200ms", "SECKILL_RELAY_AGE": "2s", "SECKILL_RELAY_MAX_BACKOFF": "5s",
		"SECKILL_REDIS_READ_TIMEOUT": "3s", "SECKILL_SWEEP_INTERVAL": "500ms", "SECKILL_SWEEP_GRACE": "2s", "SECKILL_RABBITMQ_RECONNECT_MAX": "1s",
	}
}

func (s *stack) address() string {
	return net.JoinHostPort("127.0.0.1", strconv.Itoa(testkit.FreePort(s.t)))
}

func (s *stack) openMySQL(dsn string) {
	s.t.Helper()
	cfg, err := mysql.ParseDSN(dsn)
	if err != nil {
		s.t.Fatal(err)
	}
	cfg.ParseTime, cfg.Loc, cfg.Params = true, time.UTC, map[string]string{"time_zone": "'+00:00'"}
	connector, err := mysql.NewConnector(cfg)
	if err != nil {
		s.t.Fatal(err)
	}
	s.db = sql.OpenDB(connector)
	s.t.Cleanup(func() { _ = s.db.Close() })
}

// exec changes rows behind the system's back.
func (s *stack) exec(query string, args ...any) int64 {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	r, err := s.db.ExecContext(ctx, query, args...)
	if err != nil {
		s.t.Fatalf("%s: %v", query, err)
	}
	n, err := r.RowsAffected()
	if err != nil {
		s.t.Fatal(err)
	}
	return n
}

// count reads one number.
func (s *stack) count(query string, args ...any) int {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	var n sql.NullInt64
	if err := s.db.QueryRowContext(ctx, query, args...).Scan(&n); err != nil {
		s.t.Fatalf("%s: %v", query, err)
	}
	return int(n.Int64)
}

// status reads the state of an order's row, "" while there is none.
func (s *stack) status(id string) string {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	var st string
	err := s.db.QueryRowContext(ctx, "SELECT status FROM orders WHERE id = ?", id).Scan(&st)
	if err != nil && err != sql.ErrNoRows { //nolint:errorlint // database/sql returns it bare
		s.t.Fatal(err)
	}
	return st
}

// becomes waits until an order's row has one of the states.
func (s *stack) becomes(id string, states ...string) {
	s.t.Helper()
	testkit.Eventually(s.t, within, func() error {
		got := s.status(id)
		for _, want := range states {
			if got == want {
				return nil
			}
		}
		return fmt.Errorf("order %s is %q, not %v", id, got, states)
	})
}

// level reads what Redis has on sale of a pool.
func (s *stack) level(activity, sku, pool string) int {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	a, err := s.stock.Activity(ctx, activity)
	if err != nil {
		s.t.Fatal(err)
	}
	levels, err := s.stock.Levels(ctx, &a)
	if err != nil {
		s.t.Fatal(err)
	}
	n, ok := levels[sku][pool]
	if !ok {
		s.t.Fatalf("no level of %s/%s", sku, pool)
	}
	return n
}

// broker opens a channel of its own to the stack's vhost.
func (s *stack) broker() *amqp.Channel {
	s.t.Helper()
	conn, err := amqp.Dial(s.amqpURL)
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { _ = conn.Close() })
	ch, err := conn.Channel()
	if err != nil {
		s.t.Fatal(err)
	}
	return ch
}

// publish puts a message on the events exchange and waits for its confirm.
func (s *stack) publish(key, id string, body []byte) {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	ch := s.broker()
	if err := ch.Confirm(false); err != nil {
		s.t.Fatal(err)
	}
	confirm, err := ch.PublishWithDeferredConfirmWithContext(ctx, "seckill.events", key, true, false, amqp.Publishing{
		MessageId: id, Type: key, ContentType: "application/x-protobuf", DeliveryMode: amqp.Persistent, Timestamp: time.Now(), Body: body,
	})
	if err != nil {
		s.t.Fatal(err)
	}
	if ok, err := confirm.WaitContext(ctx); err != nil || !ok {
		s.t.Fatalf("publish %s: confirmed %v, %v", id, ok, err)
	}
}

// depth counts what lies in a queue undelivered.
func (s *stack) depth(queue string) int {
	s.t.Helper()
	conn, err := amqp.Dial(s.amqpURL)
	if err != nil {
		s.t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	ch, err := conn.Channel()
	if err != nil {
		s.t.Fatal(err)
	}
	q, err := ch.QueueDeclarePassive(queue, true, false, false, false, nil)
	if err != nil {
		s.t.Fatalf("look at queue %s: %v", queue, err)
	}
	return q.Messages
}

// --- the storefront ---

// token is a buyer's.
func token(user string) string {
	t := jwt.NewWithClaims(jwt.SigningMethodHS256, jwt.MapClaims{"sub": user, "exp": time.Now().Add(time.Hour).Unix()})
	s, err := t.SignedString([]byte(jwtSecret))
	if err != nil {
		panic(err) // HMAC does not fail
	}
	return s
}

func fetch(ctx context.Context, method, url string, header map[string]string, body io.Reader) (int, string, error) {
	return fetchWith(ctx, http.DefaultClient, method, url, header, body)
}

func fetchWith(ctx context.Context, c *http.Client, method, url string, header map[string]string, body io.Reader) (int, string, error) {
	req, err := http.NewRequestWithContext(ctx, method, url, body)
	if err != nil {
		return 0, "", err
	}
	for k, v := range header {
		req.Header.Set(k, v)
	}
	if c == http.DefaultClient {
		req.Close = true // nothing stays open behind the leak check's back
	}
	res, err := c.Do(req)
	if err != nil {
		return 0, "", err
	}
	defer func() { _ = res.Body.Close() }()
	raw, err := io.ReadAll(io.LimitReader(res.Body, 8<<20))
	return res.StatusCode, string(raw), err
}

// reply is an answer of the storefront API. Err is set when there was none.
type reply struct {
	Status  int           `json:"-"`
	OrderID string        `json:"order_id"`
	State   string        `json:"-"` // "status" of an order; a problem's is a number
	Code    string        `json:"code"`
	Reason  string        `json:"reason"`
	Pool    string        `json:"pool"`
	Due     bool          `json:"refund_due"`
	Body    string        `json:"-"`
	Err     error         `json:"-"`
	Took    time.Duration `json:"-"`
}

func (r reply) accepted() bool { return r.Err == nil && r.Status == http.StatusAccepted }

func (s *stack) api(i int) string { return "http://" + s.apis[i].env["SECKILL_HTTP_ADDR"] }

func (s *stack) call(method, url, user string, header map[string]string, body string) reply {
	ctx, cancel := context.WithTimeout(context.Background(), 15*time.Second)
	defer cancel()
	h := map[string]string{}
	if user != "" {
		h["Authorization"] = "Bearer " + token(user)
	}
	var in io.Reader
	if body != "" {
		h["Content-Type"] = "application/json"
		in = strings.NewReader(body)
	}
	maps.Copy(h, header)
	started := time.Now()
	status, text, err := fetchWith(ctx, s.client, method, url, h, in)
	r := reply{Err: err, Body: text, Took: time.Since(started)}
	if err == nil && text != "" {
		r.Err = json.Unmarshal([]byte(text), &r)
		var state struct {
			Status any `json:"status"`
		}
		if r.Err == nil {
			r.Err = json.Unmarshal([]byte(text), &state)
		}
		r.State, _ = state.Status.(string)
	}
	r.Status = status
	return r
}

// buy sends a reservation of the first good of a test sale to a replica.
func (s *stack) buy(replica int, activity, user, key string, quantity int) reply {
	var h map[string]string
	if key != "" {
		h = map[string]string{"Idempotency-Key": key}
	}
	return s.call(http.MethodPost, s.api(replica)+"/v1/activities/"+activity+"/orders", user, h,
		fmt.Sprintf(`{"sku_id":"sku","quantity":%d,"region":"national"}`, quantity))
}

// mustBuy buys one unit and fails the test otherwise.
func (s *stack) mustBuy(activity, user string) string {
	s.t.Helper()
	r := s.buy(0, activity, user, "k", 1)
	if !r.accepted() {
		s.t.Fatalf("buy as %s: %d %s %v", user, r.Status, r.Body, r.Err)
	}
	return r.OrderID
}

// insist buys one unit with the same key until the answer is an order, as a buyer's button does.
func (s *stack) insist(activity, user string) (id string) {
	s.t.Helper()
	testkit.Eventually(s.t, within, func() error {
		r := s.buy(0, activity, user, "k", 1)
		if !r.accepted() {
			return fmt.Errorf("buy as %s: %d %s %v", user, r.Status, r.Body, r.Err)
		}
		id = r.OrderID
		return nil
	})
	return id
}

func (s *stack) look(id, user string) reply {
	return s.call(http.MethodGet, s.api(0)+"/v1/orders/"+id, user, nil, "")
}

// mine lists a buyer's orders.
func (s *stack) mine(activity, user string) []string {
	s.t.Helper()
	r := s.call(http.MethodGet, s.api(0)+"/v1/activities/"+activity+"/orders/mine", user, nil, "")
	if r.Err != nil || r.Status != http.StatusOK {
		s.t.Fatalf("mine of %s: %d %s %v", user, r.Status, r.Body, r.Err)
	}
	var out struct {
		Orders []struct {
			OrderID string `json:"order_id"`
		} `json:"orders"`
	}
	if err := json.Unmarshal([]byte(r.Body), &out); err != nil {
		s.t.Fatal(err)
	}
	ids := []string{}
	for _, o := range out.Orders {
		ids = append(ids, o.OrderID)
	}
	return ids
}

func (s *stack) cancel(id, user string) reply {
	return s.call(http.MethodDelete, s.api(0)+"/v1/orders/"+id, user, nil, "")
}

// price of the test sale's good.
const price = 1999

// pay sends a signed callback.
func (s *stack) pay(id, txn string, quantity int) reply {
	return s.payAmount(id, txn, price*quantity)
}

func (s *stack) payAmount(id, txn string, minor int) reply {
	body := fmt.Sprintf(`{"type":"payment.succeeded","order_id":"%s","transaction_id":"%s","amount_minor":%d,"currency":"EUR"}`, id, txn, minor)
	return s.call(http.MethodPost, s.api(0)+"/v1/payments/callback", "", signed(body), body)
}

func signed(body string) map[string]string {
	id, ts := "msg_"+strconv.FormatInt(time.Now().UnixNano(), 36), strconv.FormatInt(time.Now().Unix(), 10)
	mac := hmac.New(sha256.New, []byte(hookKey))
	mac.Write([]byte(id + "." + ts + "." + body))
	return map[string]string{
		// For the HTTP client alone: it repeats a call whose idle connection the server has just closed.
		"X-Idempotency-Key": id,
		"webhook-id":        id, "webhook-timestamp": ts, "webhook-signature": "v1," + base64.StdEncoding.EncodeToString(mac.Sum(nil)),
	}
}

// paidOrDue waits until a payment has been decided: its order is paid, or it is due for refund.
func (s *stack) paidOrDue(id string) {
	s.t.Helper()
	testkit.Eventually(s.t, within, func() error {
		if paid, due := s.status(id) == "paid", s.due(id); paid == due {
			return fmt.Errorf("order %s: paid %v, refund due %v", id, paid, due)
		}
		return nil
	})
}

// --- the operator ---

// admin calls the admin API of the first worker.
func (s *stack) admin(method, path string, in, out any) (int, string) {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	h := map[string]string{"Authorization": "Bearer " + adminToken}
	var body io.Reader
	if in != nil {
		raw, err := json.Marshal(in)
		if err != nil {
			s.t.Fatal(err)
		}
		h["Content-Type"] = "application/json"
		body = strings.NewReader(string(raw))
	}
	status, text, err := fetchWith(ctx, s.client, method, "http://"+s.workers[0].env["SECKILL_ADMIN_ADDR"]+path, h, body)
	if err != nil {
		s.t.Fatalf("%s %s: %v", method, path, err)
	}
	if out != nil && status/100 == 2 {
		if err := json.Unmarshal([]byte(text), out); err != nil {
			s.t.Fatalf("%s %s: %v in %s", method, path, err, text)
		}
	}
	return status, text
}

func (s *stack) mustAdmin(method, path string, in, out any) {
	s.t.Helper()
	if status, text := s.admin(method, path, in, out); status/100 != 2 {
		s.t.Fatalf("%s %s: %d %s", method, path, status, text)
	}
}

// sell makes and warms a sale with one good in one pool and gives its id.
func (s *stack) sell(units, limit int, timeout time.Duration) string {
	s.t.Helper()
	// A connection that was dialled and never used is closed by the server after a while; a crowd must
	// not pick it up in that very moment.
	s.client.CloseIdleConnections()
	id := "sale-" + strconv.FormatInt(s.names.Add(1), 10)
	s.mustAdmin(http.MethodPut, "/admin/v1/inventory", map[string]any{"sku_id": "sku", "pool": "national", "on_hand": units}, nil)
	s.mustAdmin(http.MethodPost, "/admin/v1/activities", sale.Sale{
		ID: id, Name: "Acceptance " + id, StartsAt: time.Now().Add(-time.Second).UTC().Format(time.RFC3339Nano),
		EndsAt: time.Now().Add(2 * time.Hour).UTC().Format(time.RFC3339Nano), PerUserLimit: limit, PaymentTimeout: timeout.String(),
		Currency: "EUR", Qualification: sale.QualificationNone, Buckets: 1, RefundAfterEnd: sale.RefundNational,
		Items: []sale.Item{{SKU: "sku", PriceMinor: price, Pools: map[string]int{"national": units}}},
	}, nil)
	s.mustAdmin(http.MethodPost, "/admin/v1/activities/"+id+"/warm", nil, nil)
	return id
}
