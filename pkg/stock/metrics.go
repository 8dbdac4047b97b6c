package stock

import (
	"fmt"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/redis/go-redis/v9"
)

type metrics struct {
	retries  prometheus.Counter
	commands prometheus.Histogram
	seconds  prometheus.Histogram
	asks     prometheus.Histogram
	reg      prometheus.Registerer
	own      []prometheus.Collector
}

func (m *metrics) observe(commands int, took time.Duration) {
	m.commands.Observe(float64(commands))
	m.seconds.Observe(took.Seconds())
}

func (c *Client) register(reg prometheus.Registerer) error {
	m := &c.metrics
	m.retries = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "seckill_redis_retries_total",
		Help: "Commands sent a second time: unknown script, dead connection, former master.",
	})
	m.commands = prometheus.NewHistogram(prometheus.HistogramOpts{
		Name: "seckill_redis_pipeline_commands", Help: "Commands per pipeline.",
		Buckets: []float64{1, 2, 4, 8, 16, 32, 64, 128, 256},
	})
	m.seconds = prometheus.NewHistogram(prometheus.HistogramOpts{
		Name: "seckill_redis_pipeline_seconds", Help: "Duration of a pipeline's round trip.",
		Buckets: []float64{.0002, .0005, .001, .002, .005, .01, .025, .05, .1, .25, .5, 1, 2.5},
	})
	m.asks = prometheus.NewHistogram(prometheus.HistogramOpts{
		Name: "seckill_redis_reserve_requests", Help: "Reservations decided by one script call.",
		Buckets: []float64{1, 2, 4, 8, 16, 32},
	})
	m.own = []prometheus.Collector{m.retries, m.commands, m.seconds, m.asks, poolStats{c.rdb}}
	if reg == nil {
		return nil
	}
	for i, col := range m.own {
		if err := reg.Register(col); err != nil {
			for _, done := range m.own[:i] {
				reg.Unregister(done)
			}
			return fmt.Errorf("register redis metrics: %w", err)
		}
	}
	m.reg = reg
	return nil
}

func (c *Client) unregister() {
	if c.metrics.reg == nil {
		return
	}
	for _, col := range c.metrics.own {
		c.metrics.reg.Unregister(col)
	}
}

// poolStats exports the figures that the library keeps of its connection pool.
type poolStats struct{ rdb redis.UniversalClient }

type poolFigure struct {
	desc  *prometheus.Desc
	kind  prometheus.ValueType
	value func(*redis.PoolStats) uint32
}

func poolFigures() []poolFigure {
	d := func(name, help string) *prometheus.Desc {
		return prometheus.NewDesc("seckill_redis_pool_"+name, help, nil, nil)
	}
	return []poolFigure{
		{d("hits_total", "Connections taken from the pool."), prometheus.CounterValue, func(s *redis.PoolStats) uint32 { return s.Hits }},
		{d("misses_total", "Connections that had to be made."), prometheus.CounterValue, func(s *redis.PoolStats) uint32 { return s.Misses }},
		{d("timeouts_total", "Waits for a connection that ran out."), prometheus.CounterValue, func(s *redis.PoolStats) uint32 { return s.Timeouts }},
		{d("stale_total", "Connections dropped as stale."), prometheus.CounterValue, func(s *redis.PoolStats) uint32 { return s.StaleConns }},
		{d("connections", "Connections in the pool."), prometheus.GaugeValue, func(s *redis.PoolStats) uint32 { return s.TotalConns }},
		{d("idle_connections", "Idle connections in the pool."), prometheus.GaugeValue, func(s *redis.PoolStats) uint32 { return s.IdleConns }},
	}
}

// Describe implements prometheus.Collector.
func (p poolStats) Describe(ch chan<- *prometheus.Desc) {
	for _, f := range poolFigures() {
		ch <- f.desc
	}
}

// Collect implements prometheus.Collector.
func (p poolStats) Collect(ch chan<- prometheus.Metric) {
	s := p.rdb.PoolStats()
	for _, f := range poolFigures() {
		ch <- prometheus.MustNewConstMetric(f.desc, f.kind, float64(f.value(s)))
	}
}
