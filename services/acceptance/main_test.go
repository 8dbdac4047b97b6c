package acceptance

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"go.uber.org/goleak"
)

// programs are the built binaries.
type programs struct{ api, worker, ctl string }

// built is set by TestMain and only read afterwards: a test binary has nowhere else to keep it.
var built programs

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) int {
	// A directory that is named outside keeps the programs, for running one test many times; what is
	// in it is taken as it is.
	dir := os.Getenv("SECKILL_TEST_PROGRAMS")
	if dir == "" {
		var err error
		if dir, err = os.MkdirTemp("", "seckill-acceptance-"); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		defer func() { _ = os.RemoveAll(dir) }()
	}
	built = programs{api: filepath.Join(dir, "order-api"), worker: filepath.Join(dir, "order-worker"), ctl: filepath.Join(dir, "seckillctl")}
	for _, b := range []struct{ module, out string }{
		{"../order-api", built.api}, {"../order-worker", built.worker}, {"../seckillctl", built.ctl},
	} {
		if _, err := os.Stat(b.out); err == nil {
			continue
		}
		cmd := exec.Command("go", "build", "-race", "-tags", "failpoints", "-o", b.out, ".")
		cmd.Dir = b.module
		cmd.Stdout, cmd.Stderr = os.Stderr, os.Stderr
		if err := cmd.Run(); err != nil {
			fmt.Fprintf(os.Stderr, "build %s: %v\n", b.module, err)
			return 1
		}
	}
	code := m.Run()
	if code == 0 {
		if err := goleak.Find(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	return code
}
