// Package lua holds the scripts that change Redis, one file each. Nothing else writes to it.
package lua
