package rehearse

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/schollz/progressbar/v3"
	"github.com/spf13/cobra"

	"seckill/pkg/sale"
	"seckill/services/seckillctl/internal/adminclient"
	"seckill/services/seckillctl/internal/command"
)

// client makes the admin client fit.
type client struct{ *adminclient.Client }

func (c client) Do(ctx context.Context, method, path string, in, out any) error {
	_, err := c.Client.Do(ctx, method, path, nil, in, out)
	return err
}

func (c client) Stream(ctx context.Context, path string) (io.ReadCloser, error) {
	return c.Client.Stream(ctx, path, nil)
}

func usage(err error) error { return &command.ExitError{Code: command.CodeUsage, Err: err} }

// Command makes `seckillctl rehearse`.
func Command(env *command.Env) *cobra.Command {
	var opt Options
	var file, pause string
	api := env.Getenv("SECKILLCTL_API")
	if api == "" {
		api = "http://127.0.0.1:8080"
	}
	cmd := &cobra.Command{
		Use:   "rehearse -f sale.yaml --buyers N",
		Short: "Play a sale in a shadow activity and check every promise",
		Long: `Rehearse plays a sale against the deployed system: it makes a shadow activity with the goods and
limits of sale.yaml, sends a crowd over HTTP (double clicks, retries, lost answers, payments,
cancels; the rest is left to expire), puts one broken message among the good ones and replays it,
waits until everything is drained, and then joins what the buyers were told with what MySQL and Redis
hold. The inventory is never touched.

The last line of the output is one JSON object. Exit code 5: a promise was broken.`,
		Example: "  seckillctl rehearse -f sale.yaml --buyers 20000 --concurrency 256",
		Args: func(cmd *cobra.Command, args []string) error {
			if err := cobra.NoArgs(cmd, args); err != nil {
				return usage(err)
			}
			return nil
		},
	}
	f := cmd.Flags()
	f.StringVarP(&file, "file", "f", "", "the sale's plan (- reads standard input)")
	f.IntVar(&opt.Buyers, "buyers", 1000, "distinct buyers")
	f.IntVar(&opt.Concurrency, "concurrency", 256, "buyers at once")
	f.StringSliceVar(&opt.APIs, "api", []string{api}, "base URLs of the order-api replicas (SECKILLCTL_API)")
	f.Float64Var(&opt.PayShare, "pay-share", 0.5, "share of the accepted orders that are paid")
	f.Float64Var(&opt.CancelShare, "cancel-share", 0.2, "share of the accepted orders that are cancelled")
	f.Uint64Var(&opt.Seed, "seed", 0, "seed of the crowd's manners (0: by the clock)")
	f.DurationVar(&opt.PaymentTimeout, "payment-timeout", 15*time.Second, "payment time-out of the shadow activity; one of the delay tiers")
	f.DurationVar(&opt.Timeout, "quiet-timeout", 5*time.Minute, "how long to wait for quiet after the crowd")
	f.StringVar(&pause, "pause-before-check", "", "write the shadow activity's id to this file when quiet and wait until the file is gone")
	_ = f.MarkHidden("pause-before-check") // fails for an unknown name only
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if file == "" {
			return usage(errors.New("-f sale.yaml is missing"))
		}
		s, err := readSale(file, cmd.InOrStdin())
		if err != nil {
			return err
		}
		opt.Sale = s
		if _, err := opt.withDefaults(); err != nil {
			return usage(err)
		}
		if env.DryRun {
			env.Say("would send %d buyers, %d at once, to %s for a shadow of %s", opt.Buyers, opt.Concurrency, strings.Join(opt.APIs, ", "), s.ID)
			return nil
		}
		admin, err := env.Client()
		if err != nil {
			return err
		}
		defer admin.Close()
		bar := newBar(env, opt.Buyers)
		opt.Progress = bar.set
		opt.Talk = func(format string, args ...any) {
			bar.clear()
			env.Say(format, args...)
		}
		if pause != "" {
			opt.BeforeCheck = func(ctx context.Context, activity string) error { return pauseFor(ctx, pause, activity) }
		}
		rep, err := Run(cmd.Context(), client{admin}, opt)
		bar.clear()
		if err != nil && !errors.Is(err, ErrPromiseBroken) {
			return err
		}
		if writeErr := rep.Write(cmd.OutOrStdout()); writeErr != nil {
			return writeErr
		}
		if err != nil {
			return &command.ExitError{Code: command.CodeCheck, Err: err}
		}
		return nil
	}
	return cmd
}

func readSale(file string, stdin io.Reader) (sale.Sale, error) {
	if file == "-" {
		return sale.DecodeYAML(stdin)
	}
	f, err := os.Open(file) //nolint:gosec // the operator names it
	if err != nil {
		return sale.Sale{}, fmt.Errorf("read sale: %w", err)
	}
	defer f.Close() //nolint:errcheck // only read
	s, err := sale.DecodeYAML(f)
	if err != nil {
		return sale.Sale{}, fmt.Errorf("%s: %w", file, err)
	}
	return s, nil
}

// pauseFor lets a test do its sabotage in the quiet moment before the check.
func pauseFor(ctx context.Context, file, activity string) error {
	if err := os.WriteFile(file, []byte(activity), 0o600); err != nil {
		return fmt.Errorf("pause: %w", err)
	}
	for {
		if _, err := os.Stat(file); errors.Is(err, os.ErrNotExist) {
			return nil
		}
		if wait(ctx, 20*time.Millisecond); ctx.Err() != nil {
			return ctx.Err()
		}
	}
}

// bar is a progress bar on a terminal and nothing elsewhere.
type bar struct{ p *progressbar.ProgressBar }

func newBar(env *command.Env, n int) bar {
	if !env.ErrTerminal {
		return bar{}
	}
	return bar{progressbar.NewOptions(n,
		progressbar.OptionSetWriter(env.Err),
		progressbar.OptionSetDescription("buyers"),
		progressbar.OptionShowCount(),
		progressbar.OptionThrottle(100*time.Millisecond),
		progressbar.OptionClearOnFinish(),
	)}
}

func (b bar) set(n int) {
	if b.p != nil {
		_ = b.p.Set(n) // drawing only
	}
}

func (b bar) clear() {
	if b.p != nil {
		_ = b.p.Clear()
	}
}
