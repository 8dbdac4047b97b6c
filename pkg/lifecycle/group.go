package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"runtime/debug"
	"syscall"
	"time"
)

// Component is one part of a program. Each function may be nil.
type Component struct {
	Name string
	// Start prepares the part. It returns when the parts added later may start, or with an error,
	// which ends the program. Its context ends when the program is told to stop.
	Start func(ctx context.Context) error
	// Run works until its context ends. Coming back before, with or without an error, ends the
	// program; so does a panic.
	Run func(ctx context.Context) error
	// Stop ends the part in order: it lets finish what is in hand. Run's context ends when Stop has
	// returned; without Stop, at once.
	Stop func(ctx context.Context) error
	// StopTimeout bounds Stop and the return of Run together. Default 10s.
	StopTimeout time.Duration
}

// Options of a Group.
type Options struct {
	Readiness *Readiness // told of start and stop; may be nil
	// DrainDelay is how long readiness is off before anything is stopped, so that a load balancer
	// sends nothing more. It is cut short by a second signal.
	DrainDelay time.Duration
	// Signals that stop the program; a second one forces it. Default SIGTERM and SIGINT.
	Signals []os.Signal
}

// Group is a program's parts.
type Group struct {
	log   *slog.Logger
	o     Options
	parts []Component
}

// New makes an empty group.
func New(log *slog.Logger, o Options) *Group {
	if o.Readiness == nil {
		o.Readiness = NewReadiness()
	}
	if len(o.Signals) == 0 {
		o.Signals = []os.Signal{syscall.SIGTERM, syscall.SIGINT}
	}
	return &Group{log: log, o: o}
}

// Add appends a part.
func (g *Group) Add(c Component) {
	if c.StopTimeout == 0 {
		c.StopTimeout = 10 * time.Second
	}
	g.parts = append(g.parts, c)
}

// Exit codes of Run.
const (
	ExitOK     = 0
	ExitFailed = 1
	ExitForced = 130
)

// running is a part that was started.
type running struct {
	Component
	cancel context.CancelFunc
	done   chan struct{} // closed when Run has returned; nil without Run
}

// Run starts all parts, waits for a signal, for the end of ctx or for a part that ends by itself,
// stops what was started in reverse order, and returns the exit code.
func (g *Group) Run(ctx context.Context) int {
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, g.o.Signals...)
	defer signal.Stop(signals)

	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	forced := make(chan struct{})
	watcherDone := make(chan struct{})
	finished := make(chan struct{})
	go func() {
		defer close(watcherDone)
		select {
		case s := <-signals:
			g.log.Info("stopping on signal", "signal", s.String())
			stop(errStopped)
		case <-finished:
			return
		}
		select {
		case s := <-signals:
			g.log.Warn("stopping at once on a second signal", "signal", s.String())
			close(forced)
		case <-finished:
		}
	}()
	defer func() { close(finished); <-watcherDone }()

	failed := make(chan error, len(g.parts))
	started, err := g.start(ctx, failed)
	code := ExitOK
	if err == nil {
		g.o.Readiness.SetReady()
		select {
		case <-ctx.Done():
		case err = <-failed:
		}
	}
	if err != nil {
		code = ExitFailed
		g.log.Error("stopping after a failure", "error", err)
	}
	g.o.Readiness.SetDraining()
	if err == nil && g.o.DrainDelay > 0 {
		select {
		case <-time.After(g.o.DrainDelay):
		case <-forced:
		case err := <-failed:
			code = ExitFailed
			g.log.Error("a part failed while draining", "error", err)
		}
	}
	for i := len(started) - 1; i >= 0; i-- {
		if !g.stop(started[i], forced) {
			code = ExitFailed
		}
	}
	select {
	case <-forced:
		return ExitForced
	default:
		return code
	}
}

var errStopped = errors.New("stopped by a signal")

func (g *Group) start(ctx context.Context, failed chan<- error) ([]*running, error) {
	var started []*running
	for _, c := range g.parts {
		if ctx.Err() != nil {
			return started, nil //nolint:nilerr // told to stop while starting: not a failure
		}
		if c.Start != nil {
			if err := guard(func() error { return c.Start(ctx) }); err != nil {
				if ctx.Err() != nil {
					return started, nil //nolint:nilerr // the same: what failed was told to stop
				}
				return started, fmt.Errorf("start %s: %w", c.Name, err)
			}
		}
		// Not a child of ctx: a part goes on until its turn to stop has come.
		runCtx, cancel := context.WithCancel(context.WithoutCancel(ctx))
		r := &running{Component: c, cancel: cancel}
		started = append(started, r)
		if c.Run == nil {
			continue
		}
		r.done = make(chan struct{})
		go func() {
			defer close(r.done)
			err := guard(func() error { return c.Run(runCtx) })
			if runCtx.Err() != nil && (err == nil || errors.Is(err, context.Canceled)) {
				return
			}
			if err == nil {
				err = errors.New("ended by itself")
			}
			failed <- fmt.Errorf("run %s: %w", c.Name, err)
		}()
	}
	return started, nil
}

// stop ends one part and says whether that went well.
func (g *Group) stop(r *running, forced <-chan struct{}) bool {
	defer r.cancel()
	ctx, cancel := context.WithTimeout(context.Background(), r.StopTimeout)
	defer cancel()
	stopped := make(chan error, 1)
	go func() {
		var err error
		if r.Stop != nil {
			err = guard(func() error { return r.Stop(ctx) })
		}
		r.cancel()
		if r.done != nil {
			<-r.done
		}
		stopped <- err
	}()
	select {
	case err := <-stopped:
		if err != nil {
			g.log.Error("stop failed", "component", r.Name, "error", err)
		}
		return err == nil
	case <-ctx.Done():
		r.cancel()
		g.log.Error("did not stop in time", "component", r.Name, "timeout", r.StopTimeout)
		return false
	case <-forced:
		return false
	}
}

// guard turns a panic into an error, so that the other parts still stop in order.
func guard(f func() error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("panic: %v\n%s", p, debug.Stack())
		}
	}()
	return f()
}
