package acceptance

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"seckill/pkg/testkit"
)

// make up uses the server that already listens, starts the two that are missing, may be run again,
// and make down ends those two and leaves the first alone.
func TestUpStartsWhatIsMissingAndDownEndsOnlyThat(t *testing.T) {
	redis := testkit.StartRedis(t)
	state := t.TempDir()
	rabbitAddr := fmt.Sprintf("127.0.0.1:%d", testkit.FreePort(t))
	mysqlAddr := fmt.Sprintf("127.0.0.1:%d", testkit.FreePort(t))
	script := func(name string) string {
		t.Helper()
		cmd := exec.Command("../../deploy/local/" + name)
		cmd.Env = append(withoutOwnSettings(os.Environ()),
			"SECKILL_UP_RUN="+state, "SECKILL_UP_NAME=uptest", "SECKILL_UP_DOCKER=no",
			"SECKILL_UP_REDIS_ADDR="+redis.Addr, "SECKILL_UP_RABBITMQ_ADDR="+rabbitAddr, "SECKILL_UP_MYSQL_ADDR="+mysqlAddr)
		// Not a pipe: the servers that it starts would hold it open.
		out, err := os.Create(filepath.Join(state, name+".out"))
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = out.Close() }()
		cmd.Stdout, cmd.Stderr = out, out
		err = cmd.Run()
		text, _ := os.ReadFile(out.Name())
		t.Logf("%s:\n%s", name, text)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		return string(text)
	}
	t.Cleanup(func() { killAll(t, state) })

	first := script("up.sh")
	for _, want := range []string{
		"redis: " + redis.Addr + ", was already running",
		"rabbitmq: " + rabbitAddr + ", started from the distribution's package",
		"mysql: " + mysqlAddr + ", started from the distribution's package",
		"user and schema uptest are there", "user and vhost uptest are there",
	} {
		if !strings.Contains(first, want) {
			t.Errorf("it does not say %q", want)
		}
	}
	pids := pidFiles(t, state)
	if len(pids) != 3 { // RabbitMQ has its port mapper beside it
		t.Errorf("it keeps %d processes in mind: %v", len(pids), pids)
	}
	second := script("up.sh")
	if !strings.Contains(second, "rabbitmq: "+rabbitAddr+", started earlier by make up") {
		t.Error("the second run does not know what the first has started")
	}
	if again := pidFiles(t, state); fmt.Sprint(again) != fmt.Sprint(pids) {
		t.Errorf("the second run started something: %v, then %v", pids, again)
	}
	env, err := os.ReadFile(filepath.Join(state, "env"))
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"SECKILL_REDIS_ADDRS=" + redis.Addr, "@" + rabbitAddr + "/uptest", mysqlAddr, "SECKILL_TEST_RABBITMQCTL=",
		"SECKILL_AUTH_JWT_SECRET=", "SECKILL_ADMIN_TOKENS=local:operator:",
	} {
		if !strings.Contains(string(env), want) {
			t.Errorf("the environment that it writes lacks %q", want)
		}
	}

	script("down.sh")
	for name, pid := range pids {
		testkit.Eventually(t, 5*time.Second, func() error {
			if syscall.Kill(pid, 0) == nil {
				return fmt.Errorf("%s (%d) still runs", name, pid)
			}
			return nil
		})
	}
	if syscall.Kill(redis.PID, 0) != nil {
		t.Error("the server that was there before has ended")
	}
}

// withoutOwnSettings leaves out what a developer has set for programs and tests.
func withoutOwnSettings(all []string) []string {
	var out []string
	for _, kv := range all {
		if !strings.HasPrefix(kv, "SECKILL") {
			out = append(out, kv)
		}
	}
	return out
}

func pidFiles(t *testing.T, state string) map[string]int {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(state, "pid", "*"))
	if err != nil {
		t.Fatal(err)
	}
	pids := map[string]int{}
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		pid, err := strconv.Atoi(strings.Fields(string(b))[0])
		if err != nil {
			t.Fatal(err)
		}
		pids[filepath.Base(f)] = pid
	}
	return pids
}

// killAll is for a test that failed before its down.
func killAll(t *testing.T, state string) {
	for _, pid := range pidFiles(t, state) {
		_ = syscall.Kill(-pid, syscall.SIGKILL)
	}
}
