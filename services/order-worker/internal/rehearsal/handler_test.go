package rehearsal

import (
	"bufio"
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/golang-jwt/jwt/v5"
	"github.com/prometheus/client_golang/prometheus"

	"seckill/pkg/order"
	"seckill/pkg/stock"
	"seckill/pkg/testkit"
	"seckill/services/order-worker/internal/store"
)

const (
	jwtSecret = "0123456789abcdef0123456789abcdef"
	hookKey   = "a key for callbacks, 32 bytes ok"
)

type bench struct {
	h     *Handler
	store *store.Store
	stock *stock.Client
}

// newBench has a shadow sale "shade" and a real one "real".
func newBench(t *testing.T) *bench {
	t.Helper()
	log := testkit.Logger(t)
	st, err := store.Open(store.Config{DSN: testkit.MySQL(t)}, log, prometheus.NewRegistry())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = st.Close() })
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	if err := st.Migrate(ctx); err != nil {
		t.Fatal(err)
	}
	env := testkit.Redis(t)
	stk, err := stock.New(stock.Config{Addrs: []string{env.Addr}, DB: env.DB, Prefix: env.Prefix, ReadTimeout: 5 * time.Second}, log, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = stk.Close() })
	now := time.Now().UTC()
	for _, id := range []string{"shade", "real"} {
		a := store.Activity{
			ID: id, Name: id, State: "warmed", StartsAt: now, EndsAt: now.Add(time.Hour), PerUserLimit: 1, PaymentTimeoutS: 60, Currency: "EUR",
			Qualification: "none", Buckets: 2, RegionFallback: "{}", RefundAfterEnd: "national", Shadow: id == "shade", CreatedAt: now, UpdatedAt: now,
		}
		if err := st.DB(ctx).Create(&a).Error; err != nil {
			t.Fatal(err)
		}
	}
	h, err := New(Config{JWTSecret: jwtSecret, PaymentSecret: "whsec_" + base64.StdEncoding.EncodeToString([]byte(hookKey))}, st, stk, nil, log)
	if err != nil {
		t.Fatal(err)
	}
	return &bench{h, st, stk}
}

func (b *bench) call(method, path, body string) *httptest.ResponseRecorder {
	w := httptest.NewRecorder()
	b.h.ServeHTTP(w, httptest.NewRequest(method, "/admin/v1/rehearsals/"+path, strings.NewReader(body)))
	return w
}

func TestCredentialsAreForShadowActivitiesOnly(t *testing.T) {
	b := newBench(t)
	for _, route := range []string{"POST real/tokens", "POST real/sign", "POST real/poison", "GET real/progress", "GET real/snapshot"} {
		method, path, _ := strings.Cut(route, " ")
		if w := b.call(method, path, `{"users":["u"]}`); w.Code != http.StatusForbidden {
			t.Errorf("%s: %d %s", route, w.Code, w.Body)
		}
	}
	if w := b.call("POST", "nowhere/tokens", `{"users":["u"]}`); w.Code != http.StatusNotFound || !strings.Contains(w.Body.String(), "activity_not_found") {
		t.Errorf("unknown activity: %d %s", w.Code, w.Body)
	}
	for _, id := range []string{"shade", "real"} {
		other := map[string]string{"shade": "real", "real": "shade"}[id]
		payload := fmt.Sprintf(`{"type":"payment.succeeded","order_id":"%s-0-01ARZ3NDEKTSV4RRFFQ69G5FAV","transaction_id":"t","amount_minor":1,"currency":"EUR"}`, id)
		body, err := json.Marshal(map[string][]string{"payloads": {payload}})
		if err != nil {
			t.Fatal(err)
		}
		w := b.call("POST", "shade/sign", string(body))
		if want := map[string]int{"shade": http.StatusOK, "real": http.StatusForbidden}[id]; w.Code != want {
			t.Errorf("sign for an order of %s (not %s): %d %s", id, other, w.Code, w.Body)
		}
	}
}

// What is signed must not be readable as another order by anybody.
func TestOnlyThePlainFormOfACallbackIsSigned(t *testing.T) {
	const own, foreign = "shade-0-01ARZ3NDEKTSV4RRFFQ69G5FAV", "real-0-01ARZ3NDEKTSV4RRFFQ69G5FAV"
	good := `{"type":"payment.succeeded","order_id":"` + own + `","transaction_id":"t","amount_minor":1,"currency":"EUR"}`
	if err := ownPayment(good, "shade"); err != nil {
		t.Fatal(err)
	}
	for _, bad := range []string{
		strings.Replace(good, own, foreign, 1),
		`{"type":"payment.succeeded","order_id":"` + foreign + `","order_id":"` + own + `","transaction_id":"t","amount_minor":1,"currency":"EUR"}`,
		strings.Replace(good, `"type"`, `"Order_ID":"`+foreign+`","type"`, 1),
		good + good, good + " ", " " + good, "[]", "", `{"order_id":"` + own + `"}`,
	} {
		if err := ownPayment(bad, "shade"); err == nil {
			t.Errorf("accepted %s", bad)
		}
	}
}

func TestTokensNameUserAndActivity(t *testing.T) {
	b := newBench(t)
	w := b.call("POST", "shade/tokens", `{"users":["u1","u2"],"ttl":"10m"}`)
	var out struct{ Tokens []string }
	if err := json.Unmarshal(w.Body.Bytes(), &out); err != nil || len(out.Tokens) != 2 {
		t.Fatalf("%d %s", w.Code, w.Body)
	}
	var c claims
	if _, err := jwt.ParseWithClaims(out.Tokens[1], &c, func(*jwt.Token) (any, error) { return []byte(jwtSecret), nil }, jwt.WithExpirationRequired(), jwt.WithValidMethods([]string{"HS256"})); err != nil {
		t.Fatal(err)
	}
	if c.Subject != "u2" || c.Activity != "shade" || time.Until(c.ExpiresAt.Time) > 10*time.Minute {
		t.Errorf("claims %+v", c)
	}
	for _, bad := range []string{`{}`, `{"users":[]}`, `{"users":["a b"]}`, `{"users":["u"],"ttl":"7h"}`, `{"users":["u"],"ttl":"soon"}`, `{"users":["u"],"admin":true}`, `nope`} {
		if w := b.call("POST", "shade/tokens", bad); w.Code != http.StatusBadRequest {
			t.Errorf("%s: %d", bad, w.Code)
		}
	}
}

func TestSignaturesFollowTheConvention(t *testing.T) {
	now := time.Unix(1_700_000_000, 0)
	s := sign([]byte(hookKey), `{"a":1}`, now)
	mac := hmac.New(sha256.New, []byte(hookKey))
	mac.Write([]byte(s.ID + `.1700000000.{"a":1}`))
	if want := "v1," + base64.StdEncoding.EncodeToString(mac.Sum(nil)); s.Signature != want || s.Timestamp != "1700000000" {
		t.Errorf("got %+v, want %s", s, want)
	}
}

func TestWithoutKeysNothingIsSigned(t *testing.T) {
	b := newBench(t)
	h, err := New(Config{}, b.store, b.stock, nil, testkit.Logger(t))
	if err != nil {
		t.Fatal(err)
	}
	b.h = h
	if w := b.call("POST", "shade/tokens", `{"users":["u"]}`); w.Code != http.StatusConflict {
		t.Errorf("tokens: %d", w.Code)
	}
	if w := b.call("POST", "shade/sign", `{"payloads":["{}"]}`); w.Code != http.StatusConflict {
		t.Errorf("sign: %d", w.Code)
	}
}

func TestTheSnapshotHoldsBothStoresAndEndsWithItsLength(t *testing.T) {
	b := newBench(t)
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	now := time.Now().UTC()
	a := &stock.Activity{
		ID: "shade", Name: "shade", StartsAt: now.Add(-time.Minute), EndsAt: now.Add(time.Hour), PerUserLimit: 1, PaymentTimeout: time.Minute, Currency: "EUR",
		Buckets: 2, Shadow: true, Items: []stock.Item{{SKU: "s", PriceMinor: 1, Pools: map[string]int{"p": 7}}},
	}
	if err := b.stock.PrepareWarm(ctx, a, 1, map[string]map[string]int{"s": {"p": 7}}); err != nil {
		t.Fatal(err)
	}
	if _, err := b.stock.OpenWarm(ctx, a, 1); err != nil {
		t.Fatal(err)
	}
	id, err := order.NewIDs().New("shade", order.Bucket("u1", 2))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := b.stock.Reserve(ctx, stock.Reservation{ID: id, User: "u1", SKU: "s", Region: "p", Pools: []string{"p"}, Quantity: 1}); err != nil {
		t.Fatal(err)
	}
	for _, row := range []any{
		&store.ActivityStock{ActivityID: "shade", SKUID: "s", Pool: "p", Allocated: 7, Available: 6, Live: 1, UpdatedAt: now},
		&store.Order{ID: id.String(), ActivityID: "shade", UserID: "u1", SKUID: "s", Region: "p", Pool: "p", Quantity: 1, Status: order.Pending, ReservedAt: now, PayBefore: now, CreatedAt: now, UpdatedAt: now},
		&store.UserHolding{ActivityID: "shade", UserID: "u1", Held: 1},
		&store.LedgerEntry{Ref: id.String(), Op: store.OpSell, Account: store.AccountSale, ActivityID: "shade", SKUID: "s", Pool: "p", Delta: -1, At: now},
		&store.Payment{TransactionID: "t1", OrderID: id.String(), Status: store.PaymentKept, ReceivedAt: now, CreatedAt: now, UpdatedAt: now},
		&store.DeadLetter{DedupeKey: "1", MessageID: poisonPrefix("shade") + "x", Headers: "{}", Body: []byte("x"), State: store.LetterOpen, Occurrences: 2, PublishedAt: &now, CreatedAt: now, UpdatedAt: now},
		&store.DeadLetter{DedupeKey: "2", MessageID: "poison-shadeX-x", Headers: "{}", Body: []byte("x"), State: store.LetterOpen, CreatedAt: now, UpdatedAt: now},
		&store.Compensation{Kind: store.CompensateRelease, Subject: id.String(), ActivityID: "shade", NextAt: now, CreatedAt: now},
	} {
		if err := b.store.DB(ctx).Create(row).Error; err != nil {
			t.Fatal(err)
		}
	}
	w := b.call("GET", "shade/snapshot", "")
	kinds := map[string]int{}
	lines := 0
	var last map[string]any
	in := bufio.NewScanner(w.Body)
	for in.Scan() {
		last = nil
		if err := json.Unmarshal(in.Bytes(), &last); err != nil {
			t.Fatal(err)
		}
		kinds[last["kind"].(string)]++
		lines++
		switch last["kind"] {
		case "letter":
			if last["replayed"] != true || last["deaths"] != 2.0 {
				t.Errorf("letter %v", last)
			}
		case "level":
			if last["units"] != 6.0 {
				t.Errorf("level %v", last)
			}
		case "ledger":
			if last["units"] != -1.0 || last["ref"] != id.String() {
				t.Errorf("ledger %v", last)
			}
		}
	}
	want := map[string]int{"activity": 1, "stock": 1, "order": 1, "holding": 1, "ledger": 1, "payment": 1, "letter": 1, "compensation": 1, "record": 1, "held": 1, "level": 1, "outbox": 1, "end": 1}
	if fmt.Sprint(kinds) != fmt.Sprint(want) || last["kind"] != "end" || last["lines"] != float64(lines-1) {
		t.Errorf("lines %v, last %v", kinds, last)
	}
	var p Progress
	w = b.call("GET", "shade/progress", "")
	if err := json.Unmarshal(w.Body.Bytes(), &p); err != nil {
		t.Fatal(err)
	}
	if p.Orders["pending"] != 1 || p.Payments["kept"] != 1 || p.Outbox != 1 || p.Compensations != 1 || len(p.Letters) != 1 || !p.Letters[0].Replayed || p.Letters[0].Deaths != 2 {
		t.Errorf("progress %+v", p)
	}
}
