// Package httpapi is the storefront API over HTTP: routes, strict input, tokens and signatures, and
// RFC 9457 errors. What a call means is checkout's matter.
//
// openapi.yaml beside this file is the contract; the tests check every answer against it.
package httpapi
