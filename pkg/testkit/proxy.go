package testkit

import (
	"bytes"
	"net"
	"sync"
	"testing"
	"time"
)

// Proxy is a TCP proxy on the loopback that can fail in the ways networks do.
type Proxy struct {
	Addr string

	target   string
	listener net.Listener
	wg       sync.WaitGroup

	mu     sync.Mutex
	mode   proxyMode
	lag    time.Duration // each reply waits this long
	marker []byte        // what a connection must have sent for its replies to be dropped; empty: all are
	change chan struct{} // closed and replaced when mode changes
	conns  map[*proxyConn]struct{}
}

type proxyMode int

const (
	proxyForward proxyMode = iota
	proxyCut
	proxyStall
	proxyDropReplies
	proxyClosed
)

type proxyConn struct {
	client, server net.Conn
	marked         bool // it has sent the marker
	lossy          bool // bytes of it were thrown away
}

func (c *proxyConn) reset() {
	for _, side := range []net.Conn{c.client, c.server} {
		if tcp, ok := side.(*net.TCPConn); ok {
			_ = tcp.SetLinger(0) // a reset, as a cut connection gives, and no TIME_WAIT
		}
		_ = side.Close()
	}
}

// NewProxy forwards to target until told otherwise; it goes with the test.
func NewProxy(t testing.TB, target string) *Proxy {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatalf("start proxy: %v", err)
	}
	p := &Proxy{
		Addr: l.Addr().String(), target: target, listener: l,
		change: make(chan struct{}), conns: map[*proxyConn]struct{}{},
	}
	p.wg.Go(p.accept)
	t.Cleanup(p.close)
	return p
}

// Cut resets all connections and those that are made from now on.
func (p *Proxy) Cut() { p.set(proxyCut) }

// Stall keeps connections open, accepts new ones, and forwards nothing in either direction.
func (p *Proxy) Stall() { p.set(proxyStall) }

// DropReplies forwards what clients send and throws away what the target answers, new connections'
// greetings included: a client that has to make one never gets as far as its command.
func (p *Proxy) DropReplies() { p.DropRepliesAfter("") }

// DropRepliesAfter drops the replies of those connections only that send marker from now on, and from
// that moment: the command with the marker reaches the target for certain, and its answer is lost. The
// marker must be short enough for one segment.
func (p *Proxy) DropRepliesAfter(marker string) {
	p.mu.Lock()
	p.marker = []byte(marker)
	p.mu.Unlock()
	p.set(proxyDropReplies)
}

// Lag has each reply, from now on and in every mode, wait for d.
func (p *Proxy) Lag(d time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.lag = d
}

// Resume forwards again. Stalled connections go on where they were; those that have lost replies
// are reset, since what would come next could not be understood.
func (p *Proxy) Resume() { p.set(proxyForward) }

func (p *Proxy) set(mode proxyMode) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.mode == proxyClosed {
		return
	}
	p.mode = mode
	close(p.change)
	p.change = make(chan struct{})
	for c := range p.conns {
		if mode == proxyCut || mode == proxyClosed || (mode == proxyForward && c.lossy) {
			c.reset()
		}
	}
}

func (p *Proxy) close() {
	_ = p.listener.Close()
	p.set(proxyClosed)
	p.wg.Wait()
}

func (p *Proxy) accept() {
	for {
		client, err := p.listener.Accept()
		if err != nil {
			return
		}
		p.wg.Go(func() { p.serve(client) })
	}
}

func (p *Proxy) serve(client net.Conn) {
	c := &proxyConn{client: client}
	server, err := net.DialTimeout("tcp", p.target, 5*time.Second)
	if err != nil {
		c.server = client
		c.reset()
		return
	}
	c.server = server
	p.mu.Lock()
	if p.mode == proxyCut || p.mode == proxyClosed {
		p.mu.Unlock()
		c.reset()
		return
	}
	p.conns[c] = struct{}{}
	p.mu.Unlock()

	var both sync.WaitGroup
	both.Go(func() { p.copy(c, c.server, c.client, false) })
	both.Go(func() { p.copy(c, c.client, c.server, true) })
	both.Wait()
	p.mu.Lock()
	delete(p.conns, c)
	p.mu.Unlock()
	_ = client.Close()
	_ = server.Close()
}

func (p *Proxy) copy(c *proxyConn, dst, src net.Conn, reply bool) {
	defer func() {
		// One side has ended: the other is told, after what was read has been passed on.
		if tcp, ok := dst.(*net.TCPConn); ok {
			_ = tcp.CloseWrite()
		}
	}()
	buf := make([]byte, 32<<10)
	for {
		n, err := src.Read(buf)
		if n > 0 {
			if reply {
				p.late()
			}
			if !p.pass(c, buf[:n], reply) {
				if p.isClosed() {
					return
				}
			} else if _, werr := dst.Write(buf[:n]); werr != nil {
				return
			}
		}
		if err != nil {
			return
		}
	}
}

// late waits for as long as replies lag.
func (p *Proxy) late() {
	p.mu.Lock()
	lag := p.lag
	p.mu.Unlock()
	time.Sleep(lag)
}

func (p *Proxy) isClosed() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.mode == proxyClosed
}

// pass says whether what was read may go on, waiting while the proxy is stalled.
func (p *Proxy) pass(c *proxyConn, read []byte, reply bool) bool {
	for {
		p.mu.Lock()
		mode, change := p.mode, p.change
		if mode == proxyDropReplies {
			if !reply && bytes.Contains(read, p.marker) {
				c.marked = true
			}
			if reply && (c.marked || len(p.marker) == 0) {
				c.lossy = true
			}
		}
		lossy := c.lossy
		p.mu.Unlock()
		switch mode {
		case proxyStall:
			<-change
		case proxyForward, proxyDropReplies:
			return !(reply && lossy)
		default:
			return false
		}
	}
}
