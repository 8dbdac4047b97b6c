// Command seckillctl lets operators run flash sales through the admin API.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"

	"seckill/services/seckillctl/internal/command"
	"seckill/services/seckillctl/internal/rehearse"
)

func main() { os.Exit(run(os.Args[1:])) }

func run(args []string) int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	return command.Run(ctx, command.IO{
		In: os.Stdin, Out: os.Stdout, Err: os.Stderr, Getenv: os.Getenv,
		InTerminal: command.Terminal(os.Stdin), ErrTerminal: command.Terminal(os.Stderr),
	}, args, rehearse.Command)
}
