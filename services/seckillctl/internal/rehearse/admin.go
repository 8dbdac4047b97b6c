package rehearse

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"seckill/pkg/adminapi"
	"seckill/services/seckillctl/internal/adminclient"
)

// Admin is what a rehearsal needs of a client of the admin API.
type Admin interface {
	// Do sends in as JSON (nil: no body) and decodes the answer into out (nil: ignored). An answer
	// that is not 2xx is an error.
	Do(ctx context.Context, method, path string, in, out any) error
	// Stream gives the body of a 2xx answer; the caller closes it.
	Stream(ctx context.Context, path string) (io.ReadCloser, error)
}

// adminCall bounds each call to the admin API; the largest one hands out two thousand tokens.
const adminCall = 30 * time.Second

// office is the admin API as a rehearsal uses it.
type office struct {
	admin    Admin
	activity string
}

func (o *office) do(ctx context.Context, method, path string, in, out any) error {
	ctx, cancel := context.WithTimeout(ctx, adminCall)
	defer cancel()
	return o.admin.Do(ctx, method, path, in, out)
}

// again is do for calls that may be repeated: a store that was too slow for one answer is no reason to
// give up a rehearsal.
func (o *office) again(ctx context.Context, method, path string, in, out any) error {
	return patiently(ctx, func() error { return o.do(ctx, method, path, in, out) })
}

func patiently(ctx context.Context, call func() error) error {
	for try := 1; ; try++ {
		err := call()
		if err == nil || try == 10 || ctx.Err() != nil || adminclient.Status(err) != http.StatusServiceUnavailable {
			return err
		}
		wait(ctx, time.Duration(try)*200*time.Millisecond)
	}
}

func (o *office) rehearsal(what string) string {
	return "/admin/v1/rehearsals/" + url.PathEscape(o.activity) + "/" + what
}

// tokens gives one bearer token for each user, in order.
func (o *office) tokens(ctx context.Context, users []string, ttl time.Duration) ([]string, error) {
	in := struct {
		Users []string `json:"users"`
		TTL   string   `json:"ttl"`
	}{users, ttl.String()}
	var out struct {
		Tokens []string `json:"tokens"`
	}
	if err := o.again(ctx, http.MethodPost, o.rehearsal("tokens"), in, &out); err != nil {
		return nil, fmt.Errorf("get rehearsal tokens: %w", err)
	}
	if len(out.Tokens) != len(users) {
		return nil, fmt.Errorf("get rehearsal tokens: asked for %d, got %d", len(users), len(out.Tokens))
	}
	return out.Tokens, nil
}

// signature is one signed callback.
type signature struct {
	ID        string `json:"webhook-id"`
	Timestamp string `json:"webhook-timestamp"`
	Signature string `json:"webhook-signature"`
}

func (o *office) sign(ctx context.Context, payloads []string) ([]signature, error) {
	in := struct {
		Payloads []string `json:"payloads"`
	}{payloads}
	var out []signature
	if err := o.again(ctx, http.MethodPost, o.rehearsal("sign"), in, &out); err != nil {
		return nil, fmt.Errorf("sign rehearsal callbacks: %w", err)
	}
	if len(out) != len(payloads) {
		return nil, fmt.Errorf("sign rehearsal callbacks: asked for %d, got %d", len(payloads), len(out))
	}
	return out, nil
}

// poison puts one broken message among the orders and gives its message id.
func (o *office) poison(ctx context.Context) (string, error) {
	var out struct {
		MessageID string `json:"message_id"`
	}
	if err := o.do(ctx, http.MethodPost, o.rehearsal("poison"), nil, &out); err != nil {
		return "", fmt.Errorf("send broken message: %w", err)
	}
	return out.MessageID, nil
}

// progress is how far the servers are with the rehearsal's work.
type progress struct {
	Orders        map[string]int `json:"orders"`   // rows in MySQL by state
	Payments      map[string]int `json:"payments"` // by state
	Outbox        int            `json:"outbox"`
	Parked        int            `json:"parked"`
	Compensations int            `json:"compensations"`
	Letters       []Letter       `json:"letters"`
}

func (o *office) progress(ctx context.Context) (progress, error) {
	var out progress
	if err := o.again(ctx, http.MethodGet, o.rehearsal("progress"), nil, &out); err != nil {
		return progress{}, fmt.Errorf("read rehearsal progress: %w", err)
	}
	return out, nil
}

func (p progress) rows() int     { return sum(p.Orders) }
func (p progress) payments() int { return sum(p.Payments) }

func (p progress) letter(messageID string) (Letter, bool) {
	for _, l := range p.Letters {
		if l.MessageID == messageID {
			return l, true
		}
	}
	return Letter{}, false
}

// busy names what is still on its way; empty means nothing.
func (p progress) busy() string {
	switch {
	case p.Outbox > 0:
		return strconv.Itoa(p.Outbox) + " orders wait in the outbox"
	case p.Orders["pending"] > 0:
		return strconv.Itoa(p.Orders["pending"]) + " orders are still pending"
	case p.Payments["kept"] > 0:
		return strconv.Itoa(p.Payments["kept"]) + " payments are kept without an order"
	case p.Compensations > 0:
		return strconv.Itoa(p.Compensations) + " compensations are open"
	}
	return ""
}

func sum(m map[string]int) int {
	n := 0
	for _, v := range m {
		n += v
	}
	return n
}

// snapshot reads everything, again if a store was too slow in the middle of it.
func (o *office) snapshot(ctx context.Context) (*Snapshot, error) {
	for try := 1; ; try++ {
		snap, err := o.oneSnapshot(ctx)
		if err == nil || try == 5 || ctx.Err() != nil {
			return snap, err
		}
		wait(ctx, time.Second)
	}
}

func (o *office) oneSnapshot(ctx context.Context) (*Snapshot, error) {
	ctx, cancel := context.WithTimeout(ctx, 4*adminCall)
	defer cancel()
	body, err := o.admin.Stream(ctx, o.rehearsal("snapshot"))
	if err != nil {
		return nil, fmt.Errorf("read snapshot: %w", err)
	}
	snap, err := ReadSnapshot(body)
	if closeErr := body.Close(); err == nil && closeErr != nil {
		return nil, fmt.Errorf("read snapshot: %w", closeErr)
	}
	return snap, err
}

// replay sends one dead letter through a replay job.
func (o *office) replay(ctx context.Context, letter Letter) error {
	in := adminapi.ReplayRequest{LetterSelection: adminapi.LetterSelection{IDs: []int64{letter.ID}}}
	if err := o.do(ctx, http.MethodPost, "/admin/v1/replay-jobs", in, nil); err != nil {
		return fmt.Errorf("replay dead letter %d: %w", letter.ID, err)
	}
	return nil
}

func (o *office) discard(ctx context.Context, letter Letter, reason string) error {
	in := adminapi.DiscardRequest{LetterSelection: adminapi.LetterSelection{IDs: []int64{letter.ID}}, Reason: reason}
	if err := o.do(ctx, http.MethodPost, "/admin/v1/dead-letters/discard", in, nil); err != nil {
		return fmt.Errorf("discard dead letter %d: %w", letter.ID, err)
	}
	return nil
}
