package command

import (
	"bufio"
	"encoding/csv"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"seckill/pkg/adminapi"
	"seckill/pkg/order"
)

const maxCSVProblems = 20

func qualifyCommand(env *Env) *cobra.Command {
	imports := &cobra.Command{
		Use: "import ACTIVITY users.csv", Short: "Let users take part in a sale that asks for it (safe to repeat)", Args: exactly("an activity id", "a file of user ids (- for stdin)"),
		RunE: func(cmd *cobra.Command, args []string) error {
			users, err := readUsers(env, args[1])
			if err != nil {
				return err
			}
			out := adminapi.QualifyResult{ActivityID: args[0], Users: len(users)}
			table := func() Table {
				return Table{Header: []string{"activity_id", "users", "added"}, Rows: [][]string{{out.ActivityID, strconv.Itoa(out.Users), strconv.Itoa(out.Added)}}}
			}
			c, err := env.Client()
			if err != nil {
				return err
			}
			defer c.Close()
			if env.DryRun {
				if _, err := c.Activity(cmd.Context(), args[0]); err != nil {
					return fmt.Errorf("import users of %s: %w", args[0], err)
				}
				env.Say("would import %d users", len(users))
				return env.Print(out, table())
			}
			done := 0
			for chunk := range slices.Chunk(users, adminapi.MaxQualify) {
				r, err := c.Qualify(cmd.Context(), args[0], chunk)
				if err != nil {
					if env.ErrTerminal {
						_, _ = fmt.Fprintln(env.Err)
					}
					err = fmt.Errorf("import users of %s: %w", args[0], err)
					if done == 0 {
						return err
					}
					return &ExitError{Code: CodePartly, Err: fmt.Errorf("%w\n%d of %d users are imported; importing the file again is safe", err, done, len(users))}
				}
				done += len(chunk)
				out.Added += r.Added
				if env.ErrTerminal {
					_, _ = fmt.Fprintf(env.Err, "\r%d of %d users", done, len(users))
				}
			}
			if env.ErrTerminal {
				_, _ = fmt.Fprintln(env.Err)
			}
			env.Say("%d users may take part in %s, %d of them new", len(users), args[0], out.Added)
			return env.Print(out, table())
		},
	}
	return group("qualify", "Who may take part in a sale", imports)
}

// readUsers reads and checks the whole file before anything is sent: one id a line, or a CSV with a
// column user_id.
func readUsers(env *Env, file string) ([]string, error) {
	var in io.Reader = env.In
	if file != "-" {
		f, err := os.Open(file) //nolint:gosec // the operator names the file
		if err != nil {
			return nil, fmt.Errorf("read users: %w", err)
		}
		defer func() { _ = f.Close() }()
		in = f
	}
	buffered := bufio.NewReader(in)
	if bom, err := buffered.Peek(3); err == nil && string(bom) == "\ufeff" {
		_, _ = buffered.Discard(3)
	}
	r := csv.NewReader(buffered)
	r.FieldsPerRecord = -1
	r.ReuseRecord = true
	var users []string
	var problems []error
	column := -1
	for first := true; len(problems) < maxCSVProblems; first = false {
		record, err := r.Read()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, fmt.Errorf("read users %s: %w", file, err)
		}
		if first {
			if column = slices.IndexFunc(record, func(name string) bool { return strings.EqualFold(name, "user_id") }); column >= 0 {
				continue
			}
		}
		line, _ := r.FieldPos(0)
		at := max(column, 0)
		switch {
		case column < 0 && len(record) != 1:
			problems = append(problems, fmt.Errorf("line %d: %d columns, and no column is named user_id", line, len(record)))
		case at >= len(record):
			problems = append(problems, fmt.Errorf("line %d: no user id", line))
		case !order.ValidUserID(record[at]):
			problems = append(problems, fmt.Errorf("line %d: %q is not a user id (1 to 64 of A-Za-z0-9_-)", line, short(record[at], 80)))
		default:
			users = append(users, record[at])
		}
	}
	if len(problems) > 0 {
		return nil, fmt.Errorf("read users %s, nothing was imported:\n%w", file, errors.Join(problems...))
	}
	if len(users) == 0 {
		return nil, &ExitError{Code: CodeNothing, Err: fmt.Errorf("no users in %s", file)}
	}
	return users, nil
}
