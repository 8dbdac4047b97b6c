package stock

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"seckill/pkg/order"
)

var (
	// ErrFenced: a later settlement has taken over; the caller must stop.
	ErrFenced = errors.New("a later settlement has taken over")
	// ErrNoMarker: the end marker is missing; it has to be written again before anything is removed.
	ErrNoMarker = errors.New("end marker is missing")
)

// MarkerTTL is the shortest life of a marker after the sale is settled.
const MarkerTTL = 24 * time.Hour

// Marker is the end marker of one bucket.
type Marker struct {
	Ended   bool
	Settled bool
	TTL     time.Duration // 0: none, which is right until the sale is settled
}

// Markers reads the end markers of all buckets in one round trip.
func (c *Client) Markers(ctx context.Context, a *Activity) ([]Marker, error) {
	marks := make([]*redis.StringCmd, a.buckets())
	ttls := make([]*redis.DurationCmd, a.buckets())
	cmds := make([]redis.Cmder, 0, 2*a.buckets())
	for b := range marks {
		k := c.keys(a.ID, b)
		marks[b] = get(k.end())
		ttls[b] = redis.NewDurationCmd(context.Background(), time.Millisecond, "pttl", k.end())
		cmds = append(cmds, marks[b], ttls[b])
	}
	if err := c.submit(ctx, cmds...); err != nil {
		return nil, fmt.Errorf("read end markers of activity %s: %w", a.ID, err)
	}
	out := make([]Marker, a.buckets())
	for b := range out {
		if err := errors.Join(nilOK(marks[b].Err()), ttls[b].Err()); err != nil {
			return nil, fmt.Errorf("read end markers of activity %s: %w", a.ID, err)
		}
		v := marks[b].Val()
		out[b] = Marker{Ended: v != "", Settled: v == markSettled, TTL: max(ttls[b].Val(), 0)}
	}
	return out, nil
}

// AddStock adds units to a pool of an open sale, split over the buckets like a warm-up (R6). op names
// the operation: repeating it adds nothing, and finishes what an interrupted call left undone.
//
// ErrEnded, ErrActivityNotFound; ErrNotWarmed: the sale is not open, or a stock key is missing and is
// not made again. Buckets that could be served were served: repeat with the same op.
func (c *Client) AddStock(ctx context.Context, a *Activity, op, sku, pool string, units int) error {
	if !order.ValidTransactionID(op) || !order.ValidSKUID(sku) || !order.ValidPool(pool) || units < 1 {
		return fmt.Errorf("add stock to activity %s: %w", a.ID, ErrInvalid)
	}
	calls := a.each(func(b int) *scriptCmd {
		k := c.keys(a.ID, b)
		return c.scripts.addStock.call([]string{k.activity(), k.end(), k.stock(sku, pool)}, op, strconv.Itoa(Share(units, b, a.buckets())))
	})
	return c.runAll(ctx, "add stock to activity "+a.ID, calls, map[string]error{
		"already": nil, "ended": ErrEnded, "not_found": ErrActivityNotFound, "not_warmed": ErrNotWarmed, "no_stock": ErrNotWarmed,
	})
}

// Fence takes a settlement's fencing number, given by MySQL, in every bucket. From then on whoever
// holds a smaller one gets ErrFenced.
func (c *Client) Fence(ctx context.Context, a *Activity, number uint64) error {
	calls := a.each(func(b int) *scriptCmd {
		return c.scripts.fence.call([]string{c.keys(a.ID, b).activity()}, strconv.FormatUint(number, 10))
	})
	return c.runAll(ctx, "fence activity "+a.ID, calls, map[string]error{"fenced": ErrFenced})
}

// Cleaned says what a clean-up did.
type Cleaned struct {
	Records  int        // purchase records removed
	Receipts int        // of these, how many left a receipt
	Keys     int        // other keys removed
	Live     []order.ID // records that are still reserved or pending: follow their rows, then repeat
}

// cleanupChunk bounds the keys of one clean-up script: UNLINK only detaches them, some 2 µs each.
const cleanupChunk = 200

// Cleanup removes what Redis holds of a sale that was settled in MySQL, in this order: purchase
// records (those of paid and refund-due orders leave a receipt for ttl), limits, qualifications,
// idempotency keys, outbox and parked set, and the stock keys last (design §6, step 6). It may be
// killed anywhere and repeated. ErrFenced and ErrNoMarker stop it.
//
// Keys are found with SCAN, which looks at the whole key space in small steps: an index would cost
// each reservation memory and a write, and could itself be lost. While records are live, nothing but
// records is removed.
func (c *Client) Cleanup(ctx context.Context, a *Activity, fence uint64, ttl time.Duration) (Cleaned, error) {
	var done Cleaned
	number := strconv.FormatUint(fence, 10)
	fail := func(err error) (Cleaned, error) {
		return done, fmt.Errorf("clean up activity %s: %w", a.ID, err)
	}
	if ttl < MarkerTTL {
		return fail(fmt.Errorf("%w: receipts for %s", ErrInvalid, ttl))
	}
	meaning := map[string]error{"fenced": ErrFenced, "no_marker": ErrNoMarker}
	err := c.eachKey(ctx, kindOrder, a.ID, func(bucket int, rest []string) error {
		k := c.keys(a.ID, bucket)
		keys := []string{k.activity(), k.end()}
		args := []string{number, strconv.FormatInt(ttl.Milliseconds(), 10)}
		for _, name := range rest {
			id, err := order.ParseID(name)
			if err != nil || id.Activity != a.ID || id.Bucket != bucket {
				return fmt.Errorf("%w: record %q", ErrCorrupt, name)
			}
			keys = append(keys, k.order(id), k.receipt(id))
			args = append(args, id.ULID)
		}
		reply, err := c.one(ctx, c.scripts.cleanupRecords.call(keys, args...), meaning)
		if err != nil {
			return err
		}
		if len(reply) < 3 {
			return unknownCode("cleanup", reply)
		}
		n, err1 := strconv.Atoi(reply[1])
		receipts, err2 := strconv.Atoi(reply[2])
		done.Records += n
		done.Receipts += receipts
		for _, u := range reply[3:] {
			done.Live = append(done.Live, order.ID{Activity: a.ID, Bucket: bucket, ULID: u})
		}
		return errors.Join(err1, err2)
	})
	if err != nil {
		return fail(err)
	}
	if len(done.Live) > 0 {
		return done, nil
	}
	remove := func(bucket int, names []string) error {
		k := c.keys(a.ID, bucket)
		reply, err := c.one(ctx, c.scripts.cleanupKeys.call(append([]string{k.activity(), k.end()}, names...), number), meaning)
		if err != nil {
			return err
		}
		n, err := strconv.Atoi(reply[len(reply)-1])
		done.Keys += n
		return err
	}
	for _, kind := range []string{kindLimit, kindQualify, kindIdem} {
		if err := c.eachKey(ctx, kind, a.ID, func(bucket int, rest []string) error {
			return remove(bucket, c.full(kind, a.ID, bucket, rest))
		}); err != nil {
			return fail(err)
		}
	}
	for b := range a.buckets() {
		k := c.keys(a.ID, b)
		if err := remove(b, []string{k.outbox(), k.parked()}); err != nil {
			return fail(err)
		}
	}
	if err := c.eachKey(ctx, kindStock, a.ID, func(bucket int, rest []string) error {
		return remove(bucket, c.full(kindStock, a.ID, bucket, rest))
	}); err != nil {
		return fail(err)
	}
	return done, nil
}

func (c *Client) full(kind, activity string, bucket int, rest []string) []string {
	k := c.keys(activity, bucket)
	out := make([]string, len(rest))
	for i, r := range rest {
		out[i] = k.prefix + kind + k.tag + ":" + r
	}
	return out
}

// one runs a single call.
func (c *Client) one(ctx context.Context, call *scriptCmd, meaning map[string]error) ([]string, error) {
	if err := c.submit(ctx, call); err != nil {
		return nil, err
	}
	reply, err := call.reply()
	if err == nil {
		err = codeError("script", reply, meaning)
	}
	return reply, err
}

// eachKey hands the names of all keys "<kind>{activity:bucket}:<rest>" to fn, in chunks of one bucket.
// SCAN may name a key twice; fn must not mind.
func (c *Client) eachKey(ctx context.Context, kind, activity string, fn func(bucket int, rest []string) error) error {
	start := c.cfg.Prefix + kind + "{" + activity + ":"
	var mu sync.Mutex // the nodes of a cluster are walked at the same time
	walk := func(ctx context.Context, node redis.Cmdable) error {
		var cursor uint64
		for {
			names, next, err := node.Scan(ctx, cursor, escapeGlob(start)+"*", scanCount).Result()
			if err != nil {
				return fmt.Errorf("scan %s* of activity %s: %w", kind, activity, c.classify(err))
			}
			byBucket := make(map[int][]string)
			for _, n := range names {
				tag, rest, ok := strings.Cut(strings.TrimPrefix(n, start), "}:")
				bucket, err := strconv.Atoi(tag)
				if !ok || err != nil {
					return fmt.Errorf("key %q of activity %s: %w", n, activity, ErrCorrupt)
				}
				byBucket[bucket] = append(byBucket[bucket], rest)
			}
			mu.Lock()
			for bucket, rest := range byBucket {
				for part := range slices.Chunk(rest, cleanupChunk) {
					if err = fn(bucket, part); err != nil {
						break
					}
				}
				if err != nil {
					break
				}
			}
			mu.Unlock()
			if err != nil {
				return err
			}
			if cursor = next; cursor == 0 {
				return nil
			}
		}
	}
	if cluster, ok := c.rdb.(*redis.ClusterClient); ok {
		return cluster.ForEachMaster(ctx, func(ctx context.Context, node *redis.Client) error { return walk(ctx, node) })
	}
	return walk(ctx, c.rdb)
}

// SettleMarker makes every end marker say "settled", with ttl from now (at least MarkerTTL), and lets
// the activity hashes go with it. A marker that was lost is written again.
func (c *Client) SettleMarker(ctx context.Context, a *Activity, fence uint64, ttl time.Duration) error {
	if ttl < MarkerTTL {
		return fmt.Errorf("settle activity %s: %w: marker for %s", a.ID, ErrInvalid, ttl)
	}
	calls := a.each(func(b int) *scriptCmd {
		k := c.keys(a.ID, b)
		return c.scripts.settle.call([]string{k.activity(), k.end()}, strconv.FormatUint(fence, 10), strconv.FormatInt(ttl.Milliseconds(), 10))
	})
	return c.runAll(ctx, "settle activity "+a.ID, calls, map[string]error{"fenced": ErrFenced})
}

// KeysLeft counts the keys of a sale by kind (order, user:limit, user:qualify, idem, outbox, parked,
// stock, receipt), for verify; kinds without a key are absent. Marker and activity hash are not among
// them. It walks the key space.
func (c *Client) KeysLeft(ctx context.Context, a *Activity) (map[string]int, error) {
	out := make(map[string]int)
	for _, kind := range []string{kindOrder, kindLimit, kindQualify, kindIdem, kindStock, kindReceipt} {
		seen := make(map[string]bool)
		if err := c.eachKey(ctx, kind, a.ID, func(bucket int, rest []string) error {
			for _, r := range rest {
				seen[strconv.Itoa(bucket)+" "+r] = true
			}
			return nil
		}); err != nil {
			return nil, fmt.Errorf("count keys of activity %s: %w", a.ID, err)
		}
		if len(seen) > 0 {
			out[strings.TrimSuffix(strings.TrimPrefix(kind, "seckill:"), ":")] = len(seen)
		}
	}
	for b := range a.buckets() {
		s, err := c.OutboxStats(ctx, a.ID, b)
		if err != nil {
			return nil, err
		}
		if s.Waiting > 0 {
			out["outbox"]++
		}
		if s.Parked > 0 {
			out["parked"]++
		}
	}
	return out, nil
}

// Trim removes what an earlier plan of a draft has left: buckets that the sale does not have, stock of pools
// that it does not have, and qualifications that lie in other buckets than their users'. Call it while
// nobody can warm the sale; it walks the key space.
func (c *Client) Trim(ctx context.Context, a *Activity) error {
	pools := make(map[string]bool)
	for _, item := range a.Items {
		for pool := range item.Pools {
			pools[item.SKU+":"+pool] = true
		}
	}
	stale := map[string]func(bucket int, rest string) bool{
		kindStock:   func(bucket int, rest string) bool { return bucket >= a.buckets() || !pools[rest] },
		kindQualify: func(bucket int, rest string) bool { return order.Bucket(rest, a.buckets()) != bucket },
	}
	for kind, is := range stale {
		if err := c.eachKey(ctx, kind, a.ID, func(bucket int, rest []string) error {
			var names []string
			for _, r := range rest {
				if is(bucket, r) {
					names = append(names, r)
				}
			}
			return c.unlink(ctx, c.full(kind, a.ID, bucket, names))
		}); err != nil {
			return fmt.Errorf("trim activity %s: %w", a.ID, err)
		}
	}
	// Hashes have nothing behind their tag, so they are named one by one: there is no marker, nor anything
	// else, of a bucket that was only ever announced.
	for b := a.buckets(); b < order.MaxBuckets; b += 64 {
		var names []string
		for n := b; n < min(b+64, order.MaxBuckets); n++ {
			names = append(names, c.keys(a.ID, n).activity())
		}
		if err := c.unlink(ctx, names); err != nil {
			return fmt.Errorf("trim activity %s: %w", a.ID, err)
		}
	}
	return nil
}

// unlink removes keys, each in a call of its own: they may lie on different nodes of a cluster.
func (c *Client) unlink(ctx context.Context, names []string) error {
	if len(names) == 0 {
		return nil
	}
	cmds := make([]redis.Cmder, len(names))
	for i, n := range names {
		cmds[i] = redis.NewIntCmd(context.Background(), "unlink", n)
	}
	if err := c.submit(ctx, cmds...); err != nil {
		return err
	}
	for _, cmd := range cmds {
		if err := cmd.Err(); err != nil {
			return err //nolint:wrapcheck // wrapped by the caller
		}
	}
	return nil
}
