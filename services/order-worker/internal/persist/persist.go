// Package persist writes reserved orders to MySQL: a batch of deliveries becomes one transaction.
//
// The good case costs the same few statements whatever the size of the batch: rows, ledger rows,
// holdings, a look at the limits, one guarded UPDATE per pool. When one of the guards refuses the
// batch, a second kind of transaction locks holdings and pools first, decides order by order, and
// writes the refused ones as rejected rows, so that only the culprit fails. What happens after the
// commit goes by the rows (package follow).
package persist

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"seckill/pkg/failpoint"
	"seckill/pkg/messaging"
	"seckill/pkg/order"
	"seckill/services/order-worker/internal/follow"
	"seckill/services/order-worker/internal/store"
)

// Classes of dead letters this package makes.
const (
	ClassUndecodable     = "undecodable"      // the body as a whole cannot be read
	ClassInvalidOrder    = "invalid_order"    // the content of one order
	ClassUnknownActivity = "unknown_activity" // MySQL does not know the sale, the sku or the pool
	ClassConflict        = "conflict"         // the id is there with other content
	ClassRefused         = "refused"          // MySQL will write neither the order nor its rejection
)

// batchTimeout bounds one batch, retries of its transaction included.
const batchTimeout = time.Minute

// Handler handles seckill.orders. It is safe for concurrent use.
type Handler struct {
	st     *store.Store
	sales  *store.Catalogue
	follow *follow.Follower
	log    *slog.Logger

	persisted *prometheus.CounterVec
	batch     prometheus.Histogram
}

// New makes a Handler.
func New(st *store.Store, sales *store.Catalogue, f *follow.Follower, log *slog.Logger, reg prometheus.Registerer) (*Handler, error) {
	h := &Handler{
		st: st, sales: sales, follow: f, log: log,
		persisted: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "seckill_orders_persisted_total",
			Help: "Orders of order.reserved messages by what became of them.",
		}, []string{"result"}),
		batch: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name:    "seckill_batch_orders",
			Help:    "Orders written by one transaction.",
			Buckets: []float64{1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024},
		}),
	}
	for _, r := range []string{"persisted", "duplicate", "rejected", "conflict", "invalid", "refused"} {
		h.persisted.WithLabelValues(r)
	}
	for _, c := range []prometheus.Collector{h.persisted, h.batch} {
		if err := reg.Register(c); err != nil {
			return nil, fmt.Errorf("register metrics: %w", err)
		}
	}
	return h, nil
}

// item is one order in one delivery.
type item struct {
	delivery int
	content  *order.Order
}

// Handle is a messaging.Handler.
func (h *Handler) Handle(ctx context.Context, batch []messaging.Delivery) []messaging.Result {
	ctx, cancel := context.WithTimeout(ctx, batchTimeout)
	defer cancel()
	results := make([]messaging.Result, len(batch))
	if err := h.handle(ctx, batch, results); err != nil {
		// Whatever it is, it is not the messages' fault: what blames an order has become a dead
		// letter or a rejected row. Nothing is acked, and everything is done again by the rows.
		for i := range results {
			results[i] = messaging.Result{Hold: err}
		}
	}
	return results
}

func (h *Handler) handle(ctx context.Context, batch []messaging.Delivery, results []messaging.Result) error {
	items := make([]item, 0, 512)
	var invalid []messaging.InvalidOrder
	seenBefore := false
	for i, d := range batch {
		good, bad, err := messaging.DecodeOrderReserved(d.Message)
		if err != nil {
			results[i].Dead = append(results[i].Dead, messaging.Dead{Message: d.Message, Class: ClassUndecodable, Err: err})
			h.persisted.WithLabelValues("invalid").Inc()
			continue
		}
		for j := range good {
			items = append(items, item{i, &good[j]})
		}
		for _, b := range bad {
			results[i].Dead = append(results[i].Dead, messaging.Dead{Message: b.Message, Class: ClassInvalidOrder, Err: b.Err})
			if b.HasID {
				invalid = append(invalid, b)
			}
		}
		seenBefore = seenBefore || d.Redelivered || d.Attempt > 0 || d.DeliveryCount > 0
	}
	// Ids are made unique first (R13): the second copy of an order in a batch is a duplicate like any
	// other and is compared with the row below.
	unique := make([]order.Order, 0, len(items))
	ids := make([]string, len(items))
	seen := make(map[string]bool, len(items))
	for i, it := range items {
		ids[i] = it.content.ID.String()
		if !seen[ids[i]] {
			seen[ids[i]] = true
			unique = append(unique, *it.content)
		}
	}
	rows, refused, err := h.persist(ctx, unique, seenBefore)
	if err != nil {
		return err
	}
	for _, b := range invalid {
		h.persisted.WithLabelValues("invalid").Inc()
		row, err := h.reject(ctx, b.ID, order.ReasonInvalidOrder)
		if store.Refuses(err) {
			continue // its letter is written above, and the drain parks the order behind it
		}
		if err != nil {
			return err
		}
		rows[row.ID] = row
	}
	if err := failpoint.Hit(ctx, "worker.after_commit"); err != nil {
		return err
	}
	todo := make([]*store.Order, 0, len(rows))
	done := make([]string, 0, len(rows))
	for i, it := range items {
		row := rows[ids[i]]
		if err := refused[ids[i]]; err != nil {
			h.persisted.WithLabelValues("refused").Inc()
			results[it.delivery].Dead = append(results[it.delivery].Dead, h.letter(batch[it.delivery], *it.content, ClassRefused, err))
			continue
		}
		if row == nil {
			return fmt.Errorf("order %s: no row after its transaction", ids[i])
		}
		if !row.SameContent(*it.content) {
			h.persisted.WithLabelValues("conflict").Inc()
			results[it.delivery].Dead = append(results[it.delivery].Dead, h.letter(batch[it.delivery], *it.content, ClassConflict,
				fmt.Errorf("order %s is stored with other content", ids[i])))
			continue
		}
		if row.Status == order.Rejected && row.Reason == order.ReasonUnknownActivity {
			results[it.delivery].Dead = append(results[it.delivery].Dead, h.letter(batch[it.delivery], *it.content, ClassUnknownActivity,
				fmt.Errorf("activity %s with sku %s and pool %s is not known", row.ActivityID, row.SKUID, row.Pool)))
		}
		if seen[ids[i]] {
			seen[ids[i]] = false // once for several copies
			todo = append(todo, row)
			done = append(done, ids[i])
		}
	}
	for _, b := range invalid {
		if row := rows[b.ID.String()]; row != nil {
			todo = append(todo, row)
		}
	}
	if len(todo) == 0 {
		return nil
	}
	payments, letters, err := h.st.Waiting(ctx)
	if err != nil {
		return err
	}
	if err := h.follow.Rows(ctx, todo); err != nil {
		return err
	}
	if payments {
		if err := h.follow.Kept(ctx, done); err != nil {
			return err
		}
	}
	if letters {
		return h.st.ResolveLetters(ctx, messaging.QueueOrders, done)
	}
	return nil
}

// letter is a dead letter of one order in a message of its own.
func (h *Handler) letter(d messaging.Delivery, o order.Order, class string, err error) messaging.Dead {
	m := messaging.OrderReserved([]order.Order{o})
	m.Attempt, m.Headers = d.Attempt, d.Headers
	return messaging.Dead{Message: m, Class: class, Err: err}
}

// persist makes sure that each of the orders has a row, and gives the rows as they are committed;
// refused has those that cannot have one, with MySQL's reason.
func (h *Handler) persist(ctx context.Context, orders []order.Order, seenBefore bool) (rows map[string]*store.Order, refused map[string]error, err error) {
	if len(orders) == 0 {
		return map[string]*store.Order{}, nil, nil
	}
	t := &transaction{h: h, ctx: ctx, sales: map[string]*store.Sale{}}
	for _, o := range orders {
		if _, ok := t.sales[o.ID.Activity]; ok {
			continue
		}
		s, err := h.sales.Sale(ctx, o.ID.Activity)
		if err != nil {
			return nil, nil, err
		}
		t.sales[o.ID.Activity] = s
	}
	// A message that comes for the first time has no row as a rule: the insert itself finds out.
	look, careful := seenBefore, false
	for range 8 {
		err = h.st.InTx(ctx, func(tx *store.Tx) error { return t.run(tx, orders, look, careful) })
		switch {
		case err == nil:
			h.count(ctx, t)
			return t.rows, nil, nil
		case store.IsDuplicate(err):
			look = true // everything was rolled back: read again (R13)
		case errors.Is(err, store.ErrGuard):
			careful = true
		case store.Refuses(err):
			return h.oneByOne(ctx, orders, err)
		default:
			return nil, nil, fmt.Errorf("persist %d orders: %w", len(orders), err)
		}
	}
	return h.oneByOne(ctx, orders, err)
}

// oneByOne finds the culprit of an error that blames content: every order gets a transaction of its
// own. The decoder checks everything that the schema does, so this is the net below the net.
func (h *Handler) oneByOne(ctx context.Context, orders []order.Order, cause error) (rows map[string]*store.Order, refused map[string]error, err error) {
	rows, refused = make(map[string]*store.Order, len(orders)), map[string]error{}
	if len(orders) == 1 {
		switch {
		case !store.Refuses(cause):
			return nil, nil, fmt.Errorf("persist order %s: %w", orders[0].ID, cause)
		case !store.IsContent(cause):
			// Something stands in its way that somebody can take away.
			refused[orders[0].ID.String()] = cause
			return rows, refused, nil
		}
		h.log.ErrorContext(ctx, "order cannot be stored", "order_id", orders[0].ID.String(), "error", cause.Error())
		row, err := h.reject(ctx, orders[0].ID, order.ReasonInvalidOrder)
		if store.Refuses(err) {
			refused[orders[0].ID.String()] = fmt.Errorf("%w; %w", cause, err)
			return rows, refused, nil
		}
		if err != nil {
			return nil, nil, err
		}
		h.persisted.WithLabelValues("invalid").Inc()
		rows[row.ID] = row
		return rows, refused, nil
	}
	h.log.WarnContext(ctx, "batch refused, writing its orders one by one", "orders", len(orders), "error", cause.Error())
	for _, o := range orders {
		one, no, err := h.persist(ctx, []order.Order{o}, true)
		if err != nil {
			return nil, nil, err
		}
		maps.Copy(rows, one)
		maps.Copy(refused, no)
	}
	return rows, refused, nil
}

// reject writes a rejected row for an order of which only the id can be trusted, unless it has a row.
func (h *Handler) reject(ctx context.Context, id order.ID, reason string) (*store.Order, error) {
	var row *store.Order
	for {
		err := h.st.InTx(ctx, func(tx *store.Tx) error {
			rows, err := store.Orders(ctx, tx, []string{id.String()}, true)
			if err != nil {
				return err
			}
			if row = rows[id.String()]; row != nil {
				return nil
			}
			now, err := tx.Now(ctx)
			if err != nil {
				return err
			}
			row = store.BareOrder(id, order.Rejected, reason, now)
			if err := store.InsertOrders(ctx, tx, []*store.Order{row}); err != nil {
				return err
			}
			return store.Owe(ctx, tx, store.CompensateRelease, []*store.Order{row}, follow.CompensationDelay())
		})
		if store.IsDuplicate(err) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("reject order %s: %w", id, err)
		}
		return row, nil
	}
}

func (h *Handler) count(ctx context.Context, t *transaction) {
	h.persisted.WithLabelValues("persisted").Add(float64(t.written))
	h.persisted.WithLabelValues("duplicate").Add(float64(t.duplicates))
	h.persisted.WithLabelValues("rejected").Add(float64(len(t.rejected)))
	h.batch.Observe(float64(t.written + len(t.rejected)))
	for _, r := range t.rejected {
		switch r.Reason {
		case order.ReasonOutOfStock:
			h.follow.Drift("stock_guard", r.Quantity)
		case order.ReasonLimitExceeded:
			h.follow.Drift("limit_guard", r.Quantity)
		}
	}
	if n := len(t.rejected); n > 0 {
		// In a sale without lost data the guards never fire.
		h.log.ErrorContext(ctx, "orders rejected by the guards of mysql", "orders", n, "activity_id", t.rejected[0].ActivityID, "reason", t.rejected[0].Reason)
	}
}

// transaction is one attempt to write a batch. Its fields are set anew by each run.
type transaction struct {
	h     *Handler
	ctx   context.Context //nolint:containedctx // lives as long as one call of persist
	sales map[string]*store.Sale

	rows       map[string]*store.Order
	written    int
	duplicates int
	rejected   []*store.Order
}

func (t *transaction) run(tx *store.Tx, orders []order.Order, look, careful bool) error {
	t.rows, t.written, t.duplicates, t.rejected = make(map[string]*store.Order, len(orders)), 0, 0, nil
	if look {
		ids := make([]string, len(orders))
		for i, o := range orders {
			ids[i] = o.ID.String()
		}
		found, err := store.Orders(t.ctx, tx, ids, true)
		if err != nil {
			return err
		}
		t.rows = found
		t.duplicates = len(found)
	}
	fresh := make([]*store.Order, 0, len(orders))
	for _, o := range orders {
		row, err := store.NewOrder(o, order.Pending, "", store.OriginOrder)
		if err != nil {
			return err
		}
		if found := t.rows[row.ID]; found != nil {
			if found.Origin == store.OriginBare {
				if err := t.complete(tx, found, row); err != nil {
					return err
				}
			}
			continue
		}
		fresh = append(fresh, row)
		if s := t.sales[row.ActivityID]; s == nil || !s.Pools[pool(row)] || row.Quantity > s.Activity.PerUserLimit {
			careful = true
		}
	}
	// By id: inserts of two workers meet in the same order.
	slices.SortFunc(fresh, func(a, b *store.Order) int { return compare(a.ID, b.ID) })
	var take []*store.Order
	if careful {
		var err error
		if take, err = t.decide(tx, fresh); err != nil {
			return err
		}
	} else {
		take = fresh
	}
	if err := store.InsertOrders(t.ctx, tx, fresh); err != nil {
		return err
	}
	if err := t.take(tx, take); err != nil {
		return err
	}
	for _, o := range fresh {
		t.rows[o.ID] = o
	}
	t.written = len(take)
	return nil
}

// take accounts for orders that get their units.
func (t *transaction) take(tx *store.Tx, rows []*store.Order) error {
	if len(rows) == 0 {
		return nil
	}
	units := map[store.Pool]int64{}
	held := make(map[store.Holder]int, len(rows))
	ledger := make([]store.LedgerEntry, len(rows))
	limits := map[string]int{}
	for i, o := range rows {
		units[pool(o)] += int64(o.Quantity)
		held[holder(o)] += o.Quantity
		limits[o.ActivityID] = t.sales[o.ActivityID].Activity.PerUserLimit
		ledger[i] = store.LedgerEntry{Ref: o.ID, Op: store.OpSell, Account: store.AccountSale, ActivityID: o.ActivityID, SKUID: o.SKUID, Pool: o.Pool, Delta: -int64(o.Quantity)}
	}
	if err := store.InsertLedger(t.ctx, tx, ledger); err != nil {
		return err
	}
	if err := store.RaiseHoldings(t.ctx, tx, held); err != nil {
		return err
	}
	holders := make([]store.Holder, 0, len(held))
	for k := range held {
		holders = append(holders, k)
	}
	if err := store.CheckHoldings(t.ctx, tx, holders, limits); err != nil {
		return err
	}
	return store.TakeUnits(t.ctx, tx, units)
}

// decide locks what the guards look at and decides order by order; what is refused becomes a rejected
// row (R7). A user without a row of holdings cannot be locked: the check after the write catches two
// transactions that meet there, and one of them decides again.
func (t *transaction) decide(tx *store.Tx, rows []*store.Order) (take []*store.Order, err error) {
	var holders []store.Holder
	var pools []store.Pool
	for _, o := range rows {
		holders = append(holders, holder(o))
		pools = append(pools, pool(o))
	}
	held, err := store.Holdings(t.ctx, tx, holders, true)
	if err != nil {
		return nil, err
	}
	locked, err := store.LockPools(t.ctx, tx, pools)
	if err != nil {
		return nil, err
	}
	withheld := map[store.Pool]int64{}
	var ledger []store.LedgerEntry
	guards := map[string]string{}
	for _, o := range rows {
		s, p := t.sales[o.ActivityID], locked[pool(o)]
		switch {
		case s == nil || p == nil:
			t.refuse(o, order.ReasonUnknownActivity)
		case held[holder(o)]+o.Quantity > s.Activity.PerUserLimit:
			t.refuse(o, order.ReasonLimitExceeded)
			guards[o.ActivityID] = o.Reason
		case p.SettledAt != nil || p.Available < int64(o.Quantity):
			t.refuse(o, order.ReasonOutOfStock)
			guards[o.ActivityID] = o.Reason
			// What the pool's row cannot account for is withheld now, so that allocated is explained
			// again; what is merely too little for this order stays available.
			if n := min(int64(o.Quantity), p.Unexplained()); n > 0 {
				p.Withheld += n
				withheld[pool(o)] += n
				ledger = append(ledger, store.LedgerEntry{Ref: o.ID, Op: store.OpWithhold, Account: store.AccountSale, ActivityID: o.ActivityID, SKUID: o.SKUID, Pool: o.Pool, Delta: -n})
			}
		default:
			p.Available -= int64(o.Quantity)
			p.Live += int64(o.Quantity)
			held[holder(o)] += o.Quantity
			take = append(take, o)
		}
	}
	if err := store.InsertLedger(t.ctx, tx, ledger); err != nil {
		return nil, err
	}
	if err := store.Withhold(t.ctx, tx, withheld); err != nil {
		return nil, err
	}
	for activity, why := range guards {
		if err := store.OweReconcile(t.ctx, tx, activity, why); err != nil {
			return nil, err
		}
	}
	return take, store.Owe(t.ctx, tx, store.CompensateRelease, t.rejected, follow.CompensationDelay())
}

func (t *transaction) refuse(o *store.Order, reason string) {
	o.Status, o.Reason = order.Rejected, reason
	t.rejected = append(t.rejected, o)
}

// complete fills in what a bare tombstone could not know, now that the order's message has come.
func (t *transaction) complete(tx *store.Tx, found, row *store.Order) error {
	if err := store.CompleteTombstone(t.ctx, tx, row); err != nil {
		return err
	}
	status, reason := found.Status, found.Reason
	*found = *row
	found.Status, found.Reason, found.Origin = status, reason, store.OriginTombstone
	return nil
}

func pool(o *store.Order) store.Pool {
	return store.Pool{Activity: o.ActivityID, SKU: o.SKUID, Pool: o.Pool}
}

func holder(o *store.Order) store.Holder { return store.Holder{Activity: o.ActivityID, User: o.UserID} }

func compare(a, b string) int {
	switch {
	case a < b:
		return -1
	case a > b:
		return 1
	}
	return 0
}
