// Package failpoint lets tests stop a program at a named place: between a commit and an ack, say.
//
// It does so in programs built with the tag "failpoints" only; in all others Hit is an empty
// function that the compiler removes.
//
// SECKILL_FAILPOINTS holds what is armed at the start: name=action[:arg], several separated by
// semicolons. name@N=action fires at the N-th hit only. Actions:
//
//	kill          SIGKILL to the own process
//	panic         panic
//	error         Hit returns ErrInjected
//	sleep:<dur>   Hit waits that long, or until its context ends
//	pause:<file>  Hit waits while the file exists; it makes <file>.hit when it gets there
package failpoint

import "errors"

// ErrInjected is what Hit returns for the action "error".
var ErrInjected = errors.New("failure injected by a fail point")

// ErrDisabled is what Arm returns in a program built without the tag "failpoints".
var ErrDisabled = errors.New("fail points are not built in (build tag failpoints)")
