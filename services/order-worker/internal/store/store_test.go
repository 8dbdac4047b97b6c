package store_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"
	"github.com/prometheus/client_golang/prometheus"

	"seckill/pkg/order"
	"seckill/pkg/testkit"
	"seckill/services/order-worker/internal/store"
)

func open(t testing.TB, cfg store.Config) (*store.Store, *prometheus.Registry) {
	t.Helper()
	reg := prometheus.NewRegistry()
	s, err := store.Open(cfg, testkit.Logger(t), reg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	return s, reg
}

func migrated(t testing.TB, cfg store.Config) (*store.Store, *prometheus.Registry) {
	t.Helper()
	if cfg.DSN == "" {
		cfg.DSN = testkit.MySQL(t)
	}
	s, reg := open(t, cfg)
	if err := s.Migrate(t.Context()); err != nil {
		t.Fatal(err)
	}
	return s, reg
}

func number(t testing.TB, s *store.Store, query string, args ...any) int {
	t.Helper()
	var n int
	if err := s.SQL().QueryRowContext(t.Context(), query, args...).Scan(&n); err != nil {
		t.Fatal(err)
	}
	return n
}

// schema describes every table and index, for comparison.
func schema(t testing.TB, s *store.Store) string {
	t.Helper()
	rows, err := s.SQL().QueryContext(t.Context(), `SELECT CONCAT_WS(' ', table_name, column_name, column_type, is_nullable, collation_name) FROM information_schema.columns WHERE table_schema=DATABASE()
		UNION ALL SELECT CONCAT_WS(' ', table_name, index_name, seq_in_index, column_name, non_unique) FROM information_schema.statistics WHERE table_schema=DATABASE() ORDER BY 1`)
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
	var out strings.Builder
	for rows.Next() {
		var line string
		if err := rows.Scan(&line); err != nil {
			t.Fatal(err)
		}
		out.WriteString(line + "\n")
	}
	if err := rows.Err(); err != nil {
		t.Fatal(err)
	}
	return out.String()
}

func together(t *testing.T, n int, f func() error) {
	t.Helper()
	var wg sync.WaitGroup
	gate := make(chan struct{})
	for range n {
		wg.Add(1)
		go func() {
			defer wg.Done()
			<-gate
			if err := f(); err != nil {
				t.Error(err)
			}
		}()
	}
	close(gate)
	wg.Wait()
}

// O33: six replicas migrate an empty schema at once, five rounds, and once a schema one version older.
func TestSixReplicasMigrateAtOnce(t *testing.T) {
	want := ""
	for round := range 5 {
		dsn := testkit.MySQL(t)
		stores := make([]*store.Store, 6)
		for i := range stores {
			stores[i], _ = open(t, store.Config{DSN: dsn})
		}
		var next sync.Mutex
		i := 0
		together(t, 6, func() error {
			next.Lock()
			s := stores[i]
			i++
			next.Unlock()
			return s.Migrate(context.Background())
		})
		got := schema(t, stores[0])
		if want == "" {
			want = got
		}
		if got != want || !strings.Contains(got, "orders_due") {
			t.Fatalf("round %d: schema differs:\n%s", round, got)
		}
		if n := number(t, stores[0], "SELECT COUNT(*) FROM schema_migrations WHERE dirty=0"); n != 1 {
			t.Fatalf("round %d: %d clean version rows", round, n)
		}
		for _, s := range stores {
			_ = s.Close()
		}
	}

	s, _ := open(t, store.Config{DSN: testkit.MySQL(t)})
	if err := s.MigrateTo(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	if _, err := s.SQL().ExecContext(t.Context(), "INSERT INTO inventory VALUES ('book','national',7,UTC_TIMESTAMP(6))"); err != nil {
		t.Fatal(err)
	}
	together(t, 6, func() error { return s.Migrate(context.Background()) })
	if got := schema(t, s); got != want {
		t.Errorf("schema after an upgrade differs:\n%s", got)
	}
	if n := number(t, s, "SELECT on_hand FROM inventory"); n != 7 {
		t.Errorf("older data is lost: %d", n)
	}
}

// O33: killed in the middle of a migration. MySQL has committed some of its statements.
func TestInterruptedMigrationIsRepeated(t *testing.T) {
	s, _ := open(t, store.Config{DSN: testkit.MySQL(t)})
	for _, version := range []int{1, 2} {
		if err := s.MigrateTo(t.Context(), uint(version)); err != nil {
			t.Fatal(err)
		}
		for _, stmt := range []string{"UPDATE schema_migrations SET dirty=1", "DROP TABLE " + map[int]string{1: "user_holdings", 2: "replay_items"}[version]} {
			if _, err := s.SQL().ExecContext(t.Context(), stmt); err != nil {
				t.Fatal(err)
			}
		}
		together(t, 3, func() error { return s.Migrate(context.Background()) })
		if got := schema(t, s); !strings.Contains(got, "user_holdings") || !strings.Contains(got, "replay_items") {
			t.Fatalf("tables are missing after version %d was interrupted", version)
		}
	}
	// A column that is there already, or not yet, is no obstacle.
	for _, before := range []string{"DO 0", "ALTER TABLE orders DROP COLUMN room"} {
		for _, stmt := range []string{"UPDATE schema_migrations SET dirty=1", before} {
			if _, err := s.SQL().ExecContext(t.Context(), stmt); err != nil {
				t.Fatal(err)
			}
		}
		together(t, 3, func() error { return s.Migrate(context.Background()) })
		if got := schema(t, s); !strings.Contains(got, "orders room varbinary(24)") {
			t.Fatalf("the column is missing:\n%s", got)
		}
	}
}

// A row keeps its length from its insert to its final state: what it gives up is what status and reason grow by.
func TestAnOpenRowCarriesTheRoomItNeeds(t *testing.T) {
	s, _ := migrated(t, store.Config{})
	now := time.Now().UTC().Truncate(time.Microsecond)
	ids := order.NewIDs()
	id, err := ids.New("sale", 0)
	if err != nil {
		t.Fatal(err)
	}
	o := order.Order{ID: id, User: "u", SKU: "sku", Region: "national", Pool: "national", Quantity: 1, UnitPriceMinor: 1, Currency: "EUR", ReservedAt: now, PayBefore: now.Add(time.Minute), PaymentTimeout: time.Minute}
	row, err := store.NewOrder(o, order.Pending, "", store.OriginOrder)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.InTx(t.Context(), func(tx *store.Tx) error { return store.InsertOrders(t.Context(), tx, []*store.Order{row}) }); err != nil {
		t.Fatal(err)
	}
	const length = "SELECT LENGTH(status) + LENGTH(reason) + LENGTH(room) FROM orders"
	before := number(t, s, length)
	if err := s.InTx(t.Context(), func(tx *store.Tx) error {
		_, err := store.MoveOrders(t.Context(), tx, []string{row.ID}, order.Pending, order.Cancelled, order.ReasonOperatorCancelled)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	if after := number(t, s, length); after > before {
		t.Errorf("the row has grown from %d to %d bytes", before, after)
	}
}

func TestMigrationWaitsForTheLockUntilItsContextEnds(t *testing.T) {
	s, _ := open(t, store.Config{DSN: testkit.MySQL(t)})
	// The holder of the lock is another session; its name is the one thing the test has to know.
	holder, _ := open(t, store.Config{DSN: testkit.MySQL(t)})
	conn, err := holder.SQL().Conn(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := conn.ExecContext(t.Context(), "SELECT GET_LOCK(?, 0)", s.MigrationLock()); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer cancel()
	if err := s.Migrate(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %v", err)
	}
	if _, err := conn.ExecContext(t.Context(), "SELECT RELEASE_LOCK(?)", s.MigrationLock()); err != nil {
		t.Fatal(err)
	}
	if err := s.Migrate(t.Context()); err != nil {
		t.Error(err)
	}
}

// impatient is a store whose sessions may rest for a second; the migration may take its time.
func impatient(t *testing.T, cfg store.Config) *store.Store {
	t.Helper()
	cfg.DSN = testkit.MySQL(t)
	migrated(t, cfg)
	cfg.SessionIdle = time.Second
	s, _ := open(t, cfg)
	return s
}

// A process that is frozen in a transaction loses it, and its locks: the server ends sessions that rest. One
// that said it would rest keeps it, and leaves no patient session to the pool.
func TestSessionsThatRestAreEnded(t *testing.T) {
	s := impatient(t, store.Config{LockWait: 10 * time.Second})
	insert := func(on store.Querier, sku string) error {
		_, err := on.ExecContext(t.Context(), "INSERT INTO inventory (sku_id,pool,on_hand,updated_at) VALUES (?,'p',1,UTC_TIMESTAMP(6))", sku)
		return err
	}
	// Behind the lock of a transaction that says nothing.
	err := s.InTx(t.Context(), func(tx *store.Tx) error {
		if err := insert(tx, "frozen"); err != nil {
			return err
		}
		if err := insert(s.SQL(), "frozen"); err != nil {
			t.Errorf("behind a frozen transaction: %v", err)
		}
		return nil
	})
	if err == nil {
		t.Error("a transaction whose session was ended was committed")
	}
	err = s.InRestingTx(t.Context(), func(tx *store.Tx) error {
		if err := insert(tx, "resting"); err != nil {
			return err
		}
		// The server has ended another session that rested since, so it would have ended this one.
		other := s.InTx(t.Context(), func(tx *store.Tx) error {
			if err := insert(tx, "frozen too"); err != nil {
				return err
			}
			return insert(s.SQL(), "frozen too")
		})
		if other == nil {
			t.Error("a transaction whose session was ended was committed")
		}
		return nil
	})
	if err != nil {
		t.Errorf("a transaction that said it would rest: %v", err)
	}
	// Those of the pool are the impatient ones.
	var conns []*sql.Conn
	for range s.SQL().Stats().MaxOpenConnections {
		conn, err := s.SQL().Conn(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		conns = append(conns, conn)
		var n int
		if err := conn.QueryRowContext(t.Context(), "SELECT @@session.wait_timeout").Scan(&n); err != nil || n != 1 {
			t.Errorf("a session of the pool may rest for %d s, %v", n, err)
		}
	}
	for _, conn := range conns {
		if err := conn.Close(); err != nil {
			t.Error(err)
		}
	}
}

func TestAPatienceBelowTheServersUnitIsRefused(t *testing.T) {
	cfg := store.Config{DSN: "user:password@tcp(127.0.0.1:3306)/schema", SessionIdle: time.Millisecond}
	if err := cfg.Validate(); err == nil || !strings.Contains(err.Error(), "session_idle") {
		t.Errorf("got %v", err)
	}
}

// What is done under a named lock may take longer than a session may rest.
func TestNamedLocksOutliveTheSessionsPatience(t *testing.T) {
	s := impatient(t, store.Config{})
	ran, err := s.Exclusively(t.Context(), "work", func() error {
		// The server has ended two sessions that rested, one after the other.
		for _, sku := range []string{"first", "second"} {
			err := s.InTx(t.Context(), func(tx *store.Tx) error {
				for _, on := range []store.Querier{tx, s.SQL()} {
					if _, err := on.ExecContext(t.Context(), "INSERT INTO inventory (sku_id,pool,on_hand,updated_at) VALUES (?,'p',1,UTC_TIMESTAMP(6))", sku); err != nil {
						return err
					}
				}
				return nil
			})
			if err == nil {
				t.Error("a transaction whose session was ended was committed")
			}
		}
		again, err := s.Exclusively(t.Context(), "work", func() error { return nil })
		if again || err != nil {
			t.Errorf("somebody else got the lock meanwhile: %v, %v", again, err)
		}
		return nil
	})
	if !ran || err != nil {
		t.Errorf("%v, %v", ran, err)
	}
	ran, err = s.Exclusively(t.Context(), "work", func() error { return nil })
	if !ran || err != nil {
		t.Errorf("the lock was not given back: %v, %v", ran, err)
	}
}

// The session's settings are ours, whatever the DSN and the server say.
func TestSessionsAreSetUpAlike(t *testing.T) {
	s, _ := migrated(t, store.Config{DSN: testkit.MySQL(t) + "?parseTime=false&loc=Local&time_zone=%27%2B05%3A00%27&sql_mode=%27%27"})
	var zone, mode, level string
	if err := s.SQL().QueryRowContext(t.Context(), "SELECT @@session.time_zone, @@session.sql_mode").Scan(&zone, &mode); err != nil {
		t.Fatal(err)
	}
	if zone != "+00:00" || !strings.Contains(mode, "STRICT_TRANS_TABLES") {
		t.Errorf("zone %s, mode %s", zone, mode)
	}
	err := s.SQL().QueryRowContext(t.Context(), "SELECT @@session.transaction_isolation").Scan(&level)
	if err != nil {
		err = s.SQL().QueryRowContext(t.Context(), "SELECT @@session.tx_isolation").Scan(&level)
	}
	if err != nil || level != "READ-COMMITTED" {
		t.Errorf("isolation %s, %v", level, err)
	}
	now, err := s.Now(t.Context())
	if err != nil || time.Since(now).Abs() > time.Minute || now.Location() != time.UTC {
		t.Errorf("clock %v, %v", now, err)
	}
	at := time.Date(2026, 3, 29, 2, 30, 0, 123456000, time.FixedZone("", 7200))
	if err := s.DB(t.Context()).Create(&store.Inventory{SKUID: "a", Pool: "b", OnHand: 0, UpdatedAt: at}).Error; err != nil {
		t.Fatal(err)
	}
	var back store.Inventory
	if err := s.DB(t.Context()).Take(&back).Error; err != nil || !back.UpdatedAt.Equal(at) {
		t.Errorf("wrote %v, read %v (%v)", at, back.UpdatedAt, err)
	}
	// Ids are told apart by case, and cut by nobody.
	if err := s.DB(t.Context()).Create(&store.Inventory{SKUID: "A", Pool: "b", UpdatedAt: at}).Error; err != nil {
		t.Errorf("upper case is another id: %v", err)
	}
	if err := s.DB(t.Context()).Create(&store.Inventory{SKUID: strings.Repeat("x", 33), Pool: "b", UpdatedAt: at}).Error; !store.IsContent(err) {
		t.Errorf("an id that is too long: %v", err)
	}
}

// O22: deadlocks and lock time-outs start the whole transaction again, and are counted.
func TestTransactionsThatDeadlockStartAgainAsAWhole(t *testing.T) {
	s, reg := migrated(t, store.Config{LockWait: time.Second, Retries: 50})
	for _, pool := range []string{"a", "b"} {
		if _, err := s.SQL().ExecContext(t.Context(), "INSERT INTO inventory VALUES ('book',?,0,UTC_TIMESTAMP(6))", pool); err != nil {
			t.Fatal(err)
		}
	}
	runs := make([]int, 2)
	var wg, both sync.WaitGroup
	both.Add(2)
	meet := make([]sync.Once, 2) // for one deadlock at least
	for i, pools := range [][2]string{{"a", "b"}, {"b", "a"}} {
		wg.Add(1)
		go func() {
			defer wg.Done()
			for range 20 {
				err := s.InTx(context.Background(), func(tx *store.Tx) error {
					runs[i]++
					for j, p := range pools {
						if _, err := tx.ExecContext(context.Background(), "UPDATE inventory SET on_hand=on_hand+1 WHERE pool=?", p); err != nil {
							return fmt.Errorf("add: %w", err)
						}
						if j == 0 {
							meet[i].Do(func() { both.Done(); both.Wait() })
							if _, err := tx.ExecContext(context.Background(), "SELECT SLEEP(0.005)"); err != nil {
								return err
							}
						}
					}
					return nil
				})
				if err != nil {
					t.Error(err)
				}
			}
		}()
	}
	wg.Wait()
	if n := number(t, s, "SELECT SUM(on_hand) FROM inventory"); n != 80 {
		t.Errorf("sum %d, want 80: a transaction was half repeated", n)
	}
	again := 0.0
	metrics, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range metrics {
		if m.GetName() == "seckill_tx_retries_total" {
			for _, x := range m.GetMetric() {
				again += x.GetCounter().GetValue()
			}
		}
	}
	if int(again) != runs[0]+runs[1]-40 || again == 0 {
		t.Errorf("%v retries counted, %d runs of 40 transactions", again, runs[0]+runs[1])
	}
}

// O22: 1205 undoes one statement only; what was written before it must not stay.
func TestLockTimeoutRollsBackTheWholeTransaction(t *testing.T) {
	s, _ := migrated(t, store.Config{LockWait: time.Second})
	if _, err := s.SQL().ExecContext(t.Context(), "INSERT INTO inventory VALUES ('book','hot',0,UTC_TIMESTAMP(6)),('book','mine',0,UTC_TIMESTAMP(6))"); err != nil {
		t.Fatal(err)
	}
	blocker, err := s.SQL().BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := blocker.ExecContext(t.Context(), "SELECT * FROM inventory WHERE pool='hot' AND sku_id='book' FOR UPDATE"); err != nil {
		t.Fatal(err)
	}
	runs := 0
	err = s.InTx(t.Context(), func(tx *store.Tx) error {
		runs++
		if runs == 2 {
			if err := blocker.Rollback(); err != nil {
				return err
			}
		}
		for _, pool := range []string{"mine", "hot"} {
			if _, err := tx.ExecContext(t.Context(), "UPDATE inventory SET on_hand=on_hand+1 WHERE sku_id='book' AND pool=?", pool); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil || runs != 2 {
		t.Errorf("%d runs, %v", runs, err)
	}
	if n := number(t, s, "SELECT on_hand FROM inventory WHERE pool='mine'"); n != 1 {
		t.Errorf("mine is %d, want 1", n)
	}
}

// O25 c, d: panics and errors give the connection back; more callers than connections wait.
func TestPanicsAndErrorsReturnTheirConnections(t *testing.T) {
	s, _ := migrated(t, store.Config{MaxOpen: 10})
	for i := range 200 {
		func() {
			defer func() {
				if recover() == nil && i%2 == 0 {
					t.Error("the panic was swallowed")
				}
			}()
			err := s.InTx(t.Context(), func(tx *store.Tx) error {
				if _, err := tx.ExecContext(t.Context(), "INSERT INTO inventory VALUES ('book','x',1,UTC_TIMESTAMP(6))"); err != nil {
					return err
				}
				if i%2 == 0 {
					panic("handler")
				}
				return errors.New("handler failed")
			})
			if err == nil {
				t.Error("the error was swallowed")
			}
		}()
	}
	if n := s.SQL().Stats().InUse; n != 0 {
		t.Errorf("%d connections are still in use", n)
	}
	if n := number(t, s, "SELECT COUNT(*) FROM inventory"); n != 0 {
		t.Errorf("%d rows of transactions that failed", n)
	}
	together(t, 500, func() error {
		return s.InTx(context.Background(), func(tx *store.Tx) error {
			var one int
			return tx.QueryRowContext(context.Background(), "SELECT 1").Scan(&one)
		})
	})
	if n := s.SQL().Stats().OpenConnections; n > 10 {
		t.Errorf("%d connections open, 10 allowed", n)
	}
}

// O25 b: the server cuts idle connections.
func TestConnectionsCutWhileIdleAreReplaced(t *testing.T) {
	private := testkit.StartMySQL(t)
	s, _ := migrated(t, store.Config{DSN: private.DSN("sale")})
	together(t, 5, func() error { return s.Ping(context.Background()) })
	kill := func() {
		rows, err := private.Exec("SELECT id FROM information_schema.processlist WHERE db='sale'")
		if err != nil {
			t.Fatal(err)
		}
		for _, id := range strings.Fields(rows) {
			if _, err := private.Exec("KILL " + id); err != nil {
				t.Log(err) // gone by itself
			}
		}
	}
	for range 3 {
		kill()
		for range 5 {
			if err := s.InTx(t.Context(), func(tx *store.Tx) error {
				_, err := tx.Now(t.Context())
				return err
			}); err != nil {
				t.Errorf("after a cut: %v", err)
			}
		}
	}
}

func TestErrorsAreToldApart(t *testing.T) {
	my := func(number uint16, state string) *mysql.MySQLError {
		return &mysql.MySQLError{Number: number, SQLState: [5]byte([]byte(state)), Message: "Table 'shop.stamps' doesn't exist"}
	}
	gone := my(1146, "42S02")
	gone.Message = "Table 'shop.orders' doesn't exist"
	for _, c := range []struct {
		err                               error
		duplicate, content, refuses, away bool
	}{
		{err: my(1062, "23000"), duplicate: true, refuses: true},
		{err: my(1452, "23000"), refuses: true},
		{err: fmt.Errorf("insert: %w", my(1406, "22001")), content: true, refuses: true},
		{err: my(1366, "HY000"), content: true, refuses: true},
		{err: my(1644, "45000"), refuses: true},
		{err: my(1411, "22007"), content: true, refuses: true},
		{err: my(1146, "42S02"), refuses: true},
		{err: gone},
		{err: my(1114, "HY000")}, // table full
		{err: my(1030, "HY000")},
		{err: my(1142, "42000")},
		{err: my(1040, "08004"), away: true},
		{err: my(1213, "40001"), away: true},
		{err: my(1045, "28000")},
		{err: fmt.Errorf("read: %w", store.ErrUndecidable), refuses: true},
		{err: fmt.Errorf("take: %w", store.ErrGuard), refuses: true},
		{err: mysql.ErrInvalidConn, away: true},
		{err: sql.ErrNoRows},
		{err: nil},
	} {
		if store.IsDuplicate(c.err) != c.duplicate || store.IsContent(c.err) != c.content || store.IsAway(c.err) != c.away || store.Refuses(c.err) != c.refuses {
			t.Errorf("%v: duplicate %v, content %v, refuses %v, away %v", c.err, store.IsDuplicate(c.err), store.IsContent(c.err), store.Refuses(c.err), store.IsAway(c.err))
		}
	}
}

// A table of ours that is not there is the server's trouble: nobody's order is to blame.
func TestNoTableOfOursIsBlamedOnAnOrder(t *testing.T) {
	s, _ := migrated(t, store.Config{})
	var tables []string
	if err := s.DB(t.Context()).Raw("SELECT table_name FROM information_schema.tables WHERE table_schema = DATABASE()").Scan(&tables).Error; err != nil || len(tables) < 10 {
		t.Fatalf("%v %v", tables, err)
	}
	for _, name := range tables {
		if store.Refuses(&mysql.MySQLError{Number: 1146, SQLState: [5]byte([]byte("42S02")), Message: "Table 'shop." + name + "' doesn't exist"}) {
			t.Errorf("%s is taken for a table of somebody else", name)
		}
	}
}

// O24: on an unsigned column the guard itself would raise 1690. Selling the very last piece leaves 0.
func TestStockGuardSellsTheLastPieceAndNoMore(t *testing.T) {
	s, _ := migrated(t, store.Config{})
	if _, err := s.SQL().ExecContext(t.Context(), "INSERT INTO activity_stock (activity_id,sku_id,pool,allocated,available,updated_at) VALUES ('a','b','c',5,5,UTC_TIMESTAMP(6))"); err != nil {
		t.Fatal(err)
	}
	p := store.Pool{Activity: "a", SKU: "b", Pool: "c"}
	take := func(n int64) error {
		return s.InTx(t.Context(), func(tx *store.Tx) error { return store.TakeUnits(t.Context(), tx, map[store.Pool]int64{p: n}) })
	}
	if err := take(6); !errors.Is(err, store.ErrGuard) {
		t.Errorf("6 of 5: %v", err)
	}
	for _, n := range []int64{0, -5} {
		if err := take(n); err == nil {
			t.Errorf("%d units were taken", n)
		}
	}
	if err := take(5); err != nil {
		t.Error(err)
	}
	if err := take(1); !errors.Is(err, store.ErrGuard) {
		t.Errorf("1 of 0: %v", err)
	}
	if n := number(t, s, "SELECT available*1000+live FROM activity_stock"); n != 5 {
		t.Errorf("available and live: %d", n)
	}
}
