package app

import (
	"fmt"
	"maps"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/golang-jwt/jwt/v5"

	"seckill/pkg/messaging"
	"seckill/pkg/stock"
)

// O03, O29 and the list of bad input: each has its code, and nothing is written or published.
func TestBadInputIsRefusedWithItsCodeAndLeavesNothingBehind(t *testing.T) {
	t.Parallel()
	w := newWorldWithBroker(t)
	broker := w.declare()
	orders := w.collect(broker, messaging.QueueOrders)
	payments := w.collect(broker, messaging.QueuePayments)
	rollbacks := w.collect(broker, messaging.QueueRollbacks)
	w.sale("sale", pools("mug", map[string]int{"beijing": 10, "shanghai": 10}), func(a *stock.Activity) {
		a.RegionFallback = map[string][]string{"tianjin": {"beijing"}}
	})
	w.sale("fallbackless", pools("mug", map[string]int{"beijing": 10}))
	w.announce("cold")
	w.sale("later", func(a *stock.Activity) { a.StartsAt = time.Now().Add(10 * time.Minute) })
	w.sale("over", func(a *stock.Activity) {
		a.StartsAt, a.EndsAt = time.Now().Add(-time.Hour), time.Now().Add(-time.Minute)
	})
	w.sale("listed", func(a *stock.Activity) { a.Qualified = true })
	r := w.replica().ready()
	before := w.fingerprint()

	post := func(body string) call {
		return call{method: "POST", path: "/v1/activities/sale/orders", token: token("u1"), body: body}
	}
	at := func(activity string) call {
		c := post(`{"sku_id":"mug","quantity":1,"region":"national"}`)
		c.path = "/v1/activities/" + activity + "/orders"
		return c
	}
	good := `{"sku_id":"mug","quantity":1,"region":"beijing"}`
	quantity := func(q string) call { return post(`{"sku_id":"mug","region":"beijing","quantity":` + q + `}`) }
	with := func(c call, f func(*call)) call { f(&c); return c }
	tok := func(s string) call { return with(post(good), func(c *call) { c.token = s }) }
	key := func(s string) call {
		return with(post(good), func(c *call) { c.header = http.Header{"Idempotency-Key": {s}} })
	}
	ctype := func(s string) call { return with(post(good), func(c *call) { c.contentType = s }) }
	sign := func(method jwt.SigningMethod, key any, claims jwt.MapClaims) string {
		s, err := jwt.NewWithClaims(method, claims).SignedString(key)
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	hour := time.Now().Add(time.Hour).Unix()

	for name, tc := range map[string]struct {
		call   call
		status int
		code   string
	}{
		"unknown activity":           {at("nothing"), 404, "activity_not_found"},
		"activity in another case":   {at("SALE"), 404, "activity_not_found"},
		"activity with odd letters":  {at("sa%20le"), 404, "activity_not_found"},
		"activity with a NUL":        {at("sa%00le"), 404, "activity_not_found"},
		"activity too long":          {at(strings.Repeat("a", 33)), 404, "activity_not_found"},
		"activity not UTF-8":         {at("%ff"), 404, "activity_not_found"},
		"not warmed":                 {at("cold"), 503, "temporarily_unavailable"},
		"not started":                {at("later"), 409, "activity_not_started"},
		"ended":                      {at("over"), 410, "activity_ended"},
		"not on the list":            {at("listed"), 403, "not_qualified"},
		"region without a pool":      {post(`{"sku_id":"mug","quantity":1,"region":"paris"}`), 400, "invalid_request"},
		"no region and no national":  {post(`{"sku_id":"mug","quantity":1}`), 400, "invalid_request"},
		"region in capitals":         {post(`{"sku_id":"mug","quantity":1,"region":"Beijing"}`), 400, "invalid_request"},
		"region empty":               {post(`{"sku_id":"mug","quantity":1,"region":""}`), 400, "invalid_request"},
		"region null":                {post(`{"sku_id":"mug","quantity":1,"region":null}`), 400, "invalid_request"},
		"region a number":            {post(`{"sku_id":"mug","quantity":1,"region":1}`), 400, "invalid_request"},
		"region too long":            {post(`{"sku_id":"mug","quantity":1,"region":"` + strings.Repeat("a", 33) + `"}`), 400, "invalid_request"},
		"unknown sku":                {post(`{"sku_id":"cup","quantity":1,"region":"beijing"}`), 400, "invalid_request"},
		"sku in another case":        {post(`{"sku_id":"MUG","quantity":1,"region":"beijing"}`), 400, "invalid_request"},
		"sku with a NUL":             {post(`{"sku_id":"mu\u0000g","quantity":1,"region":"beijing"}`), 400, "invalid_request"},
		"sku an emoji":               {post(`{"sku_id":"☕","quantity":1,"region":"beijing"}`), 400, "invalid_request"},
		"sku not UTF-8":              {post("{\"sku_id\":\"mu\xffg\",\"quantity\":1,\"region\":\"beijing\"}"), 400, "invalid_request"},
		"sku missing":                {post(`{"quantity":1,"region":"beijing"}`), 400, "invalid_request"},
		"quantity negative":          {quantity("-5"), 400, "invalid_request"},
		"quantity zero":              {quantity("0"), 400, "invalid_request"},
		"quantity minus zero":        {quantity("-0"), 400, "invalid_request"},
		"quantity a fraction":        {quantity("1.5"), 400, "invalid_request"},
		"quantity 2.0":               {quantity("2.0"), 400, "invalid_request"},
		"quantity 1e2":               {quantity("1e2"), 400, "invalid_request"},
		"quantity a text":            {quantity(`"1"`), 400, "invalid_request"},
		"quantity null":              {quantity("null"), 400, "invalid_request"},
		"quantity true":              {quantity("true"), 400, "invalid_request"},
		"quantity a list":            {quantity("[1]"), 400, "invalid_request"},
		"quantity hexadecimal":       {quantity("0x5"), 400, "invalid_request"},
		"quantity 01":                {quantity("01"), 400, "invalid_request"},
		"quantity a billion":         {quantity("1000000000"), 400, "invalid_request"},
		"quantity above 63 bits":     {quantity("9223372036854775808"), 400, "invalid_request"},
		"quantity missing":           {post(`{"sku_id":"mug","region":"beijing"}`), 400, "invalid_request"},
		"quantity above the limit":   {quantity("2"), 409, "limit_reached"},
		"unknown member":             {post(`{"sku_id":"mug","quantity":1,"region":"beijing","price":1}`), 400, "invalid_request"},
		"repeated member":            {post(`{"sku_id":"mug","quantity":1,"quantity":1,"region":"beijing"}`), 400, "invalid_request"},
		"member in another case":     {post(`{"SKU_ID":"mug","quantity":1,"region":"beijing"}`), 400, "invalid_request"},
		"text after the object":      {post(good + "x"), 400, "invalid_request"},
		"two objects":                {post(good + good), 400, "invalid_request"},
		"cut":                        {post(good[:20]), 400, "invalid_request"},
		"empty body":                 {with(post(""), func(c *call) { c.contentType = "application/json" }), 400, "invalid_request"},
		"null":                       {post("null"), 400, "invalid_request"},
		"a list":                     {post("[" + good + "]"), 400, "invalid_request"},
		"a NUL behind it":            {post(good + "\x00"), 400, "invalid_request"},
		"nested deeply":              {post(`{"sku_id":` + strings.Repeat("[", 4000)), 400, "invalid_request"},
		"nested 100,000 deep":        {post(`{"sku_id":` + strings.Repeat("[", 100_000)), 413, "body_too_large"},
		"one byte too long":          {post(good + strings.Repeat(" ", 4097-len(good))), 413, "body_too_large"},
		"20 MB":                      {post(good + strings.Repeat(" ", 20<<20)), 413, "body_too_large"},
		"no type":                    {with(post(good), func(c *call) { c.header = http.Header{"Content-Type": nil}; c.contentType = " " }), 415, "unsupported_media_type"},
		"a form":                     {ctype("application/x-www-form-urlencoded"), 415, "unsupported_media_type"},
		"text":                       {ctype("text/plain"), 415, "unsupported_media_type"},
		"problem json":               {ctype("application/problem+json"), 415, "unsupported_media_type"},
		"latin 1":                    {ctype("application/json; charset=iso-8859-1"), 415, "unsupported_media_type"},
		"gzip":                       {with(post(good), func(c *call) { c.header = http.Header{"Content-Encoding": {"gzip"}} }), 415, "unsupported_media_type"},
		"key empty":                  {key(""), 400, "invalid_request"},
		"key empty quoted":           {key(`""`), 400, "invalid_request"},
		"key with a space":           {key("a b"), 400, "invalid_request"},
		"key half quoted":            {key(`"abc`), 400, "invalid_request"},
		"key too long":               {key(strings.Repeat("k", 65)), 400, "invalid_request"},
		"two keys":                   {with(post(good), func(c *call) { c.header = http.Header{"Idempotency-Key": {"a", "b"}} }), 400, "invalid_request"},
		"no token":                   {tok(""), 401, "unauthenticated"},
		"a token of noise":           {tok("abc.def.ghi"), 401, "unauthenticated"},
		"expired token":              {tok(sign(jwt.SigningMethodHS256, []byte(testSecret), jwt.MapClaims{"sub": "u1", "exp": time.Now().Add(-time.Minute).Unix()})), 401, "unauthenticated"},
		"token without exp":          {tok(sign(jwt.SigningMethodHS256, []byte(testSecret), jwt.MapClaims{"sub": "u1"})), 401, "unauthenticated"},
		"token not valid yet":        {tok(sign(jwt.SigningMethodHS256, []byte(testSecret), jwt.MapClaims{"sub": "u1", "exp": hour, "nbf": hour - 60})), 401, "unauthenticated"},
		"token of another key":       {tok(sign(jwt.SigningMethodHS256, []byte("another key of the same length!!"), jwt.MapClaims{"sub": "u1", "exp": hour})), 401, "unauthenticated"},
		"token of another algorithm": {tok(sign(jwt.SigningMethodHS512, []byte(testSecret), jwt.MapClaims{"sub": "u1", "exp": hour})), 401, "unauthenticated"},
		"token with an extension":    {tok(critical(t, jwt.MapClaims{"sub": "u1", "exp": hour})), 401, "unauthenticated"},
		"token without signature":    {tok(sign(jwt.SigningMethodNone, jwt.UnsafeAllowNoneSignatureType, jwt.MapClaims{"sub": "u1", "exp": hour})), 401, "unauthenticated"},
		"forged token": {tok(strings.Join([]string{
			strings.Split(token("u1"), ".")[0], strings.Split(token("u2"), ".")[1], strings.Split(token("u1"), ".")[2],
		}, ".")), 401, "unauthenticated"},
		"user missing":         {tok(sign(jwt.SigningMethodHS256, []byte(testSecret), jwt.MapClaims{"exp": hour})), 401, "unauthenticated"},
		"user of spaces":       {tok(token("   ")), 401, "unauthenticated"},
		"user too long":        {tok(token(strings.Repeat("u", 300))), 401, "unauthenticated"},
		"user with a NUL":      {tok(token("u\x001")), 401, "unauthenticated"},
		"user an emoji":        {tok(token("🙂")), 401, "unauthenticated"},
		"user a number":        {tok(sign(jwt.SigningMethodHS256, []byte(testSecret), jwt.MapClaims{"sub": 17, "exp": hour})), 401, "unauthenticated"},
		"rehearsal elsewhere":  {tok(token("u1", func(c jwt.MapClaims) { c["activity"] = "cold" })), 401, "unauthenticated"},
		"rehearsal of a sale":  {tok(token("u1", func(c jwt.MapClaims) { c["activity"] = "sale" })), 401, "unauthenticated"},
		"unknown path":         {call{method: "GET", path: "/v1/nothing"}, 404, "not_found"},
		"trailing slash":       {call{method: "GET", path: "/v1/activities/sale/"}, 404, "not_found"},
		"wrong method":         {call{method: "PUT", path: "/v1/activities/sale/orders"}, 405, "method_not_allowed"},
		"unknown order":        {call{method: "GET", path: "/v1/orders/sale-0-01ARZ3NDEKTSV4RRFFQ69G5FAV", token: token("u1")}, 404, "order_not_found"},
		"order id of noise":    {call{method: "GET", path: "/v1/orders/nothing", token: token("u1")}, 404, "order_not_found"},
		"order id lower case":  {call{method: "GET", path: "/v1/orders/sale-0-01arz3ndektsv4rrffq69g5fav", token: token("u1")}, 404, "order_not_found"},
		"order id odd bucket":  {call{method: "GET", path: "/v1/orders/sale-00-01ARZ3NDEKTSV4RRFFQ69G5FAV", token: token("u1")}, 404, "order_not_found"},
		"cancel unknown order": {call{method: "DELETE", path: "/v1/orders/sale-0-01ARZ3NDEKTSV4RRFFQ69G5FAV", token: token("u1")}, 404, "order_not_found"},
		"mine without token":   {call{method: "GET", path: "/v1/activities/sale/orders/mine"}, 401, "unauthenticated"},
		"mine of nothing":      {call{method: "GET", path: "/v1/activities/nothing/orders/mine", token: token("u1")}, 404, "activity_not_found"},
		"status of nothing":    {call{method: "GET", path: "/v1/activities/nothing"}, 404, "activity_not_found"},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := r.try(tc.call)
			if err != nil {
				t.Fatal(err)
			}
			if got.status != tc.status || got.code() != tc.code {
				t.Fatalf("got %s, want %d %s", got, tc.status, tc.code)
			}
			switch tc.code {
			case "unauthenticated":
				if got.header.Get("WWW-Authenticate") != "Bearer" {
					t.Error("no WWW-Authenticate")
				}
			case "method_not_allowed":
				if !strings.Contains(got.header.Get("Allow"), "POST") {
					t.Errorf("Allow is %q", got.header.Get("Allow"))
				}
			case "activity_not_started":
				if got.header.Get("Retry-After") == "" || got.fields["starts_at"] == nil || got.fields["server_time"] == nil {
					t.Errorf("incomplete: %s %v", got, got.header)
				}
			case "limit_reached":
				if ids, ok := got.fields["order_ids"].([]any); !ok || len(ids) != 0 {
					t.Errorf("order_ids: %s", got)
				}
			}
		})
	}

	if after := w.fingerprint(); !maps.Equal(before, after) {
		t.Errorf("something was written: %d keys before, %d after", len(before), len(after))
	}
	// A good order and a good payment come behind whatever else might have been published.
	bought := r.do(post(good))
	if bought.status != 202 {
		t.Fatalf("good order: %s", bought)
	}
	eventually(t, func() error {
		if got := orders.orders(t); len(got) != 1 || got[0].ID.String() != bought.orderID() {
			return fmt.Errorf("published: %v", got)
		}
		return nil
	})
	if n := len(payments.all()) + len(rollbacks.all()); n != 0 {
		t.Errorf("%d other messages", n)
	}
}

// critical signs a token whose header names an extension that must be understood.
func critical(t *testing.T, claims jwt.MapClaims) string {
	t.Helper()
	tok := jwt.NewWithClaims(jwt.SigningMethodHS256, claims)
	tok.Header["crit"], tok.Header["x"] = []string{"x"}, 1
	s, err := tok.SignedString([]byte(testSecret))
	if err != nil {
		t.Fatal(err)
	}
	return s
}
