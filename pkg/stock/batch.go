package stock

import (
	"fmt"
	"strconv"

	"seckill/pkg/order"
)

// maxBatch bounds the reservations of one script call, so that it stays far below the 10 ms that a
// script may hold up everybody else: about 20 µs each.
const maxBatch = 32

// ask is one reservation on its way, and what became of it.
type ask struct {
	r      *Reservation
	digest string // packed

	reply any    // a code, or an array that begins with one
	x     string // what the record froze, with reply "ok"
	err   error  // no reply
}

// reserved is the answer to a reservation that the script granted.
func (a *ask) reserved(pool string) (Reserved, error) {
	rec := Record{Order: order.Order{ID: a.r.ID, User: a.r.User, SKU: a.r.SKU, Pool: pool, Quantity: a.r.Quantity}, Status: order.Reserved}
	if err := rec.parseFrozen(a.x); err != nil {
		return Reserved{}, err
	}
	rec.IdemKey, rec.IdemDigest = a.r.IdemKey, a.r.IdemDigest
	return Reserved{Record: rec}, nil
}

// offered is what many buyers of a crowd ask for alike. It is sent once per call.
type offered struct {
	sku, region string
	quantity    int
	pools       []string
}

func (o *offered) same(r *Reservation) bool {
	if o.sku != r.SKU || o.region != r.Region || o.quantity != r.Quantity || len(o.pools) != len(r.Pools) {
		return false
	}
	for i, p := range o.pools {
		if p != r.Pools[i] {
			return false
		}
	}
	return true
}

// batch is what one call of the reserve script decides: reservations of one bucket, in the order in
// which they came, each of another user.
type batch struct {
	activity string
	bucket   int
	offers   []offered
	asks     []*ask
	which    []int // offer of each ask
	call     *scriptCmd
}

func newBatch(id order.ID) *batch { return &batch{activity: id.Activity, bucket: id.Bucket} }

// holds tells whether the script would have to know of one request to decide the other.
func (b *batch) holds(r *Reservation) bool {
	for _, a := range b.asks {
		if a.r.User == r.User || a.r.ID.ULID == r.ID.ULID {
			return true
		}
	}
	return false
}

func (b *batch) add(a *ask) {
	at := -1
	for i := range b.offers {
		if b.offers[i].same(a.r) {
			at = i
			break
		}
	}
	if at < 0 {
		at = len(b.offers)
		b.offers = append(b.offers, offered{a.r.SKU, a.r.Region, a.r.Quantity, a.r.Pools})
	}
	b.asks = append(b.asks, a)
	b.which = append(b.which, at)
}

// gathered sorts the reservations of one pipeline into batches. A flusher has one and uses it again.
type gathered struct{ batches []*batch }

// add puts a reservation into the last batch of its bucket, or opens a new one behind it: the calls of
// a pipeline run in their order, so what one user sends twice is decided in the order it came.
func (g *gathered) add(a *ask) {
	for i := len(g.batches) - 1; i >= 0; i-- {
		b := g.batches[i]
		if b.bucket != a.r.ID.Bucket || b.activity != a.r.ID.Activity {
			continue
		}
		if len(b.asks) < maxBatch && !b.holds(a.r) {
			b.add(a)
			return
		}
		break
	}
	b := newBatch(a.r.ID)
	b.add(a)
	g.batches = append(g.batches, b)
}

func (g *gathered) reset() {
	clear(g.batches)
	g.batches = g.batches[:0]
}

// reserveCall writes all keys into one text and cuts them out of it: this is the hottest path, and
// so it costs one allocation instead of one per key.
func (c *Client) reserveCall(b *batch) *scriptCmd {
	k := c.keys(b.activity, b.bucket)
	nkeys, nargs := 3, 1
	for i := range b.offers {
		nkeys += len(b.offers[i].pools)
		nargs += 4 + len(b.offers[i].pools)
	}
	for _, a := range b.asks {
		nkeys += 3
		nargs += 5
		if a.r.IdemKey != "" {
			nkeys++
		}
	}
	size := len(k.prefix) + len(kindQualify) + len(k.tag) + 1
	buf := make([]byte, 0, nkeys*(size+40))
	cuts := make([]int, 0, nkeys)
	cut := func(kind string, parts ...string) {
		buf = append(buf, k.prefix...)
		buf = append(buf, kind...)
		buf = append(buf, k.tag...)
		for _, p := range parts {
			buf = append(buf, p...)
		}
		cuts = append(cuts, len(buf))
	}
	cut(kindActivity)
	cut(kindActivity, endSuffix)
	cut(kindOutbox)
	for i := range b.offers {
		for _, p := range b.offers[i].pools {
			cut(kindStock, ":", b.offers[i].sku, ":", p)
		}
	}
	bucket := strconv.Itoa(b.bucket)
	for _, a := range b.asks {
		cut(kindOrder, ":", b.activity, "-", bucket, "-", a.r.ID.ULID)
		cut(kindLimit, ":", a.r.User)
		cut(kindQualify, ":", a.r.User)
		if a.r.IdemKey != "" {
			cut(kindIdem, ":", a.r.User, ":", a.r.IdemKey)
		}
	}
	all := string(buf)
	out := make([]string, 0, 3+nkeys+nargs)
	out = append(out, "evalsha", c.scripts.reserve.sha, strconv.Itoa(nkeys))
	from := 0
	for _, to := range cuts {
		out = append(out, all[from:to])
		from = to
	}
	out = append(out, strconv.Itoa(len(b.offers)))
	for i := range b.offers {
		o := &b.offers[i]
		out = append(out, o.sku, o.region, strconv.Itoa(o.quantity), strconv.Itoa(len(o.pools)))
		out = append(out, o.pools...)
	}
	for i, a := range b.asks {
		out = append(out, a.r.ID.ULID, a.r.User, strconv.Itoa(b.which[i]+1), a.r.IdemKey, a.digest)
	}
	return c.scripts.reserve.prepare(out)
}

// answer gives each reservation its part of the reply.
func (b *batch) answer() {
	err := b.call.Err()
	list, ok := b.call.Val().([]any)
	if err == nil && (!ok || len(list) != len(b.offers)+len(b.asks)) {
		err = fmt.Errorf("reserve script answered %T of another length than was asked for", b.call.Val())
	}
	for i, a := range b.asks {
		if err != nil {
			a.err = err
			continue
		}
		a.reply = list[len(b.offers)+i]
		if broken, ok := a.reply.(error); ok {
			a.err = fmt.Errorf("reserve script: %w", broken)
		}
		a.x, _ = list[b.which[i]].(string)
	}
}
