package activity

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sort"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"seckill/pkg/order"
	"seckill/pkg/sale"
	"seckill/pkg/stock"
	"seckill/services/order-worker/internal/store"
)

// What can be wrong with a request.
var (
	ErrNotFound = errors.New("activity not found")
	ErrExists   = errors.New("activity exists with other content")
	ErrState    = errors.New("the activity's state does not allow it")
	ErrDamaged  = errors.New("the activity's row is damaged")
)

// Shortage is one pool of which the inventory holds too little.
type Shortage struct {
	SKU, Pool      string
	OnHand, Wanted int64
}

// ShortageError refuses a sale that wants more than the inventory holds.
type ShortageError []Shortage

func (e ShortageError) Error() string {
	text := "inventory holds too little:"
	for i, s := range e {
		if i > 0 {
			text += ";"
		}
		text += fmt.Sprintf(" %s in %s has %d, wanted %d", s.SKU, s.Pool, s.OnHand, s.Wanted)
	}
	return text
}

// Config of a Service.
type Config struct {
	// Tiers are the delay queues there are; a payment time-out has to be one of them.
	Tiers []time.Duration
	// Interval of the background loop that announces what Redis has lost. Default 3 s.
	Interval time.Duration
	// WarmBefore is how long before its start a sale is warmed by the loop; 0: never. A sale that was
	// made after its own start, and a rehearsal's, is warmed by whoever made it.
	WarmBefore time.Duration
}

// Service is safe for concurrent use.
type Service struct {
	st    *store.Store
	redis *stock.Client
	cfg   Config
	log   *slog.Logger
	cold  prometheus.Gauge
}

// New makes a Service; it does no I/O.
func New(st *store.Store, redis *stock.Client, cfg Config, log *slog.Logger, reg prometheus.Registerer) (*Service, error) {
	if len(cfg.Tiers) == 0 {
		return nil, errors.New("activity service: no delay tiers")
	}
	if cfg.Interval == 0 {
		cfg.Interval = 3 * time.Second
	}
	s := &Service{st: st, redis: redis, cfg: cfg, log: log, cold: prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "seckill_activities_cold",
		Help: "Sales that are open, or about to open, and sell nothing because they are not warm.",
	})}
	if err := reg.Register(s.cold); err != nil {
		return nil, fmt.Errorf("register metrics: %w", err)
	}
	return s, nil
}

// Pool is one row of a sale's stock.
type Pool struct {
	SKU, Pool                      string
	Allocated, Available, Withheld int64
	Live, Returned                 int64
	Initial                        int64 // what the plan allocated: all but what was added by hand
}

// Details is a sale as MySQL has it.
type Details struct {
	store.Activity
	Items []store.ActivityItem
	Pools []Pool
	// Problem names what is wrong with a row that somebody has written into; such a sale can be looked at,
	// paused, ended and settled, and nothing else.
	Problem string
}

// Qualifies says whether the sale asks who may take part.
func (d *Details) Qualifies() bool { return d.Qualification == sale.QualificationList }

// Plan gives the sale back as it was planned, as far as its row can be read.
func (d *Details) Plan() sale.Sale {
	fallback, _ := d.Fallback() // Problem has the error
	if len(fallback) == 0 {
		fallback = nil
	}
	out := sale.Sale{
		ID: d.ID, Name: d.Name, StartsAt: d.StartsAt.UTC().Format(time.RFC3339Nano), EndsAt: d.EndsAt.UTC().Format(time.RFC3339Nano),
		PerUserLimit: d.PerUserLimit, PaymentTimeout: d.PaymentTimeout().String(), Currency: d.Currency, Qualification: d.Qualification,
		Buckets: d.Buckets, RegionFallback: fallback, RefundAfterEnd: d.RefundAfterEnd, Shadow: d.Shadow,
	}
	for _, item := range d.Items {
		it := sale.Item{SKU: item.SKUID, PriceMinor: item.PriceMinor, Pools: map[string]int{}}
		for _, p := range d.Pools {
			if p.SKU == item.SKUID {
				it.Pools[p.Pool] = int(p.Initial)
			}
		}
		out.Items = append(out.Items, it)
	}
	return out
}

// Stock gives the sale as Redis has to know it; ErrDamaged if the row does not tell.
func (d *Details) Stock() (*stock.Activity, error) {
	if d.Problem != "" {
		return nil, fmt.Errorf("activity %s: %w: %s", d.ID, ErrDamaged, d.Problem)
	}
	return d.stock(), nil
}

// Outline gives as much of the sale as it takes to stop, compare and settle it. Of a damaged one it must
// never be announced.
func (s *Service) Outline(ctx context.Context, d *Details) (*stock.Activity, error) {
	a := d.stock()
	if a.Buckets >= 1 && a.Buckets <= order.MaxBuckets {
		return a, nil
	}
	// Too many buckets do no harm to a marker, one too few goes on selling.
	a.Buckets = order.MaxBuckets
	now, err := s.redis.Activity(ctx, d.ID)
	switch {
	case err == nil && !now.StartsAt.IsZero() && now.Buckets >= 1: // more than a marker is left of it
		a.Buckets = min(now.Buckets, order.MaxBuckets)
	case err != nil && !errors.Is(err, stock.ErrActivityNotFound) && !errors.Is(err, stock.ErrCorrupt):
		return nil, fmt.Errorf("read activity %s from redis: %w", d.ID, err)
	}
	return a, nil
}

func (d *Details) stock() *stock.Activity {
	fallback, _ := d.Fallback() // Problem has the error
	a := &stock.Activity{
		ID: d.ID, Name: d.Name, StartsAt: d.StartsAt, EndsAt: d.EndsAt, PerUserLimit: d.PerUserLimit, PaymentTimeout: d.PaymentTimeout(),
		Currency: d.Currency, Qualified: d.Qualifies(), Buckets: d.Buckets, RegionFallback: fallback,
		Shadow: d.Shadow, Epoch: d.Epoch, Paused: d.Paused,
	}
	for _, item := range d.Items {
		it := stock.Item{SKU: item.SKUID, PriceMinor: item.PriceMinor, Pools: map[string]int{}}
		for _, p := range d.Pools {
			if p.SKU == item.SKUID {
				it.Pools[p.Pool] = int(p.Allocated)
			}
		}
		a.Items = append(a.Items, it)
	}
	return a
}

// stored is a row as far as Go's types can hold it, and what they cannot.
type stored struct {
	store.Activity
	Odd string
}

// columns of stored. A number that is out of its type's range would make every list that it is in fail.
const columns = `id, name, state, starts_at, ends_at, per_user_limit, payment_timeout_s, currency, qualification, buckets, region_fallback, refund_after_end,
	shadow <> 0 AS shadow, paused <> 0 AS paused, GREATEST(epoch, 0) AS epoch, GREATEST(warm_number, 0) AS warm_number, GREATEST(warm_winner, 0) AS warm_winner,
	GREATEST(fencing, 0) AS fencing, created_by, created_at, updated_at, warmed_at, ended_at, settled_at, closed_at, report,
	CONCAT_WS('; ', IF(shadow IN (0, 1), NULL, CONCAT('shadow is ', shadow)), IF(paused IN (0, 1), NULL, CONCAT('paused is ', paused)),
	IF(epoch < 0, CONCAT('epoch is ', epoch), NULL), IF(warm_number < 0, CONCAT('warm_number is ', warm_number), NULL),
	IF(warm_winner < 0, CONCAT('warm_winner is ', warm_winner), NULL), IF(fencing < 0, CONCAT('fencing is ', fencing), NULL)) AS odd`

// problem says what is wrong with a row: what no plan can have brought there.
func (r *stored) problem() string {
	var out []string
	if r.Odd != "" {
		out = append(out, r.Odd)
	}
	if _, err := r.Fallback(); err != nil {
		out = append(out, "region_fallback: "+errors.Unwrap(err).Error())
	}
	if r.Buckets < 1 || r.Buckets > order.MaxBuckets {
		out = append(out, fmt.Sprintf("buckets is %d", r.Buckets))
	}
	if r.Qualification != sale.QualificationNone && r.Qualification != sale.QualificationList {
		out = append(out, fmt.Sprintf("qualification is %q", r.Qualification))
	}
	return strings.Join(out, "; ")
}

// Load reads a sale; ErrNotFound if there is none.
func (s *Service) Load(ctx context.Context, id string) (*Details, error) {
	var found []stored
	if err := s.st.DB(ctx).Raw("SELECT "+columns+" FROM activities WHERE id = ?", id).Scan(&found).Error; err != nil {
		return nil, fmt.Errorf("load activity %s: %w", id, err)
	}
	if len(found) == 0 {
		return nil, fmt.Errorf("load activity %s: %w", id, ErrNotFound)
	}
	all, err := s.complete(ctx, found)
	if err != nil {
		return nil, err
	}
	return all[0], nil
}

// List reads up to limit sales whose id is greater than after, in the order of their ids.
func (s *Service) List(ctx context.Context, after string, limit int) ([]*Details, error) {
	var found []stored
	if err := s.st.DB(ctx).Raw("SELECT "+columns+" FROM activities WHERE id > ? ORDER BY id LIMIT ?", after, limit).Scan(&found).Error; err != nil {
		return nil, fmt.Errorf("list activities: %w", err)
	}
	return s.complete(ctx, found)
}

// complete adds items and pools: three statements, however many sales.
func (s *Service) complete(ctx context.Context, rows []stored) ([]*Details, error) {
	if len(rows) == 0 {
		return nil, nil
	}
	ids := make([]string, len(rows))
	out := make([]*Details, len(rows))
	byID := map[string]*Details{}
	for i := range rows {
		ids[i] = rows[i].ID
		out[i] = &Details{Activity: rows[i].Activity, Problem: rows[i].problem()}
		byID[ids[i]] = out[i]
	}
	var items []store.ActivityItem
	if err := s.st.DB(ctx).Where("activity_id IN ?", ids).Order("activity_id, position").Find(&items).Error; err != nil {
		return nil, fmt.Errorf("load items: %w", err)
	}
	for _, it := range items {
		byID[it.ActivityID].Items = append(byID[it.ActivityID].Items, it)
	}
	var pools []struct {
		Pool
		ActivityID string
		SkuID      string
	}
	err := s.st.DB(ctx).Raw(`SELECT activity_id, sku_id, pool, allocated, available, withheld, live, returned FROM activity_stock
		WHERE activity_id IN ? ORDER BY activity_id, sku_id, pool`, ids).Scan(&pools).Error
	if err != nil {
		return nil, fmt.Errorf("load stock: %w", err)
	}
	added, err := s.added(ctx, ids)
	if err != nil {
		return nil, err
	}
	for _, p := range pools {
		p.Pool.SKU = p.SkuID
		p.Initial = p.Allocated - added[store.Pool{Activity: p.ActivityID, SKU: p.SkuID, Pool: p.Pool.Pool}]
		byID[p.ActivityID].Pools = append(byID[p.ActivityID].Pools, p.Pool)
	}
	return out, nil
}

// added reads how many units were added to pools by hand.
func (s *Service) added(ctx context.Context, ids []string) (map[store.Pool]int64, error) {
	// Ranges of the key, one for each sale: the ledger of a big one has a row for each of its orders.
	var where []string
	args := []any{store.OpAdd, store.AccountSale}
	for _, id := range ids {
		where = append(where, "ref > ? AND ref < ?")
		args = append(args, id+"/add/", id+"/add0")
	}
	var rows []struct {
		ActivityID, SkuID, Pool string
		Units                   int64
	}
	err := s.st.DB(ctx).Raw("SELECT activity_id, sku_id, pool, SUM(delta) AS units FROM stock_ledger WHERE op = ? AND account = ? AND ("+
		strings.Join(where, " OR ")+") GROUP BY activity_id, sku_id, pool", args...).Scan(&rows).Error
	if err != nil {
		return nil, fmt.Errorf("load additions: %w", err)
	}
	out := map[store.Pool]int64{}
	for _, r := range rows {
		out[store.Pool{Activity: r.ActivityID, SKU: r.SkuID, Pool: r.Pool}] = r.Units
	}
	return out, nil
}

// Levels reads what Redis has left, sku → pool → units; a missing key is absent.
func (s *Service) Levels(ctx context.Context, d *Details) (map[string]map[string]int, error) {
	a, err := s.Outline(ctx, d)
	if err != nil {
		return nil, err
	}
	levels, err := s.redis.Levels(ctx, a)
	if err != nil {
		return nil, fmt.Errorf("read stock of activity %s: %w", d.ID, err)
	}
	return levels, nil
}

// InRedis reads the sale as Redis has it.
func (s *Service) InRedis(ctx context.Context, id string) (stock.Activity, error) {
	a, err := s.redis.Activity(ctx, id)
	if err != nil {
		return a, fmt.Errorf("read activity %s from redis: %w", id, err)
	}
	return a, nil
}

func fallbackJSON(m map[string][]string) (string, error) {
	if m == nil {
		m = map[string][]string{}
	}
	raw, err := json.Marshal(m) // keys sorted
	if err != nil {
		return "", fmt.Errorf("encode region fallback: %w", err)
	}
	return string(raw), nil
}

func sortedKeys[V any](m map[string]V) []string {
	keys := make([]string, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	sort.Strings(keys)
	return keys
}

func sortedPairs(m map[[2]string]int64) [][2]string {
	keys := make([][2]string, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	slices.SortFunc(keys, func(a, b [2]string) int { return slices.Compare(a[:], b[:]) })
	return keys
}
