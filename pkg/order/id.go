package order

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/oklog/ulid/v2"
)

// ErrInvalidID says that a text is not an order id.
var ErrInvalidID = errors.New("invalid order id")

// MaxBuckets is the largest number of buckets a sale can be cut into. With it the longest order id
// is 32 + 1 + 4 + 1 + 26 = 64 characters.
const MaxBuckets = 1024

// ID names an order: "<activity>-<bucket>-<ULID>". It is parsed from the right, because activity
// ids may contain dashes. An order is found from its id alone, without a database: activity and
// bucket give the Redis hash tag.
type ID struct {
	Activity string
	Bucket   int
	ULID     string // 26 characters, Crockford base 32, upper case
}

// String gives the id's one spelling.
func (id ID) String() string {
	return id.Activity + "-" + strconv.Itoa(id.Bucket) + "-" + id.ULID
}

// ParseID reads an order id. It accepts the canonical spelling only: an id that is not equal to its
// own String is refused, so that one order cannot be addressed by two texts.
func ParseID(s string) (ID, error) {
	if len(s) > 64 {
		return ID{}, fmt.Errorf("%w: longer than 64 characters", ErrInvalidID)
	}
	i := strings.LastIndexByte(s, '-')
	if i < 0 {
		return ID{}, fmt.Errorf("%w: %q", ErrInvalidID, s)
	}
	j := strings.LastIndexByte(s[:i], '-')
	if j < 0 {
		return ID{}, fmt.Errorf("%w: %q", ErrInvalidID, s)
	}
	bucket, err := strconv.Atoi(s[j+1 : i])
	if err != nil || bucket < 0 || bucket >= MaxBuckets {
		return ID{}, fmt.Errorf("%w: bucket in %q", ErrInvalidID, s)
	}
	if _, err := ulid.ParseStrict(s[i+1:]); err != nil {
		return ID{}, fmt.Errorf("%w: %q: %w", ErrInvalidID, s, err)
	}
	id := ID{Activity: s[:j], Bucket: bucket, ULID: s[i+1:]}
	if !ValidActivityID(id.Activity) || id.String() != s || strings.ToUpper(id.ULID) != id.ULID {
		return ID{}, fmt.Errorf("%w: %q", ErrInvalidID, s)
	}
	return id, nil
}

// IDs makes order ids. It is safe for concurrent use.
type IDs struct {
	mu      sync.Mutex
	entropy io.Reader
}

// NewIDs returns a source of ids that draws 80 random bits for each millisecond and counts upwards
// within it, so that ids of one process sort by creation.
func NewIDs() *IDs {
	return &IDs{entropy: ulid.Monotonic(rand.Reader, 0)}
}

// New makes an id for an order in the given activity and bucket.
func (g *IDs) New(activity string, bucket int) (ID, error) {
	g.mu.Lock()
	u, err := ulid.New(ulid.Timestamp(time.Now()), g.entropy)
	g.mu.Unlock()
	if err != nil {
		return ID{}, fmt.Errorf("make order id: %w", err)
	}
	return ID{Activity: activity, Bucket: bucket, ULID: u.String()}, nil
}
