// Package acceptance drives the built programs from outside and checks the promises of the system:
// it kills them at named points, cuts their networks, and then compares what the buyers were told
// with what MySQL and Redis hold.
//
// The programs are built once, with the race detector and the fail points. Each test has a vhost, a
// schema and a key prefix of its own, or private servers where it stops them.
package acceptance
