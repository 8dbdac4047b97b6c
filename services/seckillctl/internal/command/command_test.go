package command_test

import (
	"bytes"
	"context"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/golang-jwt/jwt/v5"

	"seckill/pkg/adminapi"
	"seckill/pkg/sale"
	"seckill/services/seckillctl/internal/command"
)

const secret = "0123456789abcdef0123456789abcdef"

type run struct {
	code     int
	out, err string
}

func ctl(t *testing.T, env map[string]string, in string, terminal bool, args ...string) run {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	var out, errs bytes.Buffer
	code := command.Run(ctx, command.IO{
		In: strings.NewReader(in), Out: &out, Err: &errs, Getenv: func(k string) string { return env[k] }, InTerminal: terminal,
	}, args)
	return run{code, out.String(), errs.String()}
}

func file(t *testing.T, name, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

const plan = `id: double11
name: Double Eleven
starts_at: 2099-11-11T00:00:00+08:00
ends_at: 2099-11-11T02:00:00+08:00
per_user_limit: 2
payment_timeout: 15m
currency: CNY
items:
  - {sku_id: phone-1, price_minor: 199900, pools: {national: 900, beijing: 100}}
region_fallback: {beijing: [national]}
`

// Exit code 2: the call itself is wrong, and nothing was done.
func TestWrongCallsAreUsageErrors(t *testing.T) {
	t.Parallel()
	env := map[string]string{"SECKILLCTL_TOKEN_FILE": file(t, "token", "x\n"), "SECKILLCTL_SERVER": "http://127.0.0.1:1"}
	for _, args := range [][]string{
		{}, {"nosuch"}, {"activity"}, {"activity", "nosuch"}, {"activity", "create"}, {"activity", "edit"}, {"activity", "show"}, {"activity", "show", "a", "b"},
		{"order", "list"}, {"order", "show", "a", "--colour"}, {"-o", "xml", "activity", "list"}, {"activity", "list", "--timeout", "0s"},
		{"order", "cancel", "x"},                  // no reason
		{"order", "cancel", "x", "--reason", "r"}, // no terminal, no --yes
		{"order", "refund", "x"},                  // no reason
		{"stock", "add", "a", "--sku", "s", "--pool", "p"}, {"stock", "add", "a", "--sku", "s", "--pool", "p", "--quantity", "0"},
		{"stock", "add", "a", "--sku", "s", "--pool", "p", "--quantity", "1", "--op-id", "a b"},
		{"payment", "settle-refund", "t", "--yes"}, {"payment", "settle-refund", "t", "--reason", "r"},
		{"payment", "list", "--due-refund", "--status", "kept"},
		{"order", "refund", "x", "--reason", "r"},            // no --yes
		{"dead", "discard", "1", "--reason", "r"},            // likewise
		{"dead", "discard", "--all", "--yes"},                // no reason
		{"rebuild"}, {"rebuild", "a", "b"}, {"rebuild", "a"}, // no --yes
		{"dead", "replay"}, {"dead", "replay", "x"}, {"dead", "replay", "0"},
		{"dead", "replay", "1", "--class", "c"}, {"dead", "replay", "1", "--all"}, {"dead", "show", "-1"},
		{"inventory", "set", "--sku", "s", "--pool", "p"}, {"inventory", "set", "--sku", "s", "--pool", "p", "--quantity", "1"},
		{"token", "mint"}, {"token", "mint", "--user", "a b"}, {"token", "mint", "--user", "a", "--ttl", "0s"},
	} {
		if r := ctl(t, env, "", false, args...); r.code != command.CodeUsage || len(args) > 1 && r.err == "" {
			t.Errorf("%q: code %d, %q", args, r.code, r.err)
		} else if r.out != "" && len(args) > 1 {
			t.Errorf("%q: talk on stdout: %q", args, r.out)
		}
	}
	if r := ctl(t, nil, "", false, "activity", "list"); r.code != command.CodeUsage || !strings.Contains(r.err, "SECKILLCTL_TOKEN_FILE") {
		t.Errorf("no token: %+v", r)
	}
	env["SECKILLCTL_SERVER"] = "localhost:8081"
	if r := ctl(t, env, "", false, "activity", "list"); r.code != command.CodeUsage {
		t.Errorf("no URL: %+v", r)
	}
}

// What is wrong with a flag is told by its name, before anything is asked or sent.
func TestWrongFlagsAreNamed(t *testing.T) {
	t.Parallel()
	env := map[string]string{"SECKILLCTL_TOKEN_FILE": file(t, "token", "x\n"), "SECKILLCTL_SERVER": "http://127.0.0.1:1"}
	for flag, calls := range map[string][][]string{
		"--quantity": {
			{"inventory", "set", "--sku", "s", "--pool", "p", "--quantity", "-1", "--yes"}, {"inventory", "set", "--sku", "s", "--pool", "p", "--quantity", "1000000001", "--yes"},
			{"stock", "add", "a", "--sku", "s", "--pool", "p", "--quantity", "1000000001"},
			{"stock", "add", "a", "--sku", "s", "--pool", "p", "--quantity", "010"}, {"inventory", "set", "--sku", "s", "--pool", "p", "--quantity", "0x10", "--yes"},
		},
		"--status": {{"order", "list", "a", "--status", "foo"}, {"payment", "list", "--status", "foo"}},
		"--state":  {{"dead", "list", "--state", "foo"}},
		"--reason": {
			{"activity", "end", "a", "--reason", "", "--yes"}, {"order", "cancel", "x", "--reason", " ", "--yes"}, {"order", "refund", "x", "--reason", "", "--yes"},
			{"payment", "settle-refund", "t", "--reason", "", "--yes"}, {"dead", "discard", "--all", "--reason", "", "--yes"},
		},
		"--wait": {
			{"activity", "end", "a", "--wait", "-1s", "--yes"}, {"order", "cancel", "x", "--reason", "r", "--wait", "-1s", "--yes"},
			{"rebuild", "a", "--wait", "-1s", "--yes"}, {"dead", "replay", "--all", "--wait", "-1s"},
		},
	} {
		for _, args := range calls {
			if r := ctl(t, env, "", false, args...); r.code != command.CodeUsage || !strings.Contains(r.err, flag) || r.out != "" {
				t.Errorf("%q: %+v does not name %s", args, r, flag)
			}
		}
	}
}

// A dry run looks before it says what would be done.
func TestADryRunOfASettlementLooksAtThePayment(t *testing.T) {
	t.Parallel()
	for status, want := range map[string]run{
		"":                        {command.CodeNothing, "", "no payment t"},
		adminapi.PaymentRefundDue: {command.CodeDone, "", "would settle payment t"},
		adminapi.PaymentSettled:   {command.CodeDone, "", "settled before, by ann"},
		adminapi.PaymentApplied:   {command.CodeError, "", "is applied"},
	} {
		var l adminapi.PaymentList
		if status != "" {
			l.Payments = []adminapi.Payment{{TransactionID: "t", Status: status, SettledBy: "ann"}}
		}
		r := served(t, map[string]any{"GET payments": l}, "payment", "settle-refund", "t", "--reason", "r", "--dry-run")
		if r.code != want.code || r.out != "" || !strings.Contains(r.err, want.err) {
			t.Errorf("%q: %+v", status, r)
		}
	}
}

// Exit code 3: the worker goes on, only the waiting is over.
func TestWaitingThatRunsOutIsPartlyDone(t *testing.T) {
	t.Parallel()
	running := adminapi.Rebuild{ActivityID: "a", State: adminapi.RebuildRunning}
	r := served(t, map[string]any{"POST a/rebuild": running, "GET a/rebuild": running}, "rebuild", "a", "--yes", "--wait", "50ms")
	if r.code != command.CodePartly || !strings.Contains(r.err, "not done after 50ms; it goes on in the worker") {
		t.Errorf("%+v", r)
	}
	job := adminapi.ReplayJob{ID: "j", State: adminapi.JobRunning, Matched: 1}
	r = served(t, map[string]any{"POST replay-jobs": job, "GET replay-jobs/j": job}, "dead", "replay", "--all", "--wait", "50ms")
	if r.code != command.CodePartly || !strings.Contains(r.err, "not done after 50ms; it goes on in the worker") {
		t.Errorf("%+v", r)
	}
}

// Exit code 3: some of the letters that were named took no part.
func TestNamedLettersThatAreNotOpenAreTold(t *testing.T) {
	t.Parallel()
	job := adminapi.ReplayJob{ID: "j", State: adminapi.JobDone, Matched: 2, Sent: 2}
	discarded := adminapi.DiscardResult{Matched: 2, Discarded: 2}
	for _, tc := range []struct {
		ids  []string
		code int
		err  string
	}{
		{[]string{"1", "2"}, command.CodeDone, ""},
		{[]string{"1", "2", "1", "02"}, command.CodeDone, ""},
		{[]string{"1", "2", "3", "4", "5"}, command.CodePartly, "3 of the 5 named letters are not open, or not there"},
	} {
		for _, flags := range [][]string{{"replay"}, {"replay", "--dry-run"}, {"discard", "--reason", "r", "--yes"}, {"discard", "--reason", "r", "--yes", "--dry-run"}} {
			r := served(t, map[string]any{"POST replay-jobs": job, "POST dead-letters/discard": discarded}, append(append([]string{"dead"}, flags...), tc.ids...)...)
			if r.code != tc.code || !strings.Contains(r.err, tc.err) || tc.err == "" && strings.Contains(r.err, "not open") {
				t.Errorf("%v %v: %+v", flags, tc.ids, r)
			}
		}
	}
}

// "The same" is said of a sale only if it held still long enough to be compared.
func TestReconcileSaysWhatItCameTo(t *testing.T) {
	t.Parallel()
	mended, left := adminapi.Difference{Kind: adminapi.DiffBehind, Repaired: true}, adminapi.Difference{Kind: adminapi.DiffStock}
	for _, tc := range []struct {
		name   string
		found  []adminapi.Difference
		moving bool
		flags  []string
		code   int
	}{
		{"the same", nil, false, nil, command.CodeDone},
		{"moving", nil, true, nil, command.CodePartly},
		{"differs", []adminapi.Difference{left}, false, nil, command.CodeCheck},
		{"differs while moving", []adminapi.Difference{left}, true, nil, command.CodeCheck},
		{"mended", []adminapi.Difference{mended}, false, []string{"--repair"}, command.CodeDone},
		{"mended while moving", []adminapi.Difference{mended}, true, []string{"--repair"}, command.CodePartly},
		{"mended in part", []adminapi.Difference{mended, left}, false, []string{"--repair"}, command.CodePartly},
		{"not to be mended", []adminapi.Difference{left}, false, []string{"--repair"}, command.CodeCheck},
	} {
		answer := adminapi.ReconcileResult{ActivityID: "a", Passes: 1, Stable: !tc.moving, Differences: tc.found}
		r := served(t, map[string]any{"POST a/reconcile": answer}, append([]string{"reconcile", "a"}, tc.flags...)...)
		if r.code != tc.code || strings.Contains(r.err, "was moving") != tc.moving {
			t.Errorf("%s: %+v", tc.name, r)
		}
	}
}

// Exit code 1: it was tried.
func TestWhatFailsIsAnError(t *testing.T) {
	t.Parallel()
	env := map[string]string{"SECKILLCTL_TOKEN_FILE": file(t, "token", "a-secret-token\n"), "SECKILLCTL_SERVER": "http://127.0.0.1:1"}
	for _, args := range [][]string{
		{"activity", "list"}, {"activity", "create", "-f", "/nosuch/sale.yaml"}, {"activity", "create", "-f", file(t, "bad.yaml", plan+"colour: red\n")},
		{"activity", "create", "-f", file(t, "wrong.yaml", strings.Replace(plan, "per_user_limit: 2", "per_user_limit: 0", 1))},
		{"--token-file", "/nosuch", "activity", "list"}, {"token", "mint", "--user", "u"},
	} {
		if r := ctl(t, env, "", false, args...); r.code != command.CodeError || r.err == "" || r.out != "" || strings.Contains(r.err, "a-secret-token") {
			t.Errorf("%q: %+v", args, r)
		}
	}
}

func TestDryRunChecksAPlanWithoutAServer(t *testing.T) {
	t.Parallel()
	path := file(t, "sale.yaml", plan)
	r := ctl(t, nil, "", false, "activity", "create", "-f", path, "--dry-run")
	want := "SKU_ID   POOL      UNITS  PRICE_MINOR  CURRENCY\n" +
		"phone-1  beijing   100    199900       CNY\n" +
		"phone-1  national  900    199900       CNY\n"
	if r.code != 0 || r.out != want || !strings.Contains(r.err, "would create activity double11 with 1000 units") {
		t.Errorf("%+v", r)
	}
	r = ctl(t, nil, plan, false, "activity", "create", "-f", "-", "--dry-run", "-o", "csv")
	if want := "sku_id,pool,units,price_minor,currency\nphone-1,beijing,100,199900,CNY\nphone-1,national,900,199900,CNY\n"; r.code != 0 || r.out != want {
		t.Errorf("%+v", r)
	}
	r = ctl(t, nil, "", false, "activity", "create", "-f", path, "--dry-run", "-o", "json")
	var back map[string]any
	if err := json.Unmarshal([]byte(r.out), &back); err != nil || back["qualification"] != "none" || back["starts_at"] != "2099-11-11T00:00:00+08:00" {
		t.Errorf("%v %+v", err, r)
	}
	r = ctl(t, nil, "", false, "activity", "create", "-f", path, "--dry-run", "-o", "yaml")
	if !strings.HasPrefix(r.out, "id: double11\nname: Double Eleven\nstarts_at: \"2099-11-11T00:00:00+08:00\"\n") {
		t.Errorf("%+v", r)
	}
}

// A plan whose window is over is refused without a server, too.
func TestDryRunRefusesAWindowThatIsOver(t *testing.T) {
	t.Parallel()
	r := ctl(t, nil, strings.ReplaceAll(plan, "2099", "2025"), false, "activity", "create", "-f", "-", "--dry-run")
	if r.code != command.CodeError || r.out != "" || !strings.Contains(r.err, "ends_at: is over already") {
		t.Errorf("%+v", r)
	}
}

// What the server would refuse, a dry run refuses as well.
func TestDryRunLooksBeforeItPromises(t *testing.T) {
	t.Parallel()
	rows := []adminapi.StockRow{{SKU: "s", Pool: "p", Allocated: 7, Available: 3}}
	stored := adminapi.InventoryList{Inventory: []adminapi.InventoryRow{{SKU: "s", Pool: "p", OnHand: 5}}}
	for _, tc := range []struct {
		args []string
		code int
		out  string
	}{
		{[]string{"--sku", "s", "--pool", "p", "--quantity", "5"}, command.CodeDone, "would add 5 units"},
		{[]string{"--sku", "s", "--pool", "p", "--quantity", "6"}, command.CodeError, "the inventory holds 5 units of s in p"},
		{[]string{"--sku", "s", "--pool", "q", "--quantity", "1"}, command.CodeNothing, "the sale has no pool q of s"},
	} {
		args := append([]string{"stock", "add", "a", "--op-id", "o", "--dry-run", "-o", "csv"}, tc.args...)
		r := served(t, map[string]any{"GET a/stock": rows, "GET inventory": stored}, args...)
		if r.code != tc.code || !strings.Contains(r.err, tc.out) || (r.out == "") != (tc.code != 0) {
			t.Errorf("%v: %+v", tc.args, r)
		}
		if tc.code == 0 && !strings.HasSuffix(r.out, "a,o,s,p,5,false,false,7,3\n") {
			t.Errorf("%v: %+v", tc.args, r)
		}
	}
	job := adminapi.ReplayJob{State: adminapi.JobDone, DryRun: true, Matched: 3, Verdicts: map[string]int{adminapi.WillApply: 1, adminapi.InConflict: 2}}
	r := served(t, map[string]any{"POST replay-jobs": job}, "dead", "replay", "--all", "--dry-run")
	if r.code != command.CodeDone || !strings.Contains(r.err, "only those that will apply are sent: 1") {
		t.Errorf("%+v", r)
	}
}

// A worker that starts anew while somebody waits for an end goes on with it; so does the waiting.
func TestWaitingForAnEndOutlivesTheWorker(t *testing.T) {
	t.Parallel()
	var looks atomic.Int32
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case r.Method == http.MethodPost:
			_ = json.NewEncoder(w).Encode(adminapi.EndResult{ActivityID: "a", State: adminapi.ActivityEnded})
		case looks.Add(1) < 3:
			panic(http.ErrAbortHandler) // the connection breaks
		default:
			_ = json.NewEncoder(w).Encode(adminapi.Activity{State: adminapi.ActivityClosed})
		}
	}))
	defer srv.Close()
	r := ctl(t, map[string]string{"SECKILLCTL_TOKEN_FILE": file(t, "token", "x"), "SECKILLCTL_SERVER": srv.URL}, "", false, "activity", "end", "a", "--yes", "--wait", "1m", "-o", "csv")
	if r.code != command.CodeDone || !strings.HasSuffix(r.out, "a,false,closed\n") {
		t.Errorf("%+v", r)
	}
}

func TestEveryProblemOfAPlanIsTold(t *testing.T) {
	t.Parallel()
	bad := strings.NewReplacer("CNY", "yuan", "15m", "soon", "per_user_limit: 2", "per_user_limit: -1").Replace(plan)
	r := ctl(t, nil, bad, false, "activity", "create", "-f", "-", "--dry-run")
	for _, field := range []string{"currency", "payment_timeout", "per_user_limit"} {
		if !strings.Contains(r.err, field) {
			t.Errorf("%s is not named in %q", field, r.err)
		}
	}
}

func TestOnATerminalItAsks(t *testing.T) {
	t.Parallel()
	env := map[string]string{"SECKILLCTL_TOKEN_FILE": file(t, "token", "x"), "SECKILLCTL_SERVER": "http://127.0.0.1:1"}
	for answer, said := range map[string]string{"n\n": "not done", "": "not done", "yes\n": "call admin API"} {
		if r := ctl(t, env, answer, true, "order", "cancel", "x", "--reason", "r"); r.code != command.CodeError || !strings.Contains(r.err, "cancel order x? [y/N]") || !strings.Contains(r.err, said) {
			t.Errorf("answer %q: %+v", answer, r)
		}
	}
}

func TestMintedTokenIsOneThatOrderAPITakes(t *testing.T) {
	t.Parallel()
	env := map[string]string{"SECKILL_AUTH_JWT_SECRET": secret}
	r := ctl(t, env, "", false, "token", "mint", "--user", "buyer-1", "--ttl", "5m")
	if r.code != 0 || r.err != "" {
		t.Fatalf("%+v", r)
	}
	var claims jwt.RegisteredClaims
	_, err := jwt.ParseWithClaims(strings.TrimSuffix(r.out, "\n"), &claims, func(*jwt.Token) (any, error) { return []byte(secret), nil },
		jwt.WithValidMethods([]string{"HS256"}), jwt.WithExpirationRequired())
	if err != nil || claims.Subject != "buyer-1" || time.Until(claims.ExpiresAt.Time) > 5*time.Minute {
		t.Errorf("%+v %v", claims, err)
	}
	env = map[string]string{"SECKILL_AUTH_JWT_SECRET_FILE": file(t, "secret", secret+"\n")}
	if r := ctl(t, env, "", false, "token", "mint", "--user", "u", "-o", "json"); r.code != 0 || !strings.Contains(r.out, `"user_id": "u"`) {
		t.Errorf("%+v", r)
	}
	if r := ctl(t, map[string]string{"SECKILL_AUTH_JWT_SECRET": "short"}, "", false, "token", "mint", "--user", "u"); r.code != command.CodeError || strings.Contains(r.err, "short ") {
		t.Errorf("%+v", r)
	}
}

// served runs seckillctl against a server that has one answer for each call.
func served(t *testing.T, answers map[string]any, args ...string) run {
	t.Helper()
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		path := strings.TrimPrefix(strings.TrimPrefix(r.URL.Path, "/admin/v1/"), "activities/")
		answer, ok := answers[r.Method+" "+path]
		if !ok {
			t.Errorf("%s %s was called", r.Method, r.URL.Path)
		}
		_ = json.NewEncoder(w).Encode(answer)
	}))
	defer srv.Close()
	return ctl(t, map[string]string{"SECKILLCTL_TOKEN_FILE": file(t, "token", "x"), "SECKILLCTL_SERVER": srv.URL}, "", false, args...)
}

func TestVerifyNamesTheChecksThatFailed(t *testing.T) {
	t.Parallel()
	lines := []adminapi.VerifyLine{{Check: "sale is closed", OK: true}, {Check: "row-lock waits"}, {Check: "redis pool in use"}}
	r := served(t, map[string]any{"GET a/verify": adminapi.VerifyResult{Lines: lines}}, "verify", "a", "-o", "csv")
	if r.code != command.CodeCheck || !strings.Contains(r.err, "does not pass: row-lock waits; redis pool in use\n") {
		t.Errorf("%+v", r)
	}
}

// A sale that Redis has lost is not warm, whatever MySQL says.
func TestWarmingSaysThatRedisHasLostTheSale(t *testing.T) {
	t.Parallel()
	left := int64(3)
	for _, tc := range []struct {
		opened int
		left   *int64
		want   string
	}{
		{0, nil, "seckillctl rebuild a"}, {1, &left, "seckillctl rebuild a"},
		{2, nil, "seckillctl rebuild a"}, // a stock key is missing
		{2, &left, "a is warm already"},
	} {
		warm := adminapi.WarmResult{ActivityID: "a", Already: true, Number: 1, Opened: tc.opened}
		rows := []adminapi.StockRow{{SKU: "s", Pool: "p", RedisAvailable: &left}, {SKU: "s", Pool: "q", RedisAvailable: tc.left}}
		r := served(t, map[string]any{"POST a/warm": warm, "GET a": adminapi.Activity{Sale: sale.Sale{Buckets: 2}}, "GET a/stock": rows}, "activity", "warm", "a")
		if r.code != 0 || !strings.Contains(r.err, tc.want) || !strings.Contains(r.out, "true") {
			t.Errorf("%d of 2 buckets: %+v, want %q", tc.opened, r, tc.want)
		}
	}
}

func TestEndSaysWhatTheSettlementWaitsFor(t *testing.T) {
	t.Parallel()
	ended := map[string]any{
		"POST a/end": adminapi.EndResult{ActivityID: "a", State: "ended"}, "GET a": adminapi.Activity{State: "ended"},
		"GET a/report":            adminapi.Report{Total: adminapi.ReportLine{Pending: adminapi.ReportCount{Orders: 7}}},
		"GET dead-letters/groups": adminapi.DeadLetterGroups{Groups: []adminapi.DeadLetterGroup{{Count: 2}, {Count: 1}}},
	}
	r := served(t, ended, "activity", "end", "a", "--yes", "--wait", "1ms")
	if r.code != command.CodePartly || !strings.Contains(r.err, "7 orders can still be paid") || !strings.Contains(r.err, "3 dead letters are open") {
		t.Errorf("%+v", r)
	}
}

// Strict ids, told by line, before anything is sent.
func TestImportChecksTheWholeFileFirst(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		"u1\nu 2\nu3\n\nü\n":            "line 2: \"u 2\"",
		"u1\nu2,x\n":                    "line 2: 2 columns",
		"name,user_id\nx,u1\ny\n":       "line 3: no user id",
		"user_id\n" + "\n":              "no users",
		"u1\n\"broken\n":                "read users",
		"user_id,city\nu1,Rome\n'; --,": "line 3",
	} {
		r := ctl(t, nil, text, false, "qualify", "import", "a", "-", "--dry-run")
		if r.code == 0 || r.code == command.CodeUsage || !strings.Contains(r.err, want) || r.out != "" {
			t.Errorf("%q: %+v", text, r)
		}
	}
	for _, column := range []string{"user_id", "USER_ID"} {
		users := file(t, "users.csv", "\ufeffname,"+column+"\r\nAnn,u1\r\nBob,u2\r\n")
		r := served(t, map[string]any{"GET a": adminapi.Activity{}}, "qualify", "import", "a", users, "--dry-run", "-o", "csv")
		if r.code != 0 || r.out != "activity_id,users,added\na,2,0\n" {
			t.Errorf("%+v", r)
		}
	}
}
