// Command order-worker writes orders to MySQL, takes them back, settles sales, and serves operators.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"seckill/pkg/config"
	"seckill/pkg/lifecycle"
	"seckill/pkg/observability"
	"seckill/services/order-worker/internal/app"
)

// gcHeadroom is what this process may allocate between two runs of the garbage collector.
const gcHeadroom = 64 << 20

func main() { os.Exit(run(context.Background(), os.Args[1:], os.Stdout, os.Stderr)) }

// run is main without the process: it returns the exit code.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	say := func(text string) {
		_, _ = fmt.Fprintln(stderr, "order-worker: "+strings.ReplaceAll(text, "\n", "; "))
	}
	cfg, err := config.Load(app.Config{}.WithDefaults(), config.Options{
		Program: "order-worker", Args: args, Output: stdout,
		Warn:     func(s string) { say("warning: " + s) },
		OtherEnv: app.SharedEnv(),
	})
	if errors.Is(err, config.ErrDone) {
		return 0
	}
	if err != nil {
		say(err.Error())
		return 1
	}
	log, err := observability.NewLogger(stderr, cfg.Log)
	if err != nil {
		say(err.Error())
		return 1
	}
	defer lifecycle.GCHeadroom(gcHeadroom)()
	a, err := app.New(ctx, cfg, log)
	if err != nil {
		say(err.Error())
		return 1
	}
	return a.Run(ctx)
}
