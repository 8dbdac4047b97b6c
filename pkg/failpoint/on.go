//go:build failpoints

package failpoint

import (
	"context"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// Enabled says whether fail points are built in.
const Enabled = true

type point struct {
	action, arg string
	at          int // fires at this hit only; 0 is every hit
	hits        int
}

// The one mutable global of the code base: a fail point is reached from places that nobody could
// hand it to, and only in builds made for tests.
var points = struct {
	once sync.Once
	mu   sync.Mutex
	set  map[string]*point
}{}

func load() {
	points.once.Do(func() {
		set, err := parse(os.Getenv("SECKILL_FAILPOINTS"))
		if err != nil {
			panic("SECKILL_FAILPOINTS: " + err.Error())
		}
		points.set = set
	})
}

func parse(spec string) (map[string]*point, error) {
	set := map[string]*point{}
	for part := range strings.SplitSeq(spec, ";") {
		part = strings.TrimSpace(part)
		if part == "" {
			continue
		}
		name, what, ok := strings.Cut(part, "=")
		if !ok {
			return nil, fmt.Errorf("%q is not name=action", part)
		}
		p := &point{}
		if n, at, ok := strings.Cut(name, "@"); ok {
			i, err := strconv.Atoi(at)
			if err != nil || i < 1 {
				return nil, fmt.Errorf("%q: the hit after @ is not a positive number", part)
			}
			name, p.at = n, i
		}
		p.action, p.arg, _ = strings.Cut(what, ":")
		switch p.action {
		case "kill", "panic", "error":
		case "sleep":
			if _, err := time.ParseDuration(p.arg); err != nil {
				return nil, fmt.Errorf("%q: %w", part, err)
			}
		case "pause":
			if p.arg == "" {
				return nil, fmt.Errorf("%q: pause needs a file", part)
			}
		default:
			return nil, fmt.Errorf("%q: no such action", part)
		}
		set[name] = p
	}
	return set, nil
}

// Arm arms fail points from inside the process, in the form of SECKILL_FAILPOINTS, and returns what
// takes them away again.
func Arm(spec string) (disarm func(), err error) {
	load()
	set, err := parse(spec)
	if err != nil {
		return func() {}, err
	}
	points.mu.Lock()
	defer points.mu.Unlock()
	if points.set == nil {
		points.set = map[string]*point{}
	}
	for name, p := range set {
		points.set[name] = p
	}
	return func() {
		points.mu.Lock()
		defer points.mu.Unlock()
		for name, p := range set {
			if points.set[name] == p {
				delete(points.set, name)
			}
		}
	}, nil
}

// Hit marks a place where a test may make the program fail.
func Hit(ctx context.Context, name string) error {
	load()
	points.mu.Lock()
	p := points.set[name]
	if p == nil {
		points.mu.Unlock()
		return nil
	}
	p.hits++
	fire := p.at == 0 || p.at == p.hits
	points.mu.Unlock()
	if !fire {
		return nil
	}
	switch p.action {
	case "kill":
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
		select {} // the signal needs a moment
	case "panic":
		panic("fail point " + name)
	case "error":
		return fmt.Errorf("%s: %w", name, ErrInjected)
	case "sleep":
		d, _ := time.ParseDuration(p.arg) // checked when it was armed
		return wait(ctx, d)
	default: // pause
		if err := os.WriteFile(p.arg+".hit", []byte(name+"\n"), 0o600); err != nil {
			return fmt.Errorf("mark fail point %s: %w", name, err)
		}
		for {
			if _, err := os.Stat(p.arg); err != nil {
				return nil //nolint:nilerr // the file is gone: go on
			}
			if err := wait(ctx, 5*time.Millisecond); err != nil {
				return err
			}
		}
	}
}

func wait(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
