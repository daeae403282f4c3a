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

// Every data type has its constant in this package, by the same name, and DTypeOf knows it.
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

func TestDTypeOf(t *testing.T) {
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
	check(pg.DTypeOf[int8](), pg.Int8)
	check(pg.DTypeOf[int16](), pg.Int16)
	check(pg.DTypeOf[int32](), pg.Int32)
	check(pg.DTypeOf[int64](), pg.Int64)
	check(pg.DTypeOf[int](), pg.Int64)
	check(pg.DTypeOf[uint8](), pg.Uint8)
	check(pg.DTypeOf[uint16](), pg.Uint16)
	check(pg.DTypeOf[uint32](), pg.Uint32)
	check(pg.DTypeOf[uint64](), pg.Uint64)
	check(pg.DTypeOf[uint](), pg.Uint64)
	check(pg.DTypeOf[float32](), pg.Float32)
	check(pg.DTypeOf[float64](), pg.Float64)
	check(pg.DTypeOf[bool](), pg.Bool)
	check(pg.DTypeOf[pg.F16](), pg.Float16)
	check(pg.DTypeOf[pg.BF16](), pg.BFloat16)
	check(pg.DTypeOf[pg.F8E4M3](), pg.Float8E4M3)
	check(pg.DTypeOf[pg.F8E5M2](), pg.Float8E5M2)
	check(pg.DTypeOf[gradient](), pg.Float32)
	check(pg.DTypeOf[id](), pg.Uint16)
	check(pg.DTypeOf[flag](), pg.Bool)
}
