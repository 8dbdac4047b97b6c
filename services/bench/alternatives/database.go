package alternatives

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"github.com/go-sql-driver/mysql"
)

// Connections bounds the pool of each alternative. More of them wait for the same row's lock.
const Connections = 32

const schema = `CREATE TABLE IF NOT EXISTS alternative_stock (
	activity VARCHAR(32) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
	sku VARCHAR(32) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
	allocated INT UNSIGNED NOT NULL, available INT UNSIGNED NOT NULL,
	PRIMARY KEY (activity, sku)
) ENGINE=InnoDB;
CREATE TABLE IF NOT EXISTS alternative_orders (
	id VARCHAR(64) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
	activity VARCHAR(32) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
	user VARCHAR(64) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
	sku VARCHAR(32) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
	quantity INT UNSIGNED NOT NULL, created_at DATETIME(6) NOT NULL,
	PRIMARY KEY (id), UNIQUE KEY activity_user (activity, user)
) ENGINE=InnoDB`

// Open connects to the database that all alternatives write to. Parameters are put into the
// statement by the driver: one round trip for each statement instead of two.
func Open(dsn string) (*sql.DB, error) {
	cfg, err := mysql.ParseDSN(dsn)
	if err != nil {
		return nil, fmt.Errorf("read DSN: %w", err)
	}
	cfg.InterpolateParams, cfg.ParseTime, cfg.MultiStatements = true, true, true
	c, err := mysql.NewConnector(cfg)
	if err != nil {
		return nil, fmt.Errorf("read DSN: %w", err)
	}
	db := sql.OpenDB(c)
	db.SetMaxOpenConns(Connections)
	db.SetMaxIdleConns(Connections)
	db.SetConnMaxIdleTime(time.Minute)
	return db, nil
}

// Setup makes the tables and puts units of one sku on sale.
func Setup(ctx context.Context, db *sql.DB, activity, sku string, units int) error {
	if _, err := db.ExecContext(ctx, schema); err != nil {
		return fmt.Errorf("make tables of the alternatives: %w", err)
	}
	if _, err := db.ExecContext(ctx, "INSERT INTO alternative_stock VALUES (?, ?, ?, ?)", activity, sku, units, units); err != nil {
		return fmt.Errorf("put %s on sale: %w", activity, err)
	}
	return nil
}

// Sold says how many units of an activity the database has orders for, and what its counter says.
func Sold(ctx context.Context, db *sql.DB, activity string) (sold, available int, err error) {
	err = db.QueryRowContext(ctx, `SELECT (SELECT COALESCE(SUM(quantity), 0) FROM alternative_orders WHERE activity = ?),
		(SELECT COALESCE(SUM(available), 0) FROM alternative_stock WHERE activity = ?)`, activity, activity).Scan(&sold, &available)
	if err != nil {
		return 0, 0, fmt.Errorf("count orders of %s: %w", activity, err)
	}
	return sold, available, nil
}

func insert(ctx context.Context, on interface {
	ExecContext(context.Context, string, ...any) (sql.Result, error)
}, o Order,
) error {
	_, err := on.ExecContext(ctx, "INSERT INTO alternative_orders VALUES (?, ?, ?, ?, ?, UTC_TIMESTAMP(6))",
		o.ID, o.Activity, o.User, o.SKU, o.Quantity)
	var my *mysql.MySQLError
	if errors.As(err, &my) && my.Number == 1062 {
		return ErrLimit
	}
	if err != nil {
		return fmt.Errorf("write order %s: %w", o.ID, err)
	}
	return nil
}

// Database sells from the database alone.
type Database struct{ DB *sql.DB }

// Sell writes the order first and takes the stock last, so that the one hot row is locked for as
// short a time as it can be: for one statement and the commit.
func (d Database) Sell(ctx context.Context, o Order) error {
	for attempt := 0; ; attempt++ {
		err := d.try(ctx, o)
		var my *mysql.MySQLError
		if errors.As(err, &my) && (my.Number == 1213 || my.Number == 1205 || my.Number == 1020) && attempt < 5 {
			continue
		}
		return err
	}
}

func (d Database) try(ctx context.Context, o Order) error {
	tx, err := d.DB.BeginTx(ctx, &sql.TxOptions{Isolation: sql.LevelReadCommitted})
	if err != nil {
		return fmt.Errorf("begin: %w", err)
	}
	defer tx.Rollback() //nolint:errcheck // after a commit it does nothing
	if err := insert(ctx, tx, o); err != nil {
		return err
	}
	res, err := tx.ExecContext(ctx, "UPDATE alternative_stock SET available = available - ? WHERE activity = ? AND sku = ? AND available >= ?",
		o.Quantity, o.Activity, o.SKU, o.Quantity)
	if err != nil {
		return fmt.Errorf("take stock for %s: %w", o.ID, err)
	}
	if n, err := res.RowsAffected(); err != nil || n == 0 {
		return errors.Join(ErrSoldOut, err)
	}
	if err := tx.Commit(); err != nil {
		return fmt.Errorf("commit order %s: %w", o.ID, err)
	}
	return nil
}
