package acceptance

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"seckill/pkg/adminapi"
	"seckill/pkg/testkit"
)

// footprint is what the running system holds of its surroundings.
type footprint struct {
	redisConns, mysqlConns, amqpConns, amqpChannels int
	goroutines                                      map[string]float64
	heap                                            map[string]float64 // at which the next collection starts: twice what lives
	series                                          map[string]int
	redisMemory                                     int
}

// footprint measures; the broker and Redis are private, so everything there is the system's or the
// test's own.
func (s *stack) footprint(rabbit *testkit.RabbitServer) footprint {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	s.client.CloseIdleConnections() // the test's own
	f := footprint{goroutines: map[string]float64{}, heap: map[string]float64{}, series: map[string]int{}}
	clients, err := s.rdb.ClientList(ctx).Result()
	if err != nil {
		s.t.Fatal(err)
	}
	f.redisConns = strings.Count(clients, "id=")
	f.mysqlConns = s.count("SELECT COUNT(*) FROM information_schema.processlist WHERE db = DATABASE()")
	out, err := rabbit.Ctl("list_connections", "channels")
	if err != nil {
		s.t.Fatal(err)
	}
	for line := range strings.Lines(out) {
		if n, err := strconv.Atoi(strings.TrimSpace(line)); err == nil {
			f.amqpConns++
			f.amqpChannels += n
		}
	}
	for _, p := range slices.Concat(s.apis, s.workers) {
		f.goroutines[p.name] = p.metric("go_goroutines")
		f.heap[p.name] = p.metric("go_memstats_next_gc_bytes")
		_, body, err := p.get("/metrics")
		if err != nil {
			s.t.Fatal(err)
		}
		f.series[p.name] = strings.Count(body, "\n")
	}
	info, err := s.rdb.Info(ctx, "memory").Result()
	if err != nil {
		s.t.Fatal(err)
	}
	for line := range strings.Lines(info) {
		if v, ok := strings.CutPrefix(strings.TrimSpace(line), "used_memory:"); ok {
			if f.redisMemory, err = strconv.Atoi(v); err != nil {
				s.t.Fatal(err)
			}
		}
	}
	return f
}

// grown says in what f is more than it was, beyond what has a reason to stay:
//
//   - the pools of Redis and MySQL connections keep what the busiest moment (eight sales at once) needed;
//   - each connection has up to two goroutines, and a request that is under way has some;
//   - live heap: caches of what was seen last, a few hundred KiB; the figure is twice that;
//   - Redis: keys (markers, hashes, receipts) of up to 1 KiB, and the buffers of its connections.
//
// A leak of a connection, a channel, a goroutine or a series for each sale is far above all of these.
func (f footprint) grown(was footprint, keys int) error {
	const poolSlack, goroutineSlack, heapSlack, bufferSlack = 12, 24, 16 << 20, 2 << 20
	var errs []error
	more := func(what string, now, then, slack int) {
		if now > then+slack {
			errs = append(errs, fmt.Errorf("%s: %d, at the start %d, at most %d more", what, now, then, slack))
		}
	}
	more("redis connections", f.redisConns, was.redisConns, poolSlack)
	more("mysql connections", f.mysqlConns, was.mysqlConns, poolSlack)
	more("broker connections", f.amqpConns, was.amqpConns, 0)
	more("broker channels", f.amqpChannels, was.amqpChannels, 0)
	for p := range was.goroutines {
		more("goroutines of "+p, int(f.goroutines[p]), int(was.goroutines[p]), goroutineSlack)
		more("heap of "+p, int(f.heap[p]), int(was.heap[p]), heapSlack)
		more("metric series of "+p, f.series[p], was.series[p], 20) // codes that had not been seen before
	}
	more("memory of redis", f.redisMemory, was.redisMemory, 1024*keys+bufferSlack)
	return errors.Join(errs...)
}

// A whole life of a small sale: made, warmed, sold out of, paid, cancelled and left, and ended. It gives
// its orders.
func (s *stack) life(n int) (activity string, ids []string) {
	s.t.Helper()
	sale := s.open(map[string]int{"national": 5}, time.Second, nil)
	s.known(0, sale)
	for i := range 4 {
		user := fmt.Sprintf("soak-%d-%d", n, i)
		id := s.mustBuy(sale, user)
		ids = append(ids, id)
		switch i {
		case 0, 1:
			s.mustPay(id)
		case 2:
			// On a busy machine its second may be over before.
			if r := s.cancel(id, user); !r.accepted() && r.Code != "order_not_cancellable" {
				s.t.Errorf("cancel: %d %s", r.Status, r.Body)
			}
		}
	}
	s.mustAdmin(http.MethodPost, "/admin/v1/activities/"+sale+"/end", adminapi.EndRequest{Reason: "soak"}, nil)
	return sale, ids
}

// Sixty sales, one after the other, then eight at once, on one replica of each program. Each is made as
// the one before it is ended: the five seconds of the delay queue before each settlement overlap.
// Afterwards the system holds what it held after its first sale.
func TestSoak_ManySalesLeaveNothingBehind(t *testing.T) {
	t.Parallel()
	private := testkit.StartRedis(t)
	rabbit := testkit.StartRabbitMQ(t)
	s := newStack(t, options{redis: private, rabbit: rabbit, workerEnv: fastEnds(nil)})
	ctx, cancel := context.WithTimeout(context.Background(), 8*time.Minute)
	defer cancel()
	sales := map[string][]string{}
	var order []string
	add := func(activity string, ids []string) {
		sales[activity] = ids
		order = append(order, activity)
	}
	// The first sale opens what is opened with the first use: connections, caches, series.
	add(s.life(0))
	s.over(order[0], sales[order[0]]...)
	start := s.footprint(rabbit)

	const oneByOne, atOnce = 60, 8
	for n := range oneByOne {
		add(s.life(1 + n))
	}
	for _, sale := range order {
		s.reaches(sale, adminapi.ActivityClosed)
	}
	var mu sync.Mutex
	var wg sync.WaitGroup
	for n := range atOnce {
		wg.Go(func() {
			activity, ids := s.life(1 + oneByOne + n)
			mu.Lock()
			defer mu.Unlock()
			add(activity, ids)
		})
	}
	wg.Wait()
	for _, sale := range order {
		s.reaches(sale, adminapi.ActivityClosed)
	}
	// What each sale must have come to; the last ones in full.
	for _, sale := range order[len(order)-3:] {
		s.over(sale, sales[sale]...)
	}
	w := &wrong{t: t}
	receipts := 0
	for _, sale := range order {
		if n := s.count("SELECT COUNT(*) FROM orders WHERE activity_id = ?", sale); n != len(sales[sale]) {
			w.add("%s has %d orders, %d were accepted", sale, n, len(sales[sale]))
		}
		if n := s.count("SELECT COUNT(*) FROM activity_stock WHERE activity_id = ? AND (available <> 0 OR withheld <> 0 OR allocated <> live + returned OR settled_at IS NULL)", sale); n > 0 {
			w.add("%s is not settled to the unit", sale)
		}
		receipts += s.count("SELECT COUNT(*) FROM orders o WHERE activity_id = ? AND (status = 'paid' OR EXISTS (SELECT 1 FROM payments p WHERE p.order_id = o.id AND p.status = 'refund_due'))", sale)
	}
	for what, query := range map[string]string{
		"orders without a final state": "SELECT COUNT(*) FROM orders WHERE status = 'pending'",
		"compensations":                "SELECT COUNT(*) FROM compensations",
		"dead letters":                 "SELECT COUNT(*) FROM dead_letters",
		"inventory rows unexplained":   "SELECT COUNT(*) FROM inventory i WHERE on_hand <> (SELECT SUM(delta) FROM stock_ledger l WHERE l.account = 'inventory' AND l.sku_id = i.sku_id AND l.pool = i.pool)",
	} {
		if n := s.count(query); n > 0 {
			w.add("%d %s", n, what)
		}
	}
	// Redis: one marker and one hash for each sale, the receipts, and nothing else.
	kinds := map[string]int{}
	it := s.rdb.Scan(ctx, 0, "*", 1000).Iterator()
	seen := map[string]bool{}
	for it.Next(ctx) {
		if k := it.Val(); !seen[k] {
			seen[k] = true
			kind, _, _ := strings.Cut(k, "{")
			if strings.HasSuffix(k, ":end") {
				kind = "marker"
			}
			kinds[kind]++
		}
	}
	if err := it.Err(); err != nil {
		t.Fatal(err)
	}
	if len(kinds) != 3 || kinds["marker"] != len(order) || kinds["seckill:activity:"] != len(order) || kinds["seckill:receipt:"] != receipts {
		w.add("keys in redis after %d sales with %d receipts: %v", len(order), receipts, kinds)
	}
	// What is under way comes to rest; what leaks does not.
	testkit.Eventually(t, 30*time.Second, func() error {
		// An open transaction keeps its connection; innodb_trx itself needs a privilege that users do not have.
		if n := s.workers[0].metric("go_sql_in_use_connections"); n > 0 {
			return fmt.Errorf("%v connections of the database pool are out", n)
		}
		return s.footprint(rabbit).grown(start, len(seen))
	})
	t.Logf("start %+v, after %d sales %+v", start, len(order), s.footprint(rabbit))
}
