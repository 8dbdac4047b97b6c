package httpapi

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"hash"
	"math"
	"strings"
	"sync"
	"time"

	"github.com/go-json-experiment/json"

	"seckill/pkg/order"
	"seckill/services/order-api/internal/checkout"
)

// quick checks the plain kind of token that every buyer of a crowd brings: HS256, a header of the
// usual spelling, times that are whole seconds. In a flash sale each token is new, so that no memory
// of earlier ones helps, and the library's general way is the largest single cost of a request.
//
// quick only ever says yes. Whatever it does not take, for any reason, goes to the library, which
// alone refuses tokens.
type quick struct {
	macs   sync.Pool // *mac
	leeway time.Duration
}

type mac struct {
	hash hash.Hash
	sum  [sha256.Size]byte
	sig  [sha256.Size]byte
	in   []byte
	body []byte
}

func newQuick(secret []byte, leeway time.Duration) *quick {
	return &quick{
		macs:   sync.Pool{New: func() any { return &mac{hash: hmac.New(sha256.New, secret)} }},
		leeway: leeway,
	}
}

// The base64 of {"alg":"HS256","typ":"JWT"}, {"typ":"JWT","alg":"HS256"} and {"alg":"HS256"}: what
// the common libraries write. The algorithm is thereby pinned.
func usualHeader(s string) bool {
	switch s {
	case "eyJhbGciOiJIUzI1NiIsInR5cCI6IkpXVCJ9", "eyJ0eXAiOiJKV1QiLCJhbGciOiJIUzI1NiJ9", "eyJhbGciOiJIUzI1NiJ9":
		return true
	}
	return false
}

type quickClaims struct {
	Sub      string `json:"sub"`
	Exp      int64  `json:"exp"`
	Nbf      *int64 `json:"nbf"`
	Activity string `json:"activity"`
}

// caller returns the token's user, or false for a token that the library has to look at.
func (q *quick) caller(token string, now time.Time) (checkout.Caller, bool) {
	head, rest, ok := strings.Cut(token, ".")
	if !ok || !usualHeader(head) {
		return checkout.Caller{}, false
	}
	claims, signature, ok := strings.Cut(rest, ".")
	if !ok || len(signature) != base64.RawURLEncoding.EncodedLen(sha256.Size) {
		return checkout.Caller{}, false
	}
	m := q.macs.Get().(*mac)
	defer q.macs.Put(m)
	m.in = append(m.in[:0], token...)
	signed, sig := m.in[:len(head)+1+len(claims)], m.in[len(m.in)-len(signature):]
	if n, err := base64.RawURLEncoding.Decode(m.sig[:], sig); err != nil || n != len(m.sig) {
		return checkout.Caller{}, false
	}
	m.hash.Reset()
	m.hash.Write(signed) // never fails (hash.Hash)
	if !hmac.Equal(m.hash.Sum(m.sum[:0]), m.sig[:]) {
		return checkout.Caller{}, false
	}
	var err error
	if m.body, err = base64.RawURLEncoding.AppendDecode(m.body[:0], signed[len(head)+1:]); err != nil {
		return checkout.Caller{}, false
	}
	var c quickClaims
	if !c.scan(m.body) {
		c = quickClaims{}
		if err := json.Unmarshal(m.body, &c); err != nil {
			return checkout.Caller{}, false
		}
	}
	// Seconds far from now are left to the library's checks of range.
	if c.Exp <= 0 || c.Exp > math.MaxInt32*4 || !now.Before(time.Unix(c.Exp, 0).Add(q.leeway)) {
		return checkout.Caller{}, false
	}
	if c.Nbf != nil && (*c.Nbf < 0 || *c.Nbf > now.Unix()) {
		return checkout.Caller{}, false
	}
	if !order.ValidUserID(c.Sub) || c.Activity != "" && !order.ValidActivityID(c.Activity) {
		return checkout.Caller{}, false
	}
	return checkout.Caller{User: c.Sub, Activity: c.Activity}, true
}

// scan reads claims of the plainest spelling: one flat object without blanks, of texts without escapes
// and whole numbers, known names once each. Whatever else it meets, it leaves to the JSON parser.
func (c *quickClaims) scan(b []byte) bool {
	if len(b) < 2 || b[0] != '{' {
		return false
	}
	b = b[1:]
	var sub, exp, nbf, iat, activity bool
	for {
		name, rest, ok := plainText(b)
		if !ok || len(rest) < 2 || rest[0] != ':' {
			return false
		}
		b = rest[1:]
		var text []byte
		var number int64
		isText := b[0] == '"'
		if isText {
			text, b, ok = plainText(b)
		} else {
			number, b, ok = plainNumber(b)
		}
		if !ok || len(b) == 0 {
			return false
		}
		switch string(name) { // does not allocate
		case "sub":
			if sub || !isText {
				return false
			}
			c.Sub, sub = string(text), true
		case "activity":
			if activity || !isText {
				return false
			}
			c.Activity, activity = string(text), true
		case "exp":
			if exp || isText {
				return false
			}
			c.Exp, exp = number, true
		case "nbf":
			if nbf || isText {
				return false
			}
			since := number
			c.Nbf, nbf = &since, true
		case "iat": // means nothing here
			if iat || isText {
				return false
			}
			iat = true
		default:
			// Names that this program does not know could be repeated: the parser counts them.
			return false
		}
		switch {
		case b[0] == ',':
			b = b[1:]
		case b[0] == '}' && len(b) == 1:
			return true
		default:
			return false
		}
	}
}

// plainText cuts a JSON text of printable ASCII without escapes off the front of b.
func plainText(b []byte) (text, rest []byte, ok bool) {
	if len(b) == 0 || b[0] != '"' {
		return nil, nil, false
	}
	for i := 1; i < len(b); i++ {
		switch ch := b[i]; {
		case ch == '"':
			return b[1:i], b[i+1:], true
		case ch < 0x20 || ch >= 0x7f || ch == '\\':
			return nil, nil, false
		}
	}
	return nil, nil, false
}

// plainNumber cuts a positive whole number of up to 15 digits off the front of b.
func plainNumber(b []byte) (n int64, rest []byte, ok bool) {
	i := 0
	for i < len(b) && b[i] >= '0' && b[i] <= '9' {
		n = n*10 + int64(b[i]-'0')
		i++
	}
	return n, b[i:], i > 0 && i <= 15 && b[0] != '0'
}
