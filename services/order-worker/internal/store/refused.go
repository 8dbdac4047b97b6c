package store

import (
	"errors"
	"slices"
)

// Refused is something that cannot be written.
type Refused[T any] struct {
	Of  T
	Err error
}

// ErrUndecidable means that what decides about an order cannot be read: somebody has damaged it.
var ErrUndecidable = errors.New("cannot be decided")

// Refuses reports whether err says that this cannot be written, whoever asks and how often: the values
// are wrong, a trigger or a guard stands against them, a figure they would change or depend on is
// damaged. Others of the same batch may be fine.
func Refuses(err error) bool {
	return IsContent(err) || errors.Is(err, ErrGuard) || errors.Is(err, ErrUndecidable)
}

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
