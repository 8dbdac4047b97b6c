package acceptance

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"seckill/pkg/adminapi"
	"seckill/pkg/testkit"
)

// seckillctl against the running system: data on stdout, talk on stderr, and the contract's exit codes.
func TestCommandLineAgainstTheRunningSystem(t *testing.T) {
	t.Parallel()
	s := newStack(t, options{})
	type run struct {
		out, err string
		code     int
	}
	ctl := func(args ...string) run {
		out, errOut, code := s.ctl(args...)
		return run{out, errOut, code}
	}
	want := func(code int, r run, what string) run {
		t.Helper()
		if r.code != code {
			t.Errorf("%s: exit code %d, want %d\n%s%s", what, r.code, code, r.out, r.err)
		}
		return r
	}
	plan := func(limit int) string {
		t.Helper()
		path := filepath.Join(t.TempDir(), "sale.yaml")
		text := fmt.Sprintf("id: cli\nname: By hand\nstarts_at: %s\nends_at: %s\nper_user_limit: %d\npayment_timeout: 15m\ncurrency: EUR\n"+
			"items:\n  - {sku_id: sku, price_minor: %d, pools: {national: 5}}\n",
			"2026-01-01T00:00:00+01:00", "2199-01-01T00:00:00+01:00", limit, price)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	want(0, ctl("inventory", "set", "--sku", "sku", "--pool", "national", "--quantity", "7", "--yes"), "inventory set")
	file := plan(2)
	if r := want(0, ctl("activity", "create", "-f", file), "create"); r.out != "ID   STATE  STARTS_AT             ENDS_AT               UNITS  BUCKETS  SHADOW  NAME\n"+
		"cli  draft  2025-12-31T23:00:00Z  2198-12-31T23:00:00Z  5      1        false   By hand\n" || !strings.Contains(r.err, "created") {
		t.Errorf("%q %q", r.out, r.err)
	}
	draft := func(limit int) string {
		t.Helper()
		path := filepath.Join(t.TempDir(), "draft.yaml")
		raw, err := os.ReadFile(plan(limit))
		if err == nil {
			err = os.WriteFile(path, []byte(strings.NewReplacer("id: cli\n", "id: draft\n", "{national: 5}", "{national: 1, elsewhere: 3}").Replace(string(raw))), 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
		return path
	}
	if r := want(0, ctl("activity", "create", "-f", draft(2)), "create what the inventory does not know"); !strings.Contains(r.err, "sku in elsewhere is not in the inventory") || strings.Contains(r.err, "national") {
		t.Errorf("%q", r.err)
	}
	if r := want(0, ctl("activity", "edit", "-f", draft(3), "--dry-run"), "edit --dry-run"); !strings.Contains(r.err, "would edit") {
		t.Errorf("%q", r.err)
	}
	if r := want(0, ctl("activity", "edit", "-f", draft(3), "-o", "json"), "edit"); !strings.Contains(r.out, `"per_user_limit": 3`) || !strings.Contains(r.out, `"changed": true`) {
		t.Errorf("%q", r.out)
	}
	if r := want(0, ctl("activity", "edit", "-f", draft(3)), "edit again"); !strings.Contains(r.err, "already") {
		t.Errorf("%q", r.err)
	}
	want(0, ctl("activity", "delete", "draft", "--yes"), "delete")
	if r := want(0, ctl("activity", "create", "-f", file), "create again"); !strings.Contains(r.err, "there already") {
		t.Errorf("%q", r.err)
	}
	if r := want(1, ctl("activity", "create", "-f", plan(3)), "create another with the id"); r.out != "" || !strings.Contains(r.err, "activity_exists") {
		t.Errorf("%q %q", r.out, r.err)
	}
	if r := want(0, ctl("inventory", "list", "-o", "csv"), "inventory list"); r.out != "sku_id,pool,on_hand\nsku,national,2\n" {
		t.Errorf("%q", r.out)
	}
	if r := want(0, ctl("activity", "warm", "cli", "--dry-run"), "warm --dry-run"); !strings.Contains(r.err, "would warm") {
		t.Errorf("%q", r.err)
	}
	if r := want(0, ctl("activity", "warm", "cli"), "warm"); r.out != "ACTIVITY_ID  ALREADY  NUMBER  OPENED\ncli          false    1       1\n" {
		t.Errorf("%q", r.out)
	}
	if r := want(0, ctl("activity", "warm", "cli", "-o", "json"), "warm again"); !strings.Contains(r.out, `"already": true`) || !strings.Contains(r.err, "already") {
		t.Errorf("%q %q", r.out, r.err)
	}
	want(1, ctl("activity", "edit", "-f", plan(3)), "edit of a warm sale")
	if r := want(0, ctl("stock", "show", "cli", "-o", "csv"), "stock"); r.out != "sku_id,pool,allocated,available,withheld,redis_available\nsku,national,5,5,0,5\n" {
		t.Errorf("%q", r.out)
	}
	want(4, ctl("activity", "show", "nosuch"), "show of nothing")
	want(0, ctl("order", "list", "cli", "-o", "csv"), "orders before anybody bought")
	want(4, ctl("order", "show", "cli-0-01ARZ3NDEKTSV4RRFFQ69G5FAV"), "order show of nothing")
	want(4, ctl("dead", "replay", "--all"), "replay of nothing")
	want(4, ctl("dead", "discard", "--all", "--reason", "r", "--yes"), "discard of nothing")

	// Orders.
	s.known(0, "cli")
	id := s.mustBuy("cli", "cli-1")
	s.becomes(id, "pending")
	if r := want(0, ctl("order", "list", "cli", "-o", "csv"), "order list"); !strings.HasPrefix(r.out, "order_id,activity_id,user_id,") || !strings.Contains(r.out, id+",cli,cli-1,sku,national,national,1,1999,EUR,pending,") {
		t.Errorf("%q", r.out)
	}
	want(2, ctl("order", "cancel", id, "--reason", "r"), "cancel without --yes")
	if r := want(0, ctl("order", "cancel", id, "--reason", "asked by phone", "--yes", "-o", "json"), "cancel"); !strings.Contains(r.out, `"status": "cancelled"`) || !strings.Contains(r.out, "operator_cancelled") {
		t.Errorf("%q %q", r.out, r.err)
	}
	if r := want(0, ctl("order", "cancel", id, "--reason", "again", "--yes"), "cancel again"); !strings.Contains(r.err, "before") {
		t.Errorf("%q", r.err)
	}
	paid := s.mustBuy("cli", "cli-2")
	s.becomes(paid, "pending")
	s.pay(paid, "txn-cli", 1)
	s.becomes(paid, "paid")
	want(1, ctl("order", "cancel", paid, "--reason", "r", "--yes"), "cancel of a paid order")

	// Dead letters.
	s.publish("order.reserved", "cli-broken", []byte("\x0a\x7fnot an order"))
	var letters []adminapi.DeadLetter
	testkit.Eventually(t, within, func() error {
		letters = nil
		r := ctl("dead", "list", "--state", "open", "-o", "json")
		if err := json.Unmarshal([]byte(r.out), &letters); err != nil {
			return err
		}
		if len(letters) != 1 {
			return fmt.Errorf("%d letters", len(letters))
		}
		return nil
	})
	letter := strconv.FormatInt(letters[0].ID, 10)
	if r := want(0, ctl("dead", "show", letter), "dead show"); !strings.Contains(r.out, "undecodable") || !strings.Contains(r.out, "cli-broken") {
		t.Errorf("%q", r.out)
	}
	if r := want(0, ctl("dead", "group", "-o", "csv"), "dead group"); !strings.Contains(r.out, "1,open,undecodable,seckill.orders,") {
		t.Errorf("%q", r.out)
	}
	if r := want(0, ctl("dead", "replay", "--all", "--dry-run"), "dry run"); !strings.Contains(r.err, "1 undecodable") {
		t.Errorf("%q", r.err)
	}
	if r := want(4, ctl("dead", "replay", "--all"), "replay of what cannot apply"); !strings.Contains(r.err, "sent 0, skipped 1, failed 0") {
		t.Errorf("%q", r.err)
	}
	if r := want(0, ctl("dead", "replay", letter, "-o", "json"), "replay by name"); !strings.Contains(r.out, `"sent": 1`) {
		t.Errorf("%q", r.out)
	}
	testkit.Eventually(t, within, func() error {
		if r := ctl("dead", "list", "--state", "open", "-o", "csv"); !strings.Contains(r.out, ",0,2,") {
			return fmt.Errorf("not back: %s", r.out)
		}
		return nil
	})
	want(2, ctl("dead", "discard", letter, "--reason", "r"), "discard without --yes")
	if r := want(0, ctl("dead", "discard", letter, "--reason", "not ours", "--yes", "-o", "csv"), "discard"); r.out != "matched,discarded,resolved,skipped,failed\n1,1,0,0,0\n" {
		t.Errorf("%q", r.out)
	}
	if r := want(0, ctl("dead", "jobs", "-o", "csv"), "jobs"); strings.Count(r.out, ",done,tester,") != 3 {
		t.Errorf("%q", r.out)
	}
	if r := want(0, ctl("audit", "-o", "csv"), "audit"); !strings.Contains(r.out, ",tester,operator,order.cancel,"+id) || !strings.Contains(r.out, "dead_letter.discard") {
		t.Errorf("%q", r.out)
	}
	want(0, ctl("activity", "pause", "cli"), "pause")
	if r := s.buy(0, "cli", "cli-3", "", 1); r.Code != "activity_paused" {
		t.Errorf("bought from a paused sale: %d %s", r.Status, r.Body)
	}
	want(0, ctl("activity", "resume", "cli"), "resume")
	want(4, ctl("rebuild", "nosuch", "--yes"), "rebuild of nothing")
	want(4, ctl("order", "list", "nosuch", "-o", "csv"), "orders of nothing")
	want(4, ctl("reconcile", "nosuch"), "reconcile of nothing")
	s.settled("cli", true, id, paid)

	// An order that can still be paid keeps the sale from being closed, and the exit code says so.
	s.becomes(s.mustBuy("cli", "cli-4"), "pending")
	if r := want(3, ctl("activity", "end", "cli", "--reason", "over", "--yes", "--wait", "1s", "-o", "csv"), "end --wait"); !strings.Contains(r.out, "cli,false,ended") || !strings.Contains(r.err, "not closed") || !strings.Contains(r.err, "1 orders can still be paid") {
		t.Errorf("%q %q", r.out, r.err)
	}
	want(0, ctl("activity", "end", "cli", "--yes"), "end again")
}
