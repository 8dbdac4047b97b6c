package observability

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"strings"
)

// Names of the W3C trace context in HTTP and AMQP headers.
const (
	HeaderTraceparent = "traceparent"
	HeaderTracestate  = "tracestate"
)

// Trace is a W3C trace context (https://www.w3.org/TR/trace-context/): which trace something belongs
// to, and the span that caused it. The zero value is none.
type Trace struct {
	traceID, spanID string // lower-case hex, 32 and 16 digits
	flags           string // 2 hex digits
	state           string // handed on as it came
}

// NewTrace starts a trace of its own, marked as sampled.
func NewTrace() Trace {
	var b [24]byte
	_, _ = rand.Read(b[:]) // never fails (crypto/rand)
	return Trace{traceID: hex.EncodeToString(b[:16]), spanID: hex.EncodeToString(b[16:]), flags: "01"}
}

// ParseTrace reads a traceparent and its tracestate. What is not valid gives the zero value: the
// specification wants such a context dropped, not repaired. Unknown versions are read as version 00.
func ParseTrace(traceparent, tracestate string) Trace {
	parts := strings.SplitN(traceparent, "-", 5)
	if len(parts) < 4 || !isHex(parts[0], 2) || parts[0] == "ff" || (parts[0] == "00" && len(parts) != 4) {
		return Trace{}
	}
	t := Trace{traceID: parts[1], spanID: parts[2], flags: parts[3]}
	if !isHex(t.traceID, 32) || !isHex(t.spanID, 16) || !isHex(t.flags, 2) ||
		strings.Trim(t.traceID, "0") == "" || strings.Trim(t.spanID, "0") == "" {
		return Trace{}
	}
	if len(tracestate) <= 512 { // longer ones may be dropped
		t.state = tracestate
	}
	return t
}

func isHex(s string, n int) bool {
	if len(s) != n {
		return false
	}
	for i := range len(s) {
		if c := s[i]; (c < '0' || c > '9') && (c < 'a' || c > 'f') {
			return false
		}
	}
	return true
}

// IsValid says whether there is a trace.
func (t Trace) IsValid() bool { return t.traceID != "" }

// TraceID is what log lines and reports carry.
func (t Trace) TraceID() string { return t.traceID }

// Child is the same trace with a new span: what to hand on to the next program.
func (t Trace) Child() Trace {
	if !t.IsValid() {
		return t
	}
	var b [8]byte
	_, _ = rand.Read(b[:]) // never fails (crypto/rand)
	t.spanID = hex.EncodeToString(b[:])
	return t
}

// Traceparent is the header's value, empty for none.
func (t Trace) Traceparent() string {
	if !t.IsValid() {
		return ""
	}
	return "00-" + t.traceID + "-" + t.spanID + "-" + t.flags
}

// Inject adds the trace to a message's headers.
func (t Trace) Inject(headers map[string]string) {
	if !t.IsValid() {
		return
	}
	headers[HeaderTraceparent] = t.Traceparent()
	if t.state != "" {
		headers[HeaderTracestate] = t.state
	}
}

// Extract reads the trace from a message's headers.
func Extract(headers map[string]string) Trace {
	return ParseTrace(headers[HeaderTraceparent], headers[HeaderTracestate])
}

type traceKey struct{}

// WithTrace puts a trace into a context.
func WithTrace(ctx context.Context, t Trace) context.Context {
	return context.WithValue(ctx, traceKey{}, t)
}

// TraceFrom gives the trace of a context; the zero value where there is none.
func TraceFrom(ctx context.Context) Trace {
	t, _ := ctx.Value(traceKey{}).(Trace)
	return t
}
