package proc

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"syscall"
	"time"
)

// Process is a program that the harness started.
type Process struct {
	Name string
	PID  int

	cmd  *exec.Cmd
	done chan struct{}
	log  string
}

// Start starts a program; what it prints goes to the log file.
func Start(name, log, program string, env []string, args ...string) (*Process, error) {
	f, err := os.OpenFile(log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600) //nolint:gosec // scratch
	if err != nil {
		return nil, fmt.Errorf("open log of %s: %w", name, err)
	}
	defer f.Close()                        //nolint:errcheck // the child has its own copy
	cmd := exec.Command(program, args...)  //nolint:gosec,noctx // ends through Stop or Kill
	cmd.Env = append(os.Environ(), env...) // ours come last and win
	cmd.Stdout, cmd.Stderr = f, f          //
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	p := &Process{Name: name, PID: cmd.Process.Pid, cmd: cmd, done: make(chan struct{}), log: log}
	go func() {
		_ = cmd.Wait() // how it ended is for the log
		close(p.done)
	}()
	return p, nil
}

// Ready waits until url answers 200, or, when it is host:port, until somebody listens there.
func (p *Process) Ready(ctx context.Context, url string) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	var last error
	for {
		if last = probe(ctx, url); last == nil {
			return nil
		}
		select {
		case <-p.done:
			return fmt.Errorf("%s ended before it was ready:\n%s", p.Name, p.tail())
		case <-ctx.Done():
			return fmt.Errorf("%s not ready: %w\n%s", p.Name, errors.Join(last, ctx.Err()), p.tail())
		case <-time.After(20 * time.Millisecond):
		}
	}
}

func probe(ctx context.Context, url string) error {
	if _, _, err := net.SplitHostPort(url); err == nil {
		c, err := net.DialTimeout("tcp", url, time.Second)
		if err != nil {
			return err
		}
		return c.Close()
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, http.NoBody)
	if err != nil {
		return err
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer res.Body.Close() //nolint:errcheck // only the status matters
	if res.StatusCode != http.StatusOK {
		return fmt.Errorf("%s answers %d", url, res.StatusCode)
	}
	return nil
}

func (p *Process) tail() string {
	b, _ := os.ReadFile(p.log)
	if len(b) > 4000 {
		b = b[len(b)-4000:]
	}
	return string(b)
}

// Kill ends the process as a crash would.
func (p *Process) Kill() { p.signal(syscall.SIGKILL); <-p.done }

// Stop ends the process in order, by force after 30 s.
func (p *Process) Stop() {
	p.signal(syscall.SIGTERM)
	select {
	case <-p.done:
	case <-time.After(30 * time.Second):
		p.Kill()
	}
}

func (p *Process) signal(s syscall.Signal) {
	select {
	case <-p.done:
	default:
		_ = syscall.Kill(-p.PID, s) // it may just have ended
	}
}
