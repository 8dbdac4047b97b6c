package admin

import (
	"bytes"
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"crypto/subtle"
	"embed"
	"encoding/base64"
	"errors"
	"fmt"
	"html/template"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"seckill/pkg/adminapi"
	"seckill/services/order-worker/internal/activity"
	"seckill/services/order-worker/internal/audit"
)

//go:embed console/page.html console/style.css
var consoleFiles embed.FS

const (
	consoleCookie  = "seckill_console"
	consoleSession = 8 * time.Hour
	consoleForm    = 16 << 10
	lettersPerPage = 100
)

// console is the operators' pages under /console: the same services as the API, rendered here. There
// is no script on any page, and the policy forbids them all.
//
// A login gives a cookie with the token's name and an end, signed with a key made from the configured
// token hashes: every replica with the same configuration takes it, and it is worth nothing any more
// when the tokens change. The token itself is in no cookie and no page.
type console struct {
	s     *Server
	key   []byte
	pages *template.Template
	mux   *http.ServeMux
}

func newConsole(s *Server) (*console, error) {
	pages, err := template.ParseFS(consoleFiles, "console/page.html")
	if err != nil {
		return nil, fmt.Errorf("parse console pages: %w", err)
	}
	sum := sha256.New()
	for _, t := range s.cfg.Tokens {
		_, _ = fmt.Fprintf(sum, "%s:%s:%x,", t.Name, t.Role, t.Hash)
	}
	c := &console{s: s, key: sum.Sum(nil), pages: pages, mux: http.NewServeMux()}
	c.mux.HandleFunc("GET /console/style.css", c.style)
	c.mux.HandleFunc("GET /console/login", func(w http.ResponseWriter, r *http.Request) { c.page(w, r, http.StatusOK, "login", "Log in", nil) })
	c.mux.HandleFunc("POST /console/login", c.login)
	c.look("GET /console", c.activities)
	c.look("GET /console/activities/{id}", c.activity)
	c.look("GET /console/dead-letters", c.letters)
	c.look("GET /console/dead-letters/{id}", c.letter)
	c.change("POST /console/logout", Viewer, c.logout)
	c.change("POST /console/activities/{id}/{verb}", Operator, c.changeActivity)
	c.change("POST /console/dead-letters/replay", Operator, c.replay)
	c.change("POST /console/dead-letters/discard", Operator, c.discard)
	return c, nil
}

func (c *console) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	h := w.Header()
	h.Set("Content-Security-Policy", "default-src 'none'; style-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'")
	h.Set("Referrer-Policy", "same-origin")
	if p := foreign(r); p != nil {
		c.fail(w, r, p)
		return
	}
	ctx, cancel := context.WithTimeout(r.Context(), defaultTimeout)
	defer cancel()
	c.mux.ServeHTTP(w, r.WithContext(ctx))
}

func (c *console) style(w http.ResponseWriter, _ *http.Request) {
	raw, err := consoleFiles.ReadFile("console/style.css")
	if err != nil {
		http.Error(w, "not found", http.StatusNotFound)
		return
	}
	w.Header().Set("Content-Type", "text/css; charset=utf-8")
	_, _ = w.Write(raw)
}

func (c *console) mac(kind, text string) string {
	m := hmac.New(sha256.New, c.key)
	_, _ = fmt.Fprintf(m, "%s\n%s", kind, text)
	return base64.RawURLEncoding.EncodeToString(m.Sum(nil))
}

// session gives the holder of the request's cookie; its value is also what the page's forms are
// bound to.
func (c *console) session(r *http.Request) (Token, string, bool) {
	cookie, err := r.Cookie(consoleCookie)
	if err != nil {
		return Token{}, "", false
	}
	parts := strings.Split(cookie.Value, ".")
	if len(parts) != 3 || subtle.ConstantTimeCompare([]byte(parts[2]), []byte(c.mac("session", parts[0]+"."+parts[1]))) != 1 {
		return Token{}, "", false
	}
	name, err := base64.RawURLEncoding.DecodeString(parts[0])
	end, nerr := strconv.ParseInt(parts[1], 10, 64)
	if err != nil || nerr != nil || time.Now().Unix() > end {
		return Token{}, "", false
	}
	for _, t := range c.s.cfg.Tokens {
		if t.Name == string(name) {
			return t, cookie.Value, true
		}
	}
	return Token{}, "", false
}

func (c *console) cookie(r *http.Request, value string, end time.Time) *http.Cookie {
	return &http.Cookie{
		Name: consoleCookie, Value: value, Path: "/console", Expires: end, HttpOnly: true, SameSite: http.SameSiteStrictMode,
		Secure: r.TLS != nil || r.Header.Get("X-Forwarded-Proto") == "https",
	}
}

func (c *console) login(w http.ResponseWriter, r *http.Request) {
	r.Body = http.MaxBytesReader(w, r.Body, consoleForm)
	who, ok := find(c.s.cfg.Tokens, strings.TrimSpace(r.PostFormValue("token")))
	if !ok || !sameOrigin(r) {
		c.page(w, r, http.StatusUnauthorized, "login", "Log in", errors.New("this token is not known"))
		return
	}
	end := time.Now().Add(consoleSession)
	body := base64.RawURLEncoding.EncodeToString([]byte(who.Name)) + "." + strconv.FormatInt(end.Unix(), 10)
	http.SetCookie(w, c.cookie(r, body+"."+c.mac("session", body), end))
	http.Redirect(w, r, "/console", http.StatusSeeOther)
}

func (c *console) logout(w http.ResponseWriter, r *http.Request) (string, string, error) {
	http.SetCookie(w, c.cookie(r, "", time.Unix(1, 0)))
	return "/console/login", "", nil
}

// sameOrigin refuses forms that another site's page sends, where the browser says so.
func sameOrigin(r *http.Request) bool {
	origin := r.Header.Get("Origin")
	if origin == "" {
		return true
	}
	u, err := url.Parse(origin)
	return err == nil && u.Host == r.Host
}

type view struct {
	Title     string
	Who       Token
	Operator  bool
	CSRF      string
	Said, Bad string
	Data      any
}

// look serves a page to whoever is logged in.
func (c *console) look(pattern string, load func(r *http.Request) (page, title string, data any, err error)) {
	c.mux.HandleFunc(pattern, func(w http.ResponseWriter, r *http.Request) {
		if _, _, ok := c.session(r); !ok {
			http.Redirect(w, r, "/console/login", http.StatusSeeOther)
			return
		}
		page, title, data, err := load(r)
		if err != nil {
			c.fail(w, r, err)
			return
		}
		c.render(w, r, http.StatusOK, page, view{Title: title, Said: r.URL.Query().Get("said"), Data: data})
	})
}

// change serves a form: the session's role, the form's own proof of origin, the change, and back to
// a page that says what came of it.
func (c *console) change(pattern string, role Role, do func(w http.ResponseWriter, r *http.Request) (to, said string, err error)) {
	c.mux.HandleFunc(pattern, func(w http.ResponseWriter, r *http.Request) {
		who, cookie, ok := c.session(r)
		if !ok {
			http.Redirect(w, r, "/console/login", http.StatusSeeOther)
			return
		}
		r.Body = http.MaxBytesReader(w, r.Body, consoleForm)
		if !sameOrigin(r) || subtle.ConstantTimeCompare([]byte(r.PostFormValue("csrf")), []byte(c.mac("csrf", cookie))) != 1 {
			c.fail(w, r, NewProblem(http.StatusForbidden, adminapi.CodeForbidden, "the form is too old, or from another site; go back and try again"))
			return
		}
		if !who.Role.may(role) {
			c.fail(w, r, NewProblem(http.StatusForbidden, adminapi.CodeForbidden, "this needs the role "+string(role)))
			return
		}
		actor := audit.Actor{Name: who.Name, Role: string(who.Role), Remote: remote(r), RequestID: w.Header().Get("X-Request-Id")}
		r = r.WithContext(context.WithValue(r.Context(), actorKey{}, actor))
		to, said, err := do(w, r)
		if err != nil {
			c.fail(w, r, err)
			return
		}
		if said != "" {
			to += "?said=" + url.QueryEscape(said)
		}
		http.Redirect(w, r, to, http.StatusSeeOther)
	})
}

func (c *console) page(w http.ResponseWriter, r *http.Request, status int, page, title string, bad error) {
	v := view{Title: title}
	if bad != nil {
		v.Bad = bad.Error()
	}
	c.render(w, r, status, page, v)
}

func (c *console) fail(w http.ResponseWriter, r *http.Request, err error) {
	p := toProblem(err)
	if p.Status >= http.StatusInternalServerError {
		c.s.deps.Log.ErrorContext(r.Context(), "console request failed", "request_id", w.Header().Get("X-Request-Id"), "path", r.URL.Path, "code", p.Code, "error", err)
	}
	c.render(w, r, p.Status, "error", view{Title: http.StatusText(p.Status), Bad: p.Detail})
}

func (c *console) render(w http.ResponseWriter, r *http.Request, status int, page string, v view) {
	if who, cookie, ok := c.session(r); ok {
		v.Who, v.Operator, v.CSRF = who, who.Role == Operator, c.mac("csrf", cookie)
	}
	var out bytes.Buffer // a page that fails half-way is no page
	if err := c.pages.ExecuteTemplate(&out, page, v); err != nil {
		c.s.deps.Log.ErrorContext(r.Context(), "console page failed", "page", page, "error", err)
		http.Error(w, "the page could not be made", http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "text/html; charset=utf-8")
	w.WriteHeader(status)
	_, _ = w.Write(out.Bytes())
}

func (c *console) activities(r *http.Request) (string, string, any, error) {
	l, err := c.s.activityPage(r.Context(), r.URL.Query().Get("cursor"), defaultLimit)
	return "activities", "Activities", l, err
}

func (c *console) activity(r *http.Request) (string, string, any, error) {
	d, err := c.s.deps.Activities.Load(r.Context(), r.PathValue("id"))
	if err != nil {
		return "", "", nil, err
	}
	stock, err := c.stock(r.Context(), d)
	return "activity", "Activity " + d.ID, struct {
		Activity adminapi.Activity
		Stock    []adminapi.StockRow
	}{c.s.withRedis(r.Context(), d), stock}, err
}

func (c *console) stock(ctx context.Context, d *activity.Details) ([]adminapi.StockRow, error) {
	levels, err := c.s.deps.Activities.Levels(ctx, d)
	if err != nil && !unavailable(err) {
		return nil, err
	}
	return stockRows(d, levels), nil // without Redis, what MySQL says
}

func (c *console) letters(r *http.Request) (string, string, any, error) {
	ctx, f := r.Context(), letterFilter(r)
	var before int64
	if text := r.URL.Query().Get("before"); text != "" {
		var err error
		if before, err = strconv.ParseInt(text, 10, 64); err != nil {
			return "", "", nil, invalid("before is not a letter's id")
		}
	}
	groups, err := c.s.deps.Letters.Groups(ctx, adminapi.LetterFilter{})
	if err != nil {
		return "", "", nil, err
	}
	letters, err := c.s.deps.Letters.List(ctx, f, before, lettersPerPage+1)
	if err != nil {
		return "", "", nil, err
	}
	var next int64
	if len(letters) > lettersPerPage {
		letters = letters[:lettersPerPage]
		next = letters[lettersPerPage-1].ID
	}
	jobs, err := c.s.deps.Letters.Jobs(ctx, 10)
	return "letters", "Dead letters", struct {
		Filter  adminapi.LetterFilter
		Groups  []adminapi.DeadLetterGroup
		Letters []adminapi.DeadLetter
		Next    int64
		Jobs    []adminapi.ReplayJob
	}{f, groups, letters, next, jobs}, err
}

func (c *console) letter(r *http.Request) (string, string, any, error) {
	id, err := strconv.ParseInt(r.PathValue("id"), 10, 64)
	if err != nil {
		return "", "", nil, NewProblem(http.StatusNotFound, adminapi.CodeLetterNotFound, "there is no such dead letter")
	}
	l, err := c.s.deps.Letters.Show(r.Context(), id)
	return "letter", "Dead letter " + strconv.FormatInt(id, 10), l, err
}

func (c *console) changeActivity(_ http.ResponseWriter, r *http.Request) (to, said string, err error) {
	ctx, id := r.Context(), r.PathValue("id")
	switch verb := r.PathValue("verb"); verb {
	case "warm":
		var res activity.WarmResult
		res, err = c.s.deps.Activities.Warm(ctx, id, ActorFrom(ctx))
		said = "It is warm now."
		if res.Already {
			said = "It was warm already."
		}
	case "pause", "resume":
		_, err = c.s.deps.Activities.SetPaused(ctx, id, verb == "pause", ActorFrom(ctx))
		said = "Done: " + verb + "."
	default:
		err = NewProblem(http.StatusNotFound, adminapi.CodeNotFound, "there is nothing at this path")
	}
	return "/console/activities/" + url.PathEscape(id), said, err
}

// selection reads what a form names: one letter, or a filter.
func selection(r *http.Request) (adminapi.LetterSelection, error) {
	if text := r.PostFormValue("id"); text != "" {
		id, err := strconv.ParseInt(text, 10, 64)
		if err != nil {
			return adminapi.LetterSelection{}, invalid("this is not a letter's id")
		}
		return adminapi.LetterSelection{IDs: []int64{id}}, nil
	}
	return adminapi.LetterSelection{Filter: &adminapi.LetterFilter{
		Class: r.PostFormValue("class"), ActivityID: r.PostFormValue("activity_id"), OrderID: r.PostFormValue("order_id"), Query: r.PostFormValue("q"),
	}}, nil
}

func (c *console) replay(_ http.ResponseWriter, r *http.Request) (to, said string, err error) {
	sel, err := selection(r)
	if err != nil {
		return "", "", err
	}
	j, err := c.s.deps.Letters.Replay(r.Context(), sel, ActorFrom(r.Context()))
	return "/console/dead-letters", fmt.Sprintf("Replay job %s has %d letters.", j.ID, j.Matched), err
}

func (c *console) discard(_ http.ResponseWriter, r *http.Request) (to, said string, err error) {
	sel, err := selection(r)
	if err != nil {
		return "", "", err
	}
	if len(sel.IDs) == 0 {
		return "", "", invalid("name a letter")
	}
	reason := r.PostFormValue("reason")
	if err := CheckReason(reason); err != nil {
		return "", "", err
	}
	res, err := c.s.deps.Letters.Discard(r.Context(), sel, reason, false, ActorFrom(r.Context()))
	return "/console/dead-letters", fmt.Sprintf("Discarded %d, resolved %d, skipped %d, failed %d.", res.Discarded, res.Resolved, res.Skipped, res.Failed), err
}
