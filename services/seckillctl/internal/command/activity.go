package command

import (
	"context"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"seckill/pkg/adminapi"
	"seckill/pkg/sale"
	"seckill/services/seckillctl/internal/adminclient"
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
				if err := plan.Ahead(time.Now()); err != nil {
					return err
				}
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
				sayBegun(env, plan)
				sayUncounted(cmd.Context(), env, c, plan)
			}
			return env.Print(a, activityTable(a))
		},
	}
	create.Flags().StringVarP(&file, "file", "f", "", "plan of the sale (- for stdin)")
	create.Flags().BoolVar(&shadow, "shadow", false, "a rehearsal's sale: never touches the inventory")
	_ = create.MarkFlagRequired("file")

	var editFile string
	edit := &cobra.Command{
		Use: "edit -f sale.yaml", Short: "Give a sale that was never warm another plan", Args: exactly(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			plan, err := readPlan(env, editFile)
			if err != nil {
				return err
			}
			if err := plan.Validate(nil); err != nil {
				return err
			}
			c, err := env.Client()
			if err != nil {
				return err
			}
			defer c.Close()
			if env.DryRun {
				a, err := c.Activity(cmd.Context(), plan.ID)
				if err != nil {
					return fmt.Errorf("edit activity %s: %w", plan.ID, err)
				}
				if err := plan.Ahead(time.Now()); err != nil {
					return err
				}
				env.Say("would edit activity %s (now %s): %d units, now %d", plan.ID, a.State, plan.Units(), a.Units())
				return env.Print(plan, planTable(plan))
			}
			r, err := c.EditActivity(cmd.Context(), plan)
			if err != nil {
				return fmt.Errorf("edit activity %s: %w", plan.ID, err)
			}
			if r.Changed {
				env.Say("activity %s has its new plan", r.ID)
			} else {
				env.Say("activity %s has this plan already", r.ID)
			}
			return env.Print(r, activityTable(r.Activity))
		},
	}
	edit.Flags().StringVarP(&editFile, "file", "f", "", "plan of the sale (- for stdin)")
	_ = edit.MarkFlagRequired("file")

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
			sayProblems(env, all...)
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
			sayProblems(env, a)
			return env.Print(a, activityTable(a))
		},
	}
	warm := &cobra.Command{
		Use: "warm ACTIVITY", Short: "Bring a sale's stock into Redis (safe to repeat)", Args: exactly("an activity id"),
		RunE: env.act(act{verb: "warm", kind: "activity", harmless: true, look: lookAtActivity, do: func(ctx context.Context, c *adminclient.Client, id string) error {
			r, err := c.Warm(ctx, id)
			if err != nil {
				return err
			}
			switch {
			case !r.Already:
				env.Say("activity %s is warm", r.ActivityID)
			case coldBuckets(ctx, c, r) > 0, keyless(ctx, c, r.ActivityID):
				env.Say("activity %s was warmed, but Redis has lost what it sells from, or a rebuild is under way: seckillctl rebuild %s", r.ActivityID, r.ActivityID)
			default:
				env.Say("activity %s is warm already", r.ActivityID)
			}
			return env.Print(r, Table{
				Header: []string{"activity_id", "already", "number", "opened"},
				Rows:   [][]string{{r.ActivityID, strconv.FormatBool(r.Already), strconv.FormatUint(r.Number, 10), strconv.Itoa(r.Opened)}},
			})
		}}),
	}
	return group("activity", "Sales", create, edit, list, show, warm, pauseCommand(env, true), pauseCommand(env, false), endCommand(env), reportCommand(env), deleteCommand(env))
}

// coldBuckets counts the buckets that do not sell although the sale was warmed: warming again opens what
// is there, and never brings back what Redis has lost.
func coldBuckets(ctx context.Context, c *adminclient.Client, r adminapi.WarmResult) int {
	buckets := 1
	if a, err := c.Activity(ctx, r.ActivityID); err == nil {
		buckets = a.Buckets
	}
	return buckets - r.Opened
}

// keyless says that a pool has no stock key, so that nothing can be sold from it.
func keyless(ctx context.Context, c *adminclient.Client, id string) bool {
	rows, err := c.Stock(ctx, id)
	return err == nil && slices.ContainsFunc(rows, func(r adminapi.StockRow) bool { return r.RedisAvailable == nil })
}

// sayBegun tells of a new sale whose start is over: nobody warms it but the operator.
func sayBegun(env *Env, plan sale.Sale) {
	if start, _, err := plan.Window(); err == nil && !start.After(time.Now()) && !plan.Shadow {
		env.Say("it has begun already, and only what is planned ahead is warmed by itself: seckillctl activity warm %s", plan.ID)
	}
}

// sayUncounted names the pools of a new sale whose units came from nowhere: the inventory has no row for
// them, so that nothing was taken, and nothing could be too little.
func sayUncounted(ctx context.Context, env *Env, c *adminclient.Client, plan sale.Sale) {
	if plan.Shadow {
		return
	}
	l, err := c.Inventory(ctx)
	if err != nil {
		return // the sale is made; this is talk
	}
	known := map[[2]string]bool{}
	for _, row := range l.Inventory {
		known[[2]string{row.SKU, row.Pool}] = true
	}
	for _, item := range plan.Items {
		for _, pool := range sortedPools(item.Pools) {
			if !known[[2]string{item.SKU, pool}] {
				env.Say("%s in %s is not in the inventory: its %d units are not counted against anything", item.SKU, pool, item.Pools[pool])
			}
		}
	}
}

func lookAtActivity(ctx context.Context, c *adminclient.Client, id string) (string, any, Table, error) {
	a, err := c.Activity(ctx, id)
	return a.State, a, activityTable(a), err
}

func pauseCommand(env *Env, paused bool) *cobra.Command {
	verb, text := "resume", "Let a paused sale go on"
	if paused {
		verb, text = "pause", "Stop a sale; buyers get 503 activity_paused"
	}
	return &cobra.Command{
		Use: verb + " ACTIVITY", Short: text, Args: exactly("an activity id"),
		RunE: env.act(act{verb: verb, kind: "activity", harmless: true, look: lookAtActivity, do: func(ctx context.Context, c *adminclient.Client, id string) error {
			r, err := c.SetPaused(ctx, id, paused)
			if err != nil {
				return err
			}
			return env.Print(r, Table{
				Header: []string{"activity_id", "paused", "changed"},
				Rows:   [][]string{{r.ActivityID, strconv.FormatBool(r.Paused), strconv.FormatBool(r.Changed)}},
			})
		}}),
	}
}

func deleteCommand(env *Env) *cobra.Command {
	return &cobra.Command{
		Use: "delete ACTIVITY", Short: "Remove a sale that was never warm; its units go back to the inventory", Args: exactly("an activity id"),
		RunE: env.act(act{verb: "delete", kind: "activity", look: lookAtActivity, do: func(ctx context.Context, c *adminclient.Client, id string) error {
			r, err := c.DeleteActivity(ctx, id)
			if err != nil {
				return err
			}
			env.Say("activity %s is deleted", r.ActivityID)
			return env.Print(r, Table{Header: []string{"activity_id", "deleted"}, Rows: [][]string{{r.ActivityID, strconv.FormatBool(r.Deleted)}}})
		}}),
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

// sayProblems tells of rows that somebody has written into, beside the table.
func sayProblems(env *Env, all ...adminapi.Activity) {
	for _, a := range all {
		if a.Problem != "" {
			env.Say("the row of activity %s is damaged: %s", a.ID, a.Problem)
		}
	}
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
