package app

import (
	"errors"
	"fmt"
	"time"

	"seckill/pkg/config"
	"seckill/pkg/messaging"
	"seckill/pkg/observability"
	"seckill/pkg/stock"
	"seckill/services/order-api/internal/checkout"
	"seckill/services/order-api/internal/httpapi"
)

// Config is everything order-api can be told. The zero value of each field means its default.
type Config struct {
	HTTP     HTTPConfig              `mapstructure:"http"`
	Metrics  MetricsConfig           `mapstructure:"metrics"`
	Debug    DebugConfig             `mapstructure:"debug"`
	Log      observability.LogConfig `mapstructure:"log"`
	Redis    stock.Config            `mapstructure:"redis"`
	RabbitMQ messaging.Config        `mapstructure:"rabbitmq"`
	Auth     AuthConfig              `mapstructure:"auth"`
	Payment  PaymentConfig           `mapstructure:"payment"`
	Checkout checkout.Config         `mapstructure:"checkout"`
}

// HTTPConfig is the storefront's listener.
type HTTPConfig struct {
	// Addr is where the storefront API listens. Default ":8080".
	Addr string `mapstructure:"addr"`
	// ReadHeaderTimeout and ReadTimeout close a connection whose request comes too slowly.
	// Default 5s each.
	ReadHeaderTimeout time.Duration `mapstructure:"read_header_timeout"`
	ReadTimeout       time.Duration `mapstructure:"read_timeout"`
	// WriteTimeout bounds an answer. It has to be longer than the checkout's deadlines. Default 10s.
	WriteTimeout time.Duration `mapstructure:"write_timeout"`
	// IdleTimeout closes a kept connection that sends nothing. Default 75s.
	IdleTimeout time.Duration `mapstructure:"idle_timeout"`
	// MaxHeaderBytes bounds a request's headers. Default 16 KiB.
	MaxHeaderBytes int `mapstructure:"max_header_bytes"`
	// CORSOrigins may call from a browser. Default none: no CORS headers.
	CORSOrigins []string `mapstructure:"cors_origins"`
	// DrainDelay is how long requests are still served after readiness went red, so that load
	// balancers notice. Default 0.
	DrainDelay time.Duration `mapstructure:"drain_delay"`
	// StopTimeout bounds the whole stop. Default 15s.
	StopTimeout time.Duration `mapstructure:"stop_timeout"`
}

// MetricsConfig is the listener of /livez, /readyz and /metrics.
type MetricsConfig struct {
	Addr string `mapstructure:"addr"` // default ":9091"
}

// DebugConfig is the listener of pprof.
type DebugConfig struct {
	Addr string `mapstructure:"addr"` // default none: no pprof
}

// AuthConfig says how bearer tokens are checked; exactly one of the keys is set.
type AuthConfig struct {
	JWTSecret    config.Secret `mapstructure:"jwt_secret"`
	JWTPublicKey string        `mapstructure:"jwt_public_key"`
	Leeway       time.Duration `mapstructure:"leeway"`     // default 5s
	CacheSize    int           `mapstructure:"cache_size"` // default 65536; negative: none
}

// PaymentConfig is about callbacks.
type PaymentConfig struct {
	Secrets []config.Secret `mapstructure:"secrets"` // "whsec_" + base64; several while they are rotated
	Types   []string        `mapstructure:"types"`   // default payment.succeeded
}

// WithDefaults returns the configuration with every unset field filled in.
func (c Config) WithDefaults() Config {
	def(&c.HTTP.Addr, ":8080")
	def(&c.HTTP.ReadHeaderTimeout, 5*time.Second)
	def(&c.HTTP.ReadTimeout, 5*time.Second)
	def(&c.HTTP.WriteTimeout, 10*time.Second)
	def(&c.HTTP.IdleTimeout, 75*time.Second)
	def(&c.HTTP.MaxHeaderBytes, 16<<10)
	def(&c.HTTP.StopTimeout, 15*time.Second)
	def(&c.Metrics.Addr, ":9091")
	if c.RabbitMQ.Name == "" {
		c.RabbitMQ.Name = "order-api"
	}
	c.Checkout = c.Checkout.WithDefaults()
	return c
}

func def[T comparable](v *T, d T) {
	var zero T
	if *v == zero {
		*v = d
	}
}

// Validate reports what cannot work, without I/O. Secrets are not part of its errors.
func (c Config) Validate() error {
	c = c.WithDefaults()
	var errs []error
	for name, d := range map[string]time.Duration{
		"http.read_header_timeout": c.HTTP.ReadHeaderTimeout, "http.read_timeout": c.HTTP.ReadTimeout,
		"http.write_timeout": c.HTTP.WriteTimeout, "http.idle_timeout": c.HTTP.IdleTimeout, "http.stop_timeout": c.HTTP.StopTimeout,
	} {
		if d <= 0 {
			errs = append(errs, fmt.Errorf("%s: %s is not positive", name, d))
		}
	}
	if c.HTTP.WriteTimeout < c.Checkout.RedisTimeout+c.Checkout.PublishTimeout {
		errs = append(errs, errors.New("http.write_timeout: shorter than checkout.redis_timeout and checkout.publish_timeout together"))
	}
	if err := c.Redis.Validate(); err != nil {
		errs = append(errs, err)
	}
	if err := c.RabbitMQ.WithDefaults().Validate(); err != nil {
		errs = append(errs, err)
	}
	if err := c.httpapi().Validate(); err != nil {
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

func (c Config) httpapi() httpapi.Config {
	secrets := make([]string, len(c.Payment.Secrets))
	for i, s := range c.Payment.Secrets {
		secrets[i] = s.Reveal()
	}
	return httpapi.Config{
		Auth: httpapi.AuthConfig{
			Secret: c.Auth.JWTSecret.Reveal(), PublicKey: c.Auth.JWTPublicKey,
			Leeway: c.Auth.Leeway, CacheSize: c.Auth.CacheSize,
		},
		PaymentSecrets: secrets,
		PaymentTypes:   c.Payment.Types,
		CORSOrigins:    c.HTTP.CORSOrigins,
	}
}

// SharedEnv names settings of the other programs, which are often set for all of them together.
func SharedEnv() []string {
	return []string{
		"SECKILL_MYSQL_DSN", "SECKILL_MYSQL_DSN_FILE", "SECKILL_ADMIN_ADDR", "SECKILL_ADMIN_TOKENS", "SECKILL_ADMIN_TOKENS_FILE",
		"SECKILL_WORKER_ROLES",
	}
}
