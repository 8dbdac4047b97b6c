package adminapi

import "time"

// RebuildRequest brings a sale that Redis has lost back from MySQL: POST /admin/v1/activities/{id}/rebuild.
type RebuildRequest struct {
	DryRun bool `json:"dry_run"` // says what would be written now, and changes nothing
}

// States of a rebuild.
const (
	RebuildRunning = "running"
	RebuildDone    = "done"
	RebuildFailed  = "failed"
)

// Rebuild is the last rebuild of a sale. It is carried out by a worker, and goes on if that dies.
type Rebuild struct {
	ActivityID  string         `json:"activity_id"`
	State       string         `json:"state"`
	Step        string         `json:"step,omitempty"` // pause, drain, close, write, open
	Note        string         `json:"note,omitempty"` // what it waits for, or why it failed
	Joined      bool           `json:"joined"`         // it was under way before this request
	DryRun      bool           `json:"dry_run"`
	Resume      bool           `json:"resume"` // the sale was not paused before, and goes on afterwards
	Attempts    int            `json:"attempts"`
	RequestedBy string         `json:"requested_by,omitempty"`
	StartedAt   time.Time      `json:"started_at,omitzero"`
	FinishedAt  *time.Time     `json:"finished_at,omitempty"`
	Result      *RebuildResult `json:"result,omitempty"`
}

// RebuildResult is what a rebuild wrote.
type RebuildResult struct {
	Number         uint64         `json:"number"` // under which it was written; 0 in a dry run
	Epoch          uint64         `json:"epoch"`
	Pools          []RebuiltPool  `json:"pools"`
	Records        int            `json:"records"`
	Statuses       map[string]int `json:"statuses"` // records by status
	Limits         int            `json:"limits"`   // users who hold units
	Qualifications int            `json:"qualifications"`
	Keys           int            `json:"idempotency_keys"`
	Parked         int            `json:"parked"`  // reserved orders that wait behind open dead letters
	Waiting        int            `json:"waiting"` // reserved orders that are published again
	Bare           int            `json:"bare"`    // rows of which only the id is known: they have no record
	Mended         int            `json:"mended"`  // differences that the comparison afterwards found, and mended
	Left           int            `json:"left"`    // and those that it could not mend
}

// RebuiltPool is what is on sale again of one pool.
type RebuiltPool struct {
	SKU       string `json:"sku_id"`
	Pool      string `json:"pool"`
	Allocated int64  `json:"allocated"`
	Available int64  `json:"available"` // in MySQL
	Held      int64  `json:"held"`      // by orders that lie in dead letters and have no row
	Units     int64  `json:"units"`     // on sale
	Short     int64  `json:"short"`     // held by more letters than there are units
}
