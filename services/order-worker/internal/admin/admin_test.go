package admin_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"seckill/pkg/adminapi"
	"seckill/pkg/messaging"
	"seckill/pkg/order"
	"seckill/pkg/sale"
	"seckill/pkg/testkit"
	"seckill/services/order-worker/internal/admin"
	"seckill/services/order-worker/internal/rebuild"
	"seckill/services/order-worker/internal/reconcile"
	"seckill/services/order-worker/internal/rig"
	"seckill/services/order-worker/internal/settlement"
	"seckill/services/order-worker/internal/verify"
)

func TestTokensAreReadStrictly(t *testing.T) {
	t.Parallel()
	hash := admin.HashToken("secret")
	got, err := admin.ParseTokens("ann:operator:" + hash + ", bob:viewer:" + strings.ToUpper(hash))
	if err != nil || len(got) != 2 || got[0].Name != "ann" || got[1].Role != admin.Viewer {
		t.Errorf("%+v %v", got, err)
	}
	for _, bad := range []string{"", "ann:operator", "ann:root:" + hash, ":viewer:" + hash, "a b:viewer:" + hash, "ann:viewer:" + hash[:62], "ann:viewer:zz" + hash[2:],
		"ann:viewer:" + hash + ",ann:operator:" + hash} {
		if got, err := admin.ParseTokens(bad); err == nil {
			t.Errorf("%q gave %+v", bad, got)
		} else if len(hash) > 0 && strings.Contains(err.Error(), hash[:8]) {
			t.Errorf("the error shows the hash: %v", err)
		}
	}
}

// What the server mounts is in the document, with the role that it needs.
func TestEveryCallIsDocumented(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("../../../../docs/admin-api.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, route := range slices.Concat(admin.Routes(), new(settlement.Service).Routes(), new(reconcile.Service).Routes(), new(rebuild.Service).Routes(), new(verify.Verifier).Routes()) {
		row := regexp.MustCompile("(?m)^\\|.*`" + regexp.QuoteMeta(route.Method+" "+route.Path) + "[`?].*").FindString(string(text))
		if cells := strings.Split(row, " |"); len(cells) < 3 || (strings.TrimSpace(cells[1]) == "v") != (route.Role == admin.Viewer) {
			t.Errorf("%s %s for a %s: %q", route.Method, route.Path, route.Role, row)
		}
	}
}

// Letters are looked for by text of any language, in errors and bodies.
func TestLettersAreFoundInAnyLanguage(t *testing.T) {
	t.Parallel()
	r := rig.New(t, rig.Options{})
	for i, text := range []string{"用户 中文", "größe", "plain"} {
		r.Exec("INSERT INTO dead_letters (dedupe_key, message_id, routing_key, source_queue, class, error, attempt, activity_id, order_id, body, headers, state, created_at, updated_at) "+
			"VALUES (?, ?, 'k', 'q', 'conflict', ?, 1, 'sale', 'sale-0-X', ?, '{}', 'open', UTC_TIMESTAMP(6), UTC_TIMESTAMP(6))", fmt.Sprint(i), "m-"+text, "e "+text, "b "+text)
	}
	for q, want := range map[string]int{"中": 1, "b 用户": 1, "größe": 1, "m-gr": 1, "нет": 0, "sale-0": 3} {
		var got adminapi.DeadLetterList
		var groups adminapi.DeadLetterGroups
		var job adminapi.ReplayJob
		for _, c := range []struct {
			method, path string
			in, out      any
		}{
			{http.MethodGet, "dead-letters?q=" + url.QueryEscape(q), nil, &got},
			{http.MethodGet, "dead-letters/groups?q=" + url.QueryEscape(q), nil, &groups},
			{http.MethodPost, "replay-jobs", adminapi.ReplayRequest{LetterSelection: adminapi.LetterSelection{Filter: &adminapi.LetterFilter{Query: q}}, DryRun: true}, &job},
		} {
			if status, p := r.Call(rig.OperatorToken, c.method, "/admin/v1/"+c.path, c.in, c.out); status != http.StatusOK {
				t.Errorf("%s: %d %+v", c.path, status, p)
			}
		}
		if len(got.DeadLetters) != want || (len(groups.Groups) > 0) != (want > 0) || job.Matched != want {
			t.Errorf("%s: %d letters, %d groups, %d matched, want %d", q, len(got.DeadLetters), len(groups.Groups), job.Matched, want)
		}
	}
	if status, p := r.Call(rig.ViewerToken, http.MethodGet, "/admin/v1/dead-letters?q=%ff", nil, nil); status != http.StatusBadRequest || !strings.Contains(p.Detail, "q ") {
		t.Errorf("%d %+v", status, p)
	}
}

// The audit of a long list of ids has room for their count only. A payment is found by its transaction.
func TestLongListsAndSinglePayments(t *testing.T) {
	t.Parallel()
	r := rig.New(t, rig.Options{})
	ids := make([]int64, 100_000)
	for i := range ids {
		ids[i] = int64(100_000 + i)
	}
	var job adminapi.ReplayJob
	sel := adminapi.ReplayRequest{LetterSelection: adminapi.LetterSelection{IDs: ids}}
	if status, p := r.Call(rig.OperatorToken, http.MethodPost, "/admin/v1/replay-jobs", sel, &job); status != http.StatusCreated {
		t.Errorf("%d %+v", status, p)
	}
	if n := r.Count(`SELECT COUNT(*) FROM operator_audit WHERE subject = ? AND detail LIKE '%"ids_count":100000%'`, job.ID); n != 1 {
		t.Errorf("%d audit rows", n)
	}
	sel.IDs = append(sel.IDs, 1)
	if status, p := r.Call(rig.OperatorToken, http.MethodPost, "/admin/v1/replay-jobs", sel, nil); status != http.StatusBadRequest || p.Code != adminapi.CodeInvalidRequest {
		t.Errorf("%d %+v", status, p)
	}
	for _, id := range []string{"t1", "t2"} {
		r.Exec("INSERT INTO payments (transaction_id, order_id, amount_minor, currency, status, reason, received_at, created_at, updated_at) "+
			"VALUES (?, 'sale-0-X', 1, 'CNY', 'kept', '', UTC_TIMESTAMP(6), UTC_TIMESTAMP(6), UTC_TIMESTAMP(6))", id)
	}
	for query, want := range map[string]int{"": 2, "?transaction_id=t1": 1, "?transaction_id=nosuch": 0, "?transaction_id=": 0} {
		var l adminapi.PaymentList
		if status, p := r.Call(rig.ViewerToken, http.MethodGet, "/admin/v1/payments"+query, nil, &l); status != http.StatusOK || len(l.Payments) != want {
			t.Errorf("%q: %d %+v %+v", query, status, p, l)
		}
	}
}

// One rig for everything that only needs the API: it is the servers' schemas and vhosts that cost.
func TestAdminAPI(t *testing.T) {
	t.Parallel()
	r := rig.New(t, rig.Options{})
	r.ConsumeDead()
	stopLoop := r.Go(r.Letters.Run)
	defer stopLoop()

	t.Run("nobody gets in without a token", func(t *testing.T) {
		for _, token := range []string{"", "wrong", rig.OperatorToken + "x"} {
			for _, path := range []string{"/admin/v1/activities", "/admin/v1/nosuch", "/"} {
				if status, p := r.Call(token, http.MethodGet, path, nil, nil); status != http.StatusUnauthorized || p.Code != adminapi.CodeUnauthenticated || p.RequestID == "" {
					t.Errorf("%s with %q: %d %+v", path, token, status, p)
				}
			}
		}
	})

	t.Run("a viewer looks and changes nothing", func(t *testing.T) {
		for path, method := range map[string]string{
			"/admin/v1/activities": http.MethodPost, "/admin/v1/activities/x/warm": http.MethodPost, "/admin/v1/activities/x/pause": http.MethodPost,
			"/admin/v1/activities/x/resume": http.MethodPost, "/admin/v1/inventory": http.MethodPut, "/admin/v1/orders/x/cancel": http.MethodPost,
			"/admin/v1/dead-letters/discard": http.MethodPost, "/admin/v1/replay-jobs": http.MethodPost,
		} {
			if status, p := r.Call(rig.ViewerToken, method, path, "{}", nil); status != http.StatusForbidden || p.Code != adminapi.CodeForbidden {
				t.Errorf("%s %s: %d %+v", method, path, status, p)
			}
		}
		for _, path := range []string{"/admin/v1/activities", "/admin/v1/inventory", "/admin/v1/orders", "/admin/v1/dead-letters", "/admin/v1/dead-letters/groups",
			"/admin/v1/replay-jobs", "/admin/v1/audit"} {
			if status, p := r.Call(rig.ViewerToken, http.MethodGet, path, nil, nil); status != http.StatusOK {
				t.Errorf("%s: %d %+v", path, status, p)
			}
		}
		if n := r.Count("SELECT COUNT(*) FROM operator_audit"); n != 0 {
			t.Errorf("%d audit rows", n)
		}
	})

	t.Run("bad requests are told apart", func(t *testing.T) {
		for _, c := range []struct {
			method, path string
			body         any
			status       int
			code         string
		}{
			{http.MethodGet, "/admin/v1/nosuch", nil, 404, adminapi.CodeNotFound},
			{http.MethodDelete, "/admin/v1/activities", nil, 405, adminapi.CodeMethodNotAllowed},
			{http.MethodGet, "/admin/v1/activities/nosuch", nil, 404, adminapi.CodeActivityNotFound},
			{http.MethodPost, "/admin/v1/activities/nosuch/warm", nil, 404, adminapi.CodeActivityNotFound},
			{http.MethodGet, "/admin/v1/activities/nosuch/stock", nil, 404, adminapi.CodeActivityNotFound},
			{http.MethodGet, "/admin/v1/orders/nosuch", nil, 404, adminapi.CodeOrderNotFound},
			{http.MethodGet, "/admin/v1/orders/sale-0-01ARZ3NDEKTSV4RRFFQ69G5FAV", nil, 404, adminapi.CodeOrderNotFound},
			{http.MethodGet, "/admin/v1/dead-letters/77", nil, 404, adminapi.CodeLetterNotFound},
			{http.MethodGet, "/admin/v1/dead-letters/x", nil, 404, adminapi.CodeLetterNotFound},
			{http.MethodGet, "/admin/v1/replay-jobs/x", nil, 404, adminapi.CodeJobNotFound},
			{http.MethodGet, "/admin/v1/orders?limit=0", nil, 400, adminapi.CodeInvalidRequest},
			{http.MethodGet, "/admin/v1/orders?status=lost", nil, 400, adminapi.CodeInvalidRequest},
			{http.MethodPost, "/admin/v1/activities", `{"id":"a","id":"b"}`, 400, adminapi.CodeInvalidRequest},
			{http.MethodPost, "/admin/v1/activities", `{"Id":"a"}`, 400, adminapi.CodeInvalidRequest},
			{http.MethodPost, "/admin/v1/activities", `{"id":"a"} x`, 400, adminapi.CodeInvalidRequest},
			{http.MethodPost, "/admin/v1/activities", `{"id":7}`, 400, adminapi.CodeInvalidRequest},
			{http.MethodPost, "/admin/v1/activities", `{"id":"a","colour":"red"}`, 400, adminapi.CodeInvalidRequest},
			{http.MethodPost, "/admin/v1/activities", `{"per_user_limit":1.5}`, 400, adminapi.CodeInvalidRequest},
			{http.MethodPost, "/admin/v1/activities", strings.Repeat(" ", 2<<20), 413, adminapi.CodeBodyTooLarge},
			{http.MethodPost, "/admin/v1/replay-jobs", `{}`, 400, adminapi.CodeInvalidRequest},
			{http.MethodPost, "/admin/v1/replay-jobs", `{"ids":[1],"filter":{}}`, 400, adminapi.CodeInvalidRequest},
			{http.MethodPost, "/admin/v1/replay-jobs", `{"filter":{"state":"sent"}}`, 400, adminapi.CodeInvalidRequest},
			{http.MethodPost, "/admin/v1/dead-letters/discard", `{"filter":{}}`, 400, adminapi.CodeInvalidRequest},
			{http.MethodPut, "/admin/v1/inventory", `{"sku_id":"s","pool":"P","on_hand":1}`, 400, adminapi.CodeInvalidRequest},
			{http.MethodPut, "/admin/v1/inventory", `{"sku_id":"s","pool":"p","on_hand":-1}`, 400, adminapi.CodeInvalidRequest},
		} {
			if status, p := r.Call(rig.OperatorToken, c.method, c.path, c.body, nil); status != c.status || p.Code != c.code || p.Type != "/problems/"+c.code {
				t.Errorf("%s %s %.40v: %d %+v, want %d %s", c.method, c.path, c.body, status, p, c.status, c.code)
			}
		}
		// What MySQL would refuse to compare with its columns of ids.
		for _, kind := range []struct{ name, code string }{
			{"activities", adminapi.CodeActivityNotFound}, {"orders", adminapi.CodeOrderNotFound}, {"payments", adminapi.CodePaymentNotFound},
			{"dead-letters", adminapi.CodeLetterNotFound}, {"replay-jobs", adminapi.CodeJobNotFound}, {"nosuch", adminapi.CodeNotFound},
		} {
			for _, route := range []string{"GET ", "DELETE ", "POST warm", "POST pause", "POST end", "GET report", "GET verify", "POST reconcile", "POST rebuild", "GET rebuild",
				"GET stock", "POST stock", "POST qualifications", "POST cancel", "POST refund", "POST settle-refund"} {
				method, verb, _ := strings.Cut(route, " ")
				path := strings.TrimSuffix("/admin/v1/"+kind.name+"/ä/"+verb, "/")
				if status, p := r.Call(rig.OperatorToken, method, path, "{}", nil); status != 404 || p.Code != kind.code {
					t.Errorf("%s %s: %d %+v", method, path, status, p)
				}
			}
		}
		if status, p := r.Call(rig.OperatorToken, http.MethodGet, "/admin/v1/rehearsals/ä/progress", nil, nil); status != 404 || p.Code != adminapi.CodeNotFound {
			t.Errorf("%d %+v", status, p)
		}
		for path, fields := range map[string]string{
			"activities": "limit cursor", "orders": "limit cursor activity_id status user_id", "orders/paid": "after limit", "payments": "cursor status order_id transaction_id",
			"dead-letters": "cursor state class queue activity_id order_id", "dead-letters/groups": "state class queue activity_id order_id",
			"replay-jobs": "limit", "audit": "cursor",
		} {
			for _, field := range strings.Fields(fields) {
				for _, value := range []string{"中", "%ff", "%F0%9F%98%80"} {
					status, p := r.Call(rig.ViewerToken, http.MethodGet, "/admin/v1/"+path+"?"+field+"="+value, nil, nil)
					if status != 400 || p.Code != adminapi.CodeInvalidRequest || !strings.Contains(p.Detail, field) {
						t.Errorf("%s of %s: %d %+v", field, path, status, p)
					}
				}
			}
		}
		for _, field := range []string{"state", "class", "queue", "activity_id", "order_id"} {
			for path, body := range map[string]string{"replay-jobs": `{"filter":{"%s":"中"}}`, "dead-letters/discard": `{"filter":{"%s":"中"},"reason":"r"}`} {
				status, p := r.Call(rig.OperatorToken, http.MethodPost, "/admin/v1/"+path, fmt.Sprintf(body, field), nil)
				if status != 400 || p.Code != adminapi.CodeInvalidRequest || field != "state" && !strings.Contains(p.Detail, field) {
					t.Errorf("%s in %s: %d %+v", field, path, status, p)
				}
			}
		}
		for _, path := range []string{"audit?actor=中", "audit?action=中", "audit?target=中"} {
			var none adminapi.AuditList
			if status, p := r.Call(rig.ViewerToken, http.MethodGet, "/admin/v1/"+path, nil, &none); status != 200 || len(none.Entries) > 0 {
				t.Errorf("%s: %d %+v", path, status, p)
			}
		}
		// A number that is not there is not 0, and the answer names it.
		for _, c := range []struct{ method, path, body, field string }{
			{http.MethodPut, "inventory", `{"sku_id":"s","pool":"p"}`, "on_hand"},
			{http.MethodPut, "inventory", `{"sku_id":"s","pool":"p","on_hand":null}`, "on_hand"},
			{http.MethodPost, "activities/sale/stock", `{"op_id":"o","sku_id":"s","pool":"p"}`, "quantity"},
			{http.MethodPost, "activities", `{"items":[{"sku_id":"s","price_minor":1,"pools":{"p":1}}]}`, "per_user_limit"},
			{http.MethodPost, "activities", `{"items":[{"sku_id":"s","pools":{"p":1}}]}`, "items[0].price_minor"},
			{http.MethodPost, "activities", `{"items":[{"sku_id":"s","price_minor":1,"pools":{"p":null}}]}`, "items[0].pools.p"},
			{http.MethodPut, "activities/a", `{"id":"a","items":[{"sku_id":"s","price_minor":null,"pools":{"p":1}}]}`, "items[0].price_minor"},
		} {
			status, p := r.Call(rig.OperatorToken, c.method, "/admin/v1/"+c.path, c.body, nil)
			named := strings.Contains(p.Detail, c.field) || slices.ContainsFunc(p.Problems, func(one sale.Problem) bool { return one.Field == c.field })
			if status != http.StatusBadRequest || p.Code != adminapi.CodeInvalidRequest || !named {
				t.Errorf("%s %s %s: %d %+v does not name %s", c.method, c.path, c.body, status, p, c.field)
			}
		}
		if n := r.Count("SELECT COUNT(*) FROM inventory"); n != 0 {
			t.Errorf("%d rows of inventory", n)
		}
		_, p := r.Call(rig.OperatorToken, http.MethodPost, "/admin/v1/activities", map[string]any{"id": "x y", "currency": "eur"}, nil)
		if len(p.Problems) < 5 {
			t.Errorf("not all problems at once: %+v", p)
		}
		if n := r.Count("SELECT COUNT(*) FROM activities") + r.Count("SELECT COUNT(*) FROM operator_audit"); n != 0 {
			t.Errorf("%d rows after requests that were all refused", n)
		}
	})

	t.Run("a sale is made, warmed, paused and shown", func(t *testing.T) {
		plan := rig.Plan("sale", map[string]int{"national": 9, "north": 1})
		var a adminapi.Activity
		if status, p := r.Call(rig.OperatorToken, http.MethodPost, "/admin/v1/activities", plan, &a); status != http.StatusCreated || a.State != "draft" || a.Units() != 10 {
			t.Fatalf("%d %+v %+v", status, p, a)
		}
		if status, _ := r.Call(rig.OperatorToken, http.MethodPost, "/admin/v1/activities", plan, nil); status != http.StatusOK {
			t.Errorf("the same again: %d", status)
		}
		other := plan
		other.Name = "Another"
		if status, p := r.Call(rig.OperatorToken, http.MethodPost, "/admin/v1/activities", other, nil); status != http.StatusConflict || p.Code != adminapi.CodeActivityExists {
			t.Errorf("other content: %d %+v", status, p)
		}
		big := rig.Plan("big", map[string]int{"scarce": 2})
		r.Call(rig.OperatorToken, http.MethodPut, "/admin/v1/inventory", adminapi.InventoryRow{SKU: "sku", Pool: "scarce", OnHand: 1}, nil)
		if status, p := r.Call(rig.OperatorToken, http.MethodPost, "/admin/v1/activities", big, nil); status != http.StatusConflict || p.Code != adminapi.CodeTooLittle {
			t.Errorf("too little: %d %+v", status, p)
		}
		var w adminapi.WarmResult
		if status, p := r.Call(rig.OperatorToken, http.MethodPost, "/admin/v1/activities/sale/warm", nil, &w); status != http.StatusOK || w.Already || w.Opened != 1 {
			t.Errorf("%d %+v %+v", status, p, w)
		}
		if status, _ := r.Call(rig.OperatorToken, http.MethodPost, "/admin/v1/activities/sale/warm", nil, &w); status != http.StatusOK || !w.Already {
			t.Errorf("again: %d %+v", status, w)
		}
		var paused adminapi.PauseResult
		r.Call(rig.OperatorToken, http.MethodPost, "/admin/v1/activities/sale/pause", nil, &paused)
		r.Call(rig.ViewerToken, http.MethodGet, "/admin/v1/activities/sale", nil, &a)
		if !paused.Changed || a.State != "warmed" || !a.Paused || a.Redis == nil || !a.Redis.Opened || !a.Redis.Paused {
			t.Errorf("%+v %+v %+v", paused, a, a.Redis)
		}
		r.Call(rig.OperatorToken, http.MethodPost, "/admin/v1/activities/sale/resume", nil, nil)
		var rows []adminapi.StockRow
		r.Call(rig.ViewerToken, http.MethodGet, "/admin/v1/activities/sale/stock", nil, &rows)
		if len(rows) != 2 || rows[0].Allocated != 9 || rows[0].RedisAvailable == nil || *rows[0].RedisAvailable != 9 {
			t.Errorf("%+v", rows)
		}
		for i := range 3 {
			r.Call(rig.OperatorToken, http.MethodPost, "/admin/v1/activities", rig.Plan(fmt.Sprintf("z%d", i), map[string]int{"national": 1}), nil)
		}
		var l adminapi.ActivityList
		seen := 0
		for cursor := ""; ; cursor = l.NextCursor {
			l = adminapi.ActivityList{}
			r.Call(rig.ViewerToken, http.MethodGet, "/admin/v1/activities?limit=2&cursor="+cursor, nil, &l)
			seen += len(l.Activities)
			if l.NextCursor == "" {
				break
			}
		}
		if seen != 4 {
			t.Errorf("%d sales over all pages", seen)
		}
		var audit adminapi.AuditList
		r.Call(rig.ViewerToken, http.MethodGet, "/admin/v1/audit?target=sale", nil, &audit)
		actions := []string{}
		for _, e := range audit.Entries {
			actions = append(actions, e.Action)
			if e.Actor != "tess" || e.Role != "operator" || e.RequestID == "" || e.Remote != "127.0.0.1" {
				t.Errorf("%+v", e)
			}
		}
		if got := strings.Join(actions, " "); got != "activity.resume activity.pause activity.warm activity.create" {
			t.Errorf("audit says %s", got)
		}
	})

	t.Run("an order is found in either store and cancelled through the queue", func(t *testing.T) {
		young, written := r.MustBuy("sale", "young"), r.MustBuy("sale", "written")
		asked := make(chan messaging.Cancel, 8)
		stop := r.Consume(messaging.QueueRollbacks, func(_ context.Context, batch []messaging.Delivery) []messaging.Result {
			for _, d := range batch {
				if c, err := messaging.DecodeCancelRequested(d.Message); err == nil {
					asked <- c
				}
			}
			return make([]messaging.Result, len(batch))
		})
		defer stop()
		stopOrders := r.ConsumeOrders()
		defer stopOrders()
		r.Publish(messaging.OrderReserved([]order.Order{written}))
		var o adminapi.Order
		testkit.Eventually(t, time.Minute, func() error {
			o = adminapi.Order{}
			if status, _ := r.Call(rig.ViewerToken, http.MethodGet, "/admin/v1/orders/"+written.ID.String(), nil, &o); status != http.StatusOK || o.Source != "mysql" {
				return fmt.Errorf("%d %+v", status, o)
			}
			return nil
		})
		if o.Status != "pending" || o.UserID != "written" || o.AmountMinor != 1999 {
			t.Errorf("%+v", o)
		}
		o = adminapi.Order{}
		if r.Call(rig.ViewerToken, http.MethodGet, "/admin/v1/orders/"+young.ID.String(), nil, &o); o.Source != "redis" || o.Status != "reserved" {
			t.Errorf("%+v", o)
		}
		for _, id := range []order.ID{young.ID, written.ID} {
			var c adminapi.CancelResult
			if status, p := r.Call(rig.OperatorToken, http.MethodPost, "/admin/v1/orders/"+id.String()+"/cancel", adminapi.CancelRequest{Reason: "double"}, &c); status != http.StatusAccepted || !c.Queued {
				t.Errorf("%d %+v %+v", status, p, c)
			}
			select {
			case got := <-asked:
				if got.OrderID != id || got.Reason != order.ReasonOperatorCancelled || got.Actor != "operator:tess" || got.Order == nil {
					t.Errorf("%+v", got)
				}
			case <-time.After(time.Minute):
				t.Fatal("no cancel was asked for")
			}
		}
		if status, p := r.Call(rig.OperatorToken, http.MethodPost, "/admin/v1/orders/"+written.ID.String()+"/cancel", adminapi.CancelRequest{Reason: " "}, nil); status != http.StatusBadRequest {
			t.Errorf("no reason: %d %+v", status, p)
		}
		r.Exec("UPDATE orders SET status = 'paid' WHERE id = ?", written.ID.String())
		if status, p := r.Call(rig.OperatorToken, http.MethodPost, "/admin/v1/orders/"+written.ID.String()+"/cancel", adminapi.CancelRequest{Reason: "late"}, nil); status != http.StatusConflict || p.Code != adminapi.CodeNotCancellable {
			t.Errorf("a paid order: %d %+v", status, p)
		}
		if n := r.Count("SELECT COUNT(*) FROM operator_audit WHERE action = 'order.cancel' AND reason = 'double'"); n != 2 {
			t.Errorf("%d audit rows", n)
		}
		var l adminapi.OrderList
		r.Call(rig.ViewerToken, http.MethodGet, "/admin/v1/orders?activity_id=sale&status=paid&user_id=written", nil, &l)
		if len(l.Orders) != 1 || l.Orders[0].OrderID != written.ID.String() {
			t.Errorf("%+v", l)
		}
		if code, p := r.Call(rig.ViewerToken, http.MethodGet, "/admin/v1/orders?activity_id=sal", nil, &l); code != http.StatusNotFound || p.Code != adminapi.CodeActivityNotFound {
			t.Errorf("orders of a sale that does not exist: %d %+v", code, p)
		}
		l = adminapi.OrderList{}
		if code, p := r.Call(rig.ViewerToken, http.MethodGet, "/admin/v1/orders?activity_id=sale&status=refunded", nil, &l); code != http.StatusOK || len(l.Orders) != 0 {
			t.Errorf("nothing matches: %d %+v %+v", code, p, l)
		}
	})

	t.Run("a letter is shown, replayed and discarded", func(t *testing.T) {
		r.Publish(messaging.Message{ID: "broken", Key: messaging.KeyOrderReserved, Body: []byte("no order"), Orders: 1})
		stopOrders := r.ConsumeOrders()
		defer stopOrders()
		l := r.Becomes("broken", "open")
		path := fmt.Sprintf("/admin/v1/dead-letters/%d", l.ID)
		var shown adminapi.DeadLetter
		if r.Call(rig.ViewerToken, http.MethodGet, path, nil, &shown); shown.Verdict != adminapi.Undecodable || string(shown.Body) != "no order" {
			t.Errorf("%+v", shown)
		}
		var dry adminapi.ReplayJob
		if status, _ := r.Call(rig.OperatorToken, http.MethodPost, "/admin/v1/replay-jobs", `{"filter":{},"dry_run":true}`, &dry); status != http.StatusOK || dry.ID != "" || dry.Matched != 1 {
			t.Errorf("%d %+v", status, dry)
		}
		var j adminapi.ReplayJob
		if status, p := r.Call(rig.OperatorToken, http.MethodPost, "/admin/v1/replay-jobs", fmt.Sprintf(`{"ids":[%d]}`, l.ID), &j); status != http.StatusCreated || j.Matched != 1 || j.Actor != "tess" {
			t.Errorf("%d %+v %+v", status, p, j)
		}
		testkit.Eventually(t, time.Minute, func() error {
			r.Call(rig.ViewerToken, http.MethodGet, "/admin/v1/replay-jobs/"+j.ID, nil, &j)
			if j.State != adminapi.JobDone || j.Sent != 1 {
				return fmt.Errorf("%+v", j)
			}
			if l := r.Becomes("broken", "open"); l.Occurrences != 2 {
				return errors.New("not back yet")
			}
			return nil
		})
		var res adminapi.DiscardResult
		body := `{"filter":{"class":"undecodable"},"reason":"not ours","dry_run":true}`
		if r.Call(rig.OperatorToken, http.MethodPost, "/admin/v1/dead-letters/discard", body, &res); res.Matched != 1 || res.Discarded != 0 {
			t.Errorf("%+v", res)
		}
		body = strings.Replace(body, `,"dry_run":true`, "", 1)
		if r.Call(rig.OperatorToken, http.MethodPost, "/admin/v1/dead-letters/discard", body, &res); res.Discarded != 1 {
			t.Errorf("%+v", res)
		}
		var list adminapi.DeadLetterList
		r.Call(rig.ViewerToken, http.MethodGet, "/admin/v1/dead-letters?state=discarded&q=broken", nil, &list)
		if len(list.DeadLetters) != 1 || list.DeadLetters[0].Note != "not ours" {
			t.Errorf("%+v", list)
		}
	})
}
