package adminapi

import "time"

// VerifyResult is the checklist of a sale's end (design §6): GET /admin/v1/activities/{id}/verify.
type VerifyResult struct {
	ActivityID string       `json:"activity_id"`
	At         time.Time    `json:"at"`
	OK         bool         `json:"ok"`
	Lines      []VerifyLine `json:"lines"`
}

// VerifyLine is one check with what was measured.
type VerifyLine struct {
	Check    string `json:"check"`
	OK       bool   `json:"ok"`
	Measured string `json:"measured"`
	Limit    string `json:"limit"`
}
