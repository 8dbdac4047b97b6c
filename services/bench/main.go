// Command bench measures the system on real services, beside the alternatives and beside a handler
// that does nothing.
//
//	bench run [-long] [-out dir]      the whole measurement
//	bench noop -addr A -size N        the reference
//	bench alternative -kind K -addr A one of the alternatives
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/redis/go-redis/v9"

	"seckill/services/bench/alternatives"
	"seckill/services/bench/internal/noop"
	"seckill/services/bench/internal/report"
	"seckill/services/bench/internal/scenario"
)

func main() { os.Exit(run(os.Args[1:])) }

func run(args []string) int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if len(args) == 0 {
		fmt.Fprintln(os.Stderr, "usage: bench run | noop | alternative")
		return 2
	}
	var err error
	switch args[0] {
	case "run":
		err = runBench(ctx, args[1:])
	case "noop":
		err = runNoop(ctx, args[1:])
	case "alternative":
		err = runAlternative(ctx, args[1:])
	default:
		err = fmt.Errorf("unknown command %q", args[0])
	}
	if err != nil {
		if ctx.Err() != nil {
			err = fmt.Errorf("%w: %w", context.Cause(ctx), err) // names the signal
		}
		fmt.Fprintln(os.Stderr, "bench:", err)
		return 1
	}
	return 0
}

func runBench(ctx context.Context, args []string) error {
	f := flag.NewFlagSet("run", flag.ContinueOnError)
	long := f.Bool("long", false, "five rounds with windows of 10 s, a sale of a million units")
	out := f.String("out", "bench-results", "folder for bench.json and bench.svg")
	root := f.String("root", ".", "root of the repository")
	only := f.String("only", "", "parts to run, with commas: "+strings.Join(scenario.Parts, ","))
	rounds := f.Int("rounds", 0, "rounds, in place of the mode's 3 or 5")
	profile := f.String("profile", "", "folder for CPU, heap, mutex and block profiles")
	if err := f.Parse(args); err != nil {
		return err
	}
	log := slog.New(slog.NewTextHandler(os.Stderr, nil))
	if err := scenario.EnsureTools(ctx, log); err != nil {
		return err
	}
	cfg := scenario.Config{Root: *root, Long: *long, Rounds: *rounds, Profile: *profile, Only: map[string]bool{}}
	for part := range strings.SplitSeq(*only, ",") {
		if part != "" {
			cfg.Only[part] = true
		}
	}
	if *profile != "" {
		if err := os.MkdirAll(*profile, 0o750); err != nil {
			return fmt.Errorf("make folder for profiles: %w", err)
		}
	}
	var err error
	if cfg.Scratch, err = os.MkdirTemp("", "seckill-bench-"); err != nil {
		return fmt.Errorf("make scratch folder: %w", err)
	}
	figures, err := scenario.Run(ctx, cfg, log)
	if figures != nil {
		// What was measured before something failed is still shown.
		err = errors.Join(err, report.Write(os.Stdout, *out, figures))
	}
	if err != nil {
		return fmt.Errorf("%w (logs are in %s)", err, cfg.Scratch)
	}
	return os.RemoveAll(cfg.Scratch)
}

func runNoop(ctx context.Context, args []string) error {
	f := flag.NewFlagSet("noop", flag.ContinueOnError)
	addr := f.String("addr", "127.0.0.1:8090", "listen address")
	size := f.Int("size", 360, "bytes of the answer")
	if err := f.Parse(args); err != nil {
		return err
	}
	return serve(ctx, *addr, noop.Handler(*size))
}

func runAlternative(ctx context.Context, args []string) error {
	f := flag.NewFlagSet("alternative", flag.ContinueOnError)
	addr := f.String("addr", "127.0.0.1:8090", "listen address")
	kind := f.String("kind", "", "mutex, database, decr or lua")
	dsn := f.String("mysql", "", "DSN")
	redisAddr := f.String("redis", "", "address")
	secret := f.String("secret", "", "key of the bearer tokens")
	if err := f.Parse(args); err != nil {
		return err
	}
	db, err := alternatives.Open(*dsn)
	if err != nil {
		return err
	}
	defer db.Close() //nolint:errcheck // the process ends
	r := redis.NewClient(&redis.Options{Addr: *redisAddr, PoolSize: 64})
	defer r.Close() //nolint:errcheck // the process ends
	var s alternatives.Seller
	switch *kind {
	case "mutex":
		if s, err = alternatives.NewMutex(ctx, db); err != nil {
			return err
		}
	case "database":
		s = alternatives.Database{DB: db}
	case "decr":
		s = alternatives.Decr{DB: db, Redis: r}
	case "lua":
		s = alternatives.Lua{DB: db, Redis: r}
	default:
		return fmt.Errorf("unknown kind %q", *kind)
	}
	return serve(ctx, *addr, alternatives.Handler(s, []byte(*secret)))
}

func serve(ctx context.Context, addr string, h http.Handler) error {
	ln, err := net.Listen("tcp", addr)
	if err != nil {
		return fmt.Errorf("listen: %w", err)
	}
	srv := &http.Server{Handler: h, ReadHeaderTimeout: 10 * time.Second}
	done := make(chan error, 1)
	go func() { done <- srv.Serve(ln) }()
	<-ctx.Done()
	end, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	err = srv.Shutdown(end)
	if served := <-done; !errors.Is(served, http.ErrServerClosed) {
		err = errors.Join(err, served)
	}
	return err
}
