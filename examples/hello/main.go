// Hello is the smallest program of ranks: each adds its number to the sum of all. Try
//
//	tutti run -n 4 ./examples/hello
package main

import (
	"context"
	"fmt"
	"log"

	"tutti/pg"
)

func main() {
	ctx := context.Background()
	g, err := pg.Join(ctx, pg.Config{})
	if err != nil {
		log.Fatal(err)
	}
	x := []int{g.Rank()}
	if err := pg.AllReduce(ctx, g, x, pg.Sum); err != nil {
		log.Fatal(err)
	}
	fmt.Printf("rank %d of %d: the ranks sum to %d\n", g.Rank(), g.Size(), x[0])
	if err := g.Close(); err != nil {
		log.Fatal(err)
	}
}
