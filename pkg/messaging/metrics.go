package messaging

import (
	"fmt"
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"
)

// Results of a publish, as label and as index.
const (
	resultConfirmed = iota
	resultReturned
	resultNacked
	resultUnknown
	resultBlocked
	resultNotConnected
	resultTopology
	resultInvalid
	results
)

type metrics struct {
	published   [results]prometheus.Counter
	confirm     prometheus.Histogram
	conns       *prometheus.GaugeVec
	blocks      *prometheus.GaugeVec
	reconnects  *prometheus.CounterVec
	topology    prometheus.Gauge
	consumed    *prometheus.CounterVec
	consumersUp *prometheus.GaugeVec
	held        *prometheus.GaugeVec

	blocked map[string]*atomic.Bool
}

func newMetrics(reg prometheus.Registerer) (*metrics, error) {
	m := &metrics{
		confirm: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "seckill_publish_confirm_seconds", Help: "Time from handing a message over to the broker's confirm.",
			Buckets: []float64{.0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10},
		}),
		conns:       prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "seckill_amqp_connected", Help: "1 while the connection of this role stands."}, []string{"role"}),
		blocks:      prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "seckill_amqp_blocked", Help: "1 while the broker blocks this connection (memory or disk alarm)."}, []string{"role"}),
		reconnects:  prometheus.NewCounterVec(prometheus.CounterOpts{Name: "seckill_amqp_lost_total", Help: "Connections lost."}, []string{"role"}),
		topology:    prometheus.NewGauge(prometheus.GaugeOpts{Name: "seckill_amqp_topology_ok", Help: "1 when all exchanges, queues and bindings that were looked at are there, 0 when not or not known."}),
		consumed:    prometheus.NewCounterVec(prometheus.CounterOpts{Name: "seckill_consumed_total", Help: "Deliveries by what became of them: done, retry, dead, left (to the broker)."}, []string{"queue", "result"}),
		consumersUp: prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "seckill_consumers_up", Help: "Channels that consume from the queue at the moment."}, []string{"queue"}),
		held:        prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "seckill_consumer_held", Help: "Deliveries held because a store or the broker is away."}, []string{"queue"}),
		blocked:     map[string]*atomic.Bool{rolePublish: {}, roleConsume: {}},
	}
	total := prometheus.NewCounterVec(prometheus.CounterOpts{Name: "seckill_publish_total", Help: "Publishes by outcome; only confirmed ones are known to be in a queue."}, []string{"result"})
	for i, l := range [results]string{"confirmed", "returned", "nacked", "unknown", "blocked", "not_connected", "topology", "invalid"} {
		m.published[i] = total.WithLabelValues(l)
	}
	for r := range m.blocked {
		m.conns.WithLabelValues(r).Set(0)
		m.blocks.WithLabelValues(r).Set(0)
		m.reconnects.WithLabelValues(r)
	}
	if reg == nil {
		return m, nil
	}
	for _, c := range []prometheus.Collector{total, m.confirm, m.conns, m.blocks, m.reconnects, m.topology, m.consumed, m.consumersUp, m.held} {
		if err := reg.Register(c); err != nil {
			return nil, fmt.Errorf("register messaging metrics: %w", err)
		}
	}
	return m, nil
}

func (m *metrics) connected(role string, up bool) { m.conns.WithLabelValues(role).Set(bit(up)) }
func (m *metrics) reconnect(role string)          { m.reconnects.WithLabelValues(role).Inc() }

// block says whether this is a change.
func (m *metrics) block(role string, on bool) bool {
	if m.blocked[role].Swap(on) == on {
		return false
	}
	m.blocks.WithLabelValues(role).Set(bit(on))
	return true
}

func bit(b bool) float64 {
	if b {
		return 1
	}
	return 0
}
