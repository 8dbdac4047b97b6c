package command

import (
	"fmt"
	"sort"

	"github.com/spf13/cobra"

	"seckill/pkg/adminapi"
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
	return group("stock", "Stock of sales", show)
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
	set.Flags().Int64Var(&row.OnHand, "quantity", 0, "units")
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
