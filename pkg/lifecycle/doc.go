// Package lifecycle starts the parts of a program, keeps them running, and stops them in reverse
// order, each within a time of its own.
//
// The order of Add is the order of dependence: what is added first is stopped last. So a program
// adds its connections, then what works on them, then the listener through which work comes in.
//
//	g := lifecycle.New(log, lifecycle.Options{Readiness: ready})
//	g.Add(lifecycle.Component{Name: "metrics", Run: metrics.Run})
//	g.Add(lifecycle.Component{Name: "broker", Start: client.Connect, Stop: client.Close})
//	g.Add(lifecycle.Component{Name: "http", Run: srv.Run, Stop: srv.Shutdown})
//	return g.Run(ctx)
package lifecycle
