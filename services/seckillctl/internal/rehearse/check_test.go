package rehearse

import (
	"encoding/json"
	"fmt"
	"reflect"
	"strings"
	"testing"
	"time"
)

// kept is a log and a snapshot in which every promise was kept: ten units, four sold, two
// given back, one refused buyer, one broken message.
func kept() (*Log, *Snapshot) {
	log := &Log{Poison: []string{"poison-1"}, Crowd: time.Second, Found: map[string][]string{}}
	snap := &Snapshot{ActivityID: "a", PerUserLimit: 1, Levels: map[PoolKey]int{{"s", "p"}: 6}, Holdings: map[string]int{}, Held: map[string]int{}}
	snap.Stock = []StockRow{{SKU: "s", Pool: "p", Allocated: 10, Available: 6, Live: 4}}
	snap.Ledger = []LedgerRow{{Ref: "a/s/p", Operation: "allocate", SKU: "s", Pool: "p", Units: 10}}
	snap.Letters = []Letter{{ID: 1, MessageID: "poison-1", State: "open", Class: "undecodable", Deaths: 2, Replayed: true}}
	for i := range 6 {
		u, id, key := fmt.Sprintf("u%d", i), fmt.Sprintf("a-0-%d", i), fmt.Sprintf("k%d", i)
		for range 2 { // each one asks twice
			log.Attempts = append(log.Attempts, Attempt{User: u, Key: key, Outcome: Accepted, OrderID: id, At: time.Duration(i+1) * time.Millisecond, Latency: time.Millisecond})
		}
		row := Row{OrderID: id, User: u, SKU: "s", Pool: "p", Quantity: 1, IdemKey: key}
		snap.Ledger = append(snap.Ledger, LedgerRow{Ref: id, Operation: "sell", SKU: "s", Pool: "p", Units: -1})
		switch {
		case i < 4:
			row.Status = "paid"
			log.Payments = append(log.Payments, Payment{Transaction: "t" + u, OrderID: id, Accepted: true})
			snap.Payments = append(snap.Payments, PaymentRow{Transaction: "t" + u, OrderID: id, Status: "applied"})
			snap.Holdings[u], snap.Held[u] = 1, 1
		case i == 4:
			row.Status, row.Reason = "cancelled", "user_cancelled"
			log.Cancels = append(log.Cancels, Cancel{OrderID: id, Accepted: true})
		default:
			row.Status, row.Reason = "cancelled", "payment_timeout"
		}
		if i >= 4 {
			snap.Ledger = append(snap.Ledger, LedgerRow{Ref: id, Operation: "cancel", SKU: "s", Pool: "p", Units: 1})
			snap.Holdings[u], snap.Held[u] = 0, 0
		}
		snap.Rows = append(snap.Rows, row)
		snap.Records = append(snap.Records, row)
	}
	log.Attempts = append(log.Attempts, Attempt{User: "late", Key: "k", Outcome: SoldOut, Latency: time.Millisecond, At: time.Second})
	return log, snap
}

func TestAKeptRehearsalCountsWhatHappenedAndFindsNothing(t *testing.T) {
	rep := Check(kept())
	if rep.Broken() || len(rep.Findings) != 0 {
		t.Fatalf("found %v", rep.Findings)
	}
	rep.AcceptedPerSecond, rep.P50, rep.P99 = 0, 0, 0
	want := Report{Buyers: 7, Accepted: 6, SoldOut: 1, Persisted: 6, Paid: 4, Cancelled: 1, Expired: 1, DeadLettered: 1, Replayed: 1}
	if !reflect.DeepEqual(rep, want) {
		t.Errorf("got  %+v\nwant %+v", rep, want)
	}
}

// Each kind of damage moves the figure it belongs to.
func TestEachDamageIsFound(t *testing.T) {
	pool := PoolKey{"s", "p"}
	for _, tt := range []struct {
		name   string
		damage func(*Log, *Snapshot)
		figure func(Report) int
		want   int
	}{
		{"an extra unit on sale in Redis", func(_ *Log, s *Snapshot) { s.Levels[pool]++ }, drift, 2},
		{"a unit missing in Redis", func(_ *Log, s *Snapshot) { s.Levels[pool]-- }, drift, 2},
		{"no level in Redis", func(_ *Log, s *Snapshot) { delete(s.Levels, pool) }, drift, 6},
		{"a changed counter in MySQL", func(_ *Log, s *Snapshot) { s.Stock[0].Available++ }, drift, 3},
		{"a changed allocation", func(_ *Log, s *Snapshot) { s.Stock[0].Allocated = 3 }, oversold, 1},
		{"more sold than allocated", func(_ *Log, s *Snapshot) {
			for i := range s.Rows {
				s.Rows[i].Quantity = 3
			}
		}, oversold, 2 + 4*2},
		{"a user above his limit", func(_ *Log, s *Snapshot) { s.Rows[1].User = "u0" }, oversold, 1},
		{"a deleted row", func(_ *Log, s *Snapshot) { s.Rows = s.Rows[1:] }, lost, 1},
		{"a row of somebody else", func(_ *Log, s *Snapshot) { s.Rows[0].User = "eve" }, lost, 1},
		{"a row in no final state", func(_ *Log, s *Snapshot) { s.Rows[0].Status = "pending" }, lost, 2},
		{"rejected without a reason", func(_ *Log, s *Snapshot) { s.Rows[5].Status, s.Rows[5].Reason = "rejected", "" }, lost, 1},
		{"an order that only `mine` named", func(l *Log, _ *Snapshot) { l.Found["u9"] = []string{"a-0-9"} }, lost, 1},
		{"a doubled row", func(_ *Log, s *Snapshot) {
			r := s.Rows[0]
			r.OrderID = "a-0-99"
			s.Rows = append(s.Rows, r)
		}, duplicated, 1},
		{"a row twice", func(_ *Log, s *Snapshot) { s.Rows = append(s.Rows, s.Rows[0]) }, duplicated, 1},
		{"two orders for one key", func(l *Log, _ *Snapshot) {
			a := l.Attempts[0]
			a.OrderID = "a-0-98"
			l.Attempts = append(l.Attempts, a)
		}, duplicated, 1},
		{"a ledger entry twice", func(_ *Log, s *Snapshot) { s.Ledger = append(s.Ledger, s.Ledger[0]) }, duplicated, 1},
		{"a payment twice", func(_ *Log, s *Snapshot) { s.Payments = append(s.Payments, s.Payments[0]) }, duplicated, 2},
		{"a payment gone", func(_ *Log, s *Snapshot) { s.Payments = s.Payments[1:] }, lost, 1},
		{"a payment still kept", func(_ *Log, s *Snapshot) { s.Payments[0].Status = "kept" }, lost, 1},
		{"an applied payment of a cancelled order", func(_ *Log, s *Snapshot) { s.Rows[0].Status = "cancelled" }, lost, 1},
		{"a changed ledger", func(_ *Log, s *Snapshot) { s.Ledger[1].Units = -2 }, drift, 1},
		{"a refused buyer who holds an order", func(_ *Log, s *Snapshot) {
			r := Row{OrderID: "a-0-97", User: "late", SKU: "s", Pool: "p", Quantity: 1, Status: "cancelled", IdemKey: "k"}
			s.Rows, s.Records = append(s.Rows, r), append(s.Records, r)
		}, drift, 1},
		{"a changed limit counter in MySQL", func(_ *Log, s *Snapshot) { s.Holdings["u0"] = 2 }, drift, 1},
		{"a changed limit counter in Redis", func(_ *Log, s *Snapshot) { s.Held["u4"] = 1 }, drift, 1},
		{"a record in another state", func(_ *Log, s *Snapshot) { s.Records[0].Status = "pending" }, drift, 1},
		{"a record gone", func(_ *Log, s *Snapshot) { s.Records = s.Records[1:] }, drift, 3},
		{"an order left in the outbox", func(_ *Log, s *Snapshot) { s.Outbox = []string{"a-0-0"} }, drift, 1},
		{"a parked order", func(_ *Log, s *Snapshot) { s.Parked = []string{"a-0-0"} }, drift, 1},
		{"an open compensation", func(_ *Log, s *Snapshot) { s.Compensations = []string{"a-0-4"} }, drift, 1},
		{"the broken message vanished", func(_ *Log, s *Snapshot) { s.Letters = nil }, lost, 1},
	} {
		t.Run(tt.name, func(t *testing.T) {
			log, snap := kept()
			tt.damage(log, snap)
			rep := Check(log, snap)
			if got := tt.figure(rep); got != tt.want || !rep.Broken() {
				t.Errorf("figure is %d, want %d; findings:\n%s", got, tt.want, strings.Join(rep.Findings, "\n"))
			}
		})
	}
}

func oversold(r Report) int   { return r.Oversold }
func lost(r Report) int       { return r.Lost }
func duplicated(r Report) int { return r.Duplicated }
func drift(r Report) int      { return r.Drift }

// A buyer who never got an answer may hold an order that he does not know of.
func TestAnUnknownAnswerIsNoRefusal(t *testing.T) {
	log, snap := kept()
	log.Attempts[0].Outcome, log.Attempts[0].OrderID = Unknown, ""
	log.Attempts[1].Outcome, log.Attempts[1].OrderID = Unknown, ""
	if rep := Check(log, snap); rep.Broken() {
		t.Errorf("found %v", rep.Findings)
	}
}

func TestTheLastLineHasExactlyTheContractedFields(t *testing.T) {
	var out strings.Builder
	if err := Check(kept()).Write(&out); err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimRight(out.String(), "\n"), "\n")
	last := lines[len(lines)-1]
	dec := json.NewDecoder(strings.NewReader(last))
	var got []string
	if _, err := dec.Token(); err != nil {
		t.Fatal(err)
	}
	for dec.More() {
		key, err := dec.Token()
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, key.(string))
		if _, err := dec.Token(); err != nil {
			t.Fatal(err)
		}
	}
	want := strings.Fields("buyers accepted sold_out persisted paid cancelled expired rejected dead_lettered replayed oversold lost duplicated drift accepted_per_s p50_ms p99_ms drain_s")
	if !reflect.DeepEqual(got, want) {
		t.Errorf("fields %v\nwant   %v", got, want)
	}
}

func TestHalfASnapshotIsAnErrorAndNotALoss(t *testing.T) {
	whole := `{"kind":"activity","activity_id":"a","per_user_limit":2}
{"kind":"order","order_id":"a-0-1","user_id":"u","sku_id":"s","pool":"p","quantity":1,"status":"paid"}
{"kind":"level","sku_id":"s","pool":"p","units":3}
{"kind":"level","sku_id":"s","pool":"p","units":4}
{"kind":"end","lines":4}
`
	snap, err := ReadSnapshot(strings.NewReader(whole))
	if err != nil {
		t.Fatal(err)
	}
	if snap.PerUserLimit != 2 || len(snap.Rows) != 1 || snap.Levels[PoolKey{"s", "p"}] != 7 {
		t.Errorf("read %+v", snap)
	}
	for _, cut := range []string{
		whole[:len(whole)-len(`{"kind":"end","lines":4}`)-1],
		whole[:len(whole)/2],
		strings.Replace(whole, `"lines":4`, `"lines":5`, 1),
		whole + `{"kind":"level"}`,
		`{"kind":"error","error":"redis went away"}`,
		`{"kind":"surprise"}`,
	} {
		if _, err := ReadSnapshot(strings.NewReader(cut)); err == nil {
			t.Errorf("no error for %q", cut)
		}
	}
}

func TestShadowIDsAreShortAndDifferent(t *testing.T) {
	seen := map[string]bool{}
	for range 1000 {
		id := ShadowID("a-very-long-sale-id-of-thirty-two")
		if len(id) > 32 || seen[id] || !strings.HasPrefix(id, "rh-a-very-lon-") {
			t.Fatalf("id %s", id)
		}
		seen[id] = true
	}
}
