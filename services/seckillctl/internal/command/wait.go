package command

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"seckill/pkg/adminapi"
	"seckill/services/seckillctl/internal/adminclient"
)

// waitReplay follows a job. The job belongs to the worker: giving up waiting does not stop it.
func waitReplay(cmd *cobra.Command, env *Env, c *adminclient.Client, id string, limit time.Duration) (adminapi.ReplayJob, error) {
	ctx, cancel := context.WithTimeout(cmd.Context(), limit)
	defer cancel()
	j, err := c.WaitReplay(ctx, id, func(j adminapi.ReplayJob) {
		if env.ErrTerminal {
			_, _ = fmt.Fprintf(env.Err, "\r%d of %d letters", j.Sent+j.Skipped+j.Failed, j.Matched)
		}
	})
	if env.ErrTerminal {
		_, _ = fmt.Fprintln(env.Err)
	}
	if errors.Is(err, context.DeadlineExceeded) && ctx.Err() != nil {
		return j, &ExitError{Code: CodePartly, Err: fmt.Errorf("replay job %s is not done after %s; it goes on in the worker: %w", id, limit, err)}
	}
	if err != nil {
		return j, fmt.Errorf("replay job %s goes on in the worker: %w", id, err)
	}
	return j, nil
}
