package testkit

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"
)

// StartRedis starts a private redis-server; args are passed on, e.g. "--appendonly", "yes".
// Without arguments it keeps nothing on disk.
func StartRedis(t testing.TB, args ...string) *Server {
	t.Helper()
	program, err := findProgram("redis-server", "valkey-server")
	if err != nil {
		t.Fatal("this test starts a Redis of its own: redis-server is not on this machine")
	}
	return startServer(t, func(t testing.TB) *Server {
		port := strconv.Itoa(FreePort(t))
		dir := t.TempDir()
		return &Server{
			Addr: "127.0.0.1:" + port, Dir: dir, t: t, name: "redis", within: 60 * time.Second,
			command: func() *exec.Cmd {
				return exec.Command(program, append([]string{
					"--bind", "127.0.0.1", "--port", port, "--dir", dir, "--save", "",
				}, args...)...)
			},
			ready: func(addr string) error {
				b, err := exchange(addr, "PING\r\n")
				if err != nil {
					return err
				}
				if bytes.HasPrefix(b, []byte("-LOADING")) {
					return errors.New("still loading")
				}
				return nil
			},
		}
	})
}

// RabbitServer is a private broker.
type RabbitServer struct {
	*Server
	URL string // amqp://guest:guest@host:port/

	ctl string
	env []string
}

// StartRabbitMQ starts a private broker; conf are further lines of rabbitmq.conf. It takes some
// 5 to 10 s, so tests of a package that need one should share it.
func StartRabbitMQ(t testing.TB, conf ...string) *RabbitServer {
	t.Helper()
	// The distribution's wrapper changes to another user; the programs behind it do not.
	program, err := findProgram("/usr/lib/rabbitmq/bin/rabbitmq-server", "rabbitmq-server")
	if err != nil {
		t.Fatal("this test starts a RabbitMQ of its own: rabbitmq-server is not on this machine")
	}
	ctl, err := findProgram("/usr/lib/rabbitmq/bin/rabbitmqctl", "rabbitmqctl")
	if err != nil {
		t.Fatal("this test starts a RabbitMQ of its own: rabbitmqctl is not on this machine")
	}
	epmd, err := findProgram("epmd")
	if err != nil {
		t.Fatal("this test starts a RabbitMQ of its own: epmd (Erlang) is not on this machine")
	}
	rabbit := &RabbitServer{ctl: ctl}
	rabbit.Server = startServer(t, func(t testing.TB) *Server {
		dir := t.TempDir()
		port := strconv.Itoa(FreePort(t))
		epmdPort := startEpmd(t, epmd, dir)
		write(t, filepath.Join(dir, ".erlang.cookie"), uniqueName()+uniqueName(), 0o400)
		write(t, filepath.Join(dir, "rabbitmq-env.conf"), "", 0o600)
		write(t, filepath.Join(dir, "enabled_plugins"), "[].\n", 0o600)
		write(t, filepath.Join(dir, "rabbitmq.conf"), strings.Join(append([]string{
			"listeners.tcp.local = 127.0.0.1:" + port,
			"disk_free_limit.absolute = 50MB",
			"log.file = false",
			"log.console = true",
			"log.console.level = info",
		}, conf...), "\n")+"\n", 0o600)
		rabbit.URL = "amqp://guest:guest@127.0.0.1:" + port + "/"
		rabbit.env = append(withoutRabbitEnv(os.Environ()),
			"HOME="+dir,
			"RABBITMQ_NODENAME=t"+uniqueName()+"@localhost",
			"RABBITMQ_CONF_ENV_FILE="+filepath.Join(dir, "rabbitmq-env.conf"),
			"RABBITMQ_CONFIG_FILE="+filepath.Join(dir, "rabbitmq.conf"),
			"RABBITMQ_ENABLED_PLUGINS_FILE="+filepath.Join(dir, "enabled_plugins"),
			"RABBITMQ_MNESIA_BASE="+filepath.Join(dir, "mnesia"),
			"RABBITMQ_LOG_BASE="+filepath.Join(dir, "log"),
			"RABBITMQ_PID_FILE="+filepath.Join(dir, "pid"),
			"RABBITMQ_DIST_PORT="+strconv.Itoa(FreePort(t)),
			"ERL_EPMD_PORT="+epmdPort,
			"ERL_EPMD_ADDRESS=127.0.0.1",
			"ERL_CRASH_DUMP=/dev/null",
			// Schedulers that have nothing to do sleep instead of spinning: the processors are shared
			// (rabbitmq.com/docs/runtime, "reducing CPU usage").
			"RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS=+sbwt none +sbwtdcpu none +sbwtdio none",
			"ERL_FLAGS=-kernel inet_dist_use_interface {127,0,0,1}",
			// The script then becomes the Erlang machine in place of minding it, so that our
			// signals reach the broker itself.
			"detached=true",
		)
		env := rabbit.env
		return &Server{
			Addr: "127.0.0.1:" + port, Dir: dir, t: t, name: "rabbitmq", within: 300 * time.Second,
			command: func() *exec.Cmd {
				cmd := exec.Command(program)
				cmd.Env, cmd.Dir = env, dir
				return cmd
			},
			ready: func(addr string) error {
				b, err := exchange(addr, "AMQP\x00\x00\x09\x01")
				if err != nil {
					return err
				}
				if b[0] != 1 { // a method frame: connection.start
					return fmt.Errorf("unexpected answer %q", b)
				}
				return nil
			},
		}
	})
	return rabbit
}

// Ctl runs rabbitmqctl against this broker and returns what it printed.
func (r *RabbitServer) Ctl(args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), ctlTime)
	defer cancel()
	cmd := exec.CommandContext(ctx, r.ctl, append([]string{"--quiet"}, args...)...)
	cmd.Env, cmd.Dir = r.env, r.Dir
	out, err := cmd.CombinedOutput()
	if err != nil {
		return string(out), fmt.Errorf("rabbitmqctl %s: %w: %s", strings.Join(args, " "), err, bytes.TrimSpace(out))
	}
	return string(out), nil
}

// startEpmd runs a port mapper for one broker, in the foreground: one that the broker starts by
// itself turns into a daemon and stays behind.
func startEpmd(t testing.TB, program, dir string) (port string) {
	t.Helper()
	s := startServer(t, func(t testing.TB) *Server {
		port = strconv.Itoa(FreePort(t))
		return &Server{
			Addr: "127.0.0.1:" + port, Dir: dir, t: t, name: "epmd", within: 60 * time.Second,
			command: func() *exec.Cmd {
				cmd := exec.Command(program, "-port", port, "-address", "127.0.0.1")
				cmd.Env = withoutRabbitEnv(os.Environ())
				return cmd
			},
			ready: func(addr string) error {
				_, err := exchange(addr, "\x00\x01n") // names
				return err
			},
		}
	})
	_ = s
	return port
}

func withoutRabbitEnv(all []string) []string {
	var out []string
	for _, kv := range all {
		if !strings.HasPrefix(kv, "RABBITMQ_") && !strings.HasPrefix(kv, "ERL_") && !strings.HasPrefix(kv, "HOME=") {
			out = append(out, kv)
		}
	}
	return out
}

// MySQLServer is a private MySQL or MariaDB.
type MySQLServer struct {
	*Server
	target mysqlTarget
}

// StartMySQL starts a private mariadbd, or mysqld 8 where that is what the machine has; args are
// passed on, e.g. "--max-connections=20". root has no password.
func StartMySQL(t testing.TB, args ...string) *MySQLServer {
	t.Helper()
	program, err := findProgram("mariadbd", "/usr/sbin/mariadbd", "mysqld", "/usr/sbin/mysqld")
	if err != nil {
		t.Fatal("this test starts a MySQL of its own: neither mariadbd nor mysqld is on this machine")
	}
	version, err := exec.Command(program, "--no-defaults", "--version").Output()
	if err != nil {
		t.Fatalf("ask %s for its version: %v", program, err)
	}
	maria := bytes.Contains(version, []byte("MariaDB"))
	m := &MySQLServer{target: mysqlTarget{user: "root", host: "127.0.0.1"}}
	m.Server = startServer(t, func(t testing.TB) *Server {
		dir := t.TempDir()
		data := filepath.Join(dir, "data")
		port := strconv.Itoa(FreePort(t))
		m.target.port = port
		common := []string{"--no-defaults", "--datadir=" + data, "--user=" + env("USER", "root")}
		if os.Geteuid() == 0 {
			common[2] = "--user=root"
		}
		install := exec.Command(program, append(common, "--initialize-insecure")...)
		if maria {
			installer, err := findProgram("mariadb-install-db", "mysql_install_db")
			if err != nil {
				t.Fatal("this test starts a MariaDB of its own: mariadb-install-db is not on this machine")
			}
			install = exec.Command(installer, append(common, "--auth-root-authentication-method=normal", "--skip-test-db")...)
		}
		install.SysProcAttr = childAttr()
		if out, err := install.CombinedOutput(); err != nil {
			t.Fatalf("set up a private MySQL: %v\n%s", err, out)
		}
		run := append(append([]string{}, common...),
			"--bind-address=127.0.0.1", "--port="+port, "--socket="+filepath.Join(dir, "s"),
			"--pid-file="+filepath.Join(dir, "pid"), "--skip-name-resolve",
			"--innodb-buffer-pool-size=64M", "--character-set-server=utf8mb4")
		if !maria {
			run = append(run, "--mysqlx=0")
		}
		run = append(run, args...)
		return &Server{
			Addr: "127.0.0.1:" + port, Dir: dir, t: t, name: "mysql", within: 180 * time.Second,
			command: func() *exec.Cmd { return exec.Command(program, run...) },
			ready: func(string) error {
				_, err := m.target.exec("SELECT 1")
				return err
			},
		}
	})
	return m
}

// DSN leads to a schema of this server, in the form of go-sql-driver/mysql; the schema is made if
// it is not there yet. An empty name gives a DSN without schema.
func (m *MySQLServer) DSN(schema string) string {
	m.t.Helper()
	if schema != "" {
		if _, err := m.Exec("CREATE DATABASE IF NOT EXISTS `" + schema + "` CHARACTER SET utf8mb4"); err != nil {
			m.t.Fatalf("create schema %s: %v", schema, err)
		}
	}
	return m.target.dsn(schema)
}

// Exec runs SQL through the command line client; rows come back tab-separated, without a header.
func (m *MySQLServer) Exec(sql string) (string, error) { return m.target.exec(sql) }

func write(t testing.TB, path, text string, mode os.FileMode) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), mode); err != nil {
		t.Fatal(err)
	}
}
