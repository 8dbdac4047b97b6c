package command

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sort"
	"strconv"

	"github.com/oklog/ulid/v2"
	"github.com/spf13/cobra"

	"seckill/pkg/adminapi"
	"seckill/pkg/order"
	"seckill/pkg/sale"
	"seckill/services/seckillctl/internal/adminclient"
)

func stockCommand(env *Env) *cobra.Command {
	show := &cobra.Command{
		Use: "show ACTIVITY", Short: "Show a sale's stock per sku and pool", Args: exactly("an activity id"),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := env.Client()
			if err != nil {
				return err
			}
			defer c.Close()
			rows, err := c.Stock(cmd.Context(), args[0])
			if err != nil {
				return fmt.Errorf("show stock of %s: %w", args[0], err)
			}
			t := Table{Header: []string{"sku_id", "pool", "allocated", "available", "withheld", "redis_available"}}
			for _, r := range rows {
				redis := "missing"
				if r.RedisAvailable != nil {
					redis = i64(*r.RedisAvailable)
				}
				t.Rows = append(t.Rows, []string{r.SKU, r.Pool, i64(r.Allocated), i64(r.Available), i64(r.Withheld), redis})
			}
			return env.Print(rows, t)
		},
	}
	return group("stock", "Stock of sales", show, addStockCommand(env))
}

func addStockCommand(env *Env) *cobra.Command {
	var in adminapi.AddStockRequest
	add := &cobra.Command{
		Use: "add ACTIVITY --sku S --pool P --quantity N", Short: "Add units to a pool of a sale, from the inventory", Args: exactly("an activity id"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if in.Quantity < 1 || in.Quantity > sale.MaxUnits {
				return usagef("--quantity must be 1 to %d", sale.MaxUnits)
			}
			if in.OpID == "" {
				in.OpID = ulid.Make().String()
			}
			if !order.ValidTransactionID(in.OpID) {
				return usagef("op-id must be 1 to 64 of A-Za-z0-9_-")
			}
			table := func(r adminapi.AddStockResult) Table {
				return Table{
					Header: []string{"activity_id", "op_id", "sku_id", "pool", "quantity", "already", "waiting", "allocated", "available"},
					Rows: [][]string{{
						r.ActivityID, r.OpID, r.SKU, r.Pool, i64(r.Quantity), strconv.FormatBool(r.Already), strconv.FormatBool(r.Waiting), i64(r.Allocated), i64(r.Available),
					}},
				}
			}
			c, err := env.Client()
			if err != nil {
				return err
			}
			defer c.Close()
			if env.DryRun {
				r, err := wouldAdd(cmd.Context(), c, args[0], in)
				if err != nil {
					return fmt.Errorf("add stock to %s: %w", args[0], err)
				}
				env.Say("would add %d units of %s to %s of activity %s", in.Quantity, in.SKU, in.Pool, args[0])
				return env.Print(r, table(r))
			}
			// Before the call: whoever does not get the answer repeats it with this id.
			env.Say("operation %s (to repeat it: --op-id %s)", in.OpID, in.OpID)
			r, err := c.AddStock(cmd.Context(), args[0], in)
			if err != nil {
				return fmt.Errorf("add stock to %s: %w", args[0], err)
			}
			switch {
			case r.Waiting:
				env.Say("booked; the units are not on sale yet, and will be by themselves")
			case r.Already:
				env.Say("this operation was done before")
			}
			return env.Print(r, table(r))
		},
	}
	add.Flags().StringVar(&in.SKU, "sku", "", "sku")
	add.Flags().StringVar(&in.Pool, "pool", "", "pool")
	add.Flags().Var((*decimal)(&in.Quantity), "quantity", "units to add")
	add.Flags().StringVar(&in.OpID, "op-id", "", "operation id; made up if not given")
	for _, name := range []string{"sku", "pool", "quantity"} {
		_ = add.MarkFlagRequired(name)
	}
	return add
}

// wouldAdd looks at the pool that units are to be added to, as it is now, and at what the warehouse holds.
func wouldAdd(ctx context.Context, c *adminclient.Client, id string, in adminapi.AddStockRequest) (adminapi.AddStockResult, error) {
	r := adminapi.AddStockResult{ActivityID: id, OpID: in.OpID, SKU: in.SKU, Pool: in.Pool, Quantity: in.Quantity}
	rows, err := c.Stock(ctx, id)
	if err != nil {
		return r, err
	}
	at := slices.IndexFunc(rows, func(row adminapi.StockRow) bool { return row.SKU == in.SKU && row.Pool == in.Pool })
	if at < 0 {
		return r, &ExitError{Code: CodeNothing, Err: fmt.Errorf("the sale has no pool %s of %s", in.Pool, in.SKU)}
	}
	r.Allocated, r.Available = rows[at].Allocated, rows[at].Available
	l, err := c.Inventory(ctx)
	if err != nil {
		return r, err
	}
	for _, row := range l.Inventory {
		if row.SKU == in.SKU && row.Pool == in.Pool && row.OnHand < in.Quantity {
			return r, fmt.Errorf("the inventory holds %d units of %s in %s", row.OnHand, in.SKU, in.Pool)
		}
	}
	return r, nil
}

func inventoryCommand(env *Env) *cobra.Command {
	list := &cobra.Command{
		Use: "list", Short: "List what the warehouses hold outside sales", Args: exactly(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := env.Client()
			if err != nil {
				return err
			}
			defer c.Close()
			l, err := c.Inventory(cmd.Context())
			if err != nil {
				return fmt.Errorf("list inventory: %w", err)
			}
			return env.Print(l.Inventory, inventoryTable(l.Inventory...))
		},
	}
	var row adminapi.InventoryRow
	set := &cobra.Command{
		Use: "set --sku S --pool P --quantity N", Short: "Set what the warehouses hold of a sku in a pool", Args: exactly(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if row.OnHand < 0 || row.OnHand > sale.MaxUnits {
				return usagef("--quantity must be 0 to %d", sale.MaxUnits)
			}
			if !order.ValidSKUID(row.SKU) {
				return usagef("--sku must be 1 to %d of A-Za-z0-9_-", order.MaxSKUID)
			}
			if !order.ValidPool(row.Pool) {
				return usagef("--pool must be 1 to %d of a-z0-9_-", order.MaxPool)
			}
			if err := env.Confirm(fmt.Sprintf("set inventory of %s in %s to %d", row.SKU, row.Pool, row.OnHand)); err != nil {
				return err
			}
			if env.DryRun {
				env.Say("would set the inventory")
				return env.Print(row, inventoryTable(row))
			}
			c, err := env.Client()
			if err != nil {
				return err
			}
			defer c.Close()
			now, err := c.SetInventory(cmd.Context(), row)
			if err != nil {
				return fmt.Errorf("set inventory of %s in %s: %w", row.SKU, row.Pool, err)
			}
			return env.Print(now, inventoryTable(now))
		},
	}
	set.Flags().StringVar(&row.SKU, "sku", "", "sku")
	set.Flags().StringVar(&row.Pool, "pool", "", "pool")
	set.Flags().Var((*decimal)(&row.OnHand), "quantity", "units")
	for _, name := range []string{"sku", "pool", "quantity"} {
		_ = set.MarkFlagRequired(name)
	}
	return group("inventory", "Stock outside sales", list, set)
}

func inventoryTable(rows ...adminapi.InventoryRow) Table {
	t := Table{Header: []string{"sku_id", "pool", "on_hand"}}
	for _, r := range rows {
		t.Rows = append(t.Rows, []string{r.SKU, r.Pool, i64(r.OnHand)})
	}
	return t
}

func sortedPools(m map[string]int) []string {
	keys := make([]string, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	sort.Strings(keys)
	return keys
}

// decimal is a flag of decimal digits: the library's own numbers take 010 for 8.
type decimal int64

// Set implements pflag.Value.
func (d *decimal) Set(text string) error {
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil || strconv.FormatInt(n, 10) != text {
		return errors.New("not a whole number in decimal digits")
	}
	*d = decimal(n)
	return nil
}

// String implements pflag.Value.
func (d *decimal) String() string { return strconv.FormatInt(int64(*d), 10) }

// Type implements pflag.Value.
func (*decimal) Type() string { return "int" }
