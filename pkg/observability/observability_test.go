package observability

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"net/http"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"

	"seckill/pkg/lifecycle"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func get(t *testing.T, url string) (int, string) {
	t.Helper()
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(b)
}

func TestHealthAndMetricsHaveTheirOwnPortAndProfilesAnother(t *testing.T) {
	ready := lifecycle.NewReadiness()
	reg := NewRegistry()
	reg.MustRegister(prometheus.NewGauge(prometheus.GaugeOpts{Name: "seckill_amqp_connected", Help: "x"}))
	s, err := NewServer(t.Context(), "127.0.0.1:0", "127.0.0.1:0", reg, ready, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	base := "http://" + s.Addr()

	if code, body := get(t, base+"/livez"); code != 200 || !strings.Contains(body, "true") {
		t.Errorf("livez: %d %s", code, body)
	}
	if code, body := get(t, base+"/readyz"); code != 503 || !strings.Contains(body, `"state":"starting"`) {
		t.Errorf("readyz while starting: %d %s", code, body)
	}
	ready.SetReady()
	ready.Add("broker", func(context.Context) lifecycle.Check { return lifecycle.Check{Detail: "blocked"} })
	code, body := get(t, base+"/readyz")
	var report lifecycle.Report
	if err := json.Unmarshal([]byte(body), &report); err != nil || code != 200 || report.Checks["broker"].Detail != "blocked" {
		t.Errorf("readyz: %d %s %v", code, body, err)
	}
	if code, body := get(t, base+"/metrics"); code != 200 || !strings.Contains(body, "seckill_amqp_connected 0") || !strings.Contains(body, "go_goroutines") {
		t.Errorf("metrics: %d %.300s", code, body)
	}
	if code, _ := get(t, base+"/debug/pprof/"); code != 404 {
		t.Errorf("profiles on the metrics port: %d", code)
	}
	if code, _ := get(t, "http://"+s.DebugAddr()+"/debug/pprof/goroutine?debug=1"); code != 200 {
		t.Errorf("profiles: %d", code)
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

func TestTakenPortEndsTheStart(t *testing.T) {
	log := slog.New(slog.DiscardHandler)
	a, err := NewServer(t.Context(), "127.0.0.1:0", "", NewRegistry(), lifecycle.NewReadiness(), log)
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	if _, err := NewServer(t.Context(), a.Addr(), "", NewRegistry(), lifecycle.NewReadiness(), log); err == nil {
		t.Error("two servers on one port")
	}
	if _, err := NewServer(t.Context(), "127.0.0.1:0", a.Addr(), NewRegistry(), lifecycle.NewReadiness(), log); err == nil {
		t.Error("profiles on a taken port")
	}
}

func TestTraceContextIsHandedOnOrDropped(t *testing.T) {
	const id, span = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
	good := ParseTrace("00-"+id+"-"+span+"-01", "vendor=x")
	if good.TraceID() != id || good.Traceparent() != "00-"+id+"-"+span+"-01" {
		t.Errorf("got %+v", good)
	}
	headers := map[string]string{}
	good.Child().Inject(headers)
	back := Extract(headers)
	if back.TraceID() != id || back.Traceparent() == good.Traceparent() || headers[HeaderTracestate] != "vendor=x" {
		t.Errorf("child: %v", headers)
	}
	if future := ParseTrace("01-"+id+"-"+span+"-01-more", ""); future.TraceID() != id {
		t.Error("a later version is dropped")
	}
	for _, bad := range []string{
		"", "00", "00-" + id + "-" + span, "ff-" + id + "-" + span + "-01", "00-" + id + "-" + span + "-01-x",
		"00-" + strings.ToUpper(id) + "-" + span + "-01", "00-" + strings.Repeat("0", 32) + "-" + span + "-01",
		"00-" + id + "-" + strings.Repeat("0", 16) + "-01", "00-" + id + "-" + span + "-zz",
	} {
		if ParseTrace(bad, "").IsValid() {
			t.Errorf("%q is taken", bad)
		}
	}
	none := map[string]string{}
	Trace{}.Child().Inject(none)
	if len(none) != 0 {
		t.Errorf("nothing became %v", none)
	}
	if !NewTrace().IsValid() || !ParseTrace(NewTrace().Traceparent(), "").IsValid() {
		t.Error("a new trace is not valid")
	}
}

func TestLogLinesCarryTheTrace(t *testing.T) {
	var out bytes.Buffer
	log, err := NewLogger(&out, LogConfig{})
	if err != nil {
		t.Fatal(err)
	}
	trace := NewTrace()
	log.With("a", 1).InfoContext(WithTrace(t.Context(), trace), "m")
	log.Debug("not shown")
	if !strings.Contains(out.String(), `"trace_id":"`+trace.TraceID()+`"`) || strings.Contains(out.String(), "not shown") {
		t.Error(out.String())
	}
	if _, err := NewLogger(&out, LogConfig{Format: "xml"}); err == nil {
		t.Error("unknown format accepted")
	}
}
