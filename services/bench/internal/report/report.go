// Package report prints what was measured: a table for people, a JSON file, a plot, and one line of
// JSON for programs.
package report

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"text/tabwriter"

	"seckill/services/bench/internal/scenario"
)

// goals of the figures that have one; at most for those marked with true.
type goal struct {
	name   string
	got    float64
	want   float64
	atMost bool
	format string
}

// Write prints the tables to w, then the JSON file and the plot into dir, and the summary as the
// last line of w.
func Write(w io.Writer, dir string, f *scenario.Figures) error {
	if err := os.MkdirAll(dir, 0o750); err != nil {
		return fmt.Errorf("make folder for results: %w", err)
	}
	s := f.Summary()
	b, err := json.MarshalIndent(struct {
		Summary scenario.Summary `json:"summary"`
		*scenario.Figures
	}{s, f}, "", "  ")
	if err != nil {
		return fmt.Errorf("encode results: %w", err)
	}
	if err := os.WriteFile(filepath.Join(dir, "bench.json"), append(b, '\n'), 0o600); err != nil {
		return fmt.Errorf("write results: %w", err)
	}
	if len(f.Curve) > 1 {
		if err := plotCurve(filepath.Join(dir, "bench.svg"), f); err != nil {
			return err
		}
	}
	if _, err := io.WriteString(w, Tables(f)); err != nil {
		return fmt.Errorf("print results: %w", err)
	}
	line, err := json.Marshal(s)
	if err != nil {
		return fmt.Errorf("encode summary: %w", err)
	}
	_, err = fmt.Fprintf(w, "%s\n", line)
	return err
}

// Tables is the whole report for people.
func Tables(f *scenario.Figures) string {
	var out strings.Builder
	s := f.Summary()
	fmt.Fprintf(&out, "\n%s, %s mode, %d rounds\n", f.When.Format("2006-01-02 15:04 UTC"), f.Mode, f.Rounds)
	for _, m := range []map[string]string{f.Machine, f.Versions, f.Settings} {
		for _, k := range slices.Sorted(maps.Keys(m)) {
			fmt.Fprintf(&out, "  %s: %s\n", k, m[k])
		}
	}
	out.WriteString("\n")
	t := tabwriter.NewWriter(&out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "figure\tmeasured\tgoal\t")
	var persist = s.PersistPerS
	for _, g := range []goal{
		{"accepted and published, 256 connections, consumers paused (× noop)", s.AcceptVsNoop, 0.45, false, "%.2f"},
		{"p99 of an accepted reservation, open loop (× noop's)", s.AcceptP99VsNoop, 3, true, "%.1f"},
		{"the same, each at half of its own burst's rate (× noop's)", f.HalfPaceP99VsNoop(), 3, true, "%.1f"},
		{"the same in the burst, closed loop (× noop's)", f.BurstP99VsNoop(), 3, true, "%.1f"},
		{"sold out, without key (× noop)", s.SoldOutVsNoop, 0.90, false, "%.2f"},
		{"sold out, with key (× noop)", s.SoldOutKeyedVsNoop, 0.50, false, "%.2f"},
		{"accepted and persisted, end to end (× noop)", s.EndToEndVsNoop, 0.25, false, "%.2f"},
		{"batch against one transaction per order (×)", s.BatchVsSingle, 25, false, "%.0f"},
		{"rollback of unpaid orders (/s)", s.RollbackPerS, persist, false, "%.0f"},
		{"Redis bytes per confirmed reservation", s.RedisBytes, 400, true, "%.0f"},
	} {
		if g.got == 0 {
			continue
		}
		word := "≥"
		if g.atMost {
			word = "≤"
		}
		met := "met"
		if g.atMost && g.got > g.want || !g.atMost && g.got < g.want {
			met = "not met"
		}
		fmt.Fprintf(t, "%s\t"+g.format+"\t%s "+g.format+"\t%s\n", g.name, g.got, word, g.want, met)
	}
	if f.Scripts != nil {
		fmt.Fprintf(t, "longest of %d script calls\t%.1f ms (%d over 10 ms)\t< 10 ms\t\n", f.Scripts.Calls, f.Scripts.LongestMS, f.Scripts.Over10MS)
	}
	if f.Memory != nil {
		fmt.Fprintf(t, "Redis bytes per confirmed reservation, with key\t%.0f\t≤ 600\t\n", f.Memory.RedisKeyed)
		fmt.Fprintf(t, "Redis bytes per reservation that waits in the outbox\t%.0f\t\t\n", f.Memory.RedisWaiting)
		fmt.Fprintf(t, "order-api memory per 1,000 idle connections\t%.1f MB\t\t\n", f.Memory.APIIdlePer1000/1e6)
	}
	t.Flush() //nolint:errcheck,gosec // a strings.Builder takes everything

	if len(f.Round) > 0 {
		out.WriteString("\n")
		t = tabwriter.NewWriter(&out, 0, 0, 2, ' ', tabwriter.AlignRight)
		fmt.Fprintln(t, "round\tnoop/s\taccept/s\t×\tp99 open ms at rate\tnoop's\tp99 closed ms\tnoop's\tsold out/s\t×\tkeyed/s\t×\tallocs\tB alloc\tper pipeline\tper message\tRedis B in\tout\tbroker B in\tout\tothers' cores\t")
		for i, r := range f.Round {
			fmt.Fprintf(t, "%d\t%.0f\t%.0f\t%.2f\t%.2f at %.0f\t%.2f\t%.1f\t%.1f\t%.0f\t%.2f\t%.0f\t%.2f\t%.1f\t%.0f\t%.0f\t%.0f\t%.0f\t%.0f\t%.0f\t%.0f\t%.2f\t\n", i+1,
				r.Noop, r.Accept, r.Accept/r.Noop, r.AcceptOpenP99, r.Rate, r.NoopOpenP99, r.AcceptP99, r.NoopP99,
				r.SoldOut, r.SoldOut/r.Noop, r.SoldOutKeyed, r.SoldOutKeyed/r.Noop,
				r.Allocations, r.AllocatedBytes, r.PerPipeline, r.OrdersPerMessage, r.RedisIn, r.RedisOut, r.BrokerIn, r.BrokerOut, r.Others)
		}
		t.Flush() //nolint:errcheck,gosec // a strings.Builder takes everything
	}
	rates := func(name string, n int, at func(int) string) {
		if n == 0 {
			return
		}
		fmt.Fprintf(&out, "%s:", name)
		for i := range n {
			out.WriteString(" " + at(i))
		}
		out.WriteString("\n")
	}
	out.WriteString("\n")
	rates("open loop, cores busy and p50 ms with the reference's", len(f.Round), func(i int) string {
		r := f.Round[i]
		return fmt.Sprintf("%.2f (%.2f), %.1f (%.1f);", r.AcceptOpenBusy, r.NoopOpenBusy, r.AcceptOpenP50, r.NoopOpenP50)
	})
	rates("persisted/s in batches", len(f.Persist), func(i int) string { return fmt.Sprintf("%.0f", f.Persist[i].PerS) })
	rates("persisted/s, one transaction per order", len(f.Single), func(i int) string { return fmt.Sprintf("%.0f", f.Single[i].PerS) })
	rates("end to end/s, backlog bounded", len(f.Sustained), func(i int) string {
		return fmt.Sprintf("%.0f (%.2f)", f.Sustained[i].PerS, f.Sustained[i].PerS/max(f.Sustained[i].Noop, 1))
	})
	if f.Rollback != nil {
		fmt.Fprintf(&out, "rolled back/s: %.0f (%d orders)\n", f.Rollback.PerS, f.Rollback.Orders)
	}
	rates("reservations/s by units on sale", len(f.Sizes), func(i int) string {
		return fmt.Sprintf("%d: %.0f", f.Sizes[i].Units, f.Sizes[i].PerS)
	})

	cpu(&out, "accepted order, consumers paused", f.CPUAccept)
	cpu(&out, "persisted order, nothing accepted meanwhile", f.CPUPersist)
	cpu(&out, "order rolled back", f.CPURollback)
	cpu(&out, "order end to end", f.CPUAll)

	if len(f.Rivals) > 0 {
		out.WriteString("\n")
		t = tabwriter.NewWriter(&out, 0, 0, 2, ' ', 0)
		fmt.Fprintln(t, "design\taccepted/s\tp99 ms\toversold\tundersold\tunits lost after kill -9\tanswered orders lost\tMySQL connections")
		for _, r := range f.Rivals {
			fmt.Fprintf(t, "%s\t%.0f\t%.0f\t%d\t%d\t%d\t%d\t%d\n", r.Name, r.PerS, r.P99, r.Oversold, r.Undersold, r.LostUnits, r.LostOrders, r.Connections)
		}
		t.Flush() //nolint:errcheck,gosec // a strings.Builder takes everything
	}
	if len(f.Curve) > 0 {
		out.WriteString("\n")
		t = tabwriter.NewWriter(&out, 0, 0, 2, ' ', tabwriter.AlignRight)
		fmt.Fprintln(t, "connections\tnoop/s\tp99 ms\taccepted/s\tp50 ms\tp99 ms\t")
		for _, p := range f.Curve {
			fmt.Fprintf(t, "%d\t%.0f\t%.1f\t%.0f\t%.1f\t%.1f\t\n", p.Connections, p.Noop, p.NoopP99, p.Accept, p.AcceptP50, p.AcceptP99)
		}
		t.Flush() //nolint:errcheck,gosec // a strings.Builder takes everything
	}
	for _, n := range f.Notes {
		fmt.Fprintf(&out, "note: %s\n", n)
	}
	out.WriteString("\n")
	return out.String()
}

// cpu prints the median of each process.
func cpu(out *strings.Builder, what string, all []scenario.CPU) {
	if len(all) == 0 {
		return
	}
	sum := 0.0
	names := slices.Sorted(maps.Keys(all[0]))
	fmt.Fprintf(out, "CPU µs per %s:", what)
	for _, n := range names {
		v := make([]float64, 0, len(all))
		for _, c := range all {
			v = append(v, c[n])
		}
		slices.Sort(v)
		m := v[len(v)/2]
		sum += m
		fmt.Fprintf(out, " %s %.1f", n, m)
	}
	fmt.Fprintf(out, ", together %.1f\n", sum)
}
