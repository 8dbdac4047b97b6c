package httpapi

import (
	"crypto/ed25519"
	"crypto/sha256"
	"crypto/x509"
	"encoding/base64"
	"encoding/pem"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/golang-jwt/jwt/v5"

	"seckill/pkg/order"
	"seckill/services/order-api/internal/checkout"
)

// AuthConfig says how bearer tokens are checked. Exactly one of Secret and PublicKey is set; it pins
// the algorithm, whatever a token's header says.
type AuthConfig struct {
	Secret    string        // HS256
	PublicKey string        // EdDSA: PEM (PKIX), or the 32 bytes in base64
	Leeway    time.Duration // allowed clock difference for exp and nbf; default 5s
	CacheSize int           // verified tokens remembered; default 65536, negative: none
}

// maxToken bounds the work a forged token can cause.
const maxToken = 4 << 10

type claims struct {
	jwt.RegisteredClaims
	Activity string `json:"activity,omitempty"`
}

// tokens checks bearer tokens.
type tokens struct {
	parser *jwt.Parser
	key    any
	leeway time.Duration
	cache  *tokenCache
	quick  *quick // nil with a public key
}

func newTokens(cfg AuthConfig) (*tokens, error) {
	if cfg.Leeway == 0 {
		cfg.Leeway = 5 * time.Second
	}
	if cfg.Leeway < 0 || cfg.Leeway > time.Minute {
		return nil, fmt.Errorf("auth.leeway: %s is not between 0 and 1m", cfg.Leeway)
	}
	if cfg.CacheSize == 0 {
		cfg.CacheSize = 1 << 16
	}
	t := &tokens{leeway: cfg.Leeway, cache: newTokenCache(cfg.CacheSize)}
	var alg string
	switch {
	case cfg.Secret != "" && cfg.PublicKey != "":
		return nil, errors.New("auth: set jwt_secret or jwt_public_key, not both")
	case cfg.Secret != "":
		alg, t.key = jwt.SigningMethodHS256.Alg(), []byte(cfg.Secret)
		t.quick = newQuick([]byte(cfg.Secret), cfg.Leeway)
	case cfg.PublicKey != "":
		pub, err := parsePublicKey(cfg.PublicKey)
		if err != nil {
			return nil, err
		}
		alg, t.key = jwt.SigningMethodEdDSA.Alg(), pub
	default:
		return nil, errors.New("auth: jwt_secret or jwt_public_key is required")
	}
	t.parser = jwt.NewParser(
		jwt.WithValidMethods([]string{alg}),
		jwt.WithExpirationRequired(),
		jwt.WithLeeway(cfg.Leeway),
	)
	return t, nil
}

func parsePublicKey(text string) (ed25519.PublicKey, error) {
	if block, _ := pem.Decode([]byte(text)); block != nil {
		key, err := x509.ParsePKIXPublicKey(block.Bytes)
		if err != nil {
			return nil, fmt.Errorf("read auth.jwt_public_key: %w", err)
		}
		pub, ok := key.(ed25519.PublicKey)
		if !ok {
			return nil, fmt.Errorf("read auth.jwt_public_key: %T is not an Ed25519 key", key)
		}
		return pub, nil
	}
	raw, err := base64.StdEncoding.DecodeString(strings.TrimSpace(text))
	if err != nil || len(raw) != ed25519.PublicKeySize {
		return nil, errors.New("read auth.jwt_public_key: neither PEM nor 32 bytes in base64")
	}
	return ed25519.PublicKey(raw), nil
}

// caller reads and checks the request's bearer token.
func (t *tokens) caller(h http.Header) (checkout.Caller, error) {
	values := h["Authorization"]
	if len(values) != 1 {
		return checkout.Caller{}, unauthenticated("one bearer token is required")
	}
	scheme, token, ok := strings.Cut(values[0], " ")
	if !ok || !strings.EqualFold(scheme, "Bearer") || len(token) > maxToken {
		return checkout.Caller{}, unauthenticated("one bearer token is required")
	}
	now := time.Now()
	if t.quick != nil {
		// Cheaper than remembering: see quick.
		if c, ok := t.quick.caller(token, now); ok {
			return c, nil
		}
	}
	sum := sha256.Sum256([]byte(token))
	if c, ok := t.cache.get(sum, now); ok {
		return c, nil
	}
	var cl claims
	_, err := t.parser.ParseWithClaims(token, &cl, func(tok *jwt.Token) (any, error) {
		if _, ok := tok.Header["crit"]; ok { // RFC 7515, 4.1.11: whoever does not understand it refuses
			return nil, errors.New("extensions that must be understood are not")
		}
		return t.key, nil
	})
	if err != nil {
		detail := "the token is not valid"
		if errors.Is(err, jwt.ErrTokenExpired) {
			detail = "the token has expired"
		}
		return checkout.Caller{}, unauthenticated(detail)
	}
	if !order.ValidUserID(cl.Subject) || cl.Activity != "" && !order.ValidActivityID(cl.Activity) {
		return checkout.Caller{}, unauthenticated("the token's subject is not a user id")
	}
	c := checkout.Caller{User: cl.Subject, Activity: cl.Activity}
	// A token that is valid now stays so until exp: nbf and iat only get truer.
	t.cache.put(sum, c, cl.ExpiresAt.Add(t.leeway))
	return c, nil
}

// tokenCache remembers verified tokens by their hash, in shards of two generations: when the young
// one is full it becomes the old one, and what nobody asked for meanwhile is forgotten.
type tokenCache struct {
	shards [16]tokenShard
	limit  int
}

type tokenShard struct {
	mu         sync.Mutex
	young, old map[[32]byte]verified
}

type verified struct {
	caller checkout.Caller
	until  time.Time
}

func newTokenCache(size int) *tokenCache {
	return &tokenCache{limit: size / (2 * 16)}
}

func (c *tokenCache) get(sum [32]byte, now time.Time) (checkout.Caller, bool) {
	if c.limit <= 0 {
		return checkout.Caller{}, false
	}
	s := &c.shards[sum[0]%16]
	s.mu.Lock()
	defer s.mu.Unlock()
	v, ok := s.young[sum]
	if !ok {
		if v, ok = s.old[sum]; ok {
			s.put(c.limit, sum, v)
		}
	}
	return v.caller, ok && now.Before(v.until)
}

func (c *tokenCache) put(sum [32]byte, caller checkout.Caller, until time.Time) {
	if c.limit <= 0 {
		return
	}
	s := &c.shards[sum[0]%16]
	s.mu.Lock()
	defer s.mu.Unlock()
	s.put(c.limit, sum, verified{caller, until})
}

func (s *tokenShard) put(limit int, sum [32]byte, v verified) {
	if s.young == nil || len(s.young) >= limit {
		s.old, s.young = s.young, make(map[[32]byte]verified)
	}
	s.young[sum] = v
}
