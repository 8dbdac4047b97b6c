package stock

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"

	"github.com/redis/go-redis/v9"

	"seckill/pkg/order"
)

// scanCount is how many keys one SCAN step looks at: about a millisecond of Redis' time.
const scanCount = 1000

// Holding is what the limit hash of a user says.
type Holding struct {
	User   string
	Bucket int
	Units  int
}

// EachRecord reads every purchase record of an activity, all buckets, in no order. It walks the whole
// key space in small steps: fit for rehearsals, reports and repairs, not for the buying path. Records
// that change meanwhile are seen in one of their states; fn may stop the walk with an error. What is
// damaged does not hide the rest: the walk goes on, and its error, ErrCorrupt, names the first such keys.
func (c *Client) EachRecord(ctx context.Context, activity string, fn func(Record) error) error {
	return c.each(ctx, "seckill:order:", activity, func(bucket int, rest string, h map[string]string) error {
		id, err := order.ParseID(rest)
		if err != nil || id.Activity != activity || id.Bucket != bucket {
			return fmt.Errorf("read record %q of activity %s: %w", rest, activity, ErrCorrupt)
		}
		rec, err := parseHash(id, h)
		if err != nil {
			return err
		}
		return fn(rec)
	})
}

// EachHolding reads every limit hash of an activity, like EachRecord.
func (c *Client) EachHolding(ctx context.Context, activity string, fn func(Holding) error) error {
	return c.each(ctx, "seckill:user:limit:", activity, func(bucket int, rest string, h map[string]string) error {
		units := 0
		if text, ok := h["held"]; ok {
			var err error
			if units, err = strconv.Atoi(text); err != nil {
				return fmt.Errorf("read limit of %s in activity %s: %w", rest, activity, ErrCorrupt)
			}
		}
		return fn(Holding{User: rest, Bucket: bucket, Units: units})
	})
}

// OutboxIDs lists the orders that wait in a bucket's outbox and those that are parked.
func (c *Client) OutboxIDs(ctx context.Context, activity string, bucket int) (waiting, parked []order.ID, err error) {
	k := c.keys(activity, bucket)
	read := func(key string) ([]order.ID, error) {
		ulids, err := c.rdb.ZRange(ctx, key, 0, -1).Result()
		if err != nil {
			return nil, fmt.Errorf("read %s: %w", key, c.classify(err))
		}
		ids := make([]order.ID, len(ulids))
		for i, u := range ulids {
			ids[i] = order.ID{Activity: activity, Bucket: bucket, ULID: u}
		}
		return ids, nil
	}
	if waiting, err = read(k.outbox()); err != nil {
		return nil, nil, err
	}
	if parked, err = read(k.parked()); err != nil {
		return nil, nil, err
	}
	return waiting, parked, nil
}

// each hands every hash "<kind>{activity:bucket}:<rest>" to fn, each once.
func (c *Client) each(ctx context.Context, kind, activity string, fn func(bucket int, rest string, h map[string]string) error) error {
	start := c.cfg.Prefix + kind + "{" + activity + ":"
	walk := func(ctx context.Context, node redis.Cmdable, seen map[string]bool, fn func(int, string, map[string]string) error) error {
		var cursor uint64
		var damaged damage
		for {
			names, next, err := node.Scan(ctx, cursor, escapeGlob(start)+"*", scanCount).Result()
			if err != nil {
				return fmt.Errorf("scan %s* of activity %s: %w", kind, activity, c.classify(err))
			}
			fresh := names[:0]
			for _, n := range names {
				if !seen[n] { // SCAN may name a key more than once
					seen[n] = true
					fresh = append(fresh, n)
				}
			}
			if err := readHashes(ctx, node, fresh, func(name string, h map[string]string) error {
				tag, rest, ok := strings.Cut(strings.TrimPrefix(name, start), "}:")
				bucket, err := strconv.Atoi(tag)
				if !ok || err != nil {
					return ErrCorrupt
				}
				return fn(bucket, rest, h)
			}, &damaged); err != nil {
				return err
			}
			if cursor = next; cursor == 0 {
				return damaged.err(activity)
			}
		}
	}
	cluster, ok := c.rdb.(*redis.ClusterClient)
	if !ok {
		return walk(ctx, c.rdb, map[string]bool{}, fn)
	}
	// The nodes are walked at the same time; fn and the memory of what was seen are not theirs alone.
	var mu sync.Mutex
	return cluster.ForEachMaster(ctx, func(ctx context.Context, node *redis.Client) error {
		return walk(ctx, node, map[string]bool{}, func(bucket int, rest string, h map[string]string) error {
			mu.Lock()
			defer mu.Unlock()
			return fn(bucket, rest, h)
		})
	})
}

// damage is the names of keys that hold something else than they should.
type damage []string

func (d damage) err(activity string) error {
	if len(d) == 0 {
		return nil
	}
	return fmt.Errorf("%w: %d keys of activity %s: %s", ErrCorrupt, len(d), activity, strings.Join(d[:min(len(d), 5)], ", "))
}

// readHashes reads the named hashes in one pipeline; those that are gone by now are left out. Whatever is no
// hash, or is ErrCorrupt to fn, is noted as damaged.
func readHashes(ctx context.Context, node redis.Cmdable, names []string, fn func(name string, h map[string]string) error, damaged *damage) error {
	if len(names) == 0 {
		return nil
	}
	pipe := node.Pipeline()
	cmds := make([]*redis.MapStringStringCmd, len(names))
	for i, n := range names {
		cmds[i] = pipe.HGetAll(ctx, n)
	}
	_, _ = pipe.Exec(ctx) // each answer has its own error
	for i, cmd := range cmds {
		h, err := cmd.Result()
		switch {
		case err != nil && strings.HasPrefix(err.Error(), "WRONGTYPE"):
			*damaged = append(*damaged, names[i])
			continue
		case err != nil:
			return fmt.Errorf("read %d hashes: %w", len(names), err)
		case len(h) == 0:
			continue
		}
		if err := fn(names[i], h); errors.Is(err, ErrCorrupt) {
			*damaged = append(*damaged, names[i])
		} else if err != nil {
			return err
		}
	}
	return nil
}

// escapeGlob makes a text match itself in a SCAN pattern.
func escapeGlob(s string) string {
	return strings.NewReplacer(`\`, `\\`, `*`, `\*`, `?`, `\?`, `[`, `\[`).Replace(s)
}
