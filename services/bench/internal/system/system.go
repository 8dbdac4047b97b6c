// Package system builds the real programs, starts them on the private servers of a run, and talks to
// them the way operators and buyers do: through their HTTP APIs.
package system

import (
	"bytes"
	"context"
	"crypto/sha256"
	"database/sql"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"seckill/pkg/adminapi"
	"seckill/pkg/sale"
	"seckill/services/bench/alternatives"
	"seckill/services/bench/internal/proc"
	"seckill/services/bench/internal/server"
)

// SKU is what every sale of a run sells.
const SKU = "phone"

// Body is what every buyer asks for.
const Body = `{"sku_id":"` + SKU + `","quantity":1,"region":"national"}`

// Roles of the worker.
const (
	Paused    = "admin" // the consumers are not started: the queues take what comes
	Everybody = "orders,payments,rollbacks,relay,scheduler,deadletters"
)

// System is the pair of programs on the servers of one run.
type System struct {
	Services *server.Services
	Redis    *redis.Client
	DB       *sql.DB
	Secret   string // key of the buyers' tokens

	bin, scratch string
	token        string // operator's

	API, Worker, Admin    *proc.Process
	APIAddr, apiMetrics   string
	AdminAddr             string
	workerMetrics         string
	APIDebug, WorkerDebug string
	common                []string
}

// Build compiles the programs below root into dir.
func Build(ctx context.Context, root, dir string) error {
	for _, name := range []string{"order-api", "order-worker"} {
		cmd := exec.CommandContext(ctx, "go", "build", "-o", filepath.Join(dir, name), ".") //nolint:gosec // fixed names
		cmd.Dir = filepath.Join(root, "services", name)
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("build %s: %w: %s", name, err, out)
		}
	}
	return nil
}

// New prepares the system; nothing is started yet. bin holds the programs. Only with profiles do they
// get a debug address: the sampling behind it is not part of a measurement.
func New(s *server.Services, bin, scratch string, profiles bool) (*System, error) {
	db, err := alternatives.Open(s.DSN)
	if err != nil {
		return nil, err
	}
	db.SetMaxOpenConns(1)
	sys := &System{
		Services: s, Redis: redis.NewClient(&redis.Options{Addr: s.Redis.Addr}), DB: db,
		Secret: "measured-with-a-key-of-32-bytes-or-more", token: "operator-token-of-the-bench",
		bin: bin, scratch: scratch,
	}
	for _, a := range []*string{&sys.APIAddr, &sys.apiMetrics, &sys.AdminAddr, &sys.workerMetrics, &sys.APIDebug, &sys.WorkerDebug} {
		port, err := s.Port()
		if err != nil {
			return nil, err
		}
		*a = "127.0.0.1:" + strconv.Itoa(port)
	}
	if !profiles {
		sys.APIDebug, sys.WorkerDebug = "", ""
	}
	sum := sha256.Sum256([]byte(sys.token))
	sys.common = []string{
		"SECKILL_REDIS_ADDRS=" + s.Redis.Addr,
		"SECKILL_RABBITMQ_URL=" + s.Rabbit.URL,
		"SECKILL_AUTH_JWT_SECRET=" + sys.Secret,
		"SECKILL_PAYMENT_SECRETS=whsec_" + base64.StdEncoding.EncodeToString([]byte("measured-payment-secret-32-bytes")),
		"SECKILL_ADMIN_TOKENS=bench:operator:" + hex.EncodeToString(sum[:]),
		"SECKILL_LOG_LEVEL=warn",
	}
	return sys, nil
}

// Close ends the programs.
func (s *System) Close() {
	for _, p := range []*proc.Process{s.API, s.Worker, s.Admin} {
		if p != nil {
			p.Stop()
		}
	}
	_ = s.Redis.Close() // only read from
	_ = s.DB.Close()    // only read from
}

// StartAPI starts order-api and waits until it is ready.
func (s *System) StartAPI(ctx context.Context, env ...string) error {
	p, err := proc.Start("order-api", filepath.Join(s.scratch, "order-api.log"), filepath.Join(s.bin, "order-api"),
		append(append([]string{
			"SECKILL_HTTP_ADDR=" + s.APIAddr, "SECKILL_METRICS_ADDR=" + s.apiMetrics, "SECKILL_DEBUG_ADDR=" + s.APIDebug,
		}, s.common...), env...))
	if err != nil {
		return err
	}
	s.API = p
	return p.Ready(ctx, "http://"+s.apiMetrics+"/readyz")
}

// SecondAPI starts another replica of order-api and says where it listens.
func (s *System) SecondAPI(ctx context.Context) (*proc.Process, string, error) {
	var addr [2]string
	for i := range addr {
		port, err := s.Services.Port()
		if err != nil {
			return nil, "", err
		}
		addr[i] = "127.0.0.1:" + strconv.Itoa(port)
	}
	p, err := proc.Start("order-api", filepath.Join(s.scratch, "order-api-2.log"), filepath.Join(s.bin, "order-api"),
		append([]string{"SECKILL_HTTP_ADDR=" + addr[0], "SECKILL_METRICS_ADDR=" + addr[1]}, s.common...))
	if err != nil {
		return nil, "", err
	}
	return p, addr[0], p.Ready(ctx, "http://"+addr[1]+"/readyz")
}

// StopAPI ends order-api in order.
func (s *System) StopAPI() {
	s.API.Stop()
	s.API = nil
}

// StartAdmin starts a worker that only serves the admin API; it makes schema and topology.
func (s *System) StartAdmin(ctx context.Context) error {
	port, err := s.Services.Port()
	if err != nil {
		return err
	}
	metrics := "127.0.0.1:" + strconv.Itoa(port)
	s.Admin, err = s.worker("order-worker-admin", Paused, metrics, s.AdminAddr, "")
	if err != nil {
		return err
	}
	return s.Admin.Ready(ctx, "http://"+metrics+"/readyz")
}

// StartWorker starts a worker with the given roles and waits until it is ready.
func (s *System) StartWorker(ctx context.Context, roles string, env ...string) error {
	var err error
	s.Worker, err = s.worker("order-worker", roles, s.workerMetrics, "127.0.0.1:0", s.WorkerDebug, env...)
	if err != nil {
		return err
	}
	return s.Worker.Ready(ctx, "http://"+s.workerMetrics+"/readyz")
}

// StopWorker ends the worker in order.
func (s *System) StopWorker() {
	s.Worker.Stop()
	s.Worker = nil
}

func (s *System) worker(name, roles, metrics, admin, debug string, env ...string) (*proc.Process, error) {
	return proc.Start(name, filepath.Join(s.scratch, name+".log"), filepath.Join(s.bin, "order-worker"),
		append(append([]string{
			"SECKILL_WORKER_ROLES=" + roles, "SECKILL_METRICS_ADDR=" + metrics, "SECKILL_ADMIN_ADDR=" + admin,
			"SECKILL_MYSQL_DSN=" + s.Services.DSN, "SECKILL_DEBUG_ADDR=" + debug,
		}, s.common...), env...))
}

// Sell makes an activity with the given units and warms it. Its window is open.
func (s *System) Sell(ctx context.Context, id string, units int, paymentTimeout string) error {
	now := time.Now().UTC()
	plan := sale.Sale{
		ID: id, Name: id, StartsAt: now.Add(-time.Hour).Format(time.RFC3339), EndsAt: now.Add(24 * time.Hour).Format(time.RFC3339),
		PerUserLimit: 1, PaymentTimeout: paymentTimeout, Currency: "CNY", Qualification: sale.QualificationNone, Buckets: 1,
		Items:          []sale.Item{{SKU: SKU, PriceMinor: 9900, Pools: map[string]int{"national": units}}},
		RefundAfterEnd: sale.RefundNational, Shadow: true,
	}
	if err := s.admin(ctx, http.MethodPost, "/admin/v1/activities", plan, nil); err != nil {
		return fmt.Errorf("make activity %s: %w", id, err)
	}
	var warm adminapi.WarmResult
	if err := s.admin(ctx, http.MethodPost, "/admin/v1/activities/"+id+"/warm", nil, &warm); err != nil {
		return fmt.Errorf("warm activity %s: %w", id, err)
	}
	return nil
}

func (s *System) admin(ctx context.Context, method, path string, in, out any) error {
	var body io.Reader = http.NoBody
	if in != nil {
		b, err := json.Marshal(in)
		if err != nil {
			return err
		}
		body = bytes.NewReader(b)
	}
	req, err := http.NewRequestWithContext(ctx, method, "http://"+s.AdminAddr+path, body)
	if err != nil {
		return err
	}
	req.Header.Set("Authorization", "Bearer "+s.token)
	if in != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer res.Body.Close() //nolint:errcheck // read to its end below
	b, err := io.ReadAll(res.Body)
	if err != nil {
		return err
	}
	if res.StatusCode/100 != 2 {
		return fmt.Errorf("%s %s answers %d: %s", method, path, res.StatusCode, b)
	}
	if out != nil {
		return json.Unmarshal(b, out)
	}
	return nil
}

// Path is where an activity's buyers go.
func Path(activity string) string { return "/v1/activities/" + activity + "/orders" }

func tag(activity string) string { return "{" + activity + ":0}" }

// Outbox is how many orders of an activity were accepted and are not yet known to be in MySQL.
func (s *System) Outbox(ctx context.Context, activity string) (int64, error) {
	n, err := s.Redis.ZCard(ctx, "seckill:outbox:"+tag(activity)).Result()
	if err != nil {
		return 0, fmt.Errorf("read outbox of %s: %w", activity, err)
	}
	return n, nil
}

// Left is what Redis still has on sale.
func (s *System) Left(ctx context.Context, activity string) (int64, error) {
	n, err := s.Redis.Get(ctx, "seckill:stock:"+tag(activity)+":"+SKU+":national").Int64()
	if err != nil {
		return 0, fmt.Errorf("read stock of %s: %w", activity, err)
	}
	return n, nil
}

// Rows counts the orders of an activity in MySQL by status.
func (s *System) Rows(ctx context.Context, activity string) (map[string]int64, error) {
	rows, err := s.DB.QueryContext(ctx, "SELECT status, COUNT(*) FROM orders WHERE activity_id = ? GROUP BY status", activity)
	if err != nil {
		return nil, fmt.Errorf("count orders of %s: %w", activity, err)
	}
	defer rows.Close() //nolint:errcheck // rows.Err says it
	out := map[string]int64{}
	for rows.Next() {
		var status string
		var n int64
		if err := rows.Scan(&status, &n); err != nil {
			return nil, fmt.Errorf("count orders of %s: %w", activity, err)
		}
		out[status] = n
	}
	return out, errors.Join(rows.Err())
}

// RedisInfo reads numeric fields of INFO.
func (s *System) RedisInfo(ctx context.Context, fields ...string) (map[string]int64, error) {
	text, err := s.Redis.Info(ctx, "everything").Result()
	if err != nil {
		return nil, fmt.Errorf("read redis info: %w", err)
	}
	out := map[string]int64{}
	for line := range strings.SplitSeq(text, "\n") {
		k, v, _ := strings.Cut(strings.TrimSpace(line), ":")
		for _, f := range fields {
			if k == f {
				if out[f], err = strconv.ParseInt(v, 10, 64); err != nil {
					return nil, fmt.Errorf("read redis info %s: %w", f, err)
				}
			}
		}
	}
	if len(out) != len(fields) {
		return nil, fmt.Errorf("read redis info: got %v of %v", out, fields)
	}
	return out, nil
}

// Scripts tells how long single script calls held Redis up since it was started.
func (s *System) Scripts(ctx context.Context) (calls int64, longest time.Duration, over10ms int, err error) {
	slow, err := s.Redis.SlowLogGet(ctx, 1000).Result()
	if err != nil {
		return 0, 0, 0, fmt.Errorf("read slow log: %w", err)
	}
	for _, e := range slow {
		if len(e.Args) == 0 || !strings.HasPrefix(strings.ToLower(e.Args[0]), "eval") {
			continue // a command inside a script is logged once more, by itself
		}
		longest = max(longest, e.Duration)
		if e.Duration > 10*time.Millisecond {
			over10ms++
		}
	}
	text, err := s.Redis.Info(ctx, "commandstats").Result()
	if err != nil {
		return 0, 0, 0, fmt.Errorf("read command statistics: %w", err)
	}
	for line := range strings.SplitSeq(text, "\n") {
		if rest, ok := strings.CutPrefix(line, "cmdstat_evalsha:calls="); ok {
			n, _, _ := strings.Cut(rest, ",")
			if calls, err = strconv.ParseInt(n, 10, 64); err != nil {
				return 0, 0, 0, fmt.Errorf("read command statistics: %w", err)
			}
		}
	}
	return calls, longest, over10ms, nil
}

// APIMetric reads one sample of order-api's metrics; name carries the labels as they are exposed.
func (s *System) APIMetric(ctx context.Context, names ...string) (map[string]float64, error) {
	return metrics(ctx, s.apiMetrics, names...)
}

// WorkerMetric is APIMetric for the worker.
func (s *System) WorkerMetric(ctx context.Context, names ...string) (map[string]float64, error) {
	return metrics(ctx, s.workerMetrics, names...)
}

func metrics(ctx context.Context, addr string, names ...string) (map[string]float64, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+addr+"/metrics", http.NoBody)
	if err != nil {
		return nil, fmt.Errorf("read metrics: %w", err)
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, fmt.Errorf("read metrics: %w", err)
	}
	defer res.Body.Close() //nolint:errcheck // read to its end
	b, err := io.ReadAll(res.Body)
	if err != nil {
		return nil, fmt.Errorf("read metrics: %w", err)
	}
	out := map[string]float64{}
	for line := range strings.SplitSeq(string(b), "\n") {
		i := strings.LastIndexByte(line, ' ')
		if i < 0 || line[0] == '#' {
			continue
		}
		for _, n := range names {
			if line[:i] == n {
				if out[n], err = strconv.ParseFloat(line[i+1:], 64); err != nil {
					return nil, fmt.Errorf("read metric %s: %w", n, err)
				}
			}
		}
	}
	for _, n := range names {
		if _, ok := out[n]; !ok {
			return nil, fmt.Errorf("read metrics of %s: no %s", addr, n)
		}
	}
	return out, nil
}

// CPU is the time used so far by each process that has a part in an order.
func (s *System) CPU() (map[string]time.Duration, error) {
	pids := map[string]int{"redis": s.Services.Redis.PID, "rabbitmq": s.Services.Rabbit.PID, "mysql": s.Services.MySQL.PID}
	if s.API != nil {
		pids["order-api"] = s.API.PID
	}
	if s.Worker != nil {
		pids["order-worker"] = s.Worker.PID
	}
	out := map[string]time.Duration{}
	for name, pid := range pids {
		d, err := proc.CPU(pid)
		if err != nil {
			return nil, err
		}
		out[name] = d
	}
	return out, nil
}

// Profile fetches a pprof profile from a program's debug address into a file.
func Profile(ctx context.Context, addr, what string, to io.Writer) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+addr+"/debug/pprof/"+what, http.NoBody)
	if err != nil {
		return fmt.Errorf("read profile %s: %w", what, err)
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		return fmt.Errorf("read profile %s: %w", what, err)
	}
	defer res.Body.Close() //nolint:errcheck // read to its end
	if res.StatusCode != http.StatusOK {
		return fmt.Errorf("read profile %s: status %d", what, res.StatusCode)
	}
	if _, err := io.Copy(to, res.Body); err != nil {
		return fmt.Errorf("read profile %s: %w", what, err)
	}
	return nil
}
