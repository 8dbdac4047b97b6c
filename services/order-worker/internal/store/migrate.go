package store

import (
	"context"
	"crypto/sha256"
	"database/sql"
	"embed"
	"encoding/hex"
	"errors"
	"fmt"
	"time"

	"github.com/golang-migrate/migrate/v4"
	migratemysql "github.com/golang-migrate/migrate/v4/database/mysql"
	"github.com/golang-migrate/migrate/v4/source/iofs"
)

//go:embed migrations/*.sql
var migrations embed.FS

// Migrate brings the schema to the newest version. Any number of processes may call it at once: one
// works, the others wait for it, as long as ctx allows. (The library's own lock gives up after ten
// seconds, which would end the start of a replica that merely came second.)
//
// MySQL commits each DDL statement by itself, so a process killed in the middle leaves the version
// marked dirty. Every migration can be repeated, so under the lock that mark means: repeat it.
func (s *Store) Migrate(ctx context.Context) error { return s.migrateTo(ctx, 0) }

// migrateTo goes up to version, 0 for the newest.
func (s *Store) migrateTo(ctx context.Context, version uint) (err error) {
	dsn := s.dsn.Clone()
	dsn.MultiStatements = true // a migration file holds several statements
	dsn.ReadTimeout = 0        // an ALTER of a large table takes its time
	connector, err := newConnector(dsn, s.cfg.LockWait, s.cfg.SessionIdle)
	if err != nil {
		return err
	}
	// A pool of its own with one connection: what holds the lock is what migrates, so a holder
	// that loses its connection loses both at once.
	db := sql.OpenDB(connector)
	db.SetMaxOpenConns(1)
	defer func() {
		if cerr := db.Close(); cerr != nil && err == nil {
			err = fmt.Errorf("close migration connection: %w", cerr)
		}
	}()
	conn, err := db.Conn(ctx)
	if err != nil {
		return fmt.Errorf("connect to migrate: %w", err)
	}
	lock := migrationLock(dsn.DBName)
	if err := getLock(ctx, conn, lock); err != nil {
		return errors.Join(err, conn.Close())
	}
	drv, err := migratemysql.WithConnection(ctx, conn, &migratemysql.Config{DatabaseName: dsn.DBName})
	if err != nil {
		return errors.Join(fmt.Errorf("prepare migration: %w", err), conn.Close())
	}
	src, err := iofs.New(migrations, "migrations")
	if err != nil {
		return errors.Join(fmt.Errorf("read migrations: %w", err), drv.Close())
	}
	m, err := migrate.NewWithInstance("iofs", src, dsn.DBName, drv)
	if err != nil {
		return errors.Join(fmt.Errorf("prepare migration: %w", err), src.Close(), drv.Close())
	}
	up := m.Up
	if version > 0 {
		up = func() error { return m.Migrate(version) }
	}
	err = up()
	var dirty migrate.ErrDirty
	if errors.As(err, &dirty) {
		s.log.WarnContext(ctx, "migration was interrupted, repeating it", "version", dirty.Version)
		before := dirty.Version - 1
		if before == 0 {
			before = -1 // the library's "no version"
		}
		if err = m.Force(before); err == nil {
			err = up()
		}
	}
	if errors.Is(err, migrate.ErrNoChange) {
		err = nil
	}
	if err != nil {
		err = fmt.Errorf("migrate schema: %w", err)
	}
	_, uerr := conn.ExecContext(context.WithoutCancel(ctx), "SELECT RELEASE_LOCK(?)", lock)
	serr, derr := m.Close() // closes conn as well
	return errors.Join(err, uerr, serr, derr)
}

// migrationLock names the server-wide lock of a schema; names are limited to 64 characters.
func migrationLock(schema string) string {
	h := sha256.Sum256([]byte(schema))
	return "seckill.migrate." + hex.EncodeToString(h[:12])
}

func getLock(ctx context.Context, conn *sql.Conn, name string) error {
	for {
		// In slices, so that a cancelled context is noticed and no proxy cuts a silent wait.
		var got sql.NullInt64
		if err := conn.QueryRowContext(ctx, "SELECT GET_LOCK(?, 2)", name).Scan(&got); err != nil {
			return fmt.Errorf("wait for migration lock: %w", err)
		}
		if got.Valid && got.Int64 == 1 {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait for migration lock: %w", ctx.Err())
		case <-time.After(50 * time.Millisecond):
		}
	}
}
