package store

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"gorm.io/gorm"
)

// Sale is what the persist path has to know of an activity: what the plan fixed before it was warmed.
type Sale struct {
	Activity Activity // id, state and limit only: what else a row holds is no reason to keep an order waiting
	Pools    map[Pool]bool

	read time.Time
}

// Catalogue remembers sales. Only those that were warmed are kept: nothing that matters here changes
// in them any more. It is safe for concurrent use.
type Catalogue struct {
	st    *Store
	mu    sync.RWMutex
	sales map[string]*Sale
}

// catalogueTTL bounds how old an answer may be (and how long a deleted rehearsal is remembered).
const catalogueTTL = 30 * time.Second

// NewCatalogue makes an empty catalogue.
func NewCatalogue(st *Store) *Catalogue {
	return &Catalogue{st: st, sales: map[string]*Sale{}}
}

// Sale gives a sale, or nil if MySQL does not know it.
func (c *Catalogue) Sale(ctx context.Context, id string) (*Sale, error) {
	c.mu.RLock()
	s := c.sales[id]
	c.mu.RUnlock()
	if s != nil && time.Since(s.read) < catalogueTTL {
		return s, nil
	}
	s = &Sale{Pools: map[Pool]bool{}, read: time.Now()}
	err := c.st.DB(ctx).Select("id", "state", "per_user_limit").Where("id = ?", id).Take(&s.Activity).Error
	if errors.Is(err, gorm.ErrRecordNotFound) {
		return nil, nil //nolint:nilnil // documented: an unknown sale is nil
	}
	if err != nil {
		return nil, fmt.Errorf("read activity %s: %w", id, err)
	}
	var pools []ActivityStock
	if err := c.st.DB(ctx).Where("activity_id = ?", id).Find(&pools).Error; err != nil {
		return nil, fmt.Errorf("read pools of activity %s: %w", id, err)
	}
	for _, p := range pools {
		s.Pools[Pool{id, p.SKUID, p.Pool}] = true
	}
	if s.Activity.State != ActivityDraft {
		c.mu.Lock()
		c.sales[id] = s
		c.mu.Unlock()
	}
	return s, nil
}
