package stock

import (
	"errors"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"seckill/pkg/order"
)

func TestEveryScriptSaysWhatItDoesAndNeverWalksTheKeySpace(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob("../../lua/*.lua")
	if err != nil || len(files) < 12 {
		t.Fatalf("%d scripts, %v", len(files), err)
	}
	// Commands that look at the whole key space, remove it, or make Redis forget the caller's clock.
	forbidden := regexp.MustCompile(`(?i)'(KEYS|FLUSHALL|FLUSHDB|SCAN|RANDOMKEY|SWAPDB|SELECT)'`)
	// A key that is put together inside a script would escape the slot check.
	made := regexp.MustCompile(`(?i)'seckill:`)
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		text := string(b)
		for what, ok := range map[string]bool{
			"starts with a shebang":     strings.HasPrefix(text, "#!lua\n-- "),
			"describes its keys":        strings.Contains(text, "-- KEYS[1]"),
			"describes its answers":     strings.Contains(text, "-- Returns "),
			"says that it is repeated":  strings.Contains(text, "Idempotent"),
			"says that it has one slot": strings.Contains(text, "One slot."),
			"walks no key space":        !forbidden.MatchString(text),
			"takes keys from KEYS only": !made.MatchString(text),
		} {
			if !ok {
				t.Errorf("%s: not true that it %s", filepath.Base(f), what)
			}
		}
	}
	code, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range code {
		if strings.HasSuffix(f, "_test.go") {
			continue
		}
		b, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		if m := regexp.MustCompile(`\.(Keys|FlushAll|FlushDB)\(|"(?i:keys|flushall|flushdb)"`).Find(b); m != nil {
			t.Errorf("%s: %s", f, m)
		}
	}
}

func TestUnknownAnswersAreErrors(t *testing.T) {
	t.Parallel()
	for _, reply := range [][]string{{"yes"}, {"ok", "x"}, {"not_started"}, {"not_started", "a", "b"}, {""}} {
		if err := refusal(&Reservation{}, reply); err == nil || !strings.Contains(err.Error(), "unknown code") {
			t.Errorf("%q: %v", reply, err)
		}
	}
	if err := codeError("x", []string{"maybe"}, nil); err == nil {
		t.Error("unknown code taken for success")
	}
}

func TestRecordsOfTheWrongShapeAreCorrupt(t *testing.T) {
	t.Parallel()
	id := order.ID{Activity: "a", ULID: "01JDXQ7K9W00000000000000AB"}
	good := [3]string{"r", "u|s|p|1", "1759812345678|1999|CNY|900000|1|national"}
	if _, err := parseRecord(id, good[0], good[1], good[2]); err != nil {
		t.Fatal(err)
	}
	for _, bad := range [][3]string{
		{"", good[1], good[2]}, {"reserved", good[1], good[2]}, {"r", "", good[2]}, {"r", "u|s|p", good[2]}, {"r", "u|s|p|1|2", good[2]},
		{"r", "u|s|p|x", good[2]}, {"r", good[1], ""}, {"r", good[1], "x|1999|CNY|900000|1|national"},
		{"r", good[1], "1|x|CNY|900000|1|national"}, {"r", good[1], "1|1|CNY|x|1|national"}, {"r", good[1], "1|1|CNY|1|-1|national"},
	} {
		if _, err := parseRecord(id, bad[0], bad[1], bad[2]); !errors.Is(err, ErrCorrupt) {
			t.Errorf("%q: %v", bad, err)
		}
	}
	for _, d := range []string{"", "aa", "AA", "abc", strings.Repeat("0f", 32), "not hex"} {
		if got := unpackDigest(packDigest(d)); got != d {
			t.Errorf("digest %q came back as %q", d, got)
		}
	}
}
