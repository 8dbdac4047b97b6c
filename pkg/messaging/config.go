package messaging

import (
	"crypto/tls"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"
)

// Config says how to reach the broker and how patient to be with it. The zero value of each field
// means its default.
type Config struct {
	// URL is amqp:// or amqps://user:password@host:port/vhost. Characters of user and password need
	// not be percent-encoded. It is a secret: it never appears in an error or a log line.
	URL string `mapstructure:"url" config:"secret" help:"amqp[s]://user:password@host:port/vhost"`
	// Name is shown by the broker for our connections. Default "seckill".
	Name string `mapstructure:"name"`
	// DelayTiers are the delay queues, whole seconds, each once. Default 1s 5s 15s 1m 5m 15m 30m.
	DelayTiers []time.Duration `mapstructure:"delay_tiers"`
	// Heartbeat of the connections. A silent path is noticed within two of them. Default 10s.
	Heartbeat time.Duration `mapstructure:"heartbeat"`
	// DialTimeout bounds connecting, TLS and the AMQP handshake together. Default 5s.
	DialTimeout time.Duration `mapstructure:"dial_timeout"`
	// RPCTimeout bounds each call that waits for the broker's answer (declare, open a channel); a
	// broker that does not answer in time loses the connection. Default 10s.
	RPCTimeout time.Duration `mapstructure:"rpc_timeout"`
	// ConfirmTimeout is how long the broker may take to confirm a publish before its outcome is
	// unknown. Default 5s.
	ConfirmTimeout time.Duration `mapstructure:"confirm_timeout"`
	// PublishQueue is how many messages may wait to be written. What does not fit ends as ErrBlocked
	// at once. Default 4096.
	PublishQueue int `mapstructure:"publish_queue"`
	// PublishWindow is how many messages of one channel may wait for their confirm. Default 2048.
	PublishWindow int `mapstructure:"publish_window"`
	// PublishChannels share the queue; each keeps its own window. Default 1.
	PublishChannels int `mapstructure:"publish_channels"`
	// ReconnectMin and ReconnectMax bound the pause between attempts to connect; it doubles, with
	// jitter, without an end to the attempts. Defaults 100ms and 10s.
	ReconnectMin time.Duration `mapstructure:"reconnect_min"`
	ReconnectMax time.Duration `mapstructure:"reconnect_max"`
	// TopologyInterval is how often exchanges, queues and bindings are looked at (order-api) or
	// declared again (worker). A returned message or a lost exchange does it at once. Default 15s.
	TopologyInterval time.Duration `mapstructure:"topology_interval"`
	// MaxAttempts is how often a message is handled before a Retry of it becomes a dead letter of
	// class "attempts_exhausted". Default 10.
	MaxAttempts int `mapstructure:"max_attempts"`
	// TLS is used for amqps://; nil means the system's roots and the files named in the URL.
	TLS *tls.Config `mapstructure:"-"`
}

// DefaultDelayTiers are the delay queues of the design.
func DefaultDelayTiers() []time.Duration {
	return []time.Duration{time.Second, 5 * time.Second, 15 * time.Second, time.Minute, 5 * time.Minute, 15 * time.Minute, 30 * time.Minute}
}

// WithDefaults fills what is zero.
func (c Config) WithDefaults() Config {
	def := func(d *time.Duration, v time.Duration) {
		if *d == 0 {
			*d = v
		}
	}
	num := func(n *int, v int) {
		if *n == 0 {
			*n = v
		}
	}
	if c.Name == "" {
		c.Name = "seckill"
	}
	if len(c.DelayTiers) == 0 {
		c.DelayTiers = DefaultDelayTiers()
	}
	c.DelayTiers = slices.Clone(c.DelayTiers)
	slices.Sort(c.DelayTiers)
	def(&c.Heartbeat, 10*time.Second)
	def(&c.DialTimeout, 5*time.Second)
	def(&c.RPCTimeout, 10*time.Second)
	def(&c.ConfirmTimeout, 5*time.Second)
	def(&c.ReconnectMin, 100*time.Millisecond)
	def(&c.ReconnectMax, 10*time.Second)
	def(&c.TopologyInterval, 15*time.Second)
	num(&c.PublishQueue, 4096)
	num(&c.PublishWindow, 2048)
	num(&c.PublishChannels, 1)
	num(&c.MaxAttempts, 10)
	return c
}

// Validate reports every wrong field at once; what is zero counts as its default.
func (c Config) Validate() error {
	c = c.WithDefaults()
	var errs []error
	if _, err := parseURL(c.URL); err != nil {
		errs = append(errs, err)
	}
	for i, t := range c.DelayTiers {
		if t < time.Second || t%time.Second != 0 || t > maxPaymentTimeout {
			errs = append(errs, fmt.Errorf("delay tier %s: must be whole seconds, 1s to 7 days", t))
		}
		if i > 0 && c.DelayTiers[i-1] == t {
			errs = append(errs, fmt.Errorf("delay tier %s: given twice", t))
		}
	}
	for _, d := range []struct {
		name string
		v    time.Duration
		min  time.Duration
	}{
		{"heartbeat", c.Heartbeat, time.Second}, {"dial_timeout", c.DialTimeout, time.Millisecond}, {"rpc_timeout", c.RPCTimeout, time.Millisecond},
		{"confirm_timeout", c.ConfirmTimeout, time.Millisecond}, {"reconnect_min", c.ReconnectMin, time.Millisecond},
		{"reconnect_max", c.ReconnectMax, c.ReconnectMin}, {"topology_interval", c.TopologyInterval, 10 * time.Millisecond},
	} {
		if d.v < d.min {
			errs = append(errs, fmt.Errorf("%s %s: must be at least %s", d.name, d.v, d.min))
		}
	}
	for _, n := range []struct {
		name string
		v    int
	}{{"publish_queue", c.PublishQueue}, {"publish_window", c.PublishWindow}, {"publish_channels", c.PublishChannels}, {"max_attempts", c.MaxAttempts}} {
		if n.v < 1 {
			errs = append(errs, fmt.Errorf("%s %d: must be at least 1", n.name, n.v))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("rabbitmq configuration: %w", err)
	}
	return nil
}

// DelayExchange names the exchange (and queue) of a delay tier.
func DelayExchange(d time.Duration) string {
	return "seckill.delay." + strconv.FormatInt(int64(d/time.Second), 10) + "s"
}

// Tier gives the smallest delay tier that is at least d, or the largest one there is.
func (c *Client) Tier(d time.Duration) time.Duration {
	for _, t := range c.cfg.DelayTiers {
		if t >= d {
			return t
		}
	}
	return c.cfg.DelayTiers[len(c.cfg.DelayTiers)-1]
}

// Tiers gives the configured delay tiers, ascending.
func (c *Client) Tiers() []time.Duration { return slices.Clone(c.cfg.DelayTiers) }
