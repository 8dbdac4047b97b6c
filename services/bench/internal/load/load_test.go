package load_test

import (
	"context"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/golang-jwt/jwt/v5"

	"seckill/services/bench/internal/load"
	"seckill/services/bench/internal/noop"
)

const path = "/v1/activities/a/orders"

func tokens(t *testing.T, n int) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "tokens")
	if err := load.Tokens(file, []byte("secret"), n, time.Now().Add(time.Hour)); err != nil {
		t.Fatal(err)
	}
	return file
}

func TestTokensAreValidAndNameDistinctUsers(t *testing.T) {
	seen := map[string]bool{}
	for i := range 3 {
		var c jwt.RegisteredClaims
		token := load.Token([]byte("secret"), load.User(i), time.Now().Add(time.Hour))
		if _, err := jwt.ParseWithClaims(token, &c, func(*jwt.Token) (any, error) { return []byte("secret"), nil }, jwt.WithValidMethods([]string{"HS256"}), jwt.WithExpirationRequired()); err != nil {
			t.Fatal(err)
		}
		seen[c.Subject] = true
	}
	if len(seen) != 3 {
		t.Fatalf("users %v", seen)
	}
}

// A server that stalls once is charged for everybody who would have come meanwhile.
func TestOpenLoopMeasuresFromTheIntendedTime(t *testing.T) {
	const stall = 400 * time.Millisecond
	first := make(chan struct{}, 1)
	first <- struct{}{}
	next := noop.Handler(100)
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		select {
		case <-first:
			time.Sleep(stall) // the stall is the subject of the test
		default:
		}
		next.ServeHTTP(w, r)
	}))
	defer srv.Close()
	res, err := load.OpenLoop{
		Addr: strings.TrimPrefix(srv.URL, "http://"), Path: path, Body: "{}", Tokens: tokens(t, 1000),
		Rate: 1000, Connections: 1, Duration: time.Second,
	}.Run(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	if res.Accepted != 1000 || res.Failed != 0 {
		t.Fatalf("accepted %d, failed %d: %s", res.Accepted, res.Failed, res.FirstBad)
	}
	// 400 of 1000 requests were due during the stall; a closed loop would see one slow answer.
	if p := res.P(80); p < 50*time.Millisecond {
		t.Fatalf("p80 is %s: the stall was charged to one request only", p)
	}
}

func TestOpenLoopCountsRefusedAndFailedApart(t *testing.T) {
	n := 0
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		n++
		switch n % 3 {
		case 0:
			w.WriteHeader(http.StatusConflict)
		case 1:
			w.WriteHeader(http.StatusAccepted)
			_, _ = w.Write([]byte(`{"status":"reserved"}`))
		default:
			w.WriteHeader(http.StatusServiceUnavailable)
		}
	}))
	defer srv.Close()
	res, err := load.OpenLoop{
		Addr: strings.TrimPrefix(srv.URL, "http://"), Path: path, Body: "{}", Tokens: tokens(t, 300),
		Rate: 300, Connections: 1, Duration: time.Second,
	}.Run(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	if res.Accepted != 100 || res.Refused != 100 || res.Failed != 100 {
		t.Fatalf("accepted %d, refused %d, failed %d", res.Accepted, res.Refused, res.Failed)
	}
}

// Every request of a crowd has its own buyer, in both threads, and answers are judged one by one.
func TestCrowdSendsEveryBuyerOnce(t *testing.T) {
	var mu sync.Mutex
	seen := map[string]int{} // requests by buyer; some may still come in when the tool has stopped counting
	next := noop.Handler(200)
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	srv := &http.Server{ReadHeaderTimeout: time.Minute, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		seen[r.Header.Get("Authorization")+r.Header.Get("Idempotency-Key")]++
		mu.Unlock()
		next.ServeHTTP(w, r)
	})}
	go func() { _ = srv.Serve(ln) }()
	defer srv.Close() //nolint:errcheck // the test is over
	res, err := load.Crowd{
		URL: "http://" + ln.Addr().String(), Paths: []string{path}, Body: "{}", Tokens: tokens(t, 150_000), Use: 150_000,
		Keyed: true, Connections: 8, Threads: 2, Duration: time.Second,
	}.Run(context.Background(), t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	if res.Reserved == 0 || res.Bad+res.Other202+res.SoldOut != 0 {
		t.Fatalf("%+v", res)
	}
	mu.Lock()
	defer mu.Unlock()
	if int64(len(seen)) < res.Reserved {
		t.Errorf("%d buyers came, %d got something", len(seen), res.Reserved)
	}
	for u, times := range seen {
		if times != 1 {
			t.Fatalf("buyer %s came %d times", u, times)
		}
	}
}
