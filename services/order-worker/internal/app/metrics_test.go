package app

import (
	"testing"

	"seckill/pkg/config"
	"seckill/pkg/testkit"
)

// The names in docs/metrics.md are contracts.
func TestMetricsAreThoseOfTheDocumentation(t *testing.T) {
	cfg := Config{}.WithDefaults()
	cfg.Metrics.Addr, cfg.Admin.Addr = "127.0.0.1:0", "127.0.0.1:0"
	cfg.Worker.Roles = Roles()
	cfg.RabbitMQ.URL = "amqp://u:p@127.0.0.1:1/"
	cfg.MySQL.DSN = "u:p@tcp(127.0.0.1:1)/x"
	cfg.Admin.Tokens = []config.Secret{"local:operator:0000000000000000000000000000000000000000000000000000000000000000"}
	cfg.Auth.JWTSecret = "0123456789012345678901234567890123456789"
	cfg.Payment.Secrets = []config.Secret{"whsec_MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3"}
	a, err := New(t.Context(), cfg, testkit.Logger(t))
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		a.ops.Close()
		_ = a.admin.l.Close()
		_ = a.stock.Close()
		_ = a.store.Close()
	}()
	testkit.MetricsDocumented(t, a.registry, "../../../../docs/metrics.md", "order-worker", "Both: RabbitMQ", "Both: Redis")
}
