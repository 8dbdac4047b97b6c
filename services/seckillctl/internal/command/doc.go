// Package command is the command tree of seckillctl. Data goes to stdout and talk to stderr; the exit
// code tells a script what happened (the Code constants).
package command
