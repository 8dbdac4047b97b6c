package command

import (
	"context"
	"fmt"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"seckill/pkg/adminapi"
	"seckill/pkg/order"
	"seckill/services/seckillctl/internal/adminclient"
)

func orderCommand(env *Env) *cobra.Command {
	var f adminclient.OrderFilter
	var limit int
	list := &cobra.Command{
		Use: "list ACTIVITY", Short: "List a sale's orders", Args: exactly("an activity id"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if limit < 0 {
				return usagef("limit must not be negative")
			}
			if f.Status != "" {
				if _, err := order.ParseStatus(f.Status); err != nil {
					return usagef("--status: %w", err)
				}
			}
			c, err := env.Client()
			if err != nil {
				return err
			}
			defer c.Close()
			f.ActivityID = args[0]
			all := []adminapi.Order{}
			for cursor := ""; ; {
				size := 500
				if limit > 0 {
					size = min(size, limit-len(all))
				}
				page, err := c.Orders(cmd.Context(), f, cursor, size)
				if err != nil {
					return fmt.Errorf("list orders of %s: %w", args[0], err)
				}
				all = append(all, page.Orders...)
				if cursor = page.NextCursor; cursor == "" || limit > 0 && len(all) >= limit {
					break
				}
			}
			return env.Print(all, orderTable(all...))
		},
	}
	list.Flags().StringVar(&f.Status, "status", "", "only orders in this status")
	list.Flags().StringVar(&f.UserID, "user", "", "only this user's orders")
	list.Flags().IntVar(&limit, "limit", 0, "at most so many (0: all)")

	show := &cobra.Command{
		Use: "show ORDER", Short: "Show an order", Args: exactly("an order id"),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := env.Client()
			if err != nil {
				return err
			}
			defer c.Close()
			o, err := c.Order(cmd.Context(), args[0])
			if err != nil {
				return fmt.Errorf("show order %s: %w", args[0], err)
			}
			return env.Print(o, orderTable(o))
		},
	}
	return group("order", "Orders", list, show, cancelCommand(env), refundCommand(env))
}

func cancelCommand(env *Env) *cobra.Command {
	return takeBack{
		verb: "cancel", short: "Cancel an order that is not paid", reason: "why; kept in the audit", to: order.Cancelled, done: cancelDone,
		ask: func(ctx context.Context, c *adminclient.Client, id, reason string) (bool, error) {
			r, err := c.CancelOrder(ctx, id, reason)
			return r.Changed, err
		},
	}.command(env)
}

func refundCommand(env *Env) *cobra.Command {
	return takeBack{
		verb: "refund", short: "Take a paid order back; its money becomes due for refund", reason: "why, in any language; kept in the audit",
		to: order.Refunded, done: order.Status.Final,
		ask: func(ctx context.Context, c *adminclient.Client, id, reason string) (bool, error) {
			r, err := c.RefundOrder(ctx, id, reason)
			return r.Changed, err
		},
	}.command(env)
}

// takeBack is a command that asks the worker for an order and waits until it was carried out.
type takeBack struct {
	verb, short, reason string
	to                  order.Status
	done                func(order.Status) bool // nothing will change any more
	ask                 func(ctx context.Context, c *adminclient.Client, id, reason string) (changed bool, err error)
}

func (t takeBack) command(env *Env) *cobra.Command {
	var reason string
	var wait time.Duration
	cmd := &cobra.Command{
		Use: t.verb + " ORDER --reason R", Short: t.short, Args: exactly("an order id"),
		RunE: env.act(act{verb: t.verb, kind: "order", look: lookAtOrder, do: func(ctx context.Context, c *adminclient.Client, id string) error {
			changed, err := t.ask(ctx, c, id, reason)
			if err != nil {
				return err
			}
			o, err := awaitOrder(ctx, c, id, wait, t.done)
			if err != nil {
				return err
			}
			switch status := order.Status(o.Status); {
			case status == t.to && changed:
				env.Say("order %s is %s", o.OrderID, t.to)
			case status == t.to:
				env.Say("order %s had been %s before", o.OrderID, t.to)
			case t.done(status):
				_ = env.Print(o, orderTable(o))
				return fmt.Errorf("it is %s", o.Status)
			case wait > 0:
				_ = env.Print(o, orderTable(o))
				return &ExitError{Code: CodePartly, Err: fmt.Errorf("the %s of order %s is queued, it is still %s after %s", t.verb, o.OrderID, o.Status, wait)}
			default:
				env.Say("the %s of order %s is queued; it is still %s", t.verb, o.OrderID, o.Status)
			}
			return env.Print(o, orderTable(o))
		}}),
	}
	cmd.Flags().StringVar(&reason, "reason", "", t.reason)
	cmd.Flags().DurationVar(&wait, "wait", 10*time.Second, "how long to wait for the "+t.verb+" to be carried out")
	_ = cmd.MarkFlagRequired("reason")
	return cmd
}

func lookAtOrder(ctx context.Context, c *adminclient.Client, id string) (string, any, Table, error) {
	o, err := c.Order(ctx, id)
	return o.Status, o, orderTable(o), err
}

// cancelDone says that a cancel will not change anything any more.
func cancelDone(s order.Status) bool { return s.Final() || s == order.Paid }

// awaitOrder reads the order until it is done, or wait is over.
func awaitOrder(ctx context.Context, c *adminclient.Client, id string, wait time.Duration, done func(order.Status) bool) (adminapi.Order, error) {
	end := time.Now().Add(wait)
	for pause := 20 * time.Millisecond; ; pause = min(pause*2, time.Second) {
		o, err := c.Order(ctx, id)
		if err != nil {
			return o, err
		}
		if done(order.Status(o.Status)) || time.Now().After(end) {
			return o, nil
		}
		select {
		case <-ctx.Done():
			return o, ctx.Err()
		case <-time.After(pause):
		}
	}
}

func orderTable(all ...adminapi.Order) Table {
	t := Table{Header: []string{
		"order_id", "activity_id", "user_id", "sku_id", "region", "pool", "quantity", "amount_minor", "currency",
		"status", "reason", "refund_due", "reserved_at", "pay_before",
	}}
	for _, o := range all {
		t.Rows = append(t.Rows, []string{
			o.OrderID, o.ActivityID, o.UserID, o.SKU, o.Region, o.Pool, strconv.Itoa(o.Quantity), i64(o.AmountMinor), o.Currency,
			o.Status, o.Reason, strconv.FormatBool(o.RefundDue), timeText(o.ReservedAt), timeText(o.PayBefore),
		})
	}
	return t
}
