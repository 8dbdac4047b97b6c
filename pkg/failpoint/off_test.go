//go:build !failpoints

package failpoint

import (
	"context"
	"errors"
	"testing"
)

func TestWithoutTheTagNothingCanBeArmed(t *testing.T) {
	t.Setenv("SECKILL_FAILPOINTS", "x=panic")
	if err := Hit(context.Background(), "x"); err != nil {
		t.Error(err)
	}
	if _, err := Arm("x=error"); !errors.Is(err, ErrDisabled) {
		t.Errorf("Arm: %v", err)
	}
}
