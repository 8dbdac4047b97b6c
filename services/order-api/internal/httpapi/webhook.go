package httpapi

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// webhookTolerance is how far a callback's timestamp may be from now.
const webhookTolerance = 5 * time.Minute

// maxWebhookID bounds the id, which is part of what is signed.
const maxWebhookID = 256

// webhooks checks signatures of the Standard Webhooks convention: HMAC-SHA256 over
// "<id>.<timestamp>.<body>", secrets as "whsec_" + base64, any number of them for rotation.
type webhooks struct {
	keys [][]byte
	now  func() time.Time
}

func newWebhooks(secrets []string) (*webhooks, error) {
	w := &webhooks{now: time.Now}
	for i, s := range secrets {
		encoded, ok := strings.CutPrefix(strings.TrimSpace(s), "whsec_")
		if !ok {
			return nil, fmt.Errorf("payment.secrets: number %d does not begin with whsec_", i+1)
		}
		key, err := base64.StdEncoding.DecodeString(encoded)
		// The convention asks for 24 to 64 bytes. A short key is refused: it can be guessed.
		if err != nil || len(key) < 16 {
			return nil, fmt.Errorf("payment.secrets: number %d is not whsec_ and at least 16 bytes in base64", i+1)
		}
		w.keys = append(w.keys, key)
	}
	if len(w.keys) == 0 {
		return nil, errors.New("payment.secrets: at least one secret is required")
	}
	return w, nil
}

func (w *webhooks) verify(h http.Header, body []byte) error {
	id, ts := h.Get("Webhook-Id"), h.Get("Webhook-Timestamp")
	if id == "" || len(id) > maxWebhookID {
		return unauthenticated("webhook-id is missing or too long")
	}
	seconds, err := strconv.ParseInt(ts, 10, 64)
	if err != nil {
		return unauthenticated("webhook-timestamp is not in Unix seconds")
	}
	if d := w.now().Sub(time.Unix(seconds, 0)); d > webhookTolerance || d < -webhookTolerance {
		return unauthenticated("webhook-timestamp is too far from now")
	}
	signatures := strings.Fields(strings.Join(h.Values("Webhook-Signature"), " "))
	const maxSignatures = 16
	if len(signatures) > maxSignatures {
		return unauthenticated("webhook-signature has too many signatures")
	}
	// Every key is tried against every signature, so that the time says nothing about which one fits.
	matched := false
	for _, key := range w.keys {
		mac := hmac.New(sha256.New, key)
		mac.Write([]byte(id))
		mac.Write([]byte{'.'})
		mac.Write([]byte(ts))
		mac.Write([]byte{'.'})
		mac.Write(body)
		want := mac.Sum(nil)
		for _, s := range signatures {
			encoded, ok := strings.CutPrefix(s, "v1,")
			if !ok {
				continue
			}
			got, err := base64.StdEncoding.DecodeString(encoded)
			if err == nil && hmac.Equal(got, want) {
				matched = true
			}
		}
	}
	if !matched {
		return unauthenticated("no webhook-signature fits")
	}
	return nil
}
