package store

import (
	"errors"
	"regexp"
	"slices"

	"github.com/go-sql-driver/mysql"
)

// Refused is something that cannot be written.
type Refused[T any] struct {
	Of  T
	Err error
}

// ErrUndecidable means that what decides about an order cannot be read: somebody has damaged it.
var ErrUndecidable = errors.New("cannot be decided")

// triggerCodes are what a trigger of the shop's own can bring into our statements when something that it
// needs is gone.
var triggerCodes = map[uint16]bool{
	1146: true, // table does not exist; one of ours would be our trouble
	1305: true, // routine does not exist
	1356: true, // view is broken
	1370: true, // routine may not be executed
	1442: true, // table is in use by the statement that fired it
	1449: true, // definer does not exist
}

// Refuses reports whether err says that this cannot be written now, while others of the same batch may be
// fine: the values are wrong, a key, a trigger or a guard stands against them, a figure they would change
// or depend on is damaged. Everything else is the server's or the way's trouble: wait, spend no attempt,
// try again. Callers for whom a duplicate key is news look for it first.
func Refuses(err error) bool {
	if IsContent(err) || errors.Is(err, ErrGuard) || errors.Is(err, ErrUndecidable) {
		return true
	}
	var me *mysql.MySQLError
	if !errors.As(err, &me) {
		return false
	}
	switch sqlClass(me) {
	case "21", "23", "45": // cardinality, integrity, SIGNAL
		return true
	}
	return triggerCodes[me.Number] && !ours.MatchString(me.Message)
}

// ours finds the name of one of our tables in an error message.
var ours = regexp.MustCompile(`\.(activities|activity_items|activity_stock|inventory|orders|payments|stock_ledger|compensations|user_holdings|` +
	`qualifications|dead_letters|replay_jobs|replay_items|operator_audit|paid_orders|feed_positions|rebuilds|rebuild_barriers|schema_migrations)['` + "`" + `]`)

// Each does things in batches of up to limit, each batch a transaction that do opens and commits. What
// MySQL refuses is found by halving, so that it holds up nobody else; any other error says nothing of
// the things and ends it. Things that were done before may be done again: do must be idempotent.
func Each[T any](things []T, limit int, do func([]T) error) ([]Refused[T], error) {
	var out []Refused[T]
	for batch := range slices.Chunk(things, limit) {
		err := do(batch)
		switch {
		case err == nil:
		case !Refuses(err):
			return out, err
		case len(batch) == 1:
			out = append(out, Refused[T]{batch[0], err})
		default:
			r, err := Each(batch, (len(batch)+1)/2, do)
			out = append(out, r...)
			if err != nil {
				return out, err
			}
		}
	}
	return out, nil
}
