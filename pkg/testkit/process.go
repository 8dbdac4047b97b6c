package testkit

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"
)

// Server is a private server process. It listens on the loopback only, keeps its files in a
// directory of the test, and goes with the test, or with the test's process should that be killed.
type Server struct {
	Addr string // host:port of its main listener; the same after Restart
	PID  int    // changes with Restart
	Dir  string // data and log

	t       testing.TB
	name    string
	command func() *exec.Cmd
	ready   func(addr string) error
	within  time.Duration

	mu   sync.Mutex
	done chan struct{} // closed when the present process has been reaped
}

// ctlTime bounds a call of a server's command line tool. They take a second or two; on a machine that
// builds and tests many things at once it has been minutes.
const ctlTime = 4 * time.Minute

// launch starts the process and waits until it is ready; the caller has filled the other fields.
func (s *Server) launch() error {
	cmd := s.command()
	logFile, err := os.OpenFile(filepath.Join(s.Dir, s.name+".log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return fmt.Errorf("open log of %s: %w", s.name, err)
	}
	defer func() { _ = logFile.Close() }()
	cmd.Stdout, cmd.Stderr = logFile, logFile
	cmd.SysProcAttr = childAttr()
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start %s: %w", s.name, err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = cmd.Wait() // how it ended is the test's business
	}()
	s.mu.Lock()
	s.PID, s.done = cmd.Process.Pid, done
	s.mu.Unlock()

	deadline := time.Now().Add(s.within)
	for {
		err := s.ready(s.Addr)
		if err == nil {
			return nil
		}
		select {
		case <-done:
			return fmt.Errorf("%s ended before it was ready:\n%s", s.name, s.logTail())
		case <-time.After(20 * time.Millisecond):
		}
		if time.Now().After(deadline) {
			s.Kill()
			return fmt.Errorf("%s not ready within %s: %w\n%s", s.name, s.within, err, s.logTail())
		}
	}
}

// childAttr puts a child into a process group of its own, so that all of it can be signalled, and
// lets the kernel kill it when the test's process dies without cleaning up.
func childAttr() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
}

func (s *Server) logTail() string {
	b, _ := os.ReadFile(filepath.Join(s.Dir, s.name+".log"))
	const most = 4000
	if len(b) > most {
		b = b[len(b)-most:]
	}
	return string(b)
}

func (s *Server) current() (pid int, done chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.PID, s.done
}

func (s *Server) signal(sig syscall.Signal) {
	pid, done := s.current()
	select {
	case <-done: // reaped: the number may belong to somebody else by now
	default:
		if err := syscall.Kill(-pid, sig); err != nil && !errors.Is(err, syscall.ESRCH) {
			s.t.Errorf("signal %s %v: %v", s.name, sig, err)
		}
	}
}

// Kill ends the server as a crash would (SIGKILL) and waits until it is gone.
func (s *Server) Kill() {
	s.signal(syscall.SIGKILL)
	_, done := s.current()
	<-done
}

// Stop ends the server in order (SIGTERM), or by force when that takes more than 30 s.
func (s *Server) Stop() {
	s.signal(syscall.SIGCONT) // a frozen one could not obey
	s.signal(syscall.SIGTERM)
	_, done := s.current()
	select {
	case <-done:
	case <-time.After(30 * time.Second):
		s.Kill()
	}
}

// Restart starts the server again on the same port with the same data, after a stop in order if it
// is still running. It returns when the server is ready.
func (s *Server) Restart() {
	s.t.Helper()
	s.Stop()
	if err := s.launch(); err != nil {
		s.t.Fatal(err)
	}
}

// Pause freezes the server (SIGSTOP): its connections stay open and nothing answers.
func (s *Server) Pause() { s.signal(syscall.SIGSTOP) }

// Resume lets a frozen server go on.
func (s *Server) Resume() { s.signal(syscall.SIGCONT) }

// FreePort finds a port on the loopback where nobody listens. It lies below the range from which the
// kernel takes ports for outgoing connections: a client that dials a stopped server's port again and
// again could otherwise be given that very port and be connected to itself.
func FreePort(t testing.TB) int {
	t.Helper()
	for range 200 {
		port := 10000 + rand.IntN(22000)
		l, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
		if err != nil {
			continue
		}
		_ = l.Close()
		return port
	}
	t.Fatal("no free port found on 127.0.0.1")
	return 0
}

// startServer starts what build describes; build is called again, with other ports, when the first
// choice turns out to be taken by somebody else.
func startServer(t testing.TB, build func(t testing.TB) *Server) *Server {
	t.Helper()
	var err error
	for range 3 {
		s := build(t)
		if err = s.launch(); err == nil {
			t.Cleanup(s.Kill)
			return s
		}
	}
	t.Fatal(err)
	return nil
}

// exchange dials, sends what is to be sent and returns the first bytes of the answer.
func exchange(addr, send string) ([]byte, error) {
	conn, err := net.DialTimeout("tcp", addr, time.Second)
	if err != nil {
		return nil, err
	}
	defer func() { _ = conn.Close() }()
	if err := conn.SetDeadline(time.Now().Add(2 * time.Second)); err != nil {
		return nil, err
	}
	if _, err := conn.Write([]byte(send)); err != nil {
		return nil, err
	}
	buf := make([]byte, 128)
	n, err := conn.Read(buf)
	if n == 0 {
		return nil, err
	}
	return buf[:n], nil
}
