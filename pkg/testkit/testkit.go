package testkit

import (
	"bytes"
	"crypto/rand"
	"encoding/hex"
	"log/slog"
	"os"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
)

// VerifyNoLeaks runs the tests of a package and fails them when goroutines are left behind.
// It is the body of TestMain and does not return.
func VerifyNoLeaks(m *testing.M) {
	goleak.VerifyTestMain(m)
}

// Eventually polls cond until it returns nil, and fails the test with its last error when that has
// not happened within the given time. cond runs on the test's goroutine and may call t.Fatal.
func Eventually(t testing.TB, within time.Duration, cond func() error) {
	t.Helper()
	deadline := time.Now().Add(within)
	pause := 2 * time.Millisecond
	for {
		last := time.Now().After(deadline) // read before: a pause of the machine does not take the last look away
		err := cond()
		if err == nil {
			return
		}
		if last {
			t.Fatalf("not reached within %s: %v", within, err)
		}
		time.Sleep(pause)
		pause = min(pause*2, 50*time.Millisecond)
	}
}

// Logger logs to the test's own log, from debug level on. What is logged after the test has ended is
// dropped, where t.Log would panic.
func Logger(t testing.TB) *slog.Logger {
	w := &logWriter{t: t}
	t.Cleanup(w.close)
	return slog.New(slog.NewTextHandler(w, &slog.HandlerOptions{Level: slog.LevelDebug}))
}

type logWriter struct {
	mu   sync.Mutex
	t    testing.TB
	done bool
}

func (w *logWriter) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.done {
		w.t.Log(string(bytes.TrimRight(p, "\n")))
	}
	return len(p), nil
}

func (w *logWriter) close() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.done = true
}

// uniqueName is short, lower case, and different for each call on this machine.
func uniqueName() string {
	var b [6]byte
	_, _ = rand.Read(b[:]) // never fails (crypto/rand)
	return hex.EncodeToString(b[:])
}

func env(name, fallback string) string {
	if v := os.Getenv(name); v != "" {
		return v
	}
	return fallback
}
