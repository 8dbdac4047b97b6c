package testkit

import (
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
)

var (
	descName   = regexp.MustCompile(`fqName: "([^"]+)"`)
	descLabels = regexp.MustCompile(`variableLabels: \{([^}]*)\}`)
	docName    = regexp.MustCompile("`(seckill_[a-z0-9_]+)`")
	docLabel   = regexp.MustCompile("`([a-z_]+)`")
)

// MetricsDocumented fails the test unless what reg exports under seckill_ is exactly what the tables
// of a Markdown file say in the given sections: name, type aside, and labels.
func MetricsDocumented(t testing.TB, reg *prometheus.Registry, file string, sections ...string) {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	documented := map[string]string{}
	section := ""
	for line := range strings.SplitSeq(string(text), "\n") {
		if title, ok := strings.CutPrefix(line, "## "); ok {
			section = strings.TrimSpace(title)
		}
		cells := strings.Split(line, "|")
		if !slices.Contains(sections, section) || len(cells) < 5 {
			continue
		}
		var labels []string
		for _, m := range docLabel.FindAllStringSubmatch(cells[3], -1) {
			labels = append(labels, m[1])
		}
		for _, m := range docName.FindAllStringSubmatch(cells[1], -1) {
			documented[m[1]] = strings.Join(labels, ",")
		}
	}
	// Described, not gathered: a metric with labels shows no series before its first use.
	exported := map[string]string{}
	descs := make(chan *prometheus.Desc)
	go func() {
		defer close(descs)
		reg.Describe(descs)
	}()
	for d := range descs {
		name := descName.FindStringSubmatch(d.String())
		labels := descLabels.FindStringSubmatch(d.String())
		if name == nil || labels == nil {
			t.Fatalf("description cannot be understood: %s", d)
		}
		if strings.HasPrefix(name[1], "seckill_") {
			exported[name[1]] = labels[1]
		}
	}
	for name, labels := range exported {
		want, ok := documented[name]
		switch {
		case !ok:
			t.Errorf("%s{%s} is exported and not in %s", name, labels, file)
		case want != labels:
			t.Errorf("%s has the labels {%s}, %s says {%s}", name, labels, file, want)
		}
	}
	for name := range documented {
		if _, ok := exported[name]; !ok {
			t.Errorf("%s is in %s and not exported", name, file)
		}
	}
}
