package command

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"seckill/pkg/adminapi"
)

func rebuildCommand(env *Env) *cobra.Command {
	var wait time.Duration
	cmd := &cobra.Command{
		Use: "rebuild ACTIVITY", Short: "Bring back from MySQL what Redis has lost of a sale",
		Long: "Bring back from MySQL what Redis has lost of a sale: stock, records, limits, qualifications and\n" +
			"idempotency keys.\n\n" +
			"The sale stands still meanwhile, and goes on afterwards if it was not paused before. What is on its\n" +
			"way to MySQL is waited for: every queue needs a worker. The worker carries the rebuild out; one that\n" +
			"is under way is joined, and giving up waiting does not stop it.",
		Args: exactly("an activity id"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := env.Confirm("rebuild activity " + args[0] + ": nothing is sold until it is done"); err != nil {
				return err
			}
			c, err := env.Client()
			if err != nil {
				return err
			}
			defer c.Close()
			r, err := c.Rebuild(cmd.Context(), args[0], env.DryRun)
			if err != nil {
				return fmt.Errorf("rebuild activity %s: %w", args[0], err)
			}
			if r.Joined {
				env.Say("a rebuild of activity %s was under way", args[0])
			}
			if !env.DryRun {
				ctx, cancel := context.WithTimeout(cmd.Context(), wait)
				defer cancel()
				said := ""
				r, err = c.WaitRebuild(ctx, args[0], func(r adminapi.Rebuild) {
					text := r.Step
					if r.Note != "" {
						text += ": " + r.Note
					}
					if text != "" && text != said {
						env.Say("%s", text)
					}
					said = text
				})
				switch {
				case errors.Is(err, context.DeadlineExceeded) && ctx.Err() != nil:
					return &ExitError{Code: CodePartly, Err: fmt.Errorf("the rebuild of activity %s is not done after %s; it goes on in the worker: %w", args[0], wait, err)}
				case err != nil:
					return fmt.Errorf("the rebuild of activity %s goes on in the worker: %w", args[0], err)
				}
			}
			return finishRebuild(env, r)
		},
	}
	cmd.Flags().DurationVar(&wait, "wait", 10*time.Minute, "how long to wait for the rebuild")
	return cmd
}

func finishRebuild(env *Env, r adminapi.Rebuild) error {
	if r.State == adminapi.RebuildFailed {
		return &ExitError{Code: CodeError, Err: errors.New("the rebuild failed: " + r.Note)}
	}
	t := Table{Header: []string{"sku_id", "pool", "allocated", "available", "held", "units", "short"}}
	out := r.Result
	for _, p := range out.Pools {
		t.Rows = append(t.Rows, []string{p.SKU, p.Pool, i64(p.Allocated), i64(p.Available), i64(p.Held), i64(p.Units), i64(p.Short)})
		if p.Short > 0 {
			env.Say("%s in %s: dead letters hold %d units more than there are; some of their orders will be rejected", p.SKU, p.Pool, p.Short)
		}
	}
	verb := "rebuilt"
	if r.DryRun {
		verb = "would rebuild, as things are now"
	}
	var statuses []string
	for _, s := range slices.Sorted(maps.Keys(out.Statuses)) {
		statuses = append(statuses, fmt.Sprintf("%d %s", out.Statuses[s], s))
	}
	env.Say("%s: %d records (%s), %d users with units, %d qualifications, %d idempotency keys", verb, out.Records, strings.Join(statuses, ", "), out.Limits, out.Qualifications, out.Keys)
	if n := out.Parked + out.Waiting; n > 0 {
		env.Say("%d orders have no row yet: %d wait behind dead letters, %d are published again", n, out.Parked, out.Waiting)
	}
	if !r.DryRun {
		if out.Mended > 0 {
			env.Say("%d orders came late and were brought in", out.Mended)
		}
		if r.Resume {
			env.Say("activity %s goes on", r.ActivityID)
		} else {
			env.Say("activity %s is paused, as it was before", r.ActivityID)
		}
	}
	if err := env.Print(r, t); err != nil {
		return err
	}
	if out.Left > 0 {
		return &ExitError{Code: CodePartly, Err: fmt.Errorf("%d differences are left, see: seckillctl reconcile %s", out.Left, r.ActivityID)}
	}
	return nil
}
