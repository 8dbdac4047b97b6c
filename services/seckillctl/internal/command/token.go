package command

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/golang-jwt/jwt/v5"
	"github.com/spf13/cobra"

	"seckill/pkg/order"
)

// minSecret is the shortest key that HS256 should have (RFC 7518, 3.2).
const minSecret = 32

type mintedToken struct {
	Token     string    `json:"token"`
	UserID    string    `json:"user_id"`
	ExpiresAt time.Time `json:"expires_at"`
}

func tokenCommand(env *Env) *cobra.Command {
	var user string
	var ttl time.Duration
	mint := &cobra.Command{
		Use: "mint --user U", Short: "Make a buyer's token for development, signed with SECKILL_AUTH_JWT_SECRET", Args: exactly(),
		RunE: func(*cobra.Command, []string) error {
			if !order.ValidUserID(user) {
				return usagef("user must be 1 to %d of A-Za-z0-9_-", order.MaxUserID)
			}
			if ttl <= 0 {
				return usagef("ttl must be positive")
			}
			secret, err := jwtSecret(env)
			if err != nil {
				return err
			}
			now := time.Now().UTC().Truncate(time.Second)
			m := mintedToken{UserID: user, ExpiresAt: now.Add(ttl)}
			m.Token, err = jwt.NewWithClaims(jwt.SigningMethodHS256, jwt.RegisteredClaims{
				Subject:   user,
				IssuedAt:  jwt.NewNumericDate(now),
				ExpiresAt: jwt.NewNumericDate(m.ExpiresAt),
			}).SignedString([]byte(secret))
			if err != nil {
				return fmt.Errorf("sign token: %w", err)
			}
			if env.output == "table" { // bare, so that $(seckillctl token mint --user u) works
				_, err := fmt.Fprintln(env.Out, m.Token)
				return err
			}
			return env.Print(m, Table{
				Header: []string{"token", "user_id", "expires_at"},
				Rows:   [][]string{{m.Token, m.UserID, timeText(m.ExpiresAt)}},
			})
		},
	}
	mint.Flags().StringVar(&user, "user", "", "the token's subject")
	mint.Flags().DurationVar(&ttl, "ttl", time.Hour, "how long it is valid")
	_ = mint.MarkFlagRequired("user")
	return group("token", "Buyers' tokens (development)", mint)
}

func jwtSecret(env *Env) (string, error) {
	secret := env.Getenv("SECKILL_AUTH_JWT_SECRET")
	if file := env.Getenv("SECKILL_AUTH_JWT_SECRET_FILE"); secret == "" && file != "" {
		raw, err := os.ReadFile(file) //nolint:gosec // the operator names the file
		if err != nil {
			return "", fmt.Errorf("read SECKILL_AUTH_JWT_SECRET_FILE: %w", err)
		}
		secret = strings.TrimRight(string(raw), "\r\n")
	}
	if secret == "" {
		return "", errors.New("SECKILL_AUTH_JWT_SECRET is not set: tokens can only be made where the signing key is")
	}
	if len(secret) < minSecret {
		return "", fmt.Errorf("SECKILL_AUTH_JWT_SECRET is shorter than %d bytes", minSecret)
	}
	return secret, nil
}
