package acceptance

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"seckill/pkg/sale"
	"seckill/pkg/testkit"
)

// report is rehearse's last line.
type report struct {
	Buyers, Accepted, Persisted, Paid, Cancelled, Expired, Rejected, Replayed int
	SoldOut                                                                   int `json:"sold_out"`
	DeadLettered                                                              int `json:"dead_lettered"`
	Oversold, Lost, Duplicated, Drift                                         int
}

const saleYAML = `
id: rehearsed
name: A rehearsed sale
starts_at: 2030-01-01T10:00:00+08:00
ends_at: 2030-01-01T12:00:00+08:00
per_user_limit: 2
payment_timeout: 15m
currency: EUR
buckets: 2
items:
  - sku_id: sku
    price_minor: 1999
    pools: {beijing: 30, national: 70}
region_fallback: {beijing: [national], shanghai: [national]}
`

// rehearse runs seckillctl rehearse; sabotage happens when the system is quiet, before the check.
func (s *stack) rehearse(sabotage func(activity string)) (report, int, string) {
	s.t.Helper()
	dir := s.t.TempDir()
	file, pause := filepath.Join(dir, "sale.yaml"), filepath.Join(dir, "pause")
	if err := os.WriteFile(file, []byte(saleYAML), 0o600); err != nil {
		s.t.Fatal(err)
	}
	args := []string{"rehearse", "-f", file, "--buyers", "400", "--concurrency", "32", "--payment-timeout", "5s", "--seed", "7"}
	if sabotage != nil {
		args = append(args, "--pause-before-check", pause)
	}
	type result struct {
		out, errOut string
		code        int
	}
	done := make(chan result, 1)
	go func() {
		out, errOut, code := s.ctl(args...)
		done <- result{out, errOut, code}
	}()
	if sabotage != nil {
		var activity string
		testkit.Eventually(s.t, 2*time.Minute, func() error {
			select {
			case r := <-done:
				s.t.Fatalf("rehearse ended with code %d before its check:\n%s%s", r.code, r.out, r.errOut)
			default:
			}
			raw, err := os.ReadFile(pause)
			activity = string(raw)
			if err == nil && activity == "" {
				err = errors.New("not written yet")
			}
			return err
		})
		sabotage(activity)
		if err := os.Remove(pause); err != nil {
			s.t.Fatal(err)
		}
	}
	r := <-done
	lines := strings.Split(strings.TrimSpace(r.out), "\n")
	var rep report
	if err := json.Unmarshal([]byte(lines[len(lines)-1]), &rep); err != nil {
		s.t.Fatalf("the last line is no JSON (code %d): %v\n%s\n%s", r.code, err, r.out, r.errOut)
	}
	return rep, r.code, r.out
}

// A rehearsal against the real programs keeps every promise, and each kind of damage is found.
func TestRehearsalFindsEachSabotage(t *testing.T) {
	t.Parallel()
	s := newStack(t, options{apis: 2, workers: 2})
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	inventory := s.count("SELECT COUNT(*) FROM inventory")

	rep, code, out := s.rehearse(nil)
	if code != 0 || rep.Oversold+rep.Lost+rep.Duplicated+rep.Drift != 0 {
		t.Fatalf("code %d:\n%s", code, out)
	}
	// Each order takes one or two of the 100 units. How many are sold again depends on how long the crowd
	// stays.
	if rep.Buyers != 400 || rep.Accepted < 50 || rep.Persisted < rep.Accepted || rep.Paid == 0 || rep.Cancelled == 0 || rep.Expired == 0 ||
		rep.SoldOut == 0 || rep.DeadLettered != 1 || rep.Replayed != 1 || rep.Rejected != 0 {
		t.Errorf("report %+v", rep)
	}
	// It tidies up behind itself.
	if n := s.count("SELECT COUNT(*) FROM activities WHERE state <> 'closed'"); n != 0 {
		t.Errorf("%d activities are not closed after the rehearsal", n)
	}
	if s.count("SELECT COUNT(*) FROM inventory") != inventory {
		t.Error("the rehearsal touched the inventory")
	}

	for _, tt := range []struct {
		name   string
		damage func(activity string)
		figure func(report) int
	}{
		{"an extra unit in Redis", func(a string) {
			if err := s.rdb.Incr(ctx, s.prefix+"seckill:stock:{"+a+":0}:sku:national").Err(); err != nil {
				t.Fatal(err)
			}
		}, func(r report) int { return r.Drift }},
		{"a deleted row", func(a string) {
			if n := s.exec("DELETE FROM orders WHERE activity_id = ? AND status = 'paid' LIMIT 1", a); n != 1 {
				t.Fatalf("deleted %d rows", n)
			}
		}, func(r report) int { return r.Lost }},
		{"a doubled row", func(a string) {
			cols := "activity_id,user_id,sku_id,region,pool,quantity,unit_price_minor,amount_minor,currency,status,reason,origin,epoch,payment_timeout_s,reserved_at,pay_before,idem_key,idem_digest,created_at,updated_at"
			if n := s.exec(fmt.Sprintf("INSERT INTO orders (id,%s) SELECT CONCAT(LEFT(id, CHAR_LENGTH(id)-4), 'ZZZZ'),%s FROM orders WHERE activity_id = ? AND idem_key <> '' LIMIT 1", cols, cols), a); n != 1 {
				t.Fatalf("doubled %d rows", n)
			}
		}, func(r report) int { return r.Duplicated }},
		{"a changed counter", func(a string) {
			if n := s.exec("UPDATE activity_stock SET available = available + 1 WHERE activity_id = ? AND pool = 'beijing'", a); n != 1 {
				t.Fatalf("changed %d rows", n)
			}
		}, func(r report) int { return r.Drift }},
		{"more sold than there was", func(a string) {
			if n := s.exec("UPDATE activity_stock SET allocated = 1 WHERE activity_id = ? AND pool = 'national'", a); n != 1 {
				t.Fatalf("changed %d rows", n)
			}
		}, func(r report) int { return r.Oversold }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			rep, code, out := s.rehearse(tt.damage)
			if tt.figure(rep) < 1 || code != 5 {
				t.Errorf("code %d, figure %d:\n%s", code, tt.figure(rep), out)
			}
		})
	}
}

// Usage errors are 2, and nothing is sent.
func TestRehearseRefusesWhatMakesNoSense(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "sale.yaml")
	if err := os.WriteFile(file, []byte(saleYAML), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{
		{"rehearse"}, {"rehearse", "-f", file, "--buyers", "0"}, {"rehearse", "-f", file, "--pay-share", "2"},
		{"rehearse", "-f", file, "--api", "nowhere"}, {"rehearse", "-f", file, "extra"}, {"rehearse", "-f", file, "--buyers", "many"},
	} {
		ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
		cmd := exec.CommandContext(ctx, built.ctl, args...)
		cmd.Env = environment(map[string]string{"SECKILLCTL_TOKEN_FILE": file, "SECKILLCTL_SERVER": "http://127.0.0.1:1"}, "")
		out, _ := cmd.CombinedOutput()
		cancel()
		if code := cmd.ProcessState.ExitCode(); code != 2 {
			t.Errorf("%v: code %d: %s", args, code, out)
		}
	}
}

// Rehearsal credentials open nothing but their own shadow activity.
func TestRehearsalCredentialsAreForTheirShadowActivityOnly(t *testing.T) {
	t.Parallel()
	s := newStack(t, options{})
	real := s.sell(5, 1, time.Minute)
	s.known(0, real)
	for _, id := range []string{"shadow-a", "shadow-b"} {
		s.mustAdmin(http.MethodPost, "/admin/v1/activities", sale.Sale{
			ID: id, Name: id, Shadow: true, StartsAt: time.Now().Add(-time.Second).UTC().Format(time.RFC3339Nano),
			EndsAt: time.Now().Add(time.Hour).UTC().Format(time.RFC3339Nano), PerUserLimit: 1, PaymentTimeout: "1m", Currency: "EUR",
			Qualification: sale.QualificationNone, Buckets: 1, RefundAfterEnd: sale.RefundNational,
			Items: []sale.Item{{SKU: "sku", PriceMinor: price, Pools: map[string]int{"national": 3}}},
		}, nil)
		s.mustAdmin(http.MethodPost, "/admin/v1/activities/"+id+"/warm", nil, nil)
		s.known(0, id)
	}
	var out struct {
		Tokens []string `json:"tokens"`
	}
	s.mustAdmin(http.MethodPost, "/admin/v1/rehearsals/shadow-a/tokens", map[string]any{"users": []string{"u"}, "ttl": "10m"}, &out)
	if status, text := s.admin(http.MethodPost, "/admin/v1/rehearsals/"+real+"/tokens", map[string]any{"users": []string{"u"}}, nil); status != http.StatusForbidden {
		t.Errorf("tokens for a real sale: %d %s", status, text)
	}
	for activity, want := range map[string]bool{"shadow-a": true, "shadow-b": false, real: false} {
		r := s.call(http.MethodPost, s.api(0)+"/v1/activities/"+activity+"/orders", "", map[string]string{"Authorization": "Bearer " + out.Tokens[0]},
			`{"sku_id":"sku","quantity":1,"region":"national"}`)
		if r.accepted() != want || !want && r.Status != http.StatusUnauthorized && r.Status != http.StatusForbidden {
			t.Errorf("buy in %s: %d %s", activity, r.Status, r.Body)
		}
	}
	for _, activity := range []string{"shadow-b", real} {
		if n := s.count("SELECT COUNT(*) FROM orders WHERE activity_id = ?", activity); n != 0 {
			t.Errorf("%d orders in %s", n, activity)
		}
	}
	if status, text := s.admin(http.MethodGet, "/admin/v1/rehearsals/"+real+"/snapshot", nil, nil); status != http.StatusForbidden {
		t.Errorf("snapshot of a real sale: %d %s", status, text)
	}
}
