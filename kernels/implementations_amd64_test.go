//go:build !purego

package kernels

func init() {
	for _, l := range levels() {
		implementations = append(implementations, implementation{l.name, l.reducers()})
	}
}
