package command

import (
	"fmt"
	"io"
	"os"
	"strconv"

	"github.com/spf13/cobra"

	"seckill/pkg/adminapi"
	"seckill/pkg/sale"
)

func activityCommand(env *Env) *cobra.Command {
	var file string
	var shadow bool
	create := &cobra.Command{
		Use: "create -f sale.yaml", Short: "Make a sale from its plan", Args: exactly(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			plan, err := readPlan(env, file)
			if err != nil {
				return err
			}
			plan.Shadow = shadow
			if err := plan.Validate(nil); err != nil {
				return err
			}
			if env.DryRun {
				env.Say("would create activity %s with %d units", plan.ID, plan.Units())
				return env.Print(plan, planTable(plan))
			}
			c, err := env.Client()
			if err != nil {
				return err
			}
			defer c.Close()
			a, existed, err := c.CreateActivity(cmd.Context(), plan)
			if err != nil {
				return fmt.Errorf("create activity %s: %w", plan.ID, err)
			}
			if existed {
				env.Say("activity %s is there already, with the same content", a.ID)
			} else {
				env.Say("activity %s created", a.ID)
			}
			return env.Print(a, activityTable(a))
		},
	}
	create.Flags().StringVarP(&file, "file", "f", "", "plan of the sale (- for stdin)")
	create.Flags().BoolVar(&shadow, "shadow", false, "a rehearsal's sale: never touches the inventory")
	_ = create.MarkFlagRequired("file")

	list := &cobra.Command{
		Use: "list", Short: "List sales", Args: exactly(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := env.Client()
			if err != nil {
				return err
			}
			defer c.Close()
			all := []adminapi.Activity{}
			for cursor := ""; ; {
				page, err := c.Activities(cmd.Context(), cursor, 200)
				if err != nil {
					return fmt.Errorf("list activities: %w", err)
				}
				all = append(all, page.Activities...)
				if cursor = page.NextCursor; cursor == "" {
					break
				}
			}
			return env.Print(all, activityTable(all...))
		},
	}
	show := &cobra.Command{
		Use: "show ACTIVITY", Short: "Show a sale and its state in MySQL and Redis", Args: exactly("an activity id"),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := env.Client()
			if err != nil {
				return err
			}
			defer c.Close()
			a, err := c.Activity(cmd.Context(), args[0])
			if err != nil {
				return fmt.Errorf("show activity %s: %w", args[0], err)
			}
			return env.Print(a, activityTable(a))
		},
	}
	warm := &cobra.Command{
		Use: "warm ACTIVITY", Short: "Bring a sale's stock into Redis (safe to repeat)", Args: exactly("an activity id"),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := env.Client()
			if err != nil {
				return err
			}
			defer c.Close()
			if env.DryRun {
				a, err := c.Activity(cmd.Context(), args[0])
				if err != nil {
					return fmt.Errorf("warm activity %s: %w", args[0], err)
				}
				env.Say("would warm activity %s (now %s)", a.ID, a.State)
				return env.Print(a, activityTable(a))
			}
			r, err := c.Warm(cmd.Context(), args[0])
			if err != nil {
				return fmt.Errorf("warm activity %s: %w", args[0], err)
			}
			if r.Already {
				env.Say("activity %s is warm already", r.ActivityID)
			} else {
				env.Say("activity %s is warm", r.ActivityID)
			}
			return env.Print(r, Table{
				Header: []string{"activity_id", "already", "number", "opened"},
				Rows:   [][]string{{r.ActivityID, strconv.FormatBool(r.Already), strconv.FormatUint(r.Number, 10), strconv.Itoa(r.Opened)}},
			})
		},
	}
	return group("activity", "Sales", create, list, show, warm, pauseCommand(env, true), pauseCommand(env, false), endCommand(env), reportCommand(env), deleteCommand(env))
}

func pauseCommand(env *Env, paused bool) *cobra.Command {
	verb, text := "resume", "Let a paused sale go on"
	if paused {
		verb, text = "pause", "Stop a sale; buyers get 503 activity_paused"
	}
	return &cobra.Command{
		Use: verb + " ACTIVITY", Short: text, Args: exactly("an activity id"),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := env.Client()
			if err != nil {
				return err
			}
			defer c.Close()
			if env.DryRun {
				a, err := c.Activity(cmd.Context(), args[0])
				if err != nil {
					return fmt.Errorf("%s activity %s: %w", verb, args[0], err)
				}
				env.Say("would %s activity %s (now %s)", verb, a.ID, a.State)
				return env.Print(a, activityTable(a))
			}
			r, err := c.SetPaused(cmd.Context(), args[0], paused)
			if err != nil {
				return fmt.Errorf("%s activity %s: %w", verb, args[0], err)
			}
			return env.Print(r, Table{
				Header: []string{"activity_id", "paused", "changed"},
				Rows:   [][]string{{r.ActivityID, strconv.FormatBool(r.Paused), strconv.FormatBool(r.Changed)}},
			})
		},
	}
}

func deleteCommand(env *Env) *cobra.Command {
	return &cobra.Command{
		Use: "delete ACTIVITY", Short: "Remove a sale that was never warm; its units go back to the inventory", Args: exactly("an activity id"),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := env.Client()
			if err != nil {
				return err
			}
			defer c.Close()
			if env.DryRun {
				a, err := c.Activity(cmd.Context(), args[0])
				if err != nil {
					return fmt.Errorf("delete activity %s: %w", args[0], err)
				}
				env.Say("would delete activity %s (now %s)", a.ID, a.State)
				return env.Print(a, activityTable(a))
			}
			if err := env.Confirm("delete activity " + args[0]); err != nil {
				return err
			}
			r, err := c.DeleteActivity(cmd.Context(), args[0])
			if err != nil {
				return fmt.Errorf("delete activity %s: %w", args[0], err)
			}
			env.Say("activity %s is deleted", r.ActivityID)
			return env.Print(r, Table{Header: []string{"activity_id", "deleted"}, Rows: [][]string{{r.ActivityID, strconv.FormatBool(r.Deleted)}}})
		},
	}
}

func readPlan(env *Env, file string) (sale.Sale, error) {
	var in io.Reader = env.In
	if file != "-" {
		f, err := os.Open(file) //nolint:gosec // the operator names the file
		if err != nil {
			return sale.Sale{}, fmt.Errorf("read plan: %w", err)
		}
		defer func() { _ = f.Close() }()
		in = f
	}
	plan, err := sale.DecodeYAML(in)
	if err != nil {
		return sale.Sale{}, fmt.Errorf("read plan %s: %w", file, err)
	}
	return plan.WithDefaults(), nil
}

func planTable(s sale.Sale) Table {
	t := Table{Header: []string{"sku_id", "pool", "units", "price_minor", "currency"}}
	for _, item := range s.Items {
		for _, pool := range sortedPools(item.Pools) {
			t.Rows = append(t.Rows, []string{item.SKU, pool, strconv.Itoa(item.Pools[pool]), i64(item.PriceMinor), s.Currency})
		}
	}
	return t
}

func activityTable(all ...adminapi.Activity) Table {
	t := Table{Header: []string{"id", "state", "starts_at", "ends_at", "units", "buckets", "shadow", "name"}}
	for _, a := range all {
		t.Rows = append(t.Rows, []string{
			a.ID, a.State, a.StartsAt, a.EndsAt, i64(a.Units()), strconv.Itoa(a.Buckets), strconv.FormatBool(a.Shadow), short(a.Name, 40),
		})
	}
	return t
}
