package acceptance

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"seckill/pkg/adminapi"
	"seckill/pkg/testkit"
)

// quickRebuild shortens what a rebuild waits for, to a little more than the api's publish deadline.
func quickRebuild() map[string]string {
	return map[string]string{"SECKILL_REBUILD_PUBLISH_WAIT": "5500ms", "SECKILL_REBUILD_INTERVAL": "200ms", "SECKILL_RECONCILE_INTERVAL": "5s"}
}

// O04, R10: 40 of 100 are sold, 15 of these are on their way to MySQL, and Redis loses everything. Buyers
// hear that it does not work just now, never that there is nothing left. After the rebuild 60 are on sale,
// not 75 and not 100; every order, limit and idempotency key is as it was.
func TestO04_RebuildAfterTotalLoss(t *testing.T) {
	t.Parallel()
	private := testkit.StartRedis(t)
	s := newStack(t, options{redis: private, workers: 2, cold: true, workerEnv: quickRebuild()})
	// Orders have a worker of their own, which can be held back.
	s.workers[0].env["SECKILL_WORKER_ROLES"] = "payments,rollbacks,relay,scheduler,deadletters,reconciler,admin"
	s.workers[1].env["SECKILL_WORKER_ROLES"] = "orders"
	for _, p := range append(s.workers, s.apis...) {
		p.start("")
	}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	for name, lose := range map[string]func(){
		"flushed":                    func() { s.rdb.FlushAll(ctx) },
		"restarted without its data": private.Restart,
	} {
		t.Run(name, func(t *testing.T) {
			s := s.with(t)
			sale := s.sell(100, 1, 15*time.Minute)
			s.known(0, sale)
			user := func(i int) string { return fmt.Sprintf("o04-%s-%d", sale, i) }
			var ids []string
			for i := range 25 {
				ids = append(ids, s.mustBuy(sale, user(i)))
			}
			s.quiet(sale, true)
			s.workers[1].term()
			confirmed := s.apis[0].metric("seckill_handoff_orders_total", `result="confirmed"`)
			for i := range 15 {
				ids = append(ids, s.mustBuy(sale, user(25+i)))
			}
			testkit.Eventually(t, within, func() error {
				if n := s.apis[0].metric("seckill_handoff_orders_total", `result="confirmed"`) - confirmed; n < 15 {
					return fmt.Errorf("%v of 15 are published", n)
				}
				return nil
			})
			lose()
			testkit.Eventually(t, within, func() error { return s.rdb.Ping(ctx).Err() })
			refused := func() {
				t.Helper()
				var got answers
				barrier(50, func(i int) { got.add(s.buy(0, sale, user(100+i), "", 1)) })
				got.want(t, map[string]int{"temporarily_unavailable": 50})
			}
			refused()
			// Announced again, and cold: it is the same to buyers.
			testkit.Eventually(t, within, func() error { return s.rdb.HGet(ctx, s.prefix+"seckill:activity:{"+sale+":0}", "warm").Err() })
			refused()
			if keys := s.rdb.Keys(ctx, s.prefix+"seckill:[sou]*{"+sale+":*").Val(); len(keys) != 0 {
				t.Errorf("made again by requests: %v", keys)
			}
			if n := s.count("SELECT COUNT(*) FROM orders WHERE activity_id = ?", sale); n != 25 {
				t.Errorf("%d orders", n)
			}
			testkit.Eventually(t, within, func() error {
				if n := s.workers[0].metric("seckill_activities_cold"); n < 1 {
					return fmt.Errorf("%v cold sales: nobody is alarmed", n)
				}
				return nil
			})

			if out, errOut, code := s.ctl("rebuild", sale, "--dry-run", "-o", "json"); code != 0 || !strings.Contains(out, `"units": 75`) {
				t.Errorf("dry run: %d %s %s", code, out, errOut)
			}
			if _, errOut, code := s.ctl("rebuild", sale); code != 2 {
				t.Errorf("without --yes: %d %s", code, errOut)
			}
			// It waits for the orders that are on their way, and nobody takes them.
			done := make(chan struct{})
			var out, errOut string
			var code int
			go func() {
				defer close(done)
				out, errOut, code = s.ctl("rebuild", sale, "--yes", "-o", "json")
			}()
			testkit.Eventually(t, within, func() error {
				var r adminapi.Rebuild
				if status, text := s.admin(http.MethodGet, "/admin/v1/activities/"+sale+"/rebuild", nil, &r); status != http.StatusOK || !strings.Contains(r.Note, "seckill.orders has no consumer") {
					return fmt.Errorf("%d %s", status, text)
				}
				return nil
			})
			s.workers[1].start("")
			<-done
			var r adminapi.Rebuild
			if err := json.Unmarshal([]byte(out), &r); err != nil || code != 0 || r.State != adminapi.RebuildDone {
				t.Fatalf("rebuild: %d %s %s %v", code, out, errOut, err)
			}
			if p := r.Result.Pools[0]; p.Units != 60 || r.Result.Records != 40 || r.Result.Keys != 40 || r.Result.Mended+r.Result.Left != 0 {
				t.Errorf("%+v", r.Result)
			}
			if n := s.level(sale, "sku", "national"); n != 60 {
				t.Fatalf("%d on sale", n)
			}
			for i, id := range ids {
				if again := s.buy(0, sale, user(i), "k", 1); again.OrderID != id {
					t.Errorf("his key: %d %s, want %s", again.Status, again.Body, id)
				}
				if second := s.buy(0, sale, user(i), "", 1); second.Code != "limit_reached" {
					t.Errorf("a second unit: %d %s", second.Status, second.Body)
				}
			}
			var got answers
			barrier(80, func(i int) { got.add(s.buy(0, sale, user(100+i), "", 1)) })
			got.want(t, map[string]int{"accepted": 60, "sold_out": 20})
			ids = append(ids, got.ids...)
			s.settled(sale, true, ids...)
			if n := s.count("SELECT live FROM activity_stock WHERE activity_id = ?", sale); n != 100 || len(ids) != 100 {
				t.Errorf("%d live of %d accepted", n, len(ids))
			}
		})
	}
}

// R10, P1–P4: Redis loses everything in the middle of a crowd, and is rebuilt while the crowd goes on.
func TestR10_LossAndRebuildUnderLoad(t *testing.T) {
	t.Parallel()
	private := testkit.StartRedis(t)
	s := newStack(t, options{redis: private, apis: 2, workers: 2, workerEnv: quickRebuild()})
	ctx, cancel := context.WithTimeout(context.Background(), 4*time.Minute)
	defer cancel()
	const units = 600
	sale := s.sell(units, 2, 15*time.Minute)
	s.known(0, sale)
	s.known(1, sale)
	type told struct {
		id       string
		at       time.Time
		accepted bool
	}
	var mu sync.Mutex
	var all []told
	accepted := func() (n int) {
		mu.Lock()
		defer mu.Unlock()
		for _, a := range all {
			if a.accepted {
				n++
			}
		}
		return n
	}
	stop := make(chan struct{})
	var crowd sync.WaitGroup
	for c := range 8 {
		crowd.Add(1)
		go func() {
			defer crowd.Done()
			for i := 0; ; i++ {
				select {
				case <-stop:
					return
				default:
				}
				began := time.Now()
				r := s.buy(c%2, sale, fmt.Sprintf("load-%d-%d", c, i), "k", 1)
				if r.OrderID != "" {
					mu.Lock()
					all = append(all, told{r.OrderID, began, r.accepted()})
					mu.Unlock()
				} else if r.Err == nil {
					time.Sleep(5 * time.Millisecond) // refused: the crowd is not the test
				}
			}
		}()
	}
	testkit.Eventually(t, within, func() error {
		if n := accepted(); n < units/4 {
			return fmt.Errorf("%d accepted", n)
		}
		return nil
	})
	s.rdb.FlushAll(ctx)
	lost := time.Now()
	if out, errOut, code := s.ctl("rebuild", sale, "--yes"); code != 0 {
		t.Fatalf("rebuild: %d %s %s", code, out, errOut)
	}
	testkit.Eventually(t, 2*within, func() error {
		if r := s.buy(0, sale, "last", "", 1); r.Code != "sold_out" {
			if r.accepted() {
				mu.Lock()
				all = append(all, told{r.OrderID, time.Now(), true})
				mu.Unlock()
			}
			return fmt.Errorf("not sold out: %d %s", r.Status, r.Body)
		}
		return nil
	})
	close(stop)
	crowd.Wait()
	s.quiet(sale, true)
	testkit.Eventually(t, within, func() error {
		if out, errOut, code := s.ctl("reconcile", sale, "--repair"); code != 0 {
			return fmt.Errorf("%d %s %s", code, out, errOut)
		}
		return nil
	})
	// What Redis forgot before it was published is gone, and only that.
	var ids []string
	seen := map[string]bool{}
	gone := 0
	for _, a := range all {
		if seen[a.id] {
			continue
		}
		seen[a.id] = true
		switch {
		case s.status(a.id) != "":
			ids = append(ids, a.id)
		case a.accepted:
			gone++
			if age := lost.Sub(a.at); age > 10*time.Second || age < 0 {
				t.Errorf("order %s, accepted %s before the loss, has no row", a.id, age)
			}
		}
	}
	t.Logf("%d accepted, %d of them lost with redis, %d rejected", accepted(), gone, s.count("SELECT COUNT(*) FROM orders WHERE activity_id = ? AND status = 'rejected'", sale))
	s.settled(sale, true, ids...)
	if n := s.count("SELECT live + available FROM activity_stock WHERE activity_id = ?", sale); n != units {
		t.Errorf("%d of %d units", n, units)
	}
	s.client.CloseIdleConnections()
}

// R10: the only worker is killed in the middle of a rebuild, between any two of its steps; the next one goes
// on, and the operator's command, which has waited, sees it through.
func TestR10_KilledInMidRebuild(t *testing.T) {
	t.Parallel()
	private := testkit.StartRedis(t)
	s := newStack(t, options{redis: private, workerEnv: quickRebuild()})
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	sale := s.sell(40, 1, 15*time.Minute)
	s.known(0, sale)
	var ids []string
	for _, point := range []string{"rebuild.drain", "rebuild.records", "rebuild.before_commit", "rebuild.write", "rebuild.open"} {
		got := s.crowd(sale, strings.ReplaceAll(point, ".", "-"), 4)
		if len(got) != 4 {
			t.Fatalf("%s: %d of 4 accepted", point, len(got))
		}
		ids = append(ids, got...)
		s.quiet(sale, true)
		s.workers[0].term()
		s.workers[0].start(point + "=kill")
		s.rdb.FlushAll(ctx)
		done := make(chan struct{})
		var errOut string
		var code int
		go func() {
			defer close(done)
			_, errOut, code = s.ctl("rebuild", sale, "--yes")
		}()
		s.workers[0].died()
		s.workers[0].start("")
		<-done
		if code != 0 {
			t.Fatalf("%s: %d %s", point, code, errOut)
		}
		if n := s.level(sale, "sku", "national"); n != 40-len(ids) {
			t.Errorf("%s: %d on sale after %d were sold", point, n, len(ids))
		}
		if n := s.count("SELECT attempts FROM rebuilds WHERE activity_id = ?", sale); n < 2 {
			t.Errorf("%s: %d attempts", point, n)
		}
	}
	if ids = append(ids, s.crowd(sale, "after", 40)...); len(ids) != 40 {
		t.Errorf("%d accepted of 40 units", len(ids))
	}
	s.settled(sale, true, ids...)
}
