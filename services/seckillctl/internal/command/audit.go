package command

import (
	"fmt"

	"github.com/spf13/cobra"

	"seckill/pkg/adminapi"
)

func auditCommand(env *Env) *cobra.Command {
	var limit int
	cmd := &cobra.Command{
		Use: "audit", Short: "List what operators changed, newest first", Args: exactly(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if limit < 1 {
				return usagef("limit must be positive")
			}
			c, err := env.Client()
			if err != nil {
				return err
			}
			defer c.Close()
			all := []adminapi.AuditEntry{}
			for cursor := ""; ; {
				page, err := c.Audit(cmd.Context(), cursor, min(200, limit-len(all)))
				if err != nil {
					return fmt.Errorf("list audit: %w", err)
				}
				all = append(all, page.Entries...)
				if cursor = page.NextCursor; cursor == "" || len(all) >= limit {
					break
				}
			}
			t := Table{Header: []string{"at", "actor", "role", "action", "target", "request_id"}}
			for _, a := range all {
				t.Rows = append(t.Rows, []string{timeText(a.At), a.Actor, a.Role, a.Action, a.Target, a.RequestID})
			}
			return env.Print(all, t)
		},
	}
	cmd.Flags().IntVar(&limit, "limit", 100, "at most so many")
	return cmd
}
