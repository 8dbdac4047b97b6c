package command

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"

	"seckill/pkg/adminapi"
	"seckill/services/seckillctl/internal/adminclient"
)

func paymentCommand(env *Env) *cobra.Command {
	var status, orderID string
	var due bool
	list := &cobra.Command{
		Use: "list [--due-refund]", Short: "List payments", Args: exactly(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if due {
				if status != "" && status != adminapi.PaymentRefundDue {
					return usagef("--due-refund and --status %s contradict each other", status)
				}
				status = adminapi.PaymentRefundDue
			}
			switch status {
			case "", adminapi.PaymentKept, adminapi.PaymentApplied, adminapi.PaymentRefundDue, adminapi.PaymentSettled:
			default:
				return usagef("--status %q: one of kept, applied, refund_due, settled", status)
			}
			c, err := env.Client()
			if err != nil {
				return err
			}
			defer c.Close()
			all := []adminapi.Payment{}
			for cursor := ""; ; {
				page, err := c.Payments(cmd.Context(), status, orderID, cursor, 500)
				if err != nil {
					return fmt.Errorf("list payments: %w", err)
				}
				all = append(all, page.Payments...)
				if cursor = page.NextCursor; cursor == "" {
					break
				}
			}
			return env.Print(all, paymentTable(all...))
		},
	}
	list.Flags().StringVar(&status, "status", "", "only payments in this status")
	list.Flags().StringVar(&orderID, "order", "", "only payments of this order")
	list.Flags().BoolVar(&due, "due-refund", false, "only those whose money has to go back")

	var reason string
	settle := &cobra.Command{
		Use: "settle-refund TRANSACTION --reason R", Short: "Note that a payment's money has been sent back", Args: exactly("a transaction id"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := env.Confirm("note that the money of payment " + args[0] + " has been sent back"); err != nil {
				return err
			}
			c, err := env.Client()
			if err != nil {
				return err
			}
			defer c.Close()
			if env.DryRun {
				return wouldSettle(cmd.Context(), env, c, args[0])
			}
			r, err := c.SettleRefund(cmd.Context(), args[0], reason)
			if err != nil {
				return fmt.Errorf("settle payment %s: %w", args[0], err)
			}
			if r.Changed {
				env.Say("payment %s is settled", r.TransactionID)
			} else {
				env.Say("payment %s had been settled before, by %s", r.TransactionID, r.SettledBy)
			}
			return env.Print(r, paymentTable(r.Payment))
		},
	}
	settle.Flags().StringVar(&reason, "reason", "", "why, or the provider's reference; kept with the payment and in the audit")
	_ = settle.MarkFlagRequired("reason")
	return group("payment", "Payments and refunds that are due", list, settle)
}

func wouldSettle(ctx context.Context, env *Env, c *adminclient.Client, transaction string) error {
	l, err := c.Payment(ctx, transaction)
	if err != nil {
		return fmt.Errorf("look at payment %s: %w", transaction, err)
	}
	if len(l.Payments) == 0 {
		return &ExitError{Code: CodeNothing, Err: fmt.Errorf("there is no payment %s", transaction)}
	}
	switch status := l.Payments[0].Status; status {
	case adminapi.PaymentRefundDue:
		env.Say("would settle payment %s", transaction)
	case adminapi.PaymentSettled:
		env.Say("payment %s had been settled before, by %s", transaction, l.Payments[0].SettledBy)
	default:
		return fmt.Errorf("no refund is due: payment %s is %s", transaction, status)
	}
	return nil
}

func paymentTable(all ...adminapi.Payment) Table {
	t := Table{Header: []string{"transaction_id", "order_id", "amount_minor", "currency", "status", "reason", "received_at", "settled_at", "settled_by", "settle_reason"}}
	for _, p := range all {
		t.Rows = append(t.Rows, []string{
			p.TransactionID, p.OrderID, i64(p.AmountMinor), p.Currency, p.Status, p.Reason, timeText(p.ReceivedAt), timeText(p.SettledAt), p.SettledBy, p.SettleReason,
		})
	}
	return t
}
