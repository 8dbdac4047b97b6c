package command

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"seckill/pkg/adminapi"
	"seckill/services/seckillctl/internal/adminclient"
)

func reconcileCommand(env *Env) *cobra.Command {
	var repair bool
	cmd := &cobra.Command{
		Use: "reconcile ACTIVITY", Short: "Compare Redis with MySQL, order by order; --repair mends what may be mended", Args: exactly("an activity id"),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := env.Client()
			if err != nil {
				return err
			}
			defer c.Close()
			r, err := c.Reconcile(cmd.Context(), args[0], repair && !env.DryRun)
			if err != nil {
				err = fmt.Errorf("reconcile activity %s: %w", args[0], err)
				switch adminclient.Code(err) {
				case adminapi.CodeNothingToCompare:
					return &ExitError{Code: CodeNothing, Err: err}
				case adminapi.CodeRedisLost:
					return &ExitError{Code: CodeCheck, Err: err}
				}
				return err
			}
			t := Table{Header: []string{"kind", "order_id", "sku_id", "pool", "units", "repaired", "detail"}}
			left := 0
			for _, d := range r.Differences {
				if !d.Repaired {
					left++
				}
				t.Rows = append(t.Rows, []string{d.Kind, d.OrderID, d.SKU, d.Pool, i64(d.Units), strconv.FormatBool(d.Repaired), d.Detail})
			}
			env.Say("%d differences after %d passes, %d of them repaired", len(r.Differences), r.Passes, len(r.Differences)-left)
			if !r.Stable {
				env.Say("the sale was moving: what was found may be on its way; compare again, or pause it first")
			}
			if err := env.Print(r, t); err != nil {
				return err
			}
			switch {
			case left > 0 && repair && left < len(r.Differences):
				return &ExitError{Code: CodePartly}
			case left > 0:
				return &ExitError{Code: CodeCheck}
			case !r.Stable:
				return &ExitError{Code: CodePartly} // nothing differs, as far as a moving sale can be compared
			}
			return nil
		},
	}
	cmd.Flags().BoolVar(&repair, "repair", false, "mend what may be mended")
	return cmd
}

func verifyCommand(env *Env) *cobra.Command {
	return &cobra.Command{
		Use: "verify ACTIVITY", Short: "Check what must hold after the end of a sale, each line with its measured value", Args: exactly("an activity id"),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := env.Client()
			if err != nil {
				return err
			}
			defer c.Close()
			r, err := c.Verify(cmd.Context(), args[0])
			if err != nil {
				return fmt.Errorf("verify activity %s: %w", args[0], err)
			}
			t := Table{Header: []string{"check", "result", "measured", "limit"}}
			var failed []string
			for _, l := range r.Lines {
				result := "pass"
				if !l.OK {
					result = "FAIL"
					failed = append(failed, l.Check)
				}
				t.Rows = append(t.Rows, []string{l.Check, result, l.Measured, l.Limit})
			}
			if err := env.Print(r, t); err != nil {
				return err
			}
			if !r.OK {
				return &ExitError{Code: CodeCheck, Err: fmt.Errorf("activity %s does not pass: %s", args[0], strings.Join(failed, "; "))}
			}
			return nil
		},
	}
}
