package lifecycle

import (
	"context"
	"sync"
)

// State of a program as a load balancer sees it.
type State string

// States. Only Ready takes traffic, and only while no check forbids it.
const (
	Starting State = "starting"
	Ready    State = "ready"
	Draining State = "draining"
)

// Check is what one check says. One that is not OK makes the program not ready only when it is
// Required; otherwise it is shown and nothing more (a blocked broker must not take every replica away).
type Check struct {
	OK       bool   `json:"ok"`
	Required bool   `json:"required"`
	Detail   string `json:"detail,omitempty"`
}

// Report is the body of /readyz.
type Report struct {
	Ready  bool             `json:"ready"`
	State  State            `json:"state"`
	Checks map[string]Check `json:"checks"`
}

// Readiness collects the checks of a program. It is safe for concurrent use.
type Readiness struct {
	mu     sync.Mutex
	state  State
	checks map[string]func(context.Context) Check
}

// NewReadiness starts in the state Starting.
func NewReadiness() *Readiness {
	return &Readiness{state: Starting, checks: map[string]func(context.Context) Check{}}
}

// Add adds a check, or replaces the one of that name. It runs at each question, so it answers from
// memory.
func (r *Readiness) Add(name string, check func(context.Context) Check) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.checks[name] = check
}

// SetReady says that the start is over. It changes nothing once draining.
func (r *Readiness) SetReady() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.state == Starting {
		r.state = Ready
	}
}

// SetDraining says that the program is about to stop; there is no way back.
func (r *Readiness) SetDraining() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.state = Draining
}

// Report asks all checks.
func (r *Readiness) Report(ctx context.Context) Report {
	r.mu.Lock()
	state := r.state
	checks := make(map[string]func(context.Context) Check, len(r.checks))
	for name, c := range r.checks {
		checks[name] = c
	}
	r.mu.Unlock()
	out := Report{Ready: state == Ready, State: state, Checks: make(map[string]Check, len(checks))}
	for name, c := range checks {
		result := c(ctx)
		out.Checks[name] = result
		if result.Required && !result.OK {
			out.Ready = false
		}
	}
	return out
}
