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
	"seckill/pkg/observability"
	"seckill/services/order-worker/internal/app"
)

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
	a, err := app.New(ctx, cfg, log)
	if err != nil {
		say(err.Error())
		return 1
	}
	return a.Run(ctx)
}
