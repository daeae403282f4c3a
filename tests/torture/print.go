package torture

import (
	"fmt"
	"go/format"
	"reflect"
	"strings"
	"time"

	"tutti/pg"
)

// source prints a job and its programs as a Go test of this package that runs them again.
func source(name string, job Job, programs []*Program, comment string) string {
	var b strings.Builder
	fmt.Fprintf(&b,
		"//go:build linux\n\npackage torture\n\nimport (\n\"testing\"\n\"time\"\n\n\"tutti/pg\"\n)\n\n"+
			"var (\n_ pg.DType\n_ time.Duration\n)\n\n")
	for line := range strings.Lines(strings.TrimRight(comment, "\n") + "\n") {
		fmt.Fprintf(&b, "// %s", line)
	}
	fmt.Fprintf(&b, "//\n//\tgo test ./tests/torture -run '^%s$' -count=20\nfunc %s(t *testing.T) {\n", name, name)
	fmt.Fprintf(&b, "Replay(t, %s,\n", literal(reflect.ValueOf(job)))
	for _, p := range programs {
		fmt.Fprintf(&b, "&%s,\n", literal(reflect.ValueOf(*p)))
	}
	b.WriteString(")\n}\n")
	out, err := format.Source([]byte(b.String()))
	if err != nil {
		return b.String()
	}
	return string(out)
}

// literal prints a value as Go source, without zero fields and those that normalize sets.
func literal(v reflect.Value) string {
	switch x := v.Interface().(type) {
	case time.Duration:
		if x%time.Millisecond == 0 {
			return fmt.Sprintf("%d * time.Millisecond", x/time.Millisecond)
		}
		return fmt.Sprintf("%d * time.Nanosecond", x)
	case Op:
		for _, op := range names {
			if op.op == x {
				return op.name
			}
		}
	}
	t := v.Type()
	switch v.Kind() {
	case reflect.Pointer:
		return "&" + literal(v.Elem())
	case reflect.Slice:
		var b strings.Builder
		fmt.Fprintf(&b, "[]%s{", t.Elem().Name())
		if v.Len() > 0 && t.Elem().Kind() == reflect.Struct {
			b.WriteString("\n")
		}
		for i := range v.Len() {
			b.WriteString(strings.TrimPrefix(literal(v.Index(i)), t.Elem().Name()))
			if b.WriteString(", "); t.Elem().Kind() == reflect.Struct {
				b.WriteString("\n")
			}
		}
		b.WriteString("}")
		return b.String()
	case reflect.Struct:
		var fields []string
		for i := range v.NumField() {
			f := t.Field(i)
			if v.Field(i).IsZero() || t == reflect.TypeFor[Step]() &&
				(f.Name == "May" || f.Name == "Ranks" && plain(v.Field(i))) {
				continue
			}
			fields = append(fields, f.Name+": "+literal(v.Field(i)))
		}
		return t.Name() + "{" + strings.Join(fields, ", ") + "}"
	case reflect.String:
		return fmt.Sprintf("%q", v.String())
	}
	if dt, ok := v.Interface().(pg.DType); ok {
		return "pg." + strings.TrimPrefix(dt.GoString(), "kernels.")
	}
	for _, n := range pgNames {
		if n.value == v.Interface() {
			return "pg." + n.name
		}
	}
	return fmt.Sprint(v.Interface())
}

// names are the operations' names in Go source.
var names = func() (all []struct {
	op   Op
	name string
}) {
	for _, op := range append([]Op{AllReduce, ReduceScatter, AllGather, AllGatherV, AllToAll, AllToAllV}, windows...) {
		name := string(op)
		for _, part := range []string{"all", "reduce", "scatter", "gather", "to", "window", "make", "put", "signal",
			"wait", "get", "refresh", "close"} {
			name = strings.ReplaceAll(name, part, strings.ToUpper(part[:1])+part[1:])
		}
		if strings.HasSuffix(name, "v") {
			name = name[:len(name)-1] + "V"
		}
		all = append(all, struct {
			op   Op
			name string
		}{op, name})
	}
	for _, op := range []Op{Broadcast, Reduce, Gather, Scatter, Barrier, Message, Window, Agree,
		Split, Close, Abort, Admit, Alloc, Free, Renew, Graph, Chain, Argument, Wait, Together, Brace, Heal} {
		all = append(all, struct {
			op   Op
			name string
		}{op, strings.ToUpper(string(op[:1])) + string(op[1:])})
	}
	return all
}()

// pgNames are the constants of package pg in programs, except for the data types.
var pgNames = []struct {
	name  string
	value any
}{
	{"Sum", pg.Sum}, {"Product", pg.Product}, {"Min", pg.Min}, {"Max", pg.Max}, {"Avg", pg.Avg}, {"BitAnd",
		pg.BitAnd}, {"BitOr", pg.BitOr}, {"BitXor", pg.BitXor},
	{"Report", pg.Report}, {"Shrink", pg.Shrink}, {"Retry", pg.Retry},
	{"TimeoutReports", pg.TimeoutReports}, {"TimeoutEvicts", pg.TimeoutEvicts},
	{"TimeoutEvictsAlone", pg.TimeoutEvictsAlone},
}

// plain reports whether all elements of a slice are zero.
func plain(v reflect.Value) bool {
	for i := range v.Len() {
		if !v.Index(i).IsZero() {
			return false
		}
	}
	return true
}
