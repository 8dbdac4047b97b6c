// Package lua holds the scripts that change Redis, one file each. Nothing else writes to it.
//
// Conventions of every script: all keys come through KEYS and carry one hash tag, so one call stays
// in one slot; ids and counters stay strings; times are milliseconds of Redis' own clock; everything
// is checked, types included, before the first write, because a script that stops half-way keeps
// what it has written. The shebang makes Redis refuse the whole call when it is full, read-only or
// without its replicas, before the first line runs.
//
// A purchase record is a hash of few short fields:
//
//	s  status: r reserved, p pending, d paid, c cancelled, f refunded, j rejected
//	o  user|sku|pool|quantity: what a release must match
//	x  reserved at (ms)|unit price (minor units)|currency|payment time-out (ms)|epoch|region
//	i  idempotency key, until the row is in MySQL (absent without one)
//	w  reason of a final state
//	d  1: money arrived that has to go back
//	m  when money arrived that is on its way to MySQL (ms), until the order is paid
package lua

import _ "embed"

// The scripts, as they are sent to Redis.
var (
	//go:embed reserve.lua
	Reserve string
	//go:embed confirm.lua
	Confirm string
	//go:embed release.lua
	Release string
	//go:embed park.lua
	Park string
	//go:embed unpark.lua
	Unpark string
	//go:embed paying.lua
	Paying string
	//go:embed refund_due.lua
	RefundDue string
	//go:embed refund_receipt.lua
	RefundReceipt string
	//go:embed announce.lua
	Announce string
	//go:embed warm_prepare.lua
	WarmPrepare string
	//go:embed warm_open.lua
	WarmOpen string
	//go:embed pause.lua
	Pause string
	//go:embed end.lua
	End string
	//go:embed qualify.lua
	Qualify string
	//go:embed fence.lua
	Fence string
	//go:embed cleanup_records.lua
	CleanupRecords string
	//go:embed cleanup_keys.lua
	CleanupKeys string
	//go:embed settle.lua
	Settle string
	//go:embed add_stock.lua
	AddStock string
	//go:embed repair.lua
	Repair string
	//go:embed rebuild_records.lua
	RebuildRecords string
	//go:embed rebuild_wipe.lua
	RebuildWipe string
)
