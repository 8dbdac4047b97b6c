package httpapi

import (
	"net/http"
	"slices"

	"github.com/gin-gonic/gin"

	"seckill/pkg/order"
	"seckill/pkg/stock"
	"seckill/services/order-api/internal/checkout"
)

// orderBody is an order as its buyer sees it. What a receipt does not keep is left out.
type orderBody struct {
	OrderID        string `json:"order_id"`
	Status         string `json:"status"`
	Reason         string `json:"reason,omitempty"`
	RefundDue      bool   `json:"refund_due,omitzero"`
	ActivityID     string `json:"activity_id"`
	SKUID          string `json:"sku_id,omitempty"`
	Quantity       int    `json:"quantity,omitzero"`
	Region         string `json:"region,omitempty"`
	Pool           string `json:"pool,omitempty"`
	UnitPriceMinor int64  `json:"unit_price_minor"`
	AmountMinor    int64  `json:"amount_minor"`
	Currency       string `json:"currency,omitempty"`
	ReservedAt     string `json:"reserved_at,omitempty"`
	PayBefore      string `json:"pay_before,omitempty"`
}

func orderOf(r *stock.Record) *orderBody {
	b := &orderBody{
		OrderID: r.ID.String(), Status: string(r.Status), Reason: r.Reason, RefundDue: r.RefundDue,
		ActivityID: r.ID.Activity, SKUID: r.SKU, Quantity: r.Quantity, Region: r.Region, Pool: r.Pool,
		UnitPriceMinor: r.UnitPriceMinor, Currency: r.Currency,
	}
	if amount, err := r.AmountMinor(); err == nil {
		b.AmountMinor = amount
	}
	if !r.ReservedAt.IsZero() {
		b.ReservedAt = timestamp(r.ReservedAt)
	}
	if !r.PayBefore.IsZero() {
		b.PayBefore = timestamp(r.PayBefore)
	}
	return b
}

type reserveBody struct {
	SKUID    string `json:"sku_id"`
	Quantity int64  `json:"quantity"`
	Region   string `json:"region"`
}

func (a *api) reserve(c *gin.Context) error {
	caller, err := a.tokens.caller(c.Request.Header)
	if err != nil {
		return err
	}
	key, err := idempotencyKey(c.Request.Header)
	if err != nil {
		return err
	}
	var in reserveBody
	if err := a.bodies.read(c.Request, func(body []byte) (err error) { in, err = a.wishes.decode(body); return err }); err != nil {
		return err
	}
	switch {
	case !order.ValidSKUID(in.SKUID):
		return invalid("sku_id has to be 1 to 32 of A-Za-z0-9_-")
	case in.Quantity < 1 || in.Quantity > order.MaxQuantity:
		return invalid("quantity has to be a whole number from 1 to 1000000")
	case !order.ValidPool(in.Region):
		return invalid("region has to be 1 to 32 of a-z0-9_-")
	}
	got, err := a.svc.Reserve(c.Request.Context(), checkout.Request{
		Caller:     caller,
		ActivityID: c.Param("activity"),
		SKU:        in.SKUID,
		Quantity:   int(in.Quantity),
		Region:     in.Region,
		IdemKey:    key,
		Trace:      trace(c.Request.Header),
	})
	if err != nil {
		return err
	}
	body := orderOf(&got.Record)
	c.Writer.Header()["Location"] = []string{"/v1/orders/" + body.OrderID}
	return a.accepted(c, http.StatusAccepted, body)
}

// idempotencyKey reads the optional header, bare or as a quoted string.
func idempotencyKey(h http.Header) (string, error) {
	values, ok := h["Idempotency-Key"]
	if !ok {
		return "", nil
	}
	key := values[0]
	if len(key) >= 2 && key[0] == '"' && key[len(key)-1] == '"' {
		key = key[1 : len(key)-1]
	}
	if len(values) != 1 || !order.ValidIdempotencyKey(key) {
		return "", invalid("Idempotency-Key has to be 1 to 64 of A-Za-z0-9_-, bare or quoted")
	}
	return key, nil
}

type mineBody struct {
	ActivityID string       `json:"activity_id"`
	Orders     []*orderBody `json:"orders"`
}

func (a *api) mine(c *gin.Context) error {
	caller, err := a.tokens.caller(c.Request.Header)
	if err != nil {
		return err
	}
	records, err := a.svc.Mine(c.Request.Context(), caller, c.Param("activity"))
	if err != nil {
		return err
	}
	body := mineBody{ActivityID: c.Param("activity"), Orders: make([]*orderBody, len(records))}
	for i := range records {
		body.Orders[i] = orderOf(&records[i])
	}
	return a.personal(c, http.StatusOK, body)
}

func (a *api) order(c *gin.Context) error {
	caller, err := a.tokens.caller(c.Request.Header)
	if err != nil {
		return err
	}
	rec, err := a.svc.Order(c.Request.Context(), caller, c.Param("order"))
	if err != nil {
		return err
	}
	return a.personal(c, http.StatusOK, orderOf(&rec))
}

func (a *api) cancel(c *gin.Context) error {
	caller, err := a.tokens.caller(c.Request.Header)
	if err != nil {
		return err
	}
	rec, err := a.svc.Cancel(c.Request.Context(), caller, c.Param("order"), trace(c.Request.Header))
	if err != nil {
		return err
	}
	return a.personal(c, http.StatusAccepted, orderOf(&rec))
}

type itemBody struct {
	SKUID      string         `json:"sku_id"`
	PriceMinor int64          `json:"price_minor"`
	Pools      map[string]int `json:"pools"`
	Regions    map[string]int `json:"regions"`
}

type activityBody struct {
	ActivityID            string     `json:"activity_id"`
	Name                  string     `json:"name"`
	Phase                 string     `json:"phase"`
	ServerTime            string     `json:"server_time"`
	StartsAt              string     `json:"starts_at"`
	EndsAt                string     `json:"ends_at"`
	PerUserLimit          int        `json:"per_user_limit"`
	PaymentTimeoutSeconds int64      `json:"payment_timeout_seconds"`
	Currency              string     `json:"currency"`
	Qualification         string     `json:"qualification"`
	Items                 []itemBody `json:"items"`
}

func (a *api) activity(c *gin.Context) error {
	snap, err := a.svc.Activity(c.Request.Context(), c.Param("activity"))
	if err != nil {
		return err
	}
	if snap.Ended && len(snap.Items) == 0 {
		return stock.ErrEnded // settled and cleaned up: only the marker is left
	}
	now := snap.Now()
	phase := snap.Phase(now)
	if !snap.Opened && phase == stock.Open {
		// Its time has come and nothing can be bought: saying "open" would send the crowd in.
		return stock.ErrNotWarmed
	}
	body := activityBody{
		ActivityID: snap.ID, Name: snap.Name, Phase: string(phase), ServerTime: timestamp(now),
		StartsAt: timestamp(snap.StartsAt), EndsAt: timestamp(snap.EndsAt), PerUserLimit: snap.PerUserLimit,
		PaymentTimeoutSeconds: int64(snap.PaymentTimeout.Seconds()), Currency: snap.Currency,
		Qualification: "none", Items: make([]itemBody, len(snap.Items)),
	}
	if snap.Qualified {
		body.Qualification = "list"
	}
	for i, it := range snap.Items {
		body.Items[i] = itemBody{
			SKUID: it.SKU, PriceMinor: it.PriceMinor,
			Pools:   make(map[string]int, len(it.Pools)),
			Regions: make(map[string]int, len(it.Pools)),
		}
		for pool := range it.Pools {
			if left, ok := snap.Levels[it.SKU][pool]; ok {
				body.Items[i].Pools[pool] = left
			}
			regionLeft(snap, it.SKU, pool, body.Items[i].Regions)
		}
		for region := range snap.RegionFallback {
			regionLeft(snap, it.SKU, region, body.Items[i].Regions)
		}
	}
	c.Writer.Header()["Cache-Control"] = []string{"public, max-age=1"}
	a.write(c, http.StatusOK, "application/json", body)
	return nil
}

// regionLeft sums what a buyer of the region may get: the region's own pool and its fallbacks. It
// sets the sum and does not add to it: a region with a pool and fallbacks is met twice.
func regionLeft(snap *checkout.Snapshot, sku, region string, into map[string]int) {
	sum, known := 0, false
	for _, pool := range snap.PoolsFor(sku, region) {
		if left, ok := snap.Levels[sku][pool]; ok {
			sum, known = sum+left, true
		}
	}
	if known {
		into[region] = sum
	}
}

type callbackBody struct {
	Type          string `json:"type"`
	OrderID       string `json:"order_id"`
	TransactionID string `json:"transaction_id"`
	AmountMinor   *int64 `json:"amount_minor"` // a pointer, so that null and absent are not 0
	Currency      string `json:"currency"`
}

type receivedBody struct {
	Received bool `json:"received"`
	Ignored  bool `json:"ignored,omitzero"`
}

func (a *api) callback(c *gin.Context) error {
	var in callbackBody
	err := a.bodies.read(c.Request, func(body []byte) error {
		if err := a.webhooks.verify(c.Request.Header, body); err != nil {
			return err
		}
		return decode(body, &in)
	})
	if err != nil {
		return err
	}
	id, err := order.ParseID(in.OrderID)
	switch {
	case in.Type == "" || len(in.Type) > 64:
		return invalid("type is missing or too long")
	case err != nil:
		return invalid("order_id is not an order id")
	case !order.ValidTransactionID(in.TransactionID):
		return invalid("transaction_id has to be 1 to 64 of A-Za-z0-9_-")
	case in.AmountMinor == nil || *in.AmountMinor < 0 || *in.AmountMinor > order.MaxAmountMinor:
		return invalid("amount_minor has to be a whole number from 0 to 1000000000000000")
	case !order.ValidCurrency(in.Currency):
		return invalid("currency has to be an ISO 4217 code")
	}
	if !slices.Contains(a.types, in.Type) {
		return a.personal(c, http.StatusAccepted, receivedBody{Received: true, Ignored: true})
	}
	err = a.svc.Pay(c.Request.Context(), checkout.Payment{
		OrderID: id, TransactionID: in.TransactionID, AmountMinor: *in.AmountMinor, Currency: in.Currency,
	}, trace(c.Request.Header))
	if err != nil {
		return err
	}
	return a.personal(c, http.StatusAccepted, receivedBody{Received: true})
}
