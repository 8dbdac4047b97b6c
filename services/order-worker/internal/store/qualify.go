package store

import (
	"context"
	"fmt"
)

// InsertQualifications lets users take part in a sale and says how many of them could not before.
// users are sorted and named once: two imports lock their rows in the same order.
func InsertQualifications(ctx context.Context, q Querier, activity string, users []string) (added int, err error) {
	err = chunks(users, func(users []string) error {
		w := sqlBuf{}
		w.raw("SELECT user_id FROM qualifications WHERE activity_id=").str(activity).raw(" AND user_id IN ").list(users)
		rows, err := q.QueryContext(ctx, w.String())
		if err != nil {
			return fmt.Errorf("read qualifications: %w", err)
		}
		known, err := scanStrings(rows, "read qualifications")
		if err != nil {
			return err
		}
		w = sqlBuf{}
		w.raw("INSERT INTO qualifications (activity_id,user_id) VALUES ")
		for i, u := range users {
			if i > 0 {
				w.comma()
			}
			w.raw("(").str(activity).comma().str(u).raw(")")
		}
		w.raw(" ON DUPLICATE KEY UPDATE user_id=VALUES(user_id)")
		if _, err := q.ExecContext(ctx, w.String()); err != nil {
			return fmt.Errorf("insert %d qualifications: %w", len(users), err)
		}
		added += len(users) - len(known)
		return nil
	})
	return added, err
}
