package rehearse

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/schollz/progressbar/v3"
	"github.com/spf13/cobra"
	"golang.org/x/term"

	"seckill/pkg/sale"
)

// NewCommand makes `seckillctl rehearse`. connect gives the client of the admin API, from the flags
// and the environment that all commands share. usage marks an error as one of usage.
func NewCommand(connect func(*cobra.Command) (Admin, error), usage func(error) error) *cobra.Command {
	var opt Options
	var file, pause string
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
		Args:    cobra.NoArgs,
	}
	f := cmd.Flags()
	f.StringVarP(&file, "file", "f", "", "the sale's plan (- reads standard input)")
	f.IntVar(&opt.Buyers, "buyers", 1000, "distinct buyers")
	f.IntVar(&opt.Concurrency, "concurrency", 256, "buyers at once")
	f.StringSliceVar(&opt.APIs, "api", []string{envOr("SECKILLCTL_API", "http://127.0.0.1:8080")}, "base URLs of the order-api replicas (SECKILLCTL_API)")
	f.Float64Var(&opt.PayShare, "pay-share", 0.5, "share of the accepted orders that are paid")
	f.Float64Var(&opt.CancelShare, "cancel-share", 0.2, "share of the accepted orders that are cancelled")
	f.Uint64Var(&opt.Seed, "seed", 0, "seed of the crowd's manners (0: by the clock)")
	f.DurationVar(&opt.PaymentTimeout, "payment-timeout", 15*time.Second, "payment time-out of the shadow activity; one of the delay tiers")
	f.DurationVar(&opt.Timeout, "timeout", 5*time.Minute, "how long to wait for quiet after the crowd")
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
		admin, err := connect(cmd)
		if err != nil {
			return err
		}
		errOut := cmd.ErrOrStderr()
		bar := newBar(errOut, opt.Buyers)
		opt.Progress = bar.set
		opt.Talk = func(format string, args ...any) {
			bar.clear()
			_, _ = fmt.Fprintf(errOut, format+"\n", args...) // talk; nothing depends on it
		}
		if pause != "" {
			opt.BeforeCheck = func(ctx context.Context, activity string) error { return pauseFor(ctx, pause, activity) }
		}
		rep, err := Run(cmd.Context(), admin, opt)
		bar.clear()
		if err != nil && !errors.Is(err, ErrPromiseBroken) {
			return err
		}
		if writeErr := rep.Write(cmd.OutOrStdout()); writeErr != nil {
			return writeErr
		}
		return err
	}
	return cmd
}

func envOr(name, def string) string {
	if v := os.Getenv(name); v != "" {
		return v
	}
	return def
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

func newBar(w io.Writer, n int) bar {
	f, ok := w.(*os.File)
	if !ok || !term.IsTerminal(int(f.Fd())) { //nolint:gosec // a file descriptor fits
		return bar{}
	}
	return bar{progressbar.NewOptions(n,
		progressbar.OptionSetWriter(w),
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
