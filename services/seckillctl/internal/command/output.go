package command

import (
	"encoding/csv"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"go.yaml.in/yaml/v3"
)

// Table is the form of an answer that people and spreadsheets read.
type Table struct {
	Header []string
	Rows   [][]string
}

// Print writes value as JSON or YAML, or table as a table or CSV, as -o asks.
func (e *Env) Print(value any, table Table) error {
	switch e.output {
	case "json":
		enc := json.NewEncoder(e.Out)
		enc.SetEscapeHTML(false)
		enc.SetIndent("", "  ")
		if err := enc.Encode(value); err != nil {
			return fmt.Errorf("write json: %w", err)
		}
		return nil
	case "yaml":
		return e.printYAML(value)
	case "csv":
		return e.printCSV(table)
	}
	w := tabwriter.NewWriter(e.Out, 0, 0, 2, ' ', 0)
	_, _ = fmt.Fprintln(w, strings.ToUpper(strings.Join(table.Header, "\t")))
	for _, row := range table.Rows {
		_, _ = fmt.Fprintln(w, strings.Join(row, "\t"))
	}
	if err := w.Flush(); err != nil {
		return fmt.Errorf("write table: %w", err)
	}
	return nil
}

// printYAML goes through JSON, so that both have the same names; JSON is YAML, and a node keeps the
// order of the fields.
func (e *Env) printYAML(value any) error {
	raw, err := json.Marshal(value)
	if err != nil {
		return fmt.Errorf("write yaml: %w", err)
	}
	var node yaml.Node
	if err := yaml.Unmarshal(raw, &node); err != nil {
		return fmt.Errorf("write yaml: %w", err)
	}
	blockStyle(&node)
	enc := yaml.NewEncoder(e.Out)
	enc.SetIndent(2)
	if err := enc.Encode(&node); err != nil {
		return fmt.Errorf("write yaml: %w", err)
	}
	if err := enc.Close(); err != nil {
		return fmt.Errorf("write yaml: %w", err)
	}
	return nil
}

// blockStyle lets the encoder choose: it quotes a text that would read as something else.
func blockStyle(n *yaml.Node) {
	n.Style = 0
	for _, c := range n.Content {
		blockStyle(c)
	}
}

func (e *Env) printCSV(table Table) error {
	w := csv.NewWriter(e.Out)
	_ = w.Write(table.Header)
	for _, row := range table.Rows {
		_ = w.Write(row)
	}
	w.Flush()
	if err := w.Error(); err != nil {
		return fmt.Errorf("write csv: %w", err)
	}
	return nil
}

func timeText(t time.Time) string {
	if t.IsZero() {
		return ""
	}
	return t.UTC().Format("2006-01-02T15:04:05.000Z")
}

func i64(n int64) string { return strconv.FormatInt(n, 10) }

func short(s string, n int) string {
	s = strings.Map(func(r rune) rune {
		if r < 0x20 {
			return ' '
		}
		return r
	}, s)
	if r := []rune(s); len(r) > n {
		return string(r[:n-1]) + "…"
	}
	return s
}
