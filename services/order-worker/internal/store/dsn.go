package store

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"time"

	"github.com/go-sql-driver/mysql"
)

// completeDSN reads a DSN and sets what the program depends on.
func completeDSN(dsn string) (*mysql.Config, error) {
	if dsn == "" {
		return nil, errors.New("mysql dsn is empty")
	}
	c, err := mysql.ParseDSN(dsn)
	if err != nil {
		// The driver's error can repeat a piece of the DSN, and with it of the password.
		return nil, errors.New("mysql dsn cannot be read; wanted user:password@tcp(host:port)/schema")
	}
	if c.DBName == "" {
		return nil, errors.New("mysql dsn names no schema")
	}
	c.ParseTime = true
	c.Loc = time.UTC
	// Without it the driver counts changed rows only: an UPDATE that sets what is there already
	// would look like one that found nothing.
	c.ClientFoundRows = true
	// One round trip for each statement instead of prepare, execute, close; the limit of 65,535
	// placeholders (error 1390) does not exist then. Safe with utf8mb4.
	c.InterpolateParams = true
	c.MultiStatements = false
	c.RejectReadOnly = true // a failover left us at a replica: drop the connection
	if c.Timeout == 0 {
		c.Timeout = 5 * time.Second
	}
	if c.ReadTimeout == 0 {
		c.ReadTimeout = 30 * time.Second
	}
	if c.WriteTimeout == 0 {
		c.WriteTimeout = 30 * time.Second
	}
	return c, nil
}

// sqlMode is strict: a text too long or an impossible date is an error, never cut or zeroed.
const sqlMode = "ONLY_FULL_GROUP_BY,STRICT_TRANS_TABLES,STRICT_ALL_TABLES,NO_ZERO_IN_DATE,NO_ZERO_DATE,ERROR_FOR_DIVISION_BY_ZERO,NO_ENGINE_SUBSTITUTION"

// connector makes connections whose session settings are ours. The isolation level is set by
// statement because its system variable has one name in MySQL 8 and another in MariaDB.
type connector struct {
	driver.Connector
	setup []string
}

func newConnector(c *mysql.Config, lockWait, idle time.Duration) (driver.Connector, error) {
	inner, err := mysql.NewConnector(c)
	if err != nil {
		return nil, fmt.Errorf("mysql connector: %w", err)
	}
	return &connector{Connector: inner, setup: []string{
		fmt.Sprintf("SET SESSION time_zone='+00:00', sql_mode='%s', innodb_lock_wait_timeout=%d, wait_timeout=%d",
			sqlMode, max(1, int(lockWait/time.Second)), max(1, int(idle/time.Second))),
		"SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED",
	}}, nil
}

// Connect implements driver.Connector.
func (c *connector) Connect(ctx context.Context) (driver.Conn, error) {
	conn, err := c.Connector.Connect(ctx)
	if err != nil {
		return nil, err
	}
	ex, ok := conn.(driver.ExecerContext)
	if !ok {
		return nil, errors.Join(errors.New("mysql driver cannot execute directly"), conn.Close())
	}
	for _, stmt := range c.setup {
		if _, err := ex.ExecContext(ctx, stmt, nil); err != nil {
			return nil, errors.Join(fmt.Errorf("set up session: %w", err), conn.Close())
		}
	}
	return conn, nil
}
