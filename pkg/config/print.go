package config

import (
	"encoding"
	"fmt"
	"reflect"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"
)

// print writes the effective settings as YAML, each with where it came from.
func (l *loader) print() error {
	root := &yaml.Node{Kind: yaml.MappingNode}
	for _, f := range l.leaves {
		if f.isFile {
			continue
		}
		at := root
		parts := strings.Split(f.key, ".")
		for _, section := range parts[:len(parts)-1] {
			at = child(at, section)
		}
		value, err := node(f.value, f.secret)
		if err != nil {
			return fmt.Errorf("print %s: %w", f.key, err)
		}
		value.LineComment = f.from(f.origin, l.file)
		at.Content = append(at.Content, &yaml.Node{Kind: yaml.ScalarNode, Value: parts[len(parts)-1]}, value)
	}
	enc := yaml.NewEncoder(l.o.Output)
	enc.SetIndent(2)
	if err := enc.Encode(root); err != nil {
		return fmt.Errorf("print settings: %w", err)
	}
	return nil
}

func child(m *yaml.Node, name string) *yaml.Node {
	for i := 0; i < len(m.Content); i += 2 {
		if m.Content[i].Value == name {
			return m.Content[i+1]
		}
	}
	c := &yaml.Node{Kind: yaml.MappingNode}
	m.Content = append(m.Content, &yaml.Node{Kind: yaml.ScalarNode, Value: name}, c)
	return c
}

func node(v reflect.Value, secret bool) (*yaml.Node, error) {
	n := &yaml.Node{}
	switch {
	case v.Kind() == reflect.Slice && !isText(v.Type()):
		n.Kind, n.Style = yaml.SequenceNode, yaml.FlowStyle
		for i := range v.Len() {
			item, err := node(v.Index(i), secret)
			if err != nil {
				return nil, err
			}
			n.Content = append(n.Content, item)
		}
		return n, nil
	case secret:
		return n, n.Encode(Secret(v.String()).String())
	case v.Type() == durationType:
		return n, n.Encode(time.Duration(v.Int()).String())
	default:
		if m, ok := v.Interface().(encoding.TextMarshaler); ok {
			b, err := m.MarshalText()
			if err != nil {
				return nil, err
			}
			return n, n.Encode(string(b))
		}
		return n, n.Encode(v.Interface())
	}
}
