package httpapi

import (
	"context"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/gin-gonic/gin"
	"github.com/golang-jwt/jwt/v5"
	"github.com/prometheus/client_golang/prometheus"

	"seckill/pkg/observability"
	"seckill/pkg/order"
	"seckill/pkg/stock"
	"seckill/services/order-api/internal/checkout"
)

// instant answers at once, so that the benchmark shows what HTTP itself costs.
type instant struct{ got stock.Reserved }

func (i *instant) Activity(context.Context, string) (*checkout.Snapshot, error) {
	return nil, stock.ErrActivityNotFound
}
func (i *instant) Reserve(context.Context, checkout.Request) (stock.Reserved, error) {
	if i.got.Quantity == 0 {
		return stock.Reserved{}, stock.ErrSoldOut
	}
	return i.got, nil
}
func (i *instant) Mine(context.Context, checkout.Caller, string) ([]stock.Record, error) {
	return nil, nil
}
func (i *instant) Order(context.Context, checkout.Caller, string) (stock.Record, error) {
	return stock.Record{}, stock.ErrOrderNotFound
}
func (i *instant) Cancel(context.Context, checkout.Caller, string, observability.Trace) (stock.Record, error) {
	return stock.Record{}, stock.ErrOrderNotFound
}
func (i *instant) Pay(context.Context, checkout.Payment, observability.Trace) error { return nil }

// sink is a response writer without a recorder's cost.
type sink struct {
	h      http.Header
	status int
}

func (s *sink) Header() http.Header         { return s.h }
func (s *sink) Write(b []byte) (int, error) { return len(b), nil }
func (s *sink) WriteHeader(status int)      { s.status = status }

func benchmark(b *testing.B, h http.Handler, want int, token string) {
	const body = `{"sku_id":"mug","quantity":1,"region":"beijing"}`
	b.ReportAllocs()
	r := httptest.NewRequest(http.MethodPost, "/v1/activities/spring-sale/orders", nil)
	r.Header.Set("Content-Type", "application/json")
	r.Header.Set("Authorization", "Bearer "+token)
	r.ContentLength = int64(len(body))
	reader := strings.NewReader(body)
	r.Body = io.NopCloser(reader)
	w := &sink{h: make(http.Header)}
	for b.Loop() {
		reader.Reset(body)
		clear(w.h)
		h.ServeHTTP(w, r)
		if w.status != want {
			b.Fatalf("status %d", w.status)
		}
	}
}

func BenchmarkBuyingPathOverHTTP(b *testing.B) {
	const secret = "0123456789abcdef0123456789abcdef"
	token, err := jwt.NewWithClaims(jwt.SigningMethodHS256, jwt.RegisteredClaims{
		Subject: "user-1", ExpiresAt: jwt.NewNumericDate(time.Now().Add(time.Hour)),
	}).SignedString([]byte(secret))
	if err != nil {
		b.Fatal(err)
	}
	id, err := order.NewIDs().New("spring-sale", 0)
	if err != nil {
		b.Fatal(err)
	}
	accepted := stock.Reserved{Record: stock.Record{Status: order.Reserved, Order: order.Order{
		ID: id, User: "user-1", SKU: "mug", Region: "beijing", Pool: "national", Quantity: 1, UnitPriceMinor: 1999,
		Currency: "CNY", ReservedAt: time.Now(), PayBefore: time.Now().Add(time.Minute), PaymentTimeout: time.Minute,
	}}}
	build := func(got stock.Reserved, cache int) http.Handler {
		h, err := New(Config{
			Auth:           AuthConfig{Secret: secret, CacheSize: cache},
			PaymentSecrets: []string{"whsec_MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3"},
		}, &instant{got}, slog.New(slog.DiscardHandler), prometheus.NewRegistry())
		if err != nil {
			b.Fatal(err)
		}
		return h
	}
	b.Run("noop", func(b *testing.B) {
		gin.SetMode(gin.ReleaseMode)
		e := gin.New()
		answer := orderOf(&accepted.Record)
		e.POST("/v1/activities/:activity/orders", func(c *gin.Context) { c.JSON(http.StatusAccepted, answer) })
		benchmark(b, e, http.StatusAccepted, token)
	})
	b.Run("accepted", func(b *testing.B) { benchmark(b, build(accepted, 0), http.StatusAccepted, token) })
	b.Run("accepted, token not remembered", func(b *testing.B) { benchmark(b, build(accepted, -1), http.StatusAccepted, token) })
	b.Run("sold out", func(b *testing.B) { benchmark(b, build(stock.Reserved{}, 0), http.StatusConflict, token) })
}
