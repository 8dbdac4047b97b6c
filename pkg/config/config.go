// Package config fills a struct of settings: defaults < file < environment < flags.
//
// A field's place in the struct is its name everywhere. With the prefix SECKILL, the field tagged
// `mapstructure:"master_name"` inside the one tagged `mapstructure:"redis"` is
//
//	redis.master_name          in messages
//	redis: {master_name: …}    in the file (YAML, JSON or TOML)
//	SECKILL_REDIS_MASTER_NAME  in the environment
//	--redis-master-name        as a flag
//
// Fields may be strings, booleans, numbers, durations ("1m30s"), anything with UnmarshalText, and
// lists of these (comma separated in the environment and in flags). A Secret, and a list of Secrets,
// may also be read from a file: SECKILL_REDIS_PASSWORD_FILE, --redis-password-file or
// redis.password_file. An empty variable counts as not set, since orchestrators pass such.
//
// A tag `config:"required"` refuses a start without the setting, `config:"secret"` makes a text or a
// list of texts a secret here that its package wants as plain strings, and `help:"…"` describes it in
// --help. A settings type with a method Validate() error has it called last.
package config

import (
	"encoding"
	"errors"
	"fmt"
	"io"
	"os"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"
	"github.com/spf13/viper"
)

// ErrDone says that --help or --print-config was asked for and has been answered: exit with 0.
var ErrDone = errors.New("nothing more to do")

// Options say where settings come from. Only Args is usually set.
type Options struct {
	Program   string       // for --help; default the base name of os.Args[0]
	Args      []string     // the command line without the program's name
	EnvPrefix string       // default SECKILL
	Output    io.Writer    // of --help and --print-config; default os.Stdout
	Warn      func(string) // hears of unknown names in the environment; default a line on os.Stderr
	OtherEnv  []string     // further names in the environment that are no settings and no mistake
}

func (o Options) withDefaults() Options {
	if o.Program == "" {
		o.Program = "program"
		if len(os.Args) > 0 {
			o.Program = os.Args[0][strings.LastIndexByte(os.Args[0], '/')+1:]
		}
	}
	if o.EnvPrefix == "" {
		o.EnvPrefix = "SECKILL"
	}
	if o.Output == nil {
		o.Output = os.Stdout
	}
	if o.Warn == nil {
		o.Warn = func(s string) { _, _ = fmt.Fprintln(os.Stderr, "warning: "+s) }
	}
	return o
}

// Load returns the effective settings. An error is one line that names the setting and where its
// value came from, and holds no secret.
func Load[T any](defaults T, o Options) (T, error) {
	o = o.withDefaults()
	out := defaults
	root := reflect.ValueOf(&out).Elem()
	leaves, err := collect(root, "", o.EnvPrefix)
	if err != nil {
		return defaults, err
	}
	l := &loader{o: o, leaves: leaves}
	if err := l.load(); err != nil {
		return defaults, err
	}
	if l.printConfig {
		if err := l.print(); err != nil {
			return defaults, err
		}
		return out, ErrDone
	}
	for _, f := range leaves {
		if f.required && f.value.IsZero() {
			return defaults, fmt.Errorf("%s is missing: set %s", f.key, f.ways())
		}
	}
	if v, ok := any(out).(interface{ Validate() error }); ok {
		if err := v.Validate(); err != nil {
			return defaults, err
		}
	}
	return out, nil
}

// leaf is one setting.
type leaf struct {
	key, env, flag string
	value          reflect.Value
	secret         bool
	required       bool
	help           string
	isFile         bool   // the companion of a secret that names the file which holds it
	origin         origin // where the effective value came from
	of             *leaf  // for isFile: the secret
}

type origin int

const (
	fromDefault origin = iota
	fromFile
	fromEnv
	fromFlag
)

func (f *leaf) ways() string {
	w := f.env
	if f.secret {
		w += ", " + f.env + "_FILE"
	}
	return w + ", --" + f.flag + " or " + f.key + " in the file"
}

func (f *leaf) from(o origin, file string) string {
	switch o {
	case fromFile:
		return "file " + file
	case fromEnv:
		return "environment " + f.env
	case fromFlag:
		return "flag --" + f.flag
	default:
		return "default"
	}
}

var (
	secretType   = reflect.TypeFor[Secret]()
	durationType = reflect.TypeFor[time.Duration]()
	textType     = reflect.TypeFor[encoding.TextUnmarshaler]()
)

func collect(v reflect.Value, path, prefix string) ([]*leaf, error) {
	var out []*leaf
	seen := map[string]string{}
	var walk func(v reflect.Value, path string) error
	walk = func(v reflect.Value, path string) error {
		for i := range v.NumField() {
			sf := v.Type().Field(i)
			if !sf.IsExported() {
				continue
			}
			name, opts, _ := strings.Cut(sf.Tag.Get("mapstructure"), ",")
			if name == "-" {
				continue
			}
			field := v.Field(i)
			if strings.Contains(opts, "squash") {
				if err := walk(field, path); err != nil {
					return err
				}
				continue
			}
			if name == "" {
				name = sf.Name
			}
			key := strings.ToLower(name)
			if path != "" {
				key = path + "." + key
			}
			if field.Kind() == reflect.Struct && !isText(sf.Type) {
				if err := walk(field, key); err != nil {
					return err
				}
				continue
			}
			if !settable(sf.Type) {
				return fmt.Errorf("settings field %s has a type that cannot be a setting: %s", key, sf.Type)
			}
			f := newLeaf(key, prefix, field)
			f.help = sf.Tag.Get("help")
			for word := range strings.SplitSeq(sf.Tag.Get("config"), ",") {
				f.required = f.required || word == "required"
				f.secret = f.secret || word == "secret"
			}
			f.secret = f.secret || sf.Type == secretType || sf.Type == reflect.SliceOf(secretType)
			if f.secret && !isTexts(sf.Type) {
				return fmt.Errorf("settings field %s is a secret but not a text", key)
			}
			leaves := []*leaf{f}
			if f.secret {
				c := newLeaf(key+"_file", prefix, reflect.New(reflect.TypeFor[string]()).Elem())
				c.isFile, c.of, c.help = true, f, "file that holds "+key
				leaves = append(leaves, c)
			}
			for _, f := range leaves {
				if other, taken := seen[f.env]; taken {
					return fmt.Errorf("settings fields %s and %s have the same name in the environment", other, f.key)
				}
				seen[f.env] = f.key
				out = append(out, f)
			}
		}
		return nil
	}
	err := walk(v, path)
	return out, err
}

func newLeaf(key, prefix string, v reflect.Value) *leaf {
	return &leaf{
		key:   key,
		env:   prefix + "_" + strings.ToUpper(strings.ReplaceAll(key, ".", "_")),
		flag:  strings.NewReplacer(".", "-", "_", "-").Replace(key),
		value: v,
	}
}

func isText(t reflect.Type) bool { return reflect.PointerTo(t).Implements(textType) }

// isTexts: a plain text or a list of them. Of other types a bad value would show in a message.
func isTexts(t reflect.Type) bool {
	if t.Kind() == reflect.Slice {
		t = t.Elem()
	}
	return t == secretType || (t.Kind() == reflect.String && !isText(t))
}

func settable(t reflect.Type) bool {
	if t.Kind() == reflect.Slice && !isText(t) {
		t = t.Elem()
	}
	if isText(t) {
		return true
	}
	switch t.Kind() {
	case reflect.String, reflect.Bool, reflect.Float32, reflect.Float64,
		reflect.Int, reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64,
		reflect.Uint, reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
		return true
	default:
		return false
	}
}

type loader struct {
	o           Options
	leaves      []*leaf
	file        string
	printConfig bool
}

func (l *loader) load() error {
	flags := pflag.NewFlagSet(l.o.Program, pflag.ContinueOnError)
	flags.SetOutput(io.Discard)
	flags.SortFlags = false
	flags.StringVar(&l.file, "config", os.Getenv(l.o.EnvPrefix+"_CONFIG"), "file with settings (yaml, json or toml)")
	flags.BoolVar(&l.printConfig, "print-config", false, "print the effective settings without secrets, and exit")
	help := flags.BoolP("help", "h", false, "print this text, and exit")
	for _, f := range l.leaves {
		raw := &rawFlag{list: f.isList(), kind: f.kind()}
		added := flags.VarPF(raw, f.flag, "", f.help)
		if raw.kind == boolKind {
			added.NoOptDefVal = "true"
		}
	}
	if err := flags.Parse(l.o.Args); err != nil {
		return flagError(err)
	}
	if *help {
		_, err := fmt.Fprintf(l.o.Output, "Usage: %s [flags]\n\nEach flag --a-b can also be given as %s_A_B.\n\n%s", l.o.Program, l.o.EnvPrefix, flags.FlagUsages())
		if err != nil {
			return fmt.Errorf("print help: %w", err)
		}
		return ErrDone
	}
	if flags.NArg() > 0 {
		// Not quoted: what stands there by mistake may be a secret.
		return fmt.Errorf("unexpected argument after the flags (%d of them): settings are given as --name=value", flags.NArg())
	}

	v := viper.New()
	if err := l.readFile(v); err != nil {
		return err
	}
	for _, f := range l.leaves {
		// Unmarshal sees a nested key from the environment only if it was bound by name, so each is.
		if err := v.BindEnv(f.key, f.env); err != nil {
			return fmt.Errorf("bind %s: %w", f.env, err)
		}
		if err := v.BindPFlag(f.key, flags.Lookup(f.flag)); err != nil {
			return fmt.Errorf("bind --%s: %w", f.flag, err)
		}
		switch {
		case flags.Changed(f.flag):
			f.origin = fromFlag
		case os.Getenv(f.env) != "":
			f.origin = fromEnv
		case v.InConfig(f.key):
			f.origin = fromFile
		}
	}
	for _, f := range l.leaves {
		if f.origin == fromDefault {
			continue
		}
		if err := set(f.value, v.Get(f.key), f.origin == fromFile); err != nil {
			return fmt.Errorf("%s (%s): %w", f.key, f.from(f.origin, l.file), err)
		}
	}
	if err := l.readSecretFiles(); err != nil {
		return err
	}
	l.warnUnknownEnv()
	return nil
}

func flagError(err error) error {
	var unknown *pflag.NotExistError
	var missing *pflag.ValueRequiredError
	switch {
	case errors.As(err, &unknown):
		if s := unknown.GetSpecifiedShortnames(); s != "" {
			return fmt.Errorf("unknown flag -%.1s", s)
		}
		return fmt.Errorf("unknown flag --%s", unknown.GetSpecifiedName())
	case errors.As(err, &missing):
		return fmt.Errorf("flag --%s needs a value", missing.GetSpecifiedName())
	default:
		return errors.New("flags cannot be understood (see --help)") // its text may quote a value
	}
}

var lineOfError = regexp.MustCompile(`line \d+`)

func (l *loader) readFile(v *viper.Viper) error {
	if l.file == "" {
		return nil
	}
	v.SetConfigFile(l.file)
	if err := v.ReadInConfig(); err != nil {
		var bad viper.ConfigParseError
		var unsupported viper.UnsupportedConfigError
		switch {
		case errors.As(err, &bad):
			// A parser's message may quote the text of the file.
			if where := lineOfError.FindString(err.Error()); where != "" {
				return fmt.Errorf("config file %s cannot be understood near %s", l.file, where)
			}
			return fmt.Errorf("config file %s cannot be understood", l.file)
		case errors.As(err, &unsupported):
			return fmt.Errorf("config file %s: the name must end in .yaml, .json or .toml", l.file)
		default:
			return fmt.Errorf("config file: %w", err)
		}
	}
	for _, key := range v.AllKeys() {
		known := slices.ContainsFunc(l.leaves, func(f *leaf) bool { return f.key == key })
		emptySection := v.Get(key) == nil &&
			slices.ContainsFunc(l.leaves, func(f *leaf) bool { return strings.HasPrefix(f.key, key+".") })
		if !known && !emptySection {
			return fmt.Errorf("unknown setting %s (file %s)", key, l.file)
		}
	}
	return nil
}

func (l *loader) readSecretFiles() error {
	for _, c := range l.leaves {
		if !c.isFile || c.value.String() == "" {
			continue
		}
		f := c.of
		if f.origin == c.origin {
			return fmt.Errorf("%s and %s are both set (%s): give one of them", f.key, c.key, c.from(c.origin, l.file))
		}
		if f.origin > c.origin {
			continue
		}
		b, err := os.ReadFile(c.value.String())
		if err != nil {
			return fmt.Errorf("%s (%s): %w", c.key, c.from(c.origin, l.file), err)
		}
		text := strings.TrimRight(string(b), "\r\n")
		if f.isList() {
			text = strings.NewReplacer("\r\n", ",", "\n", ",").Replace(text)
		}
		if text == "" {
			return fmt.Errorf("%s (%s): the file is empty", c.key, c.from(c.origin, l.file))
		}
		if err := set(f.value, text, false); err != nil {
			return fmt.Errorf("%s (%s): %w", c.key, c.from(c.origin, l.file), err)
		}
		f.origin = c.origin
	}
	return nil
}

func (l *loader) warnUnknownEnv() {
	prefix := l.o.EnvPrefix + "_"
	for _, kv := range os.Environ() {
		name, _, _ := strings.Cut(kv, "=")
		if !strings.HasPrefix(name, prefix) || name == prefix+"CONFIG" || name == prefix+"FAILPOINTS" ||
			strings.HasPrefix(name, prefix+"TEST_") || strings.HasPrefix(name, prefix+"UP_") || slices.Contains(l.o.OtherEnv, name) {
			continue
		}
		if !slices.ContainsFunc(l.leaves, func(f *leaf) bool { return f.env == name }) {
			l.o.Warn("unknown setting " + name + " in the environment")
		}
	}
}

func (f *leaf) isList() bool { return f.value.Kind() == reflect.Slice && !isText(f.value.Type()) }

// boolKind is not called "bool": viper would read a flag of that type by itself, and any nonsense as false.
const boolKind = "true|false"

func (f *leaf) kind() string {
	t := f.value.Type()
	switch {
	case f.isList():
		return "list"
	case t == durationType:
		return "duration"
	case f.secret:
		return "secret"
	case isText(t), t.Kind() == reflect.String:
		return "string"
	case t.Kind() == reflect.Bool:
		return boolKind
	default:
		return "number"
	}
}

// rawFlag keeps a flag's text; it is parsed where texts from the environment are.
type rawFlag struct {
	text, kind string
	list, set  bool
}

func (r *rawFlag) String() string { return r.text }
func (r *rawFlag) Type() string   { return r.kind }
func (r *rawFlag) Set(s string) error {
	if r.list && r.set {
		s = r.text + "," + s // --redis-addrs a --redis-addrs b
	}
	r.text, r.set = s, true
	return nil
}

// set parses raw into v. In a file a value has a type of its own, which must fit.
func set(v reflect.Value, raw any, typed bool) error {
	if v.Kind() == reflect.Slice && !isText(v.Type()) {
		items, err := list(raw)
		if err != nil {
			return err
		}
		out := reflect.MakeSlice(v.Type(), len(items), len(items))
		for i, item := range items {
			if err := setOne(out.Index(i), item, typed); err != nil {
				return fmt.Errorf("item %d: %w", i+1, err)
			}
		}
		v.Set(out)
		return nil
	}
	return setOne(v, raw, typed)
}

func list(raw any) ([]any, error) {
	switch raw := raw.(type) {
	case []any:
		return raw, nil
	case string:
		var out []any
		for item := range strings.SplitSeq(raw, ",") {
			if item = strings.TrimSpace(item); item != "" {
				out = append(out, item)
			}
		}
		return out, nil
	default:
		return nil, errors.New("is not a list")
	}
}

func setOne(v reflect.Value, raw any, typed bool) error {
	t := v.Type()
	text, isString := raw.(string)
	if !isString {
		var ok bool
		if text, ok = scalar(raw); !ok {
			return errors.New("is not a single value")
		}
		if typed && (t == secretType || (t.Kind() == reflect.String && !isText(t))) {
			return errors.New("is not a text: put it in quotes")
		}
	}
	// A bad value is quoted in the message. A secret never is: as a text, none is bad.
	switch {
	case isText(t):
		if err := v.Addr().Interface().(encoding.TextUnmarshaler).UnmarshalText([]byte(text)); err != nil {
			return fmt.Errorf("%q cannot be used: %w", text, err)
		}
	case t == durationType:
		d, err := time.ParseDuration(text)
		if err != nil {
			return fmt.Errorf("%q is not a duration such as 500ms or 1m30s", text)
		}
		v.SetInt(int64(d))
	case t.Kind() == reflect.String:
		v.SetString(text)
	case t.Kind() == reflect.Bool:
		b, err := strconv.ParseBool(text)
		if err != nil {
			return fmt.Errorf("%q is neither true nor false", text)
		}
		v.SetBool(b)
	case v.CanInt():
		n, err := strconv.ParseInt(text, 10, t.Bits())
		if err != nil {
			return fmt.Errorf("%q is not a whole number in range", text)
		}
		v.SetInt(n)
	case v.CanUint():
		n, err := strconv.ParseUint(text, 10, t.Bits())
		if err != nil {
			return fmt.Errorf("%q is not a whole number of zero or more, in range", text)
		}
		v.SetUint(n)
	default:
		n, err := strconv.ParseFloat(text, t.Bits())
		if err != nil {
			return fmt.Errorf("%q is not a number", text)
		}
		v.SetFloat(n)
	}
	return nil
}

func scalar(raw any) (string, bool) {
	switch raw := raw.(type) {
	case bool, int, int64, uint64:
		return fmt.Sprint(raw), true
	case float64:
		return strconv.FormatFloat(raw, 'f', -1, 64), true // JSON has no whole numbers
	case time.Time:
		return raw.Format(time.RFC3339Nano), true
	default:
		return "", false
	}
}
