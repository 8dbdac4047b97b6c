package observability

import (
	"context"
	"fmt"
	"io"
	"log/slog"
)

// LogConfig says what is logged and in which form.
type LogConfig struct {
	Level  slog.Level `mapstructure:"level" help:"debug, info, warn or error"`
	Format string     `mapstructure:"format" help:"json (default) or text"`
}

// NewLogger logs to w. Lines that are logged with a context carry the trace_id in it.
func NewLogger(w io.Writer, c LogConfig) (*slog.Logger, error) {
	o := &slog.HandlerOptions{Level: c.Level}
	switch c.Format {
	case "", "json":
		return slog.New(traceHandler{slog.NewJSONHandler(w, o)}), nil
	case "text":
		return slog.New(traceHandler{slog.NewTextHandler(w, o)}), nil
	default:
		return nil, fmt.Errorf("log.format: %q is neither json nor text", c.Format)
	}
}

type traceHandler struct{ slog.Handler }

func (h traceHandler) Handle(ctx context.Context, r slog.Record) error {
	if t := TraceFrom(ctx); t.IsValid() {
		r = r.Clone()
		r.AddAttrs(slog.String("trace_id", t.TraceID()))
	}
	return h.Handler.Handle(ctx, r)
}

func (h traceHandler) WithAttrs(a []slog.Attr) slog.Handler {
	return traceHandler{h.Handler.WithAttrs(a)}
}

func (h traceHandler) WithGroup(name string) slog.Handler {
	return traceHandler{h.Handler.WithGroup(name)}
}
