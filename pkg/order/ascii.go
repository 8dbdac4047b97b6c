package order

import (
	"strings"
	"unicode/utf8"
)

// ASCII reports whether s is ASCII only, like every id and name. MySQL refuses to compare the columns of
// those with anything else.
func ASCII(s string) bool {
	return !strings.ContainsFunc(s, func(r rune) bool { return r >= utf8.RuneSelf })
}
