package rebuild

import (
	"errors"
	"net/http"
	"time"

	"seckill/pkg/adminapi"
	"seckill/services/order-worker/internal/admin"
)

// Routes are the admin API's calls of this package.
func (s *Service) Routes() []admin.Route {
	const path = "/admin/v1/activities/{id}/rebuild"
	return []admin.Route{
		{Method: http.MethodPost, Path: path, Role: admin.Operator, Timeout: 3 * time.Minute, Handler: s.request},
		{Method: http.MethodGet, Path: path, Role: admin.Viewer, Handler: s.show},
	}
}

func (s *Service) request(w http.ResponseWriter, r *http.Request) error {
	var in adminapi.RebuildRequest
	if r.ContentLength != 0 {
		if err := admin.Decode(r, &in); err != nil {
			return err
		}
	}
	id := r.PathValue("id")
	if in.DryRun {
		plan, err := s.Plan(r.Context(), id)
		if err != nil {
			return err
		}
		return admin.WriteJSON(w, http.StatusOK, adminapi.Rebuild{ActivityID: id, DryRun: true, State: adminapi.RebuildDone, Result: &plan})
	}
	out, err := s.Request(r.Context(), id, admin.ActorFrom(r.Context()))
	if err != nil {
		return err
	}
	return admin.WriteJSON(w, http.StatusAccepted, out)
}

func (s *Service) show(w http.ResponseWriter, r *http.Request) error {
	out, err := s.Show(r.Context(), r.PathValue("id"))
	if errors.Is(err, ErrNotFound) {
		return admin.NewProblem(http.StatusNotFound, adminapi.CodeRebuildNotFound, "this activity was never rebuilt")
	}
	if err != nil {
		return err
	}
	return admin.WriteJSON(w, http.StatusOK, out)
}
