package app

import (
	"testing"

	"seckill/pkg/config"
	"seckill/pkg/testkit"
)

// The names in docs/metrics.md are contracts.
func TestMetricsAreThoseOfTheDocumentation(t *testing.T) {
	cfg := Config{}.WithDefaults()
	cfg.HTTP.Addr, cfg.Metrics.Addr = "127.0.0.1:0", "127.0.0.1:0"
	cfg.RabbitMQ.URL = "amqp://u:p@127.0.0.1:1/"
	cfg.Auth.JWTSecret = "0123456789012345678901234567890123456789"
	cfg.Payment.Secrets = []config.Secret{"whsec_MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3"}
	a, err := New(t.Context(), cfg, testkit.Logger(t))
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	testkit.MetricsDocumented(t, a.registry, "../../../../docs/metrics.md", "order-api", "Both: RabbitMQ", "Both: Redis")
}
