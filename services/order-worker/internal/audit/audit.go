// Package audit keeps what operators changed, in the transaction of the change wherever there is one.
package audit

import (
	"context"
	"database/sql"
	"encoding/json"
	"fmt"
)

// Actor is who asks for a change.
type Actor struct {
	Name      string
	Role      string
	Remote    string // address the request came from
	RequestID string
}

// System is the worker itself, where it changes something without being asked.
func System() Actor { return Actor{Name: "worker", Role: "system"} }

// Entry is one change.
type Entry struct {
	Action  string // "activity.create"
	Subject string // what was changed
	Reason  string // the operator's words
	Result  string // what came of it, one word
	Before  any    // JSON, nil if there was nothing
	After   any    // JSON
}

// Execer is a transaction or, for changes outside MySQL, the pool.
type Execer interface {
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
}

type detail struct {
	RequestID string `json:"request_id,omitempty"`
	Before    any    `json:"before,omitempty"`
	After     any    `json:"after,omitempty"`
}

// Write adds an entry.
func Write(ctx context.Context, tx Execer, by Actor, e Entry) error {
	raw, err := json.Marshal(detail{RequestID: by.RequestID, Before: e.Before, After: e.After})
	if err != nil {
		return fmt.Errorf("encode audit of %s %s: %w", e.Action, e.Subject, err)
	}
	_, err = tx.ExecContext(ctx, `INSERT INTO operator_audit (at, actor, role, action, subject, reason, result, detail, remote)
		VALUES (UTC_TIMESTAMP(6), ?, ?, ?, ?, ?, ?, ?, ?)`,
		by.Name, by.Role, e.Action, e.Subject, cut(e.Reason, 200), cut(e.Result, 32), string(raw), cut(by.Remote, 64))
	if err != nil {
		return fmt.Errorf("write audit of %s %s: %w", e.Action, e.Subject, err)
	}
	return nil
}

// Detail takes a stored detail apart.
func Detail(raw string) (requestID string, before, after json.RawMessage) {
	var d struct {
		RequestID string          `json:"request_id"`
		Before    json.RawMessage `json:"before"`
		After     json.RawMessage `json:"after"`
	}
	if json.Unmarshal([]byte(raw), &d) != nil {
		return "", nil, nil // written by another version: the row's columns still tell who did what
	}
	return d.RequestID, d.Before, d.After
}

// cut shortens text to n characters, the unit of MySQL's VARCHAR.
func cut(s string, n int) string {
	if r := []rune(s); len(r) > n {
		return string(r[:n])
	}
	return s
}
