// Package acceptance drives the built programs from outside and checks the promises of the system.
package acceptance
