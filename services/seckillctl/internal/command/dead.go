package command

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"seckill/pkg/adminapi"
)

func deadCommand(env *Env) *cobra.Command {
	return group("dead", "Dead letters", deadList(env), deadShow(env), deadGroup(env), deadReplay(env), deadDiscard(env), deadJobs(env))
}

// letterFlags reads a filter from flags.
type letterFlags struct {
	filter adminapi.LetterFilter
	all    bool
}

func (l *letterFlags) bind(cmd *cobra.Command, withState, withAll bool) {
	flags := cmd.Flags()
	if withState {
		flags.StringVar(&l.filter.State, "state", "", "open, claimed, sent, resolved or discarded")
	}
	flags.StringVar(&l.filter.Class, "class", "", "class of the failure")
	flags.StringVar(&l.filter.Queue, "queue", "", "queue the message failed in")
	flags.StringVar(&l.filter.ActivityID, "activity", "", "activity id")
	flags.StringVar(&l.filter.OrderID, "order", "", "order id")
	flags.StringVar(&l.filter.Query, "q", "", "part of the error or the body")
	if withAll {
		flags.BoolVar(&l.all, "all", false, "every open letter")
	}
}

func (l *letterFlags) selection(args []string) (adminapi.LetterSelection, error) {
	var sel adminapi.LetterSelection
	filtered := l.filter != adminapi.LetterFilter{}
	switch {
	case len(args) > 0 && (filtered || l.all):
		return sel, usagef("give letter ids or a filter, not both")
	case len(args) == 0 && !filtered && !l.all:
		return sel, usagef("give letter ids, a filter, or --all")
	case len(args) == 0:
		f := l.filter
		sel.Filter = &f
		return sel, nil
	}
	for _, arg := range args {
		id, err := letterID(arg)
		if err != nil {
			return sel, err
		}
		if !slices.Contains(sel.IDs, id) {
			sel.IDs = append(sel.IDs, id)
		}
	}
	return sel, nil
}

// notOpen is the error of a call in which some of the letters that were named took no part.
func notOpen(sel adminapi.LetterSelection, matched int) error {
	if n := len(sel.IDs) - matched; n > 0 {
		return &ExitError{Code: CodePartly, Err: fmt.Errorf("%d of the %d named letters are not open, or not there", n, len(sel.IDs))}
	}
	return nil
}

func letterID(s string) (int64, error) {
	id, err := strconv.ParseInt(s, 10, 64)
	if err != nil || id < 1 {
		return 0, usagef("%q is not the id of a dead letter", s)
	}
	return id, nil
}

func deadList(env *Env) *cobra.Command {
	var l letterFlags
	var limit int
	cmd := &cobra.Command{
		Use: "list", Short: "List dead letters", Args: exactly(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if limit < 0 {
				return usagef("limit must not be negative")
			}
			switch l.filter.State {
			case "", adminapi.LetterOpen, adminapi.LetterClaimed, adminapi.LetterSent, adminapi.LetterResolved, adminapi.LetterDiscarded:
			default:
				return usagef("--state %q: one of open, claimed, sent, resolved, discarded", l.filter.State)
			}
			c, err := env.Client()
			if err != nil {
				return err
			}
			defer c.Close()
			all := []adminapi.DeadLetter{}
			for cursor := ""; ; {
				size := 200
				if limit > 0 {
					size = min(size, limit-len(all))
				}
				page, err := c.DeadLetters(cmd.Context(), l.filter, cursor, size)
				if err != nil {
					return fmt.Errorf("list dead letters: %w", err)
				}
				all = append(all, page.DeadLetters...)
				if cursor = page.NextCursor; cursor == "" || limit > 0 && len(all) >= limit {
					break
				}
			}
			return env.Print(all, letterTable(all...))
		},
	}
	l.bind(cmd, true, false)
	cmd.Flags().IntVar(&limit, "limit", 0, "at most so many (0: all)")
	return cmd
}

func deadShow(env *Env) *cobra.Command {
	return &cobra.Command{
		Use: "show ID", Short: "Show a dead letter with its content and what a replay would come to", Args: exactly("a letter id"),
		RunE: func(cmd *cobra.Command, args []string) error {
			id, err := letterID(args[0])
			if err != nil {
				return err
			}
			c, err := env.Client()
			if err != nil {
				return err
			}
			defer c.Close()
			l, err := c.DeadLetter(cmd.Context(), id)
			if err != nil {
				return fmt.Errorf("show dead letter %s: %w", args[0], err)
			}
			t := letterTable(l)
			t.Header = append(t.Header, "verdict", "verdict_detail", "content")
			t.Rows[0] = append(t.Rows[0], l.Verdict, l.Detail, string(l.Decoded))
			if env.output == "table" { // one letter reads better downwards
				down := Table{Header: []string{"field", "value"}}
				for i, name := range t.Header {
					down.Rows = append(down.Rows, []string{name, short(t.Rows[0][i], 400)})
				}
				t = down
			}
			return env.Print(l, t)
		},
	}
}

func deadGroup(env *Env) *cobra.Command {
	var l letterFlags
	cmd := &cobra.Command{
		Use: "group", Short: "Count dead letters that look alike", Args: exactly(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := env.Client()
			if err != nil {
				return err
			}
			defer c.Close()
			g, err := c.DeadLetterGroups(cmd.Context(), l.filter)
			if err != nil {
				return fmt.Errorf("group dead letters: %w", err)
			}
			t := Table{Header: []string{"count", "state", "class", "queue", "oldest", "newest", "error"}}
			for _, one := range g.Groups {
				t.Rows = append(t.Rows, []string{
					i64(one.Count), one.State, one.Class, one.Queue, timeText(one.Oldest), timeText(one.Newest), short(one.Error, 80),
				})
			}
			return env.Print(g.Groups, t)
		},
	}
	l.bind(cmd, true, false)
	return cmd
}

func deadReplay(env *Env) *cobra.Command {
	var l letterFlags
	var noWait bool
	var wait time.Duration
	cmd := &cobra.Command{
		Use: "replay [ID...|--class ...|--all]", Short: "Publish dead letters again",
		Long: "Publish dead letters again, as a job that survives a crash of the worker.\n\n" +
			"A filter sends the letters that will apply and skips the others; named letters are sent whatever\n" +
			"their verdict, and come back as letters if they fail again.",
		RunE: func(cmd *cobra.Command, args []string) error {
			sel, err := l.selection(args)
			if err != nil {
				return err
			}
			c, err := env.Client()
			if err != nil {
				return err
			}
			defer c.Close()
			j, err := c.Replay(cmd.Context(), adminapi.ReplayRequest{LetterSelection: sel, DryRun: env.DryRun})
			if err != nil {
				return fmt.Errorf("replay dead letters: %w", err)
			}
			if !env.DryRun && !noWait && j.State != adminapi.JobDone {
				j, err = waitReplay(cmd, env, c, j.ID, wait)
				if err != nil {
					return err
				}
			}
			if err := env.Print(j, jobTable(j)); err != nil {
				return err
			}
			return replayExit(env, sel, j, noWait)
		},
	}
	l.bind(cmd, false, true)
	cmd.Flags().BoolVar(&noWait, "no-wait", false, "do not wait for the job")
	cmd.Flags().DurationVar(&wait, "wait", 10*time.Minute, "how long to wait for the job")
	return cmd
}

func replayExit(env *Env, sel adminapi.LetterSelection, j adminapi.ReplayJob, noWait bool) error {
	switch {
	case j.Matched == 0:
		env.Say("no open dead letter matched")
		return &ExitError{Code: CodeNothing}
	case env.DryRun:
		env.Say("would take %d letters: %s", j.Matched, verdictText(j.Verdicts))
		if sel.Filter != nil && j.Verdicts[adminapi.WillApply] < j.Matched {
			env.Say("by filter only those that will apply are sent: %d", j.Verdicts[adminapi.WillApply])
		}
		return notOpen(sel, j.Matched)
	case noWait && j.State != adminapi.JobDone:
		env.Say("replay job %s is running", j.ID)
		return notOpen(sel, j.Matched)
	}
	env.Say("sent %d, skipped %d, failed %d", j.Sent, j.Skipped, j.Failed)
	switch {
	case j.Failed > 0 && j.Sent > 0:
		return &ExitError{Code: CodePartly}
	case j.Failed > 0:
		return &ExitError{Code: CodeError}
	case j.Sent == 0:
		return &ExitError{Code: CodeNothing}
	}
	return notOpen(sel, j.Matched)
}

func verdictText(m map[string]int) string {
	var parts []string
	for _, v := range []string{adminapi.WillApply, adminapi.AlreadyDone, adminapi.InConflict, adminapi.Undecodable} {
		if m[v] > 0 {
			parts = append(parts, fmt.Sprintf("%d %s", m[v], v))
		}
	}
	return strings.Join(parts, ", ")
}

func deadDiscard(env *Env) *cobra.Command {
	var l letterFlags
	var reason string
	cmd := &cobra.Command{
		Use: "discard [ID...|--class ...|--all] --reason R", Short: "Give dead letters up: orders become rejected, units go back",
		RunE: func(cmd *cobra.Command, args []string) error {
			sel, err := l.selection(args)
			if err != nil {
				return err
			}
			if err := env.Confirm("discard dead letters"); err != nil {
				return err
			}
			c, err := env.Client()
			if err != nil {
				return err
			}
			defer c.Close()
			r, err := c.Discard(cmd.Context(), adminapi.DiscardRequest{LetterSelection: sel, Reason: reason, DryRun: env.DryRun})
			if err != nil {
				return fmt.Errorf("discard dead letters: %w", err)
			}
			err = env.Print(r, Table{
				Header: []string{"matched", "discarded", "resolved", "skipped", "failed"},
				Rows: [][]string{{
					strconv.Itoa(r.Matched), strconv.Itoa(r.Discarded), strconv.Itoa(r.Resolved), strconv.Itoa(r.Skipped), strconv.Itoa(r.Failed),
				}},
			})
			switch {
			case err != nil:
				return err
			case r.Matched == 0:
				env.Say("no open dead letter matched")
				return &ExitError{Code: CodeNothing}
			case env.DryRun:
				env.Say("would discard %d letters", r.Matched)
				return notOpen(sel, r.Matched)
			case r.Failed > 0 && r.Failed < r.Matched:
				return &ExitError{Code: CodePartly}
			case r.Failed > 0:
				return &ExitError{Code: CodeError}
			case r.Discarded+r.Resolved == 0:
				return &ExitError{Code: CodeNothing}
			}
			return notOpen(sel, r.Matched)
		},
	}
	l.bind(cmd, false, true)
	cmd.Flags().StringVar(&reason, "reason", "", "why; kept with the letter and in the audit")
	_ = cmd.MarkFlagRequired("reason")
	return cmd
}

func deadJobs(env *Env) *cobra.Command {
	var limit int
	cmd := &cobra.Command{
		Use: "jobs", Short: "List the latest replay jobs", Args: exactly(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := env.Client()
			if err != nil {
				return err
			}
			defer c.Close()
			l, err := c.ReplayJobs(cmd.Context(), limit)
			if err != nil {
				return fmt.Errorf("list replay jobs: %w", err)
			}
			return env.Print(l.Jobs, jobTable(l.Jobs...))
		},
	}
	cmd.Flags().IntVar(&limit, "limit", 50, "at most so many")
	return cmd
}

func letterTable(all ...adminapi.DeadLetter) Table {
	t := Table{Header: []string{
		"id", "state", "class", "queue", "routing_key", "message_id", "order_id", "activity_id", "attempt", "deaths", "first_at", "last_at", "error",
	}}
	for _, l := range all {
		t.Rows = append(t.Rows, []string{
			i64(l.ID), l.State, l.Class, l.Queue, l.RoutingKey, l.MessageID, l.OrderID, l.ActivityID, strconv.Itoa(l.Attempt), strconv.Itoa(l.Deaths),
			timeText(l.FirstAt), timeText(l.LastAt), short(l.Error, 120),
		})
	}
	return t
}

func jobTable(all ...adminapi.ReplayJob) Table {
	t := Table{Header: []string{"job_id", "state", "actor", "matched", "sent", "skipped", "failed", "created_at", "finished_at"}}
	for _, j := range all {
		t.Rows = append(t.Rows, []string{
			j.ID, j.State, j.Actor, strconv.Itoa(j.Matched), strconv.Itoa(j.Sent), strconv.Itoa(j.Skipped), strconv.Itoa(j.Failed),
			timeText(j.CreatedAt), timeText(j.FinishedAt),
		})
	}
	return t
}
