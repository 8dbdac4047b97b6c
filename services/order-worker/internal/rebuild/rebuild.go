package rebuild

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/oklog/ulid/v2"
	"github.com/prometheus/client_golang/prometheus"

	"seckill/pkg/adminapi"
	"seckill/pkg/failpoint"
	"seckill/pkg/messaging"
	"seckill/pkg/stock"
	"seckill/services/order-worker/internal/activity"
	"seckill/services/order-worker/internal/audit"
	"seckill/services/order-worker/internal/follow"
	"seckill/services/order-worker/internal/store"
)

// ErrNotFound: the sale was never rebuilt.
var ErrNotFound = errors.New("no rebuild of this activity")

// Config of a Service. The zero value of each field means its default.
type Config struct {
	// Interval of the loop that looks for rebuilds to carry out. Default 2 s.
	Interval time.Duration `mapstructure:"interval"`
	// PublishWait is how long a paused sale waits for publishes that apis have begun; it has to be
	// longer than checkout.publish_timeout of order-api. Default 5 s.
	PublishWait time.Duration `mapstructure:"publish_wait"`
	// Poll is how often barriers are looked for. Default 100 ms.
	Poll time.Duration `mapstructure:"poll"`
}

// WithDefaults returns c with every unset field filled in.
func (c Config) WithDefaults() Config {
	if c.Interval <= 0 {
		c.Interval = 2 * time.Second
	}
	if c.PublishWait <= 0 {
		c.PublishWait = 5 * time.Second
	}
	if c.Poll <= 0 {
		c.Poll = 100 * time.Millisecond
	}
	return c
}

// broker is the part of messaging.Client that is used here.
type broker interface {
	Publish(ctx context.Context, exchange string, msgs ...messaging.Message) []error
	Inspect(ctx context.Context, queue string) (messaging.QueueState, error)
}

// comparer compares the stores once all is written.
type comparer interface {
	Reconcile(ctx context.Context, id string, repair bool) (adminapi.ReconcileResult, error)
}

// Service is safe for concurrent use, also by several workers on one database.
type Service struct {
	cfg     Config
	st      *store.Store
	redis   *stock.Client
	sales   *activity.Service
	follow  *follow.Follower
	compare comparer
	broker  broker
	log     *slog.Logger
	ended   *prometheus.CounterVec
	wake    chan struct{} // a rebuild was asked for in this process
}

// New makes a Service; it does no I/O.
func New(cfg Config, st *store.Store, redis *stock.Client, sales *activity.Service, f *follow.Follower, c comparer, b broker, log *slog.Logger, reg prometheus.Registerer) (*Service, error) {
	s := &Service{
		cfg: cfg.WithDefaults(), st: st, redis: redis, sales: sales, follow: f, compare: c, broker: b, log: log, wake: make(chan struct{}, 1),
		ended: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "seckill_rebuild_attempts_total",
			Help: "Attempts to rebuild a sale in Redis, by how they ended.",
		}, []string{"result"}),
	}
	for _, r := range []string{"done", "failed", "interrupted"} {
		s.ended.WithLabelValues(r)
	}
	if err := reg.Register(s.ended); err != nil {
		return nil, fmt.Errorf("register metrics: %w", err)
	}
	return s, nil
}

// Request asks for a rebuild of a sale that is warm and not settled, and stops the sale in the same
// transaction. One that is under way is joined. Run carries it out.
func (s *Service) Request(ctx context.Context, id string, by audit.Actor) (adminapi.Rebuild, error) {
	// A damaged sale cannot be written, and would be kept from being settled.
	d, err := s.sales.Load(ctx, id)
	if err == nil {
		_, err = d.Stock()
	}
	if err != nil {
		return adminapi.Rebuild{}, fmt.Errorf("rebuild activity %s: %w", id, err)
	}
	joined := false
	err = s.st.InTx(ctx, func(tx *store.Tx) error {
		joined = false
		state, paused, err := lockActivity(ctx, tx, id)
		if err != nil {
			return err
		}
		if err := mayRebuild(state); err != nil {
			return err
		}
		resume := !paused
		var was string
		var meant bool
		err = tx.QueryRowContext(ctx, "SELECT state, resume FROM rebuilds WHERE activity_id = ? FOR UPDATE", id).Scan(&was, &meant)
		switch {
		case errors.Is(err, sql.ErrNoRows):
		case err != nil:
			return fmt.Errorf("read rebuild: %w", err)
		case was == store.RebuildRunning:
			joined = true
			return nil
		case was == store.RebuildFailed:
			resume = resume || meant // it was the failed one that paused it
		}
		if _, err := tx.ExecContext(ctx, "REPLACE INTO rebuilds (activity_id, state, step, resume, token, number, attempts, note, requested_by, started_at, updated_at) "+
			"VALUES (?, ?, ?, ?, '', 0, 0, '', ?, UTC_TIMESTAMP(6), UTC_TIMESTAMP(6))", id, store.RebuildRunning, store.RebuildPause, resume, by.Name); err != nil {
			return fmt.Errorf("note rebuild: %w", err)
		}
		if _, err := tx.ExecContext(ctx, "UPDATE activities SET paused = 1, updated_at = UTC_TIMESTAMP(6) WHERE id = ?", id); err != nil {
			return fmt.Errorf("pause: %w", err)
		}
		return audit.Write(ctx, tx, by, audit.Entry{Action: "activity.rebuild", Subject: id, Result: "requested", After: map[string]bool{"resume": resume}})
	})
	if err != nil {
		return adminapi.Rebuild{}, fmt.Errorf("rebuild activity %s: %w", id, err)
	}
	select {
	case s.wake <- struct{}{}:
	default:
	}
	out, err := s.Show(ctx, id)
	out.Joined = joined
	return out, err
}

func lockActivity(ctx context.Context, tx *store.Tx, id string) (state string, paused bool, err error) {
	err = tx.QueryRowContext(ctx, "SELECT state, paused <> 0 FROM activities WHERE id = ? FOR UPDATE", id).Scan(&state, &paused)
	if errors.Is(err, sql.ErrNoRows) {
		return "", false, activity.ErrNotFound
	}
	if err != nil {
		return "", false, fmt.Errorf("lock activity: %w", err)
	}
	return state, paused, nil
}

func mayRebuild(state string) error {
	if state != store.ActivityWarmed && state != store.ActivityEnded {
		return fmt.Errorf("%w: it is %s", activity.ErrState, state)
	}
	return nil
}

// Show reads the last rebuild of a sale. ErrNotFound: there was none.
func (s *Service) Show(ctx context.Context, id string) (adminapi.Rebuild, error) {
	var rows []store.Rebuild
	if err := s.st.DB(ctx).Where("activity_id = ?", id).Limit(1).Find(&rows).Error; err != nil {
		return adminapi.Rebuild{}, fmt.Errorf("read rebuild of activity %s: %w", id, err)
	}
	if len(rows) == 0 {
		return adminapi.Rebuild{}, fmt.Errorf("activity %s: %w", id, ErrNotFound)
	}
	r := rows[0]
	out := adminapi.Rebuild{
		ActivityID: id, State: r.State, Step: r.Step, Note: r.Note, Resume: r.Resume, Attempts: r.Attempts, RequestedBy: r.RequestedBy,
		StartedAt: r.StartedAt, FinishedAt: r.FinishedAt,
	}
	if r.State == store.RebuildDone {
		out.Step = ""
	}
	if r.Result != nil {
		out.Result = &adminapi.RebuildResult{}
		if err := json.Unmarshal([]byte(*r.Result), out.Result); err != nil {
			return out, fmt.Errorf("read rebuild of activity %s: %w", id, err)
		}
	}
	return out, nil
}

// Run carries rebuilds out until ctx ends.
func (s *Service) Run(ctx context.Context) {
	tick := time.NewTicker(s.cfg.Interval)
	defer tick.Stop()
	for {
		if err := s.Round(ctx); err != nil && ctx.Err() == nil {
			s.log.WarnContext(ctx, "rebuild held up, trying again", "error", err)
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		case <-s.wake:
		}
	}
}

// Round makes one attempt at each rebuild that is under way and that nobody else is at.
func (s *Service) Round(ctx context.Context) error {
	var ids []string
	if err := s.st.DB(ctx).Raw("SELECT activity_id FROM rebuilds WHERE state = ? ORDER BY started_at", store.RebuildRunning).Scan(&ids).Error; err != nil {
		return fmt.Errorf("read rebuilds: %w", err)
	}
	var errs []error
	for _, id := range ids {
		_, err := s.st.Exclusively(ctx, "rebuild/"+id, func() error { return s.try(ctx, id) })
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// attempt is one walk through the steps.
type attempt struct {
	s      *Service
	id     string
	token  string // names the attempt in barriers
	number uint64 // names it in Redis
	round  int    // of barriers
	rest   int    // drains
	said   string
}

// errOvertaken: another attempt is under way; this one must not write any more.
var errOvertaken = errors.New("another attempt has begun")

// try makes an attempt and notes how it ended.
func (s *Service) try(ctx context.Context, id string) error {
	a := &attempt{s: s, id: id, token: ulid.Make().String()}
	err := a.run(ctx)
	var failed bool
	switch {
	case err == nil:
		s.ended.WithLabelValues("done").Inc()
		return nil
	case errors.Is(err, activity.ErrState), errors.Is(err, activity.ErrNotFound), errors.Is(err, stock.ErrEnded), errors.Is(err, stock.ErrInvalid):
		failed = true // trying again cannot help
		s.ended.WithLabelValues("failed").Inc()
		s.log.ErrorContext(ctx, "rebuild failed", "activity_id", id, "error", err)
	default:
		s.ended.WithLabelValues("interrupted").Inc()
	}
	note, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	query := "UPDATE rebuilds SET note = ?, updated_at = UTC_TIMESTAMP(6) WHERE activity_id = ? AND token = ? AND state = ?"
	if failed {
		query = "UPDATE rebuilds SET note = ?, updated_at = UTC_TIMESTAMP(6), state = 'failed', finished_at = UTC_TIMESTAMP(6) WHERE activity_id = ? AND token = ? AND state = ?"
	}
	_, nerr := s.st.SQL().ExecContext(note, query, cut(err.Error()), id, a.token, store.RebuildRunning)
	if failed {
		err = nil // said, and noted
	}
	return errors.Join(err, nerr)
}

func (a *attempt) run(ctx context.Context) error {
	step, err := a.begin(ctx)
	if err != nil || step == "" {
		return err
	}
	if step == store.RebuildOpen {
		done, err := a.open(ctx)
		if err != nil || done {
			return err
		}
		// Redis was lost once more.
	}
	for _, st := range []struct {
		name string
		do   func(context.Context) error
	}{
		{store.RebuildPause, a.pause}, {store.RebuildDrain, a.drain}, {store.RebuildClose, a.close}, {store.RebuildWrite, a.write},
	} {
		if err := a.step(ctx, st.name); err != nil {
			return err
		}
		if err := st.do(ctx); err != nil {
			return err
		}
		if err := failpoint.Hit(ctx, "rebuild."+st.name); err != nil {
			return err
		}
	}
	if done, err := a.open(ctx); err != nil || done {
		return err
	}
	return errors.New("redis has lost the sale again")
}

// begin takes the rebuild over from whoever had it, and says where it stands: "" if it is not under way.
func (a *attempt) begin(ctx context.Context) (step string, err error) {
	err = a.s.st.InTx(ctx, func(tx *store.Tx) error {
		step = ""
		err := tx.QueryRowContext(ctx, "SELECT step, number FROM rebuilds WHERE activity_id = ? AND state = ? FOR UPDATE", a.id, store.RebuildRunning).Scan(&step, &a.number)
		if errors.Is(err, sql.ErrNoRows) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("take rebuild: %w", err)
		}
		if _, err := tx.ExecContext(ctx, "UPDATE rebuilds SET token = ?, attempts = attempts + 1, updated_at = UTC_TIMESTAMP(6) WHERE activity_id = ?", a.token, a.id); err != nil {
			return fmt.Errorf("take rebuild: %w", err)
		}
		if _, err := tx.ExecContext(ctx, "DELETE FROM rebuild_barriers WHERE at < UTC_TIMESTAMP(6) - INTERVAL 1 DAY"); err != nil {
			return fmt.Errorf("forget barriers: %w", err)
		}
		return nil
	})
	if err != nil {
		return "", fmt.Errorf("rebuild activity %s: %w", a.id, err)
	}
	return step, nil
}

// step notes what comes next; errOvertaken if another attempt has begun.
func (a *attempt) step(ctx context.Context, name string) error {
	res, err := a.s.st.SQL().ExecContext(ctx, "UPDATE rebuilds SET step = ?, note = '', updated_at = UTC_TIMESTAMP(6) WHERE activity_id = ? AND token = ? AND state = ?",
		name, a.id, a.token, store.RebuildRunning)
	if err != nil {
		return fmt.Errorf("note step: %w", err)
	}
	if n, err := res.RowsAffected(); err != nil || n == 0 {
		return errors.Join(errOvertaken, err)
	}
	a.s.log.InfoContext(ctx, "rebuild", "activity_id", a.id, "step", name)
	return nil
}

// say tells whoever looks at the rebuild what it waits for.
func (a *attempt) say(ctx context.Context, format string, args ...any) {
	text := cut(fmt.Sprintf(format, args...))
	if text == a.said {
		return
	}
	a.said = text
	if _, err := a.s.st.SQL().ExecContext(ctx, "UPDATE rebuilds SET note = ?, updated_at = UTC_TIMESTAMP(6) WHERE activity_id = ? AND token = ?", text, a.id, a.token); err != nil {
		a.s.log.WarnContext(ctx, "progress of a rebuild not noted", "activity_id", a.id, "error", err)
	}
}

func cut(s string) string {
	if r := []rune(s); len(r) > 500 {
		return string(r[:500])
	}
	return s
}

// pause stops the sale and waits for what apis are publishing.
func (a *attempt) pause(ctx context.Context) error {
	// A bucket without a hash, or with something else in its place, refuses by itself.
	if err := a.s.sales.PushPaused(ctx, a.id); err != nil && !errors.Is(err, stock.ErrActivityNotFound) && !errors.Is(err, stock.ErrCorrupt) {
		return err
	}
	return sleep(ctx, a.s.cfg.PublishWait)
}

// close takes a number, closes all buckets under it and empties them.
func (a *attempt) close(ctx context.Context) error {
	err := a.s.st.InTx(ctx, func(tx *store.Tx) error {
		state, _, err := lockActivity(ctx, tx, a.id)
		if err != nil {
			return err
		}
		if err := mayRebuild(state); err != nil {
			return err
		}
		if err := tx.QueryRowContext(ctx, "SELECT warm_number + 1 FROM activities WHERE id = ?", a.id).Scan(&a.number); err != nil {
			return fmt.Errorf("take number: %w", err)
		}
		if _, err := tx.ExecContext(ctx, "UPDATE activities SET warm_number = ?, updated_at = UTC_TIMESTAMP(6) WHERE id = ?", a.number, a.id); err != nil {
			return fmt.Errorf("take number: %w", err)
		}
		res, err := tx.ExecContext(ctx, "UPDATE rebuilds SET number = ?, updated_at = UTC_TIMESTAMP(6) WHERE activity_id = ? AND token = ? AND state = ?",
			a.number, a.id, a.token, store.RebuildRunning)
		if err != nil {
			return fmt.Errorf("note number: %w", err)
		}
		if n, err := res.RowsAffected(); err != nil || n == 0 {
			return errors.Join(errOvertaken, err)
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("rebuild activity %s: %w", a.id, err)
	}
	d, err := a.s.sales.Load(ctx, a.id)
	if err != nil {
		return err
	}
	sa, err := d.Stock()
	if err != nil {
		return err
	}
	sa.Paused = true
	// Under the lock of the activity's row: a settlement does not clean up what is just being closed.
	err = a.s.st.InTx(ctx, func(tx *store.Tx) error {
		if err := a.holds(ctx, tx); err != nil {
			return err
		}
		// Who holds the row and finds the sale not ended knows that no marker is meant: MySQL comes first.
		if state, _, err := lockActivity(ctx, tx, a.id); err != nil {
			return err
		} else if state == store.ActivityWarmed {
			if err := a.s.redis.Unmark(ctx, sa); err != nil {
				return err
			}
		}
		return a.s.redis.PrepareRebuild(ctx, sa, a.number, split(sa, nil), nil)
	})
	if err != nil {
		return fmt.Errorf("rebuild activity %s: %w", a.id, err)
	}
	return a.s.redis.WipeRebuild(ctx, sa, a.number)
}

// holds locks the activity's row and checks that this is still the attempt under way.
func (a *attempt) holds(ctx context.Context, tx *store.Tx) error {
	state, _, err := lockActivity(ctx, tx, a.id)
	if err != nil {
		return err
	}
	if err := mayRebuild(state); err != nil {
		return err
	}
	var number uint64
	var token string
	err = tx.QueryRowContext(ctx, "SELECT a.warm_number, r.token FROM activities a JOIN rebuilds r ON r.activity_id = a.id WHERE a.id = ? AND r.state = ?", a.id, store.RebuildRunning).
		Scan(&number, &token)
	switch {
	case errors.Is(err, sql.ErrNoRows):
		return errOvertaken
	case err != nil:
		return fmt.Errorf("read number: %w", err)
	case number != a.number || token != a.token:
		return errOvertaken
	}
	return nil
}

// open finishes a rebuild whose transaction is committed. done is false if Redis does not hold it any
// more.
func (a *attempt) open(ctx context.Context) (done bool, err error) {
	d, err := a.s.sales.Load(ctx, a.id)
	if err != nil {
		return false, err
	}
	sa, err := d.Stock()
	if err != nil {
		return false, err
	}
	if d.WarmWinner != a.number {
		return false, nil
	}
	if err := a.catchUp(ctx); err != nil {
		return false, err
	}
	if err := failpoint.Hit(ctx, "rebuild.caught_up"); err != nil {
		return false, err
	}
	n, err := a.s.redis.OpenWarm(ctx, sa, a.number)
	if err != nil {
		return false, err
	}
	if n < max(1, sa.Buckets) {
		return false, nil
	}
	if err := failpoint.Hit(ctx, "rebuild.open"); err != nil {
		return false, err
	}
	res, err := a.s.compare.Reconcile(ctx, a.id, true)
	if err != nil {
		return false, err
	}
	if err := a.goOn(ctx, res); err != nil {
		return false, err
	}
	if err := a.s.sales.PushPaused(ctx, a.id); err != nil {
		return false, err
	}
	if err := failpoint.Hit(ctx, "rebuild.resumed"); err != nil {
		return false, err
	}
	return true, a.finish(ctx)
}

// goOn lets the sale sell again, unless it was paused before, or an operator wants it paused now.
func (a *attempt) goOn(ctx context.Context, res adminapi.ReconcileResult) error {
	err := a.s.st.InTx(ctx, func(tx *store.Tx) error {
		if err := a.holds(ctx, tx); err != nil {
			return err
		}
		var resume bool
		var raw sql.NullString
		if err := tx.QueryRowContext(ctx, "SELECT resume, result FROM rebuilds WHERE activity_id = ?", a.id).Scan(&resume, &raw); err != nil {
			return fmt.Errorf("read rebuild: %w", err)
		}
		var out adminapi.RebuildResult
		if err := json.Unmarshal([]byte(raw.String), &out); err != nil {
			return fmt.Errorf("read result: %w", err)
		}
		out.Mended, out.Left = 0, 0
		for _, diff := range res.Differences {
			if diff.Repaired {
				out.Mended++
			} else {
				out.Left++
			}
		}
		if err := putResult(ctx, tx, a.id, out); err != nil {
			return err
		}
		if !resume {
			return nil
		}
		if _, err := tx.ExecContext(ctx, "UPDATE activities SET paused = 0, updated_at = UTC_TIMESTAMP(6) WHERE id = ?", a.id); err != nil {
			return fmt.Errorf("resume: %w", err)
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("resume activity %s: %w", a.id, err)
	}
	return nil
}

func putResult(ctx context.Context, tx *store.Tx, id string, out adminapi.RebuildResult) error {
	raw, err := json.Marshal(out)
	if err != nil {
		return fmt.Errorf("encode result: %w", err)
	}
	if _, err := tx.ExecContext(ctx, "UPDATE rebuilds SET result = ?, updated_at = UTC_TIMESTAMP(6) WHERE activity_id = ?", string(raw), id); err != nil {
		return fmt.Errorf("note result: %w", err)
	}
	return nil
}

func (a *attempt) finish(ctx context.Context) error {
	return a.s.st.InTx(ctx, func(tx *store.Tx) error {
		var by string
		var raw sql.NullString
		err := tx.QueryRowContext(ctx, "SELECT requested_by, result FROM rebuilds WHERE activity_id = ? AND token = ? AND state = ? FOR UPDATE", a.id, a.token, store.RebuildRunning).Scan(&by, &raw)
		if errors.Is(err, sql.ErrNoRows) {
			return errOvertaken
		}
		if err != nil {
			return fmt.Errorf("finish rebuild: %w", err)
		}
		if _, err := tx.ExecContext(ctx, "UPDATE rebuilds SET state = ?, note = '', finished_at = UTC_TIMESTAMP(6), updated_at = UTC_TIMESTAMP(6) WHERE activity_id = ?", store.RebuildDone, a.id); err != nil {
			return fmt.Errorf("finish rebuild: %w", err)
		}
		if _, err := tx.ExecContext(ctx, "DELETE FROM rebuild_barriers WHERE token = ?", a.token); err != nil {
			return fmt.Errorf("forget barriers: %w", err)
		}
		return audit.Write(ctx, tx, audit.System(), audit.Entry{
			Action: "activity.rebuild", Subject: a.id, Result: "done", After: map[string]any{"requested_by": by, "result": json.RawMessage(raw.String)},
		})
	})
}
