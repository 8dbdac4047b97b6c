// Command order-api.
package main

func main() {}
