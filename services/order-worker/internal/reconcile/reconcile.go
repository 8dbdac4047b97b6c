// Package reconcile compares, order by order, what Redis and MySQL hold of a sale, and repairs what may
// be repaired (R8): Redis is read first, with its version; then a snapshot of MySQL; a bucket is written
// only if its version is still the one that was read; and all of it is repeated until nothing differs.
//
// No counter is ever overwritten blindly, no order is released that has no final row, and settled sales
// are left alone.
package reconcile

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"seckill/pkg/adminapi"
	"seckill/pkg/messaging"
	"seckill/pkg/order"
	"seckill/pkg/stock"
	"seckill/services/order-worker/internal/activity"
	"seckill/services/order-worker/internal/follow"
	"seckill/services/order-worker/internal/store"
)

// Config of a Service. The zero value of each field means its default.
type Config struct {
	// Interval between two rounds over all open sales. Default 30 s.
	Interval time.Duration `mapstructure:"interval"`
	// Manual keeps the rounds from repairing: they only report.
	Manual bool `mapstructure:"manual"`
	// Young is the age below which an order without a row is on its way and no difference. Default 10 s.
	Young time.Duration `mapstructure:"young"`
	// Thorough is how many rounds go by between two comparisons order by order of a sale whose totals
	// agree. Default 10.
	Thorough int `mapstructure:"thorough"`
}

// WithDefaults returns c with every unset field filled in.
func (c Config) WithDefaults() Config {
	if c.Interval <= 0 {
		c.Interval = 30 * time.Second
	}
	if c.Young <= 0 {
		c.Young = 10 * time.Second
	}
	if c.Thorough <= 0 {
		c.Thorough = 10
	}
	return c
}

const (
	maxPasses    = 10
	restoreChunk = 32 // what one repair script takes
	roundTimeout = 5 * time.Minute
)

// broker is the part of messaging.Client that publishes.
type broker interface {
	Publish(ctx context.Context, exchange string, msgs ...messaging.Message) []error
}

// Service is safe for concurrent use.
type Service struct {
	cfg    Config
	st     *store.Store
	redis  *stock.Client
	sales  *activity.Service
	follow *follow.Follower
	broker broker
	log    *slog.Logger

	found *prometheus.CounterVec

	mu    sync.Mutex
	drift map[string]int64 // by sale, of its last comparison

	last string // the sale that a round compared last
}

// New makes a Service; it does no I/O.
func New(cfg Config, st *store.Store, redis *stock.Client, sales *activity.Service, f *follow.Follower, b broker, log *slog.Logger, reg prometheus.Registerer) (*Service, error) {
	s := &Service{
		cfg: cfg.WithDefaults(), st: st, redis: redis, sales: sales, follow: f, broker: b, log: log, drift: map[string]int64{},
		found: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "seckill_reconcile_differences_total",
			Help: "Differences between Redis and MySQL that comparisons found, by kind.",
		}, []string{"kind"}),
	}
	for _, k := range []string{adminapi.DiffNotPublished, adminapi.DiffBehind, adminapi.DiffNotReleased, adminapi.DiffForgotten, adminapi.DiffContradicts, adminapi.DiffStock, adminapi.DiffLimit, adminapi.DiffUnexplained} {
		s.found.WithLabelValues(k)
	}
	if err := reg.Register(s.found); err != nil {
		return nil, fmt.Errorf("register metrics: %w", err)
	}
	return s, nil
}

// Run compares all open sales again and again until ctx ends. A sale that asked for it (R7) comes next.
func (s *Service) Run(ctx context.Context) {
	tick := time.NewTicker(s.cfg.Interval)
	defer tick.Stop()
	asked := time.NewTicker(min(s.cfg.Interval, 2*time.Second))
	defer asked.Stop()
	for n := 1; ; {
		select {
		case <-ctx.Done():
			return
		case <-asked.C:
			if err := s.asked(ctx); err != nil && ctx.Err() == nil {
				s.log.WarnContext(ctx, "reconciliation held up", "error", err)
			}
		case <-tick.C:
			if err := s.round(ctx, n%s.cfg.Thorough == 0); err != nil && ctx.Err() == nil {
				s.log.WarnContext(ctx, "reconciliation held up", "error", err)
			}
			n++
		}
	}
}

// asked compares the sales in which a guard of MySQL has fired.
func (s *Service) asked(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, roundTimeout)
	defer cancel()
	due, err := s.st.CompensationsDue(ctx, []string{store.CompensateReconcile}, 10)
	if err != nil {
		return err
	}
	var errs []error
	for _, c := range due {
		r, err := s.Reconcile(ctx, c.Subject, !s.cfg.Manual)
		switch {
		case errors.Is(err, activity.ErrNotFound), errors.Is(err, ErrSettled), err == nil && r.Stable:
			err = s.st.Paid(ctx, store.CompensateReconcile, []string{c.Subject})
		case err == nil:
			err = s.st.CompensationFailed(ctx, store.CompensateReconcile, []string{c.Subject}, fmt.Errorf("still moving after %d passes", r.Passes))
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

func (s *Service) round(ctx context.Context, thorough bool) error {
	ctx, cancel := context.WithTimeout(ctx, roundTimeout)
	defer cancel()
	var ids []string
	if err := s.st.DB(ctx).Raw("SELECT id FROM activities WHERE state IN ('warmed', 'ended') ORDER BY id").Scan(&ids).Error; err != nil {
		return fmt.Errorf("read activities: %w", err)
	}
	// A round that ran out of time goes on behind the sale that took it: a huge one that is first must not
	// be the only one that is ever compared.
	from := slices.Index(ids, s.last) + 1
	var errs []error
	open := map[string]bool{}
	for _, id := range slices.Concat(ids[from:], ids[:from]) {
		open[id] = true
		if ctx.Err() != nil {
			continue
		}
		s.last = id
		if !thorough {
			same, err := s.totalsAgree(ctx, id)
			if err != nil {
				errs = append(errs, err)
				continue
			}
			if same {
				s.note(id, 0)
				continue
			}
		}
		_, err := s.Reconcile(ctx, id, !s.cfg.Manual)
		if !errors.Is(err, ErrSettled) {
			errs = append(errs, err)
		}
	}
	s.mu.Lock()
	for id := range s.drift {
		if !open[id] {
			delete(s.drift, id)
		}
	}
	s.mu.Unlock()
	return errors.Join(append(errs, ctx.Err())...)
}

func (s *Service) note(id string, units int64) {
	s.mu.Lock()
	s.drift[id] = units
	var sum int64
	for _, n := range s.drift {
		sum += n
	}
	s.mu.Unlock()
	s.follow.SetDrift("reconcile", int(sum))
}

// totalsAgree is the cheap look: nothing is in any outbox and each pool has the same units left in both
// stores. While orders are under way it says nothing, and the sale is left for a quieter moment.
func (s *Service) totalsAgree(ctx context.Context, id string) (bool, error) {
	d, err := s.sales.Load(ctx, id)
	if err != nil {
		return false, err
	}
	a, err := s.sales.Outline(ctx, d)
	if err != nil {
		return false, err
	}
	for b := range max(1, a.Buckets) {
		stats, err := s.redis.OutboxStats(ctx, id, b)
		if err != nil {
			return false, err
		}
		if stats.Waiting > stats.Parked && time.Since(stats.Oldest) < s.cfg.Young {
			return true, nil
		}
	}
	levels, err := s.redis.Levels(ctx, a)
	if err != nil {
		return false, err
	}
	for _, p := range d.Pools {
		n, ok := levels[p.SKU][p.Pool]
		if !ok || int64(n) != p.Available {
			return false, nil
		}
	}
	return true, nil
}

// ErrSettled: the sale is settled, or was never warmed; there is nothing to compare.
var ErrSettled = errors.New("activity is settled or was never warmed")

// Reconcile compares one sale. With repair it goes on until nothing differs that may be repaired, at
// most maxPasses times; a sale that moves all the time may not come to rest within them.
func (s *Service) Reconcile(ctx context.Context, id string, repair bool) (adminapi.ReconcileResult, error) {
	out := adminapi.ReconcileResult{ActivityID: id, Differences: []adminapi.Difference{}}
	var fixed []adminapi.Difference
	for out.Passes < maxPasses {
		d, err := s.sales.Load(ctx, id)
		if err != nil {
			return out, err
		}
		if d.State != store.ActivityWarmed && d.State != store.ActivityEnded {
			return out, fmt.Errorf("reconcile activity %s: %w", id, ErrSettled)
		}
		out.Passes++
		p := &pass{s: s, d: d, repair: repair}
		if err := p.run(ctx); err != nil {
			return out, fmt.Errorf("reconcile activity %s: %w", id, err)
		}
		left, did := []adminapi.Difference{}, 0
		out.DriftUnits = 0
		for _, f := range p.found {
			if f.Repaired {
				fixed = append(fixed, f)
				did++
			} else {
				left = append(left, f)
			}
			out.DriftUnits += max(f.Units, -f.Units)
			s.found.WithLabelValues(f.Kind).Inc()
		}
		out.Differences = append(fixed[:len(fixed):len(fixed)], left...)
		out.Stable = !p.moved && did == 0
		if !repair && !p.moved || repair && out.Stable {
			break
		}
	}
	s.note(id, out.DriftUnits)
	for _, f := range out.Differences {
		s.log.ErrorContext(ctx, "redis and mysql differ", "activity_id", id, "kind", f.Kind, "order_id", f.OrderID, "pool", f.Pool,
			"units", f.Units, "detail", f.Detail, "repaired", f.Repaired)
	}
	return out, nil
}

// pass is one comparison.
type pass struct {
	s      *Service
	d      *activity.Details
	repair bool

	a       *stock.Activity
	buckets []stock.Snapshot
	records map[string]stock.Record
	held    map[holder]int
	unread  error // limits that cannot be read
	rows    map[string]row
	avail   map[[2]string]int64
	found   []adminapi.Difference
	moved   bool // something changed while we looked: what was found may be no difference
}

// holder is a buyer in his bucket.
type holder struct {
	bucket int
	user   string
}

// row is what a comparison needs of an order's row.
type row struct {
	Status    order.Status
	Reason    string
	User, SKU string
	Pool      string
	Quantity  int
}

// known is false for a status that no program wrote.
func (r row) known() bool {
	_, err := order.ParseStatus(string(r.Status))
	return err == nil
}

func (p *pass) run(ctx context.Context) error {
	var err error
	if p.a, err = p.s.sales.Outline(ctx, p.d); err != nil {
		return err
	}
	if err := p.read(ctx); err != nil {
		return err
	}
	if err := p.strayMarkers(ctx); err != nil {
		return err
	}
	if err := p.compareOrders(ctx); err != nil {
		return err
	}
	return p.compareStock(ctx)
}

// strayMarkers looks for end markers of a sale that MySQL knows nothing of having ended, where every end
// is recorded first: the sale is closed to its buyers, and nobody wanted that.
func (p *pass) strayMarkers(ctx context.Context) error {
	if p.d.State != store.ActivityWarmed {
		return nil
	}
	marks, err := p.s.redis.Markers(ctx, p.a)
	if err != nil {
		return err
	}
	for b, m := range marks {
		if !m.Ended {
			continue
		}
		// Read after the marker: an end that came meanwhile is there by now.
		if d, err := p.s.sales.Load(ctx, p.a.ID); err != nil || d.State != store.ActivityWarmed {
			p.moved = true
			return err
		}
		p.add(adminapi.Difference{Kind: adminapi.DiffContradicts, Detail: fmt.Sprintf("bucket %d has an end marker, but the sale has not ended: rebuild the sale", b)})
	}
	return nil
}

// read reads Redis, with the versions first, and then one moment of MySQL.
func (p *pass) read(ctx context.Context) error {
	for b := range max(1, p.a.Buckets) {
		snap, err := p.s.redis.Snapshot(ctx, p.a, b)
		if errors.Is(err, stock.ErrActivityNotFound) {
			return fmt.Errorf("bucket %d is lost; this is a rebuild's work: %w", b, err)
		}
		if err != nil {
			return err
		}
		// Announced again after a loss, or under a rebuild's hands: what is missing in it is not to be
		// put back piece by piece.
		if !snap.Open || snap.Warm != p.d.WarmWinner {
			return fmt.Errorf("bucket %d is closed; this is a rebuild's work: %w", b, stock.ErrNotWarmed)
		}
		p.buckets = append(p.buckets, snap)
	}
	p.records = map[string]stock.Record{}
	if err := p.s.redis.EachRecord(ctx, p.a.ID, func(r stock.Record) error {
		p.records[r.ID.String()] = r
		return nil
	}); err != nil {
		return err
	}
	p.held = map[holder]int{}
	p.unread = p.s.redis.EachHolding(ctx, p.a.ID, func(h stock.Holding) error {
		p.held[holder{h.Bucket, h.User}] = h.Units
		return nil
	})
	if p.unread != nil && !errors.Is(p.unread, stock.ErrCorrupt) {
		return p.unread
	}
	tx, err := p.s.st.Snapshot(ctx)
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback() }() // read only
	p.rows = map[string]row{}
	rows, err := tx.QueryContext(ctx, "SELECT id, status, reason, user_id, sku_id, pool, quantity FROM orders WHERE id > ? AND id < ? AND activity_id = ?",
		p.a.ID+"-", p.a.ID+".", p.a.ID)
	if err != nil {
		return fmt.Errorf("read orders: %w", err)
	}
	defer func() { _ = rows.Close() }()
	for rows.Next() {
		var id string
		var r row
		if err := rows.Scan(&id, &r.Status, &r.Reason, &r.User, &r.SKU, &r.Pool, &r.Quantity); err != nil {
			return fmt.Errorf("read orders: %w", err)
		}
		p.rows[id] = r
	}
	if err := rows.Err(); err != nil {
		return fmt.Errorf("read orders: %w", err)
	}
	var pools []store.ActivityStock
	if err := tx.DB().Where("activity_id = ?", p.a.ID).Find(&pools).Error; err != nil {
		return fmt.Errorf("read pools: %w", err)
	}
	p.avail = map[[2]string]int64{}
	for i := range pools {
		r := &pools[i]
		p.avail[[2]string{r.SKUID, r.Pool}] = r.Sellable()
		if d := r.Unexplained(); d != 0 {
			p.add(adminapi.Difference{Kind: adminapi.DiffUnexplained, SKU: r.SKUID, Pool: r.Pool, Units: d,
				Detail: fmt.Sprintf("allocated %d, available %d, withheld %d, live %d, returned %d", r.Allocated, r.Available, r.Withheld, r.Live, r.Returned)})
		}
	}
	return nil
}

func (p *pass) add(d adminapi.Difference) { p.found = append(p.found, d) }

// compareOrders goes through the orders of both sides.
func (p *pass) compareOrders(ctx context.Context) error {
	now, err := p.s.redis.Now(ctx)
	if err != nil {
		return err
	}
	waiting := map[string]bool{}
	for _, b := range p.buckets {
		for _, id := range b.Waiting {
			waiting[id.String()] = true
		}
		for _, id := range b.Parked {
			waiting[id.String()] = true
		}
	}
	var publish []stock.Record
	var behind, release []string
	forgotten := map[int][]string{}
	for id, rec := range p.records {
		r, ok := p.rows[id]
		switch {
		case ok && !r.known():
			// named below, with the rows
		case !ok:
			if rec.Status.Live() && !waiting[id] && now.Sub(rec.ReservedAt) >= p.s.cfg.Young {
				publish = append(publish, rec)
				p.add(adminapi.Difference{Kind: adminapi.DiffNotPublished, OrderID: id, SKU: rec.SKU, Pool: rec.Pool, Units: int64(rec.Quantity),
					Detail: "reserved in redis, no row, in no outbox", Repaired: p.repair})
			}
		case r.SKU != "" && (r.User != rec.User || r.SKU != rec.SKU || r.Pool != rec.Pool || r.Quantity != rec.Quantity):
			p.add(adminapi.Difference{Kind: adminapi.DiffContradicts, OrderID: id, SKU: rec.SKU, Pool: rec.Pool, Units: int64(rec.Quantity),
				Detail: "record and row have other content"})
		case r.Status.Final() && rec.Status.Live():
			release = append(release, id)
		case r.Status.Live() && rec.Status.Final():
			p.add(adminapi.Difference{Kind: adminapi.DiffContradicts, OrderID: id, SKU: rec.SKU, Pool: rec.Pool, Units: int64(rec.Quantity),
				Detail: fmt.Sprintf("%s in redis, %s in mysql", rec.Status, r.Status)})
		case r.Status != rec.Status && rec.Status.Live():
			behind = append(behind, id)
		}
	}
	for id, r := range p.rows {
		if !r.known() {
			p.add(adminapi.Difference{Kind: adminapi.DiffContradicts, OrderID: id, SKU: r.SKU, Pool: r.Pool, Units: int64(r.Quantity),
				Detail: fmt.Sprintf("mysql has it with the unknown status %q", r.Status)})
			continue
		}
		if _, ok := p.records[id]; !ok && r.Status.Live() {
			oid, err := order.ParseID(id)
			if err != nil {
				return fmt.Errorf("read order %s: %w", id, err)
			}
			forgotten[oid.Bucket] = append(forgotten[oid.Bucket], id)
		}
	}
	if err := p.follow(ctx, adminapi.DiffBehind, behind); err != nil {
		return err
	}
	if err := p.follow(ctx, adminapi.DiffNotReleased, release); err != nil {
		return err
	}
	if p.repair {
		// With the digests of their idempotency keys: the row is what a rebuild makes the keys from.
		if err := p.s.redis.Digests(ctx, publish); err != nil {
			return fmt.Errorf("read digests: %w", err)
		}
		for len(publish) > 0 {
			n := min(len(publish), messaging.MaxOrdersPerMessage)
			orders := make([]order.Order, n)
			for i := range orders {
				orders[i] = publish[i].Order
			}
			for _, err := range p.s.broker.Publish(ctx, messaging.ExchangeEvents, messaging.OrderReserved(orders)) {
				if err != nil {
					return fmt.Errorf("publish orders without a row: %w", err)
				}
			}
			publish = publish[n:]
		}
	}
	for b, ids := range forgotten {
		if err := p.restore(ctx, b, ids); err != nil {
			return err
		}
	}
	return nil
}

// follow lets records follow rows: those of orders that are not on their way just now. The rows are read
// again: what was found may have been carried out meanwhile.
func (p *pass) follow(ctx context.Context, kind string, ids []string) error {
	if len(ids) == 0 {
		return nil
	}
	rows, err := store.Orders(ctx, p.s.st.SQL(), ids, false)
	if err != nil {
		return err
	}
	var todo []*store.Order
	now, err := p.s.st.Now(ctx)
	if err != nil {
		return err
	}
	for _, id := range ids {
		o := rows[id]
		if o == nil || now.Sub(o.UpdatedAt) < p.s.cfg.Young {
			p.moved = p.moved || !p.repair // its own message is still at it
			continue
		}
		todo = append(todo, o)
		p.add(adminapi.Difference{Kind: kind, OrderID: id, SKU: o.SKUID, Pool: o.Pool, Units: int64(o.Quantity),
			Detail: fmt.Sprintf("%s in mysql, %s in redis", o.Status, p.records[id].Status), Repaired: p.repair})
	}
	if !p.repair || len(todo) == 0 {
		return nil
	}
	if err := p.s.follow.Rows(ctx, todo); err != nil {
		return err
	}
	return p.followed(ctx, todo)
}

// followed takes back what was said of the records that were found last and have not followed their rows:
// a key that a script needs is damaged, and repeating it helps nobody.
func (p *pass) followed(ctx context.Context, rows []*store.Order) error {
	ids := map[int][]order.ID{}
	for _, o := range rows {
		id, err := order.ParseID(o.ID)
		if err != nil {
			return fmt.Errorf("read order %s: %w", o.ID, err)
		}
		ids[id.Bucket] = append(ids[id.Bucket], id)
	}
	is := map[string]order.Status{}
	for bucket, ids := range ids {
		records, err := p.s.redis.Records(ctx, p.a.ID, bucket, ids)
		if err != nil {
			return err
		}
		for _, r := range records {
			is[r.ID.String()] = r.Status
		}
	}
	for i, o := range rows {
		f := &p.found[len(p.found)-len(rows)+i]
		if status, ok := is[o.ID]; ok && status == p.records[o.ID].Status {
			f.Repaired = false
			f.Detail += "; following the row changes nothing, a key of this order or of its buyer is damaged: rebuild the sale"
		}
	}
	return nil
}

// restore brings back records that Redis lost, and lowers the stock by their units in the same step: a
// failover forgot both together.
func (p *pass) restore(ctx context.Context, bucket int, ids []string) error {
	snap := p.buckets[bucket]
	// An order that was accepted after Redis was read looks forgotten as well.
	parsed := make([]order.ID, len(ids))
	for i, id := range ids {
		oid, err := order.ParseID(id)
		if err != nil {
			return fmt.Errorf("read order %s: %w", id, err)
		}
		parsed[i] = oid
	}
	there, err := p.s.redis.Records(ctx, p.a.ID, bucket, parsed)
	if err != nil {
		return err
	}
	known := map[string]bool{}
	for _, r := range there {
		known[r.ID.String()] = true
	}
	rows, err := store.Orders(ctx, p.s.st.SQL(), ids, false)
	if err != nil {
		return err
	}
	version := snap.Version
	levels := snap.Stock
	var batch []*store.Order
	flush := func() error {
		if len(batch) == 0 || !p.repair {
			return nil
		}
		fix := stock.Repair{Stock: map[string]map[string]int{}}
		for _, o := range batch {
			content, err := o.Content()
			if err != nil {
				return err
			}
			fix.Records = append(fix.Records, stock.Record{Order: content, Status: o.Status, Reason: o.Reason})
			if n, ok := levels[o.SKUID][o.Pool]; ok {
				if fix.Stock[o.SKUID] == nil {
					fix.Stock[o.SKUID] = map[string]int{}
				}
				if have, ok := fix.Stock[o.SKUID][o.Pool]; ok {
					n = have
				}
				fix.Stock[o.SKUID][o.Pool] = max(0, n-o.Quantity)
			}
		}
		next, err := p.s.redis.Repair(ctx, p.a, bucket, version, fix)
		if errors.Is(err, stock.ErrChanged) {
			p.moved = true
			return nil
		}
		if err != nil {
			return err
		}
		version = next
		for sku, pools := range fix.Stock {
			for pool, n := range pools {
				levels[sku][pool] = n
			}
		}
		for i := len(p.found) - len(batch); i < len(p.found); i++ {
			p.found[i].Repaired = true
		}
		batch = batch[:0]
		return nil
	}
	for _, id := range ids {
		o := rows[id]
		if known[id] || o == nil || !o.Status.Live() {
			p.moved = true
			continue
		}
		p.add(adminapi.Difference{Kind: adminapi.DiffForgotten, OrderID: id, SKU: o.SKUID, Pool: o.Pool, Units: int64(o.Quantity),
			Detail: fmt.Sprintf("%s in mysql, unknown to redis", o.Status)})
		if batch = append(batch, o); len(batch) == restoreChunk {
			if err := flush(); err != nil || p.moved {
				return err
			}
		}
	}
	return flush()
}

// compareLimits compares what buyers hold with their live records. A wrong limit refuses its buyer, or lets
// him have more than MySQL's guard will; which of the two was meant is for a person to see.
func (p *pass) compareLimits() {
	if p.unread != nil {
		p.add(adminapi.Difference{Kind: adminapi.DiffLimit, Detail: p.unread.Error() + ": rebuild the sale"})
		return
	}
	differs := maps.Clone(p.held)
	for _, r := range p.records {
		if r.Status.Live() {
			differs[holder{r.ID.Bucket, r.User}] -= r.Quantity
		}
	}
	for h, n := range differs {
		if n != 0 {
			p.add(adminapi.Difference{Kind: adminapi.DiffLimit, UserID: h.user, Units: int64(n),
				Detail: fmt.Sprintf("the limit of buyer %s counts %d units, his orders hold %d: rebuild the sale", h.user, p.held[h], p.held[h]-n)})
		}
	}
}

// compareStock compares what is left. A unit may be left in MySQL and taken in Redis: by an order on its
// way, or by one whose release is owed.
func (p *pass) compareStock(ctx context.Context) error {
	if p.moved {
		return nil
	}
	for _, f := range p.found {
		if f.Repaired {
			return nil // the next pass sees what it led to
		}
	}
	want := map[[2]string]int64{}
	for k, n := range p.avail {
		want[k] = n
	}
	for id, rec := range p.records {
		if !rec.Status.Live() {
			continue
		}
		r, ok := p.rows[id]
		withheld := ok && r.Status == order.Rejected && r.Reason == order.ReasonOutOfStock
		if !ok || r.Status.Final() && !withheld {
			want[[2]string{rec.SKU, rec.Pool}] -= int64(rec.Quantity)
		}
	}
	owed := 0
	if err := p.s.st.SQL().QueryRowContext(ctx, "SELECT COUNT(*) FROM compensations WHERE activity_id = ? AND kind NOT IN (?, ?, ?)",
		p.a.ID, store.CompensateReconcile, store.CompensateRelease, store.CompensateRefundDue).Scan(&owed); err != nil {
		return fmt.Errorf("read compensations: %w", err)
	}
	if owed > 0 {
		p.moved = true // units are on their way between the stores
		return nil
	}
	for _, b := range p.buckets {
		v, err := p.s.redis.Version(ctx, p.a.ID, b.Bucket)
		if err != nil {
			return err
		}
		if v != b.Version {
			p.moved = true
			return nil
		}
	}
	p.compareLimits()
	for _, b := range p.buckets {
		for sku, pools := range b.Stock {
			for pool := range pools {
				want[[2]string{sku, pool}] += 0 // also what MySQL has no row of
			}
		}
	}
	for key, n := range want {
		sku, pool := key[0], key[1]
		var have int64
		missing := false
		for _, b := range p.buckets {
			units, ok := b.Stock[sku][pool]
			missing = missing || !ok
			have += int64(units)
		}
		if _, ok := p.avail[key]; !ok {
			p.add(adminapi.Difference{Kind: adminapi.DiffUnexplained, SKU: sku, Pool: pool, Units: have,
				Detail: fmt.Sprintf("%d left in redis, and mysql has no row of the pool: its orders cannot be written", have)})
			continue
		}
		if missing {
			p.add(adminapi.Difference{Kind: adminapi.DiffStock, SKU: sku, Pool: pool, Units: have - n, Detail: "a stock key is missing: rebuild the activity"})
			continue
		}
		n = max(n, 0)
		if have == n {
			continue
		}
		d := adminapi.Difference{Kind: adminapi.DiffStock, SKU: sku, Pool: pool, Units: have - n,
			Detail: fmt.Sprintf("%d left in redis, %d by mysql and the orders on their way", have, n)}
		if p.repair {
			ok, err := p.setStock(ctx, sku, pool, have-n)
			if err != nil {
				return err
			}
			d.Repaired = ok
			p.moved = p.moved || !ok
		}
		p.add(d)
	}
	return nil
}

// setStock takes diff units out of the buckets, or puts -diff into the first.
func (p *pass) setStock(ctx context.Context, sku, pool string, diff int64) (bool, error) {
	for i := range p.buckets {
		b := &p.buckets[i]
		have := int64(b.Stock[sku][pool])
		next := have - diff
		if diff > 0 {
			next = max(0, next)
		}
		if next == have {
			continue
		}
		version, err := p.s.redis.Repair(ctx, p.a, b.Bucket, b.Version, stock.Repair{Stock: map[string]map[string]int{sku: {pool: int(next)}}})
		if errors.Is(err, stock.ErrChanged) {
			return false, nil
		}
		if err != nil {
			return false, err
		}
		b.Version, b.Stock[sku][pool] = version, int(next)
		if diff -= have - next; diff == 0 {
			return true, nil
		}
	}
	return diff == 0, nil
}
