// SPDX-License-Identifier: MIT
package main

import (
	"fmt"

	"tandem"
)

func must[T any](value T, err error) T {
	if err != nil {
		panic(err)
	}
	return value
}

func main() {
	q, k, v, o := make([]float32, 8*64), make([]float32, 2*64), make([]float32, 2*64), make([]float32, 8*64)
	v[0] = 3
	model := must(tandem.NewModel(tandem.LayerOptions{NQHeads: 8, NKVHeads: 2, KHeadDim: 64}))
	cache := must(tandem.NewCache(must(tandem.NewEngine(nil)), model, nil))
	session, sequence := must(tandem.NewSession(cache, nil)), must(cache.CreateSequence())
	defer session.Close() // or leave it to the garbage collector
	err := session.Attend(&tandem.Attend{Sequences: []tandem.SequenceID{sequence}, QLens: []int64{1},
		Q: tandem.Float32s(q, 1, 8, 64), K: tandem.Float32s(k, 1, 2, 64), V: tandem.Float32s(v, 1, 2, 64),
		O: tandem.Float32s(o, 1, 8, 64)})
	fmt.Println(o[0], err) // 3 <nil>: one token alone gets all of the attention
}
