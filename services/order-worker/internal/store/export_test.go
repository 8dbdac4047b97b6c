package store

import "context"

// MigrateTo goes up to a version.
func (s *Store) MigrateTo(ctx context.Context, version uint) error { return s.migrateTo(ctx, version) }

// MigrationLock is the name of the schema's lock.
func (s *Store) MigrationLock() string { return migrationLock(s.dsn.DBName) }
