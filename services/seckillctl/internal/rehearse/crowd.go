package rehearse

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"seckill/pkg/sale"
)

// Shares of the crowd's manners, in percent. The rest clicks once, with an idempotency key.
const (
	doubleClickers = 10 // two requests at once, no key
	proxied        = 5  // two requests at once, same key: what a proxy does with a slow one
	retriers       = 15 // the same request again after its answer
	impatient      = 3  // goes away before the answer, asks `mine`, sends the same request again
)

const (
	requestTimeout = 10 * time.Second
	maxRetries     = 8
	maxBody        = 64 << 10
	// repeats of a callback or a cancel, in percent: providers and thumbs do that.
	repeaters = 10
)

// plan is what the crowd buys.
type plan struct {
	activity string
	sale     sale.Sale
	offers   []offer
}

// offer is something a buyer can ask for.
type offer struct {
	sku    string
	region string
	price  int64
	weight int
}

// offers lists each sku with each region that leads to a pool, weighted by its units: a region with
// much stock draws much of the crowd. Regions with a fallback list but no pool draw a little too.
func offers(s sale.Sale) []offer {
	var out []offer
	for _, item := range s.Items {
		units := 0
		for pool, n := range item.Pools {
			out = append(out, offer{item.SKU, pool, item.PriceMinor, max(n, 1)})
			units += n
		}
		for region, pools := range s.RegionFallback {
			if _, own := item.Pools[region]; own {
				continue
			}
			for _, p := range pools {
				if _, ok := item.Pools[p]; ok {
					out = append(out, offer{item.SKU, region, item.PriceMinor, max(units/10, 1)})
					break
				}
			}
		}
	}
	return out
}

func (p *plan) pick(rng *rand.Rand) offer {
	total := 0
	for _, o := range p.offers {
		total += o.weight
	}
	n := rng.IntN(total)
	for _, o := range p.offers {
		if n -= o.weight; n < 0 {
			return o
		}
	}
	return p.offers[0]
}

// crowd sends the buyers.
type crowd struct {
	opt     Options
	plan    plan
	office  *office
	log     *Log
	http    *http.Client
	apis    []string
	next    atomic.Uint32
	tokens  []string
	started time.Time
	onBuyer func() // called once for each buyer who is done

	errOnce sync.Once
	err     error
	fail    context.CancelFunc
}

func newHTTPClient(concurrency int) *http.Client {
	dialer := &net.Dialer{Timeout: 5 * time.Second}
	return &http.Client{Transport: &http.Transport{
		DialContext:         dialer.DialContext,
		MaxIdleConns:        0,
		MaxIdleConnsPerHost: concurrency * 2,
		IdleConnTimeout:     time.Minute,
		DisableCompression:  true,
		WriteBufferSize:     2 << 10,
		ReadBufferSize:      2 << 10,
	}}
}

func user(i int) string { return fmt.Sprintf("buyer-%07d", i) }

// purchase is an accepted order that its buyer goes on with.
type purchase struct {
	buyer    int
	orderID  string
	amount   int64
	currency string
	pay      bool
	repeat   bool
	txn      string
	payload  string
}

// run sends all buyers and then waits for their payments and cancels.
func (c *crowd) run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	c.fail = cancel
	buyers := make(chan int)
	// Everybody who got something acts on it in the background: the crowd does not wait for them. They
	// are many enough that a callback, slow as it is on a busy machine, comes before its time-out.
	acts := make(chan purchase, c.opt.Buyers*2)
	payments := make(chan purchase, c.opt.Buyers*2)
	signed := make(chan signedPayment, 256)

	var acting, signing, buying sync.WaitGroup
	signing.Go(func() { c.signer(ctx, payments, signed) })
	for range max(c.opt.Concurrency/4, 8) {
		acting.Go(func() {
			for p := range signed {
				c.pay(ctx, p)
			}
		})
	}
	var cancelling sync.WaitGroup
	for range max(c.opt.Concurrency/8, 8) {
		cancelling.Go(func() {
			for p := range acts {
				if p.pay {
					payments <- p
				} else {
					c.cancelOrder(ctx, p)
				}
			}
		})
	}
	c.started = time.Now()
	for range c.opt.Concurrency {
		buying.Go(func() {
			for i := range buyers {
				c.buyer(ctx, i, acts)
				c.onBuyer()
			}
		})
	}
feed:
	for i := range c.opt.Buyers {
		select {
		case buyers <- i:
		case <-ctx.Done():
			break feed
		}
	}
	close(buyers)
	buying.Wait()
	c.log.Crowd = time.Since(c.started)
	close(acts)
	cancelling.Wait()
	close(payments)
	signing.Wait()
	acting.Wait()
	if c.err != nil {
		return c.err
	}
	return ctx.Err()
}

// stop ends the rehearsal for a reason that is not the system's: wrong address, refused token.
func (c *crowd) stop(err error) {
	c.errOnce.Do(func() {
		c.err = err
		c.fail()
	})
}

// buyer is one person: who he is and what he does depends on the seed and his number only.
func (c *crowd) buyer(ctx context.Context, i int, acts chan<- purchase) {
	rng := rand.New(rand.NewPCG(c.opt.Seed, uint64(i)+1)) //nolint:gosec // manners of a crowd, not a secret; i is not negative
	want := c.plan.pick(rng)
	quantity := 1
	if limit := c.plan.sale.PerUserLimit; limit > 1 && rng.IntN(5) == 0 {
		quantity += rng.IntN(min(limit, 3))
	}
	body, err := json.Marshal(struct {
		SKU      string `json:"sku_id"`
		Quantity int    `json:"quantity"`
		Region   string `json:"region"`
	}{want.sku, quantity, want.region})
	if err != nil {
		c.stop(fmt.Errorf("encode reservation: %w", err))
		return
	}
	b := &buying{c: c, user: user(i), token: c.tokens[i], body: body, key: "k-" + strconv.Itoa(i)}
	switch manner := rng.IntN(100); {
	case manner < doubleClickers:
		b.key = ""
		b.both(ctx)
	case manner < doubleClickers+proxied:
		b.both(ctx)
	case manner < doubleClickers+proxied+retriers:
		b.settle(ctx)
		b.settle(ctx)
	case manner < doubleClickers+proxied+retriers+impatient:
		b.abandon(ctx, time.Duration(rng.IntN(20_000))*time.Microsecond)
		b.mine(ctx)
		b.settle(ctx)
	default:
		b.settle(ctx)
	}
	if b.unknown() {
		b.mine(ctx)
	}
	c.log.attempts(b.list)
	done := map[string]bool{}
	for _, a := range b.list {
		if a.Outcome != Accepted || done[a.OrderID] {
			continue
		}
		done[a.OrderID] = true
		p := purchase{buyer: i, orderID: a.OrderID, amount: want.price * int64(quantity), currency: c.plan.sale.Currency, repeat: rng.IntN(100) < repeaters}
		switch share := rng.Float64(); {
		case share < c.opt.PayShare:
			p.pay = true
		case share < c.opt.PayShare+c.opt.CancelShare:
		default:
			continue // left to expire
		}
		acts <- p
	}
}

// buying is one buyer's attempts.
type buying struct {
	c     *crowd
	user  string
	token string
	key   string
	body  []byte

	mu   sync.Mutex
	list []Attempt
}

func (b *buying) add(a Attempt) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.list = append(b.list, a)
}

func (b *buying) unknown() bool { return len(unresolved(b.list)) > 0 }

// both clicks twice at once.
func (b *buying) both(ctx context.Context) {
	var wg sync.WaitGroup
	for range 2 {
		wg.Go(func() { b.settle(ctx) })
	}
	wg.Wait()
}

// settle sends the request until there is a definite answer. Without a key a second request could
// be a second order, so only answers that promise that nothing happened are tried again.
func (b *buying) settle(ctx context.Context) {
	for try := 0; ; try++ {
		a, after := b.post(ctx, requestTimeout)
		b.add(a)
		again := after > 0 || a.Outcome == Unknown && b.key != ""
		if !again || try >= maxRetries || ctx.Err() != nil {
			return
		}
		wait(ctx, max(after, 50*time.Millisecond))
	}
}

// abandon goes away before the answer is there.
func (b *buying) abandon(ctx context.Context, after time.Duration) {
	a, _ := b.post(ctx, after)
	b.add(a)
}

func wait(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}

// answer is what the storefront API sends, for orders and for problems.
type answer struct {
	OrderID string `json:"order_id"`
	Ignored bool   `json:"ignored"` // a callback of a type that the shop does not listen to
	Code    string `json:"code"`
	Detail  string `json:"detail"`
}

// post sends one reservation; after is how long to wait before trying again, if that makes sense.
func (b *buying) post(ctx context.Context, timeout time.Duration) (a Attempt, after time.Duration) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	a = Attempt{User: b.user, Key: b.key, Outcome: Unknown}
	c := b.c
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, c.api()+"/v1/activities/"+url.PathEscape(c.plan.activity)+"/orders", bytes.NewReader(b.body))
	if err != nil {
		c.stop(fmt.Errorf("make request: %w", err))
		return a, 0
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Authorization", "Bearer "+b.token)
	if b.key != "" {
		req.Header.Set("Idempotency-Key", b.key)
	}
	sent := time.Now()
	status, header, ans, err := c.do(req)
	now := time.Now()
	a.At = now.Sub(c.started)
	if err != nil {
		a.Code = err.Error()
		return a, 0
	}
	a.Latency = now.Sub(sent)
	a.Code = ans.Code
	switch {
	case status == http.StatusAccepted && ans.OrderID != "":
		a.Outcome, a.OrderID = Accepted, ans.OrderID
	case status == http.StatusUnauthorized || status == http.StatusNotFound || status == http.StatusBadRequest:
		c.stop(fmt.Errorf("reserve as %s: %d %s: %s", b.user, status, ans.Code, ans.Detail))
	case status == http.StatusConflict && ans.Code == "sold_out":
		a.Outcome = SoldOut
	case status == http.StatusConflict && ans.Code == "limit_reached":
		a.Outcome = Limited
	case status == http.StatusServiceUnavailable && ans.OrderID != "":
		// R12: the order may exist; the same key tells.
	case status == http.StatusServiceUnavailable || status == http.StatusTooManyRequests:
		a.Outcome = Refused
		after = retryAfter(header)
	case status >= 500:
	default:
		a.Outcome = Refused
	}
	return a, after
}

func retryAfter(h http.Header) time.Duration {
	s, err := strconv.Atoi(h.Get("Retry-After"))
	if err != nil || s < 1 {
		return 100 * time.Millisecond
	}
	return min(time.Duration(s)*time.Second, 2*time.Second)
}

func (c *crowd) api() string {
	return c.apis[int(c.next.Add(1))%len(c.apis)]
}

func (c *crowd) do(req *http.Request) (int, http.Header, answer, error) {
	resp, err := c.http.Do(req)
	if err != nil {
		return 0, nil, answer{}, err
	}
	defer resp.Body.Close() //nolint:errcheck // read to its end below
	raw, err := io.ReadAll(io.LimitReader(resp.Body, maxBody))
	if err != nil {
		return 0, nil, answer{}, err
	}
	var ans answer
	if len(raw) > 0 {
		if err := json.Unmarshal(raw, &ans); err != nil {
			return 0, nil, answer{}, fmt.Errorf("decode answer %d: %w", resp.StatusCode, err)
		}
	}
	return resp.StatusCode, resp.Header, ans, nil
}

// mine asks what the buyer holds; that is how a lost answer is found again.
func (b *buying) mine(ctx context.Context) {
	c := b.c
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, c.api()+"/v1/activities/"+url.PathEscape(c.plan.activity)+"/orders/mine", http.NoBody)
	if err != nil {
		c.stop(fmt.Errorf("make request: %w", err))
		return
	}
	req.Header.Set("Authorization", "Bearer "+b.token)
	resp, err := c.http.Do(req)
	if err != nil {
		return // he stays in the dark; his orders are checked as unknown ones
	}
	defer resp.Body.Close() //nolint:errcheck // only read
	var out struct {
		Orders []answer `json:"orders"`
	}
	if resp.StatusCode != http.StatusOK || json.NewDecoder(io.LimitReader(resp.Body, maxBody)).Decode(&out) != nil {
		return
	}
	ids := make([]string, 0, len(out.Orders))
	for _, o := range out.Orders {
		ids = append(ids, o.OrderID)
	}
	c.log.found(b.user, ids)
}

type signedPayment struct {
	purchase
	sig signature
}

// signer gathers callbacks and has them signed many at a time: the secret stays with the server.
func (c *crowd) signer(ctx context.Context, in <-chan purchase, out chan<- signedPayment) {
	defer func() {
		close(out)
		for range in { //nolint:revive // nobody may block on a signer that is gone
		}
	}()
	n := 0
	for p := range in {
		batch := []purchase{p}
		gather := time.NewTimer(20 * time.Millisecond)
	more:
		for len(batch) < 200 {
			select {
			case q, ok := <-in:
				if !ok {
					break more
				}
				batch = append(batch, q)
			case <-gather.C:
				break more
			}
		}
		gather.Stop()
		payloads := make([]string, len(batch))
		for i := range batch {
			n++
			batch[i].txn = fmt.Sprintf("%s-%d", c.plan.activity, n)
			raw, err := json.Marshal(struct {
				Type        string `json:"type"`
				OrderID     string `json:"order_id"`
				Transaction string `json:"transaction_id"`
				Amount      int64  `json:"amount_minor"`
				Currency    string `json:"currency"`
			}{"payment.succeeded", batch[i].orderID, batch[i].txn, batch[i].amount, batch[i].currency})
			if err != nil {
				c.stop(fmt.Errorf("encode payment: %w", err))
				return
			}
			batch[i].payload = string(raw)
			payloads[i] = batch[i].payload
		}
		sigs, err := c.office.sign(ctx, payloads)
		if err != nil {
			c.stop(err)
			return
		}
		for i := range batch {
			out <- signedPayment{batch[i], sigs[i]}
		}
	}
}

// pay sends a callback as a provider does: again until it is taken.
func (c *crowd) pay(ctx context.Context, p signedPayment) {
	times := 1
	if p.repeat {
		times = 2
	}
	entry := Payment{Transaction: p.txn, OrderID: p.orderID}
	for range times {
		status, err := c.insist(ctx, func(ctx context.Context) (*http.Request, error) {
			req, err := http.NewRequestWithContext(ctx, http.MethodPost, c.api()+"/v1/payments/callback", bytes.NewReader([]byte(p.payload)))
			if err != nil {
				return nil, err
			}
			req.Header.Set("Content-Type", "application/json")
			req.Header.Set("webhook-id", p.sig.ID)
			req.Header.Set("webhook-timestamp", p.sig.Timestamp)
			req.Header.Set("webhook-signature", p.sig.Signature)
			return req, nil
		})
		switch {
		case err != nil && ctx.Err() == nil:
			c.stop(fmt.Errorf("pay for order %s: %w", p.orderID, err))
		case status == http.StatusAccepted:
			entry.Accepted = true
		}
	}
	c.log.payment(entry)
}

// cancelOrder deletes an order as its buyer.
func (c *crowd) cancelOrder(ctx context.Context, p purchase) {
	times := 1
	if p.repeat {
		times = 2
	}
	entry := Cancel{OrderID: p.orderID}
	for range times {
		status, err := c.insist(ctx, func(ctx context.Context) (*http.Request, error) {
			req, err := http.NewRequestWithContext(ctx, http.MethodDelete, c.api()+"/v1/orders/"+url.PathEscape(p.orderID), http.NoBody)
			if err != nil {
				return nil, err
			}
			req.Header.Set("Authorization", "Bearer "+c.tokens[p.buyer])
			return req, nil
		})
		switch {
		case err != nil && ctx.Err() == nil:
			c.stop(fmt.Errorf("cancel order %s: %w", p.orderID, err))
		case status == http.StatusAccepted:
			entry.Accepted = true
		}
	}
	c.log.cancel(entry)
}

// insist repeats a request until it got 202 or 409; any other definite refusal is an error, because
// a rehearsal asks for nothing that may be refused.
func (c *crowd) insist(ctx context.Context, request func(context.Context) (*http.Request, error)) (int, error) {
	var last error
	for try := 0; try < 4*maxRetries && ctx.Err() == nil; try++ {
		status, err := func() (int, error) {
			ctx, cancel := context.WithTimeout(ctx, requestTimeout)
			defer cancel()
			req, err := request(ctx)
			if err != nil {
				return 0, err
			}
			status, _, ans, err := c.do(req)
			if err != nil {
				return 0, err
			}
			last = fmt.Errorf("%d %s: %s", status, ans.Code, ans.Detail)
			if ans.Ignored {
				return http.StatusNotAcceptable, nil
			}
			return status, nil
		}()
		switch {
		case err != nil:
			last = err
		case status == http.StatusAccepted || status == http.StatusConflict:
			return status, nil
		case status != http.StatusTooManyRequests && status < 500:
			return status, last
		}
		wait(ctx, time.Duration(min(try+1, 10))*100*time.Millisecond)
	}
	if last == nil {
		last = errors.New("stopped")
	}
	return 0, last
}
