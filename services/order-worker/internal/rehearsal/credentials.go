package rehearsal

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/golang-jwt/jwt/v5"
	"github.com/oklog/ulid/v2"

	"seckill/pkg/order"
)

// ErrNoKey says that this worker was not given what the credential has to be signed with.
var ErrNoKey = errors.New("no signing key is configured")

// MaxTTL bounds how long a rehearsal token lives.
const MaxTTL = 6 * time.Hour

type claims struct {
	jwt.RegisteredClaims
	Activity string `json:"activity"`
}

// token makes a buyer's token that is good for one activity.
func token(secret []byte, user, activity string, now time.Time, ttl time.Duration) (string, error) {
	if len(secret) == 0 {
		return "", fmt.Errorf("make token: %w", ErrNoKey)
	}
	if !order.ValidUserID(user) {
		return "", fmt.Errorf("make token: %q is not a user id", user)
	}
	t := jwt.NewWithClaims(jwt.SigningMethodHS256, claims{
		RegisteredClaims: jwt.RegisteredClaims{Subject: user, IssuedAt: jwt.NewNumericDate(now), ExpiresAt: jwt.NewNumericDate(now.Add(ttl))},
		Activity:         activity,
	})
	s, err := t.SignedString(secret)
	if err != nil {
		return "", fmt.Errorf("make token: %w", err)
	}
	return s, nil
}

// Signature is a callback's headers by the Standard Webhooks convention.
type Signature struct {
	ID        string `json:"webhook-id"`
	Timestamp string `json:"webhook-timestamp"`
	Signature string `json:"webhook-signature"`
}

// signingKey reads a payment secret: "whsec_" and base64.
func signingKey(secret string) ([]byte, error) {
	encoded, ok := strings.CutPrefix(strings.TrimSpace(secret), "whsec_")
	if !ok {
		return nil, errors.New("payment secret does not begin with whsec_")
	}
	key, err := base64.StdEncoding.DecodeString(encoded)
	if err != nil {
		return nil, errors.New("payment secret is not base64") // the cause would show a part of it
	}
	return key, nil
}

// sign signs one payload: HMAC-SHA256 over "<id>.<timestamp>.<body>".
func sign(key []byte, payload string, now time.Time) Signature {
	s := Signature{ID: "msg_" + ulid.Make().String(), Timestamp: strconv.FormatInt(now.Unix(), 10)}
	mac := hmac.New(sha256.New, key)
	mac.Write([]byte(s.ID + "." + s.Timestamp + "." + payload))
	s.Signature = "v1," + base64.StdEncoding.EncodeToString(mac.Sum(nil))
	return s
}
