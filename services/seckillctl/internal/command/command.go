package command

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"seckill/services/seckillctl/internal/adminclient"
)

// Exit codes; a contract.
const (
	CodeDone    = 0
	CodeError   = 1
	CodeUsage   = 2
	CodePartly  = 3 // some of it was done
	CodeNothing = 4 // nothing matched
	CodeCheck   = 5 // a check failed (rehearse, verify, reconcile without repair)
)

// ExitError ends the program with a code of its own. With a nil Err nothing is printed: what there
// is to say was said already.
type ExitError struct {
	Code int
	Err  error
}

func (e *ExitError) Error() string {
	if e.Err == nil {
		return fmt.Sprintf("exit code %d", e.Code)
	}
	return e.Err.Error()
}

// Unwrap gives the cause.
func (e *ExitError) Unwrap() error { return e.Err }

func usagef(format string, args ...any) error {
	return &ExitError{Code: CodeUsage, Err: fmt.Errorf(format, args...)}
}

// IO is the program's surroundings, given by main and by tests.
type IO struct {
	In     io.Reader
	Out    io.Writer
	Err    io.Writer
	Getenv func(string) string
	// InTerminal and ErrTerminal say whether a person sits there: only then is there a question to
	// ask, or a progress bar to draw.
	InTerminal  bool
	ErrTerminal bool
}

// Env is what a command works with.
type Env struct {
	IO
	DryRun bool
	Yes    bool
	output string
	server string
	token  string
	limit  time.Duration
}

// Command adds a subtree to the root; how packages beside this one are mounted.
type Command func(*Env) *cobra.Command

// Run runs the program and returns its exit code. mounted adds further commands.
func Run(ctx context.Context, surroundings IO, args []string, mounted ...Command) int {
	env := &Env{IO: surroundings}
	root := newRoot(env)
	for _, m := range mounted {
		root.AddCommand(m(env))
	}
	root.SetArgs(args)
	root.SetIn(env.In)
	root.SetOut(env.Out)
	root.SetErr(env.Err)
	return exitCode(env, root.ExecuteContext(ctx))
}

func newRoot(env *Env) *cobra.Command {
	root := &cobra.Command{
		Use:           "seckillctl",
		Short:         "Run flash sales: plan, warm, watch, repair",
		SilenceUsage:  true,
		SilenceErrors: true,
		Args:          cobra.NoArgs,
		RunE:          needSubcommand,
		PersistentPreRunE: func(cmd *cobra.Command, _ []string) error {
			return env.check(cmd)
		},
	}
	flags := root.PersistentFlags()
	flags.StringVar(&env.server, "server", "", "admin API (SECKILLCTL_SERVER; default "+adminclient.DefaultServer+")")
	flags.StringVar(&env.token, "token-file", "", "file with the admin token (SECKILLCTL_TOKEN_FILE)")
	flags.StringVarP(&env.output, "output", "o", "table", "table, json, yaml or csv")
	flags.BoolVar(&env.DryRun, "dry-run", false, "say what would be done and do nothing")
	flags.BoolVar(&env.Yes, "yes", false, "do not ask (needed without a terminal)")
	flags.DurationVar(&env.limit, "timeout", 30*time.Second, "time limit of one call")
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return &ExitError{Code: CodeUsage, Err: err} })
	root.AddCommand(activityCommand(env), stockCommand(env), inventoryCommand(env), orderCommand(env), paymentCommand(env), qualifyCommand(env), deadCommand(env),
		auditCommand(env), tokenCommand(env), reconcileCommand(env), rebuildCommand(env), verifyCommand(env))
	return root
}

func (e *Env) check(cmd *cobra.Command) error {
	switch e.output {
	case "table", "json", "yaml", "csv":
	default:
		return usagef("output %q: one of table, json, yaml, csv", e.output)
	}
	if e.limit <= 0 {
		return usagef("timeout must be positive")
	}
	// The commands that have these flags mean the same by them.
	if f := cmd.Flags().Lookup("reason"); f != nil && f.Changed && strings.TrimSpace(f.Value.String()) == "" {
		return usagef("--reason must not be empty")
	}
	if f := cmd.Flags().Lookup("wait"); f != nil {
		if d, err := time.ParseDuration(f.Value.String()); err == nil && d < 0 {
			return usagef("--wait must not be negative")
		}
	}
	return nil
}

// Client connects to the admin API named by flags or environment.
func (e *Env) Client() (*adminclient.Client, error) {
	server, file := e.server, e.token
	if server == "" {
		server = e.Getenv("SECKILLCTL_SERVER")
	}
	if file == "" {
		file = e.Getenv("SECKILLCTL_TOKEN_FILE")
	}
	if file == "" {
		return nil, usagef("no admin token: set SECKILLCTL_TOKEN_FILE or --token-file")
	}
	token, err := adminclient.ReadToken(file)
	if err != nil {
		return nil, err
	}
	c, err := adminclient.New(adminclient.Config{Server: server, Token: token, Timeout: e.limit})
	if err != nil {
		return nil, &ExitError{Code: CodeUsage, Err: err}
	}
	return c, nil
}

// Say writes talk for people to stderr.
func (e *Env) Say(format string, args ...any) { _, _ = fmt.Fprintf(e.Err, format+"\n", args...) }

// Confirm asks before something that cannot be taken back. Without a terminal --yes is the answer.
func (e *Env) Confirm(question string) error {
	if e.Yes || e.DryRun {
		return nil
	}
	if !e.InTerminal {
		return usagef("%s: not done without --yes, there is no terminal to ask", question)
	}
	_, _ = fmt.Fprintf(e.Err, "%s? [y/N] ", question)
	line, err := bufio.NewReader(e.In).ReadString('\n')
	if err != nil && !errors.Is(err, io.EOF) {
		return fmt.Errorf("read answer: %w", err)
	}
	switch strings.ToLower(strings.TrimSpace(line)) {
	case "y", "yes":
		return nil
	}
	return &ExitError{Code: CodeError, Err: errors.New("not done")}
}

// act is what the commands that change one thing share: a client, what a dry run shows in place of the
// change, the question, and what was tried in front of every error.
type act struct {
	verb, kind string // "cancel", "order"
	harmless   bool   // not asked for
	// look reads the thing and says, for a dry run, what it is now.
	look func(ctx context.Context, c *adminclient.Client, id string) (state string, value any, table Table, err error)
	do   func(ctx context.Context, c *adminclient.Client, id string) error
}

func (e *Env) act(a act) func(*cobra.Command, []string) error {
	return func(cmd *cobra.Command, args []string) error {
		c, err := e.Client()
		if err != nil {
			return err
		}
		defer c.Close()
		what := a.verb + " " + a.kind + " " + args[0]
		if e.DryRun {
			state, value, table, err := a.look(cmd.Context(), c, args[0])
			if err != nil {
				return fmt.Errorf("%s: %w", what, err)
			}
			e.Say("would %s (now %s)", what, state)
			return e.Print(value, table)
		}
		if !a.harmless {
			if err := e.Confirm(what); err != nil {
				return err
			}
		}
		if err := a.do(cmd.Context(), c, args[0]); err != nil {
			return fmt.Errorf("%s: %w", what, err)
		}
		return nil
	}
}

func needSubcommand(cmd *cobra.Command, args []string) error {
	if len(args) > 0 {
		return usagef("unknown command %q for %q", args[0], cmd.CommandPath())
	}
	_ = cmd.Help()
	return &ExitError{Code: CodeUsage}
}

// group is a command that only holds others.
func group(use, short string, children ...*cobra.Command) *cobra.Command {
	cmd := &cobra.Command{Use: use, Short: short, RunE: needSubcommand}
	cmd.AddCommand(children...)
	return cmd
}

// exactly is cobra's argument check with the exit code of a usage error.
func exactly(names ...string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if len(args) != len(names) {
			return usagef("%s needs %s", cmd.CommandPath(), wanted(names))
		}
		return nil
	}
}

func wanted(names []string) string {
	if len(names) == 0 {
		return "no arguments"
	}
	return strings.Join(names, " and ")
}

func exitCode(env *Env, err error) int {
	if err == nil {
		return CodeDone
	}
	var exit *ExitError
	if errors.As(err, &exit) {
		if exit.Err != nil {
			env.Say("seckillctl: %s", exit.Err)
		}
		return exit.Code
	}
	env.Say("seckillctl: %s", err)
	switch {
	case adminclient.Status(err) == http.StatusNotFound:
		return CodeNothing
	case strings.HasPrefix(err.Error(), "unknown command"), strings.HasPrefix(err.Error(), "required flag"):
		return CodeUsage // cobra has no error type for these
	}
	return CodeError
}

// Terminal says whether f is a terminal. Being a character device does not make one: /dev/null is
// such a device too, and it is what programs without a terminal are given.
func Terminal(f *os.File) bool { return term.IsTerminal(int(f.Fd())) }
