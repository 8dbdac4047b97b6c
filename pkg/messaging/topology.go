package messaging

import (
	"context"
	"fmt"
)

// TopologyMismatchError says that the broker holds a queue or exchange with other arguments. Nothing
// was changed or deleted: an operator has to decide what becomes of what lies in it.
type TopologyMismatchError struct {
	Queue    string // queue or exchange
	Argument string
	Wanted   string
	Found    string
	Text     string // the broker's own words
}

// Error names queue, argument, wanted and found.
func (e *TopologyMismatchError) Error() string {
	return fmt.Sprintf("topology: %s has %s = %s, wanted %s; nothing was changed", e.Queue, e.Argument, e.Found, e.Wanted)
}

// Unwrap makes it an ErrTopology.
func (e *TopologyMismatchError) Unwrap() error { return ErrTopology }

// Declare declares the whole topology (worker only). It waits for a connection until ctx ends. From
// then on the client declares it again after each reconnect and whenever something seems to be gone.
func (c *Client) Declare(ctx context.Context) error { return ErrNotConnected }

// Check looks passively whether what order-api publishes to is there, and sets State().Topology. From
// then on the client looks again by itself. An error is ErrNotConnected or an ErrTopology.
func (c *Client) Check(ctx context.Context) error { return ErrNotConnected }
