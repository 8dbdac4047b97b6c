package stock

import (
	"strconv"

	"seckill/pkg/order"
)

// keys builds the names of one bucket's keys. All of them carry the same hash tag, so that one
// script stays in one slot of a cluster.
type keys struct {
	prefix string // empty in production
	tag    string // "{activity:bucket}"
}

func (c *Client) keys(activity string, bucket int) keys {
	return keys{prefix: c.cfg.Prefix, tag: "{" + activity + ":" + strconv.Itoa(bucket) + "}"}
}

// Kinds of keys: what stands before the hash tag.
const (
	kindActivity = "seckill:activity:"
	kindStock    = "seckill:stock:"
	kindLimit    = "seckill:user:limit:"
	kindQualify  = "seckill:user:qualify:"
	kindOrder    = "seckill:order:"
	kindReceipt  = "seckill:receipt:"
	kindOutbox   = "seckill:outbox:"
	kindParked   = "seckill:parked:"
	kindIdem     = "seckill:idem:"

	endSuffix = ":end"
)

func (k keys) activity() string { return k.prefix + kindActivity + k.tag }
func (k keys) end() string      { return k.prefix + kindActivity + k.tag + endSuffix }
func (k keys) outbox() string   { return k.prefix + kindOutbox + k.tag }
func (k keys) parked() string   { return k.prefix + kindParked + k.tag }

func (k keys) stock(sku, pool string) string {
	return k.prefix + kindStock + k.tag + ":" + sku + ":" + pool
}

func (k keys) limit(user string) string   { return k.prefix + kindLimit + k.tag + ":" + user }
func (k keys) qualify(user string) string { return k.prefix + kindQualify + k.tag + ":" + user }
func (k keys) order(id order.ID) string   { return k.prefix + kindOrder + k.tag + ":" + id.String() }
func (k keys) receipt(id order.ID) string { return k.prefix + kindReceipt + k.tag + ":" + id.String() }

func (k keys) idem(user, key string) string {
	return k.prefix + kindIdem + k.tag + ":" + user + ":" + key
}
