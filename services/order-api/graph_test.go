package main

import (
	"os"
	"os/exec"
	"strings"
	"testing"
)

// order-api never opens a database connection: neither what is compiled into it nor its whole module
// graph holds gorm or a driver of MySQL.
func TestModuleGraphHoldsNoDatabaseCode(t *testing.T) {
	for _, c := range []struct {
		name string
		args []string
		env  string
	}{
		{"packages", []string{"list", "-deps", "."}, "GOWORK=off"},
		{"modules", []string{"list", "-m", "all"}, "GOWORK=off"},
	} {
		t.Run(c.name, func(t *testing.T) {
			cmd := exec.Command("go", c.args...)
			cmd.Env = append(os.Environ(), c.env)
			out, err := cmd.Output()
			if err != nil {
				t.Fatalf("go %s: %v", strings.Join(c.args, " "), err)
			}
			lines := strings.Split(strings.TrimSpace(string(out)), "\n")
			if len(lines) < 10 {
				t.Fatalf("only %d lines: this looks at nothing", len(lines))
			}
			for _, line := range lines {
				for _, bad := range []string{"gorm.io/", "go-sql-driver/", "go-gorm/", "siddontang/go-mysql", "go-mysql-org/"} {
					if strings.Contains(line, bad) {
						t.Errorf("database code in the graph: %s", line)
					}
				}
			}
		})
	}
}
