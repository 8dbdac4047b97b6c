//go:build failpoints

package failpoint

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"
)

func TestArmedPointFiresAtItsHitOnly(t *testing.T) {
	disarm, err := Arm("a@2=error; b=sleep:1ms")
	if err != nil {
		t.Fatal(err)
	}
	ctx := context.Background()
	for i, want := range []error{nil, ErrInjected, nil} {
		if err := Hit(ctx, "a"); !errors.Is(err, want) {
			t.Errorf("hit %d: %v, want %v", i+1, err, want)
		}
	}
	if err := Hit(ctx, "b"); err != nil {
		t.Errorf("sleep: %v", err)
	}
	disarm()
	if len(points.set) != 0 {
		t.Errorf("left armed: %v", points.set)
	}
}

func TestPauseHoldsWhileTheFileExists(t *testing.T) {
	file := filepath.Join(t.TempDir(), "hold")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	disarm, err := Arm("p=pause:" + file)
	if err != nil {
		t.Fatal(err)
	}
	defer disarm()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
	defer cancel()
	if err := Hit(ctx, "p"); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("with the file there: %v", err)
	}
	if _, err := os.Stat(file + ".hit"); err != nil {
		t.Error("no mark that the point was reached")
	}
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	if err := Hit(context.Background(), "p"); err != nil {
		t.Errorf("with the file gone: %v", err)
	}
}

func TestKillEndsTheProcessAtOnce(t *testing.T) {
	if os.Getenv("FAILPOINT_VICTIM") != "" {
		_ = Hit(context.Background(), "victim")
		return
	}
	cmd := exec.Command(os.Args[0], "-test.run=^TestKillEndsTheProcessAtOnce$")
	cmd.Env = append(os.Environ(), "FAILPOINT_VICTIM=1", "SECKILL_FAILPOINTS=victim=kill")
	err := cmd.Run()
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
		t.Errorf("ended with %v, want SIGKILL", err)
	}
}

func TestUnreadableSpecIsRefused(t *testing.T) {
	for _, spec := range []string{"x", "x=jump", "x@0=kill", "x@a=kill", "x=sleep:soon", "x=pause"} {
		if _, err := Arm(spec); err == nil {
			t.Errorf("%q was accepted", spec)
		}
	}
}
