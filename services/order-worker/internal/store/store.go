package store

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"strconv"
	"time"

	"github.com/go-sql-driver/mysql"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	gormmysql "gorm.io/driver/mysql"
	"gorm.io/gorm"
	"gorm.io/gorm/logger"
)

// Config says how to reach the database.
type Config struct {
	// DSN in go-sql-driver form. Its parameters are completed by the program: parseTime, loc and
	// the session's time zone, isolation, SQL mode and time-outs cannot be set wrong by it.
	DSN string `mapstructure:"dsn" config:"required,secret"`
	// MaxOpen bounds the connections of this process. Default 16.
	MaxOpen int `mapstructure:"max_open"`
	// LockWait is how long a statement waits for a row lock before error 1205 ends it and the
	// transaction starts again; whole seconds. Default 5 s.
	LockWait time.Duration `mapstructure:"lock_wait"`
	// SessionIdle is how long a session may say nothing before the server ends it and rolls its
	// transaction back: a process frozen in the middle of one would hold its locks, and everybody else,
	// until it wakes up. Whole seconds; idle connections of the pool are closed in half that time.
	// Default 30 s.
	SessionIdle time.Duration `mapstructure:"session_idle"`
	// Retries is how often a transaction starts again after 1205, 1213 or 1020. Default 10.
	Retries int `mapstructure:"retries"`
}

// WithDefaults returns c with every unset field filled in.
func (c Config) WithDefaults() Config {
	if c.MaxOpen <= 0 {
		c.MaxOpen = 16
	}
	if c.LockWait <= 0 {
		c.LockWait = 5 * time.Second
	}
	if c.SessionIdle <= 0 {
		c.SessionIdle = 30 * time.Second
	}
	if c.Retries <= 0 {
		c.Retries = 10
	}
	return c
}

// Validate says what is wrong with the configuration, if anything.
func (c Config) Validate() error {
	if c.SessionIdle > 0 && c.SessionIdle < time.Second {
		return fmt.Errorf("mysql session_idle: %s is less than the server's unit, a second", c.SessionIdle)
	}
	_, err := completeDSN(c.DSN)
	return err
}

// Store is the database. It is safe for concurrent use.
type Store struct {
	cfg     Config
	dsn     *mysql.Config
	db      *sql.DB
	gorm    *gorm.DB
	log     *slog.Logger
	retries *prometheus.CounterVec
}

// Open makes a Store. It does no I/O: a database that is away at the start is found out by the first
// call, like one that goes away later.
func Open(cfg Config, log *slog.Logger, reg prometheus.Registerer) (*Store, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	cfg = cfg.WithDefaults()
	dsn, err := completeDSN(cfg.DSN)
	if err != nil {
		return nil, err
	}
	connector, err := newConnector(dsn, cfg.LockWait, cfg.SessionIdle)
	if err != nil {
		return nil, err
	}
	db := sql.OpenDB(connector)
	db.SetMaxOpenConns(cfg.MaxOpen)
	db.SetMaxIdleConns(cfg.MaxOpen)
	db.SetConnMaxIdleTime(cfg.SessionIdle / 2)
	db.SetConnMaxLifetime(10 * time.Minute)
	g, err := gorm.Open(gormmysql.New(gormmysql.Config{Conn: db, SkipInitializeWithVersion: true}), &gorm.Config{
		DisableAutomaticPing:   true,
		SkipDefaultTransaction: true,
		Logger:                 logger.Discard, // errors are returned; nothing is said twice
		NowFunc:                func() time.Time { return time.Now().UTC() },
	})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("open gorm: %w", err), db.Close())
	}
	s := &Store{
		cfg: cfg, dsn: dsn, db: db, gorm: g, log: log,
		retries: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "seckill_tx_retries_total",
			Help: "Transactions started again, by the server's error code.",
		}, []string{"code"}),
	}
	for code := range restartCodes {
		s.retries.WithLabelValues(strconv.Itoa(int(code)))
	}
	if err := reg.Register(s.retries); err != nil {
		return nil, errors.Join(fmt.Errorf("register metrics: %w", err), db.Close())
	}
	if err := reg.Register(collectors.NewDBStatsCollector(db, "mysql")); err != nil {
		return nil, errors.Join(fmt.Errorf("register metrics: %w", err), db.Close())
	}
	return s, nil
}

// Close closes the pool.
func (s *Store) Close() error { return s.db.Close() }

// SQL is the pool underneath, for statements that gorm would only make slower.
func (s *Store) SQL() *sql.DB { return s.db }

// DB is gorm bound to ctx, outside of any transaction.
func (s *Store) DB(ctx context.Context) *gorm.DB { return s.gorm.WithContext(ctx) }

// Ping reports whether the database answers.
func (s *Store) Ping(ctx context.Context) error {
	if err := s.db.PingContext(ctx); err != nil {
		return fmt.Errorf("ping mysql: %w", err)
	}
	return nil
}

// Now is the time by the database's clock, UTC. Payment deadlines are compared with it (R16).
func (s *Store) Now(ctx context.Context) (time.Time, error) {
	var now time.Time
	if err := s.db.QueryRowContext(ctx, "SELECT UTC_TIMESTAMP(6)").Scan(&now); err != nil {
		return time.Time{}, fmt.Errorf("read clock of mysql: %w", err)
	}
	return now, nil
}

// Tx is a running transaction: the *sql.Tx, and gorm on top of it where wanted.
type Tx struct {
	*sql.Tx
	gorm *gorm.DB
}

// DB is gorm bound to the transaction.
func (t *Tx) DB() *gorm.DB { return t.gorm }

// Now is the time by the database's clock, read inside the transaction.
func (t *Tx) Now(ctx context.Context) (time.Time, error) {
	var now time.Time
	if err := t.QueryRowContext(ctx, "SELECT UTC_TIMESTAMP(6)").Scan(&now); err != nil {
		return time.Time{}, fmt.Errorf("read clock of mysql: %w", err)
	}
	return now, nil
}

// InTx runs fn in a transaction and commits it. When fn or the commit fails with a deadlock (1213), a
// lock time-out (1205, which undoes one statement only) or a snapshot conflict (1020), everything is
// rolled back and fn starts again from its first line. Any other error rolls back and is returned;
// so does a panic, which goes on upwards. An error of the commit itself may mean either: read the
// row, then decide (C6).
//
// A transaction that says nothing for the configured SessionIdle is lost; see InRestingTx.
func (s *Store) InTx(ctx context.Context, fn func(tx *Tx) error) error {
	return s.restarting(ctx, func() error { return s.once(ctx, s.db, fn) })
}

// longRest is how long a transaction of InRestingTx may say nothing.
const longRest = 15 * time.Minute

// InRestingTx is InTx for a transaction under whose locks something else is done that takes a while: its
// session may rest for 15 minutes. It has a connection of its own, which is closed afterwards.
func (s *Store) InRestingTx(ctx context.Context, fn func(tx *Tx) error) error {
	return s.restarting(ctx, func() error {
		conn, err := s.db.Conn(ctx)
		if err != nil {
			return fmt.Errorf("connect: %w", err)
		}
		// Never back to the pool: the next transaction on it could rest as long.
		defer discard(conn)
		if _, err := conn.ExecContext(ctx, fmt.Sprintf("SET SESSION wait_timeout=%d", int(longRest/time.Second))); err != nil {
			return fmt.Errorf("let the session rest: %w", err)
		}
		return s.once(ctx, conn, fn)
	})
}

// discard closes the connection itself, whatever hangs on its session.
func discard(conn *sql.Conn) {
	_ = conn.Raw(func(any) error { return driver.ErrBadConn })
	_ = conn.Close()
}

// restarting runs attempt until it fails with none of the errors after which a transaction can start again.
func (s *Store) restarting(ctx context.Context, attempt func() error) error {
	for try := 0; ; try++ {
		err := attempt()
		code := errorCode(err)
		if !restartCodes[code] || try >= s.cfg.Retries {
			return err
		}
		s.retries.WithLabelValues(strconv.Itoa(int(code))).Inc()
		// Short and random: two transactions that met once should not meet again in step.
		pause := time.Duration(1+rand.IntN(5*(try+1))) * time.Millisecond //nolint:gosec // jitter
		select {
		case <-ctx.Done():
			return fmt.Errorf("%w (after %w)", ctx.Err(), err)
		case <-time.After(pause):
		}
	}
}

func (s *Store) once(ctx context.Context, on interface {
	BeginTx(ctx context.Context, opts *sql.TxOptions) (*sql.Tx, error)
}, fn func(tx *Tx) error) (err error) {
	stx, err := on.BeginTx(ctx, nil)
	if err != nil {
		return fmt.Errorf("begin: %w", err)
	}
	done := false
	defer func() {
		if done {
			return
		}
		// Also on the way of a panic: the connection goes back to the pool.
		if rerr := stx.Rollback(); rerr != nil && !errors.Is(rerr, sql.ErrTxDone) && !errors.Is(rerr, driver.ErrBadConn) && err != nil {
			err = fmt.Errorf("%w (rollback: %w)", err, rerr)
		}
	}()
	g := s.gorm.Session(&gorm.Session{NewDB: true, Context: ctx, SkipDefaultTransaction: true})
	g.Statement.ConnPool = stx
	if err := fn(&Tx{Tx: stx, gorm: g}); err != nil {
		return err
	}
	done = true
	if err := stx.Commit(); err != nil {
		return fmt.Errorf("commit: %w", err)
	}
	return nil
}

// Snapshot begins a read-only transaction whose statements all see the same moment. Roll it back.
func (s *Store) Snapshot(ctx context.Context) (*Tx, error) {
	stx, err := s.db.BeginTx(ctx, &sql.TxOptions{Isolation: sql.LevelRepeatableRead, ReadOnly: true})
	if err != nil {
		return nil, fmt.Errorf("begin snapshot: %w", err)
	}
	g := s.gorm.Session(&gorm.Session{NewDB: true, Context: ctx, SkipDefaultTransaction: true})
	g.Statement.ConnPool = stx
	return &Tx{Tx: stx, gorm: g}, nil
}
