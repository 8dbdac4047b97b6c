package config

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// password has every character that a URL or a DSN gives a meaning to (O30).
const password = "p?a#b/c@d%e f+g"

type sample struct {
	HTTP struct {
		Addr    string        `mapstructure:"addr" help:"where buyers connect"`
		Timeout time.Duration `mapstructure:"read_timeout"`
		CORS    []string      `mapstructure:"cors_origins"`
		Trusted bool          `mapstructure:"trusted"`
	} `mapstructure:"http"`
	Redis struct {
		Addrs    []string `mapstructure:"addrs"`
		DB       int      `mapstructure:"db"`
		Name     string   `mapstructure:"master_name"`
		Password Secret   `mapstructure:"password"`
		TLS      struct {
			Enabled bool    `mapstructure:"enabled"`
			Share   float64 `mapstructure:"share"`
			Port    uint16  `mapstructure:"port"`
		} `mapstructure:"tls"`
	} `mapstructure:"redis"`
	RabbitMQ struct {
		URL   Secret          `mapstructure:"url"`
		Tiers []time.Duration `mapstructure:"tiers"`
	} `mapstructure:"rabbitmq"`
	Payment struct {
		Secrets []Secret `mapstructure:"secrets"`
		Old     string   `mapstructure:"old" config:"secret"`
	} `mapstructure:"payment"`
	Log struct {
		Level slog.Level `mapstructure:"level"`
	} `mapstructure:"log"`
}

func sampleDefaults() sample {
	var s sample
	s.HTTP.Addr, s.HTTP.Timeout = ":8080", 5*time.Second
	s.Redis.Addrs = []string{"127.0.0.1:6379"}
	s.Redis.TLS.Port = 6380
	return s
}

const sampleFile = `
http: {addr: ":1", read_timeout: 1s, cors_origins: [https://file.example], trusted: false}
redis:
  addrs: [file:1]
  db: 1
  master_name: file
  password: file
  tls: {enabled: false, share: 0.1, port: 1}
rabbitmq: {url: "amqp://file", tiers: [1s]}
payment: {secrets: [file], old: file}
log: {level: warn}
`

func writeFile(t *testing.T, name, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func quiet(t *testing.T, args ...string) Options {
	return Options{Args: args, Warn: func(s string) { t.Log(s) }}
}

// O30: each setting comes through by the environment alone, with and without a file that sets it to
// something else, and a flag goes before both.
func TestEverySettingIsTakenFromTheEnvironmentAndFromFlags(t *testing.T) {
	cases := []struct {
		env, flag, value string
		got              func(sample) any
		want             any
	}{
		{"SECKILL_HTTP_ADDR", "http-addr", ":9", func(s sample) any { return s.HTTP.Addr }, ":9"},
		{"SECKILL_HTTP_READ_TIMEOUT", "http-read-timeout", "1m30s", func(s sample) any { return s.HTTP.Timeout }, 90 * time.Second},
		{"SECKILL_HTTP_CORS_ORIGINS", "http-cors-origins", "https://a.example, https://b.example", func(s sample) any { return s.HTTP.CORS }, []string{"https://a.example", "https://b.example"}},
		{"SECKILL_HTTP_TRUSTED", "http-trusted", "true", func(s sample) any { return s.HTTP.Trusted }, true},
		{"SECKILL_REDIS_ADDRS", "redis-addrs", "a:1,b:2", func(s sample) any { return s.Redis.Addrs }, []string{"a:1", "b:2"}},
		{"SECKILL_REDIS_DB", "redis-db", "7", func(s sample) any { return s.Redis.DB }, 7},
		{"SECKILL_REDIS_MASTER_NAME", "redis-master-name", "007", func(s sample) any { return s.Redis.Name }, "007"},
		{"SECKILL_REDIS_PASSWORD", "redis-password", password, func(s sample) any { return s.Redis.Password.Reveal() }, password},
		{"SECKILL_REDIS_TLS_ENABLED", "redis-tls-enabled", "1", func(s sample) any { return s.Redis.TLS.Enabled }, true},
		{"SECKILL_REDIS_TLS_SHARE", "redis-tls-share", "0.25", func(s sample) any { return s.Redis.TLS.Share }, 0.25},
		{"SECKILL_REDIS_TLS_PORT", "redis-tls-port", "65535", func(s sample) any { return s.Redis.TLS.Port }, uint16(65535)},
		{"SECKILL_RABBITMQ_URL", "rabbitmq-url", "amqp://u:" + password + "@h/", func(s sample) any { return s.RabbitMQ.URL.Reveal() }, "amqp://u:" + password + "@h/"},
		{"SECKILL_RABBITMQ_TIERS", "rabbitmq-tiers", "1s,15m", func(s sample) any { return s.RabbitMQ.Tiers }, []time.Duration{time.Second, 15 * time.Minute}},
		{"SECKILL_PAYMENT_SECRETS", "payment-secrets", "one,two", func(s sample) any { return s.Payment.Secrets }, []Secret{"one", "two"}},
		{"SECKILL_PAYMENT_OLD", "payment-old", password, func(s sample) any { return s.Payment.Old }, password},
		{"SECKILL_LOG_LEVEL", "log-level", "debug", func(s sample) any { return s.Log.Level }, slog.LevelDebug},
	}
	leaves, err := collect(reflect.ValueOf(new(sample)).Elem(), "", "SECKILL")
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range leaves {
		covered := f.isFile
		for _, c := range cases {
			covered = covered || c.env == f.env
		}
		if !covered {
			t.Errorf("no case for %s", f.env)
		}
	}
	for _, c := range cases {
		for _, withFile := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/file=%v", c.env, withFile), func(t *testing.T) {
				var args []string
				if withFile {
					args = append(args, "--config", writeFile(t, "c.yaml", sampleFile))
				}
				check := func(args []string) {
					t.Helper()
					s, err := Load(sampleDefaults(), quiet(t, args...))
					if err != nil {
						t.Fatal(err)
					}
					if got := c.got(s); !reflect.DeepEqual(got, c.want) {
						t.Errorf("got %v, want %v", got, c.want)
					}
				}
				t.Run("environment", func(t *testing.T) {
					t.Setenv(c.env, c.value)
					check(args)
				})
				t.Run("flag", func(t *testing.T) {
					if c.env != "SECKILL_LOG_LEVEL" {
						t.Setenv(c.env, "3")
					}
					check(append(args, "--"+c.flag+"="+c.value))
				})
			})
		}
	}
}

func TestFileGoesBeforeDefaultsInEveryFormat(t *testing.T) {
	for name, text := range map[string]string{
		"c.yaml": "http: {read_timeout: 2s}\nredis: {addrs: [a, b], db: 3, tls: {share: 1}}\nlog:\n",
		"c.json": `{"http":{"read_timeout":"2s"},"redis":{"addrs":["a","b"],"db":3,"tls":{"share":1}}}`,
		"c.toml": "[http]\nread_timeout='2s'\n[redis]\naddrs=['a','b']\ndb=3\n[redis.tls]\nshare=1\n",
	} {
		t.Run(name, func(t *testing.T) {
			s, err := Load(sampleDefaults(), quiet(t, "--config="+writeFile(t, name, text)))
			if err != nil {
				t.Fatal(err)
			}
			want := sampleDefaults()
			want.HTTP.Timeout, want.Redis.DB, want.Redis.TLS.Share = 2*time.Second, 3, 1
			want.Redis.Addrs = []string{"a", "b"}
			if !reflect.DeepEqual(s, want) {
				t.Errorf("got  %+v\nwant %+v", s, want)
			}
		})
	}
}

func TestSecretsCanBeReadFromFiles(t *testing.T) {
	t.Setenv("SECKILL_REDIS_PASSWORD_FILE", writeFile(t, "pw", password+"\n"))
	s, err := Load(sampleDefaults(), quiet(t,
		"--rabbitmq-url-file="+writeFile(t, "url", "amqp://x"),
		"--payment-secrets-file="+writeFile(t, "secrets", "one\ntwo\n")))
	if err != nil {
		t.Fatal(err)
	}
	if s.Redis.Password.Reveal() != password || s.RabbitMQ.URL.Reveal() != "amqp://x" ||
		!reflect.DeepEqual(s.Payment.Secrets, []Secret{"one", "two"}) {
		t.Errorf("got %q %q %d secrets", s.Redis.Password.Reveal(), s.RabbitMQ.URL.Reveal(), len(s.Payment.Secrets))
	}
}

// O30: bad input stops the start with one line that names the setting and its origin.
func TestBadInputIsOneLineThatNamesSettingAndOrigin(t *testing.T) {
	file := func(text string) func(t *testing.T) []string {
		return func(t *testing.T) []string { return []string{"--config", writeFile(t, "c.yaml", text)} }
	}
	flags := func(args ...string) func(*testing.T) []string { return func(*testing.T) []string { return args } }
	env := func(name, value string) func(t *testing.T) []string {
		return func(t *testing.T) []string { t.Setenv(name, value); return nil }
	}
	for name, c := range map[string]struct {
		args func(*testing.T) []string
		want []string
	}{
		"unknown flag":          {flags("--redis-pasword=" + password), []string{"unknown flag --redis-pasword"}},
		"unknown short flag":    {flags("-x" + password), []string{"unknown flag -x"}},
		"flag without value":    {flags("--redis-db"), []string{"--redis-db needs a value"}},
		"stray argument":        {flags("--redis-db=1", password), []string{"unexpected argument"}},
		"unknown key in file":   {file("redis: {pasword: '" + password + "'}"), []string{"unknown setting redis.pasword", "c.yaml"}},
		"unknown section":       {file("rediss: {db: 1}"), []string{"unknown setting rediss.db"}},
		"section is a value":    {file("redis: '" + password + "'"), []string{"unknown setting redis", "c.yaml"}},
		"broken file":           {file("redis: {password: '" + password + "'\n x"), []string{"c.yaml", "line"}},
		"repeated key in file":  {file("redis: {db: 1}\nredis: {db: 2}"), []string{"c.yaml", "line"}},
		"file is not there":     {flags("--config=/nowhere/c.yaml"), []string{"/nowhere/c.yaml"}},
		"file of unknown kind":  {flags("--config=/nowhere/c.txt"), []string{"c.txt", ".yaml"}},
		"bad duration":          {env("SECKILL_HTTP_READ_TIMEOUT", "5"), []string{"http.read_timeout", "environment SECKILL_HTTP_READ_TIMEOUT", `"5"`, "duration"}},
		"bad number in flag":    {flags("--redis-db=x"), []string{"redis.db", "flag --redis-db", `"x"`}},
		"number out of range":   {env("SECKILL_REDIS_TLS_PORT", "65536"), []string{"redis.tls.port", "65536"}},
		"bad bool in file":      {file("http: {trusted: perhaps}"), []string{"http.trusted", "c.yaml", "perhaps"}},
		"bad bool in flag":      {flags("--http-trusted=perhaps"), []string{"http.trusted", "perhaps"}},
		"bad item":              {env("SECKILL_RABBITMQ_TIERS", "1s,2"), []string{"rabbitmq.tiers", "item 2"}},
		"bad level":             {env("SECKILL_LOG_LEVEL", "loud"), []string{"log.level", "loud"}},
		"list as a number":      {file("redis: {addrs: 5}"), []string{"redis.addrs", "not a list"}},
		"list for one value":    {file("redis: {db: [1]}"), []string{"redis.db", "single value"}},
		"password as a number":  {file("redis: {password: 0123}"), []string{"redis.password", "quotes"}},
		"secret given twice":    {flags("--redis-password="+password, "--redis-password-file=x"), []string{"redis.password", "redis.password_file", "both set"}},
		"secret file not there": {env("SECKILL_REDIS_PASSWORD_FILE", "/nowhere/pw"), []string{"redis.password_file", "/nowhere/pw"}},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := Load(sampleDefaults(), quiet(t, c.args(t)...))
			if err == nil {
				t.Fatal("accepted")
			}
			for _, part := range c.want {
				if !strings.Contains(err.Error(), part) {
					t.Errorf("%q does not say %q", err, part)
				}
			}
			if strings.Contains(err.Error(), "\n") {
				t.Errorf("more than one line: %q", err)
			}
			noPasswordIn(t, err.Error())
		})
	}
}

func noPasswordIn(t *testing.T, text string) {
	t.Helper()
	for _, part := range []string{password, "p?a", "b/c", "d%e", "f+g"} {
		if strings.Contains(text, part) {
			t.Errorf("%q holds a part of the password", text)
		}
	}
}

func TestUnknownNameInTheEnvironmentIsAWarningOnly(t *testing.T) {
	t.Setenv("SECKILL_SERVICE_PORT", "tcp://10.0.0.1:80") // what a cluster injects
	t.Setenv("SECKILL_REDIS_PASWORD", password)
	t.Setenv("SECKILL_TEST_REDIS_ADDR", "x")
	t.Setenv("SECKILL_OTHER", "x")
	var heard []string
	_, err := Load(sampleDefaults(), Options{Warn: func(s string) { heard = append(heard, s) }, OtherEnv: []string{"SECKILL_OTHER"}})
	if err != nil {
		t.Fatal(err)
	}
	all := strings.Join(heard, "\n")
	if len(heard) != 2 || !strings.Contains(all, "SECKILL_SERVICE_PORT") || !strings.Contains(all, "SECKILL_REDIS_PASWORD") {
		t.Errorf("heard %q", heard)
	}
	noPasswordIn(t, all)
}

type strict struct {
	Auth struct {
		Secret Secret `mapstructure:"jwt_secret" config:"required"`
	} `mapstructure:"auth"`
	Min int `mapstructure:"min"`
}

func (s strict) Validate() error {
	if s.Min < 0 {
		return errors.New("min is negative")
	}
	return nil
}

func TestMissingAndInvalidSettingsStopTheStart(t *testing.T) {
	_, err := Load(strict{}, quiet(t))
	if err == nil || !strings.Contains(err.Error(), "auth.jwt_secret is missing: set SECKILL_AUTH_JWT_SECRET, SECKILL_AUTH_JWT_SECRET_FILE, --auth-jwt-secret") {
		t.Errorf("missing: %v", err)
	}
	t.Setenv("SECKILL_AUTH_JWT_SECRET", "x")
	if _, err := Load(strict{}, quiet(t, "--min=-1")); err == nil || err.Error() != "min is negative" {
		t.Errorf("invalid: %v", err)
	}
	if _, err := Load(strict{}, quiet(t)); err != nil {
		t.Error(err)
	}
}

func TestEmptyVariableCountsAsNotSet(t *testing.T) {
	t.Setenv("SECKILL_HTTP_ADDR", "")
	s, err := Load(sampleDefaults(), quiet(t))
	if err != nil || s.HTTP.Addr != ":8080" {
		t.Errorf("%q %v", s.HTTP.Addr, err)
	}
}

// O30: the dump shows everything but secrets, and can be given back as a file.
func TestPrintedConfigHoldsNoSecretAndCanBeReadBack(t *testing.T) {
	t.Setenv("SECKILL_REDIS_PASSWORD", password)
	t.Setenv("SECKILL_RABBITMQ_URL", "amqp://u:"+password+"@h/")
	t.Setenv("SECKILL_PAYMENT_SECRETS", password+",x")
	t.Setenv("SECKILL_REDIS_DB", "4")
	t.Setenv("SECKILL_PAYMENT_OLD", password)
	var out bytes.Buffer
	o := quiet(t, "--print-config", "--http-read-timeout=3s")
	o.Output = &out
	if _, err := Load(sampleDefaults(), o); !errors.Is(err, ErrDone) {
		t.Fatalf("ended with %v", err)
	}
	t.Log("\n" + out.String())
	noPasswordIn(t, out.String())
	for _, part := range []string{"read_timeout: 3s # flag --http-read-timeout", "db: 4 # environment SECKILL_REDIS_DB", "[redacted]"} {
		if !strings.Contains(out.String(), part) {
			t.Errorf("does not show %q", part)
		}
	}
	back, err := Load(sampleDefaults(), quiet(t, "--config="+writeFile(t, "c.yaml", out.String())))
	if err != nil {
		t.Fatal(err)
	}
	if back.HTTP.Timeout != 3*time.Second || back.Redis.DB != 4 {
		t.Errorf("read back %+v", back)
	}
}

func TestHelpNamesEveryFlag(t *testing.T) {
	var out bytes.Buffer
	o := quiet(t, "--help")
	o.Output = &out
	if _, err := Load(sampleDefaults(), o); !errors.Is(err, ErrDone) {
		t.Fatalf("ended with %v", err)
	}
	for _, part := range []string{"--http-addr", "where buyers connect", "--redis-password-file", "--print-config"} {
		if !strings.Contains(out.String(), part) {
			t.Errorf("does not show %q", part)
		}
	}
}

func TestNoWayOfPrintingShowsASecret(t *testing.T) {
	s := struct{ S Secret }{password}
	var log bytes.Buffer
	slog.New(slog.NewJSONHandler(&log, nil)).Info("m", "secret", s.S, "all", s)
	j, err := json.Marshal(s)
	if err != nil {
		t.Fatal(err)
	}
	for _, text := range []string{
		fmt.Sprint(s.S), fmt.Sprintf("%v %+v %#v %s %q %x %X %d %t", s.S, s.S, s.S, s.S, s.S, s.S, s.S, s.S, s.S),
		fmt.Sprintf("%v %+v %#v %s %d", s, s, s, s, s), fmt.Sprintf("%v", &s), string(j), log.String(),
		fmt.Errorf("x %w", errors.New(s.S.String())).Error(),
	} {
		noPasswordIn(t, text)
		if strings.Contains(text, fmt.Sprintf("%x", "p?a#b")) {
			t.Errorf("%q holds it in hexadecimal", text)
		}
	}
}
