package admin

import (
	"net/http"
	"strconv"

	"seckill/pkg/adminapi"
)

func letterFilter(r *http.Request) adminapi.LetterFilter {
	q := r.URL.Query()
	return adminapi.LetterFilter{
		State: q.Get("state"), Class: q.Get("class"), Queue: q.Get("queue"),
		ActivityID: q.Get("activity_id"), OrderID: q.Get("order_id"), Query: q.Get("q"),
	}
}

func (s *Server) listLetters(w http.ResponseWriter, r *http.Request) error {
	limit, cursor, err := pageOf(r)
	if err != nil {
		return err
	}
	var before int64
	if cursor != "" {
		if before, err = strconv.ParseInt(cursor, 10, 64); err != nil || before < 1 {
			return invalid("cursor is not valid")
		}
	}
	found, err := s.deps.Letters.List(r.Context(), letterFilter(r), before, limit+1)
	if err != nil {
		return err
	}
	out := adminapi.DeadLetterList{DeadLetters: []adminapi.DeadLetter{}}
	if len(found) > limit {
		found = found[:limit]
		out.NextCursor = strconv.FormatInt(found[limit-1].ID, 10)
	}
	out.DeadLetters = append(out.DeadLetters, found...)
	return WriteJSON(w, http.StatusOK, out)
}

func (s *Server) showLetter(w http.ResponseWriter, r *http.Request) error {
	id, err := strconv.ParseInt(r.PathValue("id"), 10, 64)
	if err != nil {
		return NewProblem(http.StatusNotFound, adminapi.CodeLetterNotFound, "there is no such dead letter")
	}
	l, err := s.deps.Letters.Show(r.Context(), id)
	if err != nil {
		return err
	}
	return WriteJSON(w, http.StatusOK, l)
}

func (s *Server) groupLetters(w http.ResponseWriter, r *http.Request) error {
	groups, err := s.deps.Letters.Groups(r.Context(), letterFilter(r))
	if err != nil {
		return err
	}
	return WriteJSON(w, http.StatusOK, adminapi.DeadLetterGroups{Groups: groups})
}

func (s *Server) discardLetters(w http.ResponseWriter, r *http.Request) error {
	var in adminapi.DiscardRequest
	if err := Decode(r, &in); err != nil {
		return err
	}
	if err := CheckReason(in.Reason); err != nil {
		return err
	}
	out, err := s.deps.Letters.Discard(r.Context(), in.LetterSelection, in.Reason, in.DryRun, ActorFrom(r.Context()))
	if err != nil {
		return err
	}
	return WriteJSON(w, http.StatusOK, out)
}

func (s *Server) createReplay(w http.ResponseWriter, r *http.Request) error {
	var in adminapi.ReplayRequest
	if err := Decode(r, &in); err != nil {
		return err
	}
	if in.DryRun {
		out, err := s.deps.Letters.Preview(r.Context(), in.LetterSelection)
		if err != nil {
			return err
		}
		return WriteJSON(w, http.StatusOK, out)
	}
	job, err := s.deps.Letters.Replay(r.Context(), in.LetterSelection, ActorFrom(r.Context()))
	if err != nil {
		return err
	}
	w.Header().Set("Location", "/admin/v1/replay-jobs/"+job.ID)
	return WriteJSON(w, http.StatusCreated, job)
}

func (s *Server) listReplays(w http.ResponseWriter, r *http.Request) error {
	limit, _, err := pageOf(r)
	if err != nil {
		return err
	}
	jobs, err := s.deps.Letters.Jobs(r.Context(), limit)
	if err != nil {
		return err
	}
	return WriteJSON(w, http.StatusOK, adminapi.ReplayJobList{Jobs: jobs})
}

func (s *Server) showReplay(w http.ResponseWriter, r *http.Request) error {
	job, err := s.deps.Letters.Job(r.Context(), r.PathValue("id"))
	if err != nil {
		return err
	}
	return WriteJSON(w, http.StatusOK, job)
}
