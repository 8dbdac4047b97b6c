package rebuild_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"seckill/pkg/adminapi"
	"seckill/pkg/messaging"
	"seckill/pkg/order"
	"seckill/pkg/stock"
	"seckill/pkg/testkit"
	"seckill/services/order-worker/internal/activity"
	"seckill/services/order-worker/internal/rig"
	"seckill/services/order-worker/internal/store"
)

const within = 2 * time.Minute

func short(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	t.Cleanup(cancel)
	return ctx
}

// forget lets Redis lose everything that it holds of the rig.
func forget(t *testing.T, r *rig.Rig) {
	t.Helper()
	ctx := short(t)
	for cursor := uint64(0); ; {
		names, next, err := r.Redis.Scan(ctx, cursor, r.Prefix+"*", 1000).Result()
		if err != nil {
			t.Fatal(err)
		}
		if len(names) > 0 {
			if err := r.Redis.Unlink(ctx, names...).Err(); err != nil {
				t.Fatal(err)
			}
		}
		if cursor = next; cursor == 0 {
			return
		}
	}
}

// buyWith reserves a unit with an idempotency key.
func buyWith(r *rig.Rig, sale, user, key string) (stock.Reserved, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	a, err := r.Stock.Activity(ctx, sale)
	if err != nil {
		return stock.Reserved{}, err
	}
	id, err := order.NewIDs().New(sale, order.Bucket(user, a.Buckets))
	if err != nil {
		return stock.Reserved{}, err
	}
	return r.Stock.Reserve(ctx, stock.Reservation{
		ID: id, User: user, SKU: "sku", Region: "national", Pools: []string{"national"}, Quantity: 1, IdemKey: key, IdemDigest: "0a",
	})
}

// consumeAll takes messages from every queue.
func consumeAll(r *rig.Rig) (stop func()) {
	stops := []func(){r.ConsumeOrders(), r.ConsumePayments(), r.ConsumeRollbacks(), r.ConsumeDead()}
	return func() {
		for _, s := range stops {
			s()
		}
	}
}

func request(t *testing.T, r *rig.Rig) adminapi.Rebuild {
	t.Helper()
	var out adminapi.Rebuild
	if status, p := r.Call(rig.OperatorToken, http.MethodPost, "/admin/v1/activities/sale/rebuild", nil, &out); status != http.StatusAccepted {
		t.Fatalf("%d %+v", status, p)
	}
	return out
}

func show(t *testing.T, r *rig.Rig) adminapi.Rebuild {
	t.Helper()
	var out adminapi.Rebuild
	if status, p := r.Call(rig.ViewerToken, http.MethodGet, "/admin/v1/activities/sale/rebuild", nil, &out); status != http.StatusOK {
		t.Fatalf("%d %+v", status, p)
	}
	return out
}

func becomes(t *testing.T, r *rig.Rig, state string) adminapi.Rebuild {
	t.Helper()
	var out adminapi.Rebuild
	testkit.Eventually(t, within, func() error {
		if out = show(t, r); out.State != state {
			return fmt.Errorf("the rebuild is %s, step %s: %s", out.State, out.Step, out.Note)
		}
		return nil
	})
	return out
}

// same checks that both stores agree, to the last unit.
func same(t *testing.T, r *rig.Rig) {
	t.Helper()
	testkit.Eventually(t, within, func() error {
		res, err := r.Reconciler.Reconcile(short(t), "sale", false)
		if err != nil {
			return err
		}
		if len(res.Differences) > 0 || !res.Stable {
			return fmt.Errorf("%+v", res)
		}
		// What is on its way is no difference; here it has to arrive.
		if left, n := r.Level("sale", "national"), r.Count("SELECT available FROM activity_stock WHERE pool = 'national'"); left != n {
			return fmt.Errorf("%d on sale, %d available", left, n)
		}
		return nil
	})
	if n := r.Count("SELECT COUNT(*) FROM activity_stock WHERE allocated <> available + withheld + live + returned"); n != 0 {
		t.Errorf("%d pools do not add up", n)
	}
	if n := r.Count("SELECT COUNT(*) FROM orders WHERE status = 'rejected'"); n != 0 {
		t.Errorf("%d orders rejected", n)
	}
}

// sellOut buys one unit each for strangers until there is nothing left, and says how many there were.
func sellOut(t *testing.T, r *rig.Rig) int {
	t.Helper()
	for n := 0; ; n++ {
		o, err := r.Buy("sale", fmt.Sprintf("stranger-%d", n), 1)
		if errors.Is(err, stock.ErrSoldOut) {
			return n
		}
		if err != nil {
			t.Fatal(err)
		}
		r.Publish(messaging.OrderReserved([]order.Order{o}))
	}
}

// O04, R10: 40 of 100 are sold, 15 of them are on their way to MySQL, and Redis forgets everything.
func TestO04_SaleComesBackAfterATotalLoss(t *testing.T) {
	t.Parallel()
	r := rig.New(t, rig.Options{})
	plan := rig.Plan("sale", map[string]int{"national": 100})
	plan.Buckets, plan.PerUserLimit, plan.Qualification = 4, 2, "list"
	r.Sell(plan)
	var users []string
	for i := range 40 {
		users = append(users, fmt.Sprintf("u%d", i))
	}
	for i := range 200 {
		users = append(users, fmt.Sprintf("stranger-%d", i))
	}
	if _, err := r.Activities.Qualify(short(t), "sale", users, rig.Operator()); err != nil {
		t.Fatal(err)
	}
	var sold []stock.Reserved
	for i := range 40 {
		o, err := buyWith(r, "sale", fmt.Sprintf("u%d", i), "key")
		if err != nil {
			t.Fatal(err)
		}
		sold = append(sold, o)
	}
	stop := consumeAll(r)
	for _, o := range sold[:25] {
		r.Publish(messaging.OrderReserved([]order.Order{o.Order}))
	}
	rows := func(n int) {
		t.Helper()
		testkit.Eventually(t, within, func() error {
			if got := r.Count("SELECT COUNT(*) FROM orders"); got != n {
				return fmt.Errorf("%d rows, want %d", got, n)
			}
			return nil
		})
	}
	rows(25)
	// One of them is cancelled, one is paid, one is paid and refunded.
	if err := r.Rollbacks.Cancel(short(t), sold[0].ID, order.ReasonOperatorCancelled); err != nil {
		t.Fatal(err)
	}
	for i := 1; i <= 2; i++ {
		r.Publish(messaging.OrderPaid(messaging.Payment{OrderID: sold[i].ID, TransactionID: fmt.Sprintf("t%d", i), AmountMinor: 1999, Currency: "EUR", ReceivedAt: time.Now()}))
	}
	testkit.Eventually(t, within, func() error {
		if n := r.Count("SELECT COUNT(*) FROM orders WHERE status = 'paid'"); n != 2 {
			return fmt.Errorf("%d paid", n)
		}
		return nil
	})
	r.Publish(messaging.RefundRequested(messaging.Refund{OrderID: sold[2].ID, Reason: order.ReasonOperatorRefunded, Actor: "tess", RequestedAt: time.Now()}))
	testkit.Eventually(t, within, func() error {
		if n := r.Count("SELECT COUNT(*) FROM orders WHERE status = 'refunded'"); n != 1 {
			return fmt.Errorf("%d refunded", n)
		}
		return nil
	})
	stop()
	for _, o := range sold[25:] {
		r.Publish(messaging.OrderReserved([]order.Order{o.Order}))
	}
	forget(t, r)

	loop := r.Go(r.Activities.Run) // announces the sale again, cold
	testkit.Eventually(t, within, func() error {
		_, err := r.Stock.Activity(short(t), "sale")
		return err
	})
	for i := range 50 {
		if _, err := r.Buy("sale", fmt.Sprintf("stranger-%d", i), 1); !errors.Is(err, stock.ErrNotWarmed) {
			t.Fatalf("after the loss: %v", err)
		}
	}
	if _, err := r.Reconciler.Reconcile(short(t), "sale", true); !errors.Is(err, stock.ErrNotWarmed) {
		t.Errorf("comparing what is lost: %v", err)
	}
	if keys, err := r.Redis.Keys(short(t), r.Prefix+"seckill:[sou]*").Result(); err != nil || len(keys) != 0 {
		t.Errorf("made again by themselves: %v, %v", keys, err)
	}

	var dry adminapi.Rebuild
	if status, p := r.Call(rig.OperatorToken, http.MethodPost, "/admin/v1/activities/sale/rebuild", adminapi.RebuildRequest{DryRun: true}, &dry); status != http.StatusOK {
		t.Fatalf("%d %+v", status, p)
	}
	if len(dry.Result.Pools) != 1 || dry.Result.Pools[0].Units != 77 || dry.Result.Records != 25 {
		t.Errorf("a rehearsal of the rebuild: %+v", dry.Result)
	}
	r.Go(r.Rebuilds.Run)
	if j := request(t, r); j.State != adminapi.RebuildRunning || j.Joined || !j.Resume {
		t.Errorf("%+v", j)
	}
	if j := request(t, r); !j.Joined {
		t.Errorf("a second request: %+v", j)
	}
	testkit.Eventually(t, within, func() error {
		if j := show(t, r); !strings.Contains(j.Note, "no consumer") {
			return fmt.Errorf("it does not wait for the consumers: %+v", j)
		}
		return nil
	})
	consumeAll(r)
	j := becomes(t, r, adminapi.RebuildDone)
	// 40 bought, one came back, one was refunded.
	res := j.Result
	if res.Pools[0].Units != 62 || res.Records != 40 || res.Keys != 40 || res.Limits != 38 || res.Qualifications != 240 ||
		res.Statuses["pending"] != 37 || res.Statuses["paid"] != 1 || res.Statuses["cancelled"] != 1 || res.Statuses["refunded"] != 1 || res.Mended+res.Left != 0 {
		t.Errorf("%+v", res)
	}
	if n := r.Level("sale", "national"); n != 62 {
		t.Fatalf("%d on sale", n)
	}
	same(t, r)
	// Nobody's answer is forgotten: his key, his order, his limit.
	for i, o := range sold {
		again, err := buyWith(r, "sale", o.User, "key")
		if err != nil || !again.Replay || again.ID != o.ID {
			t.Errorf("key of %s: %+v, %v", o.User, again, err)
		}
		if i != 0 && i != 2 {
			var limit *stock.LimitError
			if _, err := r.Buy("sale", o.User, 2); !errors.As(err, &limit) {
				t.Errorf("%s holds one unit and got two more: %v", o.User, err)
			}
		}
		if mine, err := r.Stock.Mine(short(t), "sale", order.Bucket(o.User, 4), o.User); err != nil || len(mine) != 1 {
			t.Errorf("%s finds %d orders, %v", o.User, len(mine), err)
		}
	}
	if _, err := r.Buy("sale", "unqualified", 1); !errors.Is(err, stock.ErrNotQualified) {
		t.Error(err)
	}
	if rec, err := r.Stock.Order(short(t), sold[2].ID); err != nil || rec.Status != order.Refunded || !rec.RefundDue {
		t.Errorf("%+v, %v", rec, err)
	}
	if n := sellOut(t, r); n > 62 || n < 50 {
		t.Errorf("%d more sold", n)
	}
	same(t, r)
	if n := r.Count("SELECT live FROM activity_stock"); n != 100-r.Level("sale", "national") {
		t.Errorf("%d live", n)
	}
	if n := r.Count("SELECT COUNT(*) FROM operator_audit WHERE action = 'activity.rebuild'"); n != 2 {
		t.Errorf("%d audit rows", n)
	}
	if n := r.Count("SELECT COUNT(*) FROM rebuild_barriers"); n != 0 {
		t.Errorf("%d barriers left", n)
	}
	loop()
}

// R10: a message of the old life comes after the rebuild.
func TestR10_LateOrderIsARowLikeAnyOther(t *testing.T) {
	t.Parallel()
	r := rig.New(t, rig.Options{})
	r.Sell(rig.Plan("sale", map[string]int{"national": 10}))
	late, lost := r.MustBuy("sale", "late"), r.MustBuy("sale", "lost")
	_ = lost // its message is never published: a reservation that Redis forgot
	forget(t, r)
	consumeAll(r)
	r.Go(r.Rebuilds.Run)
	request(t, r)
	becomes(t, r, adminapi.RebuildDone)
	if n := r.Level("sale", "national"); n != 10 {
		t.Fatalf("%d on sale", n)
	}
	r.Publish(messaging.OrderReserved([]order.Order{late}), messaging.OrderReserved([]order.Order{late}))
	testkit.Eventually(t, within, func() error {
		if n := r.Count("SELECT COUNT(*) FROM orders WHERE status = 'pending' AND epoch = 1"); n != 1 {
			return fmt.Errorf("%d rows", n)
		}
		return nil
	})
	if _, err := r.Reconciler.Reconcile(short(t), "sale", true); err != nil {
		t.Fatal(err)
	}
	same(t, r)
	if n := r.Level("sale", "national"); n != 9 {
		t.Errorf("%d on sale", n)
	}
	if n := sellOut(t, r); n != 9 {
		t.Errorf("%d sold", n)
	}
	same(t, r)
}

// R10, R15: an order that waits behind a dead letter keeps its unit.
func TestR10_ParkedOrdersKeepTheirUnits(t *testing.T) {
	t.Parallel()
	r := rig.New(t, rig.Options{})
	r.Sell(rig.Plan("sale", map[string]int{"national": 10}))
	var orders []order.Order
	for i := range 3 {
		orders = append(orders, r.MustBuy("sale", fmt.Sprintf("u%d", i)))
	}
	fail := r.Consume(messaging.QueueOrders, func(_ context.Context, batch []messaging.Delivery) []messaging.Result {
		out := make([]messaging.Result, len(batch))
		for i, d := range batch {
			out[i].Dead = []messaging.Dead{{Message: d.Message, Class: messaging.ClassAttemptsExhausted, Err: errors.New("broken")}}
		}
		return out
	})
	dead := r.ConsumeDead()
	r.Publish(messaging.OrderReserved(orders))
	for _, o := range orders[:2] {
		r.Becomes(o.ID.String(), store.LetterOpen)
	}
	dead() // the third one may lie in the queue still
	fail()
	forget(t, r)
	consumeAll(r)
	r.Go(r.Rebuilds.Run)
	request(t, r)
	j := becomes(t, r, adminapi.RebuildDone)
	if p := j.Result.Pools[0]; p.Available != 10 || p.Held != 3 || p.Units != 7 || j.Result.Parked != 3 || j.Result.Mended != 0 {
		t.Errorf("%+v", j.Result)
	}
	if rec, err := r.Stock.Order(short(t), orders[0].ID); err != nil || rec.Status != order.Reserved {
		t.Errorf("%+v, %v", rec, err)
	}
	// One is replayed, one is given up.
	r.Go(r.Letters.Run)
	letters := make([]int64, 3)
	for i, o := range orders {
		letters[i] = r.Becomes(o.ID.String(), store.LetterOpen).ID
	}
	if _, err := r.Letters.Replay(short(t), adminapi.LetterSelection{IDs: letters[:1]}, rig.Operator()); err != nil {
		t.Fatal(err)
	}
	r.Becomes(orders[0].ID.String(), store.LetterResolved)
	if _, err := r.Letters.Discard(short(t), adminapi.LetterSelection{IDs: letters[1:2]}, "no use", false, rig.Operator()); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, within, func() error {
		if n := r.Level("sale", "national"); n != 8 {
			return fmt.Errorf("%d on sale: one pending, one parked, one given up", n)
		}
		rec, err := r.Stock.Order(short(t), orders[0].ID)
		if err != nil || rec.Status != order.Pending {
			return fmt.Errorf("%+v, %w", rec, err)
		}
		return nil
	})
}

// A pool's row that claims more than was ever allocated is wrong, and its units are not put on sale.
func TestUnitsFromNowhereAreNotRebuilt(t *testing.T) {
	t.Parallel()
	r := rig.New(t, rig.Options{})
	r.Sell(rig.Plan("sale", map[string]int{"national": 10}))
	if _, err := r.Store.SQL().ExecContext(short(t), "UPDATE activity_stock SET available = available + 3 WHERE activity_id = 'sale'"); err != nil {
		t.Fatal(err)
	}
	forget(t, r)
	consumeAll(r)
	r.Go(r.Rebuilds.Run)
	request(t, r)
	if p := becomes(t, r, adminapi.RebuildDone).Result.Pools[0]; p.Available != 13 || p.Units != 10 {
		t.Errorf("%+v", p)
	}
	if n := r.Level("sale", "national"); n != 10 {
		t.Errorf("%d on sale", n)
	}
}

// Whatever somebody has written into a sale's keys, a rebuild writes them anew: the activity's hash, a stray
// end marker, the outbox, records, limits, stock. Meanwhile nothing is sold, and an order of which only the
// broken record knew is the only one that can be lost; here every message is out.
func TestDamagedKeysAreWrittenAnew(t *testing.T) { // R10, O09
	t.Parallel()
	r := rig.New(t, rig.Options{})
	plan := rig.Plan("sale", map[string]int{"national": 50})
	plan.Buckets = 2
	r.Sell(plan)
	consumeAll(r)
	ids := map[int]order.ID{} // one order of each bucket
	for i := range 10 {
		o := r.MustBuy("sale", fmt.Sprintf("u%d", i))
		r.Publish(messaging.OrderReserved([]order.Order{o}))
		ids[o.ID.Bucket] = o.ID
	}
	testkit.Eventually(t, within, func() error {
		if n := r.Count("SELECT COUNT(*) FROM orders"); n != 10 {
			return fmt.Errorf("%d rows", n)
		}
		return nil
	})
	for _, key := range []string{
		"activity:{sale:0}", "activity:{sale:1}:end", "outbox:{sale:0}", "parked:{sale:1}", "stock:{sale:1}:sku:national",
		"order:{sale:1}:" + ids[1].String(), "user:limit:{sale:1}:u0", "user:limit:{sale:0}:u0",
	} {
		if err := r.Redis.Set(short(t), r.Prefix+"seckill:"+key, "hello", 0).Err(); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := r.Buy("sale", "u-refused", 1); err == nil {
		t.Error("sold from damaged keys")
	}
	r.Go(r.Rebuilds.Run)
	request(t, r)
	if j := becomes(t, r, adminapi.RebuildDone); j.Result.Records != 10 || j.Result.Pools[0].Units != 40 {
		t.Errorf("%+v", j.Result)
	}
	same(t, r)
	if n := sellOut(t, r); n+r.Level("sale", "national") != 40 {
		t.Errorf("%d sold", n)
	}
	same(t, r)
}

// A rebuild of what is not lost loses nothing: not the reservations that only Redis knows, not an addition
// that only MySQL knows.
func TestNothingIsLostByRebuildingASaleThatIsThere(t *testing.T) {
	t.Parallel()
	r := rig.New(t, rig.Options{})
	plan := rig.Plan("sale", map[string]int{"national": 50})
	plan.Buckets = 3
	r.Sell(plan)
	consumeAll(r)
	for i := range 20 {
		o, err := buyWith(r, "sale", fmt.Sprintf("u%d", i), "key")
		if err != nil {
			t.Fatal(err)
		}
		if i < 10 {
			r.Publish(messaging.OrderReserved([]order.Order{o.Order}))
		}
	}
	// Somebody has set a key by hand, and one addition has not come to Redis.
	ctx := short(t)
	r.Redis.Set(ctx, r.Prefix+"seckill:stock:{sale:0}:sku:national", 1000, 0)
	r.Redis.HSet(ctx, r.Prefix+"seckill:activity:{sale:1}", "open", "0")
	add, err := r.Activities.AddStock(ctx, "sale", activity.Addition{Op: "more", SKU: "sku", Pool: "national", Units: 7}, rig.Operator())
	if err != nil || !add.Waiting {
		t.Fatalf("%+v, %v", add, err)
	}
	r.Go(r.Rebuilds.Run)
	request(t, r)
	j := becomes(t, r, adminapi.RebuildDone)
	if p := j.Result.Pools[0]; p.Units != 37 || j.Result.Records != 20 {
		t.Errorf("%+v", j.Result)
	}
	r.Exec("UPDATE compensations SET next_at = UTC_TIMESTAMP(6)")
	r.Go(r.Activities.Run)
	testkit.Eventually(t, within, func() error {
		if n := r.Count("SELECT COUNT(*) FROM compensations"); n != 0 {
			return fmt.Errorf("%d compensations", n)
		}
		return nil
	})
	same(t, r)
	if again, err := buyWith(r, "sale", "u15", "key"); err != nil || !again.Replay {
		t.Errorf("%+v, %v", again, err)
	}
	if n := sellOut(t, r); n+r.Level("sale", "national") != 37 {
		t.Errorf("%d sold", n)
	}
	same(t, r)
}

// What was published before is not overtaken: a channel holds its deliveries, and the others are done.
func TestBarrierWaitsForWhatOthersHaveInHand(t *testing.T) {
	t.Parallel()
	r := rig.New(t, rig.Options{})
	r.Sell(rig.Plan("sale", map[string]int{"national": 10}))
	o := r.MustBuy("sale", "slow")
	free := make(chan struct{})
	holding := make(chan struct{}, 1)
	// It holds the order while others take whatever comes; then it dies, and the order goes back.
	stopSlow := r.Consume(messaging.QueueOrders, func(ctx context.Context, batch []messaging.Delivery) []messaging.Result {
		holding <- struct{}{}
		select {
		case <-free:
		case <-ctx.Done():
		}
		return r.Orders.Handle(ctx, batch)
	})
	r.Publish(messaging.OrderReserved([]order.Order{o}))
	<-holding
	consumeAll(r)
	r.ConsumeOrders()
	forget(t, r)
	r.Go(r.Rebuilds.Run)
	request(t, r)
	testkit.Eventually(t, within, func() error {
		if j := show(t, r); !strings.Contains(j.Note, "2 of 3 channels") {
			return fmt.Errorf("%+v", j)
		}
		return nil
	})
	if n := r.Count("SELECT COUNT(*) FROM orders"); n != 0 {
		t.Fatalf("%d rows", n)
	}
	close(free)
	j := becomes(t, r, adminapi.RebuildDone)
	if j.Result.Records != 1 || j.Result.Pools[0].Units != 9 || j.Result.Mended != 0 {
		t.Errorf("%+v", j.Result)
	}
	stopSlow()
	same(t, r)
}

func TestWhoPausedASaleResumesIt(t *testing.T) {
	t.Parallel()
	r := rig.New(t, rig.Options{})
	r.Sell(rig.Plan("sale", map[string]int{"national": 10}))
	pause := func(verb string, want int) {
		t.Helper()
		if status, p := r.Call(rig.OperatorToken, http.MethodPost, "/admin/v1/activities/sale/"+verb, nil, nil); status != want {
			t.Errorf("%s: %d %+v", verb, status, p)
		}
	}
	buys := func(want error) {
		t.Helper()
		if _, err := r.Buy("sale", "u", 1); !errors.Is(err, want) {
			t.Errorf("buying: %v, want %v", err, want)
		}
	}
	pause("pause", http.StatusOK)
	forget(t, r)
	stop := r.Go(r.Rebuilds.Run)
	if j := request(t, r); j.Resume {
		t.Errorf("paused before: %+v", j)
	}
	pause("resume", http.StatusConflict)
	quiet := consumeAll(r)
	becomes(t, r, adminapi.RebuildDone)
	buys(stock.ErrPaused)
	pause("resume", http.StatusOK)
	buys(nil)
	// Paused by an operator while the rebuild is at it.
	quiet()
	if j := request(t, r); !j.Resume {
		t.Errorf("%+v", j)
	}
	pause("pause", http.StatusOK)
	consumeAll(r)
	becomes(t, r, adminapi.RebuildDone)
	buys(stock.ErrPaused)
	pause("resume", http.StatusOK)
	buys(nil)
	stop()
	for path, want := range map[string]int{"nosuch": http.StatusNotFound} {
		if status, _ := r.Call(rig.OperatorToken, http.MethodPost, "/admin/v1/activities/"+path+"/rebuild", nil, nil); status != want {
			t.Errorf("%s: %d", path, status)
		}
	}
	if status, _ := r.Call(rig.ViewerToken, http.MethodPost, "/admin/v1/activities/sale/rebuild", nil, nil); status != http.StatusForbidden {
		t.Errorf("a viewer: %d", status)
	}
	if _, _, err := r.Activities.Create(short(t), rig.Plan("draft", map[string]int{"national": 1}), rig.Operator()); err != nil {
		t.Fatal(err)
	}
	for _, body := range []any{nil, adminapi.RebuildRequest{DryRun: true}} {
		if status, _ := r.Call(rig.OperatorToken, http.MethodPost, "/admin/v1/activities/draft/rebuild", body, nil); status != http.StatusConflict {
			t.Errorf("a draft: %d", status)
		}
	}
	if status, p := r.Call(rig.ViewerToken, http.MethodGet, "/admin/v1/activities/draft/rebuild", nil, nil); status != http.StatusNotFound || p.Code != adminapi.CodeRebuildNotFound {
		t.Errorf("%d %+v", status, p)
	}
}

// An ended sale gets its records back, which its settlement makes receipts of, and does not sell.
func TestEndedSaleIsRebuiltForItsSettlement(t *testing.T) {
	t.Parallel()
	r := rig.New(t, rig.Options{})
	r.Sell(rig.Plan("sale", map[string]int{"national": 10}))
	stop := consumeAll(r)
	o := r.MustBuy("sale", "u")
	r.Publish(messaging.OrderReserved([]order.Order{o}),
		messaging.OrderPaid(messaging.Payment{OrderID: o.ID, TransactionID: "t", AmountMinor: 1999, Currency: "EUR", ReceivedAt: time.Now()}))
	testkit.Eventually(t, within, func() error {
		if n := r.Count("SELECT COUNT(*) FROM orders WHERE status = 'paid'"); n != 1 {
			return errors.New("not paid yet")
		}
		return nil
	})
	stop()
	if _, err := r.Ends.End(short(t), "sale", rig.Operator(), "over"); err != nil {
		t.Fatal(err)
	}
	forget(t, r)
	request(t, r)
	testkit.Eventually(t, within, func() error {
		if err := r.Ends.Settle(short(t), "sale"); err == nil || !strings.Contains(err.Error(), "rebuild") {
			return fmt.Errorf("settling under the hands of a rebuild: %w", err)
		}
		return nil
	})
	if n := r.Count("SELECT COUNT(*) FROM activities WHERE state = 'ended'"); n != 1 {
		t.Error("settled under the hands of a rebuild")
	}
	stop = consumeAll(r)
	r.Go(r.Rebuilds.Run)
	becomes(t, r, adminapi.RebuildDone)
	if _, err := r.Buy("sale", "late", 1); !errors.Is(err, stock.ErrEnded) {
		t.Errorf("buying: %v", err)
	}
	testkit.Eventually(t, within, func() error {
		if err := r.Ends.Settle(short(t), "sale"); err != nil {
			return err
		}
		if n := r.Count("SELECT COUNT(*) FROM activities WHERE state = 'closed'"); n != 1 {
			return errors.New("not closed yet")
		}
		return nil
	})
	stop()
	if rec, err := r.Stock.Order(short(t), o.ID); err != nil || rec.Status != order.Paid || !rec.Receipt {
		t.Errorf("%+v, %v", rec, err)
	}
	if status, _ := r.Call(rig.OperatorToken, http.MethodPost, "/admin/v1/activities/sale/rebuild", nil, nil); status != http.StatusConflict {
		t.Errorf("a closed sale: %d", status)
	}
}

// Redis has forgotten what is parked, and nobody rebuilds: the sale is not settled over its buyers' heads.
func TestParkedOrdersHoldUpASettlementThatRedisForgotThemIn(t *testing.T) {
	t.Parallel()
	r := rig.New(t, rig.Options{})
	r.Sell(rig.Plan("sale", map[string]int{"national": 10}))
	o := r.MustBuy("sale", "u")
	r.Consume(messaging.QueueOrders, func(_ context.Context, batch []messaging.Delivery) []messaging.Result {
		out := make([]messaging.Result, len(batch))
		for i, d := range batch {
			out[i].Dead = []messaging.Dead{{Message: d.Message, Class: messaging.ClassAttemptsExhausted, Err: errors.New("broken")}}
		}
		return out
	})
	r.ConsumeDead()
	r.Publish(messaging.OrderReserved([]order.Order{o}))
	testkit.Eventually(t, within, func() error {
		if n := r.Count("SELECT COUNT(*) FROM dead_letters WHERE parked = 1"); n != 1 {
			return fmt.Errorf("%d parked", n)
		}
		return nil
	})
	forget(t, r)
	if _, err := r.Ends.End(short(t), "sale", rig.Operator(), "over"); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, within, func() error {
		if err := r.Ends.Settle(short(t), "sale"); err == nil || !strings.Contains(err.Error(), o.ID.String()) {
			return fmt.Errorf("settling: %w", err)
		}
		return nil
	})
	l := r.Becomes(o.ID.String(), store.LetterOpen)
	if _, err := r.Letters.Discard(short(t), adminapi.LetterSelection{IDs: []int64{l.ID}}, "no use", false, rig.Operator()); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, within, func() error {
		if err := r.Ends.Settle(short(t), "sale"); err != nil {
			return err
		}
		if n := r.Count("SELECT COUNT(*) FROM activities WHERE state = 'closed'"); n != 1 {
			return errors.New("not closed yet")
		}
		return nil
	})
}
