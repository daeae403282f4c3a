// Command other is another Go library of a process.
package main

import "C"

//export other
func other() {}

func main() {}
