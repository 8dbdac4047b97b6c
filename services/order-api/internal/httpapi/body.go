package httpapi

import (
	"errors"
	"io"
	"mime"
	"net/http"
	"strconv"
	"strings"
	"sync"

	"github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"
)

// maxBody is the largest body any call takes.
const maxBody = 4 << 10

// bodies lends out read buffers one byte longer than a body may be, so that a longer one shows.
type bodies struct{ pool sync.Pool }

func newBodies() *bodies {
	return &bodies{pool: sync.Pool{New: func() any { b := make([]byte, maxBody+1); return &b }}}
}

// read calls use with the body, which is valid until use returns.
func (b *bodies) read(r *http.Request, use func(body []byte) error) error {
	if err := checkContentType(r.Header); err != nil {
		return err
	}
	if r.ContentLength > maxBody {
		return tooLarge()
	}
	buf := b.pool.Get().(*[]byte)
	defer b.pool.Put(buf)
	n := 0
	for n < len(*buf) {
		m, err := r.Body.Read((*buf)[n:])
		n += m
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return invalid("the body could not be read")
		}
	}
	if n > maxBody {
		return tooLarge()
	}
	return use((*buf)[:n])
}

func checkContentType(h http.Header) error {
	unsupported := func(detail string) error {
		return newProblem(http.StatusUnsupportedMediaType, "unsupported_media_type", "The body's type is not supported").with(detail)
	}
	if enc := h.Get("Content-Encoding"); enc != "" && !strings.EqualFold(enc, "identity") {
		return unsupported("content codings are not supported")
	}
	switch ct := h.Get("Content-Type"); ct {
	case "application/json", "application/json; charset=utf-8":
		return nil
	default:
		media, params, err := mime.ParseMediaType(ct)
		if err != nil || media != "application/json" {
			return unsupported("the body has to be application/json")
		}
		if cs := params["charset"]; cs != "" && !strings.EqualFold(cs, "utf-8") {
			return unsupported("the body has to be UTF-8")
		}
		return nil
	}
}

// decode reads one JSON object strictly: names are matched by case, unknown and repeated names,
// text after the object, invalid UTF-8, and numbers that are not plain integers are refused.
func decode(body []byte, v any) error {
	err := json.Unmarshal(body, v, json.RejectUnknownMembers(true))
	if err == nil {
		return nil
	}
	var semantic *json.SemanticError
	switch {
	case errors.Is(err, jsontext.ErrDuplicateName):
		return invalid("a member is repeated")
	case errors.Is(err, json.ErrUnknownName):
		return invalid("a member is unknown")
	case errors.As(err, &semantic):
		return invalid("the value at " + strconv.Quote(string(semantic.JSONPointer)) + " has the wrong type")
	default:
		return invalid("the body is not one JSON object")
	}
}
