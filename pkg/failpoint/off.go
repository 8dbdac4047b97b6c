//go:build !failpoints

package failpoint

import "context"

// Enabled says whether fail points are built in.
const Enabled = false

// Hit marks a place where a test may make the program fail.
func Hit(context.Context, string) error { return nil }

// Arm arms fail points from inside the process; here it refuses.
func Arm(string) (disarm func(), err error) { return func() {}, ErrDisabled }
