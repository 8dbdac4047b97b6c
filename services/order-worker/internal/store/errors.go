package store

import (
	"context"
	"database/sql/driver"
	"errors"
	"io"
	"net"

	"github.com/go-sql-driver/mysql"
)

// Error codes of the server.
const (
	codeDuplicate   = 1062
	codeLockTimeout = 1205
	codeDeadlock    = 1213
	codeSnapshot    = 1020 // MariaDB: record has changed since last read
)

// restartCodes are the errors after which a transaction starts again from its first line.
var restartCodes = map[uint16]bool{codeLockTimeout: true, codeDeadlock: true, codeSnapshot: true}

// contentCodes are the errors that say something about the values handed in, and nothing about the
// server: the same values would fail for ever.
var contentCodes = map[uint16]bool{
	1048: true, // column cannot be null
	1264: true, // out of range
	1265: true, // data truncated
	1292: true, // incorrect datetime
	1366: true, // incorrect string value
	1406: true, // data too long
	1690: true, // arithmetic out of range
	3140: true, // invalid JSON
	3819: true, // check constraint (MySQL)
	4025: true, // check constraint (MariaDB)
}

func errorCode(err error) uint16 {
	var me *mysql.MySQLError
	if errors.As(err, &me) {
		return me.Number
	}
	return 0
}

// IsDuplicate reports whether err is a duplicate key (1062).
func IsDuplicate(err error) bool { return errorCode(err) == codeDuplicate }

// IsContent reports whether err blames the values that were to be written: they could never be.
func IsContent(err error) bool {
	var me *mysql.MySQLError
	if !errors.As(err, &me) {
		return false
	}
	return contentCodes[me.Number] || sqlClass(me) == "22" // data exceptions
}

func sqlClass(me *mysql.MySQLError) string { return string(me.SQLState[:2]) }

// awayCodes are refusals of a server that will take us later.
var awayCodes = map[uint16]bool{
	1040: true, // too many connections
	1053: true, // shutdown in progress
	1129: true, // host blocked for too many errors
	1203: true, // too many connections of this user
	1205: true,
	1213: true,
	1290: true, // read-only
	1836: true, // read-only
	1927: true, // connection killed
}

// IsAway reports whether err says that the database cannot be reached, or does not take us now, as
// opposed to refusing what was asked.
func IsAway(err error) bool {
	if err == nil {
		return false
	}
	var network net.Error
	return awayCodes[errorCode(err)] || errors.As(err, &network) || errors.Is(err, driver.ErrBadConn) || errors.Is(err, mysql.ErrInvalidConn) ||
		errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, context.DeadlineExceeded)
}
