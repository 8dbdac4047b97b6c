package stock

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"
)

// Modes of Config.Mode.
const (
	Single   = "single"
	Sentinel = "sentinel"
	Cluster  = "cluster"
)

// Config says how to reach Redis. The kind of client follows from Mode alone, never from how many
// addresses there are.
type Config struct {
	Mode       string   `mapstructure:"mode"`  // single (default), sentinel or cluster
	Addrs      []string `mapstructure:"addrs"` // default 127.0.0.1:6379; sentinels' in mode sentinel
	DB         int      `mapstructure:"db"`    // 0 in mode cluster
	MasterName string   `mapstructure:"master_name"`
	Username   string   `mapstructure:"username"`
	Password   string   `mapstructure:"password" config:"secret"`
	// SentinelUsername and SentinelPassword are for the sentinels themselves.
	SentinelUsername string `mapstructure:"sentinel_username"`
	SentinelPassword string `mapstructure:"sentinel_password" config:"secret"`
	Prefix           string `mapstructure:"prefix"` // before every key; empty in production, for tests

	TLS       bool   `mapstructure:"tls"`
	TLSCAFile string `mapstructure:"tls_ca_file"` // PEM; default: the system's roots

	PoolSize     int           `mapstructure:"pool_size"`     // default 20; connections for reads
	DialTimeout  time.Duration `mapstructure:"dial_timeout"`  // default 1s
	ReadTimeout  time.Duration `mapstructure:"read_timeout"`  // default 500ms; write: the same
	PoolTimeout  time.Duration `mapstructure:"pool_timeout"`  // default 500ms; wait for a connection
	Flushers     int           `mapstructure:"flushers"`      // default 2; pipelines in flight at once
	PipelineSize int           `mapstructure:"pipeline_size"` // default 128; commands per pipeline
	PipelinePace time.Duration `mapstructure:"pipeline_pace"` // default 2ms between pipelines of a crowd's reservations; negative: none
}

// maxPace bounds PipelinePace: buyers wait for it.
const maxPace = 100 * time.Millisecond

func (c Config) withDefaults() Config {
	if c.Mode == "" {
		c.Mode = Single
	}
	if len(c.Addrs) == 0 {
		c.Addrs = []string{"127.0.0.1:6379"}
	}
	def := func(d *time.Duration, v time.Duration) {
		if *d == 0 {
			*d = v
		}
	}
	def(&c.DialTimeout, time.Second)
	def(&c.ReadTimeout, 500*time.Millisecond)
	def(&c.PoolTimeout, 500*time.Millisecond)
	if c.PoolSize == 0 {
		c.PoolSize = 20
	}
	if c.Flushers == 0 {
		c.Flushers = 2
	}
	if c.PipelineSize == 0 {
		c.PipelineSize = 128
	}
	def(&c.PipelinePace, 2*time.Millisecond)
	return c
}

// Validate says what is wrong with the configuration, if anything.
func (c Config) Validate() error {
	c = c.withDefaults()
	switch c.Mode {
	case Single:
		if len(c.Addrs) != 1 {
			return fmt.Errorf("redis: mode single takes one address, not %d", len(c.Addrs))
		}
	case Sentinel:
		if c.MasterName == "" {
			return errors.New("redis: mode sentinel needs a master name")
		}
	case Cluster:
		if c.DB != 0 {
			return errors.New("redis: a cluster has database 0 only")
		}
	default:
		return fmt.Errorf("redis: unknown mode %q (single, sentinel, cluster)", c.Mode)
	}
	if c.DB < 0 || c.PoolSize < 1 || c.Flushers < 1 || c.PipelineSize < 1 ||
		c.DialTimeout < 0 || c.ReadTimeout < 0 || c.PoolTimeout < 0 {
		return errors.New("redis: negative number in the configuration")
	}
	if c.PipelinePace > maxPace {
		return fmt.Errorf("redis: pipeline_pace %s is more than %s: a crowd's reservations wait for it", c.PipelinePace, maxPace)
	}
	return nil
}

// Client is all of Redis. It is safe for concurrent use.
type Client struct {
	cfg Config
	log *slog.Logger
	rdb redis.UniversalClient

	scripts scripts

	queue    chan *item    // what waits for a flusher
	gate     gate          // one flusher gathers at a time
	closing  chan struct{} // no new work
	stopped  atomic.Bool   // flushers have gone: nothing that is still queued will run
	flushers sync.WaitGroup
	once     sync.Once
	closeErr error
	metrics  metrics
}

// New makes a client. It does no I/O: connections are made when they are needed. reg may be nil.
func New(cfg Config, log *slog.Logger, reg prometheus.Registerer) (*Client, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	cfg = cfg.withDefaults()
	tlsConfig, err := cfg.tls()
	if err != nil {
		return nil, err
	}
	c := &Client{
		cfg:     cfg,
		log:     log,
		rdb:     dial(cfg, tlsConfig),
		scripts: loadScripts(),
		queue:   make(chan *item, 16*cfg.PipelineSize),
		closing: make(chan struct{}),
	}
	if err := c.register(reg); err != nil {
		return nil, errors.Join(err, c.rdb.Close())
	}
	redis.SetLogger(libraryLog{log})
	for range cfg.Flushers {
		c.flushers.Go(c.flush)
	}
	return c, nil
}

// libraryLog takes what the library would write to standard error, a line per failed dial. The calls
// report their errors themselves, so it is worth no more than debug level. The library has one logger
// per process: the last client's.
type libraryLog struct{ log *slog.Logger }

// Printf implements the library's logger.
func (l libraryLog) Printf(ctx context.Context, format string, v ...any) {
	l.log.DebugContext(ctx, "redis library", "message", fmt.Sprintf(format, v...))
}

func (c Config) tls() (*tls.Config, error) {
	if !c.TLS {
		return nil, nil //nolint:nilnil // no TLS is no error
	}
	t := &tls.Config{MinVersion: tls.VersionTLS12}
	if c.TLSCAFile != "" {
		pem, err := os.ReadFile(c.TLSCAFile)
		if err != nil {
			return nil, fmt.Errorf("read redis CA file: %w", err)
		}
		t.RootCAs = x509.NewCertPool()
		if !t.RootCAs.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("read redis CA file %s: no certificate in it", c.TLSCAFile)
		}
	}
	return t, nil
}

// dial builds the library's client.
//
// The library's own retries are off: it would report the last attempt's error only, and a refused
// connection after a lost reply would read as "never ran". exec retries instead and remembers.
// A cluster client cannot follow MOVED without them; there every failure counts as unknown.
func dial(cfg Config, t *tls.Config) redis.UniversalClient {
	const buffer = 64 << 10 // a full pipeline of reservations is about 60 KiB
	pipelines := cfg.Flushers + 4
	switch cfg.Mode {
	case Sentinel:
		return redis.NewFailoverClient(&redis.FailoverOptions{
			MasterName: cfg.MasterName, SentinelAddrs: cfg.Addrs,
			SentinelUsername: cfg.SentinelUsername, SentinelPassword: cfg.SentinelPassword,
			DB: cfg.DB, Username: cfg.Username, Password: cfg.Password, TLSConfig: t,
			Protocol: 2, MaxRetries: -1, DialerRetries: 1, DisableIdentity: true,
			DialTimeout: cfg.DialTimeout, ReadTimeout: cfg.ReadTimeout, WriteTimeout: cfg.ReadTimeout,
			PoolTimeout: cfg.PoolTimeout, PoolSize: cfg.PoolSize, ContextTimeoutEnabled: true,
			PipelinePoolSize: pipelines, PipelineReadBufferSize: buffer, PipelineWriteBufferSize: buffer,
		})
	case Cluster:
		return redis.NewClusterClient(&redis.ClusterOptions{
			Addrs: cfg.Addrs, Username: cfg.Username, Password: cfg.Password, TLSConfig: t,
			Protocol: 2, DialerRetries: 1, DisableIdentity: true, MaxRedirects: 3,
			MaxRetryBackoff: 100 * time.Millisecond,
			DialTimeout:     cfg.DialTimeout, ReadTimeout: cfg.ReadTimeout, WriteTimeout: cfg.ReadTimeout,
			PoolTimeout: cfg.PoolTimeout, PoolSize: cfg.PoolSize, ContextTimeoutEnabled: true,
			PipelinePoolSize: pipelines, PipelineReadBufferSize: buffer, PipelineWriteBufferSize: buffer,
			MaintNotificationsConfig: &maintnotifications.Config{Mode: maintnotifications.ModeDisabled},
		})
	default:
		return redis.NewClient(&redis.Options{
			Addr: cfg.Addrs[0], DB: cfg.DB, Username: cfg.Username, Password: cfg.Password, TLSConfig: t,
			Protocol: 2, MaxRetries: -1, DialerRetries: 1, DisableIdentity: true,
			DialTimeout: cfg.DialTimeout, ReadTimeout: cfg.ReadTimeout, WriteTimeout: cfg.ReadTimeout,
			PoolTimeout: cfg.PoolTimeout, PoolSize: cfg.PoolSize, ContextTimeoutEnabled: true,
			PipelinePoolSize: pipelines, PipelineReadBufferSize: buffer, PipelineWriteBufferSize: buffer,
			MaintNotificationsConfig: &maintnotifications.Config{Mode: maintnotifications.ModeDisabled},
		})
	}
}

// Ping asks Redis for a sign of life.
func (c *Client) Ping(ctx context.Context) error {
	if err := c.rdb.Ping(ctx).Err(); err != nil {
		return fmt.Errorf("ping redis: %w", c.classify(err))
	}
	return nil
}

// Close refuses new calls, lets those under way finish, and closes the connections. A second call
// does nothing.
func (c *Client) Close() error {
	c.once.Do(func() {
		close(c.closing)
		c.flushers.Wait()
		c.stopped.Store(true)
		c.abandon()
		c.unregister()
		if err := c.rdb.Close(); err != nil {
			c.closeErr = fmt.Errorf("close redis connections: %w", err)
		}
	})
	return c.closeErr
}

// CheckPolicy reports whether Redis would evict keys when it is full. A sale loses stock and records
// that way, so anything but noeviction deserves a warning at the start.
func (c *Client) CheckPolicy(ctx context.Context) (policy string, safe bool, err error) {
	info, err := c.rdb.Info(ctx, "memory").Result()
	if err != nil {
		return "", false, fmt.Errorf("read redis eviction policy: %w", c.classify(err))
	}
	policy = infoField(info, "maxmemory_policy")
	return policy, policy == "noeviction", nil
}

func millis(t time.Time) string { return strconv.FormatInt(t.UnixMilli(), 10) }
