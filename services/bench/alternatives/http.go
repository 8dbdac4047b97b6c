package alternatives

import (
	"context"
	"crypto/rand"
	"errors"
	"net/http"
	"strings"
	"time"

	"github.com/gin-gonic/gin"
	"github.com/golang-jwt/jwt/v5"
)

// What a sale can be refused for.
var (
	ErrSoldOut = errors.New("sold out")
	ErrLimit   = errors.New("this user has an order already")
)

// Order is what is asked for and what is written.
type Order struct {
	ID, Activity, User, SKU string
	Quantity                int
}

// Seller takes units and writes the order; nil means that both are done.
type Seller interface {
	Sell(ctx context.Context, o Order) error
}

type body struct {
	SKU      string `json:"sku_id"`
	Quantity int    `json:"quantity"`
	Region   string `json:"region"`
}

type answer struct {
	OrderID    string    `json:"order_id"`
	Status     string    `json:"status"`
	ActivityID string    `json:"activity_id"`
	SKU        string    `json:"sku_id"`
	Quantity   int       `json:"quantity"`
	Region     string    `json:"region"`
	Pool       string    `json:"pool"`
	PayBefore  time.Time `json:"pay_before"`
}

// Handler serves POST /v1/activities/{id}/orders.
func Handler(s Seller, secret []byte) http.Handler {
	gin.SetMode(gin.ReleaseMode)
	parser := jwt.NewParser(jwt.WithValidMethods([]string{"HS256"}), jwt.WithExpirationRequired())
	key := func(*jwt.Token) (any, error) { return secret, nil }
	r := gin.New()
	r.POST("/v1/activities/:id/orders", func(c *gin.Context) {
		var claims jwt.RegisteredClaims
		token, _ := strings.CutPrefix(c.GetHeader("Authorization"), "Bearer ")
		if _, err := parser.ParseWithClaims(token, &claims, key); err != nil || claims.Subject == "" {
			refuse(c, http.StatusUnauthorized, "unauthenticated")
			return
		}
		var b body
		if err := c.ShouldBindJSON(&b); err != nil || b.Quantity < 1 || b.SKU == "" {
			refuse(c, http.StatusBadRequest, "invalid_request")
			return
		}
		o := Order{ID: c.Param("id") + "-0-" + rand.Text(), Activity: c.Param("id"), User: claims.Subject, SKU: b.SKU, Quantity: b.Quantity}
		ctx, cancel := context.WithTimeout(c.Request.Context(), 10*time.Second)
		defer cancel()
		switch err := s.Sell(ctx, o); {
		case err == nil:
			c.JSON(http.StatusAccepted, answer{
				OrderID: o.ID, Status: "reserved", ActivityID: o.Activity, SKU: o.SKU, Quantity: o.Quantity,
				Region: "national", Pool: "national", PayBefore: time.Now().UTC().Add(15 * time.Minute).Truncate(time.Millisecond),
			})
		case errors.Is(err, ErrSoldOut):
			refuse(c, http.StatusConflict, "sold_out")
		case errors.Is(err, ErrLimit):
			refuse(c, http.StatusConflict, "limit_reached")
		default:
			refuse(c, http.StatusServiceUnavailable, "temporarily_unavailable")
		}
	})
	return r
}

func refuse(c *gin.Context, status int, code string) {
	c.Header("Content-Type", "application/problem+json")
	c.JSON(status, gin.H{"type": "/problems/" + code, "status": status, "code": code})
}
