package httpapi

import (
	"testing"
	"time"

	"github.com/go-json-experiment/json"
)

func TestOrdersAreWrittenAsTheJSONLibraryWritesThem(t *testing.T) {
	full := orderBody{
		OrderID: "a-0-01M8MX81Y02EJ7VTXFMR7RX0CA", Status: "cancelled", Reason: "user_cancelled", RefundDue: true, ActivityID: "a",
		SKUID: "mug", Quantity: 2, Region: "beijing", Pool: "national", UnitPriceMinor: 1999, AmountMinor: 3998, Currency: "CNY",
		ReservedAt: "2026-11-30T00:21:31.200Z", PayBefore: "2026-11-30T00:36:31.200Z",
	}
	odd := full
	odd.Reason = "said \"no\"\n"
	for _, tc := range []struct {
		body  orderBody
		plain bool
	}{{full, true}, {orderBody{}, true}, {orderBody{OrderID: "x", UnitPriceMinor: -1}, true}, {odd, false}} {
		want, err := json.Marshal(&tc.body)
		if err != nil {
			t.Fatal(err)
		}
		got, plain := tc.body.appendJSON(nil)
		if plain != tc.plain || plain && string(got) != string(want) {
			t.Errorf("plain %v\n%s\n%s", plain, got, want)
		}
	}
}

func TestTimestampsAreWrittenAsFormatWritesThem(t *testing.T) {
	for _, at := range []time.Time{
		time.Date(2026, 11, 30, 0, 21, 31, 200e6, time.UTC), time.Date(2026, 1, 2, 3, 4, 5, 6e6, time.UTC), time.Date(1, 1, 1, 0, 0, 0, 0, time.UTC),
		time.Date(9999, 12, 31, 23, 59, 59, 999999999, time.UTC), time.Date(12345, 1, 1, 0, 0, 0, 0, time.UTC),
		time.Date(2026, 11, 30, 2, 0, 0, 0, time.FixedZone("x", 3*3600)),
	} {
		if got, want := timestamp(at), at.UTC().Format("2006-01-02T15:04:05.000Z07:00"); got != want {
			t.Errorf("%s, want %s", got, want)
		}
	}
}
