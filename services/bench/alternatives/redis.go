package alternatives

import (
	"context"
	"database/sql"
	"fmt"

	"github.com/redis/go-redis/v9"
)

func stockKey(activity, sku string) string { return "alternative:{" + activity + "}:stock:" + sku }
func buyerKey(activity, user string) string {
	return "alternative:{" + activity + "}:buyer:" + user
}

// SetupRedis puts units into Redis.
func SetupRedis(ctx context.Context, r *redis.Client, activity, sku string, units int) error {
	if err := r.Set(ctx, stockKey(activity, sku), units, 0).Err(); err != nil {
		return fmt.Errorf("put %s on sale: %w", activity, err)
	}
	return nil
}

// Left says how many units Redis still has on sale.
func Left(ctx context.Context, r *redis.Client, activity, sku string) (int, error) {
	n, err := r.Get(ctx, stockKey(activity, sku)).Int()
	if err != nil {
		return 0, fmt.Errorf("read stock of %s: %w", activity, err)
	}
	return n, nil
}

// Decr takes the units with DECRBY and puts them back with INCRBY when there were too few.
type Decr struct {
	DB    *sql.DB
	Redis *redis.Client
}

// Sell makes three steps of what has to be one: a process that dies after the first leaves units
// that nobody holds and nobody can buy. The limit is the database's unique key.
func (d Decr) Sell(ctx context.Context, o Order) error {
	key := stockKey(o.Activity, o.SKU)
	left, err := d.Redis.DecrBy(ctx, key, int64(o.Quantity)).Result()
	if err != nil {
		return fmt.Errorf("take stock for %s: %w", o.ID, err)
	}
	if left < 0 {
		if err := d.Redis.IncrBy(ctx, key, int64(o.Quantity)).Err(); err != nil {
			return fmt.Errorf("put stock of %s back: %w", o.ID, err)
		}
		return ErrSoldOut
	}
	if err := insert(ctx, d.DB, o); err != nil {
		if err := d.Redis.IncrBy(context.WithoutCancel(ctx), key, int64(o.Quantity)).Err(); err != nil {
			return fmt.Errorf("put stock of %s back: %w", o.ID, err)
		}
		return err
	}
	return nil
}

var (
	take = redis.NewScript(`
local stock, buyer, n = KEYS[1], KEYS[2], tonumber(ARGV[1])
if redis.call('EXISTS', buyer) == 1 then return -2 end
local left = tonumber(redis.call('GET', stock) or '0')
if left < n then return -1 end
redis.call('SET', buyer, ARGV[2])
return redis.call('DECRBY', stock, n)`)
	giveBack = redis.NewScript(`
redis.call('DEL', KEYS[2])
return redis.call('INCRBY', KEYS[1], ARGV[1])`)
)

// Lua takes units and checks the limit in one script, and writes the order before it answers.
type Lua struct {
	DB    *sql.DB
	Redis *redis.Client
}

// Sell never oversells and never takes half; what it takes is still lost when the process dies
// between the script and the commit, since nothing in Redis remembers the order.
func (l Lua) Sell(ctx context.Context, o Order) error {
	keys := []string{stockKey(o.Activity, o.SKU), buyerKey(o.Activity, o.User)}
	left, err := take.Run(ctx, l.Redis, keys, o.Quantity, o.ID).Int()
	if err != nil {
		return fmt.Errorf("take stock for %s: %w", o.ID, err)
	}
	switch left {
	case -1:
		return ErrSoldOut
	case -2:
		return ErrLimit
	}
	if err := insert(ctx, l.DB, o); err != nil {
		if err := giveBack.Run(context.WithoutCancel(ctx), l.Redis, keys, o.Quantity).Err(); err != nil {
			return fmt.Errorf("put stock of %s back: %w", o.ID, err)
		}
		return err
	}
	return nil
}
