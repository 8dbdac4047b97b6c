package scenario

import (
	"context"
	"errors"
	"fmt"
	"time"

	"seckill/services/bench/alternatives"
	"seckill/services/bench/internal/load"
	"seckill/services/bench/internal/proc"
	"seckill/services/bench/internal/system"
)

// alternatives measures each of the usual designs and this system in the same way.
func (r *runner) alternatives(ctx context.Context) error {
	for _, kind := range []string{"mutex", "database", "decr", "lua"} {
		x, err := r.rival(ctx, kind)
		if err != nil {
			return fmt.Errorf("%s: %w", kind, err)
		}
		r.out.Rivals = append(r.out.Rivals, x)
		r.step("alternative", "figures", fmt.Sprintf("%+v", x))
	}
	x, err := r.ours(ctx)
	if err != nil {
		return fmt.Errorf("this system: %w", err)
	}
	r.out.Rivals = append(r.out.Rivals, x)
	r.step("alternative", "figures", fmt.Sprintf("%+v", x))
	return nil
}

// small is a sale that even the slowest design sells out in a few seconds.
const small = 600

func (r *runner) rival(ctx context.Context, kind string) (Rival, error) {
	x := Rival{Name: kind}
	onRedis := kind == "decr" || kind == "lua"
	offer := func(n int) (string, error) {
		r.n++
		id := fmt.Sprintf("%s-%04d", kind, r.n)
		if err := alternatives.Setup(ctx, r.sys.DB, id, system.SKU, n); err != nil {
			return "", err
		}
		if onRedis {
			return id, alternatives.SetupRedis(ctx, r.sys.Redis, id, system.SKU, n)
		}
		return id, nil
	}
	start := func() (*proc.Process, string, error) {
		return r.start(ctx, "alternative", "alternative", "-kind", kind, "-mysql", r.sys.Services.DSN,
			"-redis", r.sys.Services.Redis.Addr, "-secret", r.sys.Secret)
	}
	// Units that are neither on sale nor in an order.
	missing := func(id string, n int) (gone, sold int64, err error) {
		rows, left, err := alternatives.Sold(ctx, r.sys.DB, id)
		if err != nil {
			return 0, 0, err
		}
		switch {
		case onRedis:
			if left, err = alternatives.Left(ctx, r.sys.Redis, id, system.SKU); err != nil {
				return 0, 0, err
			}
		case kind == "mutex":
			left = n - rows // that is what it starts with again
		}
		return int64(n - left - rows), int64(rows), nil
	}

	const many = 1_000_000
	id, err := offer(many)
	if err != nil {
		return x, err
	}
	smallSale, err := offer(small)
	if err != nil {
		return x, err
	}
	held, err := r.mysqlConnections(ctx)
	if err != nil {
		return x, err
	}
	one, addr, err := start()
	if err != nil {
		return x, err
	}
	defer func() { one.Stop() }()
	peak := r.peakConnections(ctx)
	res, err := r.send(ctx, r.crowd(addr, system.Path(id)))
	x.Connections = peak() - held
	if err != nil {
		return x, err
	}
	x.PerS, x.P99 = res.PerSecond(res.Reserved), ms(res.P99US)

	two, addr2, err := start()
	if err != nil {
		return x, err
	}
	defer func() { two.Stop() }()
	if err := r.sellOut(ctx, smallSale, addr, addr2); err != nil {
		return x, err
	}
	_, sold, err := missing(smallSale, small)
	if err != nil {
		return x, err
	}
	x.Oversold, x.Undersold = max(0, sold-small), max(0, small-sold)

	id, err = offer(many)
	if err != nil {
		return x, err
	}
	if kind == "mutex" { // it reads its stock when it starts
		one.Stop()
		if one, addr, err = start(); err != nil {
			return x, err
		}
	}
	answered, err := r.killed(ctx, addr, id, one)
	if err != nil {
		return x, err
	}
	// What was under way in the database ends by itself.
	if err := pause(ctx, 500*time.Millisecond); err != nil {
		return x, err
	}
	gone, sold, err := missing(id, many)
	if err != nil {
		return x, err
	}
	x.LostUnits, x.LostOrders = gone, max(0, answered-sold)
	return x, nil
}

// sellOut sends crowds of different buyers to replicas until nobody gets anything any more.
func (r *runner) sellOut(ctx context.Context, id string, addrs ...string) error {
	share := r.nTokens / len(addrs) / 10
	for part := range 10 {
		type outcome struct {
			res load.CrowdResult
			err error
		}
		done := make(chan outcome, len(addrs))
		for i, addr := range addrs {
			c := r.crowd(addr, system.Path(id))
			c.Skip, c.Use = (part*len(addrs)+i)*share, share
			c.Connections, c.Threads, c.Duration = connections/2, 1, time.Second
			go func() {
				res, err := c.Run(ctx, r.cfg.Scratch)
				done <- outcome{res, err}
			}()
		}
		var err error
		reserved, refused := int64(0), int64(0)
		for range addrs {
			o := <-done
			err = errors.Join(err, o.err)
			reserved += o.res.Reserved
			refused += o.res.SoldOut
		}
		if err != nil {
			return err
		}
		if reserved == 0 && refused > 0 {
			return nil
		}
	}
	return fmt.Errorf("%s is not sold out after 10 crowds", id)
}

// killed kills a server in the middle of a crowd and says how many buyers had been told yes.
func (r *runner) killed(ctx context.Context, addr, id string, p *proc.Process) (int64, error) {
	type outcome struct {
		res load.CrowdResult
		err error
	}
	done := make(chan outcome, 1)
	go func() {
		res, err := r.crowd(addr, system.Path(id)).Run(ctx, r.cfg.Scratch)
		done <- outcome{res, err}
	}()
	if err := pause(ctx, r.window/2); err != nil {
		return 0, err
	}
	p.Kill()
	o := <-done
	return o.res.Reserved, o.err
}

func (r *runner) ours(ctx context.Context) (Rival, error) {
	x := Rival{Name: "this system"}
	id, err := r.sale(ctx, units, "30m")
	if err != nil {
		return x, err
	}
	held, err := r.mysqlConnections(ctx)
	if err != nil {
		return x, err
	}
	if err := r.sys.StartWorker(ctx, system.Everybody); err != nil {
		return x, err
	}
	defer r.sys.StopWorker()
	peak := r.peakConnections(ctx)
	res, err := r.send(ctx, r.crowd(r.sys.APIAddr, system.Path(id)))
	x.Connections = peak() - held
	if err != nil {
		return x, err
	}
	x.PerS, x.P99 = res.PerSecond(res.Reserved), ms(res.P99US)
	if err := r.empty(ctx, id); err != nil {
		return x, err
	}

	// Two replicas of order-api on one small sale.
	if id, err = r.sale(ctx, small, "30m"); err != nil {
		return x, err
	}
	second, addr2, err := r.sys.SecondAPI(ctx)
	if err != nil {
		return x, err
	}
	err = r.sellOut(ctx, id, r.sys.APIAddr, addr2)
	second.Stop()
	if err != nil {
		return x, err
	}
	if err := r.empty(ctx, id); err != nil {
		return x, err
	}
	rows, err := r.sys.Rows(ctx, id)
	if err != nil {
		return x, err
	}
	x.Oversold, x.Undersold = max(0, rows["pending"]-small), max(0, small-rows["pending"])

	// kill -9 of order-api under load; the relay brings what was on its way.
	const many = 1_000_000
	if id, err = r.sale(ctx, many, "30m"); err != nil {
		return x, err
	}
	answered, err := r.killed(ctx, r.sys.APIAddr, id, r.sys.API)
	if err != nil {
		return x, err
	}
	if err := r.sys.StartAPI(ctx); err != nil {
		return x, err
	}
	if err := r.empty(ctx, id); err != nil {
		return x, err
	}
	left, err := r.sys.Left(ctx, id)
	if err != nil {
		return x, err
	}
	if rows, err = r.sys.Rows(ctx, id); err != nil {
		return x, err
	}
	x.LostUnits, x.LostOrders = many-left-rows["pending"], max(0, answered-rows["pending"])
	return x, nil
}

// mysqlConnections is how many connections MySQL has now, the harness's own among them.
func (r *runner) mysqlConnections(ctx context.Context) (int, error) {
	var name string
	var n int
	if err := r.sys.DB.QueryRowContext(ctx, "SHOW GLOBAL STATUS LIKE 'Threads_connected'").Scan(&name, &n); err != nil {
		return 0, fmt.Errorf("count MySQL connections: %w", err)
	}
	return n, nil
}

// peakConnections looks again and again until the returned function is called, which says how many
// there were at most.
func (r *runner) peakConnections(ctx context.Context) func() int {
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan int)
	go func() {
		most := 0
		for pause(ctx, 100*time.Millisecond) == nil {
			if n, err := r.mysqlConnections(ctx); err == nil {
				most = max(most, n)
			}
		}
		done <- most
	}()
	return func() int { cancel(); return <-done }
}
