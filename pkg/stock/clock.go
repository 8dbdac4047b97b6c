package stock

import (
	"context"
	"fmt"
	"time"

	"github.com/redis/go-redis/v9"
)

// Now reads Redis' clock, the one that decides when a sale opens and ends. It is as good as the round
// trip is short. In a cluster any node may answer; what decides is still the clock of the node that
// runs the script.
func (c *Client) Now(ctx context.Context) (time.Time, error) {
	cmd := redis.NewTimeCmd(context.Background(), "time")
	if err := c.submit(ctx, cmd); err != nil {
		return time.Time{}, fmt.Errorf("read clock of redis: %w", err)
	}
	now, err := cmd.Result()
	if err != nil {
		return time.Time{}, fmt.Errorf("read clock of redis: %w", err)
	}
	return now.UTC(), nil
}
