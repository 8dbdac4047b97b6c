package admin

import "net/http"

func (s *Server) routes() []Route {
	return []Route{
		{Method: http.MethodPost, Path: "/admin/v1/activities", Role: Operator, Handler: s.createActivity},
		{Method: http.MethodGet, Path: "/admin/v1/activities", Role: Viewer, Handler: s.listActivities},
		{Method: http.MethodGet, Path: "/admin/v1/activities/{id}", Role: Viewer, Handler: s.showActivity},
		{Method: http.MethodPut, Path: "/admin/v1/activities/{id}", Role: Operator, Handler: s.editActivity},
		{Method: http.MethodDelete, Path: "/admin/v1/activities/{id}", Role: Operator, Handler: s.deleteActivity},
		{Method: http.MethodPost, Path: "/admin/v1/activities/{id}/warm", Role: Operator, Handler: s.warmActivity},
		{Method: http.MethodPost, Path: "/admin/v1/activities/{id}/pause", Role: Operator, Handler: s.setPaused(true)},
		{Method: http.MethodPost, Path: "/admin/v1/activities/{id}/resume", Role: Operator, Handler: s.setPaused(false)},
		{Method: http.MethodGet, Path: "/admin/v1/activities/{id}/stock", Role: Viewer, Handler: s.showStock},
		{Method: http.MethodPost, Path: "/admin/v1/activities/{id}/stock", Role: Operator, Handler: s.addStock},
		{Method: http.MethodPost, Path: "/admin/v1/activities/{id}/qualifications", Role: Operator, Handler: s.qualify},
		{Method: http.MethodGet, Path: "/admin/v1/inventory", Role: Viewer, Handler: s.listInventory},
		{Method: http.MethodPut, Path: "/admin/v1/inventory", Role: Operator, Handler: s.setInventory},
		{Method: http.MethodGet, Path: "/admin/v1/orders", Role: Viewer, Handler: s.listOrders},
		{Method: http.MethodGet, Path: "/admin/v1/orders/{id}", Role: Viewer, Handler: s.showOrder},
		{Method: http.MethodPost, Path: "/admin/v1/orders/{id}/cancel", Role: Operator, Handler: s.cancelOrder},
		{Method: http.MethodPost, Path: "/admin/v1/orders/{id}/refund", Role: Operator, Handler: s.refundOrder},
		{Method: http.MethodGet, Path: "/admin/v1/orders/paid", Role: Viewer, Handler: s.paidOrders},
		{Method: http.MethodGet, Path: "/admin/v1/payments", Role: Viewer, Handler: s.listPayments},
		{Method: http.MethodPost, Path: "/admin/v1/payments/{txn}/settle-refund", Role: Operator, Handler: s.settleRefund},
		{Method: http.MethodGet, Path: "/admin/v1/dead-letters", Role: Viewer, Handler: s.listLetters},
		{Method: http.MethodGet, Path: "/admin/v1/dead-letters/{id}", Role: Viewer, Handler: s.showLetter},
		{Method: http.MethodGet, Path: "/admin/v1/dead-letters/groups", Role: Viewer, Handler: s.groupLetters},
		{Method: http.MethodPost, Path: "/admin/v1/dead-letters/discard", Role: Operator, Handler: s.discardLetters},
		{Method: http.MethodPost, Path: "/admin/v1/replay-jobs", Role: Operator, Handler: s.createReplay},
		{Method: http.MethodGet, Path: "/admin/v1/replay-jobs", Role: Viewer, Handler: s.listReplays},
		{Method: http.MethodGet, Path: "/admin/v1/replay-jobs/{id}", Role: Viewer, Handler: s.showReplay},
		{Method: http.MethodGet, Path: "/admin/v1/audit", Role: Viewer, Handler: s.listAudit},
	}
}
