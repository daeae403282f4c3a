package pg

import (
	"flag"
	"fmt"
	"hash/fnv"
	"io"
	"os"
	"reflect"
	"strings"
	"testing"

	"tutti/collectives"
	"tutti/mem"
	"tutti/p2p"
	"tutti/pg/internal/exec"
	"tutti/pg/internal/join"
	"tutti/pg/internal/resync"
	"tutti/pg/membership"
)

var updateFormat = flag.Bool("format.update", false, "write testdata/format.txt anew")

// number sets everything in v to values that differ.
func number(v reflect.Value, next *uint64) {
	*next++
	switch n := *next; v.Kind() {
	case reflect.Struct:
		for i := range v.NumField() {
			if v.Type().Field(i).IsExported() {
				number(v.Field(i), next)
			}
		}
	case reflect.Array:
		for i := range v.Len() {
			number(v.Index(i), next)
		}
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 2, 2))
		for i := range v.Len() {
			number(v.Index(i), next)
		}
	case reflect.Bool:
		v.SetBool(true)
	case reflect.String:
		v.SetString(fmt.Sprint("text ", n))
	case reflect.Int, reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64:
		v.SetInt(int64(n % 128))
	case reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
		v.SetUint(n % 256)
	}
}

// filled returns a T in which everything is set.
func filled[T any]() (t T) {
	number(reflect.ValueOf(&t).Elem(), new(uint64))
	return t
}

// samples are examples of what ranks send each other, and of what they derive, by name.
var samples = []struct {
	what string
	to   func(w io.Writer) error
}{
	{"frame", func(w io.Writer) error {
		h, b := filled[p2p.Header](), [p2p.HeaderSize]byte{}
		h.Encode(&b)
		_, err := w.Write(b[:])
		return err
	}},
	{"credit", func(w io.Writer) error {
		for _, n := range windowSizes {
			fmt.Fprintln(w, p2p.DefaultWindow(n))
		}
		return nil
	}},
	{"token", func(w io.Writer) error {
		for _, k := range collectives.Kinds() {
			for _, a := range collectives.Algorithms(k) {
				c := filled[exec.Call]()
				c.Kind = k
				fmt.Fprintln(w, c.Token(7, a))
			}
		}
		return nil
	}},
	{"place", func(w io.Writer) error {
		b := make([]byte, join.PlaceSize)
		filled[join.Place]().Encode(b)
		_, err := w.Write(b)
		return err
	}},
	{"memory", func(w io.Writer) error {
		r := mem.Remote{ID: 1, Generation: 2, Base: 3, Len: 4, Rights: mem.Rights(1),
			Loc: "cpu:0", Keys: []mem.Key{{Path: "path", Blob: []byte("blob")}}}
		b, err := r.MarshalBinary()
		w.Write(b)
		return err
	}},
	{"notices", func(w io.Writer) error {
		t := filled[resync.Told]()
		t.More = told{filled[join.Place](), 1, true, 2, []byte("cause")}
		abort := filled[wireAbort]()
		fmt.Fprintf(w, "%x %x %x %x", encodeTold(t), encodePresent(filled[resync.Point]()),
			ballot{n: 1, yes: [2]bool{true, false}, knows: true}.encode(), abort.encode())
		return nil
	}},
	{"view", func(w io.Writer) error {
		v := membership.First([]uint64{7, 8, 9}).Remove(1)
		fmt.Fprintf(w, "%x %x", membership.EncodeStored(7, v), membership.Report{Epoch: 3, Seq: 2,
			Late: []membership.Peer{{Slot: 2, Incarnation: 9}}}.Encode())
		return nil
	}},
	{"plans", func(w io.Writer) error {
		for _, k := range collectives.Kinds() {
			for _, a := range collectives.Algorithms(k) {
				for _, n := range []int{1, 2, 3, 4, 8} {
					for _, count := range []int{0, 1, 7, 4096, 300_000} {
						s := collectives.Shape{Kind: k, Size: n, Active: upTo(n), Rank: n - 1, Root: n / 2, Elem: 4,
							Count: count}
						for range n {
							s.Counts, s.RecvCounts = append(s.Counts, count), append(s.RecvCounts, count)
						}
						p, err := collectives.Build(a, s)
						if fmt.Fprintln(w, k, a, n, count); err == nil {
							fmt.Fprintln(w, p)
						}
					}
				}
			}
		}
		fmt.Fprintln(w, exec.VectorBlock)
		return nil
	}},
}

// What ranks send each other, and derive, changes with planFormat, and planFormat with that.
func TestPlanFormatIsRaised(t *testing.T) {
	var now strings.Builder
	fmt.Fprintln(&now, "planFormat", planFormat)
	for _, s := range samples {
		h := fnv.New64a()
		if err := s.to(h); err != nil {
			t.Fatalf("%s: %v", s.what, err)
		}
		fmt.Fprintf(&now, "%s %016x\n", s.what, h.Sum64())
	}
	const file = "testdata/format.txt"
	if *updateFormat {
		if err := os.WriteFile(file, []byte(now.String()), 0o666); err != nil {
			t.Fatal(err)
		}
	}
	was, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if string(was) != now.String() {
		t.Errorf("planFormat or what it stands for has changed. Raise planFormat, unless it was raised since the "+
			"last release of what the file has, and write the file anew with -format.update. It has\n%s\nwant\n%s",
			was, &now)
	}
}

// The version of the terms has what ranks must divide and credit alike.
func TestTermsHaveEffectiveSizes(t *testing.T) {
	if termsHash(exec.VectorBlock, p2p.DefaultWindow) != termsHash(0, p2p.DefaultWindow) {
		t.Error("a size that is the default has other terms than the default")
	}
	all := map[uint64]string{}
	for what, h := range map[string]uint64{
		"now":            termsHash(0, p2p.DefaultWindow),
		"another block":  termsHash(4096, p2p.DefaultWindow),
		"another credit": termsHash(0, func(n int) int { return p2p.DefaultWindow(n) * 2 }),
		"another credit of large jobs": termsHash(0, func(n int) int {
			return max(p2p.DefaultWindow(n), 64<<10)
		}),
	} {
		if other, same := all[h]; same {
			t.Errorf("%s and %s have the same terms", what, other)
		}
		all[h] = what
	}
}
