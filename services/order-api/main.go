// Command order-api answers the storefront: it reserves units in Redis, hands orders to RabbitMQ, and
// never opens a connection to a database.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"seckill/pkg/config"
	"seckill/pkg/lifecycle"
	"seckill/pkg/observability"
	"seckill/services/order-api/internal/app"
)

// gcHeadroom is what this process may allocate between two runs of the garbage collector.
const gcHeadroom = 192 << 20

func main() { os.Exit(run(context.Background(), os.Args[1:], os.Stdout, os.Stderr)) }

// run is main without the process: it returns the exit code.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	ctx, stop := signal.NotifyContext(ctx, os.Interrupt, syscall.SIGTERM)
	defer stop()
	say := func(prefix, text string) { _, _ = fmt.Fprintln(stderr, "order-api: "+prefix+oneLine(text)) }

	cfg, err := config.Load(app.Config{}.WithDefaults(), config.Options{
		Program: "order-api", Args: args, Output: stdout,
		Warn:     func(s string) { say("warning: ", s) },
		OtherEnv: app.SharedEnv(),
	})
	if errors.Is(err, config.ErrDone) {
		return 0
	}
	if err != nil {
		say("", err.Error())
		return 1
	}
	log, err := observability.NewLogger(stderr, cfg.Log)
	if err != nil {
		say("", err.Error())
		return 1
	}
	defer lifecycle.GCHeadroom(gcHeadroom)()
	a, err := app.New(ctx, cfg, log)
	if err != nil {
		say("", err.Error())
		return 1
	}
	if err := a.Run(ctx); err != nil {
		log.ErrorContext(ctx, "order-api ended with an error", "error", err)
		return 1
	}
	return 0
}

// oneLine joins what errors.Join put on several lines.
func oneLine(s string) string { return strings.ReplaceAll(s, "\n", "; ") }
