// Package noop is the reference of every ratio: a bare gin handler that answers 202 with a JSON
// body of the same size as the real answer, and does nothing else.
package noop

import (
	"net/http"
	"strings"

	"github.com/gin-gonic/gin"
)

// Handler answers each POST with a body of size bytes. The body says "reserved", so that the load
// tool's check of the answers costs the same as with the real service.
func Handler(size int) http.Handler {
	gin.SetMode(gin.ReleaseMode)
	const start, end = `{"status":"reserved","pad":"`, `"}`
	body := []byte(start + strings.Repeat("x", max(0, size-len(start)-len(end))) + end)
	r := gin.New()
	r.POST("/v1/activities/:id/orders", func(c *gin.Context) {
		c.Data(http.StatusAccepted, "application/json; charset=utf-8", body)
	})
	return r
}
