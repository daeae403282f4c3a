// Package argstest checks that the exported functions of a package refuse a context that is nil.
package argstest

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"maps"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// contexts are the types of arguments that must not be nil.
var contexts = []string{"context.Context", "tutti/endpoint.Context"}

// Call is a call with a context that is nil.
type Call struct {
	Want string // begins the error
	Do   func() error
}

// RefuseNil makes the calls, by the names "Function" and "Type.Method", each of which must fail by
// its error. Those of all exported functions and methods with a context must be there. The package
// has the import path pkg, and its sources are in the present directory.
func RefuseNil(t *testing.T, pkg string, calls map[string][]Call) {
	t.Helper()
	names, err := takers(".", pkg)
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		if len(calls[name]) == 0 {
			t.Errorf("%s takes a context: no call of it with nil is checked", name)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(calls)) {
		if !slices.Contains(names, name) {
			t.Errorf("%s is no exported function or method with a context", name)
		}
		for _, c := range calls[name] {
			if err := caught(c.Do); err == nil || !strings.HasPrefix(err.Error(), c.Want) {
				t.Errorf("%s: %v, want %s", name, err, c.Want)
			}
		}
	}
}

// caught returns the error of a call, also if it panics.
func caught(do func() error) (err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("it panics: %v", r)
		}
	}()
	return do()
}

// takers returns the names of what takes a context in the package whose sources are in dir: its
// exported functions and methods, and exported fields of structs, which may be options. Those of a
// type that is not exported count, as a type that embeds it may be.
func takers(dir, pkg string) (names []string, err error) {
	files, err := filepath.Glob(filepath.Join(dir, "*.go"))
	if err == nil && len(files) == 0 {
		err = fmt.Errorf("%s: no sources", dir)
	}
	if err != nil {
		return nil, err
	}
	for _, file := range files {
		if strings.HasSuffix(file, "_test.go") {
			continue
		}
		f, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.SkipObjectResolution)
		if err != nil {
			return nil, err
		}
		s := source{pkg: pkg, imports: map[string]string{}}
		for _, i := range f.Imports {
			p, err := strconv.Unquote(i.Path.Value)
			if err != nil {
				return nil, err
			}
			name := path.Base(p)
			if i.Name != nil {
				name = i.Name.Name
			}
			s.imports[name] = p
		}
		for _, d := range f.Decls {
			names = append(names, s.takers(d)...)
		}
	}
	return names, nil
}

// source is a file of a package.
type source struct {
	pkg     string
	imports map[string]string // paths by names
}

// takers returns the names of what takes a context in a declaration.
func (s *source) takers(d ast.Decl) (names []string) {
	switch d := d.(type) {
	case *ast.FuncDecl:
		name := d.Name.Name
		if d.Recv != nil {
			name = receiver(d.Recv.List[0].Type) + "." + name
		}
		if d.Name.IsExported() && s.has(d.Type.Params) {
			names = append(names, name)
		}
	case *ast.GenDecl:
		for _, spec := range d.Specs {
			t, ok := spec.(*ast.TypeSpec)
			if !ok {
				continue
			}
			x, ok := t.Type.(*ast.StructType)
			if !ok {
				continue
			}
			for _, f := range x.Fields.List {
				for _, n := range f.Names {
					if n.IsExported() && s.has(&ast.FieldList{List: []*ast.Field{f}}) {
						names = append(names, t.Name.Name+"."+n.Name)
					}
				}
			}
		}
	}
	return names
}

// receiver returns the name of the type of a method.
func receiver(x ast.Expr) (name string) {
	ast.Inspect(x, func(n ast.Node) bool {
		if i, ok := n.(*ast.Ident); ok && name == "" {
			name = i.Name
		}
		return true
	})
	return name
}

// has reports whether one of the parameters is a context, or has some. What functions take that are
// parameters does not count.
func (s *source) has(params *ast.FieldList) (found bool) {
	for _, p := range params.List {
		ast.Inspect(p.Type, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.FuncType:
				return false
			case *ast.SelectorExpr:
				if x, ok := n.X.(*ast.Ident); ok {
					found = found || slices.Contains(contexts, s.imports[x.Name]+"."+n.Sel.Name)
				}
				return false
			case *ast.Ident:
				found = found || slices.Contains(contexts, s.pkg+"."+n.Name)
			}
			return true
		})
	}
	return found
}
