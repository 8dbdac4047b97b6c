package messaging

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
)

// Roles of the two connections. They are apart because an alarm makes the broker stop reading from
// connections that publish: acks must still get through then.
const (
	rolePublish = "publish"
	roleConsume = "consume"
)

// link keeps one connection alive: after each loss it makes a new one, and everything on top of it
// (channels, consumers, confirms) is made anew too. The client library's own recovery is off, because
// it re-uses a channel object under which old delivery tags would acknowledge other messages.
type link struct {
	role    string
	cfg     Config
	log     *slog.Logger
	metrics *metrics

	mu      sync.Mutex
	cur     *conn
	ended   bool
	changed chan struct{} // closed and replaced whenever cur or ended changes

	onBlocked func(reason string) // "" means not blocked
}

// conn is one connection, from the dial to its loss.
type conn struct {
	*amqp.Connection
	net  net.Conn
	gone chan struct{} // closed when the connection is lost or closed
	role string
}

// kill closes the socket. It is the only thing that surely ends a call of the client library: those
// know no deadline, and one that writes to a broker that has stopped reading never comes back.
func (c *conn) kill() { _ = c.net.Close() }

// bounded runs a call of the client library that waits for the broker, and takes the connection away
// from under it if there is no answer in time.
func (c *conn) bounded(limit time.Duration, call func() error) error {
	var late atomic.Bool
	t := time.AfterFunc(limit, func() {
		late.Store(true)
		c.kill()
	})
	err := call()
	t.Stop()
	if late.Load() {
		return fmt.Errorf("broker did not answer within %s: %w", limit, context.DeadlineExceeded)
	}
	return err
}

func newLink(role string, cfg Config, log *slog.Logger, m *metrics) *link {
	return &link{role: role, cfg: cfg, log: log.With("role", role), metrics: m, changed: make(chan struct{})}
}

// current gives the connection, or nil, and a channel that is closed at the next change.
func (l *link) current() (*conn, <-chan struct{}, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.cur, l.changed, l.ended
}

func (l *link) set(c *conn, ended bool) {
	l.mu.Lock()
	l.cur, l.ended = c, ended
	close(l.changed)
	l.changed = make(chan struct{})
	l.mu.Unlock()
	l.metrics.connected(l.role, c != nil)
}

// wait gives a connection as soon as there is one.
func (l *link) wait(ctx context.Context) (*conn, error) {
	for {
		c, changed, ended := l.current()
		switch {
		case ended:
			return nil, ErrClosed
		case c != nil:
			return c, nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return nil, fmt.Errorf("%w: %w", ErrNotConnected, ctx.Err())
		}
	}
}

// run keeps the link up until ctx ends and then closes it, within the time that stop gives.
func (l *link) run(ctx context.Context, stop func() time.Duration) {
	defer l.set(nil, true)
	pause := backoff{min: l.cfg.ReconnectMin, max: l.cfg.ReconnectMax}
	told := false
	for ctx.Err() == nil {
		c, err := l.dial(ctx)
		if err == nil {
			told = false
			since := time.Now()
			err = l.keep(ctx, c, stop)
			if ctx.Err() != nil {
				return
			}
			l.metrics.reconnect(l.role)
			l.log.WarnContext(ctx, "broker connection lost", "error", err)
			if time.Since(since) > l.cfg.ReconnectMax {
				pause.reset()
			}
		} else if ctx.Err() == nil && !told {
			// Once for each outage: the attempts go on without an end.
			told = true
			l.log.WarnContext(ctx, "broker not reachable, trying again", "error", err)
		}
		pause.wait(ctx)
	}
}

// keep watches a connection until it is lost or ctx ends.
func (l *link) keep(ctx context.Context, c *conn, stop func() time.Duration) error {
	lost := c.NotifyClose(make(chan *amqp.Error, 1))
	blocked := c.NotifyBlocked(make(chan amqp.Blocking, 8))
	l.set(c, false)
	l.log.InfoContext(ctx, "broker connected")
	defer func() {
		c.kill()
		close(c.gone)
		l.block(ctx, "")
		l.set(nil, false)
	}()
	for {
		select {
		case b, ok := <-blocked:
			if !ok {
				blocked = nil
				continue
			}
			if b.Active && b.Reason == "" {
				b.Reason = "alarm"
			}
			if !b.Active {
				b.Reason = ""
			}
			l.block(ctx, b.Reason)
		case err, ok := <-lost:
			if !ok || err == nil {
				return errors.New("closed")
			}
			return err
		case <-ctx.Done():
			_ = c.bounded(stop(), c.Close)
			return nil
		}
	}
}

func (l *link) block(ctx context.Context, reason string) {
	if !l.metrics.block(l.role, reason != "") {
		return
	}
	if l.onBlocked != nil {
		l.onBlocked(reason)
	}
	if reason != "" {
		l.log.WarnContext(ctx, "broker blocks publishers", "reason", reason)
	} else {
		l.log.InfoContext(ctx, "broker no longer blocks publishers")
	}
}

func (l *link) dial(ctx context.Context) (*conn, error) {
	u, err := parseURL(l.cfg.URL)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, l.cfg.DialTimeout)
	defer cancel()
	d := net.Dialer{KeepAliveConfig: net.KeepAliveConfig{Enable: true, Idle: 15 * time.Second, Interval: 5 * time.Second, Count: 3}}
	raw, err := d.DialContext(ctx, "tcp", net.JoinHostPort(u.Host, strconv.Itoa(u.Port)))
	if err != nil {
		return nil, fmt.Errorf("dial broker: %w", err)
	}
	// Until the handshake is through nothing else bounds it.
	unguard := context.AfterFunc(ctx, func() { _ = raw.Close() })
	defer unguard()
	if u.Scheme == "amqps" {
		cfg, err := l.tlsConfig(u)
		if err != nil {
			_ = raw.Close()
			return nil, err
		}
		t := tls.Client(raw, cfg)
		if err := t.HandshakeContext(ctx); err != nil {
			_ = raw.Close()
			return nil, fmt.Errorf("tls handshake with broker: %w", err)
		}
		raw = t
	}
	g := &guard{Conn: raw, silence: 2 * l.cfg.Heartbeat}
	sasl := []amqp.Authentication{u.PlainAuth()}
	if len(u.AuthMechanism) == 1 && strings.EqualFold(u.AuthMechanism[0], "EXTERNAL") {
		sasl = []amqp.Authentication{&amqp.ExternalAuth{}}
	}
	ac, err := amqp.Open(g, amqp.Config{
		SASL: sasl, Vhost: u.Vhost, Heartbeat: l.cfg.Heartbeat, Locale: "en_US", FrameSize: 131072,
		Properties: amqp.Table{"product": l.cfg.Name, "platform": "golang", "connection_name": l.cfg.Name + " " + l.role},
	})
	if err != nil {
		_ = g.Close()
		return nil, fmt.Errorf("open broker connection: %w", err)
	}
	if !unguard() {
		_ = g.Close()
		return nil, fmt.Errorf("open broker connection: %w", ctx.Err())
	}
	return &conn{Connection: ac, net: g, gone: make(chan struct{}), role: l.role}, nil
}

func (l *link) tlsConfig(u amqp.URI) (*tls.Config, error) {
	cfg := &tls.Config{MinVersion: tls.VersionTLS12}
	if l.cfg.TLS != nil {
		cfg = l.cfg.TLS.Clone()
	}
	if cfg.ServerName == "" {
		cfg.ServerName = u.Host
		if u.ServerName != "" {
			cfg.ServerName = u.ServerName
		}
	}
	if u.CACertFile != "" {
		pem, err := os.ReadFile(u.CACertFile)
		if err != nil {
			return nil, fmt.Errorf("read broker ca: %w", err)
		}
		cfg.RootCAs = x509.NewCertPool()
		if !cfg.RootCAs.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("read broker ca %s: no certificate in it", u.CACertFile)
		}
	}
	if u.CertFile != "" || u.KeyFile != "" {
		pair, err := tls.LoadX509KeyPair(u.CertFile, u.KeyFile)
		if err != nil {
			return nil, fmt.Errorf("read broker client certificate: %w", err)
		}
		cfg.Certificates = []tls.Certificate{pair}
	}
	return cfg, nil
}

// guard is the socket under a connection. It gives each write a deadline (a broker under alarm, or a
// dead path, would hold it for ever), and closes the socket at the first error: the client library
// takes locks in its shutdown that a blocked writer holds, and would wait for it.
type guard struct {
	net.Conn
	silence time.Duration // how long the peer may neither read nor write
}

func (g *guard) Read(b []byte) (int, error) {
	n, err := g.Conn.Read(b)
	if err != nil {
		_ = g.Conn.Close()
	}
	return n, err //nolint:wrapcheck // a net.Conn passes errors as they are
}

func (g *guard) Write(b []byte) (int, error) {
	_ = g.SetWriteDeadline(time.Now().Add(g.silence))
	n, err := g.Conn.Write(b)
	if err != nil {
		_ = g.Conn.Close()
	}
	return n, err //nolint:wrapcheck // a net.Conn passes errors as they are
}

// SetDeadline is called by the client library with the zero time when the connection is open; it sets
// a read deadline only with the next frame. A path that dies in between would never be noticed.
func (g *guard) SetDeadline(t time.Time) error {
	if t.IsZero() {
		t = time.Now().Add(g.silence)
	}
	return g.SetReadDeadline(t)
}

// backoff doubles a pause, with jitter, up to a limit.
type backoff struct {
	min, max, next time.Duration
}

func (b *backoff) reset() { b.next = 0 }

// pause gives the next pause: between half and all of the doubled one.
func (b *backoff) pause() time.Duration {
	b.next = min(max(b.next*2, b.min), b.max)
	return b.next/2 + rand.N(b.next/2+1) //nolint:gosec // jitter is no secret
}

func (b *backoff) wait(ctx context.Context) {
	t := time.NewTimer(b.pause())
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}
