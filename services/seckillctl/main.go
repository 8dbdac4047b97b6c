// Command seckillctl.
package main

func main() {}
