// Package cpus divides the processors of a machine among the ranks that start on it. Allowed and
// Read say which processors there are; all else is pure.
package cpus

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"slices"
	"strconv"
	"strings"
)

// Max is the number of processors that a Set may name: from 0 to Max-1.
const Max = 1 << 13

// A Set is a set of processors, by the kernel's numbers, in ascending order.
type Set []int

// String returns s in the kernel's notation: "0-3,8".
func (s Set) String() string {
	var b strings.Builder
	for i := 0; i < len(s); {
		end := i
		for end+1 < len(s) && s[end+1] == s[end]+1 {
			end++
		}
		if b.Len() > 0 {
			b.WriteByte(',')
		}
		b.WriteString(strconv.Itoa(s[i]))
		if end > i {
			fmt.Fprintf(&b, "-%d", s[end])
		}
		i = end + 1
	}
	return b.String()
}

// Parse returns the set that text describes in the kernel's notation; the empty text is the empty
// set.
func Parse(text string) (Set, error) {
	var s Set
	text = strings.TrimSpace(text)
	if text == "" {
		return nil, nil
	}
	for part := range strings.SplitSeq(text, ",") {
		lo, hi, ranged := strings.Cut(part, "-")
		first, err := strconv.ParseUint(lo, 10, 32)
		last := first
		if ranged && err == nil {
			last, err = strconv.ParseUint(hi, 10, 32)
		}
		if err != nil || last < first || last >= Max {
			return nil, fmt.Errorf("%q is no list of processors: expected numbers below %d and ranges, such as 0-3,8",
				text, Max)
		}
		for cpu := int(first); cpu <= int(last); cpu++ {
			s = append(s, cpu)
		}
	}
	slices.Sort(s)
	return slices.Compact(s), nil
}

// A CPU is a processor, as the kernel counts them: a thread of a core.
type CPU struct {
	ID   int
	Core int // the lowest ID of the core's threads
	Node int // its NUMA node
}

// Read describes the processors of allowed, in ascending order, from a directory that is laid out
// like /sys/devices/system. A processor that the directory does not know is a core of its own, on
// node 0.
func Read(sys fs.FS, allowed Set) ([]CPU, error) {
	nodes := map[int]int{}
	entries, err := fs.ReadDir(sys, "node")
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	for _, e := range entries {
		number, is := strings.CutPrefix(e.Name(), "node")
		node, err := strconv.Atoi(number)
		if !is || err != nil {
			continue
		}
		members, err := readSet(sys, "node/"+e.Name()+"/cpulist")
		if err != nil {
			return nil, err
		}
		for _, cpu := range members {
			nodes[cpu] = node
		}
	}
	all := make([]CPU, len(allowed))
	for i, id := range allowed {
		threads, err := readSet(sys, fmt.Sprintf("cpu/cpu%d/topology/thread_siblings_list", id))
		if err != nil {
			return nil, err
		}
		core := id
		if slices.Contains(threads, id) {
			core = threads[0]
		}
		all[i] = CPU{ID: id, Core: core, Node: nodes[id]}
	}
	return all, nil
}

// Online returns the processors that the machine has in use, from a directory as for Read.
func Online(sys fs.FS) (Set, error) { return readSet(sys, "cpu/online") }

// Nodes returns the NUMA nodes that have one of the processors, in ascending order.
func Nodes(machine []CPU) []int {
	var nodes []int
	for _, c := range machine {
		nodes = append(nodes, c.Node)
	}
	slices.Sort(nodes)
	return slices.Compact(nodes)
}

// readSet reads a file of a Set. A file that does not exist is the empty one.
func readSet(sys fs.FS, path string) (Set, error) {
	b, err := fs.ReadFile(sys, path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	s, err := Parse(string(b))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return s, nil
}

// Share divides the processors of a machine among n ranks, at least one. Two shares are disjoint or
// equal. The rules, in their order:
//
//   - With fewer ranks than NUMA nodes, a share is one node or several whole ones.
//   - Otherwise no share has processors of two nodes. A node gets as many ranks as keep the
//     smallest share of all as large as possible; one that is too small for that gets none.
//   - With at most as many ranks on a node as it has cores, a share is whole cores. Shares of a
//     node differ by one core at most, and leave none out.
//   - With more, but at most as many as its processors, the same holds for processors.
//   - With more ranks than processors, shares are equal: the ranks and the processors of a node
//     are divided into as many groups as both can be without a rest. The ranks of a group have all
//     its processors in common.
//
// Ranks with neighbouring numbers are on the same node, or on neighbouring ones.
func Share(machine []CPU, n int) []Set {
	nodes := byNode(machine)
	if n < len(nodes) {
		return wholeNodes(nodes, n)
	}
	total, sizes, ranks := 0, make([]int, len(nodes)), make([]int, len(nodes))
	for i, node := range nodes {
		sizes[i] = len(coresOf(node))
		total += sizes[i]
	}
	if n > total {
		for i, node := range nodes {
			sizes[i] = len(node)
		}
	}
	for range n { // each rank goes where it gets the largest share
		best := 0
		for i := range nodes {
			if sizes[i]*(ranks[best]+1) > sizes[best]*(ranks[i]+1) {
				best = i
			}
		}
		ranks[best]++
	}
	var shares []Set
	for i, node := range nodes {
		if ranks[i] > 0 {
			shares = append(shares, divide(node, ranks[i])...)
		}
	}
	return shares
}

// Single gives each of n ranks one processor of its own: those of different cores first, in the
// order of their nodes. It returns nil if there are not as many.
func Single(machine []CPU, n int) []Set {
	if n > len(machine) {
		return nil
	}
	var cores [][]CPU
	for _, node := range byNode(machine) {
		cores = append(cores, coresOf(node)...)
	}
	var shares []Set
	for thread := 0; len(shares) < n; thread++ {
		for _, core := range cores {
			if thread < len(core) && len(shares) < n {
				shares = append(shares, Set{core[thread].ID})
			}
		}
	}
	return shares
}

// wholeNodes divides nodes among fewer ranks, neighbours to the same rank: each takes nodes until
// it comes closest to an equal part of what the ranks before it have left.
func wholeNodes(nodes [][]CPU, n int) []Set {
	left := 0
	for _, node := range nodes {
		left += len(node)
	}
	shares := make([]Set, n)
	for r := range n {
		rest, size := n-r, 0
		for len(nodes) > 0 {
			next := len(nodes[0])
			if len(nodes) < rest || rest > 1 && size > 0 && 2*(left-size*rest) <= next*rest {
				break
			}
			shares[r], nodes, size = append(shares[r], ids(nodes[0])...), nodes[1:], size+next
		}
		slices.Sort(shares[r])
		left -= size
	}
	return shares
}

// divide divides a node among n ranks: see Share.
func divide(node []CPU, n int) []Set {
	units := coresOf(node)
	if n > len(units) {
		units = threadsOf(node)
	}
	groups := n
	if n > len(units) {
		groups = gcd(n, len(units))
	}
	size, more := len(units)/groups, len(units)%groups
	var shares []Set
	for g := range groups {
		take := size
		if g < more {
			take++
		}
		share := ids(slices.Concat(units[:take]...))
		units = units[take:]
		for range n / groups {
			shares = append(shares, share)
		}
	}
	return shares
}

// byNode returns the processors of each node that has some, by core, in the order of the nodes.
func byNode(machine []CPU) [][]CPU {
	nodes := map[int][]CPU{}
	for _, c := range machine {
		nodes[c.Node] = append(nodes[c.Node], c)
	}
	var all [][]CPU
	for _, number := range slices.Sorted(maps.Keys(nodes)) {
		node := nodes[number]
		slices.SortFunc(node, func(a, b CPU) int { return cmp.Or(a.Core-b.Core, a.ID-b.ID) })
		all = append(all, node)
	}
	return all
}

// coresOf returns the processors of a node, one element a core.
func coresOf(node []CPU) (cores [][]CPU) {
	for i, c := range node {
		if i == 0 || c.Core != node[i-1].Core {
			cores = append(cores, nil)
		}
		cores[len(cores)-1] = append(cores[len(cores)-1], c)
	}
	return cores
}

// threadsOf returns the processors of a node, one an element.
func threadsOf(node []CPU) [][]CPU {
	threads := make([][]CPU, len(node))
	for i := range node {
		threads[i] = node[i : i+1]
	}
	return threads
}

func ids(cpus []CPU) Set {
	s := make(Set, len(cpus))
	for i, c := range cpus {
		s[i] = c.ID
	}
	slices.Sort(s)
	return s
}

func gcd(a, b int) int {
	for b > 0 {
		a, b = b, a%b
	}
	return a
}
