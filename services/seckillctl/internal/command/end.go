package command

import (
	"context"
	"fmt"
	"net/http"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"seckill/pkg/adminapi"
	"seckill/services/seckillctl/internal/adminclient"
)

func endCommand(env *Env) *cobra.Command {
	var reason string
	var wait time.Duration
	end := &cobra.Command{
		Use: "end ACTIVITY", Short: "End a sale now; settlement follows by itself", Args: exactly("an activity id"),
		RunE: env.act(act{verb: "end", kind: "activity", look: lookAtActivity, do: func(ctx context.Context, c *adminclient.Client, id string) error {
			r, err := c.End(ctx, id, reason)
			if err != nil {
				return err
			}
			if r.Already {
				env.Say("activity %s had ended before", r.ActivityID)
			} else {
				env.Say("activity %s is ended", r.ActivityID)
			}
			for deadline := time.Now().Add(wait); r.State != adminapi.ActivityClosed && time.Now().Before(deadline); {
				select {
				case <-ctx.Done():
					return ctx.Err()
				case <-time.After(500 * time.Millisecond):
				}
				a, err := c.Activity(ctx, id)
				switch status := adminclient.Status(err); {
				case err == nil:
					r.State = a.State
				case status != 0 && status < http.StatusInternalServerError:
					return err
				}
				// Otherwise the worker may be starting anew: it goes on with the settlement by itself.
			}
			if err := env.Print(r, Table{
				Header: []string{"activity_id", "already", "state"},
				Rows:   [][]string{{r.ActivityID, strconv.FormatBool(r.Already), r.State}},
			}); err != nil {
				return err
			}
			if wait > 0 && r.State != adminapi.ActivityClosed {
				return &ExitError{Code: CodePartly, Err: fmt.Errorf("activity %s is %s, not closed, after %s; its settlement goes on%s", r.ActivityID, r.State, wait, waitsFor(ctx, c, id))}
			}
			return nil
		}}),
	}
	end.Flags().StringVar(&reason, "reason", "", "why; kept in the audit")
	end.Flags().DurationVar(&wait, "wait", 0, "how long to wait until the sale is closed")
	return end
}

// waitsFor tells what holds a settlement up, as far as the API has it: orders that can still be paid, and
// letters behind which orders are parked. The rest is over in seconds. An error is no reason to say less.
func waitsFor(ctx context.Context, c *adminclient.Client, id string) string {
	out := ""
	if r, err := c.Report(ctx, id); err == nil && r.Total.Pending.Orders > 0 {
		out += fmt.Sprintf("\n  %d orders can still be paid", r.Total.Pending.Orders)
	}
	letters := int64(0)
	if l, err := c.DeadLetterGroups(ctx, adminapi.LetterFilter{ActivityID: id, State: adminapi.LetterOpen}); err == nil {
		for _, g := range l.Groups {
			letters += g.Count
		}
	}
	if letters > 0 {
		out += fmt.Sprintf("\n  %d dead letters are open, replay or discard them: seckillctl dead list --activity %s --state open", letters, id)
	}
	return out
}

func reportCommand(env *Env) *cobra.Command {
	return &cobra.Command{
		Use: "report ACTIVITY", Short: "What became of a sale: units and money, per sku and pool", Args: exactly("an activity id"),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := env.Client()
			if err != nil {
				return err
			}
			defer c.Close()
			r, err := c.Report(cmd.Context(), args[0])
			if err != nil {
				return fmt.Errorf("report of activity %s: %w", args[0], err)
			}
			if r.Final {
				env.Say("activity %s is closed; this report is final", r.ActivityID)
			} else {
				env.Say("activity %s is %s; the figures can still change", r.ActivityID, r.State)
			}
			for _, p := range r.Problems {
				env.Say("does not add up: %s", p)
			}
			for _, l := range r.RefundedSince {
				env.Say("refunded since the final report: %d orders, %d units, %d of %s in %s", l.Orders, l.Units, l.AmountMinor, l.SKU, l.Pool)
			}
			if err := env.Print(r, reportTable(r)); err != nil {
				return err
			}
			if !r.AddsUp {
				return &ExitError{Code: CodeCheck, Err: fmt.Errorf("the report of activity %s does not add up", r.ActivityID)}
			}
			return nil
		},
	}
}

func reportTable(r adminapi.Report) Table {
	t := Table{Header: []string{
		"sku_id", "pool", "allocated", "available", "withheld", "returned", "sold", "pending", "cancelled", "expired", "refunded", "rejected",
		"ledger", "sold_minor", "refunded_minor", "currency",
	}}
	for _, l := range append(r.Lines[:len(r.Lines):len(r.Lines)], r.Total) {
		t.Rows = append(t.Rows, []string{
			l.SKU, l.Pool, i64(l.Allocated), i64(l.Available), i64(l.Withheld), i64(l.Returned), i64(l.Sold.Units), i64(l.Pending.Units),
			i64(l.Cancelled.Units), i64(l.Expired.Units), i64(l.Refunded.Units), i64(l.Rejected.Units), i64(l.Ledger),
			i64(l.Sold.AmountMinor), i64(l.Refunded.AmountMinor), r.Currency,
		})
	}
	return t
}
