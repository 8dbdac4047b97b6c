package messaging

import (
	"errors"
	"net/url"
	"strings"

	amqp "github.com/rabbitmq/amqp091-go"
)

// errURL never tells more: the texts of net/url quote the address, password included.
var errURL = errors.New("rabbitmq url: not of the form amqp[s]://user:password@host:port/vhost")

// parseURL reads the broker's address. User and password may stand in it as they are: what is not
// already percent-encoded is encoded first, taking everything up to the last @ as credentials.
func parseURL(raw string) (amqp.URI, error) {
	if raw == "" {
		return amqp.URI{}, errors.New("rabbitmq url: missing")
	}
	scheme, rest, ok := strings.Cut(raw, "://")
	if !ok || scheme != "amqp" && scheme != "amqps" {
		return amqp.URI{}, errors.New("rabbitmq url: must begin with amqp:// or amqps://")
	}
	if i := strings.LastIndexByte(rest, '@'); i >= 0 {
		user, password, hasPassword := strings.Cut(rest[:i], ":")
		info := url.User(unescape(user))
		if hasPassword {
			info = url.UserPassword(unescape(user), unescape(password))
		}
		rest = info.String() + rest[i:]
	}
	u, err := amqp.ParseURI(scheme + "://" + rest)
	if err != nil || u.Host == "" {
		return amqp.URI{}, errURL
	}
	return u, nil
}

// unescape undoes percent-encoding if s is encoded throughout; else s is what was meant.
func unescape(s string) string {
	if strings.ContainsAny(s, "/?#[]@: ") {
		return s
	}
	if d, err := url.PathUnescape(s); err == nil {
		return d
	}
	return s
}
