package rehearse

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"sync/atomic"
	"time"

	"github.com/oklog/ulid/v2"

	"seckill/pkg/adminapi"
	"seckill/pkg/sale"
)

// ErrPromiseBroken is returned with the report when a figure that must be zero is not.
var ErrPromiseBroken = errors.New("a promise was broken")

// Options of a rehearsal. The zero value of each optional field is its default.
type Options struct {
	Sale        sale.Sale
	Buyers      int
	Concurrency int      // buyers at once; default 256
	APIs        []string // base URLs of order-api replicas; default http://127.0.0.1:8080

	PayShare    float64 // of the accepted orders; they are taken as given, zero included
	CancelShare float64
	Seed        uint64 // 0: by the clock

	PaymentTimeout time.Duration // of the shadow activity; default 15 s
	Timeout        time.Duration // for becoming quiet after the crowd; default 5 minutes

	// Talk is told what happens, for people. Progress is told how many buyers are done.
	Talk     func(format string, args ...any)
	Progress func(done int)
	// BeforeCheck runs when the system is quiet, before the stores are read. Tests do their
	// sabotage there.
	BeforeCheck func(ctx context.Context, activity string) error
}

func (o Options) withDefaults() (Options, error) {
	if o.Concurrency == 0 {
		o.Concurrency = 256
	}
	if len(o.APIs) == 0 {
		o.APIs = []string{"http://127.0.0.1:8080"}
	}
	if o.Seed == 0 {
		o.Seed = uint64(time.Now().UnixNano()) //nolint:gosec // any number will do
	}
	if o.PaymentTimeout == 0 {
		o.PaymentTimeout = 15 * time.Second
	}
	if o.Timeout == 0 {
		o.Timeout = 5 * time.Minute
	}
	if o.Talk == nil {
		o.Talk = func(string, ...any) {}
	}
	if o.Progress == nil {
		o.Progress = func(int) {}
	}
	if o.BeforeCheck == nil {
		o.BeforeCheck = func(context.Context, string) error { return nil }
	}
	switch {
	case o.Buyers < 1 || o.Buyers > 1_000_000:
		return o, fmt.Errorf("buyers: %d is not 1 to 1000000", o.Buyers)
	case o.Concurrency < 1 || o.Concurrency > 10_000:
		return o, fmt.Errorf("concurrency: %d is not 1 to 10000", o.Concurrency)
	case o.PayShare < 0 || o.CancelShare < 0 || o.PayShare+o.CancelShare > 1:
		return o, fmt.Errorf("pay share %v and cancel share %v must be 0 to 1 together", o.PayShare, o.CancelShare)
	case o.PaymentTimeout < time.Second || o.Timeout < time.Second:
		return o, errors.New("time-outs must be at least a second")
	}
	for _, api := range o.APIs {
		if u, err := url.Parse(api); err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" {
			return o, fmt.Errorf("api: %q is not a base URL such as http://127.0.0.1:8080", api)
		}
	}
	return o, nil
}

// ShadowID derives the id of a shadow activity: recognisable, unique for each run, 32 characters at
// most.
func ShadowID(saleID string) string {
	id := ulid.Make().String()
	return "rh-" + saleID[:min(len(saleID), 10)] + "-" + id[4:10] + id[len(id)-8:]
}

// shadow is the rehearsal's copy of a sale: the same goods, limits and buckets, starting now.
func shadow(s sale.Sale, timeout time.Duration, now time.Time) sale.Sale {
	s.ID = ShadowID(s.ID)
	s.Shadow = true
	s.StartsAt = now.UTC().Format(time.RFC3339Nano)
	s.EndsAt = now.Add(time.Hour).UTC().Format(time.RFC3339Nano)
	s.PaymentTimeout = timeout.String()
	s.Qualification = sale.QualificationNone
	return s
}

// Run plays the whole rehearsal. With ErrPromiseBroken the report is valid, with any other error it
// is not. Options that make no sense are reported before anything is sent.
func Run(ctx context.Context, admin Admin, opt Options) (Report, error) {
	opt, err := opt.withDefaults()
	if err != nil {
		return Report{}, err
	}
	s := shadow(opt.Sale.WithDefaults(), opt.PaymentTimeout, time.Now())
	if err := s.Validate(nil); err != nil {
		return Report{}, err
	}
	if opt.Sale.Qualification == sale.QualificationList {
		opt.Talk("the sale is for a list of users; the rehearsal is open to its own buyers")
	}
	office := &office{admin: admin, activity: s.ID}
	if err := office.open(ctx, s); err != nil {
		return Report{}, err
	}
	opt.Talk("shadow activity %s: %d units, payment time-out %s, seed %d", s.ID, s.Units(), opt.PaymentTimeout, opt.Seed)
	client := newHTTPClient(opt.Concurrency)
	defer client.CloseIdleConnections()
	c := &crowd{opt: opt, plan: plan{activity: s.ID, sale: s, offers: offers(s)}, office: office, log: &Log{}, http: client, apis: opt.APIs}
	if c.tokens, err = credentials(ctx, office, opt); err != nil {
		return Report{}, err
	}
	poisonID, err := c.send(ctx)
	if err != nil {
		return Report{}, err
	}
	c.log.Poison = []string{poisonID}
	crowdDone := time.Now()
	opt.Talk("%d buyers sent in %.1f s; waiting until everything is drained", opt.Buyers, c.log.Crowd.Seconds())

	quiet := &quieting{office: office, log: c.log, opt: opt}
	if err := quiet.wait(ctx, poisonID); err != nil {
		return Report{}, err
	}
	drained := quiet.since.Sub(crowdDone)
	if err := opt.BeforeCheck(ctx, s.ID); err != nil {
		return Report{}, fmt.Errorf("before the check: %w", err)
	}
	snap, err := office.snapshot(ctx)
	if err != nil {
		return Report{}, err
	}
	rep := Check(c.log, snap)
	rep.DrainSeconds = max(drained.Seconds(), 0)
	if letter, ok := findLetter(snap.Letters, poisonID); ok {
		// Not worth failing for: an operator sees a letter that says where it comes from.
		if err := office.discard(ctx, letter, "rehearsal "+s.ID); err != nil {
			opt.Talk("%v", err)
		}
	}
	if rep.Broken() {
		opt.Talk("shadow activity %s stays as it is, for a look at it; it ends in an hour by itself", s.ID)
		return rep, ErrPromiseBroken
	}
	// Nor is this: the clock ends it anyway.
	if err := office.end(ctx); err != nil {
		opt.Talk("%v", err)
	}
	return rep, nil
}

func findLetter(list []Letter, messageID string) (Letter, bool) {
	return progress{Letters: list}.letter(messageID)
}

func (o *office) open(ctx context.Context, s sale.Sale) error {
	if err := o.again(ctx, http.MethodPost, "/admin/v1/activities", s, nil); err != nil {
		return fmt.Errorf("create shadow activity %s: %w", s.ID, err)
	}
	if err := o.again(ctx, http.MethodPost, "/admin/v1/activities/"+url.PathEscape(s.ID)+"/warm", nil, nil); err != nil {
		return fmt.Errorf("warm shadow activity %s: %w", s.ID, err)
	}
	return nil
}

// tidying bounds how long a rehearsal waits for its activity to be cleaned up. Whatever happens, the worker
// does it.
const tidying = 20 * time.Second

// end ends the shadow activity and waits until it is cleaned up in Redis.
func (o *office) end(ctx context.Context) error {
	path := "/admin/v1/activities/" + url.PathEscape(o.activity)
	if err := o.again(ctx, http.MethodPost, path+"/end", adminapi.EndRequest{Reason: "the rehearsal is over"}, nil); err != nil {
		return fmt.Errorf("end shadow activity %s: %w", o.activity, err)
	}
	ctx, cancel := context.WithTimeout(ctx, tidying)
	defer cancel()
	for {
		var a adminapi.Activity
		err := o.do(ctx, http.MethodGet, path, nil, &a)
		if err == nil && a.State == adminapi.ActivityClosed {
			return nil
		}
		wait(ctx, pollEvery)
		if ctx.Err() != nil {
			return fmt.Errorf("shadow activity %s is ended, and being cleaned up: %w", o.activity, ctx.Err())
		}
	}
}

// credentials fetches a token for each buyer before the crowd starts.
func credentials(ctx context.Context, o *office, opt Options) ([]string, error) {
	const chunk = 2000
	tokens := make([]string, 0, opt.Buyers)
	for len(tokens) < opt.Buyers {
		users := make([]string, 0, chunk)
		for i := len(tokens); i < opt.Buyers && len(users) < chunk; i++ {
			users = append(users, user(i))
		}
		got, err := o.tokens(ctx, users, time.Hour)
		if err != nil {
			return nil, err
		}
		tokens = append(tokens, got...)
	}
	return tokens, nil
}

// send lets the crowd loose and puts a broken message among the good ones when a third is through.
func (c *crowd) send(ctx context.Context) (poisonID string, err error) {
	var done atomic.Int64
	third := make(chan struct{})
	at := int64(max(c.opt.Buyers/3, 1))
	c.onBuyer = func() {
		n := done.Add(1)
		c.opt.Progress(int(n))
		if n == at {
			close(third)
		}
	}
	type result struct {
		id  string
		err error
	}
	poisoned := make(chan result, 1)
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		select {
		case <-third:
			id, err := c.office.poison(ctx)
			poisoned <- result{id, err}
		case <-ctx.Done():
			poisoned <- result{"", ctx.Err()}
		}
	}()
	if err := c.run(ctx); err != nil {
		cancel()
		<-poisoned
		return "", err
	}
	r := <-poisoned
	return r.id, r.err
}

// quieting waits until the servers have nothing left to do for the rehearsal.
type quieting struct {
	office *office
	log    *Log
	opt    Options

	since time.Time // when it became quiet
}

const (
	pollEvery = 250 * time.Millisecond
	// stillFor is how long nothing may change before the system counts as quiet.
	stillFor = 2 * time.Second
	// patience bounds the wait for answers that seem to be missing. After it the check says so.
	patience = 30 * time.Second
)

// wait replays the broken message on the way: its letter must come, and come back after the replay.
func (q *quieting) wait(ctx context.Context, poisonID string) error {
	ctx, cancel := context.WithTimeout(ctx, q.opt.Timeout)
	defer cancel()
	orders, transactions := q.expected()
	var last string
	var changed time.Time
	replayed := false
	why := "nothing was read yet"
	for {
		p, err := q.office.progress(ctx)
		switch {
		case err != nil && ctx.Err() == nil:
			return err
		case err == nil:
			if now := fmt.Sprint(p); now != last {
				last, changed = now, time.Now()
			}
			missing := ""
			letter, drained := p.letter(poisonID)
			switch {
			case !drained:
				missing = "the broken message is not among the dead letters"
			case !replayed:
				if err := q.office.replay(ctx, letter); err != nil {
					return err
				}
				replayed = true
				missing = "the broken message is being replayed"
			case letter.Deaths < 2 || letter.State != "open":
				missing = fmt.Sprintf("the replayed message has not come back (letter is %s)", letter.State)
			case p.rows() < orders:
				missing = fmt.Sprintf("%d orders were accepted, %d rows exist", orders, p.rows())
			case p.payments() < transactions:
				missing = fmt.Sprintf("%d payments were accepted, %d are booked", transactions, p.payments())
			}
			still := time.Since(changed)
			why = p.busy()
			if why == "" {
				why = missing
				if missing == "" && still >= stillFor || still >= patience {
					q.since = changed
					return nil
				}
			}
		}
		wait(ctx, pollEvery)
		if ctx.Err() != nil {
			return fmt.Errorf("not quiet after %s: %s", q.opt.Timeout, why)
		}
	}
}

// expected counts the distinct orders and transactions that were answered with 202.
func (q *quieting) expected() (orders, transactions int) {
	o, t := map[string]bool{}, map[string]bool{}
	for _, a := range q.log.Attempts {
		if a.Outcome == Accepted {
			o[a.OrderID] = true
		}
	}
	for _, p := range q.log.Payments {
		if p.Accepted {
			t[p.Transaction] = true
		}
	}
	return len(o), len(t)
}
