package scenario

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"seckill/services/bench/internal/load"
	"seckill/services/bench/internal/proc"
	"seckill/services/bench/internal/server"
	"seckill/services/bench/internal/system"
)

// Config says how thorough a run is.
type Config struct {
	Root    string // of the repository
	Scratch string
	Long    bool
	Rounds  int             // in place of the mode's; 0: the mode's
	Only    map[string]bool // parts to run; empty: all
	Profile string          // folder for profiles; empty: none
}

// Parts of a run, in their order.
var Parts = []string{"memory", "rounds", "sustained", "single", "rollback", "sizes", "curve", "alternatives"}

// SingleEnv makes a worker that writes one order in each transaction. Everything else stays.
const SingleEnv = "SECKILL_WORKER_BATCH_ORDERS=1"

type runner struct {
	cfg  Config
	log  *slog.Logger
	sys  *system.System
	out  *Figures
	self string // this program, for the reference and the alternatives

	window  time.Duration
	tokens  string
	nTokens int
	noop    string // address of the reference
	noopPID int
	n       int // sales made
}

const connections = 256

// Run measures.
func Run(ctx context.Context, cfg Config, log *slog.Logger) (_ *Figures, err error) {
	self, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("find own program: %w", err)
	}
	r := &runner{
		cfg: cfg, log: log, self: self, window: 3 * time.Second, nTokens: 300_000,
		out: &Figures{When: time.Now().UTC(), Mode: "short", Rounds: 3, Machine: proc.Machine(), Settings: server.Settings()},
	}
	if cfg.Long {
		r.out.Mode, r.out.Rounds, r.window, r.nTokens = "long", 5, 10*time.Second, 1_200_000
	}
	if cfg.Rounds > 0 {
		r.out.Rounds = cfg.Rounds
	}
	r.step("start servers and build programs")
	bin := filepath.Join(cfg.Scratch, "bin")
	if err := os.MkdirAll(bin, 0o750); err != nil {
		return nil, fmt.Errorf("make scratch folder: %w", err)
	}
	if err := system.Build(ctx, cfg.Root, bin); err != nil {
		return nil, err
	}
	services, err := server.Start(cfg.Scratch)
	if err != nil {
		return nil, err
	}
	defer services.Close()
	r.out.Versions = services.Versions(ctx)
	if r.sys, err = system.New(services, bin, cfg.Scratch, cfg.Profile != ""); err != nil {
		return nil, err
	}
	defer r.sys.Close()
	r.tokens = filepath.Join(cfg.Scratch, "tokens")
	if err := load.Tokens(r.tokens, []byte(r.sys.Secret), r.nTokens, time.Now().Add(24*time.Hour)); err != nil {
		return nil, err
	}
	if err := r.sys.StartAdmin(ctx); err != nil {
		return nil, err
	}
	if err := r.sys.StartAPI(ctx); err != nil {
		return nil, err
	}
	stop, err := r.reference(ctx)
	if err != nil {
		return nil, err
	}
	defer stop()

	parts := map[string]func(context.Context) error{
		"memory": r.memory, "rounds": r.rounds, "sustained": r.sustained, "single": r.single,
		"rollback": r.rollback, "sizes": r.sizes, "curve": r.curve, "alternatives": r.alternatives,
	}
	for _, name := range Parts {
		if len(cfg.Only) > 0 && !cfg.Only[name] {
			continue
		}
		if err := parts[name](ctx); err != nil {
			return r.out, fmt.Errorf("measure %s: %w", name, err)
		}
	}
	calls, longest, over, err := r.sys.Scripts(ctx)
	if err != nil {
		return r.out, err
	}
	r.out.Scripts = &Scripts{Calls: calls, LongestMS: msOf(longest), Over10MS: over}
	return r.out, nil
}

func (r *runner) step(text string, args ...any) { r.log.Info(text, args...) }

func (r *runner) note(format string, args ...any) {
	s := fmt.Sprintf(format, args...)
	r.out.Notes = append(r.out.Notes, s)
	r.log.Warn(s)
}

// reference looks at one real answer and starts a handler that answers with as many bytes.
func (r *runner) reference(ctx context.Context) (stop func(), err error) {
	id, err := r.sale(ctx, 10, "30m")
	if err != nil {
		return nil, err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+r.sys.APIAddr+system.Path(id), strings.NewReader(system.Body))
	if err != nil {
		return nil, err
	}
	req.Header.Set("Authorization", "Bearer "+load.Token([]byte(r.sys.Secret), "first-buyer", time.Now().Add(time.Hour)))
	req.Header.Set("Content-Type", "application/json")
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, fmt.Errorf("look at an answer: %w", err)
	}
	body, err := io.ReadAll(res.Body)
	if err := errors.Join(err, res.Body.Close()); err != nil {
		return nil, fmt.Errorf("look at an answer: %w", err)
	}
	if res.StatusCode != http.StatusAccepted {
		return nil, fmt.Errorf("look at an answer: status %d: %s", res.StatusCode, body)
	}
	r.out.AnswerBytes = len(body)
	p, addr, err := r.start(ctx, "noop", "noop", "-size", strconv.Itoa(len(body)))
	if err != nil {
		return nil, err
	}
	r.noop, r.noopPID = addr, p.PID
	return p.Stop, nil
}

// start starts this program in another role, on a free port.
func (r *runner) start(ctx context.Context, name string, args ...string) (*proc.Process, string, error) {
	port, err := r.sys.Services.Port()
	if err != nil {
		return nil, "", err
	}
	addr := net.JoinHostPort("127.0.0.1", strconv.Itoa(port))
	p, err := proc.Start(name, filepath.Join(r.cfg.Scratch, name+".log"), r.self, nil, append(args, "-addr", addr)...)
	if err != nil {
		return nil, "", err
	}
	return p, addr, p.Ready(ctx, addr)
}

// noopPerS is how many requests per second the reference answers.
func (r *runner) noopPerS(ctx context.Context) (float64, error) {
	res, err := r.send(ctx, r.crowd(r.noop, system.Path("noop")))
	if err != nil {
		return 0, fmt.Errorf("reference: %w", err)
	}
	return res.PerSecond(res.Reserved), nil
}

// sale makes a new sale.
func (r *runner) sale(ctx context.Context, units int, paymentTimeout string) (string, error) {
	r.n++
	id := fmt.Sprintf("sale-%04d", r.n)
	return id, r.sys.Sell(ctx, id, units, paymentTimeout)
}

func (r *runner) crowd(addr string, paths ...string) load.Crowd {
	return load.Crowd{
		URL: "http://" + addr, Paths: paths, Body: system.Body, Tokens: r.tokens, Use: r.nTokens,
		Connections: connections, Threads: 2, Duration: r.window,
	}
}

// send runs a crowd whose answers must all be of the expected kinds.
func (r *runner) send(ctx context.Context, c load.Crowd) (load.CrowdResult, error) {
	res, err := c.Run(ctx, r.cfg.Scratch)
	if err != nil {
		return res, err
	}
	if res.Bad+res.Other202+res.Connect+res.Read+res.Write+res.Timeout > 0 {
		return res, fmt.Errorf("unexpected answers: %+v", res)
	}
	return res, nil
}

const (
	confirmedOrders = `seckill_handoff_orders_total{result="confirmed"}`
	messages        = `seckill_publish_total{result="confirmed"}`
	pipelines       = `seckill_redis_pipeline_commands_count`
	mallocs         = `go_memstats_mallocs_total`
	allocated       = `go_memstats_alloc_bytes_total`
)

func ms(us int64) float64 { return float64(us) / 1000 }

func msOf(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// units is more than one window can sell.
const units = 10_000_000

// rounds takes everything that is compared with the reference, in turns with it.
func (r *runner) rounds(ctx context.Context) error {
	if err := r.warmUp(ctx); err != nil {
		return fmt.Errorf("warm up: %w", err)
	}
	for i := range r.out.Rounds {
		r.step("round", "round", i+1, "of", r.out.Rounds)
		var x Round
		noop, err := r.send(ctx, r.crowd(r.noop, system.Path("noop")))
		if err != nil {
			return fmt.Errorf("reference: %w", err)
		}
		x.Noop, x.NoopP99 = noop.PerSecond(noop.Reserved), ms(noop.P99US)
		id, err := r.burst(ctx, &x)
		if err != nil {
			return fmt.Errorf("burst: %w", err)
		}
		// A shared machine changes its pace from second to second: the reference is taken on both sides.
		after, err := r.noopPerS(ctx)
		if err != nil {
			return err
		}
		x.Noop = (x.Noop + after) / 2
		if err := r.openLoop(ctx, &x); err != nil {
			return fmt.Errorf("open loop: %w", err)
		}
		if err := r.soldOut(ctx, &x); err != nil {
			return fmt.Errorf("sold out: %w", err)
		}
		r.out.Round = append(r.out.Round, x)
		r.step("round measured", "noop", int(x.Noop), "accept", int(x.Accept), "accept_vs_noop", x.Accept/x.Noop,
			"p99_open", x.AcceptOpenP99, "noop_p99_open", x.NoopOpenP99, "sold_out", int(x.SoldOut), "keyed", int(x.SoldOutKeyed))
		if err := r.drain(ctx, id); err != nil {
			return fmt.Errorf("drain: %w", err)
		}
	}
	return nil
}

// warmUp sends crowds that do not count. The first one of a run pays for what is new: memory that the
// kernel hands out page by page, queues, connections.
func (r *runner) warmUp(ctx context.Context) error {
	r.step("warm up")
	kept := *r.out
	defer func() { *r.out = kept }()
	if _, err := r.noopPerS(ctx); err != nil {
		return err
	}
	id, err := r.burst(ctx, &Round{})
	if err != nil {
		return err
	}
	return r.drain(ctx, id)
}

// burst sends a crowd while the consumers are paused. Only what the broker has confirmed by the end
// of the window counts: orders that still wait in the process are not published.
func (r *runner) burst(ctx context.Context, x *Round) (string, error) {
	id, err := r.sale(ctx, units, "30m")
	if err != nil {
		return "", err
	}
	const in, out = "total_net_input_bytes", "total_net_output_bytes"
	net0, err := r.sys.RedisInfo(ctx, in, out)
	if err != nil {
		return "", err
	}
	recv0, sent0, err := r.sys.Services.RabbitBytes()
	if err != nil {
		return "", err
	}
	m0, err := r.sys.APIMetric(ctx, confirmedOrders, mallocs, allocated, messages, pipelines)
	if err != nil {
		return "", err
	}
	cpu0, err := r.sys.CPU()
	if err != nil {
		return "", err
	}
	stopProfiles := r.profiles(ctx, "burst", r.sys.APIDebug)
	busy0, err := proc.Busy()
	if err != nil {
		return "", err
	}
	res, err := r.send(ctx, r.crowd(r.sys.APIAddr, system.Path(id)))
	if err != nil {
		return "", err
	}
	m1, err := r.sys.APIMetric(ctx, confirmedOrders, mallocs, allocated, messages, pipelines)
	if err != nil {
		return "", err
	}
	stopProfiles()
	n := float64(res.Reserved)
	confirmed := m1[confirmedOrders] - m0[confirmedOrders]
	x.AcceptedOnly, x.AcceptP99 = res.PerSecond(res.Reserved), ms(res.P99US)
	x.Accept = math.Min(x.AcceptedOnly, res.PerSecond(int64(confirmed)))
	x.Allocations = (m1[mallocs] - m0[mallocs]) / n
	x.OrdersPerMessage = confirmed / (m1[messages] - m0[messages])
	x.PerPipeline = n / (m1[pipelines] - m0[pipelines])
	x.AllocatedBytes = (m1[allocated] - m0[allocated]) / n
	if confirmed < 0.99*n {
		r.note("burst: %.0f accepted, only %.0f confirmed by the broker in the window", n, confirmed)
	}
	cpu1, err := r.sys.CPU()
	if err != nil {
		return "", err
	}
	busy1, err := proc.Busy()
	if err != nil {
		return "", err
	}
	ours := res.CPU
	for name, d := range cpu1 {
		ours += d - cpu0[name]
	}
	x.Others = math.Max(0, float64(busy1-busy0-ours)/float64(time.Duration(res.DurationUS)*time.Microsecond))
	r.out.CPUAccept = append(r.out.CPUAccept, perOrder(cpu0, cpu1, res.CPU, n))
	net1, err := r.sys.RedisInfo(ctx, in, out)
	if err != nil {
		return "", err
	}
	recv1, sent1, err := r.sys.Services.RabbitBytes()
	if err != nil {
		return "", err
	}
	x.RedisIn, x.RedisOut = float64(net1[in]-net0[in])/n, float64(net1[out]-net0[out])/n
	x.BrokerIn, x.BrokerOut = float64(recv1-recv0)/n, float64(sent1-sent0)/n
	if left, err := r.sys.Left(ctx, id); err != nil {
		return "", err
	} else if units-left < res.Reserved {
		return "", fmt.Errorf("the load tool got %d reservations, Redis gave %d", res.Reserved, units-left)
	}
	return id, nil
}

func perOrder(before, after map[string]time.Duration, tool time.Duration, n float64) CPU {
	out := CPU{}
	for name, d := range after {
		out[name] = float64((d - before[name]).Microseconds()) / n
	}
	if tool > 0 {
		out["load tool"] = float64(tool.Microseconds()) / n
	}
	return out
}

// openLoop takes the percentiles at one arrival rate for both, half of what the burst reached, and the
// reference's once more at half of what that reaches.
func (r *runner) openLoop(ctx context.Context, x *Round) error {
	half := func(rate float64) float64 {
		rate = math.Max(500, math.Floor(rate/200)*100)
		return math.Min(rate, float64(r.nTokens)/(r.window+500*time.Millisecond).Seconds())
	}
	x.Rate = half(x.Accept)
	id, err := r.sale(ctx, units, "30m")
	if err != nil {
		return err
	}
	for _, target := range []struct {
		addr, path     string
		rate           float64
		p50, p99, busy *float64
	}{
		{r.noop, system.Path("noop"), half(x.Noop), new(float64), &x.NoopHalfP99, new(float64)},
		{r.noop, system.Path("noop"), x.Rate, &x.NoopOpenP50, &x.NoopOpenP99, &x.NoopOpenBusy},
		{r.sys.APIAddr, system.Path(id), x.Rate, &x.AcceptOpenP50, &x.AcceptOpenP99, &x.AcceptOpenBusy},
	} {
		busy0, err := r.used()
		if err != nil {
			return err
		}
		res, err := load.OpenLoop{
			Addr: target.addr, Path: target.path, Body: system.Body, Tokens: r.tokens,
			Rate: target.rate, Connections: connections, Duration: r.window, Warmup: 500 * time.Millisecond,
		}.Run(ctx)
		if err != nil {
			return err
		}
		if res.Failed+res.Refused > 0 {
			return fmt.Errorf("unexpected answers: %d failed, %d refused: %s", res.Failed, res.Refused, res.FirstBad)
		}
		busy1, err := r.used()
		if err != nil {
			return err
		}
		*target.p50, *target.p99, *target.busy = msOf(res.P(50)), msOf(res.P(99)), (busy1-busy0).Seconds()/res.Elapsed.Seconds()
	}
	return nil
}

// used is the CPU time of everything that takes part: the programs, the servers, the reference and this load tool.
func (r *runner) used() (time.Duration, error) {
	all, err := r.sys.CPU()
	if err != nil {
		return 0, err
	}
	var sum time.Duration
	for _, d := range all {
		sum += d
	}
	for _, pid := range []int{r.noopPID, os.Getpid()} {
		d, err := proc.CPU(pid)
		if err != nil {
			return 0, err
		}
		sum += d
	}
	return sum, nil
}

// soldOut sends the crowd to a sale with nothing left, once without and once with a key.
func (r *runner) soldOut(ctx context.Context, x *Round) error {
	id, err := r.sale(ctx, 1, "30m")
	if err != nil {
		return err
	}
	// Somebody outside the crowd buys the one unit.
	last := load.OpenLoop{
		Addr: r.sys.APIAddr, Path: system.Path(id), Body: system.Body, Tokens: r.tokens, Skip: r.nTokens - 1,
		Rate: 1, Connections: 1, Duration: time.Second,
	}
	if res, err := last.Run(ctx); err != nil || res.Accepted != 1 {
		return fmt.Errorf("buy the last unit: %d accepted: %s: %w", res.Accepted, res.FirstBad, err)
	}
	for _, keyed := range []bool{false, true} {
		c := r.crowd(r.sys.APIAddr, system.Path(id))
		c.Use, c.Keyed = r.nTokens-2, keyed
		if r.profilesWanted() {
			name := "soldout"
			if keyed {
				name = "soldout-keyed"
			}
			defer r.profiles(ctx, name, r.sys.APIDebug)()
		}
		res, err := r.send(ctx, c)
		if err != nil {
			return err
		}
		if res.Reserved > 0 {
			return fmt.Errorf("%d units of none were sold", res.Reserved)
		}
		if keyed {
			x.SoldOutKeyed = res.PerSecond(res.SoldOut)
		} else {
			x.SoldOut = res.PerSecond(res.SoldOut)
		}
	}
	return nil
}

// drain starts the consumers on what a burst left in the queue and measures how fast orders become
// rows with everything that belongs to it: ledger, holdings, expiry scheduled, confirmed, acked.
func (r *runner) drain(ctx context.Context, id string) error {
	if err := r.settle(ctx, id); err != nil {
		return err
	}
	p, cpu, err := r.drained(ctx, id, "persist")
	if err != nil {
		return err
	}
	r.out.Persist = append(r.out.Persist, p)
	r.out.CPUPersist = append(r.out.CPUPersist, cpu)
	r.step("drained", "orders", p.Orders, "per_s", int(p.PerS))
	return nil
}

// settle waits until order-api has handed over what it had in hand.
func (r *runner) settle(ctx context.Context, _ string) error {
	return wait(ctx, 20*time.Second, func() error {
		m, err := r.sys.APIMetric(ctx, "seckill_handoff_queue_length")
		if err != nil {
			return err
		}
		if m["seckill_handoff_queue_length"] > 0 {
			return errors.New("order-api still publishes")
		}
		return nil
	})
}

// drained starts a worker and times the sale's outbox from the first sign of progress until it is
// empty, so that the start of the program does not count.
func (r *runner) drained(ctx context.Context, id, profile string, env ...string) (Persist, CPU, error) {
	before, err := r.sys.Outbox(ctx, id)
	if err != nil {
		return Persist{}, nil, err
	}
	if before < 100 {
		return Persist{}, nil, fmt.Errorf("only %d orders wait", before)
	}
	if err := r.sys.StartWorker(ctx, Consumers, env...); err != nil {
		return Persist{}, nil, err
	}
	defer r.sys.StopWorker()
	defer r.profiles(ctx, profile, r.sys.WorkerDebug)()
	var start time.Time
	var first int64
	var cpu0 map[string]time.Duration
	deadline := time.Now().Add(5 * time.Minute)
	for {
		n, err := r.sys.Outbox(ctx, id)
		if err != nil {
			return Persist{}, nil, err
		}
		now := time.Now()
		if start.IsZero() && n < before {
			start, first = now, n
			if cpu0, err = r.sys.CPU(); err != nil {
				return Persist{}, nil, err
			}
		}
		if n == 0 {
			cpu1, err := r.sys.CPU()
			if err != nil {
				return Persist{}, nil, err
			}
			p := Persist{Orders: before, PerS: float64(first) / now.Sub(start).Seconds()}
			rows, err := r.sys.Rows(ctx, id)
			if err != nil {
				return p, nil, err
			}
			if rows["pending"] < before {
				return p, nil, fmt.Errorf("%d orders waited, rows: %v", before, rows)
			}
			return p, perOrder(cpu0, cpu1, 0, float64(first)), nil
		}
		if now.After(deadline) {
			return Persist{}, nil, fmt.Errorf("%d of %d orders still wait", n, before)
		}
		if err := pause(ctx, 5*time.Millisecond); err != nil {
			return Persist{}, nil, err
		}
	}
}

// Consumers are the roles that make an accepted order a row; the others would take part of the time.
const Consumers = "orders"

// sustained lets everything run at once and keeps the backlog bounded: the crowd is held while more
// than the bound of its orders are accepted and not yet confirmed.
func (r *runner) sustained(ctx context.Context) error {
	if err := r.sys.StartWorker(ctx, system.Everybody); err != nil {
		return err
	}
	defer r.sys.StopWorker()
	const bound = 4000
	for i := range r.out.Rounds {
		id, err := r.sale(ctx, units, "30m")
		if err != nil {
			return err
		}
		noop, err := r.noopPerS(ctx)
		if err != nil {
			return err
		}
		c := r.crowd(r.sys.APIAddr, system.Path(id))
		c.Duration = 2 * r.window
		c.Gate = func() bool {
			n, err := r.sys.Outbox(ctx, id)
			return err != nil || n < bound
		}
		var stop []func()
		if i == 0 {
			stop = append(stop, r.profiles(ctx, "sustained-worker", r.sys.WorkerDebug), r.profiles(ctx, "sustained-api", r.sys.APIDebug))
		}
		cpu0, err := r.sys.CPU()
		if err != nil {
			return err
		}
		start := time.Now()
		res, err := c.Run(ctx, r.cfg.Scratch)
		if err != nil {
			return err
		}
		took := time.Since(start)
		left, err := r.sys.Outbox(ctx, id)
		if err != nil {
			return err
		}
		cpu1, err := r.sys.CPU()
		if err != nil {
			return err
		}
		for _, f := range stop {
			f()
		}
		if res.Bad+res.Other202+res.SoldOut > 0 {
			return fmt.Errorf("unexpected answers: %+v", res)
		}
		done := res.Reserved - left
		s := Sustained{Noop: noop, Orders: done, PerS: float64(done) / took.Seconds(), Backlog: left, Bound: bound}
		r.out.Sustained = append(r.out.Sustained, s)
		r.out.CPUAll = append(r.out.CPUAll, perOrder(cpu0, cpu1, res.CPU, float64(done)))
		r.step("sustained", "per_s", int(s.PerS), "vs_noop", s.PerS/noop, "orders", done, "backlog", left)
		if err := r.empty(ctx, id); err != nil {
			return err
		}
	}
	return nil
}

// empty waits until every order of a sale is confirmed.
func (r *runner) empty(ctx context.Context, id string) error {
	return wait(ctx, 2*time.Minute, func() error {
		n, err := r.sys.Outbox(ctx, id)
		if err == nil && n > 0 {
			err = fmt.Errorf("%d orders still wait", n)
		}
		return err
	})
}

// single measures the same drain with one transaction for each order.
func (r *runner) single(ctx context.Context) error {
	n := 2000
	if r.cfg.Long {
		n = 10_000
	}
	for range r.out.Rounds {
		// One buyer at a time: each order travels in a message of its own, else the transaction would
		// hold as many orders as the message.
		id, err := r.fill(ctx, n, "30m", 1)
		if err != nil {
			return err
		}
		p, _, err := r.drained(ctx, id, "single", SingleEnv)
		if err != nil {
			return err
		}
		r.out.Single = append(r.out.Single, p)
		r.step("one transaction per order", "per_s", int(p.PerS))
	}
	return nil
}

// fill makes a sale of exactly n units, sells all, and waits until order-api has published them. It
// goes at a moderate rate, so that nothing is left to the relay.
func (r *runner) fill(ctx context.Context, n int, timeout string, conns int) (string, error) {
	id, err := r.sale(ctx, n, timeout)
	if err != nil {
		return "", err
	}
	return id, r.buy(ctx, id, n, conns, false)
}

func (r *runner) buy(ctx context.Context, id string, n, conns int, keyed bool) error {
	const rate = 8000
	m0, err := r.sys.APIMetric(ctx, confirmedOrders)
	if err != nil {
		return err
	}
	res, err := load.OpenLoop{
		Addr: r.sys.APIAddr, Path: system.Path(id), Body: system.Body, Tokens: r.tokens, Keyed: keyed,
		Rate: rate, Connections: conns, Duration: time.Duration(float64(n) / rate * float64(time.Second)),
	}.Run(ctx)
	if err != nil {
		return err
	}
	if res.Failed+res.Refused > 0 {
		return fmt.Errorf("fill %s: %d failed, %d refused: %s", id, res.Failed, res.Refused, res.FirstBad)
	}
	return wait(ctx, 20*time.Second, func() error {
		m, err := r.sys.APIMetric(ctx, confirmedOrders)
		if err == nil && int64(m[confirmedOrders]-m0[confirmedOrders]) < res.Accepted {
			err = fmt.Errorf("%.0f of %d published", m[confirmedOrders]-m0[confirmedOrders], res.Accepted)
		}
		return err
	})
}

// rollback lets orders expire while nobody rolls back, so that all are due when the worker starts.
func (r *runner) rollback(ctx context.Context) error {
	const n = 100_000
	id, err := r.fill(ctx, n, "5s", 64)
	if err != nil {
		return err
	}
	if err := r.sys.StartWorker(ctx, Consumers); err != nil {
		return err
	}
	if err := r.empty(ctx, id); err != nil {
		return err
	}
	r.sys.StopWorker()
	if err := wait(ctx, time.Minute, func() error {
		text, err := r.sys.Services.Rabbit.Ctl("list_queues", "name", "messages")
		if err != nil {
			return err
		}
		for line := range strings.SplitSeq(text, "\n") {
			if f := strings.Fields(line); len(f) == 2 && f[0] == "seckill.delay.5s" && f[1] == "0" {
				return nil
			}
		}
		return errors.New("messages still wait for their time")
	}); err != nil {
		return err
	}
	sold := int64(n)
	before, err := r.sys.Left(ctx, id)
	if err != nil {
		return err
	}
	if before != 0 {
		return fmt.Errorf("%d of %d units are back before the rollback", before, n)
	}
	if err := r.sys.StartWorker(ctx, "rollbacks"); err != nil {
		return err
	}
	defer r.sys.StopWorker()
	profiled := func() {}
	defer func() { profiled() }()
	var start time.Time
	var first int64
	var cpu0 map[string]time.Duration
	deadline := time.Now().Add(5 * time.Minute)
	for {
		left, err := r.sys.Left(ctx, id)
		if err != nil {
			return err
		}
		now := time.Now()
		if start.IsZero() && left > 0 {
			start, first = now, left
			profiled = r.profiles(ctx, "rollback", r.sys.WorkerDebug)
			if cpu0, err = r.sys.CPU(); err != nil {
				return err
			}
		}
		if left == sold {
			rows, err := r.sys.Rows(ctx, id)
			if err != nil {
				return err
			}
			if rows["cancelled"] != sold {
				return fmt.Errorf("all units are back, rows: %v", rows)
			}
			cpu1, err := r.sys.CPU()
			if err != nil {
				return err
			}
			r.out.CPURollback = append(r.out.CPURollback, perOrder(cpu0, cpu1, 0, float64(sold-first)))
			r.out.Rollback = &Rollback{Orders: sold, PerS: float64(sold-first) / now.Sub(start).Seconds()}
			r.step("rolled back", "orders", sold, "per_s", int(r.out.Rollback.PerS))
			return nil
		}
		if now.After(deadline) {
			return fmt.Errorf("%d of %d units came back", left, sold)
		}
		if err := pause(ctx, 5*time.Millisecond); err != nil {
			return err
		}
	}
}

// memory weighs reservations in an otherwise empty Redis, and idle connections in a fresh order-api.
func (r *runner) memory(ctx context.Context) error {
	n := 50_000
	out := &Memory{}
	r.out.Memory = out
	used := func() (float64, error) {
		// Buffers come and go; the smallest of some looks is what is kept.
		best := math.Inf(1)
		for range 10 {
			m, err := r.sys.RedisInfo(ctx, "used_memory")
			if err != nil {
				return 0, err
			}
			best = math.Min(best, float64(m["used_memory"]))
			if err := pause(ctx, 150*time.Millisecond); err != nil {
				return 0, err
			}
		}
		return best, nil
	}
	for _, keyed := range []bool{false, true} {
		id, err := r.sale(ctx, n, "30m")
		if err != nil {
			return err
		}
		before, err := used()
		if err != nil {
			return err
		}
		if err := r.buy(ctx, id, n, 64, keyed); err != nil {
			return err
		}
		waiting, err := used()
		if err != nil {
			return err
		}
		if _, _, err := r.drained(ctx, id, ""); err != nil {
			return err
		}
		after, err := used()
		if err != nil {
			return err
		}
		if keyed {
			out.RedisKeyed = (after - before) / float64(n)
		} else {
			out.Redis, out.RedisWaiting = (after-before)/float64(n), (waiting-before)/float64(n)
		}
	}
	r.sys.StopAPI()
	if err := r.sys.StartAPI(ctx); err != nil {
		return err
	}
	idle, err := r.idle(ctx)
	if err != nil {
		return err
	}
	out.APIIdlePer1000 = idle
	r.step("weighed", "redis", int(out.Redis), "keyed", int(out.RedisKeyed), "waiting", int(out.RedisWaiting), "idle_1000", int(idle))
	return nil
}

// idle opens connections that ask once and then say nothing.
func (r *runner) idle(ctx context.Context) (float64, error) {
	const many = 4000
	id, err := r.sale(ctx, 1, "30m")
	if err != nil {
		return 0, err
	}
	var all []net.Conn
	defer func() {
		for _, c := range all {
			c.Close() //nolint:errcheck,gosec // the run is over
		}
	}()
	open := func(n int) error {
		for range n {
			c, err := net.DialTimeout("tcp", r.sys.APIAddr, time.Second)
			if err != nil {
				return fmt.Errorf("open idle connection: %w", err)
			}
			all = append(all, c)
			if _, err := fmt.Fprintf(c, "GET /v1/activities/%s HTTP/1.1\r\nHost: bench\r\n\r\n", id); err != nil {
				return fmt.Errorf("use idle connection: %w", err)
			}
			buf := make([]byte, 4096)
			if _, err := c.Read(buf); err != nil {
				return fmt.Errorf("use idle connection: %w", err)
			}
		}
		return nil
	}
	if err := open(200); err != nil {
		return 0, err
	}
	before, err := proc.Resident(r.sys.API.PID)
	if err != nil {
		return 0, err
	}
	if err := open(many); err != nil {
		return 0, err
	}
	if err := pause(ctx, time.Second); err != nil {
		return 0, err
	}
	after, err := proc.Resident(r.sys.API.PID)
	if err != nil {
		return 0, err
	}
	return float64(after-before) / many * 1000, nil
}

// sizes compares sales of different sizes. Small sales follow one another, so that all windows are
// equally long; only accepted reservations count.
func (r *runner) sizes(ctx context.Context) error {
	all := []int{1000, 10_000, 100_000, 1_000_000}
	// Twice in turns: what comes later meets a fuller Redis and a warmer process.
	best := make([]Size, len(all))
	window := time.Second
	if r.cfg.Long {
		window = r.window
	}
	for range 2 {
		for i, size := range all {
			most := min(r.nTokens, 25_000*int(window.Seconds())) // more than a window can use
			sales := max(2, (most+size-1)/size)
			if size >= most {
				sales = 1
			}
			paths := make([]string, sales)
			for k := range paths {
				id, err := r.sale(ctx, size, "30m")
				if err != nil {
					return err
				}
				paths[k] = system.Path(id)
			}
			c := r.crowd(r.sys.APIAddr, paths...)
			c.Duration = window
			if sales > 1 {
				c.PerPath = size
			}
			res, err := r.send(ctx, c)
			if err != nil {
				return err
			}
			x := Size{Units: size, Sales: sales, Reserved: res.Reserved, PerS: res.PerSecond(res.Reserved)}
			if x.PerS > best[i].PerS {
				best[i] = x
			}
			if err := r.purge(ctx); err != nil {
				return err
			}
		}
	}
	r.out.Sizes = best
	r.step("sizes", "sizes", fmt.Sprint(best))
	if !r.cfg.Long {
		return nil
	}
	return r.million(ctx)
}

// million sells a whole sale of a million units and compares its first window with its last.
func (r *runner) million(ctx context.Context) error {
	const size = 1_000_000
	id, err := r.sale(ctx, size, "30m")
	if err != nil {
		return err
	}
	var rates []string
	used, soldOut := 0, false
	for !soldOut && used < r.nTokens-2 {
		c := r.crowd(r.sys.APIAddr, system.Path(id))
		c.Skip, c.Use = used, r.nTokens-used
		// Each window may use only a part that it cannot exhaust, in both threads.
		c.Use = min(c.Use, 2*60_000*int(r.window.Seconds()))
		res, err := c.Run(ctx, r.cfg.Scratch)
		if err != nil {
			return err
		}
		soldOut = res.SoldOut > 0 || res.Bad > 0 || res.Reserved == 0
		if !soldOut {
			rates = append(rates, fmt.Sprintf("%.0f", res.PerSecond(res.Reserved)))
		}
		used += c.Use
	}
	r.note("one sale of a million units, reservations per second in consecutive windows: %s", strings.Join(rates, ", "))
	return r.purge(ctx)
}

// purge empties the work queue after a part that nobody persists. What is in the outboxes then stays
// there: no relay runs.
func (r *runner) purge(ctx context.Context) error {
	if err := r.settle(ctx, ""); err != nil {
		return err
	}
	_, err := r.sys.Services.Rabbit.Ctl("purge_queue", "seckill.orders")
	return err
}

// curve measures throughput and latency against connections.
func (r *runner) curve(ctx context.Context) error {
	window := time.Second
	if r.cfg.Long {
		window = 5 * time.Second
	}
	for _, n := range []int{8, 32, 128, 256, 512, 1024} {
		id, err := r.sale(ctx, units, "30m")
		if err != nil {
			return err
		}
		p := CurvePoint{Connections: n}
		c := r.crowd(r.noop, system.Path("noop"))
		c.Connections, c.Duration = n, window
		res, err := r.send(ctx, c)
		if err != nil {
			return err
		}
		p.Noop, p.NoopP99 = res.PerSecond(res.Reserved), ms(res.P99US)
		c = r.crowd(r.sys.APIAddr, system.Path(id))
		c.Connections, c.Duration = n, window
		if res, err = r.send(ctx, c); err != nil {
			return err
		}
		p.Accept, p.AcceptP50, p.AcceptP99 = res.PerSecond(res.Reserved), ms(res.P50US), ms(res.P99US)
		r.out.Curve = append(r.out.Curve, p)
		r.step("curve", "connections", n, "noop", int(p.Noop), "accept", int(p.Accept), "p99", p.AcceptP99)
		if err := r.purge(ctx); err != nil {
			return err
		}
	}
	return nil
}

func (r *runner) profilesWanted() bool { return r.cfg.Profile != "" }

// profiles collects CPU, heap, mutex and block profiles of what happens until the returned function
// is called. The CPU profile covers one window from now on.
func (r *runner) profiles(ctx context.Context, name, addr string) (stop func()) {
	if !r.profilesWanted() || name == "" {
		return func() {}
	}
	save := func(kind, what string) {
		f, err := os.Create(filepath.Join(r.cfg.Profile, name+"."+kind+".pprof")) //nolint:gosec // the user's folder
		if err != nil {
			r.log.Warn("no profile", "error", err)
			return
		}
		err = system.Profile(ctx, addr, what, f)
		if err := errors.Join(err, f.Close()); err != nil {
			r.log.Warn("no profile", "error", err)
		}
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		save("cpu", "profile?seconds="+strconv.Itoa(max(1, int(r.window.Seconds())-1)))
	}()
	return func() {
		<-done
		save("heap", "allocs")
		save("mutex", "mutex")
		save("block", "block")
	}
}

func wait(ctx context.Context, within time.Duration, cond func() error) error {
	deadline := time.Now().Add(within)
	for {
		err := cond()
		if err == nil {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("not reached within %s: %w", within, err)
		}
		if err := pause(ctx, 20*time.Millisecond); err != nil {
			return err
		}
	}
}

func pause(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}

// EnsureTools looks for the load tool and the servers and, where the machine is a Debian and we are
// root, installs what is missing.
func EnsureTools(ctx context.Context, log *slog.Logger) error {
	var missing []string
	for _, t := range []struct{ program, pkg string }{
		{"wrk", "wrk"}, {"redis-server", "redis-server"}, {"rabbitmqctl", "rabbitmq-server"}, {"mariadbd", "mariadb-server"},
	} {
		_, err := exec.LookPath(t.program)
		if err != nil {
			_, err = exec.LookPath("/usr/sbin/" + t.program)
		}
		if err != nil {
			missing = append(missing, t.pkg)
		}
	}
	if len(missing) == 0 {
		return nil
	}
	if _, err := exec.LookPath("apt-get"); err != nil || os.Geteuid() != 0 {
		return fmt.Errorf("a measurement needs %s", strings.Join(missing, ", "))
	}
	log.Info("install with apt-get", "packages", missing)
	for _, args := range [][]string{{"update", "-q"}, append([]string{"install", "-y", "-q"}, missing...)} {
		if out, err := exec.CommandContext(ctx, "apt-get", args...).CombinedOutput(); err != nil { //nolint:gosec // names from above
			return fmt.Errorf("install %v: %w: %s", missing, err, out)
		}
	}
	return nil
}
