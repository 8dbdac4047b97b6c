package httpapi

import (
	"fmt"
	"sync"
	"testing"
)

func TestRememberedBodyMeansTheSame(t *testing.T) {
	var w wishes
	for range 2 {
		got, err := w.decode([]byte(`{"sku_id":"mug","quantity":2}`))
		if err != nil || got != (reserveBody{SKUID: "mug", Quantity: 2, Region: "national"}) {
			t.Fatalf("%+v, %v", got, err)
		}
		// Bad bodies stay bad, also beside a good one that looks much like them.
		for _, bad := range []string{`{"sku_id":"mug","quantity":2} `[:28], `{"sku_id":"mug","quantity":2,"x":1}`, `{"SKU_ID":"mug","quantity":2}`, `{"sku_id":"mug","sku_id":"mug","quantity":2}`, ``} {
			if _, err := w.decode([]byte(bad)); err == nil {
				t.Errorf("%q was accepted", bad)
			}
		}
	}
	if n := len(w.known.Load().bodies); n != 1 {
		t.Errorf("%d bodies are kept", n)
	}
}

func TestMemoryOfBodiesIsBounded(t *testing.T) {
	var w wishes
	var wg sync.WaitGroup
	for g := range 4 {
		wg.Go(func() {
			for i := range 10 * maxWishes {
				in, err := w.decode(fmt.Appendf(nil, `{"sku_id":"s%d-%d","quantity":1}`, g, i))
				if err != nil || in.SKUID != fmt.Sprintf("s%d-%d", g, i) {
					t.Errorf("%+v, %v", in, err)
				}
			}
		})
	}
	wg.Wait()
	if n := len(w.known.Load().bodies); n > maxWishes {
		t.Errorf("%d bodies are kept", n)
	}
}
