package stock

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"seckill/pkg/order"
)

// What a warm-up can be refused for.
var (
	ErrAlreadyWarm = errors.New("activity is already warm")
	ErrStaleWarm   = errors.New("a later warm-up attempt was here")
)

func (a *Activity) buckets() int { return max(a.Buckets, 1) }

// catalogue is what the api has to know and no script reads; it is one field of the hash.
type catalogue struct {
	Name           string              `json:"name"`
	Buckets        int                 `json:"buckets"`
	Items          []Item              `json:"items"`
	RegionFallback map[string][]string `json:"region_fallback,omitempty"`
	Shadow         bool                `json:"shadow,omitempty"`
}

// validate refuses what would make bad key names or a sale that nobody can buy from.
func (a *Activity) validate() error {
	switch {
	case !order.ValidActivityID(a.ID):
		return fmt.Errorf("%w: activity id %q", ErrInvalid, a.ID)
	case a.PerUserLimit < 1 || a.PerUserLimit > order.MaxQuantity:
		return fmt.Errorf("%w: per-user limit %d", ErrInvalid, a.PerUserLimit)
	case a.Buckets < 0 || a.Buckets > order.MaxBuckets:
		return fmt.Errorf("%w: %d buckets", ErrInvalid, a.Buckets)
	case !order.ValidCurrency(a.Currency):
		return fmt.Errorf("%w: currency %q", ErrInvalid, a.Currency)
	case a.PaymentTimeout < time.Second:
		return fmt.Errorf("%w: payment time-out %s", ErrInvalid, a.PaymentTimeout)
	case !a.StartsAt.Before(a.EndsAt) || a.StartsAt.UnixMilli() < 0:
		return fmt.Errorf("%w: window", ErrInvalid)
	}
	for _, item := range a.Items {
		if !order.ValidSKUID(item.SKU) || item.PriceMinor < 0 {
			return fmt.Errorf("%w: sku %q", ErrInvalid, item.SKU)
		}
		for p, n := range item.Pools {
			if !order.ValidPool(p) || n < 0 {
				return fmt.Errorf("%w: pool %q of sku %q", ErrInvalid, p, item.SKU)
			}
		}
	}
	return nil
}

// fields are the parts of the hash that do not change by scripts. The scripts add warm, open,
// fence and version.
func (a *Activity) fields() ([]string, error) {
	blob, err := json.Marshal(catalogue{Name: a.Name, Buckets: a.buckets(), Items: a.Items, RegionFallback: a.RegionFallback, Shadow: a.Shadow})
	if err != nil {
		return nil, fmt.Errorf("encode catalogue of activity %s: %w", a.ID, err)
	}
	f := []string{
		"start", millis(a.StartsAt), "end", millis(a.EndsAt), "limit", strconv.Itoa(a.PerUserLimit),
		"qualified", flag(a.Qualified), "paused", flag(a.Paused), "epoch", strconv.FormatUint(a.Epoch, 10),
		"currency", a.Currency, "timeout", strconv.FormatInt(a.PaymentTimeout.Milliseconds(), 10),
		"catalogue", string(blob),
	}
	for _, item := range a.Items {
		// Joined as the record has it (frozen): one field for the reserve script to read.
		f = append(f, "frozen:"+item.SKU, strings.Join([]string{
			strconv.FormatInt(item.PriceMinor, 10), a.Currency,
			strconv.FormatInt(a.PaymentTimeout.Milliseconds(), 10), strconv.FormatUint(a.Epoch, 10),
		}, "|"))
	}
	return f, nil
}

// parseActivity is the reverse of fields.
func parseActivity(id string, h map[string]string, mark string) (Activity, error) {
	bad := func(what string) (Activity, error) {
		return Activity{}, fmt.Errorf("read activity %s: %w: %s", id, ErrCorrupt, what)
	}
	var cat catalogue
	if err := json.Unmarshal([]byte(h["catalogue"]), &cat); err != nil {
		return bad("catalogue")
	}
	a := Activity{
		ID: id, Name: cat.Name, Buckets: cat.Buckets, Items: cat.Items, RegionFallback: cat.RegionFallback, Shadow: cat.Shadow,
		Currency: h["currency"], Qualified: h["qualified"] == "1", Paused: h["paused"] == "1",
		Opened: h["warm"] != "0" && h["open"] == h["warm"], Ended: mark != "", Settled: mark == markSettled,
	}
	var nums [4]int64
	for i, f := range [...]string{"start", "end", "limit", "timeout"} {
		n, err := strconv.ParseInt(h[f], 10, 64)
		if err != nil {
			return bad(f)
		}
		nums[i] = n
	}
	a.StartsAt, a.EndsAt = time.UnixMilli(nums[0]).UTC(), time.UnixMilli(nums[1]).UTC()
	a.PerUserLimit, a.PaymentTimeout = int(nums[2]), time.Duration(nums[3])*time.Millisecond
	var err error
	if a.Epoch, err = strconv.ParseUint(h["epoch"], 10, 64); err != nil {
		return bad("epoch")
	}
	if a.Warm, err = strconv.ParseUint(h["warm"], 10, 64); err != nil {
		return bad("warm")
	}
	return a, nil
}

// Activity reads what bucket 0 knows of a sale, with its end marker, in one round trip.
// ErrActivityNotFound: Redis has neither hash nor marker.
func (c *Client) Activity(ctx context.Context, id string) (Activity, error) {
	k := c.keys(id, 0)
	hash, mark := hgetall(k.activity()), get(k.end())
	err := c.submit(ctx, hash, mark)
	if err == nil {
		err = errors.Join(hash.Err(), nilOK(mark.Err()))
	}
	if err != nil {
		return Activity{}, fmt.Errorf("read activity %s: %w", id, err)
	}
	if _, known := hash.Val()["limit"]; known {
		return parseActivity(id, hash.Val(), mark.Val())
	}
	if mark.Val() != "" {
		return Activity{ID: id, Buckets: 1, Ended: true, Settled: mark.Val() == markSettled}, nil
	}
	return Activity{}, fmt.Errorf("read activity %s: %w", id, ErrActivityNotFound)
}

// each prepares one call per bucket.
func (a *Activity) each(f func(bucket int) *scriptCmd) []*scriptCmd {
	calls := make([]*scriptCmd, a.buckets())
	for b := range calls {
		calls[b] = f(b)
	}
	return calls
}

// Announce makes a sale known in every bucket, without stock. Buckets that are warm stay as they
// are; cold ones are written again, which is how an edit or a lost hash reaches Redis. A sale that is
// settled, or was deleted, is not made known again.
func (c *Client) Announce(ctx context.Context, a *Activity) error {
	if err := a.validate(); err != nil {
		return fmt.Errorf("announce activity: %w", err)
	}
	f, err := a.fields()
	if err != nil {
		return err
	}
	calls := a.each(func(b int) *scriptCmd {
		k := c.keys(a.ID, b)
		return c.scripts.announce.call([]string{k.activity(), k.end()}, f...)
	})
	return c.runAll(ctx, "announce activity "+a.ID, calls, map[string]error{"warm": nil, "settled": nil})
}

// PrepareWarm writes catalogue and stock of a warm-up attempt into every bucket, closed (R9): nothing
// can be reserved before OpenWarm. amounts (sku → pool → units) are split over the buckets, the
// remainder to the first ones. number comes from MySQL and grows with each attempt, from 1.
//
// ErrAlreadyWarm: a bucket is open already, its stock is live and stays. ErrStaleWarm: a later
// attempt was here. ErrEnded: the end marker is there. Repeating it with the same number is safe.
func (c *Client) PrepareWarm(ctx context.Context, a *Activity, number uint64, amounts map[string]map[string]int) error {
	split := make([]map[string]map[string]int, a.buckets())
	for b := range split {
		split[b] = make(map[string]map[string]int, len(amounts))
		for sku, pools := range amounts {
			split[b][sku] = make(map[string]int, len(pools))
			for pool, n := range pools {
				split[b][sku][pool] = Share(n, b, a.buckets())
			}
		}
	}
	return c.prepare(ctx, "warm", a, number, split, nil)
}

// prepare writes catalogue and stock into every bucket, closed. mode is warm or rebuild; added are
// operations of AddStock that the amounts hold already.
func (c *Client) prepare(ctx context.Context, mode string, a *Activity, number uint64, amounts []map[string]map[string]int, added []Added) error {
	if err := a.validate(); err != nil {
		return fmt.Errorf("%s activity: %w", mode, err)
	}
	if number == 0 || len(amounts) != a.buckets() {
		return fmt.Errorf("%s activity %s: %w: attempt %d, amounts of %d buckets", mode, a.ID, ErrInvalid, number, len(amounts))
	}
	f, err := a.fields()
	if err != nil {
		return err
	}
	calls := make([]*scriptCmd, a.buckets())
	for b := range calls {
		k := c.keys(a.ID, b)
		keys := []string{k.activity(), k.end()}
		args := []string{strconv.FormatUint(number, 10), "", mode}
		for _, item := range a.Items {
			for pool := range item.Pools {
				n, ok := amounts[b][item.SKU][pool]
				if !ok || n < 0 {
					return fmt.Errorf("%s activity %s: %w: no amount for pool %q of sku %q", mode, a.ID, ErrInvalid, pool, item.SKU)
				}
				keys = append(keys, k.stock(item.SKU, pool))
				args = append(args, strconv.Itoa(n))
			}
		}
		args[1] = strconv.Itoa(len(keys) - 2)
		args = slices.Concat(args, f)
		for _, add := range added {
			args = append(args, "op:"+add.Op, strconv.Itoa(Share(add.Units, b, a.buckets())))
		}
		calls[b] = c.scripts.warmPrepare.call(keys, args...)
	}
	return c.runAll(ctx, mode+" activity "+a.ID, calls,
		map[string]error{"already": ErrAlreadyWarm, "stale": ErrStaleWarm, "ended": ErrEnded})
}

// Share is bucket's part of units that are split over a number of buckets.
func Share(units, bucket, buckets int) int {
	n := units / buckets
	if bucket < units%buckets {
		n++
	}
	return n
}

// OpenWarm opens the buckets that carry the number of the attempt that won in MySQL (R9), and says
// how many are open with it now. A bucket that carries another number stays closed.
func (c *Client) OpenWarm(ctx context.Context, a *Activity, number uint64) (int, error) {
	calls := a.each(func(b int) *scriptCmd {
		return c.scripts.warmOpen.call([]string{c.keys(a.ID, b).activity()}, strconv.FormatUint(number, 10))
	})
	codes, err := c.askAll(ctx, "open activity "+a.ID, calls, map[string]error{"already": nil, "other": nil})
	opened := 0
	for _, code := range codes {
		if code == "ok" || code == "already" {
			opened++
		}
	}
	return opened, err
}

// SetPaused pauses or resumes a sale in every bucket. ErrActivityNotFound: a bucket has no hash.
func (c *Client) SetPaused(ctx context.Context, a *Activity, paused bool) error {
	calls := a.each(func(b int) *scriptCmd {
		return c.scripts.pause.call([]string{c.keys(a.ID, b).activity()}, flag(paused))
	})
	return c.runAll(ctx, "pause activity "+a.ID, calls, map[string]error{"not_found": ErrActivityNotFound})
}

// End writes the end marker into every bucket and closes its window at endsAt. It may be repeated; a
// sale that is settled stays settled.
func (c *Client) End(ctx context.Context, a *Activity, endsAt time.Time) error {
	calls := a.each(func(b int) *scriptCmd {
		k := c.keys(a.ID, b)
		return c.scripts.end.call([]string{k.activity(), k.end()}, millis(endsAt))
	})
	return c.runAll(ctx, "end activity "+a.ID, calls, map[string]error{"settled": nil})
}

// Unmark removes end markers that nobody should have written. Only a rebuild may call it, and only while
// MySQL cannot record the sale's end.
func (c *Client) Unmark(ctx context.Context, a *Activity) error {
	cmds := make([]redis.Cmder, a.buckets())
	for b := range cmds {
		cmds[b] = redis.NewIntCmd(context.Background(), "unlink", c.keys(a.ID, b).end())
	}
	if err := c.submit(ctx, cmds...); err != nil {
		return fmt.Errorf("remove end markers of activity %s: %w", a.ID, err)
	}
	for _, cmd := range cmds {
		if err := cmd.Err(); err != nil {
			return fmt.Errorf("remove end markers of activity %s: %w", a.ID, c.classify(err))
		}
	}
	return nil
}

// Qualify lets users take part. Call it with any number of users. ErrEnded: the sale is settled.
func (c *Client) Qualify(ctx context.Context, a *Activity, users []string) error {
	homes := make([][]string, a.buckets())
	for _, u := range users {
		if !order.ValidUserID(u) {
			return fmt.Errorf("qualify user %q: %w", u, ErrInvalid)
		}
		b := order.Bucket(u, a.buckets())
		homes[b] = append(homes[b], u)
	}
	for b, us := range homes {
		k := c.keys(a.ID, b)
		// A thousand users per round trip keep scripts and buffers short however long the list is.
		for part := range slices.Chunk(us, 1000) {
			var calls []*scriptCmd
			for some := range slices.Chunk(part, 100) {
				keys := []string{k.end()}
				for _, u := range some {
					keys = append(keys, k.qualify(u))
				}
				calls = append(calls, c.scripts.qualify.call(keys))
			}
			if err := c.runAll(ctx, "qualify users of activity "+a.ID, calls, map[string]error{"ended": ErrEnded}); err != nil {
				return err
			}
		}
	}
	return nil
}

func parseUnits(s string) (int, error) {
	n, err := strconv.Atoi(s)
	if err != nil {
		return 0, fmt.Errorf("%w: units %q", ErrCorrupt, s)
	}
	return n, nil
}
