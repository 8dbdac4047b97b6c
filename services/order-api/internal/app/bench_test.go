package app

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"

	"seckill/pkg/testkit"
)

// BenchmarkReservation is the whole buying path but the network to the client: token, body, script,
// hand-over (to a broker that is away), answer. Each buyer is new.
func BenchmarkReservation(b *testing.B) {
	server := testkit.StartRedis(b)
	w := newWorldOn(b, testkit.RedisEnv{Addr: server.Addr}, noBroker)
	r := w.replica().ready()
	var n atomic.Int64
	buyers := make([]string, 10_000)
	var missed atomic.Int64 // a machine that is too busy answers some of them 503
	post := func(i int64, activity, body string, want int) {
		req := httptest.NewRequest(http.MethodPost, "/v1/activities/"+activity+"/orders", strings.NewReader(body))
		req.Header.Set("Content-Type", "application/json")
		req.Header.Set("Authorization", "Bearer "+buyers[i%int64(len(buyers))])
		rec := httptest.NewRecorder()
		r.Handler().ServeHTTP(rec, req)
		if rec.Code != want {
			missed.Add(1)
		}
	}
	for i := range buyers {
		buyers[i] = token(fmt.Sprintf("buyer-%d", i))
	}
	run := func(name, activity string, want int) {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			b.SetParallelism(64)
			missed.Store(0)
			b.RunParallel(func(pb *testing.PB) {
				for pb.Next() {
					post(n.Add(1), activity, `{"sku_id":"mug","quantity":1}`, want)
				}
			})
			b.ReportMetric(float64(missed.Load())/float64(b.N), "missed/op")
		})
	}
	w.sale("plenty", limit(1_000_000), pools("mug", map[string]int{"national": 1 << 30}))
	w.sale("nothing", pools("mug", map[string]int{"national": 0}))
	run("accepted", "plenty", http.StatusAccepted)
	run("sold out", "nothing", http.StatusConflict)
}
