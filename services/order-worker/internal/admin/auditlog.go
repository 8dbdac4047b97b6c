package admin

import (
	"fmt"
	"net/http"
	"strconv"

	"seckill/pkg/adminapi"
	"seckill/services/order-worker/internal/audit"
	"seckill/services/order-worker/internal/store"
)

func (s *Server) listAudit(w http.ResponseWriter, r *http.Request) error {
	limit, cursor, err := pageOf(r)
	if err != nil {
		return err
	}
	q := s.deps.Store.DB(r.Context()).Order("id DESC").Limit(limit + 1)
	if cursor != "" {
		before, err := strconv.ParseInt(cursor, 10, 64)
		if err != nil {
			return invalid("cursor is not valid")
		}
		q = q.Where("id < ?", before)
	}
	for _, field := range []string{"actor", "action"} {
		if v := r.URL.Query().Get(field); v != "" {
			q = q.Where(field+" = ?", v)
		}
	}
	if v := r.URL.Query().Get("target"); v != "" {
		q = q.Where("subject = ?", v)
	}
	var rows []store.Audit
	if err := q.Find(&rows).Error; err != nil {
		return fmt.Errorf("list audit: %w", err)
	}
	out := adminapi.AuditList{Entries: []adminapi.AuditEntry{}}
	if len(rows) > limit {
		rows = rows[:limit]
		out.NextCursor = strconv.FormatInt(rows[limit-1].ID, 10)
	}
	for _, row := range rows {
		e := adminapi.AuditEntry{
			ID: strconv.FormatInt(row.ID, 10), At: row.At, Actor: row.Actor, Role: row.Role, Action: row.Action, Target: row.Subject,
			Reason: row.Reason, Result: row.Result, Remote: row.Remote,
		}
		e.RequestID, e.Before, e.After = audit.Detail(row.Detail)
		out.Entries = append(out.Entries, e)
	}
	return WriteJSON(w, http.StatusOK, out)
}
