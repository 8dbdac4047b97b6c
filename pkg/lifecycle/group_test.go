package lifecycle

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// journal records what happened, in order.
type journal struct {
	mu   sync.Mutex
	rows []string
}

func (j *journal) add(s string) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.rows = append(j.rows, s)
}

func (j *journal) all() []string {
	j.mu.Lock()
	defer j.mu.Unlock()
	return slices.Clone(j.rows)
}

func (j *journal) part(name string) Component {
	return Component{
		Name:  name,
		Start: func(context.Context) error { j.add("start " + name); return nil },
		Run: func(ctx context.Context) error {
			<-ctx.Done()
			j.add("end " + name)
			return ctx.Err()
		},
		Stop: func(context.Context) error { j.add("stop " + name); return nil },
	}
}

func newGroup(t *testing.T, o Options) (*Group, *bytes.Buffer) {
	t.Helper()
	var log bytes.Buffer
	return New(slog.New(slog.NewTextHandler(&log, nil)), o), &log
}

// run starts Run and gives its exit code once it is there.
func run(ctx context.Context, g *Group) func(t *testing.T) int {
	code := make(chan int, 1)
	go func() { code <- g.Run(ctx) }()
	return func(t *testing.T) int {
		t.Helper()
		select {
		case c := <-code:
			return c
		case <-time.After(time.Minute):
			t.Fatal("did not return")
			return 0
		}
	}
}

func TestPartsStopInReverseOrderAfterReadinessIsOff(t *testing.T) {
	var j journal
	ready := NewReadiness()
	g, _ := newGroup(t, Options{Readiness: ready, DrainDelay: time.Millisecond})
	g.Add(j.part("a"))
	b := j.part("b")
	b.Stop = func(ctx context.Context) error {
		j.add("stop b, " + string(ready.Report(ctx).State))
		return nil
	}
	g.Add(b)
	up := make(chan struct{})
	g.Add(Component{Name: "c", Start: func(context.Context) error { close(up); return nil }})
	wait := run(context.Background(), g)
	<-up
	if err := syscall.Kill(syscall.Getpid(), syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if code := wait(t); code != ExitOK {
		t.Errorf("exit code %d", code)
	}
	want := []string{"start a", "start b", "stop b, draining", "end b", "stop a", "end a"}
	if got := j.all(); !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestPartThatEndsByItselfStopsTheProgram(t *testing.T) {
	for name, f := range map[string]func(context.Context) error{
		"error":   func(context.Context) error { return errors.New("boom") },
		"nothing": func(context.Context) error { return nil },
		"panic":   func(context.Context) error { panic("boom") },
	} {
		t.Run(name, func(t *testing.T) {
			var j journal
			g, log := newGroup(t, Options{})
			g.Add(j.part("a"))
			g.Add(Component{Name: "bad", Run: f})
			if code := run(context.Background(), g)(t); code != ExitFailed {
				t.Errorf("exit code %d", code)
			}
			if got := j.all(); !slices.Contains(got, "end a") {
				t.Errorf("a did not end: %q", got)
			}
			if !strings.Contains(log.String(), "run bad: ") {
				t.Errorf("log does not name the part: %s", log)
			}
		})
	}
}

func TestFailedStartStopsOnlyWhatWasStarted(t *testing.T) {
	var j journal
	g, log := newGroup(t, Options{})
	g.Add(j.part("a"))
	g.Add(Component{Name: "bad", Start: func(context.Context) error { return errors.New("no way") }})
	g.Add(j.part("c"))
	if code := run(context.Background(), g)(t); code != ExitFailed {
		t.Errorf("exit code %d", code)
	}
	if got, want := j.all(), []string{"start a", "stop a", "end a"}; !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
	if !strings.Contains(log.String(), "start bad: no way") {
		t.Errorf("log: %s", log)
	}
}

func TestEndOfContextWhileStartingIsNoFailure(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	g, _ := newGroup(t, Options{})
	g.Add(Component{Name: "slow", Start: func(ctx context.Context) error {
		cancel()
		<-ctx.Done()
		return ctx.Err()
	}})
	if code := run(ctx, g)(t); code != ExitOK {
		t.Errorf("exit code %d", code)
	}
}

func TestPartThatDoesNotStopIsGivenUpAfterItsTime(t *testing.T) {
	var j journal
	release := make(chan struct{})
	up := make(chan struct{})
	gone := make(chan struct{})
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	g, log := newGroup(t, Options{})
	g.Add(j.part("a"))
	g.Add(Component{
		Name: "stuck", StopTimeout: 20 * time.Millisecond,
		Run: func(ctx context.Context) error {
			defer close(gone)
			close(up)
			<-ctx.Done()
			<-release
			return nil
		},
	})
	wait := run(ctx, g)
	<-up
	cancel()
	if code := wait(t); code != ExitFailed {
		t.Errorf("exit code %d", code)
	}
	if got := j.all(); !slices.Contains(got, "end a") {
		t.Errorf("a was not stopped after it: %q", got)
	}
	if !strings.Contains(log.String(), "component=stuck") {
		t.Errorf("log does not name the part: %s", log)
	}
	close(release)
	<-gone
}

func TestSecondSignalForcesTheEnd(t *testing.T) {
	release := make(chan struct{})
	stopping := make(chan struct{})
	up := make(chan struct{})
	gone := make(chan struct{})
	g, _ := newGroup(t, Options{})
	g.Add(Component{
		Name: "stuck", StopTimeout: time.Hour,
		Start: func(context.Context) error { close(up); return nil },
		Stop:  func(context.Context) error { defer close(gone); close(stopping); <-release; return nil },
	})
	wait := run(context.Background(), g)
	<-up
	kill := func() {
		if err := syscall.Kill(syscall.Getpid(), syscall.SIGTERM); err != nil {
			t.Fatal(err)
		}
	}
	kill()
	<-stopping
	kill()
	if code := wait(t); code != ExitForced {
		t.Errorf("exit code %d", code)
	}
	close(release)
	<-gone
}

func TestOnlyRequiredChecksDecide(t *testing.T) {
	r := NewReadiness()
	if r.Report(t.Context()).Ready {
		t.Error("ready while starting")
	}
	r.SetReady()
	r.Add("broker", func(context.Context) Check { return Check{Detail: "not connected"} })
	if rep := r.Report(t.Context()); !rep.Ready || rep.Checks["broker"].Detail != "not connected" {
		t.Errorf("a check that is only shown decided: %+v", rep)
	}
	ok := false
	r.Add("redis", func(context.Context) Check { return Check{OK: ok, Required: true} })
	if r.Report(t.Context()).Ready {
		t.Error("ready although a required check fails")
	}
	ok = true
	if !r.Report(t.Context()).Ready {
		t.Error("not ready although all is well")
	}
	r.SetDraining()
	r.SetReady()
	if rep := r.Report(t.Context()); rep.Ready || rep.State != Draining {
		t.Errorf("ready while draining: %+v", rep)
	}
}
