package stock

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
)

// SlowScript is a script call that Redis' slow log holds.
type SlowScript struct {
	At   time.Time
	Took time.Duration
	Key  string // first key of the call
}

// SlowScripts reads from the slow log what took longer than limit and worked on keys of the given
// activity, on every master. The log holds what the server's slowlog-log-slower-than lets in.
func (c *Client) SlowScripts(ctx context.Context, activity string, limit time.Duration) ([]SlowScript, error) {
	var mu sync.Mutex
	var out []SlowScript
	err := c.masters(ctx, func(ctx context.Context, node redis.Cmdable) error {
		logs, err := node.SlowLogGet(ctx, -1).Result()
		if err != nil {
			return err
		}
		mu.Lock()
		defer mu.Unlock()
		for _, l := range logs {
			if l.Duration <= limit || len(l.Args) < 4 || !strings.HasPrefix(strings.ToLower(l.Args[0]), "eval") {
				continue
			}
			if key := l.Args[3]; strings.HasPrefix(key, c.cfg.Prefix) && strings.Contains(key, "{"+activity+":") {
				out = append(out, SlowScript{At: l.Time.UTC(), Took: l.Duration, Key: key})
			}
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("read slow log: %w", c.classify(err))
	}
	return out, nil
}

// MemoryUsed is what Redis uses, in bytes, over every master.
func (c *Client) MemoryUsed(ctx context.Context) (int64, error) {
	var mu sync.Mutex
	var sum int64
	err := c.masters(ctx, func(ctx context.Context, node redis.Cmdable) error {
		info, err := node.Info(ctx, "memory").Result()
		if err != nil {
			return err
		}
		n, err := strconv.ParseInt(infoField(info, "used_memory"), 10, 64)
		mu.Lock()
		defer mu.Unlock()
		sum += n
		return err
	})
	if err != nil {
		return 0, fmt.Errorf("read memory of redis: %w", c.classify(err))
	}
	return sum, nil
}

// PoolUse is the share of the connection pool that is out at this moment, 0 to 1.
func (c *Client) PoolUse() float64 {
	s := c.rdb.PoolStats()
	if s.TotalConns < s.IdleConns {
		return 0
	}
	return float64(s.TotalConns-s.IdleConns) / float64(c.cfg.PoolSize)
}

func (c *Client) masters(ctx context.Context, fn func(context.Context, redis.Cmdable) error) error {
	if cluster, ok := c.rdb.(*redis.ClusterClient); ok {
		return cluster.ForEachMaster(ctx, func(ctx context.Context, node *redis.Client) error { return fn(ctx, node) })
	}
	return fn(ctx, c.rdb)
}
