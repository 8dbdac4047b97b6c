package adminapi

// ReconcileRequest compares Redis with MySQL: POST /admin/v1/activities/{id}/reconcile.
type ReconcileRequest struct {
	Repair bool `json:"repair"`
}

// Kinds of difference.
const (
	DiffNotPublished = "not_published" // reserved in Redis, no row, in no outbox: published again
	DiffBehind       = "behind"        // the record has not followed its row: followed
	DiffNotReleased  = "not_released"  // final in MySQL, live in Redis: released
	DiffForgotten    = "forgotten"     // live in MySQL, unknown to Redis: record restored, stock lowered
	DiffContradicts  = "contradicts"   // record and row say things that cannot both be: reported only
	DiffStock        = "stock"         // the units left differ: set to what MySQL and the records leave
	DiffLimit        = "limit"         // a buyer holds more or less than his orders say: reported only
	DiffUnexplained  = "unexplained"   // a pool's row does not add up in MySQL itself, or is not there: reported only
)

// Difference is one thing in which the stores differ.
type Difference struct {
	Kind     string `json:"kind"`
	OrderID  string `json:"order_id,omitempty"`
	UserID   string `json:"user_id,omitempty"`
	SKU      string `json:"sku_id,omitempty"`
	Pool     string `json:"pool,omitempty"`
	Units    int64  `json:"units"` // stock: Redis has that many more (less, if negative)
	Detail   string `json:"detail"`
	Repaired bool   `json:"repaired"`
}

// ReconcileResult answers it. Differences are those of the last pass and whatever was repaired before.
type ReconcileResult struct {
	ActivityID  string       `json:"activity_id"`
	Passes      int          `json:"passes"`
	Stable      bool         `json:"stable"` // the last pass found nothing that could still be repaired, and nothing moved meanwhile
	Differences []Difference `json:"differences"`
	DriftUnits  int64        `json:"drift_units"` // units in question in the last pass
}
