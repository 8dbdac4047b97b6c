package stock

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"seckill/pkg/order"
)

// BenchmarkReserve measures whole reservations by many goroutines at once, as a busy api makes them.
func BenchmarkReserve(b *testing.B) {
	x := newBench(b)
	a := newSale("bench", map[string]int{"national": 1_000_000_000})
	a.EndsAt = time.Now().Add(24 * time.Hour)
	x.open(a)
	var n atomic.Int64
	b.SetParallelism(64)
	b.ReportAllocs()
	b.ResetTimer()
	ctx := context.Background()
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			user := fmt.Sprintf("user-%d", n.Add(1))
			id, err := x.ids.New(a.ID, 0)
			if err != nil {
				b.Fatal(err)
			}
			if _, err := x.Reserve(ctx, Reservation{ID: id, User: user, SKU: "sku-1", Region: "national", Pools: []string{"national"}, Quantity: 1}); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "reservations/s")
}

// BenchmarkReserveAlone measures one reservation at a time: the round trip.
func BenchmarkReserveAlone(b *testing.B) {
	x := newBench(b)
	a := newSale("alone", map[string]int{"national": 1_000_000_000})
	x.open(a)
	ctx := context.Background()
	for i := 0; b.Loop(); i++ {
		r := x.ask(a, fmt.Sprintf("user-%d", i), 1)
		if _, err := x.Reserve(ctx, r); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkRelease measures releases of confirmed orders in the worker's way, many per call.
func BenchmarkRelease(b *testing.B) {
	x := newBench(b)
	a := newSale("release", map[string]int{"national": 1_000_000_000})
	x.open(a)
	ctx := context.Background()
	rs := make([]Release, b.N)
	for i := range rs {
		rs[i] = releaseOf(x.must(x.ask(a, fmt.Sprintf("user-%d", i), 1)).Record, order.Cancelled)
	}
	b.ResetTimer()
	for i := 0; i < len(rs); i += 512 {
		if _, err := x.Release(ctx, rs[i:min(i+512, len(rs))]); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "releases/s")
}
