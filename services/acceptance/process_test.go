package acceptance

import (
	"bytes"
	"context"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"seckill/pkg/testkit"
)

// process is one replica of one of the programs. It may be ended and started again, with other fail
// points and other settings.
type process struct {
	t       testing.TB
	name    string
	program string
	metrics string            // host:port
	env     map[string]string // without the fail points
	log     string            // file; grows over restarts

	mu   sync.Mutex
	cmd  *exec.Cmd
	done chan struct{}
	code int
}

// start launches the program and waits until it is ready.
func (p *process) start(failpoints string) {
	p.t.Helper()
	p.launch(failpoints)
	p.ready()
}

// launch does not wait.
func (p *process) launch(failpoints string) {
	p.t.Helper()
	f, err := os.OpenFile(p.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		p.t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	cmd := exec.Command(p.program)
	cmd.Env = environment(p.env, failpoints)
	cmd.Stdout, cmd.Stderr = f, f
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		p.t.Fatalf("start %s: %v", p.name, err)
	}
	done := make(chan struct{})
	p.mu.Lock()
	p.cmd, p.done = cmd, done
	p.mu.Unlock()
	go func() {
		_ = cmd.Wait() // the exit code tells
		p.mu.Lock()
		p.code = cmd.ProcessState.ExitCode()
		p.mu.Unlock()
		close(done)
	}()
}

// environment hands on nothing of this system but what the test sets.
func environment(env map[string]string, failpoints string) []string {
	var out []string
	for _, kv := range os.Environ() {
		if !strings.HasPrefix(kv, "SECKILL") {
			out = append(out, kv)
		}
	}
	for k, v := range env {
		out = append(out, k+"="+v)
	}
	if failpoints != "" {
		out = append(out, "SECKILL_FAILPOINTS="+failpoints)
	}
	return append(out, "GORACE=exitcode=66")
}

// ready waits for /readyz.
func (p *process) ready() {
	p.t.Helper()
	testkit.Eventually(p.t, within, func() error {
		if p.ended() {
			p.t.Fatalf("%s ended with code %d before it was ready:\n%s", p.name, p.exitCode(), p.tail())
		}
		status, body, err := p.get("/readyz")
		if err != nil {
			return err
		}
		if status != http.StatusOK {
			return fmt.Errorf("%s not ready: %d %s", p.name, status, body)
		}
		return nil
	})
}

// get reads from the metrics port.
func (p *process) get(path string) (int, string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Second)
	defer cancel()
	return fetch(ctx, http.MethodGet, "http://"+p.metrics+path, nil, nil)
}

// metric sums the samples of one metric whose labels contain all the given texts.
func (p *process) metric(name string, labels ...string) float64 {
	p.t.Helper()
	status, body, err := p.get("/metrics")
	if err != nil || status != http.StatusOK {
		p.t.Fatalf("metrics of %s: %d %v", p.name, status, err)
	}
	sum := 0.0
lines:
	for line := range strings.Lines(body) {
		if !strings.HasPrefix(line, name+"{") && !strings.HasPrefix(line, name+" ") {
			continue
		}
		for _, l := range labels {
			if !strings.Contains(line, l) {
				continue lines
			}
		}
		var v float64
		if _, err := fmt.Sscanf(line[strings.LastIndexByte(line, ' ')+1:], "%g", &v); err != nil {
			p.t.Fatalf("metric line %q: %v", line, err)
		}
		sum += v
	}
	return sum
}

func (p *process) current() (*exec.Cmd, chan struct{}) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.cmd, p.done
}

func (p *process) ended() bool {
	_, done := p.current()
	if done == nil {
		return true
	}
	select {
	case <-done:
		return true
	default:
		return false
	}
}

func (p *process) exitCode() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.code
}

// signal reaches a process that has not been reaped: its number cannot belong to another one.
func (p *process) signal(sig syscall.Signal) {
	if cmd, _ := p.current(); cmd != nil && !p.ended() {
		_ = syscall.Kill(-cmd.Process.Pid, sig) // gone in between is as good
	}
}

// kill9 ends the process as a crash does.
func (p *process) kill9() {
	p.signal(syscall.SIGKILL)
	if _, done := p.current(); done != nil {
		<-done
	}
}

// died waits until a fail point has killed the process.
func (p *process) died() {
	p.t.Helper()
	_, done := p.current()
	select {
	case <-done:
	case <-time.After(30 * time.Second):
		p.t.Fatalf("%s still runs: its fail point was not reached\n%s", p.name, p.tail())
	}
}

// term stops the process in order and gives its exit code.
func (p *process) term() int {
	p.t.Helper()
	p.signal(syscall.SIGTERM)
	_, done := p.current()
	select {
	case <-done:
	case <-time.After(45 * time.Second):
		p.signal(syscall.SIGQUIT) // the stacks say where it hangs
		select {
		case <-done:
		case <-time.After(5 * time.Second):
			p.kill9()
		}
		p.t.Fatalf("%s does not stop\n%s", p.name, p.tail())
	}
	return p.exitCode()
}

func (p *process) output() string {
	b, _ := os.ReadFile(p.log)
	return string(b)
}

func (p *process) tail() string {
	s := p.output()
	const most = 12000
	if len(s) > most {
		s = s[len(s)-most:]
	}
	return s
}

// finish ends the process with the test and looks through its log.
func (p *process) finish() {
	if !p.ended() {
		p.signal(syscall.SIGCONT)
		p.signal(syscall.SIGTERM)
		_, done := p.current()
		select {
		case <-done:
		case <-time.After(40 * time.Second):
			p.kill9()
			p.t.Errorf("%s had to be killed", p.name)
		}
	}
	out := p.output()
	if i := strings.Index(out, "WARNING: DATA RACE"); i >= 0 {
		p.t.Errorf("%s has a data race:\n%.4000s", p.name, out[i:])
	}
	if i := strings.Index(out, "\npanic: "); i >= 0 && !strings.Contains(out[i:], "failure injected") {
		p.t.Errorf("%s panicked:\n%.3000s", p.name, out[i:])
	}
	if p.t.Failed() {
		p.t.Logf("log of %s:\n%s", p.name, p.tail())
	}
}

// newProcess describes a process; start runs it.
func newProcess(t testing.TB, name, program, metrics string, env map[string]string) *process {
	p := &process{t: t, name: name, program: program, metrics: metrics, env: env, log: filepath.Join(t.TempDir(), name+".log")}
	t.Cleanup(p.finish)
	return p
}

// ctl runs seckillctl and gives its output and exit code.
func (s *stack) ctl(args ...string) (stdout, stderr string, code int) {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, built.ctl, args...)
	cmd.Env = environment(map[string]string{
		"SECKILLCTL_SERVER": "http://" + s.workers[0].env["SECKILL_ADMIN_ADDR"], "SECKILLCTL_TOKEN_FILE": s.tokenFile,
		"SECKILLCTL_API": "http://" + s.apis[0].env["SECKILL_HTTP_ADDR"],
	}, "")
	var out, errOut bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errOut
	if err := cmd.Run(); err != nil && cmd.ProcessState == nil {
		s.t.Fatalf("run seckillctl: %v", err)
	}
	return out.String(), errOut.String(), cmd.ProcessState.ExitCode()
}
