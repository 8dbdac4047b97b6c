package app

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"seckill/pkg/config"
	"seckill/pkg/messaging"
	"seckill/pkg/observability"
	"seckill/pkg/stock"
	"seckill/services/order-worker/internal/rebuild"
	"seckill/services/order-worker/internal/reconcile"
	"seckill/services/order-worker/internal/relay"
	"seckill/services/order-worker/internal/rollback"
	"seckill/services/order-worker/internal/settlement"
	"seckill/services/order-worker/internal/store"
)

// Roles a worker can take. A process takes all of them unless it is told otherwise.
const (
	RoleOrders      = "orders"      // writes reserved orders
	RolePayments    = "payments"    // books payments
	RoleRollbacks   = "rollbacks"   // cancels, expiries, refunds, ends
	RoleRelay       = "relay"       // publishes again what stays in the outbox
	RoleScheduler   = "scheduler"   // sweeps, compensations, announcements, clock
	RoleDeadLetters = "deadletters" // drains the dead-letter queue, runs replay jobs
	RoleReconciler  = "reconciler"  // compares Redis and MySQL, rebuilds what Redis has lost
	RoleAdmin       = "admin"       // serves the admin API
)

// Roles are all of them.
func Roles() []string {
	return []string{RoleOrders, RolePayments, RoleRollbacks, RoleRelay, RoleScheduler, RoleDeadLetters, RoleReconciler, RoleAdmin}
}

// Config is everything order-worker can be told. The zero value of each field means its default.
type Config struct {
	Metrics  MetricsConfig           `mapstructure:"metrics"`
	Admin    AdminConfig             `mapstructure:"admin"`
	Debug    DebugConfig             `mapstructure:"debug"`
	Log      observability.LogConfig `mapstructure:"log"`
	Redis    stock.Config            `mapstructure:"redis"`
	RabbitMQ messaging.Config        `mapstructure:"rabbitmq"`
	MySQL    store.Config            `mapstructure:"mysql"`
	Auth     AuthConfig              `mapstructure:"auth"`
	Payment  PaymentConfig           `mapstructure:"payment"`
	Worker   WorkerConfig            `mapstructure:"worker"`
	Relay    relay.Config            `mapstructure:"relay"`
	Sweep    rollback.SweepConfig    `mapstructure:"sweep"`

	Activity   ActivityConfig    `mapstructure:"activity"`
	Settlement settlement.Config `mapstructure:"settlement"`
	Reconcile  reconcile.Config  `mapstructure:"reconcile"`
	Rebuild    rebuild.Config    `mapstructure:"rebuild"`
}

// MetricsConfig is the listener of /livez, /readyz and /metrics.
type MetricsConfig struct {
	Addr string `mapstructure:"addr" help:"health and metrics listen here (default :9092)"`
}

// AdminConfig is the admin API.
type AdminConfig struct {
	Addr   string          `mapstructure:"addr" help:"the admin API listens here (default :8081)"`
	Tokens []config.Secret `mapstructure:"tokens" help:"who may call the admin API: name:role:sha256hex, comma separated"`
}

// ActivityConfig says how sales are looked after before they open.
type ActivityConfig struct {
	WarmBefore time.Duration `mapstructure:"warm_before" help:"sales are warmed so long before they start (default 5m; negative: never)"`
}

// DebugConfig is the listener of pprof.
type DebugConfig struct {
	Addr string `mapstructure:"addr" help:"profiles listen here; none by default"`
}

// AuthConfig is the key that rehearsal buyers' tokens are made with; it is order-api's.
type AuthConfig struct {
	JWTSecret config.Secret `mapstructure:"jwt_secret"`
}

// PaymentConfig is what rehearsal callbacks are signed with; the secrets are order-api's.
type PaymentConfig struct {
	Secrets []config.Secret `mapstructure:"secrets"`
}

// WorkerConfig says what this process does, and how much of it at once.
type WorkerConfig struct {
	Roles []string `mapstructure:"roles" help:"what this process does (default: everything)"`
	// OrderWorkers write batches of orders beside each other; each has a channel of its own.
	// Default 2.
	OrderWorkers int `mapstructure:"order_workers"`
	// BatchOrders is how many orders one transaction holds at most. Default 512.
	BatchOrders int `mapstructure:"batch_orders"`
	// BatchWait is how long a batch waits to fill. Default 3 ms.
	BatchWait time.Duration `mapstructure:"batch_wait"`
	// Prefetch bounds the unacknowledged messages of one order worker. Default 512.
	Prefetch int `mapstructure:"prefetch"`
	// RollbackWorkers and PaymentWorkers likewise. Default 2 each.
	RollbackWorkers int `mapstructure:"rollback_workers"`
	PaymentWorkers  int `mapstructure:"payment_workers"`
	// StopTimeout bounds how long the batches in hand may take after a signal. Default 20 s.
	StopTimeout time.Duration `mapstructure:"stop_timeout"`
}

func def[T comparable](v *T, d T) {
	var zero T
	if *v == zero {
		*v = d
	}
}

// WithDefaults returns c with every unset field filled in.
func (c Config) WithDefaults() Config {
	def(&c.Metrics.Addr, ":9092")
	def(&c.Admin.Addr, ":8081")
	def(&c.Activity.WarmBefore, 5*time.Minute)
	def(&c.Worker.OrderWorkers, 2)
	def(&c.Worker.BatchOrders, 512)
	def(&c.Worker.BatchWait, 3*time.Millisecond)
	def(&c.Worker.Prefetch, 512)
	def(&c.Worker.RollbackWorkers, 2)
	def(&c.Worker.PaymentWorkers, 2)
	def(&c.Worker.StopTimeout, 20*time.Second)
	if len(c.Worker.Roles) == 0 {
		c.Worker.Roles = Roles()
	}
	if c.RabbitMQ.Name == "" {
		c.RabbitMQ.Name = "order-worker"
	}
	// Nobody waits for an answer here: a Redis that is slow is better waited for than asked again.
	def(&c.Redis.ReadTimeout, 3*time.Second)
	c.RabbitMQ = c.RabbitMQ.WithDefaults()
	c.MySQL = c.MySQL.WithDefaults()
	c.Relay = c.Relay.WithDefaults()
	c.Sweep = c.Sweep.WithDefaults()
	c.Settlement = c.Settlement.WithDefaults()
	c.Reconcile = c.Reconcile.WithDefaults()
	c.Rebuild = c.Rebuild.WithDefaults()
	return c
}

// Validate says what is wrong, if anything.
func (c Config) Validate() error {
	c = c.WithDefaults()
	var errs []error
	for _, r := range c.Worker.Roles {
		if !slices.Contains(Roles(), r) {
			errs = append(errs, fmt.Errorf("worker.roles: %q is none of %v", r, Roles()))
		}
	}
	for _, n := range []struct {
		name  string
		v     int
		limit int
	}{
		{"order_workers", c.Worker.OrderWorkers, 64},
		{"batch_orders", c.Worker.BatchOrders, 4096},
		{"prefetch", c.Worker.Prefetch, 65535},
		{"rollback_workers", c.Worker.RollbackWorkers, 64},
		{"payment_workers", c.Worker.PaymentWorkers, 64},
	} {
		if n.v < 1 || n.v > n.limit {
			errs = append(errs, fmt.Errorf("worker.%s: %d is not between 1 and %d", n.name, n.v, n.limit))
		}
	}
	if c.Worker.BatchWait < 0 || c.Worker.BatchWait > time.Second {
		errs = append(errs, fmt.Errorf("worker.batch_wait: %s is not between 0 and 1s", c.Worker.BatchWait))
	}
	return errors.Join(append(errs, c.Redis.Validate(), c.RabbitMQ.Validate(), c.MySQL.Validate())...)
}

func (c Config) has(role string) bool { return slices.Contains(c.Worker.Roles, role) }

// SharedEnv names settings of the other programs, which are often set for all of them together.
func SharedEnv() []string {
	return []string{
		"SECKILL_HTTP_ADDR", "SECKILL_AUTH_JWT_PUBLIC_KEY", "SECKILL_FAILPOINTS",
		"SECKILL_HTTP_CORS_ORIGINS",
	}
}
