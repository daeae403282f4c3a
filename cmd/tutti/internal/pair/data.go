package pair

import "encoding/binary"

// word returns the eight bytes at 8*i of the data of a turn.
func word(seed uint64, i int) uint64 {
	return (seed*0x9e3779b97f4a7c15 ^ uint64(i)) * 0xd1b54a32d192ed03
}

// fill writes the data of a turn.
func fill(b []byte, seed uint64) {
	var last [8]byte
	for i := 0; len(b) > 0; i++ {
		if len(b) < 8 {
			binary.LittleEndian.PutUint64(last[:], word(seed, i))
			copy(b, last[:])
			return
		}
		binary.LittleEndian.PutUint64(b, word(seed, i))
		b = b[8:]
	}
}

// wrong counts the bytes that are not those of fill.
func wrong(b []byte, seed uint64) (n int64) {
	for i := 0; len(b) > 0; i++ {
		var want [8]byte
		binary.LittleEndian.PutUint64(want[:], word(seed, i))
		k := min(len(b), 8)
		if string(b[:k]) != string(want[:k]) {
			for j, x := range b[:k] {
				if x != want[j] {
					n++
				}
			}
		}
		b = b[k:]
	}
	return n
}
