package store

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	"seckill/pkg/order"
)

// Pool names a pool of a sale.
type Pool struct{ Activity, SKU, Pool string }

func comparePools(a, b Pool) int {
	return cmp.Or(cmp.Compare(a.Activity, b.Activity), cmp.Compare(a.SKU, b.SKU), cmp.Compare(a.Pool, b.Pool))
}

func sortedPools[V any](m map[Pool]V) []Pool {
	out := make([]Pool, 0, len(m))
	for p := range m {
		out = append(out, p)
	}
	slices.SortFunc(out, comparePools)
	return out
}

// Holder names a user in a sale.
type Holder struct{ Activity, User string }

func compareHolders(a, b Holder) int {
	return cmp.Or(cmp.Compare(a.Activity, b.Activity), cmp.Compare(a.User, b.User))
}

// ErrGuard means that one of the last guards refused a transaction as a whole: a pool without enough
// units, or a user over his limit. Which order is the culprit is for the caller to find out.
var ErrGuard = errors.New("refused by a guard")

// TakeUnits takes units out of pools for new live orders: one guarded UPDATE per pool, in sorted order
// so that two transactions never wait for each other crosswise. Call it last: the pool's row is the
// hot one, and what is locked last is locked shortest.
func TakeUnits(ctx context.Context, q Querier, units map[Pool]int64) error {
	for _, p := range sortedPools(units) {
		n := units[p]
		if n <= 0 {
			return fmt.Errorf("take %d units of %v: not positive", n, p)
		}
		res, err := q.ExecContext(ctx, "UPDATE activity_stock SET available=available-?, live=live+?, updated_at=UTC_TIMESTAMP(6) "+
			"WHERE activity_id=? AND sku_id=? AND pool=? AND available>=? AND settled_at IS NULL", n, n, p.Activity, p.SKU, p.Pool, n)
		if err != nil {
			return fmt.Errorf("take units of %v: %w", p, err)
		}
		if hit, err := res.RowsAffected(); err != nil {
			return fmt.Errorf("take units of %v: %w", p, err)
		} else if hit != 1 {
			return fmt.Errorf("take %d units of %v: %w", n, p, ErrGuard)
		}
	}
	return nil
}

// Withhold books units that were found missing.
func Withhold(ctx context.Context, q Querier, units map[Pool]int64) error {
	for _, p := range sortedPools(units) {
		if _, err := q.ExecContext(ctx, "UPDATE activity_stock SET withheld=withheld+?, updated_at=UTC_TIMESTAMP(6) WHERE activity_id=? AND sku_id=? AND pool=?",
			units[p], p.Activity, p.SKU, p.Pool); err != nil {
			return fmt.Errorf("withhold units of %v: %w", p, err)
		}
	}
	return nil
}

// ReturnUnits gives the units of orders that were live back, where MySQL says they belong: to the
// order's own pool while that is not settled, to inventory afterwards. The UPDATE that finds out is
// the one that locks the pool's row (R6). op is OpCancel or OpRefund. The ledger rows are written
// here as well, since they depend on where the units went.
func ReturnUnits(ctx context.Context, q Querier, rows []*Order, op string) error {
	units := map[Pool]int64{}
	held := map[Holder]int{}
	entries := make([]LedgerEntry, 0, len(rows))
	byPool := map[Pool][]*Order{}
	for _, o := range rows {
		p := Pool{o.ActivityID, o.SKUID, o.Pool}
		units[p] += int64(o.Quantity)
		held[Holder{o.ActivityID, o.UserID}] += o.Quantity
		byPool[p] = append(byPool[p], o)
		entries = append(entries, LedgerEntry{Ref: o.ID, Op: op, Account: AccountSale, ActivityID: o.ActivityID, SKUID: o.SKUID, Pool: o.Pool, Delta: int64(o.Quantity)})
	}
	if err := InsertLedger(ctx, q, entries); err != nil {
		return err
	}
	if err := dropHoldings(ctx, q, held); err != nil {
		return err
	}
	for _, p := range sortedPools(units) {
		n := units[p]
		res, err := q.ExecContext(ctx, "UPDATE activity_stock SET available=available+?, live=live-?, updated_at=UTC_TIMESTAMP(6) "+
			"WHERE activity_id=? AND sku_id=? AND pool=? AND settled_at IS NULL", n, n, p.Activity, p.SKU, p.Pool)
		if err != nil {
			return fmt.Errorf("return units of %v: %w", p, err)
		}
		hit, err := res.RowsAffected()
		if err != nil {
			return fmt.Errorf("return units of %v: %w", p, err)
		}
		if hit == 0 {
			if err := returnFromSettled(ctx, q, p, n, byPool[p]); err != nil {
				return err
			}
		}
	}
	return nil
}

// returnFromSettled is ReturnUnits for a settled pool. A rehearsal's units belong to nobody.
func returnFromSettled(ctx context.Context, q Querier, p Pool, n int64, rows []*Order) error {
	// settled_at never becomes NULL again, so the row that the first UPDATE did not match needs no
	// second look; a pool that does not exist is an error below.
	res, err := q.ExecContext(ctx, "UPDATE activity_stock SET live=live-?, returned=returned+?, updated_at=UTC_TIMESTAMP(6) "+
		"WHERE activity_id=? AND sku_id=? AND pool=? AND settled_at IS NOT NULL", n, n, p.Activity, p.SKU, p.Pool)
	if err != nil {
		return fmt.Errorf("return units of %v: %w", p, err)
	}
	if hit, err := res.RowsAffected(); err != nil || hit != 1 {
		return fmt.Errorf("return units of %v: pool row not found (%w)", p, cmp.Or(err, ErrGuard))
	}
	var target string
	var shadow bool
	r, err := q.QueryContext(ctx, "SELECT IF(refund_after_end='region', ?, ?), shadow FROM activities WHERE id=?", p.Pool, order.DefaultRegion, p.Activity)
	if err != nil {
		return fmt.Errorf("read activity %s: %w", p.Activity, err)
	}
	defer r.Close() //nolint:errcheck // Err says what went wrong
	if r.Next() {
		if err := r.Scan(&target, &shadow); err != nil {
			return fmt.Errorf("read activity %s: %w", p.Activity, err)
		}
	}
	if err := errors.Join(r.Err(), r.Close()); err != nil {
		return fmt.Errorf("read activity %s: %w", p.Activity, err)
	}
	if target == "" {
		return fmt.Errorf("return units of %v: activity not found (%w)", p, ErrGuard)
	}
	entries := make([]LedgerEntry, 0, 2*len(rows))
	for _, o := range rows {
		entries = append(entries, LedgerEntry{Ref: o.ID, Op: OpSettle, Account: AccountSale, ActivityID: p.Activity, SKUID: p.SKU, Pool: p.Pool, Delta: -int64(o.Quantity)})
		if !shadow {
			entries = append(entries, LedgerEntry{Ref: o.ID, Op: OpSettle, Account: AccountInventory, ActivityID: p.Activity, SKUID: p.SKU, Pool: target, Delta: int64(o.Quantity)})
		}
	}
	if err := InsertLedger(ctx, q, entries); err != nil {
		return err
	}
	if shadow {
		return nil
	}
	return ReturnToInventory(ctx, q, p.SKU, target, n)
}

// ReturnToInventory puts units on hand. The caller writes the ledger.
func ReturnToInventory(ctx context.Context, q Querier, sku, pool string, units int64) error {
	if _, err := q.ExecContext(ctx, "INSERT INTO inventory (sku_id,pool,on_hand,updated_at) VALUES (?,?,?,UTC_TIMESTAMP(6)) "+
		"ON DUPLICATE KEY UPDATE on_hand=on_hand+VALUES(on_hand), updated_at=VALUES(updated_at)", sku, pool, units); err != nil {
		return fmt.Errorf("return %d units of %s in %s to inventory: %w", units, sku, pool, err)
	}
	return nil
}

// LockPools reads pool rows and keeps them locked until the transaction ends.
func LockPools(ctx context.Context, q Querier, pools []Pool) (map[Pool]*ActivityStock, error) {
	sorted := slices.Clone(pools)
	slices.SortFunc(sorted, comparePools)
	sorted = slices.Compact(sorted)
	out := make(map[Pool]*ActivityStock, len(sorted))
	for _, p := range sorted {
		a, err := lockPool(ctx, q, p)
		if err != nil {
			return nil, fmt.Errorf("lock pool %v: %w", p, err)
		}
		if a != nil {
			out[p] = a
		}
	}
	return out, nil
}

// lockPool returns nil for a pool that does not exist.
func lockPool(ctx context.Context, q Querier, p Pool) (*ActivityStock, error) {
	rows, err := q.QueryContext(ctx, "SELECT allocated,available,withheld,live,returned,settled_at FROM activity_stock "+
		"WHERE activity_id=? AND sku_id=? AND pool=? FOR UPDATE", p.Activity, p.SKU, p.Pool)
	if err != nil {
		return nil, err
	}
	defer func() { _ = rows.Close() }()
	if !rows.Next() {
		return nil, rows.Err()
	}
	a := &ActivityStock{ActivityID: p.Activity, SKUID: p.SKU, Pool: p.Pool}
	if err := rows.Scan(&a.Allocated, &a.Available, &a.Withheld, &a.Live, &a.Returned, &a.SettledAt); err != nil {
		return nil, err
	}
	for rows.Next() { // there is one row; what ends the statement also reports its errors
	}
	return a, rows.Err()
}

// InsertLedger appends entries; At is the database's time. An entry that is there already is a
// duplicate key: the operation was done before, and the transaction must not do it again.
func InsertLedger(ctx context.Context, q Querier, entries []LedgerEntry) error {
	return chunks(entries, func(entries []LedgerEntry) error {
		w := sqlBuf{b: make([]byte, 0, 200*len(entries))}
		w.raw("INSERT INTO stock_ledger (ref,op,account,activity_id,sku_id,pool,delta,at) VALUES ")
		for i, e := range entries {
			if i > 0 {
				w.comma()
			}
			w.raw("(").str(e.Ref).comma().str(e.Op).comma().str(e.Account).comma().str(e.ActivityID).comma().str(e.SKUID).comma().str(e.Pool).
				comma().num(e.Delta).raw(",UTC_TIMESTAMP(6))")
		}
		if _, err := q.ExecContext(ctx, w.String()); err != nil {
			return fmt.Errorf("write %d ledger entries: %w", len(entries), err)
		}
		return nil
	})
}

// RaiseHoldings counts units for users, in sorted order: one statement for all. The counter may be
// over the limit afterwards; OverLimit tells, and then the transaction has to be rolled back (R14).
func RaiseHoldings(ctx context.Context, q Querier, units map[Holder]int) error {
	keys := make([]Holder, 0, len(units))
	for h := range units {
		keys = append(keys, h)
	}
	slices.SortFunc(keys, compareHolders)
	return chunks(keys, func(keys []Holder) error {
		w := sqlBuf{b: make([]byte, 0, 100*len(keys))}
		w.raw("INSERT INTO user_holdings (activity_id,user_id,held) VALUES ")
		for i, h := range keys {
			if i > 0 {
				w.comma()
			}
			w.raw("(").str(h.Activity).comma().str(h.User).comma().num(int64(units[h])).raw(")")
		}
		w.raw(" ON DUPLICATE KEY UPDATE held=held+VALUES(held)")
		if _, err := q.ExecContext(ctx, w.String()); err != nil {
			return fmt.Errorf("raise %d holdings: %w", len(keys), err)
		}
		return nil
	})
}

// Holdings reads counters; with lock they stay locked. Users without a row are absent.
func Holdings(ctx context.Context, q Querier, holders []Holder, lock bool) (map[Holder]int, error) {
	out := make(map[Holder]int, len(holders))
	err := eachActivity(holders, func(activity string, users []string) error {
		w := sqlBuf{}
		w.raw("SELECT user_id,held FROM user_holdings FORCE INDEX (PRIMARY) WHERE activity_id=").str(activity).raw(" AND user_id IN ").list(users)
		if lock {
			w.raw(" ORDER BY user_id FOR UPDATE")
		}
		rows, err := q.QueryContext(ctx, w.String())
		if err != nil {
			return fmt.Errorf("read holdings: %w", err)
		}
		defer rows.Close() //nolint:errcheck // Err says what went wrong
		for rows.Next() {
			h := Holder{Activity: activity}
			var held int
			if err := rows.Scan(&h.User, &held); err != nil {
				return fmt.Errorf("read holdings: %w", err)
			}
			out[h] = held
		}
		if err := rows.Err(); err != nil {
			return fmt.Errorf("read holdings: %w", err)
		}
		return nil
	})
	return out, err
}

// CheckHoldings fails with ErrGuard if one of the users holds more than the limit of the activity.
func CheckHoldings(ctx context.Context, q Querier, holders []Holder, limits map[string]int) error {
	return eachActivity(holders, func(activity string, users []string) error {
		w := sqlBuf{}
		w.raw("SELECT user_id FROM user_holdings FORCE INDEX (PRIMARY) WHERE activity_id=").str(activity).raw(" AND user_id IN ").list(users).
			raw(" AND held>").num(int64(limits[activity])).raw(" LIMIT 1")
		rows, err := q.QueryContext(ctx, w.String())
		if err != nil {
			return fmt.Errorf("check holdings: %w", err)
		}
		over, err := scanStrings(rows, "check holdings")
		if err != nil {
			return err
		}
		if len(over) > 0 {
			return fmt.Errorf("per-user limit of %s: %w", activity, ErrGuard)
		}
		return nil
	})
}

// dropHoldings counts units down again: one statement for each activity and number of units.
func dropHoldings(ctx context.Context, q Querier, units map[Holder]int) error {
	type group struct {
		activity string
		n        int
	}
	users := map[group][]string{}
	for h, n := range units {
		g := group{h.Activity, n}
		users[g] = append(users[g], h.User)
	}
	groups := make([]group, 0, len(users))
	for g := range users {
		groups = append(groups, g)
	}
	slices.SortFunc(groups, func(a, b group) int { return cmp.Or(cmp.Compare(a.activity, b.activity), cmp.Compare(a.n, b.n)) })
	for _, g := range groups {
		slices.Sort(users[g])
		err := chunks(users[g], func(users []string) error {
			w := sqlBuf{}
			w.raw("UPDATE user_holdings SET held=held-").num(int64(g.n)).raw(" WHERE activity_id=").str(g.activity).raw(" AND user_id IN ").list(users)
			if _, err := q.ExecContext(ctx, w.String()); err != nil {
				return fmt.Errorf("lower %d holdings: %w", len(users), err)
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// eachActivity groups holders and calls f with sorted users, in chunks.
func eachActivity(holders []Holder, f func(activity string, users []string) error) error {
	sorted := slices.Clone(holders)
	slices.SortFunc(sorted, compareHolders)
	sorted = slices.Compact(sorted)
	for len(sorted) > 0 {
		n := 1
		for n < len(sorted) && n < chunkRows && sorted[n].Activity == sorted[0].Activity {
			n++
		}
		users := make([]string, n)
		for i := range users {
			users[i] = sorted[i].User
		}
		if err := f(sorted[0].Activity, users); err != nil {
			return err
		}
		sorted = sorted[n:]
	}
	return nil
}
