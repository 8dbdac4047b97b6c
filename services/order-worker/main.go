// Command order-worker.
package main

func main() {}
