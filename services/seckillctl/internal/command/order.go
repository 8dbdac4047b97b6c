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
	var reason string
	var wait time.Duration
	cancel := &cobra.Command{
		Use: "cancel ORDER --reason R", Short: "Cancel an order that is not paid", Args: exactly("an order id"),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := env.Client()
			if err != nil {
				return err
			}
			defer c.Close()
			if env.DryRun {
				o, err := c.Order(cmd.Context(), args[0])
				if err != nil {
					return fmt.Errorf("cancel order %s: %w", args[0], err)
				}
				env.Say("would cancel order %s (now %s)", o.OrderID, o.Status)
				return env.Print(o, orderTable(o))
			}
			if err := env.Confirm("cancel order " + args[0]); err != nil {
				return err
			}
			r, err := c.CancelOrder(cmd.Context(), args[0], reason)
			if err != nil {
				return fmt.Errorf("cancel order %s: %w", args[0], err)
			}
			o, err := awaitOrder(cmd.Context(), c, args[0], wait, cancelDone)
			if err != nil {
				return fmt.Errorf("cancel order %s: %w", args[0], err)
			}
			switch status := order.Status(o.Status); {
			case status == order.Cancelled && r.Changed:
				env.Say("order %s is cancelled", o.OrderID)
			case status == order.Cancelled:
				env.Say("order %s had been cancelled before", o.OrderID)
			case status == order.Paid || status.Final():
				_ = env.Print(o, orderTable(o))
				return fmt.Errorf("cancel order %s: it is %s", o.OrderID, o.Status)
			default:
				env.Say("the cancel of order %s is queued; it is still %s", o.OrderID, o.Status)
			}
			return env.Print(o, orderTable(o))
		},
	}
	cancel.Flags().StringVar(&reason, "reason", "", "why; kept in the audit")
	cancel.Flags().DurationVar(&wait, "wait", 10*time.Second, "how long to wait for the cancel to be carried out")
	_ = cancel.MarkFlagRequired("reason")
	return cancel
}

func refundCommand(env *Env) *cobra.Command {
	var reason string
	var wait time.Duration
	refund := &cobra.Command{
		Use: "refund ORDER --reason R", Short: "Take a paid order back; its money becomes due for refund", Args: exactly("an order id"),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := env.Client()
			if err != nil {
				return err
			}
			defer c.Close()
			if env.DryRun {
				o, err := c.Order(cmd.Context(), args[0])
				if err != nil {
					return fmt.Errorf("refund order %s: %w", args[0], err)
				}
				env.Say("would refund order %s (now %s)", o.OrderID, o.Status)
				return env.Print(o, orderTable(o))
			}
			if err := env.Confirm("refund order " + args[0]); err != nil {
				return err
			}
			r, err := c.RefundOrder(cmd.Context(), args[0], reason)
			if err != nil {
				return fmt.Errorf("refund order %s: %w", args[0], err)
			}
			o, err := awaitOrder(cmd.Context(), c, args[0], wait, func(s order.Status) bool { return s.Final() })
			if err != nil {
				return fmt.Errorf("refund order %s: %w", args[0], err)
			}
			switch status := order.Status(o.Status); {
			case status == order.Refunded && r.Changed:
				env.Say("order %s is refunded", o.OrderID)
			case status == order.Refunded:
				env.Say("order %s had been refunded before", o.OrderID)
			case status.Final():
				_ = env.Print(o, orderTable(o))
				return fmt.Errorf("refund order %s: it is %s", o.OrderID, o.Status)
			default:
				env.Say("the refund of order %s is queued; it is still %s", o.OrderID, o.Status)
			}
			return env.Print(o, orderTable(o))
		},
	}
	refund.Flags().StringVar(&reason, "reason", "", "why, in any language; kept in the audit")
	refund.Flags().DurationVar(&wait, "wait", 10*time.Second, "how long to wait for the refund to be carried out")
	_ = refund.MarkFlagRequired("reason")
	return refund
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
