package store

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"
)

// States and steps of a rebuild.
const (
	RebuildRunning = "running"
	RebuildDone    = "done"
	RebuildFailed  = "failed"

	RebuildPause = "pause" // the sale stands still, and publishers run into their deadlines
	RebuildDrain = "drain" // what was published earlier is on its way into MySQL
	RebuildClose = "close" // Redis is closed and emptied
	RebuildWrite = "write" // Redis is written under the locks of the pools
	RebuildOpen  = "open"  // Redis is complete: it is opened, compared, and the sale goes on
)

// Rebuild is the last rebuild of a sale.
type Rebuild struct {
	ActivityID  string `gorm:"primaryKey"`
	State       string
	Step        string
	Resume      bool // the sale was not paused before: it goes on afterwards
	Token       string
	Number      uint64
	Attempts    int
	Note        string
	RequestedBy string
	StartedAt   time.Time
	UpdatedAt   time.Time
	FinishedAt  *time.Time
	Result      *string
}

// TableName implements gorm's Tabler.
func (Rebuild) TableName() string { return "rebuilds" }

// Rebuilding says whether a rebuild of a sale is under way. Call it with the activity's row locked where
// the answer has to stay true.
func Rebuilding(ctx context.Context, q interface {
	QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
}, activity string) (bool, error) {
	var state string
	err := q.QueryRowContext(ctx, "SELECT state FROM rebuilds WHERE activity_id = ?", activity).Scan(&state)
	if errors.Is(err, sql.ErrNoRows) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("read rebuild of activity %s: %w", activity, err)
	}
	return state == RebuildRunning, nil
}

// OrdersOf reads a page of a sale's rows by id, behind after ("" for the first).
func OrdersOf(ctx context.Context, q Querier, activity, after string, limit int) ([]*Order, error) {
	after = max(after, activity+"-")
	rows, err := q.QueryContext(ctx, "SELECT "+orderColumns+" FROM orders FORCE INDEX (PRIMARY) WHERE id > ? AND id < ? AND activity_id = ? ORDER BY id LIMIT ?",
		after, activity+".", activity, limit)
	if err != nil {
		return nil, fmt.Errorf("read orders of activity %s: %w", activity, err)
	}
	var out []*Order
	err = scanOrders(rows, func(o *Order) { out = append(out, o) })
	return out, err
}
