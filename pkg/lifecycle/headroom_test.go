package lifecycle

import (
	"runtime"
	"testing"
)

var kept []byte

// With headroom the collector runs less often for the same allocations.
func TestHeadroomMakesTheCollectorRunLessOften(t *testing.T) {
	cycles := func() uint32 {
		var before, after runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&before)
		for range 256 {
			kept = make([]byte, 1<<20)
		}
		runtime.ReadMemStats(&after)
		return after.NumGC - before.NumGC
	}
	t.Setenv("GOGC", "")
	t.Setenv("GOMEMLIMIT", "")
	without := cycles()
	release := GCHeadroom(64 << 20)
	with := cycles()
	release()
	if with*4 > without {
		t.Errorf("%d cycles with headroom, %d without", with, without)
	}
}

func TestHeadroomLeavesAnOperatorsSettingAlone(t *testing.T) {
	t.Setenv("GOGC", "50")
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	release := GCHeadroom(64 << 20)
	runtime.ReadMemStats(&after)
	release()
	if after.TotalAlloc-before.TotalAlloc > 1<<20 {
		t.Error("reserved although GOGC is set")
	}
}
