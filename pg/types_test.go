package pg_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"strings"
	"testing"

	"tutti/kernels"
	"tutti/pg"
)

// Every data type has its constant in this package, by the same name, and dtypeOf knows it.
func TestEveryDataTypeIsDeclared(t *testing.T) {
	f, err := parser.ParseFile(token.NewFileSet(), "types.go", nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	declared := map[string]string{} // by the name here: the name in package kernels
	returned := map[string]bool{}
	ast.Inspect(f, func(n ast.Node) bool {
		if r, ok := n.(*ast.ReturnStmt); ok && len(r.Results) == 1 {
			if x, ok := r.Results[0].(*ast.Ident); ok {
				returned[x.Name] = true
			}
		}
		v, ok := n.(*ast.ValueSpec)
		if !ok || len(v.Names) != 1 || len(v.Values) != 1 {
			return true
		}
		if s, ok := v.Values[0].(*ast.SelectorExpr); ok {
			if x, ok := s.X.(*ast.Ident); ok && x.Name == "kernels" {
				declared[v.Names[0].Name] = s.Sel.Name
			}
		}
		return true
	})
	for _, dt := range kernels.DTypes() {
		name := strings.TrimPrefix(dt.GoString(), "kernels.")
		if declared[name] != name {
			t.Errorf("pg.%s is kernels.%q", name, declared[name])
		}
		if !returned[name] {
			t.Errorf("no Go type is pg.%s", name)
		}
	}
}

func TestDataTypeOfAnElement(t *testing.T) {
	type (
		gradient float32
		id       uint16
		flag     bool
	)
	check := func(got, want pg.DType) {
		t.Helper()
		if got != want {
			t.Errorf("%v, want %v", got, want)
		}
	}
	check(pg.BufferOf([]int8{}).DType, pg.Int8)
	check(pg.BufferOf([]int16{}).DType, pg.Int16)
	check(pg.BufferOf([]int32{}).DType, pg.Int32)
	check(pg.BufferOf([]int64{}).DType, pg.Int64)
	check(pg.BufferOf([]int{}).DType, pg.Int64)
	check(pg.BufferOf([]uint8{}).DType, pg.Uint8)
	check(pg.BufferOf([]uint16{}).DType, pg.Uint16)
	check(pg.BufferOf([]uint32{}).DType, pg.Uint32)
	check(pg.BufferOf([]uint64{}).DType, pg.Uint64)
	check(pg.BufferOf([]uint{}).DType, pg.Uint64)
	check(pg.BufferOf([]float32{}).DType, pg.Float32)
	check(pg.BufferOf([]float64{}).DType, pg.Float64)
	check(pg.BufferOf([]bool{}).DType, pg.Bool)
	check(pg.BufferOf([]pg.F16{}).DType, pg.Float16)
	check(pg.BufferOf([]pg.BF16{}).DType, pg.BFloat16)
	check(pg.BufferOf([]pg.F8E4M3{}).DType, pg.Float8E4M3)
	check(pg.BufferOf([]pg.F8E5M2{}).DType, pg.Float8E5M2)
	check(pg.BufferOf([]gradient{}).DType, pg.Float32)
	check(pg.BufferOf([]id{}).DType, pg.Uint16)
	check(pg.BufferOf([]flag{}).DType, pg.Bool)
}
