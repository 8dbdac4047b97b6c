package httpapi

import (
	"maps"
	"sync/atomic"
	"time"

	"seckill/pkg/order"
)

// wishes remembers what bodies said that were read strictly once. In a flash sale a million buyers
// send the same few bodies to the letter, and reading JSON strictly costs more than comparing it. Only
// good bodies are kept, and few of them, so that a stranger's cannot fill the memory.
type wishes struct {
	known atomic.Pointer[wishMap]
}

type wishMap struct {
	bodies map[string]reserveBody // never written after it was published
	since  time.Time
}

const (
	maxWishes  = 64
	maxWish    = 256         // bytes of a body that is kept
	wishesTurn = time.Minute // a full memory is emptied after this time
)

func (w *wishes) decode(body []byte) (reserveBody, error) {
	m := w.known.Load()
	if m != nil {
		if in, ok := m.bodies[string(body)]; ok { // does not allocate
			return in, nil
		}
	}
	// A region that is absent is the default; null and "" are not the same as absent.
	in := reserveBody{Region: order.DefaultRegion}
	if err := decode(body, &in); err != nil {
		return in, err
	}
	if len(body) <= maxWish {
		w.keep(m, string(body), in)
	}
	return in, nil
}

// keep publishes a copy with one more body. Two that do it at once lose one of them, to be kept when
// it comes again.
func (w *wishes) keep(m *wishMap, body string, in reserveBody) {
	next := &wishMap{since: time.Now()}
	switch {
	case m == nil, len(m.bodies) >= maxWishes && time.Since(m.since) > wishesTurn:
		next.bodies = map[string]reserveBody{body: in}
	case len(m.bodies) >= maxWishes:
		return
	default:
		next.bodies, next.since = maps.Clone(m.bodies), m.since
		next.bodies[body] = in
	}
	w.known.CompareAndSwap(m, next)
}
