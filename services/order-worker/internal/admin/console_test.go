package admin_test

import (
	"context"
	"io"
	"net/http"
	"net/http/cookiejar"
	"net/url"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"seckill/pkg/messaging"
	"seckill/services/order-worker/internal/rig"
)

// browser keeps cookies and follows redirects, as an operator's does.
type browser struct {
	t    *testing.T
	http *http.Client
	base string
}

func newBrowser(t *testing.T, r *rig.Rig) *browser {
	t.Helper()
	jar, err := cookiejar.New(nil)
	if err != nil {
		t.Fatal(err)
	}
	return &browser{t: t, http: &http.Client{Jar: jar, Transport: r.Admin.Client().Transport, Timeout: 20 * time.Second}, base: r.Admin.URL}
}

func (b *browser) do(method, path string, form url.Values, header http.Header) (status int, page string, res *http.Response) {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, method, b.base+path, strings.NewReader(form.Encode()))
	if err != nil {
		b.t.Fatal(err)
	}
	for k, v := range header {
		req.Header[k] = v
	}
	if form != nil {
		req.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	}
	res, err = b.http.Do(req)
	if err != nil {
		b.t.Fatal(err)
	}
	defer func() { _ = res.Body.Close() }()
	raw, err := io.ReadAll(res.Body)
	if err != nil {
		b.t.Fatal(err)
	}
	return res.StatusCode, string(raw), res
}

var csrfField = regexp.MustCompile(`name="csrf" value="([^"]+)"`)

func (b *browser) csrf(path string) url.Values {
	b.t.Helper()
	_, page, _ := b.do(http.MethodGet, path, nil, nil)
	m := csrfField.FindStringSubmatch(page)
	if m == nil {
		b.t.Fatalf("no form on %s: %s", path, page)
	}
	return url.Values{"csrf": {m[1]}}
}

func TestConsole(t *testing.T) {
	t.Parallel()
	r := rig.New(t, rig.Options{})
	r.ConsumeDead()
	stopOrders := r.ConsumeOrders()
	plan := rig.Plan("sale", map[string]int{"national": 7})
	plan.Name = `<script>alert("x")</script>`
	if _, _, err := r.Activities.Create(context.Background(), plan, rig.Operator()); err != nil {
		t.Fatal(err)
	}
	r.Publish(messaging.Message{ID: "broken", Key: messaging.KeyOrderReserved, Body: []byte(`<img src=x onerror=alert(1)>`), Orders: 1})
	letter := strconv.FormatInt(r.Becomes("broken", "open").ID, 10)
	stopOrders()

	stranger := newBrowser(t, r)
	for _, path := range []string{"/console", "/console/activities/sale", "/console/dead-letters", "/console/dead-letters/" + letter} {
		if _, page, res := stranger.do(http.MethodGet, path, nil, nil); res.Request.URL.Path != "/console/login" || strings.Contains(page, "sale") {
			t.Errorf("%s without a login: %s", path, page)
		}
	}
	if status, _, _ := stranger.do(http.MethodPost, "/console/login", url.Values{"token": {"wrong"}}, nil); status != http.StatusUnauthorized {
		t.Errorf("wrong token: %d", status)
	}
	if status, _, _ := stranger.do(http.MethodPost, "/console/login", url.Values{"token": {rig.OperatorToken}}, http.Header{"Origin": {"https://evil.example"}}); status != http.StatusUnauthorized {
		t.Errorf("login from another site: %d", status)
	}

	tess := newBrowser(t, r)
	status, page, res := tess.do(http.MethodPost, "/console/login", url.Values{"token": {rig.OperatorToken}}, nil)
	if status != http.StatusOK || !strings.Contains(page, "tess (operator)") || !strings.Contains(page, "/console/activities/sale") {
		t.Fatalf("%d %s", status, page)
	}
	if strings.Contains(page, "<script>") || !strings.Contains(page, "&lt;script&gt;") {
		t.Error("a name is not escaped")
	}
	if csp := res.Header.Get("Content-Security-Policy"); !strings.Contains(csp, "default-src 'none'") || res.Header.Get("X-Content-Type-Options") != "nosniff" {
		t.Errorf("headers %v", res.Header)
	}
	base, err := url.Parse(r.Admin.URL + "/console")
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range tess.http.Jar.Cookies(base) {
		if strings.Contains(c.Value, rig.OperatorToken) {
			t.Error("the token is in the cookie")
		}
	}
	if _, css, res := tess.do(http.MethodGet, "/console/style.css", nil, nil); !strings.Contains(css, "body") || !strings.HasPrefix(res.Header.Get("Content-Type"), "text/css") {
		t.Error("no style")
	}

	for path, want := range map[string]int{"/console/activities/ä": 404, "/console?cursor=ä": 400, "/console/dead-letters?class=ä": 400, "/console/dead-letters?q=ä": 200} {
		if status, _, _ := tess.do(http.MethodGet, path, nil, nil); status != want {
			t.Errorf("%s: %d, want %d", path, status, want)
		}
	}
	form := tess.csrf("/console/activities/sale")
	if status, _, _ := tess.do(http.MethodPost, "/console/activities/sale/warm", url.Values{"csrf": {"x"}}, nil); status != http.StatusForbidden {
		t.Errorf("without the form's proof: %d", status)
	}
	if status, _, _ := tess.do(http.MethodPost, "/console/activities/sale/warm", form, http.Header{"Origin": {"https://evil.example"}}); status != http.StatusForbidden {
		t.Errorf("from another site: %d", status)
	}
	if n := r.Count("SELECT COUNT(*) FROM activities WHERE warm_number > 0"); n != 0 {
		t.Error("a refused form warmed the sale")
	}
	if status, page, _ := tess.do(http.MethodPost, "/console/activities/sale/warm", form, nil); status != http.StatusOK || !strings.Contains(page, "It is warm now.") || !strings.Contains(page, `<td class="n">7</td></tr>`) {
		t.Errorf("%d %s", status, page)
	}
	if status, page, _ := tess.do(http.MethodPost, "/console/activities/sale/pause", form, nil); status != http.StatusOK || !strings.Contains(page, "Resume") {
		t.Errorf("%d %s", status, page)
	}

	_, page, _ = tess.do(http.MethodGet, "/console/dead-letters/"+letter, nil, nil)
	if strings.Contains(page, "<img") || !strings.Contains(page, "undecodable") || !strings.Contains(page, "Discard") {
		t.Errorf("%s", page)
	}
	_, page, _ = tess.do(http.MethodGet, "/console/dead-letters?class=undecodable", nil, nil)
	if !strings.Contains(page, "broken") {
		t.Errorf("%s", page)
	}
	form.Set("id", letter)
	if status, page, _ := tess.do(http.MethodPost, "/console/dead-letters/replay", form, nil); status != http.StatusOK || !strings.Contains(page, "has 1 letters") {
		t.Errorf("%d %s", status, page)
	}
	r.Exec("UPDATE dead_letters SET state = 'open'")
	if status, _, _ := tess.do(http.MethodPost, "/console/dead-letters/discard", form, nil); status != http.StatusBadRequest {
		t.Errorf("discard without a reason: %d", status)
	}
	form.Set("reason", "from the console")
	if status, page, _ := tess.do(http.MethodPost, "/console/dead-letters/discard", form, nil); status != http.StatusOK || !strings.Contains(page, "Discarded 1") {
		t.Errorf("%d %s", status, page)
	}
	if n := r.Count("SELECT COUNT(*) FROM operator_audit WHERE actor = 'tess' AND action IN ('activity.warm', 'activity.pause', 'dead_letter.replay', 'dead_letter.discard')"); n != 4 {
		t.Errorf("%d audit rows", n)
	}

	vic := newBrowser(t, r)
	vic.do(http.MethodPost, "/console/login", url.Values{"token": {rig.ViewerToken}}, nil)
	if _, page, _ := vic.do(http.MethodGet, "/console/activities/sale", nil, nil); strings.Contains(page, "/resume") || !strings.Contains(page, "vic (viewer)") {
		t.Errorf("%s", page)
	}
	if status, _, _ := vic.do(http.MethodPost, "/console/activities/sale/resume", vic.csrf("/console"), nil); status != http.StatusForbidden {
		t.Errorf("a viewer changed something: %d", status)
	}
	vic.do(http.MethodPost, "/console/logout", vic.csrf("/console"), nil)
	if _, _, res := vic.do(http.MethodGet, "/console", nil, nil); res.Request.URL.Path != "/console/login" {
		t.Error("still in after logging out")
	}
}
