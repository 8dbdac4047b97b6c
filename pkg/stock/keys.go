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

func (k keys) activity() string { return k.prefix + "seckill:activity:" + k.tag }
func (k keys) end() string      { return k.prefix + "seckill:activity:" + k.tag + ":end" }
func (k keys) outbox() string   { return k.prefix + "seckill:outbox:" + k.tag }
func (k keys) parked() string   { return k.prefix + "seckill:parked:" + k.tag }

func (k keys) stock(sku, pool string) string {
	return k.prefix + "seckill:stock:" + k.tag + ":" + sku + ":" + pool
}

func (k keys) limit(user string) string { return k.prefix + "seckill:user:limit:" + k.tag + ":" + user }

func (k keys) qualify(user string) string {
	return k.prefix + "seckill:user:qualify:" + k.tag + ":" + user
}

func (k keys) order(id order.ID) string {
	return k.prefix + "seckill:order:" + k.tag + ":" + id.String()
}

func (k keys) receipt(id order.ID) string {
	return k.prefix + "seckill:receipt:" + k.tag + ":" + id.String()
}

func (k keys) idem(user, key string) string {
	return k.prefix + "seckill:idem:" + k.tag + ":" + user + ":" + key
}
