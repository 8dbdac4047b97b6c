// Package app builds order-api from its configuration: the same constructor for production and for
// the component tests.
package app
