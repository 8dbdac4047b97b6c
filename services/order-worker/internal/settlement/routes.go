package settlement

import (
	"net/http"
	"time"

	"seckill/pkg/adminapi"
	"seckill/services/order-worker/internal/admin"
)

// Routes are the admin API's calls of this package.
func (s *Service) Routes() []admin.Route {
	return []admin.Route{
		{Method: http.MethodPost, Path: "/admin/v1/activities/{id}/end", Role: admin.Operator, Handler: s.endActivity},
		{Method: http.MethodGet, Path: "/admin/v1/activities/{id}/report", Role: admin.Viewer, Timeout: time.Minute, Handler: s.reportActivity},
	}
}

func (s *Service) endActivity(w http.ResponseWriter, r *http.Request) error {
	var in adminapi.EndRequest
	if r.ContentLength != 0 {
		if err := admin.Decode(r, &in); err != nil {
			return err
		}
	}
	if in.Reason != "" {
		if err := admin.CheckReason(in.Reason); err != nil {
			return err
		}
	}
	id := r.PathValue("id")
	begun, err := s.End(r.Context(), id, admin.ActorFrom(r.Context()), in.Reason)
	if err != nil {
		return err
	}
	d, err := s.sales.Load(r.Context(), id)
	if err != nil {
		return err
	}
	return admin.WriteJSON(w, http.StatusAccepted, adminapi.EndResult{ActivityID: id, Already: !begun, State: d.State})
}

func (s *Service) reportActivity(w http.ResponseWriter, r *http.Request) error {
	report, err := s.Report(r.Context(), r.PathValue("id"))
	if err != nil {
		return err
	}
	return admin.WriteJSON(w, http.StatusOK, report)
}
