package deadletter

import (
	"context"
	"encoding/json"
	"fmt"
	"time"
	"unicode/utf8"

	"gorm.io/gorm"

	"seckill/pkg/adminapi"
	"seckill/pkg/order"
	"seckill/services/order-worker/internal/store"
)

func where(q *gorm.DB, f adminapi.LetterFilter) (*gorm.DB, error) {
	for _, c := range []struct{ name, column, value string }{
		{"state", "state", f.State}, {"class", "class", f.Class}, {"queue", "source_queue", f.Queue},
		{"activity_id", "activity_id", f.ActivityID}, {"order_id", "order_id", f.OrderID},
	} {
		if !order.ASCII(c.value) {
			return nil, fmt.Errorf("%w: %s has other characters than ASCII", ErrSelection, c.name)
		}
		if c.value != "" {
			q = q.Where(c.column+" = ?", c.value)
		}
	}
	if !utf8.ValidString(f.Query) {
		return nil, fmt.Errorf("%w: q is not UTF-8", ErrSelection)
	}
	if f.Query != "" {
		// INSTR knows no wildcards; a body is bytes, and so is what is looked for in it.
		text := "INSTR(error, ?) > 0 OR INSTR(message_id, ?) > 0 OR INSTR(body, CAST(? AS BINARY)) > 0"
		args := []any{f.Query, f.Query, f.Query}
		if order.ASCII(f.Query) {
			// MySQL refuses to look for anything else in an ASCII column.
			text, args = text+" OR INSTR(order_id, ?) > 0", append(args, f.Query)
		}
		q = q.Where("("+text+")", args...)
	}
	return q, nil
}

// List reads letters, newest first, with ids below before (0: from the newest). Bodies and headers
// are left out.
func (s *Service) List(ctx context.Context, f adminapi.LetterFilter, before int64, limit int) ([]adminapi.DeadLetter, error) {
	q, err := where(s.st.DB(ctx), f)
	if err != nil {
		return nil, err
	}
	q = q.Omit("body", "headers").Order("id DESC").Limit(limit)
	if before > 0 {
		q = q.Where("id < ?", before)
	}
	var rows []store.DeadLetter
	if err := q.Find(&rows).Error; err != nil {
		return nil, fmt.Errorf("list dead letters: %w", err)
	}
	out := make([]adminapi.DeadLetter, len(rows))
	for i := range rows {
		out[i] = toAPI(&rows[i])
	}
	return out, nil
}

// Show reads a letter with everything that is in it and what a replay would come to.
func (s *Service) Show(ctx context.Context, id int64) (adminapi.DeadLetter, error) {
	rows, err := s.letters(ctx, []int64{id})
	if err != nil {
		return adminapi.DeadLetter{}, err
	}
	if len(rows) == 0 {
		return adminapi.DeadLetter{}, fmt.Errorf("dead letter %d: %w", id, ErrNotFound)
	}
	verdicts, err := s.judge(ctx, rows)
	if err != nil {
		return adminapi.DeadLetter{}, err
	}
	out := toAPI(rows[0])
	out.Verdict, out.Detail = verdicts[0].is, verdicts[0].detail
	out.Body = rows[0].Body
	m := message(rows[0])
	out.Headers, out.Decoded = m.Headers, asJSON(m)
	return out, nil
}

// Groups counts letters that look alike, the most frequent first.
func (s *Service) Groups(ctx context.Context, f adminapi.LetterFilter) ([]adminapi.DeadLetterGroup, error) {
	var rows []struct {
		State, Class, SourceQueue, Alike string
		N                                int64
		Oldest, Newest                   time.Time
	}
	q, err := where(s.st.DB(ctx).Model(&store.DeadLetter{}), f)
	if err != nil {
		return nil, err
	}
	// Errors of one kind differ in the ids they name; what stands before the first quote or digit
	// is alike.
	err = q.
		Select(`state, class, source_queue, TRIM(REGEXP_SUBSTR(error, '^[^"0-9]*')) AS alike, COUNT(*) AS n, MIN(created_at) AS oldest, MAX(updated_at) AS newest`).
		Group("state, class, source_queue, alike").Order("n DESC").Limit(1000).Scan(&rows).Error
	if err != nil {
		return nil, fmt.Errorf("group dead letters: %w", err)
	}
	out := make([]adminapi.DeadLetterGroup, len(rows))
	for i, r := range rows {
		out[i] = adminapi.DeadLetterGroup{State: r.State, Class: r.Class, Queue: r.SourceQueue, Error: r.Alike, Count: r.N, Oldest: r.Oldest, Newest: r.Newest}
	}
	return out, nil
}

func toAPI(l *store.DeadLetter) adminapi.DeadLetter {
	return adminapi.DeadLetter{
		ID: l.ID, State: l.State, Class: l.Class, Error: l.Error, Queue: l.SourceQueue, RoutingKey: l.RoutingKey, MessageID: l.MessageID,
		ActivityID: l.ActivityID, OrderID: l.OrderID, Attempt: l.Attempt, Deaths: l.Occurrences, FirstAt: l.CreatedAt, LastAt: l.UpdatedAt,
		Parked: l.Parked, Note: l.Note,
	}
}

// Job reads a replay job.
func (s *Service) Job(ctx context.Context, id string) (adminapi.ReplayJob, error) {
	jobs, err := s.jobs(ctx, s.st.DB(ctx).Where("id = ?", id))
	if err != nil {
		return adminapi.ReplayJob{}, err
	}
	if len(jobs) == 0 {
		return adminapi.ReplayJob{}, fmt.Errorf("replay job %s: %w", id, ErrJobNotFound)
	}
	return jobs[0], nil
}

// Jobs reads the latest jobs, newest first.
func (s *Service) Jobs(ctx context.Context, limit int) ([]adminapi.ReplayJob, error) {
	return s.jobs(ctx, s.st.DB(ctx).Order("id DESC").Limit(limit))
}

func (s *Service) jobs(ctx context.Context, q *gorm.DB) ([]adminapi.ReplayJob, error) {
	var rows []store.ReplayJob
	if err := q.Where("kind = ?", kindReplay).Find(&rows).Error; err != nil {
		return nil, fmt.Errorf("read replay jobs: %w", err)
	}
	ids := make([]string, len(rows))
	for i := range rows {
		ids[i] = rows[i].ID
	}
	counts := map[string]map[string]int{}
	verdicts := map[string]map[string]int{}
	if len(ids) > 0 {
		var groups []struct {
			JobID, State, Verdict string
			N                     int
		}
		err := s.st.DB(ctx).Raw("SELECT job_id, state, verdict, COUNT(*) AS n FROM replay_items WHERE job_id IN ? GROUP BY job_id, state, verdict", ids).Scan(&groups).Error
		if err != nil {
			return nil, fmt.Errorf("count replayed letters: %w", err)
		}
		for _, g := range groups {
			if counts[g.JobID] == nil {
				counts[g.JobID], verdicts[g.JobID] = map[string]int{}, map[string]int{}
			}
			counts[g.JobID][g.State] += g.N
			if g.Verdict != "" {
				verdicts[g.JobID][g.Verdict] += g.N
			}
		}
	}
	out := make([]adminapi.ReplayJob, len(rows))
	for i, r := range rows {
		n := counts[r.ID]
		out[i] = adminapi.ReplayJob{
			ID: r.ID, State: r.State, Actor: r.RequestedBy, Matched: r.Total, Sent: n[itemSent], Skipped: n[itemSkipped], Failed: n[itemFailed],
			Verdicts: verdicts[r.ID], CreatedAt: r.CreatedAt,
		}
		if r.FinishedAt != nil {
			out[i].FinishedAt = *r.FinishedAt
		}
	}
	return out, nil
}

func selectionJSON(sel adminapi.LetterSelection) (string, error) {
	raw, err := json.Marshal(sel)
	if err != nil {
		return "", fmt.Errorf("encode selection: %w", err)
	}
	if len(raw) > 60_000 { // the column holds 64 KiB; replay_items has the ids
		raw = []byte(fmt.Sprintf(`{"ids_count":%d}`, len(sel.IDs)))
	}
	return string(raw), nil
}
