package load

import (
	"bufio"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"fmt"
	"os"
	"time"
)

// Tokens writes n lines to path, one bearer token (HS256) for each of n distinct users, and returns
// nothing else: every line has the same length, so that a load thread finds its share by seeking.
//
// They are signed before the run, so that signing costs the load tool nothing while it measures.
func Tokens(path string, secret []byte, n int, expires time.Time) error {
	f, err := os.Create(path) //nolint:gosec // the harness's own scratch folder
	if err != nil {
		return fmt.Errorf("write token file: %w", err)
	}
	w := bufio.NewWriterSize(f, 1<<20)
	for i := range n {
		w.WriteString(Token(secret, User(i), expires)) //nolint:errcheck // Flush reports it
		w.WriteByte('\n')                              //nolint:errcheck // Flush reports it
	}
	if err := w.Flush(); err != nil {
		return fmt.Errorf("write token file %s: %w", path, err)
	}
	if err := f.Close(); err != nil {
		return fmt.Errorf("close token file %s: %w", path, err)
	}
	return nil
}

// User names the i-th buyer; all names have the same length.
func User(i int) string { return fmt.Sprintf("u%08d", i) }

// Token signs one HS256 bearer token.
func Token(secret []byte, user string, expires time.Time) string {
	enc := base64.RawURLEncoding
	head := enc.EncodeToString([]byte(`{"alg":"HS256","typ":"JWT"}`))
	body := enc.EncodeToString(fmt.Appendf(nil, `{"sub":%q,"exp":%d}`, user, expires.Unix()))
	mac := hmac.New(sha256.New, secret)
	mac.Write([]byte(head + "." + body))
	return head + "." + body + "." + enc.EncodeToString(mac.Sum(nil))
}
