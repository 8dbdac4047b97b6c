package store

import (
	"encoding/hex"
	"strconv"
	"time"
)

// sqlBuf writes multi-row statements as text. The driver's interpolation does the same with one boxed
// value and one conversion for each of some ten thousand values in a batch; it showed in the profile.
type sqlBuf struct{ b []byte }

func (w *sqlBuf) raw(s string) *sqlBuf {
	w.b = append(w.b, s...)
	return w
}

// str writes a string literal. What is not plain is written in hex, which needs no escaping and so
// depends on no mode of the server.
func (w *sqlBuf) str(s string) *sqlBuf {
	for i := 0; i < len(s); i++ {
		c := s[i]
		if c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '-' || c == '_' || c == '/' || c == '.' || c == ':' {
			continue
		}
		w.b = append(w.b, "_utf8mb4 x'"...)
		w.b = hex.AppendEncode(w.b, []byte(s))
		w.b = append(w.b, '\'')
		return w
	}
	w.b = append(w.b, '\'')
	w.b = append(w.b, s...)
	w.b = append(w.b, '\'')
	return w
}

func (w *sqlBuf) bytes(p []byte) *sqlBuf {
	if p == nil {
		return w.raw("NULL")
	}
	w.b = append(w.b, "x'"...)
	w.b = hex.AppendEncode(w.b, p)
	w.b = append(w.b, '\'')
	return w
}

func (w *sqlBuf) num(n int64) *sqlBuf {
	w.b = strconv.AppendInt(w.b, n, 10)
	return w
}

func (w *sqlBuf) time(t time.Time) *sqlBuf {
	w.b = append(w.b, '\'')
	w.b = t.UTC().AppendFormat(w.b, "2006-01-02 15:04:05.000000")
	w.b = append(w.b, '\'')
	return w
}

func (w *sqlBuf) comma() *sqlBuf {
	w.b = append(w.b, ',')
	return w
}

// list writes ('a','b',…).
func (w *sqlBuf) list(ss []string) *sqlBuf {
	for i, s := range ss {
		if i == 0 {
			w.b = append(w.b, '(')
		} else {
			w.b = append(w.b, ',')
		}
		w.str(s)
	}
	w.b = append(w.b, ')')
	return w
}

func (w *sqlBuf) String() string { return string(w.b) }

// chunkRows bounds the rows of one statement: some 400 KB of text, far below the smallest
// max_allowed_packet in use (16 MB) and below what keeps a replica's applier busy for long.
const chunkRows = 1000

// chunks calls f for consecutive pieces of s.
func chunks[T any](s []T, f func([]T) error) error {
	for len(s) > 0 {
		n := min(len(s), chunkRows)
		if err := f(s[:n]); err != nil {
			return err
		}
		s = s[n:]
	}
	return nil
}
