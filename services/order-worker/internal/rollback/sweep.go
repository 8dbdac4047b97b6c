package rollback

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"time"

	"seckill/pkg/messaging"
	"seckill/pkg/order"
	"seckill/pkg/stock"
	"seckill/services/order-worker/internal/follow"
	"seckill/services/order-worker/internal/store"
)

// SweepConfig says how patient the sweeps are. The zero value of each field means its default.
type SweepConfig struct {
	// Interval between two rounds. Default 5 s.
	Interval time.Duration `mapstructure:"interval"`
	// Grace is how long after its payment time an order is left to its own message. Default 10 s.
	Grace time.Duration `mapstructure:"grace"`
	// PaymentAge is how long money may wait for its order before it is due for refund. Default 15 min.
	PaymentAge time.Duration `mapstructure:"payment_age"`
}

// WithDefaults returns c with every unset field filled in.
func (c SweepConfig) WithDefaults() SweepConfig {
	if c.Interval <= 0 {
		c.Interval = 5 * time.Second
	}
	if c.Grace <= 0 {
		c.Grace = 10 * time.Second
	}
	if c.PaymentAge <= 0 {
		c.PaymentAge = 15 * time.Minute
	}
	return c
}

// Sweeper finds what lost messages have left behind: pending orders past their payment time (C10),
// releases that were never carried out (C9), money whose order never came (R5). Several may run at
// once; rows are locked, and compensations are handed out.
type Sweeper struct {
	h   *Handler
	cfg SweepConfig
	log *slog.Logger

	after store.Due // how far Orders has come: what MySQL refuses must not be met first for ever
}

// NewSweeper makes a Sweeper that works through h.
func NewSweeper(h *Handler, cfg SweepConfig, log *slog.Logger) *Sweeper {
	return &Sweeper{h: h, cfg: cfg.WithDefaults(), log: log}
}

// Run sweeps until ctx ends. The three sweeps run beside each other: one that meets a store that is
// away does not hold up the others.
func (s *Sweeper) Run(ctx context.Context) {
	var wg sync.WaitGroup
	for name, sweep := range map[string]func(context.Context) (bool, error){
		"orders": s.Orders, "compensations": s.Compensations, "payments": s.Payments,
	} {
		wg.Add(1)
		go func() {
			defer wg.Done()
			s.loop(ctx, name, sweep)
		}()
	}
	wg.Wait()
}

func (s *Sweeper) loop(ctx context.Context, name string, sweep func(context.Context) (bool, error)) {
	for {
		wait := s.cfg.Interval/2 + time.Duration(rand.Int64N(int64(s.cfg.Interval))) //nolint:gosec // jitter
		round, cancel := context.WithTimeout(ctx, batchTimeout)
		more, err := sweep(round)
		cancel()
		if err != nil && ctx.Err() == nil {
			s.log.WarnContext(ctx, "sweep could not finish", "sweep", name, "error", err)
		}
		if err == nil && more {
			wait = time.Millisecond
		}
		t := time.NewTimer(wait)
		select {
		case <-ctx.Done():
			t.Stop()
			return
		case <-t.C:
		}
	}
}

// Orders cancels pending orders whose payment time has been over for the grace; more says that there
// may be others. It is called by one goroutine at a time.
func (s *Sweeper) Orders(ctx context.Context) (more bool, err error) {
	due, err := s.h.st.OrdersDue(ctx, "", s.cfg.Grace, s.after, maxOrders)
	if err != nil {
		return false, err
	}
	more = len(due) == maxOrders
	if s.after = (store.Due{}); more {
		s.after = due[len(due)-1]
	}
	if len(due) == 0 {
		return false, nil
	}
	s.log.WarnContext(ctx, "sweep takes back orders whose payment time is over", "orders", len(due))
	refused, err := s.h.cancelDue(ctx, due, reasonSweep)
	if refused != nil && err == nil {
		s.log.ErrorContext(ctx, "orders stay pending", "error", refused)
	}
	return more, err
}

// CancelDue takes back the orders of one sale whose payment time is over, and says how many were found
// (design §6, step 4). What MySQL refuses is an error once all others are done.
func (h *Handler) CancelDue(ctx context.Context, activity string) (int, error) {
	total := 0
	var refused error
	var after store.Due
	for {
		due, err := h.st.OrdersDue(ctx, activity, 0, after, maxOrders)
		if err != nil || len(due) == 0 {
			return total, errors.Join(err, refused)
		}
		r, err := h.cancelDue(ctx, due, reasonExpired)
		if refused == nil {
			refused = r
		}
		if err != nil {
			return total, err
		}
		total += len(due)
		after = due[len(due)-1]
	}
}

// cancelDue cancels what is over. refused tells of orders that MySQL does not let go of; err ended it.
func (h *Handler) cancelDue(ctx context.Context, due []store.Due, label string) (refused, err error) {
	asks := make([]ask, len(due))
	for i, d := range due {
		asks[i] = ask{id: d.ID, expiry: true, reason: order.ReasonPaymentTimeout, label: label}
	}
	b, err := store.Each(asks, maxOrders, func(page []ask) error { return h.cancel(ctx, page) })
	if len(b) > 0 {
		h.rollbacks.WithLabelValues(label, resultBlocked).Add(float64(len(b)))
		refused = fmt.Errorf("mysql refuses to take back %d orders, among them %s: %w", len(b), b[0].Of.id, b[0].Err)
	}
	return refused, err
}

// Compensations carries out what committed transactions still owe.
func (s *Sweeper) Compensations(ctx context.Context) (more bool, err error) {
	const limit = 64 // each may stand for a batch
	due, err := s.h.st.CompensationsDue(ctx, []string{store.CompensateRelease, store.CompensateRefundDue}, limit)
	if err != nil || len(due) == 0 {
		return false, err
	}
	return len(due) == limit, s.h.follow.Compensate(ctx, due)
}

// Payments ends the wait of money for orders that never came: the order gets a tombstone, so that it
// cannot come to life afterwards, and the money is due for refund.
func (s *Sweeper) Payments(ctx context.Context) (more bool, err error) {
	const limit = 100
	kept, err := s.h.st.OrphanPayments(ctx, s.cfg.PaymentAge, limit)
	if err != nil {
		return false, err
	}
	var errs []error
	for _, p := range kept {
		err := s.orphan(ctx, p)
		switch {
		case err == nil:
		case store.Refuses(err), errors.Is(err, order.ErrInvalidID):
			// It must not hold up the money of the others: it goes to the end of the line.
			errs = append(errs, err, s.h.st.TouchPayment(ctx, p.TransactionID))
		default:
			return false, errors.Join(append(errs, err)...)
		}
	}
	return len(kept) == limit, errors.Join(errs...)
}

func (s *Sweeper) orphan(ctx context.Context, p *store.Payment) error {
	id, err := order.ParseID(p.OrderID)
	if err != nil {
		return fmt.Errorf("payment %s: %w", p.TransactionID, err)
	}
	rec, err := s.h.records.Order(ctx, id)
	switch {
	case errors.Is(err, stock.ErrOrderNotFound), errors.Is(err, stock.ErrArchived), errors.Is(err, stock.ErrCorrupt):
	case err != nil:
		return fmt.Errorf("read record of order %s: %w", p.OrderID, err)
	case rec.Status == order.Reserved:
		// On its way: the relay publishes it again and again, or it is parked and waits for an
		// operator. The buyer has paid for it, so it is not taken from him.
		return s.h.st.TouchPayment(ctx, p.TransactionID)
	}
	var row *store.Order
	var wrote bool
	err = s.h.st.InTx(ctx, func(tx *store.Tx) error {
		wrote = false
		rows, err := store.Orders(ctx, tx, []string{p.OrderID}, true)
		if err != nil {
			return err
		}
		if row = rows[p.OrderID]; row != nil {
			return nil
		}
		if row, err = tombstone(ctx, tx, id, p); err != nil {
			return err
		}
		wrote = true
		if err := store.InsertOrders(ctx, tx, []*store.Order{row}); err != nil {
			return err
		}
		return store.Owe(ctx, tx, store.CompensateRelease, []*store.Order{row}, follow.CompensationDelay())
	})
	if store.IsDuplicate(err) {
		return nil // its order has come just now, and applies the payment itself
	}
	if err != nil {
		return fmt.Errorf("write tombstone of order %s: %w", p.OrderID, err)
	}
	if wrote {
		s.log.ErrorContext(ctx, "payment for an order that never came, refund due", "order_id", p.OrderID, "transaction_id", p.TransactionID)
		s.h.rollbacks.WithLabelValues(reasonSweep, resultTombstone).Inc()
		if err := s.h.follow.Release(ctx, []*store.Order{row}, nil); err != nil {
			return err
		}
	}
	if err := s.h.follow.Kept(ctx, []string{p.OrderID}); err != nil {
		return err
	}
	return s.h.st.TouchPayment(ctx, p.TransactionID) // if it is kept still, it is not the first any more
}

// tombstone is a cancelled row with as much content as the payment brought along.
func tombstone(ctx context.Context, tx *store.Tx, id order.ID, p *store.Payment) (*store.Order, error) {
	if len(p.Content) > 0 {
		m := messaging.Message{Key: messaging.KeyOrderReserved, Body: p.Content}
		if good, _, err := messaging.DecodeOrderReserved(m); err == nil && len(good) == 1 && good[0].ID == id {
			return store.NewOrder(good[0], order.Cancelled, order.ReasonOrderLost, store.OriginTombstone)
		}
	}
	now, err := tx.Now(ctx)
	if err != nil {
		return nil, err
	}
	return store.BareOrder(id, order.Cancelled, order.ReasonOrderLost, now), nil
}
