package deadletter

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/oklog/ulid/v2"
	"gorm.io/gorm"

	"seckill/pkg/adminapi"
	"seckill/pkg/failpoint"
	"seckill/pkg/messaging"
	"seckill/pkg/order"
	"seckill/services/order-worker/internal/audit"
	"seckill/services/order-worker/internal/store"
)

const (
	kindReplay = "replay"

	itemClaimed = "claimed"
	itemSent    = "sent"
	itemSkipped = "skipped"
	itemFailed  = "failed"

	maxSelected = 100_000 // letters in one job or discard
	chunkSize   = 64      // letters published together
	tries       = 6       // of publishing before a letter counts as failed
)

// open selects the letters of a selection that are open.
func open(q *gorm.DB, sel adminapi.LetterSelection) (*gorm.DB, error) {
	q = q.Model(&store.DeadLetter{}).Where("state = ?", store.LetterOpen).Order("id").Limit(maxSelected)
	switch {
	case len(sel.IDs) > 0 && sel.Filter != nil:
		return nil, fmt.Errorf("%w: give ids or a filter, not both", ErrSelection)
	case len(sel.IDs) > maxSelected:
		return nil, fmt.Errorf("%w: more than %d ids", ErrSelection, maxSelected)
	case len(sel.IDs) > 0:
		return q.Where("id IN ?", sel.IDs), nil
	case sel.Filter == nil:
		return nil, fmt.Errorf("%w: give ids or a filter", ErrSelection)
	case sel.Filter.State != "" && sel.Filter.State != store.LetterOpen:
		return nil, fmt.Errorf("%w: only open letters can be taken", ErrSelection)
	}
	return where(q, *sel.Filter)
}

// Preview says what a replay of the selection would take and what that would come to.
func (s *Service) Preview(ctx context.Context, sel adminapi.LetterSelection) (adminapi.ReplayJob, error) {
	q, err := open(s.st.DB(ctx), sel)
	if err != nil {
		return adminapi.ReplayJob{}, err
	}
	var ids []int64
	if err := q.Pluck("id", &ids).Error; err != nil {
		return adminapi.ReplayJob{}, fmt.Errorf("select dead letters: %w", err)
	}
	out := adminapi.ReplayJob{State: adminapi.JobDone, Matched: len(ids), DryRun: true, Verdicts: map[string]int{}}
	for len(ids) > 0 {
		n := min(len(ids), 500)
		letters, err := s.letters(ctx, ids[:n])
		if err != nil {
			return adminapi.ReplayJob{}, err
		}
		verdicts, err := s.judge(ctx, letters)
		if err != nil {
			return adminapi.ReplayJob{}, err
		}
		for _, v := range verdicts {
			out.Verdicts[v.is]++
		}
		ids = ids[n:]
	}
	return out, nil
}

// Replay makes a job of the open letters of the selection and claims them, in one transaction: what
// another job has claimed is not open any more, so no letter is in two jobs. The job is carried out
// by Run, in whichever worker comes first.
func (s *Service) Replay(ctx context.Context, sel adminapi.LetterSelection, by audit.Actor) (adminapi.ReplayJob, error) {
	filter, err := selectionJSON(sel)
	if err != nil {
		return adminapi.ReplayJob{}, err
	}
	var id string
	err = s.st.InTx(ctx, func(tx *store.Tx) error {
		q, err := open(tx.DB(), sel)
		if err != nil {
			return err
		}
		var ids []int64
		if err := q.Clauses(forUpdate()).Pluck("id", &ids).Error; err != nil {
			return fmt.Errorf("claim dead letters: %w", err)
		}
		now, err := tx.Now(ctx)
		if err != nil {
			return err
		}
		id = ulid.Make().String()
		job := store.ReplayJob{
			ID: id, Kind: kindReplay, State: adminapi.JobRunning, Filter: filter, RequestedBy: by.Name, Total: len(ids), CreatedAt: now, UpdatedAt: now,
		}
		if len(ids) == 0 {
			job.State, job.FinishedAt = adminapi.JobDone, &now
		}
		if err := tx.DB().Create(&job).Error; err != nil {
			return fmt.Errorf("insert replay job: %w", err)
		}
		for _, part := range chunked(ids, 1000) {
			items := make([]store.ReplayItem, len(part))
			for i, letter := range part {
				items[i] = store.ReplayItem{JobID: id, LetterID: letter, State: itemClaimed, UpdatedAt: now}
			}
			if err := tx.DB().Create(&items).Error; err != nil {
				return fmt.Errorf("insert replay items: %w", err)
			}
			err := tx.DB().Exec("UPDATE dead_letters SET state = 'claimed', job_id = ?, updated_at = ? WHERE id IN ? AND state = 'open'", id, now, part).Error
			if err != nil {
				return fmt.Errorf("claim dead letters: %w", err)
			}
		}
		return audit.Write(ctx, tx, by, audit.Entry{
			Action: "dead_letter.replay", Subject: id, Result: "claimed", After: map[string]any{"selection": json.RawMessage(filter), "letters": len(ids)},
		})
	})
	if err != nil {
		return adminapi.ReplayJob{}, fmt.Errorf("make replay job: %w", err)
	}
	select {
	case s.wake <- struct{}{}:
	default:
	}
	return s.Job(ctx, id)
}

// runJobs carries out what is to be done of all running jobs.
func (s *Service) runJobs(ctx context.Context) error {
	var jobs []store.ReplayJob
	if err := s.st.DB(ctx).Where("kind = ? AND state = ?", kindReplay, adminapi.JobRunning).Order("id").Limit(100).Find(&jobs).Error; err != nil {
		return fmt.Errorf("read replay jobs: %w", err)
	}
	var failed []error
	for _, j := range jobs {
		// Two workers are never at one job.
		if _, err := s.st.Exclusively(ctx, "replay/"+j.ID, func() error { return s.runJob(ctx, &j) }); err != nil {
			failed = append(failed, fmt.Errorf("replay job %s: %w", j.ID, err))
		}
	}
	return errors.Join(failed...)
}

func (s *Service) runJob(ctx context.Context, j *store.ReplayJob) error {
	named := strings.HasPrefix(j.Filter, `{"ids`)
	for {
		var ids []int64
		err := s.st.DB(ctx).Model(&store.ReplayItem{}).Where("job_id = ? AND state = ?", j.ID, itemClaimed).Order("letter_id").Limit(chunkSize).Pluck("letter_id", &ids).Error
		if err != nil {
			return fmt.Errorf("read items: %w", err)
		}
		if len(ids) == 0 {
			return s.finish(ctx, j.ID)
		}
		if err := s.replayChunk(ctx, j.ID, ids, named); err != nil {
			return err
		}
	}
}

// replayChunk takes claimed letters through publish, unpark and sent. Whatever it had done when it was
// killed is done again.
func (s *Service) replayChunk(ctx context.Context, job string, ids []int64, named bool) error {
	letters, err := s.letters(ctx, ids)
	if err != nil {
		return err
	}
	verdicts, err := s.judge(ctx, letters)
	if err != nil {
		return err
	}
	var send []*store.DeadLetter
	done := map[int64]item{}
	for _, id := range ids { // what is not read below is gone
		done[id] = item{state: itemSkipped, why: "the letter is gone"}
	}
	unpark := map[int64]order.ID{}
	for i, l := range letters {
		v := verdicts[i]
		switch {
		case l.State != store.LetterClaimed || l.JobID != job:
			done[l.ID] = item{state: itemSkipped, verdict: v.is, why: "the letter is " + l.State}
		case v.is == alreadyDone:
			if err := s.resolve(ctx, l.ID, v.detail, store.LetterClaimed); err != nil {
				return err
			}
			done[l.ID] = item{state: itemSkipped, verdict: v.is, why: v.detail}
		case v.is != willApply && !named, cutBody(l):
			if err := s.reopen(ctx, l.ID, job); err != nil {
				return err
			}
			done[l.ID] = item{state: itemSkipped, verdict: v.is, why: v.detail}
		default:
			done[l.ID] = item{state: itemSent, verdict: v.is}
			send = append(send, l)
			if v.event.reservation() {
				unpark[l.ID] = v.event.id
			}
		}
	}
	if err := failpoint.Hit(ctx, "replay.after_claim"); err != nil {
		return err
	}
	failed, err := s.publish(ctx, send)
	if err != nil {
		return err
	}
	if err := failpoint.Hit(ctx, "replay.after_publish"); err != nil {
		return err
	}
	var sent []int64
	var back []order.ID
	for _, l := range send {
		if why, ok := failed[l.ID]; ok {
			if err := s.reopen(ctx, l.ID, job); err != nil {
				return err
			}
			done[l.ID] = item{state: itemFailed, verdict: done[l.ID].verdict, why: why.Error()}
			continue
		}
		sent = append(sent, l.ID)
		if id, ok := unpark[l.ID]; ok {
			back = append(back, id)
		}
	}
	// Before "sent": should the broker lose the message now, the relay publishes the order again.
	if err := s.unpark(ctx, back); err != nil {
		return err
	}
	return s.st.InTx(ctx, func(tx *store.Tx) error {
		if len(sent) > 0 {
			err := tx.DB().Exec(`UPDATE dead_letters SET parked = 0, published_at = UTC_TIMESTAMP(6), updated_at = IF(state = 'claimed', UTC_TIMESTAMP(6), updated_at),
				state = IF(state = 'claimed' AND job_id = ?, 'sent', state) WHERE id IN ?`, job, sent).Error
			if err != nil {
				return fmt.Errorf("mark letters sent: %w", err)
			}
		}
		for _, id := range ids {
			it := done[id]
			_, err := tx.ExecContext(ctx, "UPDATE replay_items SET state = ?, verdict = ?, error = ?, updated_at = UTC_TIMESTAMP(6) WHERE job_id = ? AND letter_id = ? AND state = ?",
				it.state, it.verdict, text(it.why, 500), job, id, itemClaimed)
			if err != nil {
				return fmt.Errorf("mark item: %w", err)
			}
		}
		return nil
	})
}

type item struct{ state, verdict, why string }

// reopen gives a claimed letter back.
func (s *Service) reopen(ctx context.Context, id int64, job string) error {
	_, err := s.st.SQL().ExecContext(ctx, "UPDATE dead_letters SET state = 'open', updated_at = UTC_TIMESTAMP(6) WHERE id = ? AND state = 'claimed' AND job_id = ?", id, job)
	if err != nil {
		return fmt.Errorf("reopen dead letter %d: %w", id, err)
	}
	return nil
}

// publish sends letters until each is confirmed or has failed too often; only the end of ctx is an
// error. An unknown outcome is tried again with the same message id.
func (s *Service) publish(ctx context.Context, letters []*store.DeadLetter) (failed map[int64]error, err error) {
	failed = map[int64]error{}
	pause := 200 * time.Millisecond
	for try := 1; len(letters) > 0; try++ {
		byExchange := map[string][]*store.DeadLetter{}
		for _, l := range letters {
			exchange, _ := target(l)
			byExchange[exchange] = append(byExchange[exchange], l)
		}
		var again []*store.DeadLetter
		for exchange, part := range byExchange {
			msgs := make([]messaging.Message, len(part))
			for i, l := range part {
				_, msgs[i] = target(l)
			}
			for i, perr := range s.broker.Publish(ctx, exchange, msgs...) {
				switch l := part[i]; {
				case perr == nil:
				case ctx.Err() != nil:
					return nil, ctx.Err()
				case try >= tries, errors.Is(perr, messaging.ErrInvalidMessage), errors.Is(perr, messaging.ErrReturned) && try > 1:
					failed[l.ID] = perr
				default:
					again = append(again, l)
				}
			}
		}
		if letters = again; len(letters) == 0 {
			break
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(pause):
		}
		pause = min(2*pause, 5*time.Second)
	}
	return failed, nil
}

// target says where a letter goes: under its own routing key, or, if that is no event's (somebody put
// the message straight into a queue), into the queue it came from.
func target(l *store.DeadLetter) (exchange string, m messaging.Message) {
	m = message(l)
	switch m.Key {
	case messaging.KeyOrderReserved, messaging.KeyOrderExpired, messaging.KeyOrderPaid, messaging.KeyOrderCancelRequested,
		messaging.KeyOrderRefundRequested, messaging.KeyActivityEnded:
		return messaging.ExchangeEvents, m
	}
	if l.SourceQueue != "" {
		m.Key = l.SourceQueue
		return "", m
	}
	return messaging.ExchangeEvents, m
}

// unpark goes on until Redis has done it, or ctx ends: the messages are out, and giving up here would
// publish them again.
func (s *Service) unpark(ctx context.Context, ids []order.ID) error {
	if len(ids) == 0 {
		return nil
	}
	for pause := 200 * time.Millisecond; ; pause = min(2*pause, 5*time.Second) {
		err := s.redis.Unpark(ctx, ids)
		if err == nil {
			return nil
		}
		s.log.WarnContext(ctx, "orders not unparked yet", "orders", len(ids), "error", err)
		select {
		case <-ctx.Done():
			return fmt.Errorf("unpark %d orders: %w", len(ids), err)
		case <-time.After(pause):
		}
	}
}

func (s *Service) finish(ctx context.Context, job string) error {
	_, err := s.st.SQL().ExecContext(ctx, `UPDATE replay_jobs j SET state = ?, finished_at = UTC_TIMESTAMP(6), updated_at = UTC_TIMESTAMP(6),
		sent = (SELECT COUNT(*) FROM replay_items i WHERE i.job_id = j.id AND i.state = 'sent'),
		skipped = (SELECT COUNT(*) FROM replay_items i WHERE i.job_id = j.id AND i.state = 'skipped'),
		failed = (SELECT COUNT(*) FROM replay_items i WHERE i.job_id = j.id AND i.state = 'failed')
		WHERE id = ? AND state = ?`, adminapi.JobDone, job, adminapi.JobRunning)
	if err != nil {
		return fmt.Errorf("finish replay job: %w", err)
	}
	return nil
}

// resolveSent closes letters that were sent and whose effect is there, and opens those again that
// were sent long ago without any.
func (s *Service) resolveSent(ctx context.Context) error {
	for after := int64(0); ; {
		var ids []int64
		err := s.st.DB(ctx).Model(&store.DeadLetter{}).Where("state = ? AND id > ?", store.LetterSent, after).Order("id").Limit(500).Pluck("id", &ids).Error
		if err != nil {
			return fmt.Errorf("read sent letters: %w", err)
		}
		if len(ids) == 0 {
			return nil
		}
		after = ids[len(ids)-1]
		letters, err := s.letters(ctx, ids)
		if err != nil {
			return err
		}
		verdicts, err := s.judge(ctx, letters)
		if err != nil {
			return err
		}
		for i, l := range letters {
			if verdicts[i].is == alreadyDone {
				if err := s.resolve(ctx, l.ID, verdicts[i].detail, store.LetterSent); err != nil {
					return err
				}
			}
		}
		_, err = s.st.SQL().ExecContext(ctx, `UPDATE dead_letters SET state = 'open', note = 'sent, but no effect was seen', updated_at = UTC_TIMESTAMP(6)
			WHERE state = 'sent' AND updated_at < UTC_TIMESTAMP(6) - INTERVAL ? MICROSECOND AND id <= ?`, s.cfg.SentLimit.Microseconds(), after)
		if err != nil {
			return fmt.Errorf("reopen sent letters: %w", err)
		}
	}
}

func chunked(ids []int64, n int) [][]int64 {
	var out [][]int64
	for len(ids) > 0 {
		k := min(n, len(ids))
		out = append(out, ids[:k])
		ids = ids[k:]
	}
	return out
}
