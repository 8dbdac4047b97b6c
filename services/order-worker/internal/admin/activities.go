package admin

import (
	"context"
	"errors"
	"fmt"
	"net/http"

	"seckill/pkg/adminapi"
	"seckill/pkg/order"
	"seckill/pkg/sale"
	"seckill/pkg/stock"
	"seckill/services/order-worker/internal/activity"
)

func toActivity(d *activity.Details) adminapi.Activity {
	return adminapi.Activity{
		Sale: d.Plan(), State: d.State, Paused: d.Paused, WarmNumber: d.WarmWinner, Epoch: d.Epoch, CreatedAt: d.CreatedAt, Problem: d.Problem,
	}
}

func (s *Server) createActivity(w http.ResponseWriter, r *http.Request) error {
	var in sale.Written
	if err := Decode(r, &in); err != nil {
		return err
	}
	plan := in.Sale()
	d, existed, err := s.deps.Activities.Create(r.Context(), plan, ActorFrom(r.Context()))
	if err != nil {
		return err
	}
	out := toActivity(d)
	w.Header().Set("Location", "/admin/v1/activities/"+d.ID)
	if existed {
		return WriteJSON(w, http.StatusOK, out)
	}
	return WriteJSON(w, http.StatusCreated, out)
}

func (s *Server) editActivity(w http.ResponseWriter, r *http.Request) error {
	var in sale.Written
	if err := Decode(r, &in); err != nil {
		return err
	}
	plan := in.Sale()
	if plan.ID != r.PathValue("id") {
		return invalid("the plan's id is not the one in the path")
	}
	d, changed, err := s.deps.Activities.Edit(r.Context(), plan, ActorFrom(r.Context()))
	if err != nil {
		return err
	}
	out := toActivity(d)
	return WriteJSON(w, http.StatusOK, adminapi.EditResult{Activity: out, Changed: changed})
}

func (s *Server) listActivities(w http.ResponseWriter, r *http.Request) error {
	limit, cursor, err := pageOf(r)
	if err != nil {
		return err
	}
	out, err := s.activityPage(r.Context(), cursor, limit)
	if err != nil {
		return err
	}
	return WriteJSON(w, http.StatusOK, out)
}

func (s *Server) activityPage(ctx context.Context, cursor string, limit int) (adminapi.ActivityList, error) {
	out := adminapi.ActivityList{Activities: []adminapi.Activity{}}
	found, err := s.deps.Activities.List(ctx, cursor, limit+1)
	if err != nil {
		return out, err
	}
	if len(found) > limit {
		found = found[:limit]
		out.NextCursor = found[limit-1].ID
	}
	for _, d := range found {
		out.Activities = append(out.Activities, toActivity(d))
	}
	return out, nil
}

func (s *Server) showActivity(w http.ResponseWriter, r *http.Request) error {
	d, err := s.deps.Activities.Load(r.Context(), r.PathValue("id"))
	if err != nil {
		return err
	}
	return WriteJSON(w, http.StatusOK, s.withRedis(r.Context(), d))
}

// withRedis adds what Redis says. What MySQL says is worth showing even when Redis does not answer.
func (s *Server) withRedis(ctx context.Context, d *activity.Details) adminapi.Activity {
	out := toActivity(d)
	out.Redis = &adminapi.ActivityRedis{}
	switch now, err := s.deps.Activities.InRedis(ctx, d.ID); {
	case errors.Is(err, stock.ErrActivityNotFound):
	case err != nil:
		out.Redis.Error = err.Error()
	default:
		*out.Redis = adminapi.ActivityRedis{Announced: true, Warm: now.Warm, Opened: now.Opened, Paused: now.Paused, Ended: now.Ended}
	}
	return out
}

func (s *Server) deleteActivity(w http.ResponseWriter, r *http.Request) error {
	id := r.PathValue("id")
	if err := s.deps.Activities.Delete(r.Context(), id, ActorFrom(r.Context())); err != nil {
		return err
	}
	return WriteJSON(w, http.StatusOK, adminapi.DeleteResult{ActivityID: id, Deleted: true})
}

func (s *Server) warmActivity(w http.ResponseWriter, r *http.Request) error {
	id := r.PathValue("id")
	res, err := s.deps.Activities.Warm(r.Context(), id, ActorFrom(r.Context()))
	if err != nil {
		return err
	}
	return WriteJSON(w, http.StatusOK, adminapi.WarmResult{ActivityID: id, Already: res.Already, Number: res.Number, Opened: res.Opened})
}

func (s *Server) setPaused(paused bool) HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) error {
		id := r.PathValue("id")
		changed, err := s.deps.Activities.SetPaused(r.Context(), id, paused, ActorFrom(r.Context()))
		if err != nil {
			return err
		}
		return WriteJSON(w, http.StatusOK, adminapi.PauseResult{ActivityID: id, Paused: paused, Changed: changed})
	}
}

func (s *Server) showStock(w http.ResponseWriter, r *http.Request) error {
	d, err := s.deps.Activities.Load(r.Context(), r.PathValue("id"))
	if err != nil {
		return err
	}
	levels, err := s.deps.Activities.Levels(r.Context(), d)
	if err != nil {
		return err
	}
	return WriteJSON(w, http.StatusOK, stockRows(d, levels))
}

func stockRows(d *activity.Details, levels map[string]map[string]int) []adminapi.StockRow {
	out := []adminapi.StockRow{}
	for _, p := range d.Pools {
		row := adminapi.StockRow{SKU: p.SKU, Pool: p.Pool, Allocated: p.Allocated, Available: p.Available, Withheld: p.Withheld}
		if n, ok := levels[p.SKU][p.Pool]; ok {
			units := int64(n)
			row.RedisAvailable = &units
		}
		out = append(out, row)
	}
	return out
}

func (s *Server) addStock(w http.ResponseWriter, r *http.Request) error {
	var in adminapi.AddStockRequest
	if err := Decode(r, &in); err != nil {
		return err
	}
	switch {
	case !order.ValidTransactionID(in.OpID):
		return invalid("op_id must be 1 to 64 of A-Za-z0-9_-")
	case in.Quantity < 1 || in.Quantity > sale.MaxUnits:
		return invalid(fmt.Sprintf("quantity must be 1 to %d", sale.MaxUnits))
	}
	if err := checkPool(in.SKU, in.Pool); err != nil {
		return err
	}
	id := r.PathValue("id")
	add := activity.Addition{Op: in.OpID, SKU: in.SKU, Pool: in.Pool, Units: in.Quantity}
	res, err := s.deps.Activities.AddStock(r.Context(), id, add, ActorFrom(r.Context()))
	if err != nil {
		return err
	}
	status := http.StatusOK
	if res.Waiting {
		status = http.StatusAccepted
	}
	return WriteJSON(w, status, adminapi.AddStockResult{
		ActivityID: id, OpID: in.OpID, SKU: in.SKU, Pool: in.Pool, Quantity: in.Quantity,
		Already: res.Already, Waiting: res.Waiting, Allocated: res.Allocated, Available: res.Available,
	})
}

func (s *Server) qualify(w http.ResponseWriter, r *http.Request) error {
	var in adminapi.QualifyRequest
	if err := Decode(r, &in); err != nil {
		return err
	}
	if len(in.Users) < 1 || len(in.Users) > adminapi.MaxQualify {
		return invalid(fmt.Sprintf("users must be 1 to %d", adminapi.MaxQualify))
	}
	for i, u := range in.Users {
		if !order.ValidUserID(u) {
			return invalid(fmt.Sprintf("users[%d] is not a user id", i))
		}
	}
	id := r.PathValue("id")
	added, err := s.deps.Activities.Qualify(r.Context(), id, in.Users, ActorFrom(r.Context()))
	if err != nil {
		return err
	}
	return WriteJSON(w, http.StatusOK, adminapi.QualifyResult{ActivityID: id, Users: len(in.Users), Added: added})
}

func (s *Server) listInventory(w http.ResponseWriter, r *http.Request) error {
	rows, err := s.deps.Activities.Inventory(r.Context())
	if err != nil {
		return err
	}
	out := adminapi.InventoryList{Inventory: []adminapi.InventoryRow{}}
	for _, row := range rows {
		out.Inventory = append(out.Inventory, adminapi.InventoryRow{SKU: row.SKUID, Pool: row.Pool, OnHand: row.OnHand})
	}
	return WriteJSON(w, http.StatusOK, out)
}

func (s *Server) setInventory(w http.ResponseWriter, r *http.Request) error {
	var in adminapi.SetInventoryRequest
	if err := Decode(r, &in); err != nil {
		return err
	}
	if err := checkPool(in.SKU, in.Pool); err != nil {
		return err
	}
	if in.OnHand == nil || *in.OnHand < 0 || *in.OnHand > sale.MaxUnits {
		return invalid(fmt.Sprintf("on_hand has to be given, 0 to %d", sale.MaxUnits))
	}
	if _, err := s.deps.Activities.SetInventory(r.Context(), in.SKU, in.Pool, *in.OnHand, ActorFrom(r.Context())); err != nil {
		return err
	}
	return WriteJSON(w, http.StatusOK, adminapi.InventoryRow{SKU: in.SKU, Pool: in.Pool, OnHand: *in.OnHand})
}

func checkPool(sku, pool string) error {
	switch {
	case !order.ValidSKUID(sku):
		return invalid(fmt.Sprintf("sku_id must be 1 to %d of A-Za-z0-9_-", order.MaxSKUID))
	case !order.ValidPool(pool):
		return invalid(fmt.Sprintf("pool must be 1 to %d of a-z0-9_-", order.MaxPool))
	}
	return nil
}
