// Package admin is the operators' API of order-worker: bearer tokens with a role each, strict JSON,
// problem+json errors, and an audit row for every change.
//
// Other packages add their routes with Server.Mount before the handler is used.
package admin
