package rebuild_test

import (
	"testing"

	"seckill/pkg/testkit"
)

func TestMain(m *testing.M) { testkit.VerifyNoLeaks(m) }
