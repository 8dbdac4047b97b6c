package admin

import (
	"crypto/sha256"
	"crypto/subtle"
	"encoding/hex"
	"errors"
	"fmt"
	"strings"
)

// Role says what a token may do. An operator may do all that a viewer may.
type Role string

// Roles.
const (
	Viewer   Role = "viewer"
	Operator Role = "operator"
)

func (r Role) may(needed Role) bool { return r == Operator || r == needed }

// Token is one entry of SECKILL_ADMIN_TOKENS. The token itself is known to its holder only.
type Token struct {
	Name string
	Role Role
	Hash [sha256.Size]byte
}

// HashToken gives the third part of an entry.
func HashToken(token string) string {
	sum := sha256.Sum256([]byte(token))
	return hex.EncodeToString(sum[:])
}

// ParseTokens reads "name:role:sha256hex,…". Errors name entries by their place, never by content.
func ParseTokens(s string) ([]Token, error) {
	var out []Token
	names := map[string]bool{}
	for i, entry := range strings.Split(s, ",") {
		entry = strings.TrimSpace(entry)
		if entry == "" {
			continue
		}
		parts := strings.Split(entry, ":")
		if len(parts) != 3 {
			return nil, fmt.Errorf("admin token %d: wanted name:role:sha256hex", i+1)
		}
		name, role := parts[0], Role(parts[1])
		if name == "" || len(name) > 64 || strings.ContainsFunc(name, func(r rune) bool { return r <= ' ' || r > '~' }) {
			return nil, fmt.Errorf("admin token %d: the name must be 1 to 64 visible ASCII characters", i+1)
		}
		if role != Viewer && role != Operator {
			return nil, fmt.Errorf("admin token %d: the role must be viewer or operator", i+1)
		}
		raw, err := hex.DecodeString(parts[2])
		if err != nil || len(raw) != sha256.Size {
			return nil, fmt.Errorf("admin token %d: the third part must be the SHA-256 of the token in hex", i+1)
		}
		if names[name] {
			return nil, fmt.Errorf("admin token %d: its name stands twice", i+1)
		}
		names[name] = true
		out = append(out, Token{Name: name, Role: role, Hash: [sha256.Size]byte(raw)})
	}
	if len(out) == 0 {
		return nil, errors.New("no admin tokens")
	}
	return out, nil
}

// find looks the holder up. Every entry is compared, in constant time, whatever matched before.
func find(tokens []Token, token string) (Token, bool) {
	sum := sha256.Sum256([]byte(token))
	at, found := 0, 0
	for i := range tokens {
		same := subtle.ConstantTimeCompare(sum[:], tokens[i].Hash[:])
		at = subtle.ConstantTimeSelect(same, i, at)
		found |= same
	}
	if found == 0 {
		return Token{}, false
	}
	return tokens[at], true
}
