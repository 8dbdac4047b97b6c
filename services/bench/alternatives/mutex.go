package alternatives

import (
	"context"
	"database/sql"
	"fmt"
	"sync"
)

// Mutex sells from a counter in this process. After a restart it counts what the database has; a
// second replica has a counter of its own, and nothing keeps the two together.
type Mutex struct {
	db     *sql.DB
	mu     sync.Mutex
	left   map[string]int // by activity and sku
	buyers map[string]struct{}
}

// NewMutex reads what is left from the database.
func NewMutex(ctx context.Context, db *sql.DB) (*Mutex, error) {
	m := &Mutex{db: db, left: map[string]int{}, buyers: map[string]struct{}{}}
	rows, err := db.QueryContext(ctx, `SELECT s.activity, s.sku, s.allocated - COALESCE((SELECT SUM(o.quantity) FROM alternative_orders o
		WHERE o.activity = s.activity AND o.sku = s.sku), 0) FROM alternative_stock s`)
	if err != nil {
		return nil, fmt.Errorf("read stock: %w", err)
	}
	defer rows.Close() //nolint:errcheck // rows.Err says it
	for rows.Next() {
		var activity, sku string
		var left int
		if err := rows.Scan(&activity, &sku, &left); err != nil {
			return nil, fmt.Errorf("read stock: %w", err)
		}
		m.left[activity+"/"+sku] = left
	}
	if err := rows.Err(); err != nil {
		return nil, fmt.Errorf("read stock: %w", err)
	}
	return m, nil
}

// Sell takes the units under the lock and writes the order outside of it.
func (m *Mutex) Sell(ctx context.Context, o Order) error {
	stock, buyer := o.Activity+"/"+o.SKU, o.Activity+"/"+o.User
	m.mu.Lock()
	if _, ok := m.buyers[buyer]; ok {
		m.mu.Unlock()
		return ErrLimit
	}
	if m.left[stock] < o.Quantity {
		m.mu.Unlock()
		return ErrSoldOut
	}
	m.left[stock] -= o.Quantity
	m.buyers[buyer] = struct{}{}
	m.mu.Unlock()
	if err := insert(ctx, m.db, o); err != nil {
		m.mu.Lock()
		m.left[stock] += o.Quantity
		delete(m.buyers, buyer)
		m.mu.Unlock()
		return err
	}
	return nil
}
