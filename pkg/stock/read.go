package stock

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"seckill/pkg/order"
)

// Commands of the reads that go through submit. Their context only labels them; the round trip has
// its own deadline.
func hgetall(key string) *redis.MapStringStringCmd {
	return redis.NewMapStringStringCmd(context.Background(), "hgetall", key)
}

func get(key string) *redis.StringCmd {
	return redis.NewStringCmd(context.Background(), "get", key)
}

func mget(keys ...string) *redis.SliceCmd {
	args := make([]any, 0, 1+len(keys))
	args = append(args, "mget")
	for _, k := range keys {
		args = append(args, k)
	}
	return redis.NewSliceCmd(context.Background(), args...)
}

// nilOK drops the error of a key that does not exist.
func nilOK(err error) error {
	if errors.Is(err, redis.Nil) {
		return nil
	}
	return err
}

const (
	markEnded   = "ended"
	markSettled = "settled"
)

// Order reads an order: its record, else the receipt that is left of it, else ErrArchived when the
// sale is settled, else ErrOrderNotFound. One round trip. IdemDigest is not filled in.
func (c *Client) Order(ctx context.Context, id order.ID) (Record, error) {
	k := c.keys(id.Activity, id.Bucket)
	rec, receipt, mark := hgetall(k.order(id)), hgetall(k.receipt(id)), get(k.end())
	if err := c.submit(ctx, rec, receipt, mark); err != nil {
		return Record{}, fmt.Errorf("read order %s: %w", id, err)
	}
	if err := errors.Join(rec.Err(), receipt.Err(), nilOK(mark.Err())); err != nil {
		return Record{}, fmt.Errorf("read order %s: %w", id, err)
	}
	switch {
	case len(rec.Val()) > 0:
		return parseHash(id, rec.Val())
	case len(receipt.Val()) > 0:
		r, err := parseHash(id, receipt.Val())
		r.Receipt = true
		return r, err
	case mark.Val() == markSettled:
		return Record{}, fmt.Errorf("read order %s: %w", id, ErrArchived)
	}
	return Record{}, fmt.Errorf("read order %s: %w", id, ErrOrderNotFound)
}

// Answered reports whether a request with this idempotency key was answered with an order. The read
// shares its round trip with whatever else is under way.
func (c *Client) Answered(ctx context.Context, activity string, bucket int, user, key string) (bool, error) {
	if !order.ValidActivityID(activity) || !order.ValidUserID(user) || !order.ValidIdempotencyKey(key) {
		return false, fmt.Errorf("look up idempotency key: %w", ErrInvalid)
	}
	cmd := redis.NewIntCmd(context.Background(), "exists", c.keys(activity, bucket).idem(user, key))
	if err := c.submit(ctx, cmd); err != nil {
		return false, fmt.Errorf("look up idempotency key: %w", err)
	}
	if err := cmd.Err(); err != nil {
		return false, fmt.Errorf("look up idempotency key: %w", err)
	}
	return cmd.Val() > 0, nil
}

// Mine reads a user's orders in one bucket, oldest first: those that count against his limit, and the
// released ones (of a user with more than 64 orders not all of these).
func (c *Client) Mine(ctx context.Context, activity string, bucket int, user string) ([]Record, error) {
	fail := func(err error) ([]Record, error) {
		return nil, fmt.Errorf("read orders of a user in activity %s: %w", activity, err)
	}
	k := c.keys(activity, bucket)
	limit := hgetall(k.limit(user))
	if err := c.submit(ctx, limit); err != nil {
		return fail(err)
	}
	if err := limit.Err(); err != nil {
		return fail(err)
	}
	var ulids []string
	for f := range limit.Val() {
		if f != "held" {
			ulids = append(ulids, f)
		}
	}
	slices.Sort(ulids)
	recs, err := c.records(ctx, activity, bucket, ulids)
	if err != nil {
		return fail(err)
	}
	return recs, nil
}

// records reads many records of one bucket in one round trip; the missing ones are left out.
func (c *Client) records(ctx context.Context, activity string, bucket int, ulids []string) ([]Record, error) {
	if len(ulids) == 0 {
		return nil, nil
	}
	k := c.keys(activity, bucket)
	ids := make([]order.ID, len(ulids))
	reads := make([]*redis.MapStringStringCmd, len(ulids))
	cmds := make([]redis.Cmder, len(ulids))
	for i, u := range ulids {
		ids[i] = order.ID{Activity: activity, Bucket: bucket, ULID: u}
		reads[i] = hgetall(k.order(ids[i]))
		cmds[i] = reads[i]
	}
	if err := c.submit(ctx, cmds...); err != nil {
		return nil, err
	}
	out := make([]Record, 0, len(ulids))
	var errs []error
	for i, read := range reads {
		switch {
		case read.Err() != nil:
			errs = append(errs, read.Err())
		case len(read.Val()) > 0:
			r, err := parseHash(ids[i], read.Val())
			if err != nil {
				errs = append(errs, err)
				continue
			}
			out = append(out, r)
		}
	}
	return out, errors.Join(errs...)
}

// Paying says of which orders money is on its way to MySQL, and since when by Redis' clock (MarkPaying).
// What Redis does not know, or somebody has overwritten, is left out. One round trip.
func (c *Client) Paying(ctx context.Context, ids []order.ID) (map[order.ID]time.Time, error) {
	if len(ids) == 0 {
		return nil, nil //nolint:nilnil // no orders, no payments
	}
	reads := make([]redis.Cmder, len(ids))
	for i, id := range ids {
		reads[i] = redis.NewStringCmd(context.Background(), "hget", c.keys(id.Activity, id.Bucket).order(id), "m")
	}
	if err := c.submit(ctx, reads...); err != nil {
		return nil, fmt.Errorf("read payments on their way: %w", err)
	}
	var out map[order.ID]time.Time
	for i, id := range ids {
		since, err := reads[i].(*redis.StringCmd).Result()
		if err = nilOK(err); err != nil && !errors.Is(err, ErrCorrupt) {
			return nil, fmt.Errorf("read payments on their way: %w", err)
		}
		if ms, err := strconv.ParseInt(since, 10, 64); err == nil {
			if out == nil {
				out = map[order.ID]time.Time{}
			}
			out[id] = time.UnixMilli(ms).UTC()
		}
	}
	return out, nil
}

// Outbox reads up to limit orders of one bucket that are not known to be in MySQL and were reserved
// before the given time, oldest first, complete with their idempotency digests. Entries without a
// record (Redis lost it) are left out. A corrupt record does not hide the others: they are returned
// together with the error.
func (c *Client) Outbox(ctx context.Context, activity string, bucket int, before time.Time, limit int) ([]Record, error) {
	return c.waiting(ctx, c.keys(activity, bucket).outbox(), activity, bucket, before, limit)
}

// Parked reads like Outbox, from the parked set.
func (c *Client) Parked(ctx context.Context, activity string, bucket int, before time.Time, limit int) ([]Record, error) {
	return c.waiting(ctx, c.keys(activity, bucket).parked(), activity, bucket, before, limit)
}

func (c *Client) waiting(ctx context.Context, key, activity string, bucket int, before time.Time, limit int) ([]Record, error) {
	fail := func(err error) error {
		return fmt.Errorf("read waiting orders of activity %s bucket %d: %w", activity, bucket, err)
	}
	walk := redis.NewStringSliceCmd(ctx, "zrangebyscore", key, "-inf", "("+millis(before), "limit", 0, limit)
	if err := c.submit(ctx, walk); err != nil {
		return nil, fail(err)
	}
	if err := walk.Err(); err != nil {
		return nil, fail(err)
	}
	recs, err := c.records(ctx, activity, bucket, walk.Val())
	if err != nil {
		err = fail(err)
	}
	if derr := c.Digests(ctx, recs); derr != nil {
		return nil, fail(derr)
	}
	return recs, err
}

// Digests fills in what the idempotency keys say of orders that are reserved; only what is published needs
// it, so the record does not hold it twice.
func (c *Client) Digests(ctx context.Context, recs []Record) error {
	var reads []redis.Cmder
	var at []int
	for i, r := range recs {
		if r.IdemKey != "" {
			reads = append(reads, get(c.keys(r.ID.Activity, r.ID.Bucket).idem(r.User, r.IdemKey)))
			at = append(at, i)
		}
	}
	if len(reads) == 0 {
		return nil
	}
	if err := c.submit(ctx, reads...); err != nil {
		return err
	}
	for j, i := range at {
		v, err := reads[j].(*redis.StringCmd).Result()
		if err = nilOK(err); err != nil && !errors.Is(err, ErrCorrupt) {
			return err
		}
		// A key that somebody has overwritten says nothing: its order goes on, without an answer for a
		// second click, and holds up no other.
		if len(v) > 26 {
			recs[i].IdemDigest = unpackDigest(v[26:])
		}
	}
	return nil
}

// OutboxStats is what waits in one bucket.
type OutboxStats struct {
	Waiting int       // in the outbox
	Parked  int       // their message lies in the dead letters
	Oldest  time.Time // of the outbox; zero when it is empty
}

// OutboxStats counts what waits in one bucket, in one round trip.
func (c *Client) OutboxStats(ctx context.Context, activity string, bucket int) (OutboxStats, error) {
	k := c.keys(activity, bucket)
	waiting := redis.NewIntCmd(ctx, "zcard", k.outbox())
	parked := redis.NewIntCmd(ctx, "zcard", k.parked())
	oldest := redis.NewZSliceCmd(ctx, "zrange", k.outbox(), 0, 0, "withscores")
	err := c.submit(ctx, waiting, parked, oldest)
	if err == nil {
		err = errors.Join(waiting.Err(), parked.Err(), oldest.Err())
	}
	if err != nil {
		return OutboxStats{}, fmt.Errorf("count outbox of activity %s bucket %d: %w", activity, bucket, err)
	}
	s := OutboxStats{Waiting: int(waiting.Val()), Parked: int(parked.Val())}
	if z := oldest.Val(); len(z) > 0 {
		s.Oldest = time.UnixMilli(int64(z[0].Score)).UTC()
	}
	return s, nil
}

// Levels reads what is left, sku → pool → units over all buckets, one MGET per bucket in one
// pipeline. A pool whose key is missing in any bucket is absent: "not warmed", never "nothing left".
func (c *Client) Levels(ctx context.Context, a *Activity) (map[string]map[string]int, error) {
	type cell struct{ sku, pool string }
	var cells []cell
	for _, item := range a.Items {
		for pool := range item.Pools {
			cells = append(cells, cell{item.SKU, pool})
		}
	}
	out := make(map[string]map[string]int, len(a.Items))
	if len(cells) == 0 {
		return out, nil
	}
	reads := make([]redis.Cmder, a.buckets())
	for b := range reads {
		names := make([]string, len(cells))
		k := c.keys(a.ID, b)
		for i, x := range cells {
			names[i] = k.stock(x.sku, x.pool)
		}
		reads[b] = mget(names...)
	}
	if err := c.submit(ctx, reads...); err != nil {
		return nil, fmt.Errorf("read stock of activity %s: %w", a.ID, err)
	}
	var gaps []cell
	for _, read := range reads {
		vals, err := read.(*redis.SliceCmd).Result()
		if err != nil {
			return nil, fmt.Errorf("read stock of activity %s: %w", a.ID, err)
		}
		for i, v := range vals {
			s, ok := v.(string)
			if !ok {
				gaps = append(gaps, cells[i])
				continue
			}
			n, err := parseUnits(s)
			if err != nil {
				return nil, fmt.Errorf("read stock of activity %s: %w", a.ID, err)
			}
			if out[cells[i].sku] == nil {
				out[cells[i].sku] = make(map[string]int)
			}
			out[cells[i].sku][cells[i].pool] += n
		}
	}
	for _, gap := range gaps {
		delete(out[gap.sku], gap.pool)
	}
	return out, nil
}

// infoField finds one field in the text of INFO.
func infoField(info, name string) string {
	for line := range strings.Lines(info) {
		if v, ok := strings.CutPrefix(line, name+":"); ok {
			return strings.TrimSpace(v)
		}
	}
	return ""
}
