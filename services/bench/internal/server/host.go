// Package server starts the private Redis, RabbitMQ and MariaDB that a measurement runs on, with the
// settings under which the system's promises hold.
package server

import (
	"fmt"
	"os"
	"sync"
	"testing"
)

// host stands in for a test, so that the harness starts its servers with the same code as the tests
// do. The embedded interface is nil: testkit's starters call the methods below and no others.
type host struct {
	testing.TB
	scratch string

	mu      sync.Mutex
	n       int
	cleanup []func()
}

// failure carries what a starter found wrong out of it.
type failure struct{ text string }

func (h *host) Helper() {}

func (h *host) Name() string { return "bench" }

func (h *host) Logf(format string, args ...any) { fmt.Fprintf(os.Stderr, format+"\n", args...) }

func (h *host) Errorf(format string, args ...any) { fmt.Fprintf(os.Stderr, format+"\n", args...) }

func (h *host) Fatal(args ...any) { panic(failure{fmt.Sprint(args...)}) }

func (h *host) Fatalf(format string, args ...any) { panic(failure{fmt.Sprintf(format, args...)}) }

func (h *host) Cleanup(f func()) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.cleanup = append(h.cleanup, f)
}

func (h *host) TempDir() string {
	h.mu.Lock()
	h.n++
	dir := fmt.Sprintf("%s/server-%d", h.scratch, h.n)
	h.mu.Unlock()
	if err := os.MkdirAll(dir, 0o750); err != nil {
		h.Fatal(err)
	}
	return dir
}

// try runs f and turns what it found fatal into an error.
func (h *host) try(f func()) (err error) {
	defer func() {
		if p := recover(); p != nil {
			bad, ok := p.(failure)
			if !ok {
				panic(p)
			}
			err = fmt.Errorf("start servers: %s", bad.text)
		}
	}()
	f()
	return nil
}

func (h *host) close() {
	h.mu.Lock()
	defer h.mu.Unlock()
	for i := len(h.cleanup) - 1; i >= 0; i-- {
		h.cleanup[i]()
	}
	h.cleanup = nil
}
