// Package load puts load on an HTTP server: wrk for throughput (a Lua script gives every request its
// own buyer and looks at every answer), and an open-loop generator for percentiles.
package load

import (
	"bytes"
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"syscall"
	"time"
)

//go:embed crowd.lua
var crowdLua []byte

// ErrNoWrk says that the load tool is missing.
var ErrNoWrk = errors.New("wrk is not installed (Debian: apt-get install wrk)")

// Crowd describes one run of wrk.
type Crowd struct {
	URL         string   // http://127.0.0.1:port
	Paths       []string // where the buyers go
	PerPath     int      // buyers of one load thread before it goes on to its next path; 0: all to the first path
	Body        string
	Tokens      string // file made by Tokens
	Skip, Use   int    // slice of the token file; every buyer comes once at most
	Keyed       bool   // send an Idempotency-Key
	Connections int
	Threads     int
	Duration    time.Duration
	// Gate, when set, is asked every few milliseconds; while it says no, the load tool is stopped
	// (SIGSTOP). That keeps a queue behind the server bounded without a guess at the right rate. The
	// latencies of a gated run mean nothing.
	Gate func() bool
}

// CrowdResult is what wrk counted. Latencies are closed-loop: they say how long an answer took while
// the given number of connections was always waiting for one.
type CrowdResult struct {
	DurationUS int64  `json:"duration_us"`
	Requests   int64  `json:"requests"`
	Reserved   int64  `json:"reserved"`  // 202 with "status":"reserved"
	Other202   int64  `json:"other_202"` // 202 that does not say so
	SoldOut    int64  `json:"sold_out"`
	Bad        int64  `json:"bad"`
	Statuses   string `json:"statuses"`
	Connect    int64  `json:"connect"`
	Read       int64  `json:"read"`
	Write      int64  `json:"write"`
	Timeout    int64  `json:"timeout"`
	P50US      int64  `json:"p50_us"`
	P90US      int64  `json:"p90_us"`
	P99US      int64  `json:"p99_us"`
	MaxUS      int64  `json:"max_us"`

	CPU time.Duration `json:"cpu"` // user + system time of the load tool
}

// PerSecond is n in this run's time.
func (r CrowdResult) PerSecond(n int64) float64 {
	if r.DurationUS == 0 {
		return 0
	}
	return float64(n) / (float64(r.DurationUS) / 1e6)
}

// Run sends the crowd. An answer that is neither accepted nor sold out is counted in Bad, for the
// caller to judge; a load tool that fails is an error.
func (c Crowd) Run(ctx context.Context, scratch string) (CrowdResult, error) {
	var res CrowdResult
	tool, err := exec.LookPath("wrk")
	if err != nil {
		return res, ErrNoWrk
	}
	// Crowds may run beside each other: each has a script file of its own.
	dir, err := os.MkdirTemp(scratch, "crowd-")
	if err != nil {
		return res, fmt.Errorf("make folder for load script: %w", err)
	}
	defer os.RemoveAll(dir) //nolint:errcheck // the whole scratch folder goes at the end
	script := filepath.Join(dir, "crowd.lua")
	if err := os.WriteFile(script, crowdLua, 0o600); err != nil {
		return res, fmt.Errorf("write load script: %w", err)
	}
	if c.Threads == 0 {
		c.Threads = 2
	}
	keyed := "0"
	if c.Keyed {
		keyed = "1"
	}
	args := []string{
		"-t", strconv.Itoa(c.Threads), "-c", strconv.Itoa(c.Connections),
		"-d", strconv.Itoa(max(1, int(c.Duration.Seconds()))) + "s", "--timeout", "10s",
		"-s", script, c.URL, "--",
		c.Tokens, strconv.Itoa(c.Skip), strconv.Itoa(c.Use), strconv.Itoa(c.PerPath), keyed, c.Body,
	}
	args = append(args, c.Paths...)
	cmd := exec.CommandContext(ctx, tool, args...) //nolint:gosec // arguments are the harness's own
	cmd.Env = append(os.Environ(), "WRK_THREADS="+strconv.Itoa(c.Threads))
	var out, errOut bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errOut
	if err := cmd.Start(); err != nil {
		return res, fmt.Errorf("start wrk: %w", err)
	}
	done := make(chan error, 1)
	go func() { done <- cmd.Wait() }()
	if err := c.watch(cmd.Process, done); err != nil {
		return res, fmt.Errorf("run wrk: %w: %s%s", err, out.Bytes(), errOut.Bytes())
	}
	_, line, ok := bytes.Cut(out.Bytes(), []byte("\nCROWD "))
	if !ok {
		return res, fmt.Errorf("run wrk: no result in its output: %s%s", out.Bytes(), errOut.Bytes())
	}
	line, _, _ = bytes.Cut(line, []byte("\n"))
	if err := json.Unmarshal(line, &res); err != nil {
		return res, fmt.Errorf("read result of wrk %q: %w", line, err)
	}
	res.CPU = cmd.ProcessState.UserTime() + cmd.ProcessState.SystemTime()
	if errOut.Len() > 0 {
		res.Statuses += " " + errOut.String()
	}
	return res, nil
}

// watch waits for the load tool and lets it go on only while the gate is open.
func (c Crowd) watch(p *os.Process, done <-chan error) error {
	if c.Gate == nil {
		return <-done
	}
	tick := time.NewTicker(4 * time.Millisecond)
	defer tick.Stop()
	end := time.Now().Add(c.Duration)
	running := true
	for {
		select {
		case err := <-done:
			return err
		case <-tick.C:
		}
		// Once its time is over it has to run, so that it can end.
		open := time.Now().After(end) || c.Gate()
		if open == running {
			continue
		}
		sig := syscall.SIGSTOP
		if open {
			sig = syscall.SIGCONT
		}
		if err := p.Signal(sig); err != nil && !errors.Is(err, os.ErrProcessDone) {
			return fmt.Errorf("signal wrk: %w", err)
		}
		running = open
	}
}
