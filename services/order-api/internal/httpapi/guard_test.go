package httpapi

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"crypto/sha256"
	"crypto/x509"
	"encoding/base64"
	"encoding/binary"
	"encoding/pem"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/golang-jwt/jwt/v5"
	"github.com/prometheus/client_golang/prometheus"

	"seckill/pkg/stock"
	"seckill/services/order-api/internal/checkout"
)

const (
	unitSecret  = "0123456789abcdef0123456789abcdef"
	unitWebhook = "whsec_MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3"
)

// broken panics wherever it is asked.
type broken struct{ instant }

func (b *broken) Activity(context.Context, string) (*checkout.Snapshot, error) { panic("broken") }

func TestAPanicIsAProblemAndALogLine(t *testing.T) {
	var log bytes.Buffer
	reg := prometheus.NewRegistry()
	h, err := New(Config{Auth: AuthConfig{Secret: unitSecret}, PaymentSecrets: []string{unitWebhook}},
		&broken{}, slog.New(slog.NewTextHandler(&log, nil)), reg)
	if err != nil {
		t.Fatal(err)
	}
	w := httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/v1/activities/a", nil))
	if w.Code != http.StatusInternalServerError || w.Header().Get("Content-Type") != "application/problem+json" || !strings.Contains(w.Body.String(), `"code":"internal"`) {
		t.Errorf("%d %s", w.Code, w.Body)
	}
	if strings.Contains(w.Body.String(), "broken") || !strings.Contains(log.String(), "broken") {
		t.Errorf("body %s, log %s", w.Body, &log)
	}
}

func TestTokensSignedWithEdDSA(t *testing.T) {
	pub, key, err := ed25519.GenerateKey(nil)
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.MarshalPKIXPublicKey(pub)
	if err != nil {
		t.Fatal(err)
	}
	claims := jwt.MapClaims{"sub": "u1", "exp": time.Now().Add(time.Hour).Unix()}
	good, err := jwt.NewWithClaims(jwt.SigningMethodEdDSA, claims).SignedString(key)
	if err != nil {
		t.Fatal(err)
	}
	// The classic confusion: the public key taken as the secret of an HMAC.
	confused, err := jwt.NewWithClaims(jwt.SigningMethodHS256, claims).SignedString([]byte(pub))
	if err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{
		"PEM":    string(pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: der})),
		"base64": base64.StdEncoding.EncodeToString(pub),
	} {
		toks, err := newTokens(AuthConfig{PublicKey: text})
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		for range 2 { // verified, then remembered
			if c, err := toks.caller(http.Header{"Authorization": {"bearer " + good}}); err != nil || c.User != "u1" {
				t.Errorf("%s: %+v %v", name, c, err)
			}
		}
		if _, err := toks.caller(http.Header{"Authorization": {"Bearer " + confused}}); err == nil {
			t.Errorf("%s: a token signed with the public key was taken", name)
		}
	}
	for _, bad := range []AuthConfig{
		{},
		{Secret: "x", PublicKey: base64.StdEncoding.EncodeToString(pub)},
		{PublicKey: "short"},
		{Secret: unitSecret, Leeway: time.Hour},
	} {
		if _, err := newTokens(bad); err == nil {
			t.Errorf("%+v was taken", bad)
		}
	}
}

func TestRememberedTokensAreBoundedAndEndWithTheirToken(t *testing.T) {
	c := newTokenCache(320)
	now := time.Now()
	sum := func(i int) [32]byte {
		var b [8]byte
		binary.BigEndian.PutUint64(b[:], uint64(i))
		return sha256.Sum256(b[:])
	}
	for i := range 100_000 {
		c.put(sum(i), checkout.Caller{User: "u"}, now.Add(time.Minute))
	}
	n := 0
	for i := range c.shards {
		n += len(c.shards[i].young) + len(c.shards[i].old)
	}
	if n > 320 {
		t.Errorf("%d tokens are remembered", n)
	}
	if _, ok := c.get(sum(99_999), now); !ok {
		t.Error("the latest one is forgotten")
	}
	if _, ok := c.get(sum(0), now); ok {
		t.Error("the first one is still there")
	}
	if _, ok := c.get(sum(99_999), now.Add(time.Minute)); ok {
		t.Error("it is taken after its end")
	}
}

func TestWebhookSecretsAreChecked(t *testing.T) {
	for _, bad := range [][]string{nil, {"MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3"}, {"whsec_%%"}, {"whsec_c2hvcnQ="}, {unitWebhook, "x"}} {
		_, err := newWebhooks(bad)
		if err == nil {
			t.Errorf("%q was taken", bad)
			continue
		}
		for _, s := range bad {
			if strings.Contains(err.Error(), strings.TrimPrefix(s, "whsec_")) && len(s) > 6 {
				t.Errorf("the error shows a secret: %v", err)
			}
		}
	}
}

// Every error of the packages below has an answer of its own; only what is unknown is internal.
func TestEveryKnownErrorHasItsCode(t *testing.T) {
	for want, errs := range map[string][]error{
		"sold_out":                {stock.ErrSoldOut},
		"not_qualified":           {stock.ErrNotQualified},
		"activity_not_found":      {stock.ErrActivityNotFound},
		"order_not_found":         {stock.ErrOrderNotFound},
		"activity_ended":          {stock.ErrEnded},
		"order_archived":          {stock.ErrArchived},
		"activity_paused":         {stock.ErrPaused},
		"idempotency_key_reused":  {stock.ErrKeyReused},
		"invalid_request":         {stock.ErrInvalid, &checkout.InvalidError{Field: "region"}},
		"temporarily_unavailable": {stock.ErrNotWarmed, stock.ErrUnavailable, stock.ErrUnknownOutcome, checkout.ErrBroker, checkout.ErrOverloaded, context.DeadlineExceeded, &checkout.UnknownOutcomeError{}},
		"activity_not_started":    {&stock.NotStartedError{}},
		"limit_reached":           {&stock.LimitError{}},
		"order_not_cancellable":   {&checkout.NotCancellableError{}},
		"amount_mismatch":         {checkout.ErrAmountMismatch},
		"rate_limited":            {checkout.ErrRateLimited},
		"unauthenticated":         {checkout.ErrNotPermitted},
		"internal":                {stock.ErrCorrupt, http.ErrBodyNotAllowed},
	} {
		for _, err := range errs {
			if p := problemOf(err); p.Code != want || p.Type != "/problems/"+want || p.Status < 400 {
				t.Errorf("%v: %+v, want %s", err, p, want)
			}
		}
	}
}
