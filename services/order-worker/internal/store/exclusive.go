package store

import (
	"context"
	"crypto/sha256"
	"database/sql"
	"encoding/hex"
	"fmt"
	"time"
)

// Exclusively runs do while this process alone holds the named lock, and says whether it did: false
// means that another has it. The lock belongs to a connection: it is gone with the process that held it,
// however that ended. It may also be gone while do still runs; what do writes has to be guarded by more
// than the lock.
func (s *Store) Exclusively(ctx context.Context, name string, do func() error) (ran bool, err error) {
	conn, err := s.db.Conn(ctx)
	if err != nil {
		return false, fmt.Errorf("connect: %w", err)
	}
	defer func() { _ = conn.Close() }()
	var schema string
	if err := conn.QueryRowContext(ctx, "SELECT DATABASE()").Scan(&schema); err != nil {
		return false, fmt.Errorf("lock: %w", err)
	}
	sum := sha256.Sum256([]byte(schema + "/" + name)) // locks are the server's, and names at most 64 characters
	key := "seckill." + hex.EncodeToString(sum[:16])
	var got sql.NullInt64
	if err := conn.QueryRowContext(ctx, "SELECT GET_LOCK(?, 0)", key).Scan(&got); err != nil {
		return false, fmt.Errorf("lock: %w", err)
	}
	if got.Int64 != 1 {
		return false, nil
	}
	rest := s.keepAlive(ctx, conn)
	defer func() {
		rest()
		free, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
		defer cancel()
		if _, ferr := conn.ExecContext(free, "DO RELEASE_LOCK(?)", key); ferr != nil {
			// The connection goes, and the lock with it.
			discard(conn)
		}
	}()
	return true, do()
}

// keepAlive has the server hear from the connection, which would be ended if it said nothing for
// SessionIdle. A process that is frozen says nothing, and loses it.
func (s *Store) keepAlive(ctx context.Context, conn *sql.Conn) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		tick := time.NewTicker(s.cfg.SessionIdle / 3)
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
				if err := conn.PingContext(ctx); err != nil {
					return // the connection is gone, and the lock with it
				}
			}
		}
	}()
	return func() {
		cancel()
		<-done
	}
}
