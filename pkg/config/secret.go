package config

import (
	"fmt"
	"io"
	"log/slog"
)

// Secret is a setting that must never show: every way of printing, logging or encoding it gives a
// placeholder. Reveal is the only way to its value.
type Secret string

const placeholder = "[redacted]"

// Reveal returns the value. Give it to the library that needs it and to nobody else.
func (s Secret) Reveal() string { return string(s) }

// IsZero says whether the secret is not set.
func (s Secret) IsZero() bool { return s == "" }

// String returns the placeholder, or nothing when the secret is not set.
func (s Secret) String() string {
	if s == "" {
		return ""
	}
	return placeholder
}

// GoString is for %#v.
func (s Secret) GoString() string { return fmt.Sprintf("config.Secret(%q)", s.String()) }

// Format covers the remaining verbs: fmt shows the plain value when a verb does not fit the type.
func (s Secret) Format(f fmt.State, verb rune) {
	switch {
	case verb == 'v' && f.Flag('#'):
		_, _ = io.WriteString(f, s.GoString())
	case verb == 'q':
		_, _ = fmt.Fprintf(f, "%q", s.String())
	default:
		_, _ = io.WriteString(f, s.String())
	}
}

// MarshalText is for JSON, YAML and the like.
func (s Secret) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// UnmarshalText takes the value as it is.
func (s *Secret) UnmarshalText(b []byte) error {
	*s = Secret(b)
	return nil
}

// LogValue is for slog.
func (s Secret) LogValue() slog.Value { return slog.StringValue(s.String()) }
