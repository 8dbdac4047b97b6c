package levels_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"seckill/pkg/messaging"
	"seckill/pkg/order"
	"seckill/pkg/testkit"
	"seckill/services/order-worker/internal/levels"
	"seckill/services/order-worker/internal/rig"
)

func TestMain(m *testing.M) { testkit.VerifyNoLeaks(m) }

// Units, backlog, compensations and unsettled ends are those of the tables; a sale has series while it
// lives, and none before and afterwards.
func TestLevelsAreThoseOfTheTables(t *testing.T) {
	t.Parallel()
	r := rig.New(t, rig.Options{})
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	reg := prometheus.NewPedanticRegistry()
	l, err := levels.New(r.Store, testkit.Logger(t), reg)
	if err != nil {
		t.Fatal(err)
	}
	want := func(text string, names ...string) {
		t.Helper()
		if err := l.Look(ctx); err != nil {
			t.Fatal(err)
		}
		var b strings.Builder
		for line := range strings.Lines(text) {
			b.WriteString(strings.TrimLeft(line, "\t"))
		}
		if err := testutil.GatherAndCompare(reg, strings.NewReader(b.String()), names...); err != nil {
			t.Error(err)
		}
	}
	const units, backlog, owed = "seckill_units", "seckill_rollback_backlog_orders", "seckill_compensations"
	value := func(name string) float64 {
		t.Helper()
		all, err := reg.Gather()
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range all {
			if f.GetName() == name {
				return f.GetMetric()[0].GetGauge().GetValue() + f.GetMetric()[0].GetCounter().GetValue()
			}
		}
		t.Fatalf("%s is not exported", name)
		return 0
	}
	r.Sell(rig.Plan("sale", map[string]int{"national": 7, "beijing": 3}))
	head := "# HELP seckill_units Units of sales that are not closed yet, by state.\n# TYPE seckill_units gauge\n"
	want(head+`
		seckill_units{activity="sale",pool="beijing",state="available"} 3
		seckill_units{activity="sale",pool="beijing",state="live"} 0
		seckill_units{activity="sale",pool="beijing",state="returned"} 0
		seckill_units{activity="sale",pool="beijing",state="withheld"} 0
		seckill_units{activity="sale",pool="national",state="available"} 7
		seckill_units{activity="sale",pool="national",state="live"} 0
		seckill_units{activity="sale",pool="national",state="returned"} 0
		seckill_units{activity="sale",pool="national",state="withheld"} 0
	`, units)
	none := "# HELP seckill_compensations Work that committed transactions still owe, by kind.\n# TYPE seckill_compensations gauge\n"
	line := func(kind string, n int) string { return fmt.Sprintf("seckill_compensations{kind=%q} %d\n", kind, n) }
	want(none+line("reconcile", 0)+line("refund_due", 0)+line("release", 0)+line("stock_add", 0), owed)
	if n := value(backlog); n != 0 {
		t.Errorf("%v orders are late", n)
	}

	r.Exec("UPDATE activity_stock SET available = 4, live = 2, withheld = 1 WHERE activity_id = 'sale' AND pool = 'national'")
	r.Exec("INSERT INTO compensations (kind, subject, activity_id, next_at, created_at) VALUES ('release', 'x', 'sale', UTC_TIMESTAMP(6), UTC_TIMESTAMP(6) - INTERVAL 90 SECOND)")
	r.ConsumeOrders()
	o := r.MustBuy("sale", "u")
	r.Publish(messaging.OrderReserved([]order.Order{o}))
	testkit.Eventually(t, time.Minute, func() error {
		if r.Count("SELECT COUNT(*) FROM orders") != 1 {
			return fmt.Errorf("no order yet")
		}
		return nil
	})
	r.Exec("UPDATE orders SET pay_before = UTC_TIMESTAMP(6) - INTERVAL 45 SECOND")
	want(none+line("reconcile", 0)+line("refund_due", 0)+line("release", 1)+line("stock_add", 0), owed)
	if n := value(backlog); n != 1 {
		t.Errorf("%v orders are late, want 1", n)
	}
	const slow = 300 // seconds that this machine may have taken; another unit or time zone is further off
	for name, least := range map[string]float64{"seckill_rollback_backlog_oldest_seconds": 45, "seckill_compensations_oldest_seconds": 90} {
		if v := value(name); v < least || v > least+slow {
			t.Errorf("%s is %v, want %v", name, v, least)
		}
	}
	for _, name := range []string{"seckill_row_lock_waiting", "seckill_row_lock_waits_total", "seckill_row_lock_seconds_total"} {
		if v := value(name); v < 0 {
			t.Errorf("%s is %v", name, v)
		}
	}

	r.Exec("UPDATE activities SET state = 'ended', ended_at = UTC_TIMESTAMP(6) - INTERVAL 60 SECOND")
	if err := l.Look(ctx); err != nil {
		t.Fatal(err)
	}
	if v := value("seckill_settlement_oldest_seconds"); v < 60 || v > 60+slow {
		t.Errorf("the oldest end has waited for %v s, want 60", v)
	}
	r.Exec("UPDATE activities SET state = 'closed'")
	want("", units)
	if v := value("seckill_settlement_oldest_seconds"); v != 0 {
		t.Errorf("the oldest end has waited for %v s, none waits", v)
	}
	// A database that is away leaves no old figures behind.
	away, stop := context.WithCancel(ctx)
	stop()
	if err := l.Look(away); err == nil {
		t.Error("no error from a database that cannot be asked")
	}
	if n, err := testutil.GatherAndCount(reg); err != nil || n != 0 {
		t.Errorf("%d series are left, %v", n, err)
	}
}
