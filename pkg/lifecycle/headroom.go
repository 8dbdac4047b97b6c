package lifecycle

import (
	"os"
	"runtime"
)

// GCHeadroom lets the garbage collector wait for the given number of bytes more before it runs. The
// programs keep little and allocate a lot: with a live heap of some megabytes the collector would run
// many times a second under load, and its work would show in every order. The bytes are reserved and
// never touched, so they cost address space and not memory; with a large live heap they no longer
// matter, which a higher GOGC would.
//
// An operator who has set GOGC or GOMEMLIMIT is left alone. Call the returned function at the end.
func GCHeadroom(bytes int) (release func()) {
	if os.Getenv("GOGC") != "" || os.Getenv("GOMEMLIMIT") != "" {
		return func() {}
	}
	reserve := make([]byte, bytes)
	return func() { runtime.KeepAlive(reserve) }
}
