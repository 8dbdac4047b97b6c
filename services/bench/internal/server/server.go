package server

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"regexp"
	"strconv"
	"strings"

	"seckill/pkg/testkit"
)

// Settings under which every figure is measured.
var (
	redisSettings = []string{
		"--appendonly", "yes", "--appendfsync", "everysec", "--maxmemory-policy", "noeviction",
		// A measurement fills an empty Redis: with the default of 64 MB it would rewrite its log
		// several times within seconds, which no grown store does.
		"--auto-aof-rewrite-min-size", "4gb",
		// So that the longest scripts of the run can be told (microseconds, entries).
		"--slowlog-log-slower-than", "5000", "--slowlog-max-len", "1000",
	}
	mysqlSettings = []string{
		"--innodb-flush-log-at-trx-commit=1", "--innodb-buffer-pool-size=1G", "--innodb-log-file-size=1G",
		"--max-connections=300", "--transaction-isolation=READ-COMMITTED",
	}
)

// Services are the private servers of one run.
type Services struct {
	Redis  *testkit.Server
	Rabbit *testkit.RabbitServer
	MySQL  *testkit.MySQLServer
	DSN    string // of the run's schema

	host *host
}

// Start starts all three. scratch takes their files.
func Start(scratch string) (*Services, error) {
	h := &host{scratch: scratch}
	s := &Services{host: h}
	err := h.try(func() {
		s.Redis = testkit.StartRedis(h, redisSettings...)
		s.MySQL = testkit.StartMySQL(h, mysqlSettings...)
		s.DSN = s.MySQL.DSN("seckill")
		s.Rabbit = testkit.StartRabbitMQ(h)
	})
	if err != nil {
		h.close()
		return nil, err
	}
	return s, nil
}

// Port finds a free port on the loopback.
func (s *Services) Port() (port int, err error) {
	err = s.host.try(func() { port = testkit.FreePort(s.host) })
	return port, err
}

// Close ends the servers.
func (s *Services) Close() { s.host.close() }

// Settings tells what the servers were started with, for the record.
func Settings() map[string]string {
	return map[string]string{
		"redis":    strings.Join(redisSettings, " "),
		"mysql":    strings.Join(mysqlSettings, " "),
		"rabbitmq": "durable quorum queues, persistent messages, publisher confirms, mandatory; one node; schedulers without busy waiting",
	}
}

// Versions asks the servers and tools what they are.
func (s *Services) Versions(ctx context.Context) map[string]string {
	out := map[string]string{}
	run := func(name, program string, args ...string) {
		text, err := exec.CommandContext(ctx, program, args...).CombinedOutput()
		var exit *exec.ExitError
		if err != nil && !errors.As(err, &exit) { // wrk -v ends with 1
			return
		}
		line, _, _ := strings.Cut(strings.TrimSpace(string(text)), "\n")
		out[name] = line
	}
	run("redis", "redis-server", "--version")
	run("mysql", "mariadbd", "--version")
	run("wrk", "wrk", "-v")
	run("go", "go", "version")
	run("kernel", "uname", "-sr")
	if text, err := s.Rabbit.Ctl("version"); err == nil {
		out["rabbitmq"] = strings.TrimSpace(text)
	}
	return out
}

var octets = regexp.MustCompile(`^(\d+)\s+(\d+)$`)

// RabbitBytes is what all connections of the broker have received and sent so far.
func (s *Services) RabbitBytes() (received, sent int64, err error) {
	text, err := s.Rabbit.Ctl("list_connections", "recv_oct", "send_oct")
	if err != nil {
		return 0, 0, err
	}
	for line := range strings.SplitSeq(text, "\n") {
		m := octets.FindStringSubmatch(strings.TrimSpace(line))
		if m == nil {
			continue
		}
		r, err1 := strconv.ParseInt(m[1], 10, 64)
		t, err2 := strconv.ParseInt(m[2], 10, 64)
		if err := errors.Join(err1, err2); err != nil {
			return 0, 0, fmt.Errorf("read bytes of broker connections: %w", err)
		}
		received += r
		sent += t
	}
	return received, sent, nil
}
