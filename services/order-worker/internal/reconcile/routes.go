package reconcile

import (
	"errors"
	"net/http"
	"time"

	"seckill/pkg/adminapi"
	"seckill/pkg/stock"
	"seckill/services/order-worker/internal/admin"
	"seckill/services/order-worker/internal/audit"
)

// Routes are the admin API's calls of this package.
func (s *Service) Routes() []admin.Route {
	return []admin.Route{
		{Method: http.MethodPost, Path: "/admin/v1/activities/{id}/reconcile", Role: admin.Operator, Timeout: 3 * time.Minute, Handler: s.reconcile},
	}
}

func (s *Service) reconcile(w http.ResponseWriter, r *http.Request) error {
	var in adminapi.ReconcileRequest
	if r.ContentLength != 0 {
		if err := admin.Decode(r, &in); err != nil {
			return err
		}
	}
	id := r.PathValue("id")
	res, err := s.Reconcile(r.Context(), id, in.Repair)
	if errors.Is(err, ErrSettled) {
		return admin.NewProblem(http.StatusConflict, adminapi.CodeNothingToCompare, "the activity is settled or was never warmed: there is nothing to compare")
	}
	if errors.Is(err, stock.ErrNotWarmed) || errors.Is(err, stock.ErrActivityNotFound) {
		return admin.NewProblem(http.StatusConflict, adminapi.CodeRedisLost, "redis has lost the sale, or it is being rebuilt: there is nothing to compare; rebuild it")
	}
	if err != nil {
		return err
	}
	if in.Repair {
		if err := audit.Write(r.Context(), s.st.SQL(), admin.ActorFrom(r.Context()), audit.Entry{Action: "activity.reconcile", Subject: id, Result: "done", After: res}); err != nil {
			return err
		}
	}
	return admin.WriteJSON(w, http.StatusOK, res)
}
