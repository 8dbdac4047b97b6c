package rehearse

import (
	"encoding/json"
	"fmt"
	"io"
	"math"
)

// Report is the result of a rehearsal. Its JSON form is a contract: these fields, in this order.
type Report struct {
	Buyers            int     `json:"buyers"`
	Accepted          int     `json:"accepted"`      // distinct orders answered with 202
	SoldOut           int     `json:"sold_out"`      // buyers whose last answer was "sold out"
	Persisted         int     `json:"persisted"`     // rows in MySQL
	Paid              int     `json:"paid"`          // rows by state ...
	Cancelled         int     `json:"cancelled"`     // by the buyer
	Expired           int     `json:"expired"`       // by the payment time-out
	Rejected          int     `json:"rejected"`      //
	DeadLettered      int     `json:"dead_lettered"` // letters of this rehearsal
	Replayed          int     `json:"replayed"`      // of those, the ones that were replayed
	Oversold          int     `json:"oversold"`      // units
	Lost              int     `json:"lost"`          // answers
	Duplicated        int     `json:"duplicated"`    // rows, entries, payments
	Drift             int     `json:"drift"`         // units
	AcceptedPerSecond float64 `json:"accepted_per_s"`
	P50               float64 `json:"p50_ms"`
	P99               float64 `json:"p99_ms"`
	DrainSeconds      float64 `json:"drain_s"` // from the last buyer's answer to quiet

	Findings []string `json:"-"` // examples of what is wrong
}

// Broken says that a promise was not kept.
func (r Report) Broken() bool {
	return r.Oversold != 0 || r.Lost != 0 || r.Duplicated != 0 || r.Drift != 0
}

// Line is the contracted last line.
func (r Report) Line() ([]byte, error) {
	r.AcceptedPerSecond = round(r.AcceptedPerSecond, 1)
	r.P50, r.P99, r.DrainSeconds = round(r.P50, 2), round(r.P99, 2), round(r.DrainSeconds, 2)
	raw, err := json.Marshal(r)
	if err != nil {
		return nil, fmt.Errorf("encode report: %w", err)
	}
	return raw, nil
}

func round(v float64, digits int) float64 {
	p := math.Pow10(digits)
	return math.Round(v*p) / p
}

// Write prints the report for people and then, as the last line, for programs.
func (r Report) Write(w io.Writer) error {
	line, err := r.Line()
	if err != nil {
		return err
	}
	verdict := "every promise was kept"
	if r.Broken() {
		verdict = "A PROMISE WAS BROKEN"
	}
	_, err = fmt.Fprintf(w, `
rehearsal: %s
  buyers         %8d
  accepted       %8d   orders, %.0f per second while the first stock lasted
  sold out       %8d   buyers
  persisted      %8d   rows: %d paid, %d cancelled, %d expired, %d rejected
  dead letters   %8d   of which replayed %d
  answer time    %8.1f   ms median, %.1f ms for 99 of 100
  drained in     %8.1f   s after the last answer

  never oversold     %6d   units too many
  an answer is kept  %6d   lost
  nothing twice      %6d   duplicated
  units conserved    %6d   units adrift
`, verdict, r.Buyers, r.Accepted, r.AcceptedPerSecond, r.SoldOut,
		r.Persisted, r.Paid, r.Cancelled, r.Expired, r.Rejected,
		r.DeadLettered, r.Replayed, r.P50, r.P99, r.DrainSeconds,
		r.Oversold, r.Lost, r.Duplicated, r.Drift)
	if err != nil {
		return fmt.Errorf("write report: %w", err)
	}
	for _, f := range r.Findings {
		if _, err := fmt.Fprintln(w, "  -", f); err != nil {
			return fmt.Errorf("write report: %w", err)
		}
	}
	if _, err := fmt.Fprintf(w, "\n%s\n", line); err != nil {
		return fmt.Errorf("write report: %w", err)
	}
	return nil
}
