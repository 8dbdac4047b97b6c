package messaging

import (
	"log/slog"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// O30: odd passwords work as they are, and no piece of one is ever in an error.
func TestURLWithOddPasswords(t *testing.T) {
	t.Parallel()
	for _, password := range []string{"plain", "p@ss", "a/b", "a#b?c", "50%", "100%25", "a b", "a:b:c", "[x]", "ü", "%zz", "&=+"} {
		want := password
		if password == "100%25" {
			want = "100%" // properly encoded
		}
		u, err := parseURL("amqp://seckill:" + password + "@broker:5673/sale")
		if err != nil || u.Username != "seckill" || u.Password != want || u.Host != "broker" || u.Port != 5673 || u.Vhost != "sale" {
			t.Errorf("%q: %v (host %q port %d vhost %q password right: %v)", password, err, u.Host, u.Port, u.Vhost, u.Password == want)
		}
	}
	if u, err := parseURL("amqps://broker"); err != nil || u.Port != 5671 || u.Vhost != "/" {
		t.Errorf("short: %+v %v", u, err)
	}
	const secret = "s3cr3t"
	for _, raw := range []string{
		"", "amqp", "http://u:" + secret + "@h/", "amqp://u:" + secret + "@h:port/", "amqp://u:" + secret + "@h:99999999999/", "u:" + secret + "@h",
		"amqp://u:" + secret + "@h/%zz", "amqp://u:" + secret + "@h/?heartbeat=" + secret, "amqp://u:" + secret + "@h/?channel_max=x", "amqp://u:" + secret + "@[::1/",
	} {
		_, err := New(Config{URL: raw}, slog.New(slog.DiscardHandler), nil)
		if err == nil {
			t.Errorf("%q accepted", strings.ReplaceAll(raw, secret, "***"))
		} else if strings.Contains(err.Error(), secret) || strings.Contains(err.Error(), "u:") {
			t.Errorf("error tells the secret of %q", strings.ReplaceAll(raw, secret, "***"))
		}
	}
}

func TestConfigurationIsChecked(t *testing.T) {
	t.Parallel()
	good := Config{URL: "amqp://h/"}
	if err := good.WithDefaults().Validate(); err != nil {
		t.Error(err)
	}
	for name, change := range map[string]func(*Config){
		"tier of half a second": func(c *Config) { c.DelayTiers = []time.Duration{500 * time.Millisecond} },
		"tier of 1.5 s":         func(c *Config) { c.DelayTiers = []time.Duration{1500 * time.Millisecond} },
		"tier twice":            func(c *Config) { c.DelayTiers = []time.Duration{time.Second, time.Second} },
		"negative heartbeat":    func(c *Config) { c.Heartbeat = -1 },
		"max below min":         func(c *Config) { c.ReconnectMin, c.ReconnectMax = time.Minute, time.Second },
		"negative queue":        func(c *Config) { c.PublishQueue = -1 },
		"negative attempts":     func(c *Config) { c.MaxAttempts = -1 },
	} {
		c := good
		change(&c)
		if err := c.WithDefaults().Validate(); err == nil {
			t.Errorf("%s accepted", name)
		}
	}
	c := good
	c.DelayTiers = []time.Duration{time.Minute, time.Second}
	if d := c.WithDefaults().DelayTiers; d[0] != time.Second || c.DelayTiers[0] != time.Minute {
		t.Errorf("tiers %v, caller's %v", d, c.DelayTiers)
	}
	reg := prometheus.NewRegistry()
	if _, err := New(good, slog.New(slog.DiscardHandler), reg); err != nil {
		t.Fatal(err)
	}
	if _, err := New(good, slog.New(slog.DiscardHandler), reg); err == nil {
		t.Error("metrics registered twice")
	}
}

func TestBackoffDoublesWithJitterUpToItsLimit(t *testing.T) {
	t.Parallel()
	b := backoff{min: 100 * time.Millisecond, max: time.Second}
	for i := range 1000 {
		full := min(100*time.Millisecond<<min(i, 10), time.Second)
		if d := b.pause(); d < full/2 || d > full {
			t.Fatalf("pause %d is %s, want %s to %s", i, d, full/2, full)
		}
	}
	b.reset()
	if d := b.pause(); d > 100*time.Millisecond {
		t.Errorf("after reset %s", d)
	}
}

// A refused password shows in no log line.
func TestRefusedPasswordIsNotLogged(t *testing.T) {
	t.Parallel()
	u, err := url.Parse(broker(t))
	if err != nil {
		t.Fatal(err)
	}
	const secret = "s3cr3t@#/?"
	lines := make(logged, 100)
	c, err := New(quick("amqp://guest:"+secret+"@"+u.Host+u.Path), slog.New(slog.NewTextHandler(lines, nil)), nil)
	if err != nil {
		t.Fatal(err)
	}
	c.Start(t.Context())
	defer func() { _ = c.Close(t.Context()) }()
	select {
	case line := <-lines:
		if !strings.Contains(line, "broker not reachable") || !strings.Contains(line, "403") || strings.Contains(line, "s3cr3t") {
			t.Errorf("logged %q", strings.ReplaceAll(line, secret, "***"))
		}
	case <-time.After(patience):
		t.Error("nothing logged")
	}
	if s := c.State(); s.Connected || s.Topology != TopologyUnknown {
		t.Errorf("state %+v", s)
	}
}

type logged chan string

func (l logged) Write(p []byte) (int, error) {
	select {
	case l <- string(p):
	default:
	}
	return len(p), nil
}
