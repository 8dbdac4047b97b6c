package httpapi

import (
	"encoding/base64"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/go-json-experiment/json"
	"github.com/golang-jwt/jwt/v5"
)

// The quick check must never accept what the library refuses, and must know the caller that the
// library finds.
func TestQuickTokenCheckAgreesWithTheLibrary(t *testing.T) {
	const secret = "0123456789abcdef0123456789abcdef"
	now := time.Now()
	sign := func(method jwt.SigningMethod, key any, c jwt.MapClaims) string {
		s, err := jwt.NewWithClaims(method, c).SignedString(key)
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	hs := func(c jwt.MapClaims) string { return sign(jwt.SigningMethodHS256, []byte(secret), c) }
	good := hs(jwt.MapClaims{"sub": "user-1", "exp": now.Add(time.Hour).Unix()})
	parts := strings.Split(good, ".")
	last := parts[2][:len(parts[2])-1]
	cases := []struct {
		name, token string
		quick       bool // the quick check takes it itself
	}{
		{"plain", good, true},
		{"with nbf in the past", hs(jwt.MapClaims{"sub": "user-1", "exp": now.Add(time.Hour).Unix(), "nbf": now.Add(-time.Hour).Unix()}), true},
		{"with unknown claims", hs(jwt.MapClaims{"sub": "user-1", "exp": now.Add(time.Hour).Unix(), "aud": "shop", "iat": now.Unix()}), true},
		{"of a rehearsal", hs(jwt.MapClaims{"sub": "user-1", "activity": "a-1", "exp": now.Add(time.Hour).Unix()}), true},
		{"exp with a fraction", hs(jwt.MapClaims{"sub": "user-1", "exp": float64(now.Add(time.Hour).Unix()) + 0.5}), false},
		{"nbf in the future", hs(jwt.MapClaims{"sub": "user-1", "exp": now.Add(time.Hour).Unix(), "nbf": now.Add(time.Hour).Unix()}), false},
		{"expired", hs(jwt.MapClaims{"sub": "user-1", "exp": now.Add(-time.Hour).Unix()}), false},
		{"without exp", hs(jwt.MapClaims{"sub": "user-1"}), false},
		{"exp null", hs(jwt.MapClaims{"sub": "user-1", "exp": nil}), false},
		{"exp huge", hs(jwt.MapClaims{"sub": "user-1", "exp": int64(1) << 60}), false},
		{"without subject", hs(jwt.MapClaims{"exp": now.Add(time.Hour).Unix()}), false},
		{"subject with odd characters", hs(jwt.MapClaims{"sub": "user 1", "exp": now.Add(time.Hour).Unix()}), false},
		{"other algorithm", sign(jwt.SigningMethodHS512, []byte(secret), jwt.MapClaims{"sub": "user-1", "exp": now.Add(time.Hour).Unix()}), false},
		{"unsigned", sign(jwt.SigningMethodNone, jwt.UnsafeAllowNoneSignatureType, jwt.MapClaims{"sub": "user-1", "exp": now.Add(time.Hour).Unix()}), false},
		{"other key", sign(jwt.SigningMethodHS256, []byte("another"), jwt.MapClaims{"sub": "user-1", "exp": now.Add(time.Hour).Unix()}), false},
		{"changed claims", parts[0] + "." + base64.RawURLEncoding.EncodeToString([]byte(`{"sub":"user-2","exp":9999999999}`)) + "." + parts[2], false},
		{"changed header", "eyJhbGciOiJIUzI1NiJ9." + parts[1] + "." + parts[2], false},
		{"signature cut", parts[0] + "." + parts[1] + "." + last, false},
		{"four parts", good + ".x", false},
		{"two parts", parts[0] + "." + parts[1], false},
		{"empty", "", false},
	}
	lib, err := newTokens(AuthConfig{Secret: secret})
	if err != nil {
		t.Fatal(err)
	}
	lib.quick = nil
	both, err := newTokens(AuthConfig{Secret: secret})
	if err != nil {
		t.Fatal(err)
	}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			h := http.Header{"Authorization": {"Bearer " + tc.token}}
			want, wantErr := lib.caller(h)
			got, ok := both.quick.caller(tc.token, now)
			if ok != tc.quick {
				t.Errorf("quick took it: %v", ok)
			}
			if ok && (wantErr != nil || got != want) {
				t.Errorf("quick says %+v, the library %+v, %v", got, want, wantErr)
			}
			whole, err := both.caller(h)
			if (err == nil) != (wantErr == nil) || whole != want {
				t.Errorf("with quick %+v, %v; without %+v, %v", whole, err, want, wantErr)
			}
		})
	}
}

func TestPlainClaimsAreScannedAsTheParserReadsThem(t *testing.T) {
	for _, text := range []string{
		`{"sub":"u","exp":17}`, `{"exp":17,"sub":"u"}`, `{"sub":"u","exp":17,"nbf":3,"activity":"a"}`, `{"sub":"u","exp":17,"iat":4}`,
		`{"sub":"u","exp":17,}`, `{"sub":"u","exp":17}}`, `{"sub":"u","exp":17} `, `{"sub":"u","sub":"v","exp":17}`, `{"sub":"u\u0041","exp":17}`,
		`{"sub":"u","exp":017}`, `{"sub":"u","exp":-17}`, `{"sub":"u","exp":1.5}`, `{"sub":"u","exp":1e3}`, `{"sub":"u","exp":"17"}`, `{"sub":7,"exp":17}`,
		`{"sub":"u","exp":12345678901234567890}`, `{}`, `{`, ``, `[]`, `{"sub"}`, `{"sub":}`, `{"sub":"u","exp":}`, `{"sub":"u","exp":17`, `{"sub":"u`, `{"sub":"é","exp":17}`, "{\"sub\":\"u\n\",\"exp\":17}",
	} {
		var quickly, parsed quickClaims
		if !quickly.scan([]byte(text)) {
			continue
		}
		if err := json.Unmarshal([]byte(text), &parsed); err != nil {
			t.Errorf("%s: taken, the parser says %v", text, err)
			continue
		}
		if quickly.Sub != parsed.Sub || quickly.Exp != parsed.Exp || quickly.Activity != parsed.Activity ||
			(quickly.Nbf == nil) != (parsed.Nbf == nil) || quickly.Nbf != nil && *quickly.Nbf != *parsed.Nbf {
			t.Errorf("%s: %+v, the parser reads %+v", text, quickly, parsed)
		}
	}
	if !new(quickClaims).scan([]byte(`{"sub":"u","exp":17}`)) {
		t.Error("the plainest claims were left to the parser")
	}
}

func BenchmarkTokenOfANewBuyer(b *testing.B) {
	const secret = "0123456789abcdef0123456789abcdef"
	token, err := jwt.NewWithClaims(jwt.SigningMethodHS256, jwt.RegisteredClaims{
		Subject: "user-1", ExpiresAt: jwt.NewNumericDate(time.Now().Add(time.Hour)),
	}).SignedString([]byte(secret))
	if err != nil {
		b.Fatal(err)
	}
	h := http.Header{"Authorization": {"Bearer " + token}}
	for _, quickly := range []bool{true, false} {
		b.Run(map[bool]string{true: "quick", false: "library"}[quickly], func(b *testing.B) {
			t, err := newTokens(AuthConfig{Secret: secret, CacheSize: -1})
			if err != nil {
				b.Fatal(err)
			}
			if !quickly {
				t.quick = nil
			}
			b.ReportAllocs()
			for b.Loop() {
				if _, err := t.caller(h); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
