// Package adminclient speaks the admin API of order-worker for operator tools. It is the only way
// seckillctl reaches the system besides the storefront API.
package adminclient

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"strings"
	"time"

	"seckill/pkg/adminapi"
	"seckill/pkg/sale"
)

// DefaultServer is used when neither flag nor environment names one.
const DefaultServer = "http://127.0.0.1:8081"

// maxAnswer bounds what is read of one answer.
const maxAnswer = 64 << 20

// Config says whom to talk to.
type Config struct {
	Server    string        // base URL; DefaultServer if empty
	Token     string        // bearer token
	Timeout   time.Duration // of one call; 30 s if 0
	Transport http.RoundTripper
}

// Client is safe for concurrent use.
type Client struct {
	base    *url.URL
	token   string
	timeout time.Duration
	http    *http.Client
}

// Error is an answer of the server that is not a success.
type Error struct {
	Method  string
	Path    string
	Problem adminapi.Problem
}

func (e *Error) Error() string {
	text := e.Problem.Detail
	if text == "" {
		text = e.Problem.Title
	}
	for _, p := range e.Problem.Problems {
		text += "\n  " + p.Field + ": " + p.Detail
	}
	return fmt.Sprintf("%s (%s, HTTP %d)", text, e.Problem.Code, e.Problem.Status)
}

// Code returns the problem code of err, or "" when err is not an answer of the server.
func Code(err error) string {
	var e *Error
	if errors.As(err, &e) {
		return e.Problem.Code
	}
	return ""
}

// Status returns the HTTP status of err, or 0.
func Status(err error) int {
	var e *Error
	if errors.As(err, &e) {
		return e.Problem.Status
	}
	return 0
}

// New makes a client; it does no I/O.
func New(cfg Config) (*Client, error) {
	if cfg.Server == "" {
		cfg.Server = DefaultServer
	}
	if cfg.Timeout == 0 {
		cfg.Timeout = 30 * time.Second
	}
	base, err := url.Parse(cfg.Server)
	if err != nil || (base.Scheme != "http" && base.Scheme != "https") || base.Host == "" {
		return nil, fmt.Errorf("server %q is not an http or https URL", cfg.Server)
	}
	if base.User != nil || base.RawQuery != "" || base.Fragment != "" {
		return nil, fmt.Errorf("server %q must be a plain base URL", base.Redacted())
	}
	if cfg.Token == "" {
		return nil, errors.New("no admin token")
	}
	return &Client{
		base:    base,
		token:   cfg.Token,
		timeout: cfg.Timeout,
		http: &http.Client{
			Transport: cfg.Transport,
			// A redirect would carry the token to wherever it points.
			CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		},
	}, nil
}

// ReadToken reads a token file: its first line, without surrounding space.
func ReadToken(path string) (string, error) {
	raw, err := os.ReadFile(path) //nolint:gosec // the operator names the file
	if err != nil {
		return "", fmt.Errorf("read token file: %w", err)
	}
	line, _, _ := strings.Cut(string(raw), "\n")
	if line = strings.TrimSpace(line); line == "" {
		return "", fmt.Errorf("read token file: %s is empty", path)
	}
	return line, nil
}

// Close gives idle connections back.
func (c *Client) Close() { c.http.CloseIdleConnections() }

// Do calls path (below the server's base URL) with in as JSON body, if not nil, and decodes the
// answer into out, if not nil. It returns the HTTP status; anything but 2xx is an *Error.
func (c *Client) Do(ctx context.Context, method, path string, query url.Values, in, out any) (int, error) {
	ctx, cancel := context.WithTimeout(ctx, c.timeout)
	defer cancel()
	body, status, err := c.open(ctx, method, path, query, in)
	if err != nil {
		return status, err
	}
	defer func() { _ = body.Close() }()
	if out == nil {
		_, err = io.Copy(io.Discard, io.LimitReader(body, maxAnswer))
	} else {
		err = json.NewDecoder(io.LimitReader(body, maxAnswer)).Decode(out)
	}
	if err != nil {
		return status, fmt.Errorf("read answer of %s %s: %w", method, path, err)
	}
	return status, nil
}

// Stream calls path and hands back the body of a 2xx answer, for answers that are read line by line.
// Only ctx limits how long that may take. The caller closes the body.
func (c *Client) Stream(ctx context.Context, path string, query url.Values) (io.ReadCloser, error) {
	body, _, err := c.open(ctx, http.MethodGet, path, query, nil)
	return body, err
}

func (c *Client) open(ctx context.Context, method, path string, query url.Values, in any) (io.ReadCloser, int, error) {
	var payload io.Reader
	if in != nil {
		raw, err := json.Marshal(in)
		if err != nil {
			return nil, 0, fmt.Errorf("encode %s %s: %w", method, path, err)
		}
		payload = bytes.NewReader(raw)
	}
	target := strings.TrimRight(c.base.String(), "/") + path
	if len(query) > 0 {
		target += "?" + query.Encode()
	}
	req, err := http.NewRequestWithContext(ctx, method, target, payload)
	if err != nil {
		return nil, 0, fmt.Errorf("make %s %s: %w", method, path, err)
	}
	req.Header.Set("Authorization", "Bearer "+c.token)
	req.Header.Set("Accept", "application/json, application/problem+json")
	if in != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	res, err := c.http.Do(req)
	if err != nil {
		return nil, 0, fmt.Errorf("call admin API: %w", err)
	}
	if res.StatusCode >= 200 && res.StatusCode < 300 {
		return res.Body, res.StatusCode, nil
	}
	defer func() { _ = res.Body.Close() }()
	return nil, res.StatusCode, &Error{Method: method, Path: path, Problem: readProblem(res)}
}

func readProblem(res *http.Response) adminapi.Problem {
	fallback := adminapi.Problem{Status: res.StatusCode, Title: res.Status, Code: "http_" + strconv.Itoa(res.StatusCode)}
	kind, _, err := mime.ParseMediaType(res.Header.Get("Content-Type"))
	if err != nil || kind != "application/problem+json" {
		return fallback
	}
	var p adminapi.Problem
	if err := json.NewDecoder(io.LimitReader(res.Body, 1<<20)).Decode(&p); err != nil || p.Code == "" {
		return fallback
	}
	p.Status = res.StatusCode
	return p
}

func activityPath(id, tail string) string { return "/admin/v1/activities/" + url.PathEscape(id) + tail }

// CreateActivity makes a sale. existed says that the same sale with the same content was there.
func (c *Client) CreateActivity(ctx context.Context, s sale.Sale) (a adminapi.Activity, existed bool, err error) {
	status, err := c.Do(ctx, http.MethodPost, "/admin/v1/activities", nil, s, &a)
	return a, status == http.StatusOK, err
}

// EditActivity gives a draft another plan.
func (c *Client) EditActivity(ctx context.Context, s sale.Sale) (r adminapi.EditResult, err error) {
	_, err = c.Do(ctx, http.MethodPut, activityPath(s.ID, ""), nil, s, &r)
	return r, err
}

// Activity reads one sale with its state in Redis.
func (c *Client) Activity(ctx context.Context, id string) (a adminapi.Activity, err error) {
	_, err = c.Do(ctx, http.MethodGet, activityPath(id, ""), nil, nil, &a)
	return a, err
}

// Activities reads one page of sales.
func (c *Client) Activities(ctx context.Context, cursor string, limit int) (l adminapi.ActivityList, err error) {
	_, err = c.Do(ctx, http.MethodGet, "/admin/v1/activities", page(nil, cursor, limit), nil, &l)
	return l, err
}

// Warm brings a sale's stock into Redis; calling it again is safe.
func (c *Client) Warm(ctx context.Context, id string) (r adminapi.WarmResult, err error) {
	_, err = c.Do(ctx, http.MethodPost, activityPath(id, "/warm"), nil, nil, &r)
	return r, err
}

// DeleteActivity removes a draft and gives its units back.
func (c *Client) DeleteActivity(ctx context.Context, id string) (r adminapi.DeleteResult, err error) {
	_, err = c.Do(ctx, http.MethodDelete, activityPath(id, ""), nil, nil, &r)
	return r, err
}

// SetPaused stops or resumes a sale.
func (c *Client) SetPaused(ctx context.Context, id string, paused bool) (r adminapi.PauseResult, err error) {
	tail := "/resume"
	if paused {
		tail = "/pause"
	}
	_, err = c.Do(ctx, http.MethodPost, activityPath(id, tail), nil, nil, &r)
	return r, err
}

// End ends a sale, or takes up an end that was begun.
func (c *Client) End(ctx context.Context, id, reason string) (r adminapi.EndResult, err error) {
	_, err = c.Do(ctx, http.MethodPost, activityPath(id, "/end"), nil, adminapi.EndRequest{Reason: reason}, &r)
	return r, err
}

// Report reads what became of a sale.
func (c *Client) Report(ctx context.Context, id string) (r adminapi.Report, err error) {
	_, err = c.Do(ctx, http.MethodGet, activityPath(id, "/report"), nil, nil, &r)
	return r, err
}

// Reconcile compares Redis with MySQL, and mends what may be mended.
func (c *Client) Reconcile(ctx context.Context, id string, repair bool) (r adminapi.ReconcileResult, err error) {
	_, err = c.Do(ctx, http.MethodPost, activityPath(id, "/reconcile"), nil, adminapi.ReconcileRequest{Repair: repair}, &r)
	return r, err
}

// Rebuild asks for a rebuild of what Redis has lost of a sale, or says what it would write. The worker
// carries it out.
func (c *Client) Rebuild(ctx context.Context, id string, dryRun bool) (r adminapi.Rebuild, err error) {
	_, err = c.Do(ctx, http.MethodPost, activityPath(id, "/rebuild"), nil, adminapi.RebuildRequest{DryRun: dryRun}, &r)
	return r, err
}

// WaitRebuild polls the rebuild of a sale until it is over; seen is called with each state of it. An API
// that does not answer for a while is asked again: the worker may be starting anew.
func (c *Client) WaitRebuild(ctx context.Context, id string, seen func(adminapi.Rebuild)) (adminapi.Rebuild, error) {
	wait := 100 * time.Millisecond
	for {
		var r adminapi.Rebuild
		_, err := c.Do(ctx, http.MethodGet, activityPath(id, "/rebuild"), nil, nil, &r)
		var answer *Error
		if errors.As(err, &answer) && answer.Problem.Status < http.StatusInternalServerError {
			return r, err
		}
		if err == nil {
			if seen != nil {
				seen(r)
			}
			if r.State != adminapi.RebuildRunning {
				return r, nil
			}
		}
		select {
		case <-ctx.Done():
			return r, errors.Join(fmt.Errorf("wait for the rebuild of %s: %w", id, ctx.Err()), err)
		case <-time.After(wait):
		}
		wait = min(wait*2, time.Second)
	}
}

// Verify checks what must hold after the end of a sale.
func (c *Client) Verify(ctx context.Context, id string) (r adminapi.VerifyResult, err error) {
	_, err = c.Do(ctx, http.MethodGet, activityPath(id, "/verify"), nil, nil, &r)
	return r, err
}

// Stock reads a sale's stock in MySQL and Redis.
func (c *Client) Stock(ctx context.Context, id string) (rows []adminapi.StockRow, err error) {
	_, err = c.Do(ctx, http.MethodGet, activityPath(id, "/stock"), nil, nil, &rows)
	return rows, err
}

// AddStock adds units to a pool of a sale; repeating it with the same operation id adds nothing.
func (c *Client) AddStock(ctx context.Context, id string, in adminapi.AddStockRequest) (r adminapi.AddStockResult, err error) {
	_, err = c.Do(ctx, http.MethodPost, activityPath(id, "/stock"), nil, in, &r)
	return r, err
}

// Qualify lets up to adminapi.MaxQualify users take part in a sale; repeating it is safe.
func (c *Client) Qualify(ctx context.Context, id string, users []string) (r adminapi.QualifyResult, err error) {
	_, err = c.Do(ctx, http.MethodPost, activityPath(id, "/qualifications"), nil, adminapi.QualifyRequest{Users: users}, &r)
	return r, err
}

// Inventory reads what the warehouses hold outside sales.
func (c *Client) Inventory(ctx context.Context) (l adminapi.InventoryList, err error) {
	_, err = c.Do(ctx, http.MethodGet, "/admin/v1/inventory", nil, nil, &l)
	return l, err
}

// SetInventory sets one row of the inventory.
func (c *Client) SetInventory(ctx context.Context, row adminapi.InventoryRow) (r adminapi.InventoryRow, err error) {
	in := adminapi.SetInventoryRequest{SKU: row.SKU, Pool: row.Pool, OnHand: &row.OnHand}
	_, err = c.Do(ctx, http.MethodPut, "/admin/v1/inventory", nil, in, &r)
	return r, err
}

// OrderFilter selects orders; empty fields do not matter.
type OrderFilter struct {
	ActivityID string
	Status     string
	UserID     string
}

// Orders reads one page of orders.
func (c *Client) Orders(ctx context.Context, f OrderFilter, cursor string, limit int) (l adminapi.OrderList, err error) {
	q := values("activity_id", f.ActivityID, "status", f.Status, "user_id", f.UserID)
	_, err = c.Do(ctx, http.MethodGet, "/admin/v1/orders", page(q, cursor, limit), nil, &l)
	return l, err
}

// Order reads one order.
func (c *Client) Order(ctx context.Context, id string) (o adminapi.Order, err error) {
	_, err = c.Do(ctx, http.MethodGet, "/admin/v1/orders/"+url.PathEscape(id), nil, nil, &o)
	return o, err
}

// CancelOrder asks for an order to be cancelled; the cancel itself goes through the queue.
func (c *Client) CancelOrder(ctx context.Context, id, reason string) (r adminapi.CancelResult, err error) {
	_, err = c.Do(ctx, http.MethodPost, "/admin/v1/orders/"+url.PathEscape(id)+"/cancel", nil, adminapi.CancelRequest{Reason: reason}, &r)
	return r, err
}

// RefundOrder asks for a paid order to be taken back; the refund itself goes through the queue.
func (c *Client) RefundOrder(ctx context.Context, id, reason string) (r adminapi.RefundResult, err error) {
	_, err = c.Do(ctx, http.MethodPost, "/admin/v1/orders/"+url.PathEscape(id)+"/refund", nil, adminapi.RefundRequest{Reason: reason}, &r)
	return r, err
}

// Payments reads one page of payments; an empty status or order does not matter.
func (c *Client) Payments(ctx context.Context, status, orderID, cursor string, limit int) (l adminapi.PaymentList, err error) {
	_, err = c.Do(ctx, http.MethodGet, "/admin/v1/payments", page(values("status", status, "order_id", orderID), cursor, limit), nil, &l)
	return l, err
}

// Payment finds a payment; the list is empty if there is none.
func (c *Client) Payment(ctx context.Context, transaction string) (l adminapi.PaymentList, err error) {
	// Always there: without it the answer would be another payment.
	_, err = c.Do(ctx, http.MethodGet, "/admin/v1/payments", url.Values{"transaction_id": {transaction}}, nil, &l)
	return l, err
}

// SettleRefund notes that the money of a payment has been sent back; repeating it changes nothing.
func (c *Client) SettleRefund(ctx context.Context, transaction, reason string) (r adminapi.SettleRefundResult, err error) {
	_, err = c.Do(ctx, http.MethodPost, "/admin/v1/payments/"+url.PathEscape(transaction)+"/settle-refund", nil, adminapi.SettleRefundRequest{Reason: reason}, &r)
	return r, err
}

// PaidOrders reads the feed of paid orders behind a cursor ("" for its start).
func (c *Client) PaidOrders(ctx context.Context, after string, limit int) (l adminapi.PaidOrderList, err error) {
	_, err = c.Do(ctx, http.MethodGet, "/admin/v1/orders/paid", page(values("after", after), "", limit), nil, &l)
	return l, err
}

// DeadLetters reads one page of dead letters.
func (c *Client) DeadLetters(ctx context.Context, f adminapi.LetterFilter, cursor string, limit int) (l adminapi.DeadLetterList, err error) {
	_, err = c.Do(ctx, http.MethodGet, "/admin/v1/dead-letters", page(letterQuery(f), cursor, limit), nil, &l)
	return l, err
}

// DeadLetter reads one letter with verdict, headers and content.
func (c *Client) DeadLetter(ctx context.Context, id int64) (l adminapi.DeadLetter, err error) {
	_, err = c.Do(ctx, http.MethodGet, "/admin/v1/dead-letters/"+strconv.FormatInt(id, 10), nil, nil, &l)
	return l, err
}

// DeadLetterGroups counts letters that look alike.
func (c *Client) DeadLetterGroups(ctx context.Context, f adminapi.LetterFilter) (g adminapi.DeadLetterGroups, err error) {
	_, err = c.Do(ctx, http.MethodGet, "/admin/v1/dead-letters/groups", letterQuery(f), nil, &g)
	return g, err
}

// Discard gives letters up.
func (c *Client) Discard(ctx context.Context, r adminapi.DiscardRequest) (out adminapi.DiscardResult, err error) {
	_, err = c.Do(ctx, http.MethodPost, "/admin/v1/dead-letters/discard", nil, r, &out)
	return out, err
}

// Replay makes a replay job (or says what one would do). The job runs in the worker.
func (c *Client) Replay(ctx context.Context, r adminapi.ReplayRequest) (j adminapi.ReplayJob, err error) {
	_, err = c.Do(ctx, http.MethodPost, "/admin/v1/replay-jobs", nil, r, &j)
	return j, err
}

// ReplayJob reads one replay job.
func (c *Client) ReplayJob(ctx context.Context, id string) (j adminapi.ReplayJob, err error) {
	_, err = c.Do(ctx, http.MethodGet, "/admin/v1/replay-jobs/"+url.PathEscape(id), nil, nil, &j)
	return j, err
}

// ReplayJobs reads the latest replay jobs.
func (c *Client) ReplayJobs(ctx context.Context, limit int) (l adminapi.ReplayJobList, err error) {
	_, err = c.Do(ctx, http.MethodGet, "/admin/v1/replay-jobs", page(nil, "", limit), nil, &l)
	return l, err
}

// WaitReplay polls a job until it is done; seen is called with each state of it.
func (c *Client) WaitReplay(ctx context.Context, id string, seen func(adminapi.ReplayJob)) (adminapi.ReplayJob, error) {
	wait := 50 * time.Millisecond
	for {
		j, err := c.ReplayJob(ctx, id)
		if err != nil {
			return j, err
		}
		if seen != nil {
			seen(j)
		}
		if j.State == adminapi.JobDone {
			return j, nil
		}
		select {
		case <-ctx.Done():
			return j, fmt.Errorf("wait for replay job %s: %w", id, ctx.Err())
		case <-time.After(wait):
		}
		wait = min(wait*2, time.Second)
	}
}

// Audit reads one page of the operators' changes, newest first.
func (c *Client) Audit(ctx context.Context, cursor string, limit int) (l adminapi.AuditList, err error) {
	_, err = c.Do(ctx, http.MethodGet, "/admin/v1/audit", page(nil, cursor, limit), nil, &l)
	return l, err
}

func values(pairs ...string) url.Values {
	q := url.Values{}
	for i := 0; i+1 < len(pairs); i += 2 {
		if pairs[i+1] != "" {
			q.Set(pairs[i], pairs[i+1])
		}
	}
	return q
}

func letterQuery(f adminapi.LetterFilter) url.Values {
	return values("state", f.State, "class", f.Class, "queue", f.Queue, "activity_id", f.ActivityID, "order_id", f.OrderID, "q", f.Query)
}

func page(q url.Values, cursor string, limit int) url.Values {
	if q == nil {
		q = url.Values{}
	}
	if cursor != "" {
		q.Set("cursor", cursor)
	}
	if limit > 0 {
		q.Set("limit", strconv.Itoa(limit))
	}
	return q
}
