// Package scenario is what is measured, and how.
package scenario

import (
	"slices"
	"time"
)

// Figures are all results of a run. Rates are per second, latencies in milliseconds.
type Figures struct {
	When     time.Time         `json:"when"`
	Mode     string            `json:"mode"` // short or long
	Rounds   int               `json:"rounds"`
	Machine  map[string]string `json:"machine"`
	Versions map[string]string `json:"versions"`
	Settings map[string]string `json:"settings"`
	Notes    []string          `json:"notes,omitempty"`

	AnswerBytes int `json:"answer_bytes"`

	Round       []Round      `json:"round"`
	Persist     []Persist    `json:"persist"`
	Single      []Persist    `json:"single"`
	Sustained   []Sustained  `json:"sustained"`
	Rollback    *Rollback    `json:"rollback,omitempty"`
	Scripts     *Scripts     `json:"scripts,omitempty"`
	Memory      *Memory      `json:"memory,omitempty"`
	Sizes       []Size       `json:"sizes,omitempty"`
	Rivals      []Rival      `json:"alternatives,omitempty"`
	Curve       []CurvePoint `json:"curve,omitempty"`
	CPUAccept   []CPU        `json:"cpu_accept_us,omitempty"`   // microseconds per accepted order, consumers paused
	CPUPersist  []CPU        `json:"cpu_persist_us,omitempty"`  // microseconds per persisted order, nothing accepted meanwhile
	CPURollback []CPU        `json:"cpu_rollback_us,omitempty"` // microseconds per order that was taken back
	CPUAll      []CPU        `json:"cpu_end_to_end_us,omitempty"`
}

// Round is one round of the figures that are compared with the reference.
type Round struct {
	Noop             float64 `json:"noop_per_s"` // mean of before and after the burst
	NoopP99          float64 `json:"noop_p99_closed_ms"`
	Accept           float64 `json:"accept_per_s"` // accepted and confirmed by the broker in the window
	AcceptedOnly     float64 `json:"accepted_only_per_s"`
	AcceptP99        float64 `json:"accept_p99_closed_ms"`
	Rate             float64 `json:"open_loop_rate"`
	NoopOpenP50      float64 `json:"noop_p50_open_ms"`
	NoopOpenP99      float64 `json:"noop_p99_open_ms"`
	AcceptOpenP50    float64 `json:"accept_p50_open_ms"`
	AcceptOpenP99    float64 `json:"accept_p99_open_ms"`
	NoopHalfP99      float64 `json:"noop_p99_open_half_pace_ms"` // at half of its own burst's rate, as loaded as order-api above
	NoopOpenBusy     float64 `json:"noop_open_busy_cores"`       // cores kept busy by everything that takes part, load tool included
	AcceptOpenBusy   float64 `json:"accept_open_busy_cores"`
	SoldOut          float64 `json:"sold_out_per_s"`
	SoldOutKeyed     float64 `json:"sold_out_keyed_per_s"`
	Others           float64 `json:"others_cores"` // cores that strangers on the machine kept busy during the burst
	Allocations      float64 `json:"allocations_per_request"`
	AllocatedBytes   float64 `json:"allocated_bytes_per_request"`
	PerPipeline      float64 `json:"reservations_per_pipeline"`
	OrdersPerMessage float64 `json:"orders_per_message"`
	RedisIn          float64 `json:"redis_bytes_in_per_reservation"`
	RedisOut         float64 `json:"redis_bytes_out_per_reservation"`
	BrokerIn         float64 `json:"rabbitmq_bytes_in_per_reservation"`
	BrokerOut        float64 `json:"rabbitmq_bytes_out_per_reservation"`
}

// Persist is one drain of a queue that was filled before: MySQL, expiry, confirm, ack.
type Persist struct {
	Orders int64   `json:"orders"`
	PerS   float64 `json:"per_s"`
}

// Sustained is one end-to-end run with a bounded backlog.
type Sustained struct {
	Noop    float64 `json:"noop_per_s"` // just before
	Orders  int64   `json:"orders"`
	PerS    float64 `json:"per_s"`
	Backlog int64   `json:"backlog_at_end"`
	Bound   int64   `json:"backlog_bound"`
}

// Scripts is how long single script calls held Redis up over the whole run. On a machine whose
// processors are all taken, the longest ones are those that were interrupted.
type Scripts struct {
	Calls     int64   `json:"calls"`
	LongestMS float64 `json:"longest_ms"`
	Over10MS  int     `json:"over_10_ms"`
}

// Rollback is the rollback of orders that nobody paid, all due at once.
type Rollback struct {
	Orders int64   `json:"orders"`
	PerS   float64 `json:"per_s"`
}

// Memory is what things weigh.
type Memory struct {
	Redis          float64 `json:"redis_bytes_per_confirmed_reservation"`
	RedisKeyed     float64 `json:"redis_bytes_per_confirmed_reservation_with_key"`
	RedisWaiting   float64 `json:"redis_bytes_per_waiting_reservation"`
	APIIdlePer1000 float64 `json:"order_api_bytes_per_1000_idle_connections"`
}

// Size is the speed of reserving in sales of one size.
type Size struct {
	Units    int     `json:"units"`
	Sales    int     `json:"sales"`
	Reserved int64   `json:"reserved"`
	PerS     float64 `json:"per_s"`
}

// Rival is one design in the comparison.
type Rival struct {
	Name        string  `json:"name"`
	PerS        float64 `json:"accepted_per_s"`
	P99         float64 `json:"p99_ms"`
	Oversold    int64   `json:"oversold"`   // two replicas, one small sale
	Undersold   int64   `json:"undersold"`  // the same sale: units nobody could buy
	LostUnits   int64   `json:"lost_units"` // kill -9 under load: neither on sale nor in an order
	LostOrders  int64   `json:"lost_orders"`
	Connections int     `json:"mysql_connections"`
}

// CurvePoint is throughput and latency at a number of connections.
type CurvePoint struct {
	Connections int     `json:"connections"`
	Noop        float64 `json:"noop_per_s"`
	NoopP99     float64 `json:"noop_p99_ms"`
	Accept      float64 `json:"accept_per_s"`
	AcceptP50   float64 `json:"accept_p50_ms"`
	AcceptP99   float64 `json:"accept_p99_ms"`
}

// CPU is CPU time per order by process, in microseconds.
type CPU map[string]float64

// median of what f reads from each.
func median[T any](all []T, f func(T) float64) float64 {
	if len(all) == 0 {
		return 0
	}
	v := make([]float64, len(all))
	for i := range all {
		v[i] = f(all[i])
	}
	slices.Sort(v)
	if n := len(v); n%2 == 0 {
		return (v[n/2-1] + v[n/2]) / 2
	}
	return v[len(v)/2]
}

// Summary is the last line of a run.
type Summary struct {
	AcceptVsNoop       float64 `json:"accept_vs_noop"`
	AcceptP99VsNoop    float64 `json:"accept_p99_vs_noop"`
	SoldOutVsNoop      float64 `json:"sold_out_vs_noop"`
	SoldOutKeyedVsNoop float64 `json:"sold_out_keyed_vs_noop"`
	EndToEndVsNoop     float64 `json:"end_to_end_vs_noop"`
	BatchVsSingle      float64 `json:"batch_vs_single"`
	PersistPerS        float64 `json:"persist_per_s"`
	RollbackPerS       float64 `json:"rollback_per_s"`
	RedisBytes         float64 `json:"redis_bytes_per_reservation"`
	NoopPerS           float64 `json:"noop_per_s"`
}

// BurstP99VsNoop is the 99th percentile in the burst itself, all connections busy, in the reference's. It is
// measured by the closed loop, so that a stall is charged only to those who were in it.
func (f *Figures) BurstP99VsNoop() float64 {
	return median(f.Round, func(r Round) float64 { return r.AcceptP99 / max(r.NoopP99, 0.001) })
}

// HalfPaceP99VsNoop is the open loop's 99th percentile with each side at half of what its own burst reached,
// so that both leave the machine as much room.
func (f *Figures) HalfPaceP99VsNoop() float64 {
	return median(f.Round, func(r Round) float64 { return r.AcceptOpenP99 / max(r.NoopHalfP99, 0.001) })
}

// Summary computes the medians. Ratios are taken inside each round, before the median.
func (f *Figures) Summary() Summary {
	ratio := func(a func(Round) float64, b func(Round) float64) float64 {
		return median(f.Round, func(r Round) float64 {
			if b(r) == 0 {
				return 0
			}
			return a(r) / b(r)
		})
	}
	noop := func(r Round) float64 { return r.Noop }
	s := Summary{
		AcceptVsNoop:       ratio(func(r Round) float64 { return r.Accept }, noop),
		AcceptP99VsNoop:    ratio(func(r Round) float64 { return r.AcceptOpenP99 }, func(r Round) float64 { return r.NoopOpenP99 }),
		SoldOutVsNoop:      ratio(func(r Round) float64 { return r.SoldOut }, noop),
		SoldOutKeyedVsNoop: ratio(func(r Round) float64 { return r.SoldOutKeyed }, noop),
		PersistPerS:        median(f.Persist, func(p Persist) float64 { return p.PerS }),
		NoopPerS:           median(f.Round, noop),
	}
	s.EndToEndVsNoop = median(f.Sustained, func(x Sustained) float64 { return x.PerS / max(x.Noop, 1) })
	if single := median(f.Single, func(p Persist) float64 { return p.PerS }); single > 0 {
		s.BatchVsSingle = s.PersistPerS / single
	}
	if f.Rollback != nil {
		s.RollbackPerS = f.Rollback.PerS
	}
	if f.Memory != nil {
		s.RedisBytes = f.Memory.Redis
	}
	return s
}
