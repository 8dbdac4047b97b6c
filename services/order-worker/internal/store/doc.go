// Package store is all of MySQL and MariaDB: the connection pool with its session settings, the
// versioned migrations, the rows, and transactions that start again as a whole.
//
// A transaction:
//
//	err := st.InTx(ctx, func(tx *store.Tx) error {
//		// Runs again from its first line after a deadlock, a lock time-out or a snapshot
//		// conflict: keep nothing outside that a second run would spoil.
//		_, err := tx.ExecContext(ctx, "UPDATE …")
//		return err
//	})
//
// Everything is READ COMMITTED with the session's time zone at UTC and strict SQL mode, whatever
// the server's defaults and whatever the DSN says.
package store
