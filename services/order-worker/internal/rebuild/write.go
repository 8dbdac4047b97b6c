package rebuild

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"seckill/pkg/adminapi"
	"seckill/pkg/failpoint"
	"seckill/pkg/messaging"
	"seckill/pkg/order"
	"seckill/pkg/stock"
	"seckill/services/order-worker/internal/activity"
	"seckill/services/order-worker/internal/store"
)

const (
	rowsAtOnce  = 1000 // rows read and written together
	usersAtOnce = 5000
	maxRounds   = 20 // drains after each of which Redis still had reservations of its own

	// classDeliveryLimit: the broker gave up delivering; nothing is known against the message.
	classDeliveryLimit = "delivery_limit"
)

// split gives each bucket its share of the units of each pool; 0 where amounts say nothing.
func split(a *stock.Activity, amounts map[[2]string]int64) []map[string]map[string]int {
	out := make([]map[string]map[string]int, max(1, a.Buckets))
	for b := range out {
		out[b] = map[string]map[string]int{}
		for _, item := range a.Items {
			out[b][item.SKU] = map[string]int{}
			for pool := range item.Pools {
				out[b][item.SKU][pool] = stock.Share(int(amounts[[2]string{item.SKU, pool}]), b, len(out))
			}
		}
	}
	return out
}

// write is the transaction.
func (a *attempt) write(ctx context.Context) error {
	again := false
	// Redis is written under the locks of this transaction, which may take a while.
	err := a.s.st.InRestingTx(ctx, func(tx *store.Tx) error {
		if err := a.holds(ctx, tx); err != nil {
			return err
		}
		now, err := tx.Now(ctx)
		if err != nil {
			return err
		}
		d, err := a.s.sales.Load(ctx, a.id)
		if err != nil {
			return err
		}
		sa, err := d.Stock()
		if err != nil {
			return err
		}
		sa.Paused, sa.Epoch = true, d.Epoch+1
		if again {
			// The transaction was rolled back: what it wrote may be old by now.
			if err := a.s.redis.WipeRebuild(ctx, sa, a.number); err != nil {
				return err
			}
		}
		again = true
		p := &picture{s: a.s, d: d, tx: tx, lock: true, users: map[string]bool{}, out: adminapi.RebuildResult{Number: a.number, Epoch: sa.Epoch, Statuses: map[string]int{}}}
		p.begin = func(amounts map[[2]string]int64, added []stock.Added) error {
			return a.s.redis.PrepareRebuild(ctx, sa, a.number, split(sa, amounts), added)
		}
		p.records = func(rs []stock.Rebuilt) error {
			if err := a.s.redis.WriteRebuild(ctx, sa, a.number, rs); err != nil {
				return err
			}
			return failpoint.Hit(ctx, "rebuild.records")
		}
		p.qualified = func(users []string) error { return a.s.redis.Qualify(ctx, sa, users) }
		if err := p.read(ctx); err != nil {
			return err
		}
		if d.State == store.ActivityEnded {
			if err := a.s.redis.End(ctx, sa, d.EndsAt); err != nil {
				return err
			}
		}
		if _, err := tx.ExecContext(ctx, "UPDATE activities SET epoch = ?, warm_winner = ?, updated_at = UTC_TIMESTAMP(6) WHERE id = ?", sa.Epoch, a.number, a.id); err != nil {
			return fmt.Errorf("raise epoch: %w", err)
		}
		if _, err := tx.ExecContext(ctx, "UPDATE rebuilds SET step = ?, read_at = ?, note = '', updated_at = UTC_TIMESTAMP(6) WHERE activity_id = ?", store.RebuildOpen, now, a.id); err != nil {
			return fmt.Errorf("note step: %w", err)
		}
		if err := putResult(ctx, tx, a.id, p.out); err != nil {
			return err
		}
		return failpoint.Hit(ctx, "rebuild.before_commit")
	})
	if err != nil {
		return fmt.Errorf("rebuild activity %s: %w", a.id, err)
	}
	return nil
}

// Plan says what a rebuild would write now: a look without locks, at one moment of MySQL.
func (s *Service) Plan(ctx context.Context, id string) (adminapi.RebuildResult, error) {
	d, err := s.sales.Load(ctx, id)
	if err != nil {
		return adminapi.RebuildResult{}, err
	}
	if err := mayRebuild(d.State); err != nil {
		return adminapi.RebuildResult{}, fmt.Errorf("rebuild activity %s: %w", id, err)
	}
	tx, err := s.st.Snapshot(ctx)
	if err != nil {
		return adminapi.RebuildResult{}, err
	}
	defer func() { _ = tx.Rollback() }() // read only
	p := &picture{
		s: s, d: d, tx: tx, users: map[string]bool{}, out: adminapi.RebuildResult{Epoch: d.Epoch + 1, Statuses: map[string]int{}},
		begin:   func(map[[2]string]int64, []stock.Added) error { return nil },
		records: func([]stock.Rebuilt) error { return nil }, qualified: func([]string) error { return nil },
	}
	if err := p.read(ctx); err != nil {
		return adminapi.RebuildResult{}, fmt.Errorf("rebuild activity %s: %w", id, err)
	}
	return p.out, nil
}

// picture reads what MySQL knows of a sale and hands it to whoever writes it: the stock first, then the
// records, then who is qualified.
type picture struct {
	s    *Service
	d    *activity.Details
	tx   *store.Tx
	lock bool

	begin     func(amounts map[[2]string]int64, added []stock.Added) error
	records   func([]stock.Rebuilt) error
	qualified func(users []string) error

	users map[string]bool
	out   adminapi.RebuildResult
}

func (p *picture) read(ctx context.Context) error {
	suffix := ""
	if p.lock {
		suffix = " FOR UPDATE"
	}
	pools, err := p.pools(suffix)
	if err != nil {
		return err
	}
	held, err := p.held(ctx, suffix)
	if err != nil {
		return err
	}
	added, err := p.added(ctx)
	if err != nil {
		return err
	}
	units := map[[2]string]int64{}
	for _, r := range held {
		units[[2]string{r.SKU, r.Pool}] += int64(r.Quantity)
	}
	amounts := map[[2]string]int64{}
	for _, row := range pools {
		k := [2]string{row.SKUID, row.Pool}
		left := row.Sellable() - units[k]
		amounts[k] = max(left, 0)
		p.out.Pools = append(p.out.Pools, adminapi.RebuiltPool{
			SKU: row.SKUID, Pool: row.Pool, Allocated: row.Allocated, Available: row.Available, Held: units[k], Units: amounts[k], Short: max(-left, 0),
		})
	}
	if err := p.begin(amounts, added); err != nil {
		return err
	}
	// The letters' orders before the rows: one that got its row meanwhile has a record already, and that
	// follows the row as every record does.
	if err := p.put(held); err != nil {
		return err
	}
	if err := p.rows(ctx); err != nil {
		return err
	}
	p.out.Limits = len(p.users)
	return p.qualifications()
}

func (p *picture) pools(suffix string) ([]store.ActivityStock, error) {
	var rows []store.ActivityStock
	if err := p.tx.DB().Raw("SELECT * FROM activity_stock WHERE activity_id = ? ORDER BY sku_id, pool"+suffix, p.d.ID).Scan(&rows).Error; err != nil {
		return nil, fmt.Errorf("read pools: %w", err)
	}
	return rows, nil
}

// held reads the reservations that lie in dead letters and have no row: their units are not on sale.
func (p *picture) held(ctx context.Context, suffix string) ([]stock.Rebuilt, error) {
	var letters []store.DeadLetter
	if err := p.tx.DB().Raw("SELECT * FROM dead_letters WHERE activity_id = ? AND routing_key = ? AND state IN (?, ?, ?) ORDER BY id"+suffix,
		p.d.ID, messaging.KeyOrderReserved, store.LetterOpen, store.LetterClaimed, store.LetterSent).Scan(&letters).Error; err != nil {
		return nil, fmt.Errorf("read dead letters: %w", err)
	}
	at := map[string]int{}
	var found []stock.Rebuilt
	var ids []string
	for _, l := range letters {
		good, _, err := messaging.DecodeOrderReserved(messaging.Message{ID: l.MessageID, Key: l.RoutingKey, Body: l.Body})
		if err != nil || len(good) != 1 || good[0].ID.Activity != p.d.ID {
			continue // it will never become an order
		}
		id := good[0].ID.String()
		i, known := at[id]
		if !known {
			i = len(found)
			at[id] = i
			ids = append(ids, id)
			found = append(found, stock.Rebuilt{Record: stock.Record{Order: good[0], Status: order.Reserved}})
		}
		// As the drain would park it; a letter that is being replayed is on its way.
		if l.State == store.LetterOpen && l.Class != classDeliveryLimit {
			found[i].Parked = true
		}
	}
	rows, err := store.Orders(ctx, p.tx, ids, false)
	if err != nil {
		return nil, err
	}
	out := found[:0]
	for _, r := range found {
		if rows[r.ID.String()] == nil {
			out = append(out, r)
		}
	}
	return out, nil
}

// added reads which additions of stock the amounts hold.
func (p *picture) added(ctx context.Context) ([]stock.Added, error) {
	rows, err := p.tx.QueryContext(ctx, "SELECT ref, delta FROM stock_ledger WHERE ref > CONCAT(?, '/add/') AND ref < CONCAT(?, '/add0') AND op = ? AND account = ?",
		p.d.ID, p.d.ID, store.OpAdd, store.AccountSale)
	if err != nil {
		return nil, fmt.Errorf("read additions: %w", err)
	}
	defer func() { _ = rows.Close() }()
	var out []stock.Added
	for rows.Next() {
		var ref string
		var a stock.Added
		if err := rows.Scan(&ref, &a.Units); err != nil {
			return nil, fmt.Errorf("read additions: %w", err)
		}
		a.Op = strings.TrimPrefix(ref, p.d.ID+"/add/")
		out = append(out, a)
	}
	if err := rows.Err(); err != nil {
		return nil, fmt.Errorf("read additions: %w", err)
	}
	return out, nil
}

// rows writes a record for every order of the sale, final ones too: a retry finds its answer, and takes
// nothing (R4).
func (p *picture) rows(ctx context.Context) error {
	for after := ""; ; {
		page, err := store.OrdersOf(ctx, p.tx, p.d.ID, after, rowsAtOnce)
		if err != nil {
			return err
		}
		if len(page) == 0 {
			return nil
		}
		due, err := p.due(ctx, page[0].ID, page[len(page)-1].ID)
		if err != nil {
			return err
		}
		batch := make([]stock.Rebuilt, 0, len(page))
		for _, o := range page {
			after = o.ID
			if o.Origin == store.OriginBare {
				p.out.Bare++
				continue
			}
			content, err := o.Content()
			if err != nil {
				return err
			}
			batch = append(batch, stock.Rebuilt{Record: stock.Record{Order: content, Status: o.Status, Reason: o.Reason, RefundDue: due[o.ID]}})
		}
		if err := p.put(batch); err != nil {
			return err
		}
	}
}

// due reads which orders in a range of ids have money to go back.
func (p *picture) due(ctx context.Context, from, to string) (map[string]bool, error) {
	rows, err := p.tx.QueryContext(ctx, "SELECT order_id FROM payments WHERE order_id BETWEEN ? AND ? AND status = ?", from, to, store.PaymentRefundDue)
	if err != nil {
		return nil, fmt.Errorf("read refunds due: %w", err)
	}
	defer func() { _ = rows.Close() }()
	out := map[string]bool{}
	for rows.Next() {
		var id string
		if err := rows.Scan(&id); err != nil {
			return nil, fmt.Errorf("read refunds due: %w", err)
		}
		out[id] = true
	}
	if err := rows.Err(); err != nil {
		return nil, fmt.Errorf("read refunds due: %w", err)
	}
	return out, nil
}

func (p *picture) put(batch []stock.Rebuilt) error {
	for _, r := range batch {
		p.out.Records++
		p.out.Statuses[string(r.Status)]++
		if r.Status.Live() {
			p.users[r.User] = true
		}
		if r.IdemKey != "" {
			p.out.Keys++
		}
		switch {
		case r.Status == order.Reserved && r.Parked:
			p.out.Parked++
		case r.Status == order.Reserved:
			p.out.Waiting++
		}
	}
	if len(batch) == 0 {
		return nil
	}
	return p.records(batch)
}

func (p *picture) qualifications() error {
	if !p.d.Qualifies() {
		return nil
	}
	for after := ""; ; {
		var users []string
		if err := p.tx.DB().Raw("SELECT user_id FROM qualifications WHERE activity_id = ? AND user_id > ? ORDER BY user_id LIMIT ?", p.d.ID, after, usersAtOnce).Scan(&users).Error; err != nil {
			return fmt.Errorf("read qualifications: %w", err)
		}
		if len(users) == 0 {
			return nil
		}
		after = users[len(users)-1]
		p.out.Qualifications += len(users)
		if err := p.qualified(users); err != nil {
			return err
		}
	}
}

// publishRest publishes the live records that Redis still has, and MySQL knows nothing of: reservations
// whose message was never published, or was lost with a broker. It says how many.
func (a *attempt) publishRest(ctx context.Context) (int, error) {
	if a.rest++; a.rest > maxRounds {
		return 0, fmt.Errorf("rebuild activity %s: redis still has reservations that do not reach mysql", a.id)
	}
	var live []stock.Record
	if err := a.s.redis.EachRecord(ctx, a.id, func(r stock.Record) error {
		if r.Status.Live() {
			live = append(live, r)
		}
		return nil
	}); errors.Is(err, stock.ErrCorrupt) {
		// Nothing can be read from them any more; what MySQL knows of their orders is written anew.
		a.say(ctx, "damaged records are left out: %v", err)
	} else if err != nil {
		return 0, fmt.Errorf("rebuild activity %s: %w", a.id, err)
	}
	sent := 0
	for len(live) > 0 {
		part := live[:min(len(live), rowsAtOnce)]
		live = live[len(part):]
		missing, err := a.unknown(ctx, part)
		if err != nil {
			return sent, err
		}
		if err := a.s.redis.Digests(ctx, missing); err != nil {
			return sent, fmt.Errorf("read digests: %w", err)
		}
		for len(missing) > 0 {
			n := min(len(missing), messaging.MaxOrdersPerMessage)
			orders := make([]order.Order, n)
			for i := range orders {
				orders[i] = missing[i].Order
			}
			missing = missing[n:]
			for _, err := range a.s.broker.Publish(ctx, messaging.ExchangeEvents, messaging.OrderReserved(orders)) {
				if err != nil {
					return sent, fmt.Errorf("publish reservations that only redis knows: %w", err)
				}
			}
			sent += n
		}
	}
	return sent, nil
}

// unknown are the records that have neither a row nor a dead letter that is not over.
func (a *attempt) unknown(ctx context.Context, part []stock.Record) ([]stock.Record, error) {
	ids := make([]string, len(part))
	for i, r := range part {
		ids[i] = r.ID.String()
	}
	rows, err := store.Orders(ctx, a.s.st.SQL(), ids, false)
	if err != nil {
		return nil, err
	}
	var missing []string
	for _, id := range ids {
		if rows[id] == nil {
			missing = append(missing, id)
		}
	}
	if len(missing) == 0 {
		return nil, nil
	}
	var letters []string
	if err := a.s.st.DB(ctx).Raw("SELECT DISTINCT order_id FROM dead_letters WHERE order_id IN ? AND routing_key = ? AND state IN (?, ?, ?)",
		missing, messaging.KeyOrderReserved, store.LetterOpen, store.LetterClaimed, store.LetterSent).Scan(&letters).Error; err != nil {
		return nil, fmt.Errorf("read dead letters: %w", err)
	}
	known := map[string]bool{}
	for _, id := range letters {
		known[id] = true
	}
	var out []stock.Record
	for _, r := range part {
		if id := r.ID.String(); rows[id] == nil && !known[id] {
			out = append(out, r)
		}
	}
	return out, nil
}

// catchUp lets the records follow what rows have become while the transaction read them: who changed a row
// may have told Redis before its record was there.
func (a *attempt) catchUp(ctx context.Context) error {
	var since time.Time
	if err := a.s.st.SQL().QueryRowContext(ctx, "SELECT read_at FROM rebuilds WHERE activity_id = ? AND read_at IS NOT NULL", a.id).Scan(&since); err != nil {
		return fmt.Errorf("read rebuild of activity %s: %w", a.id, err)
	}
	since = since.Add(-time.Minute) // a change is stamped before its commit
	var todo []*store.Order
	flush := func() error {
		if len(todo) == 0 {
			return nil
		}
		err := a.s.follow.Rows(ctx, todo)
		todo = nil
		return err
	}
	for after := ""; ; {
		page, err := store.OrdersOf(ctx, a.s.st.SQL(), a.id, after, rowsAtOnce)
		if err != nil {
			return err
		}
		if len(page) == 0 {
			return flush()
		}
		for _, o := range page {
			after = o.ID
			// What is pending was so before, or is a late order.
			if o.Status != order.Pending && o.UpdatedAt.After(since) {
				todo = append(todo, o)
			}
		}
		if len(todo) >= rowsAtOnce/2 {
			if err := flush(); err != nil {
				return err
			}
		}
	}
}
