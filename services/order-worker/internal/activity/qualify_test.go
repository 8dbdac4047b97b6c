package activity_test

import (
	"errors"
	"fmt"
	"net/http"
	"testing"

	"seckill/pkg/adminapi"
	"seckill/pkg/stock"
	"seckill/services/order-worker/internal/rig"
)

func TestOnlyImportedUsersTakePart(t *testing.T) {
	t.Parallel()
	r := rig.New(t, rig.Options{})
	plan := rig.Plan("sale", map[string]int{"national": 10})
	plan.Qualification, plan.Buckets = "list", 4
	r.Sell(plan)
	r.Sell(rig.Plan("all", map[string]int{"national": 10}))
	if _, err := r.Buy("sale", "u1", 1); !errors.Is(err, stock.ErrNotQualified) {
		t.Errorf("before the import: %v", err)
	}
	users := make([]string, adminapi.MaxQualify)
	for i := range users {
		users[i] = fmt.Sprintf("u%d", i/2) // each twice
	}
	for i, added := range []int{adminapi.MaxQualify / 2, 0} {
		var out adminapi.QualifyResult
		status, p := r.Call(rig.OperatorToken, http.MethodPost, "/admin/v1/activities/sale/qualifications", adminapi.QualifyRequest{Users: users}, &out)
		if status != http.StatusOK || out.Users != adminapi.MaxQualify || out.Added != added {
			t.Errorf("%d: %d %+v %+v", i, status, p, out)
		}
	}
	r.MustBuy("sale", "u1")
	r.MustBuy("sale", "u2499")
	if n := r.Count("SELECT COUNT(*) FROM qualifications WHERE activity_id = 'sale'"); n != adminapi.MaxQualify/2 {
		t.Errorf("%d rows", n)
	}
	for path, c := range map[string]struct {
		in   adminapi.QualifyRequest
		want int
	}{
		"sale/qualifications":   {adminapi.QualifyRequest{Users: []string{"fine", "a b"}}, 400},
		"all/qualifications":    {adminapi.QualifyRequest{Users: []string{"u"}}, 409},
		"nosuch/qualifications": {adminapi.QualifyRequest{Users: []string{"u"}}, 404},
	} {
		if status, p := r.Call(rig.OperatorToken, http.MethodPost, "/admin/v1/activities/"+path, c.in, nil); status != c.want {
			t.Errorf("%s: %d %+v", path, status, p)
		}
	}
	for _, in := range []adminapi.QualifyRequest{{}, {Users: append(users, "one-more")}} {
		if status, _ := r.Call(rig.OperatorToken, http.MethodPost, "/admin/v1/activities/sale/qualifications", in, nil); status != http.StatusBadRequest {
			t.Errorf("%d users: %d", len(in.Users), status)
		}
	}
}
