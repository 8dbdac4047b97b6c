package load

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
)

// OpenLoop sends requests at a constant rate, whether or not the answers keep up, and measures each
// from the moment it was meant to be sent: a server that stalls is charged for everybody who would
// have come meanwhile (no coordinated omission).
type OpenLoop struct {
	Addr        string // host:port
	Path        string
	Body        string
	Tokens      string // file made by Tokens
	Skip        int    // tokens to leave out; request i comes from buyer Skip+i
	Keyed       bool
	Rate        float64 // requests per second
	Connections int     // what cannot be sent for want of a free connection waits, and its wait counts
	Duration    time.Duration
	// Warmup comes before Duration at the same rate, and its latencies are left out: for as long as the
	// connections are new, the load tool and whatever answers start from cold, and share the processors.
	Warmup time.Duration
}

// OpenLoopResult is what an open-loop run counted.
type OpenLoopResult struct {
	Sent, Accepted, Refused, Failed int64
	Elapsed                         time.Duration
	Latency                         *hdrhistogram.Histogram // microseconds, accepted answers only
	FirstBad                        string
}

// P returns the given percentile of accepted answers.
func (r OpenLoopResult) P(q float64) time.Duration {
	return time.Duration(r.Latency.ValueAtQuantile(q)) * time.Microsecond
}

type intent struct {
	n  int
	at time.Time
}

// Run sends the load and waits for all answers.
func (o OpenLoop) Run(ctx context.Context) (OpenLoopResult, error) {
	res := OpenLoopResult{Latency: newHistogram()}
	total := int(o.Rate * (o.Warmup + o.Duration).Seconds())
	if total <= 0 {
		return res, errors.New("run open loop: nothing to send")
	}
	tokens, err := readTokens(o.Tokens, o.Skip, total)
	if err != nil {
		return res, err
	}
	conns := make([]net.Conn, o.Connections)
	defer func() {
		for _, c := range conns {
			if c != nil {
				c.Close() //nolint:errcheck,gosec // the run is over
			}
		}
	}()
	for i := range conns {
		if conns[i], err = net.DialTimeout("tcp", o.Addr, 5*time.Second); err != nil {
			return res, fmt.Errorf("connect to %s: %w", o.Addr, err)
		}
	}

	work := make(chan intent, total)
	var mu sync.Mutex
	var firstBad atomic.Pointer[string]
	var wg sync.WaitGroup
	for _, conn := range conns {
		wg.Go(func() {
			w := sender{o: &o, conn: conn, from: int(o.Rate * o.Warmup.Seconds()), in: bufio.NewReaderSize(conn, 8<<10), hist: newHistogram()}
			for it := range work {
				if err := w.one(it, tokens[it.n]); err != nil {
					s := err.Error()
					firstBad.CompareAndSwap(nil, &s)
					if w.broken {
						break
					}
				}
			}
			mu.Lock()
			defer mu.Unlock()
			res.Latency.Merge(w.hist)
			res.Accepted += w.accepted
			res.Refused += w.refused
			res.Failed += w.failed
		})
	}

	start := time.Now()
	gap := float64(time.Second) / o.Rate
	for i := 0; i < total; {
		if ctx.Err() != nil {
			break
		}
		now := time.Since(start)
		for i < total {
			due := time.Duration(float64(i) * gap)
			if due > now {
				break
			}
			work <- intent{n: i, at: start.Add(due)}
			i++
			res.Sent++
		}
		if next := time.Duration(float64(i)*gap) - time.Since(start); next > 0 {
			time.Sleep(min(next, time.Millisecond))
		}
	}
	close(work)
	wg.Wait()
	res.Elapsed = time.Since(start)
	if s := firstBad.Load(); s != nil {
		res.FirstBad = *s
	}
	if ctx.Err() != nil {
		return res, fmt.Errorf("run open loop: %w", ctx.Err())
	}
	return res, nil
}

func newHistogram() *hdrhistogram.Histogram {
	return hdrhistogram.New(1, int64(time.Minute/time.Microsecond), 3)
}

// sender owns one connection. It speaks just enough HTTP/1.1 for answers with a Content-Length, so
// that the load tool takes as little as it can from the two cores it shares with what it measures.
type sender struct {
	o                         *OpenLoop
	conn                      net.Conn
	in                        *bufio.Reader
	from                      int // the first request whose latency counts
	out, body                 []byte
	hist                      *hdrhistogram.Histogram
	accepted, refused, failed int64
	broken                    bool
}

func (s *sender) one(it intent, token []byte) error {
	b := s.out[:0]
	b = append(b, "POST "...)
	b = append(b, s.o.Path...)
	b = append(b, " HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\nAuthorization: Bearer "...)
	b = append(b, token...)
	if s.o.Keyed {
		b = append(b, "\r\nIdempotency-Key: k-"...)
		b = strconv.AppendInt(b, int64(s.o.Skip+it.n), 10)
	}
	b = append(b, "\r\nContent-Length: "...)
	b = strconv.AppendInt(b, int64(len(s.o.Body)), 10)
	b = append(b, "\r\n\r\n"...)
	b = append(b, s.o.Body...)
	s.out = b
	if err := s.conn.SetDeadline(time.Now().Add(30 * time.Second)); err != nil {
		return s.fail(err)
	}
	if _, err := s.conn.Write(b); err != nil {
		return s.fail(err)
	}
	status, err := s.read()
	if err != nil {
		return s.fail(err)
	}
	switch {
	case status == 202 && bytes.Contains(s.body, []byte(`"status":"reserved"`)):
		s.accepted++
		if it.n < s.from {
			return nil
		}
		return s.hist.RecordValue(max(1, time.Since(it.at).Microseconds()))
	case status == 409:
		s.refused++
		return nil
	default:
		s.failed++
		return fmt.Errorf("answer %d %s", status, s.body)
	}
}

func (s *sender) fail(err error) error {
	s.failed++
	s.broken = true
	return err
}

func (s *sender) read() (status int, err error) {
	line, err := s.in.ReadSlice('\n')
	if err != nil {
		return 0, err
	}
	if len(line) < 12 {
		return 0, fmt.Errorf("short status line %q", line)
	}
	if status, err = strconv.Atoi(string(line[9:12])); err != nil {
		return 0, fmt.Errorf("status line %q: %w", line, err)
	}
	length := -1
	for {
		if line, err = s.in.ReadSlice('\n'); err != nil {
			return 0, err
		}
		line = bytes.TrimRight(line, "\r\n")
		if len(line) == 0 {
			break
		}
		if k, v, ok := bytes.Cut(line, []byte(":")); ok && bytes.EqualFold(k, []byte("Content-Length")) {
			if length, err = strconv.Atoi(string(bytes.TrimSpace(v))); err != nil {
				return 0, fmt.Errorf("content length %q: %w", v, err)
			}
		}
	}
	if length < 0 {
		return 0, errors.New("answer without a content length")
	}
	if cap(s.body) < length {
		s.body = make([]byte, length)
	}
	s.body = s.body[:length]
	_, err = io.ReadFull(s.in, s.body)
	return status, err
}

func readTokens(path string, skip, n int) ([][]byte, error) {
	f, err := os.Open(path) //nolint:gosec // the harness's own scratch folder
	if err != nil {
		return nil, fmt.Errorf("read token file: %w", err)
	}
	defer f.Close() //nolint:errcheck // only read
	first, err := bufio.NewReader(f).ReadSlice('\n')
	if err != nil {
		return nil, fmt.Errorf("read token file %s: %w", path, err)
	}
	width := len(first)
	all := make([]byte, n*width)
	if _, err := f.ReadAt(all, int64(skip)*int64(width)); err != nil {
		return nil, fmt.Errorf("read %d tokens after %d from %s: %w", n, skip, path, err)
	}
	out := make([][]byte, n)
	for i := range out {
		out[i] = all[i*width : (i+1)*width-1]
	}
	return out, nil
}
