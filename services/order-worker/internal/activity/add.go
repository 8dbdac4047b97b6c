package activity

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"seckill/pkg/order"
	"seckill/pkg/sale"
	"seckill/pkg/stock"
	"seckill/services/order-worker/internal/audit"
	"seckill/services/order-worker/internal/store"
)

// addPatience is how long the caller of AddStock is given to tell Redis before the loop does.
const addPatience = 15 * time.Second

// Addition is stock that is added to a pool of a sale. Op names the operation: repeating it adds
// nothing.
type Addition struct {
	Op, SKU, Pool string
	Units         int64
}

// AddResult says what an addition did.
type AddResult struct {
	Already   bool  // it was done before
	Allocated int64 // of the pool, now
	Available int64 // of the pool, now, in MySQL
	Waiting   bool  // Redis does not know it yet; the loop tells it
}

// ErrOpReused refuses an operation id that stands for another addition.
var ErrOpReused = errors.New("the operation id was used for another addition")

// AddStock adds units to a pool, from the inventory where that is kept (R6). It is refused once the
// sale has ended. What Redis has to be told is noted in the same transaction, so that a crash before
// it leaves the note for the loop, and the script adds each operation once.
//
// A sale that is not warm needs no telling: the warm-up reads the amounts. One that is under way may
// have read them before, so the addition takes a number of its own: the attempt cannot win any more,
// and begins again.
func (s *Service) AddStock(ctx context.Context, id string, add Addition, by audit.Actor) (AddResult, error) {
	if !order.ValidTransactionID(add.Op) || !order.ValidSKUID(add.SKU) || !order.ValidPool(add.Pool) || add.Units < 1 || add.Units > sale.MaxUnits {
		return AddResult{}, fmt.Errorf("add stock to activity %s: %w", id, stock.ErrInvalid)
	}
	var out AddResult
	var subject string
	err := s.st.InTx(ctx, func(tx *store.Tx) (err error) {
		out, subject, err = addTx(ctx, tx, id, add, by)
		return err
	})
	if err != nil {
		return AddResult{}, fmt.Errorf("add stock to activity %s: %w", id, err)
	}
	if subject == "" {
		return out, nil
	}
	// Committed: from here on nothing is an error any more, only later.
	if err := s.finishAdd(ctx, subject); err != nil {
		out.Waiting = true
		s.log.WarnContext(ctx, "stock added in mysql, redis is told later", "activity_id", id, "op", add.Op, "error", err)
	}
	return out, nil
}

func addTx(ctx context.Context, tx *store.Tx, id string, add Addition, by audit.Actor) (out AddResult, subject string, err error) {
	var state string
	var winner, epoch uint64
	var shadow, over bool
	err = tx.QueryRowContext(ctx, "SELECT state, warm_winner, epoch, shadow, ends_at <= UTC_TIMESTAMP(6) FROM activities WHERE id = ? FOR UPDATE", id).
		Scan(&state, &winner, &epoch, &shadow, &over)
	switch {
	case errors.Is(err, sql.ErrNoRows):
		return out, "", ErrNotFound
	case err != nil:
		return out, "", fmt.Errorf("lock activity: %w", err)
	}
	pool := store.Pool{Activity: id, SKU: add.SKU, Pool: add.Pool}
	locked, err := store.LockPools(ctx, tx, []store.Pool{pool})
	if err != nil {
		return out, "", err
	}
	row := locked[pool]
	if row == nil {
		return out, "", fmt.Errorf("%w: it has no pool %s of %s", ErrState, add.Pool, add.SKU)
	}
	ref := id + "/add/" + add.Op
	was := Addition{Op: add.Op}
	err = tx.QueryRowContext(ctx, "SELECT sku_id, pool, delta FROM stock_ledger WHERE ref = ? AND op = ? AND account = ?", ref, store.OpAdd, store.AccountSale).
		Scan(&was.SKU, &was.Pool, &was.Units)
	switch {
	case err == nil && was != add:
		return out, "", ErrOpReused
	case err == nil:
		out = AddResult{Already: true, Allocated: row.Allocated, Available: row.Available}
		err = tx.QueryRowContext(ctx, "SELECT subject FROM compensations WHERE kind = ? AND subject LIKE CONCAT(?, '/%')",
			store.CompensateStockAdd, strings.NewReplacer("_", `\_`, "%", `\%`).Replace(ref)).Scan(&subject)
		if err != nil && !errors.Is(err, sql.ErrNoRows) {
			return out, "", fmt.Errorf("read compensation: %w", err)
		}
		return out, subject, nil
	case !errors.Is(err, sql.ErrNoRows):
		return out, "", fmt.Errorf("read ledger: %w", err)
	case state != store.ActivityDraft && state != store.ActivityWarmed || row.SettledAt != nil:
		return out, "", fmt.Errorf("%w: it is %s", ErrState, state)
	case over:
		return out, "", fmt.Errorf("%w: its end has passed", ErrState)
	case row.Allocated > sale.MaxUnits-add.Units:
		return out, "", fmt.Errorf("%w: a pool holds at most %d units", ErrState, sale.MaxUnits)
	}
	entry := store.LedgerEntry{Ref: ref, Op: store.OpAdd, Account: store.AccountSale, ActivityID: id, SKUID: add.SKU, Pool: add.Pool, Delta: add.Units}
	entries := []store.LedgerEntry{entry}
	if !shadow {
		missing, taken, err := takeInventory(ctx, tx, add.SKU, add.Pool, add.Units)
		if err != nil {
			return out, "", err
		}
		if missing != nil {
			return out, "", ShortageError{*missing}
		}
		if taken {
			entry.Account, entry.Delta = store.AccountInventory, -add.Units
			entries = append(entries, entry)
		}
	}
	if err := store.InsertLedger(ctx, tx, entries); err != nil {
		return out, "", err
	}
	if _, err := tx.ExecContext(ctx, "UPDATE activity_stock SET allocated = allocated + ?, available = available + ?, updated_at = UTC_TIMESTAMP(6) WHERE activity_id = ? AND sku_id = ? AND pool = ?",
		add.Units, add.Units, id, add.SKU, add.Pool); err != nil {
		return out, "", fmt.Errorf("add to pool: %w", err)
	}
	if winner == 0 {
		_, err = tx.ExecContext(ctx, "UPDATE activities SET warm_number = warm_number + 1, updated_at = UTC_TIMESTAMP(6) WHERE id = ?", id)
	} else {
		// With the epoch: a rebuild reads the amounts again, and then Redis must not be told a second time.
		subject = ref + "/" + strconv.FormatUint(epoch, 10)
		_, err = tx.ExecContext(ctx, "INSERT INTO compensations (kind, subject, activity_id, next_at, created_at) VALUES (?, ?, ?, UTC_TIMESTAMP(6) + INTERVAL ? SECOND, UTC_TIMESTAMP(6))",
			store.CompensateStockAdd, subject, id, int(addPatience/time.Second))
	}
	if err != nil {
		return out, "", fmt.Errorf("note addition: %w", err)
	}
	out = AddResult{Allocated: row.Allocated + add.Units, Available: row.Available + add.Units}
	return out, subject, audit.Write(ctx, tx, by, audit.Entry{
		Action: "stock.add", Subject: id, Result: "added",
		After: map[string]any{"op_id": add.Op, "sku_id": add.SKU, "pool": add.Pool, "quantity": add.Units},
	})
}

// finishAdd tells Redis of a committed addition and removes its note.
func (s *Service) finishAdd(ctx context.Context, subject string) error {
	ref, epoch, ok := cutLast(subject)
	id, op, found := strings.Cut(ref, "/add/")
	if !ok || !found {
		return fmt.Errorf("finish addition %q: not an addition", subject)
	}
	var add Addition
	err := s.st.SQL().QueryRowContext(ctx, "SELECT sku_id, pool, delta FROM stock_ledger WHERE ref = ? AND op = ? AND account = ?", ref, store.OpAdd, store.AccountSale).
		Scan(&add.SKU, &add.Pool, &add.Units)
	if err != nil {
		return fmt.Errorf("read addition %s: %w", ref, err)
	}
	d, err := s.Load(ctx, id)
	if err != nil {
		return err
	}
	if strconv.FormatUint(d.Epoch, 10) == epoch {
		a, err := d.Stock()
		if err != nil {
			return err
		}
		ctx, cancel := context.WithTimeout(ctx, addPatience/2)
		defer cancel()
		// After the end nobody buys from Redis any more; settlement goes by MySQL.
		if err := s.redis.AddStock(ctx, a, op, add.SKU, add.Pool, int(add.Units)); err != nil && !errors.Is(err, stock.ErrEnded) {
			return fmt.Errorf("finish addition %s: %w", ref, err)
		}
	}
	return s.st.Paid(ctx, store.CompensateStockAdd, []string{subject})
}

func cutLast(s string) (before, after string, ok bool) {
	i := strings.LastIndexByte(s, '/')
	if i < 0 {
		return s, "", false
	}
	return s[:i], s[i+1:], true
}

// finishAdds is what the loop does for additions whose caller could not tell Redis.
func (s *Service) finishAdds(ctx context.Context) error {
	var due []store.Compensation
	err := Bounded(ctx, func(ctx context.Context) (err error) {
		due, err = s.st.CompensationsDue(ctx, []string{store.CompensateStockAdd}, 100)
		return err
	})
	if err != nil {
		return err
	}
	var failed []error
	for _, c := range due {
		err := Bounded(ctx, func(ctx context.Context) error { return s.finishAdd(ctx, c.Subject) })
		if err != nil {
			failed = append(failed, err, Bounded(context.WithoutCancel(ctx), func(ctx context.Context) error {
				return s.st.CompensationFailed(ctx, c.Kind, []string{c.Subject}, err)
			}))
		}
	}
	return errors.Join(failed...)
}
