package stock

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"seckill/pkg/order"
)

// Reserve takes units for one order. Whoever asks at the same time shares the round trip, and within
// a bucket the script call (see batch), but never the outcome. The bucket is the one in the order id.
//
// The same order id, or the same idempotency key with the same digest, gets the first answer again
// with Replay set. An idempotency key whose order is gone never reserves again: ErrArchived.
//
// Errors: ErrActivityNotFound, ErrNotWarmed, *NotStartedError, ErrEnded, ErrPaused, ErrNotQualified,
// *LimitError, ErrSoldOut, ErrKeyReused, ErrInvalid, ErrCorrupt (nothing was taken in all of these);
// ErrUnavailable (nothing was taken), ErrUnknownOutcome (ask for the order id).
func (c *Client) Reserve(ctx context.Context, r Reservation) (Reserved, error) {
	out, err := c.reserve(ctx, &r)
	if err != nil {
		return Reserved{}, fmt.Errorf("reserve order %s: %w", r.ID, err)
	}
	return out, nil
}

func (c *Client) reserve(ctx context.Context, r *Reservation) (Reserved, error) {
	if err := r.validate(); err != nil {
		return Reserved{}, err
	}
	want := ask{r: r}
	if r.IdemKey != "" {
		want.digest = packDigest(r.IdemDigest)
	}
	if err := c.run(ctx, &item{ask: &want, work: 1}); err != nil {
		return Reserved{}, err
	}
	return c.outcome(ctx, &want)
}

// outcome reads what the script answered to one reservation.
func (c *Client) outcome(ctx context.Context, want *ask) (Reserved, error) {
	r := want.r
	if want.err != nil {
		return Reserved{}, want.err
	}
	if code, ok := want.reply.(string); ok {
		if pool, ok := strings.CutPrefix(code, "ok|"); ok {
			return want.reserved(pool)
		}
		return Reserved{}, refusal(r, []string{code})
	}
	reply, err := texts(want.reply)
	if err != nil {
		return Reserved{}, err
	}
	switch reply[0] {
	case "replay":
		if len(reply) != 7 {
			return Reserved{}, unknownCode("reserve", reply)
		}
		rec, err := parseRecord(r.ID, reply[1], reply[2], reply[3])
		if err != nil {
			return Reserved{}, err
		}
		if rec.User != r.User {
			return Reserved{}, fmt.Errorf("%w: the order id belongs to another user", ErrInvalid)
		}
		rec.IdemKey, rec.Reason, rec.RefundDue = reply[4], reply[5], reply[6] == "1"
		if rec.IdemKey != "" && rec.IdemKey == r.IdemKey {
			rec.IdemDigest = r.IdemDigest
		}
		return Reserved{Record: rec, Replay: true}, nil
	case "key":
		if len(reply) != 2 {
			return Reserved{}, unknownCode("reserve", reply)
		}
		return c.replayKey(ctx, r, reply[1])
	}
	return Reserved{}, refusal(r, reply)
}

// replayKey reads the order that the idempotency key was answered with. Its record's key is not
// known before the script has read the idempotency key, so this takes a second round trip.
func (c *Client) replayKey(ctx context.Context, r *Reservation, ulid string) (Reserved, error) {
	id := order.ID{Activity: r.ID.Activity, Bucket: r.ID.Bucket, ULID: ulid}
	rec, err := c.Order(ctx, id)
	if errors.Is(err, ErrOrderNotFound) {
		err = fmt.Errorf("idempotency key of order %s: %w", id, ErrArchived)
	}
	if err != nil {
		return Reserved{}, err
	}
	rec.IdemKey, rec.IdemDigest = r.IdemKey, r.IdemDigest
	return Reserved{Record: rec, Replay: true}, nil
}

// validate refuses what must not get into key names. Quantity is left to the script, which every
// path goes through.
func (r *Reservation) validate() error {
	switch {
	case !order.ValidUserID(r.User), !order.ValidSKUID(r.SKU):
		return fmt.Errorf("%w: user or sku", ErrInvalid)
	case !order.ValidPool(r.Region), len(r.Pools) == 0:
		return fmt.Errorf("%w: region or pools", ErrInvalid)
	case r.IdemKey != "" && (!order.ValidIdempotencyKey(r.IdemKey) || r.IdemDigest == ""):
		return fmt.Errorf("%w: idempotency key", ErrInvalid)
	case !order.ValidActivityID(r.ID.Activity), len(r.ID.ULID) != 26, r.ID.Bucket < 0, r.ID.Bucket >= order.MaxBuckets:
		return fmt.Errorf("%w: order id", ErrInvalid)
	}
	for _, p := range r.Pools {
		if !order.ValidPool(p) {
			return fmt.Errorf("%w: pool", ErrInvalid)
		}
	}
	return nil
}

// refusal maps the script's other codes.
func refusal(r *Reservation, reply []string) error {
	switch reply[0] {
	case "invalid":
		return ErrInvalid
	case "not_found":
		return ErrActivityNotFound
	case "not_warmed":
		return ErrNotWarmed
	case "ended":
		return ErrEnded
	case "paused":
		return ErrPaused
	case "not_qualified":
		return ErrNotQualified
	case "sold_out":
		return ErrSoldOut
	case "key_reused":
		return ErrKeyReused
	case "corrupt":
		return corrupt(reply)
	case "limit":
		e := &LimitError{OrderIDs: make([]string, 0, len(reply)-1)}
		for _, u := range reply[1:] {
			e.OrderIDs = append(e.OrderIDs, order.ID{Activity: r.ID.Activity, Bucket: r.ID.Bucket, ULID: u}.String())
		}
		return e
	case "not_started":
		if len(reply) == 3 {
			start, err1 := strconv.ParseInt(reply[1], 10, 64)
			now, err2 := strconv.ParseInt(reply[2], 10, 64)
			if err1 == nil && err2 == nil {
				return &NotStartedError{StartsAt: time.UnixMilli(start).UTC(), Now: time.UnixMilli(now).UTC()}
			}
		}
	}
	return unknownCode("reserve", reply)
}
