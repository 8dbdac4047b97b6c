package server

import (
	"testing"

	"seckill/services/bench/alternatives"
)

func TestServersStartWithTheSettingsThatThePromisesNeed(t *testing.T) {
	s, err := Start(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	ctx := t.Context()
	db, err := alternatives.Open(s.DSN)
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close() //nolint:errcheck // the test is over
	var name, value string
	if err := db.QueryRowContext(ctx, "SHOW VARIABLES LIKE 'innodb_flush_log_at_trx_commit'").Scan(&name, &value); err != nil || value != "1" {
		t.Fatalf("%s %s %v", name, value, err)
	}
	if _, _, err := s.RabbitBytes(); err != nil {
		t.Fatal(err)
	}
	v := s.Versions(ctx)
	for _, k := range []string{"redis", "mysql", "rabbitmq", "go"} {
		if v[k] == "" {
			t.Errorf("no version of %s in %v", k, v)
		}
	}
}
