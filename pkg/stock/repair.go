package stock

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"

	"github.com/redis/go-redis/v9"

	"seckill/pkg/order"
)

// ErrChanged: the bucket changed since it was read; compare again (R8).
var ErrChanged = errors.New("bucket changed since it was read")

// Snapshot is one bucket as reconciliation compares it: the version was read before everything else,
// so a repair that finds the version unchanged knows that all of it still holds (R8).
type Snapshot struct {
	Bucket  int
	Version string
	Warm    uint64                    // whose stock it is; 0: only announced
	Open    bool                      // nothing is sold from a closed bucket, and nothing in it may be compared
	Stock   map[string]map[string]int // sku → pool → units; a missing key is absent
	Waiting []order.ID
	Parked  []order.ID
}

// Version reads a bucket's version. ErrActivityNotFound: no hash.
func (c *Client) Version(ctx context.Context, activity string, bucket int) (string, error) {
	cmd := redis.NewStringCmd(context.Background(), "hget", c.keys(activity, bucket).activity(), "version")
	if err := c.submit(ctx, cmd); err != nil {
		return "", fmt.Errorf("read version of activity %s bucket %d: %w", activity, bucket, err)
	}
	v, err := cmd.Result()
	if errors.Is(err, redis.Nil) {
		err = ErrActivityNotFound
	}
	if err != nil {
		return "", fmt.Errorf("read version of activity %s bucket %d: %w", activity, bucket, err)
	}
	return v, nil
}

// Snapshot reads version, stock, outbox and parked set of one bucket, in this order. The records come
// from Records or EachRecord, read after the version.
func (c *Client) Snapshot(ctx context.Context, a *Activity, bucket int) (Snapshot, error) {
	s := Snapshot{Bucket: bucket, Stock: make(map[string]map[string]int)}
	k := c.keys(a.ID, bucket)
	hash := redis.NewSliceCmd(context.Background(), "hmget", k.activity(), "version", "warm", "open")
	err := c.submit(ctx, hash)
	if err == nil {
		err = hash.Err()
	}
	if err != nil {
		return Snapshot{}, fmt.Errorf("read version of activity %s bucket %d: %w", a.ID, bucket, err)
	}
	fields := make([]string, 3)
	for i, v := range hash.Val() {
		fields[i], _ = v.(string)
	}
	if fields[0] == "" {
		return Snapshot{}, fmt.Errorf("read version of activity %s bucket %d: %w", a.ID, bucket, ErrActivityNotFound)
	}
	if s.Warm, err = strconv.ParseUint(fields[1], 10, 64); err != nil {
		return Snapshot{}, fmt.Errorf("read version of activity %s bucket %d: %w: warm", a.ID, bucket, ErrCorrupt)
	}
	s.Version, s.Open = fields[0], s.Warm > 0 && fields[2] == fields[1]
	for _, item := range a.Items {
		for pool := range item.Pools {
			cmd := get(k.stock(item.SKU, pool))
			if err := c.submit(ctx, cmd); err != nil {
				return Snapshot{}, fmt.Errorf("read stock of activity %s bucket %d: %w", a.ID, bucket, err)
			}
			text, err := cmd.Result()
			if errors.Is(err, redis.Nil) {
				continue
			}
			n := 0
			if err == nil {
				n, err = parseUnits(text)
			}
			if err != nil {
				return Snapshot{}, fmt.Errorf("read stock of activity %s bucket %d: %w", a.ID, bucket, err)
			}
			if s.Stock[item.SKU] == nil {
				s.Stock[item.SKU] = make(map[string]int)
			}
			s.Stock[item.SKU][pool] = n
		}
	}
	if s.Waiting, s.Parked, err = c.OutboxIDs(ctx, a.ID, bucket); err != nil {
		return Snapshot{}, err
	}
	return s, nil
}

// Records reads orders by id, all of one bucket, in one round trip per hundred; unknown ones are left
// out.
func (c *Client) Records(ctx context.Context, activity string, bucket int, ids []order.ID) ([]Record, error) {
	var out []Record
	for part := range slices.Chunk(ids, 100) {
		ulids := make([]string, len(part))
		for i, id := range part {
			ulids[i] = id.ULID
		}
		recs, err := c.records(ctx, activity, bucket, ulids)
		if err != nil {
			return nil, fmt.Errorf("read records of activity %s bucket %d: %w", activity, bucket, err)
		}
		out = append(out, recs...)
	}
	return out, nil
}

// Repair is what reconciliation writes into one bucket (R8).
type Repair struct {
	// Records that MySQL has and Redis lost. They come back with their share of the limit; stock is
	// not touched by them, set it below. A record that is there stays as it is. At most 32 at once.
	Records []Record
	// Stock to set, sku → pool → units. A missing key is not made: ErrNotWarmed.
	Stock map[string]map[string]int
}

// Repair writes r into a bucket if its version is still the one that was read, and returns the new
// version. ErrChanged: something changed meanwhile, nothing was written. ErrArchived: the sale is
// settled and left alone.
func (c *Client) Repair(ctx context.Context, a *Activity, bucket int, version string, r Repair) (string, error) {
	fail := func(err error) (string, error) {
		return "", fmt.Errorf("repair activity %s bucket %d: %w", a.ID, bucket, err)
	}
	if len(r.Records) > chunk {
		return fail(fmt.Errorf("%w: %d records at once", ErrInvalid, len(r.Records)))
	}
	k := c.keys(a.ID, bucket)
	keys := []string{k.activity(), k.end()}
	args := []string{version, strconv.Itoa(len(r.Records)), ""}
	for _, rec := range r.Records {
		if rec.ID.Activity != a.ID || rec.ID.Bucket != bucket {
			return fail(fmt.Errorf("%w: order %s is of another bucket", ErrInvalid, rec.ID))
		}
		f, err := rec.fields()
		if err != nil {
			return fail(err)
		}
		keys = append(keys, k.order(rec.ID), k.limit(rec.User))
		args = append(args, f...)
	}
	n := 0
	for sku, pools := range r.Stock {
		for pool, units := range pools {
			if units < 0 {
				return fail(fmt.Errorf("%w: %d units", ErrInvalid, units))
			}
			keys = append(keys, k.stock(sku, pool))
			args = append(args, strconv.Itoa(units))
			n++
		}
	}
	args[2] = strconv.Itoa(n)
	reply, err := c.one(ctx, c.scripts.repair.call(keys, args...),
		map[string]error{"changed": ErrChanged, "settled": ErrArchived, "no_stock": ErrNotWarmed})
	if err != nil {
		return fail(err)
	}
	if len(reply) != 2 {
		return fail(unknownCode("repair", reply))
	}
	return reply[1], nil
}

// fields are the arguments by which repair and rebuild scripts write a record: ULID, s, o, x, w, d and
// the quantity that counts against the limit.
func (r Record) fields() ([]string, error) {
	s, err := statusCode(r.Status)
	if err != nil {
		return nil, err
	}
	if !order.ValidUserID(r.User) || !order.ValidSKUID(r.SKU) || !order.ValidPool(r.Pool) || r.Quantity < 1 || len(r.ID.ULID) != 26 {
		return nil, fmt.Errorf("%w: order %s", ErrInvalid, r.ID)
	}
	due, counts := "", "0"
	if r.RefundDue {
		due = "1"
	}
	if r.Status.Live() {
		counts = strconv.Itoa(r.Quantity)
	}
	return []string{r.ID.ULID, s, content(r.User, r.SKU, r.Pool, r.Quantity), frozen(r.Order), r.Reason, due, counts}, nil
}

// A rebuild after a total loss (R10) goes: PrepareRebuild, WipeRebuild, WriteRebuild for every order
// that MySQL or a dead letter holds, Qualify, OpenWarm, SetPaused; all under the pool rows' locks, with the
// sale paused and the queues drained by the caller.

// Added is an operation of AddStock.
type Added struct {
	Op    string
	Units int
}

// maxAdded bounds what one script call carries.
const maxAdded = 2000

// PrepareRebuild closes every bucket under a number later than any warm-up's, with the catalogue
// (paused, and with its new epoch, as a says) and the stock given for each bucket, sku and pool. It is
// the only way to overwrite live stock. added are the operations of AddStock that the amounts hold
// already: one that comes late adds nothing. ErrStaleWarm: a later attempt was here; ErrAlreadyWarm: this
// one was opened already; ErrEnded: the sale is settled.
func (c *Client) PrepareRebuild(ctx context.Context, a *Activity, number uint64, amounts []map[string]map[string]int, added []Added) error {
	if len(added) > maxAdded {
		return fmt.Errorf("rebuild activity %s: %w: %d additions of stock", a.ID, ErrInvalid, len(added))
	}
	return c.prepare(ctx, "rebuild", a, number, amounts, added)
}

// WipeRebuild removes what an earlier life left in the buckets of a rebuild: records, limits,
// qualifications, idempotency keys, outbox and parked set.
func (c *Client) WipeRebuild(ctx context.Context, a *Activity, number uint64) error {
	fail := func(err error) error { return fmt.Errorf("wipe activity %s: %w", a.ID, err) }
	wipe := func(bucket int, names []string) error {
		call := c.scripts.rebuildWipe.call(append([]string{c.keys(a.ID, bucket).activity()}, names...), strconv.FormatUint(number, 10))
		_, err := c.one(ctx, call, map[string]error{"other": ErrStaleWarm})
		return err
	}
	for _, kind := range []string{kindOrder, kindLimit, kindQualify, kindIdem} {
		if err := c.eachKey(ctx, kind, a.ID, func(bucket int, rest []string) error {
			return wipe(bucket, c.full(kind, a.ID, bucket, rest))
		}); err != nil {
			return fail(err)
		}
	}
	for b := range a.buckets() {
		if err := wipe(b, []string{c.keys(a.ID, b).outbox(), c.keys(a.ID, b).parked()}); err != nil {
			return fail(err)
		}
	}
	return nil
}

// Rebuilt is an order for WriteRebuild. Reserved ones go into the outbox, or into the parked set.
type Rebuilt struct {
	Record
	Parked bool
}

// WriteRebuild writes orders into the closed buckets of a rebuild, with limits, idempotency keys and
// outbox entries; stock is not touched. It may be repeated.
func (c *Client) WriteRebuild(ctx context.Context, a *Activity, number uint64, rs []Rebuilt) error {
	groups := group(len(rs), func(i int) order.ID { return rs[i].ID })
	calls := make([]*scriptCmd, len(groups))
	for g, idx := range groups {
		k := c.keys(a.ID, rs[idx[0]].ID.Bucket)
		keys := []string{k.activity(), k.outbox(), k.parked()}
		args := []string{strconv.FormatUint(number, 10)}
		for _, i := range idx {
			r := rs[i]
			if r.ID.Activity != a.ID {
				return fmt.Errorf("rebuild activity %s: %w: order %s", a.ID, ErrInvalid, r.ID)
			}
			f, err := r.fields()
			if err != nil {
				return fmt.Errorf("rebuild activity %s: %w", a.ID, err)
			}
			idem, digest := k.order(r.ID), ""
			if r.IdemKey != "" {
				idem, digest = k.idem(r.User, r.IdemKey), packDigest(r.IdemDigest)
			}
			keys = append(keys, k.order(r.ID), k.limit(r.User), idem)
			args = append(args, f...)
			args = append(args, r.IdemKey, digest, millis(r.ReservedAt), flag(r.Parked))
		}
		calls[g] = c.scripts.rebuildRecords.call(keys, args...)
	}
	return c.runAll(ctx, "rebuild activity "+a.ID, calls, map[string]error{"other": ErrStaleWarm})
}
