// Package rehearse plays a sale against the deployed system in a shadow activity and then checks
// every promise: the client's own log of answers is joined with what MySQL and Redis hold.
//
// Run drives it; Check is the pure part (log and snapshot in, figures out), so that each kind of
// damage can be tested without servers. Everything goes through the storefront API and the admin
// API: this package knows neither store.
package rehearse
