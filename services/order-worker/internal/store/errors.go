package store

import (
	"errors"

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

// IsContent reports whether err blames the values that were to be written. Everything else that a
// statement can fail with is the server's or the way's trouble: wait, spend no attempt, try again.
func IsContent(err error) bool { return contentCodes[errorCode(err)] }
