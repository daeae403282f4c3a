package collectives

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"hash/fnv"
	"slices"
)

// A Rule of a Table. It applies to MinRanks to MaxRanks active ranks and up to MaxBytes bytes (of
// the vector, or of all parts together if the kind has parts; an AllToAllV and a Barrier count as
// 0), if When is true. A limit of 0 means none.
type Rule struct {
	When     Condition `json:"when"`
	MinRanks int       `json:"min_ranks,omitempty"`
	MaxRanks int       `json:"max_ranks,omitempty"`
	MaxBytes int       `json:"max_bytes,omitempty"`
	Algo     Algo      `json:"algo"`
}

// UnmarshalJSON reads a rule. A field that is misspelt, or a missing condition, must not become one
// without limits.
func (r *Rule) UnmarshalJSON(b []byte) error {
	type fields Rule // without this method
	read := fields{When: numConditions}
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	if err := d.Decode(&read); err != nil {
		return err
	}
	if read.When == numConditions {
		return errors.New(`collectives: a rule has no "when"`)
	}
	*r = Rule(read)
	return nil
}

// Condition is a requirement of a Rule besides the number of ranks.
type Condition uint8

// The conditions.
const (
	Always   Condition = iota
	IfMapped           // Caps.Mapped
	IfMemory           // Caps.SharedMemory
	// More ranks on a host than processors: each round costs a wake-up, so that few rounds are
	// better than few bytes.
	IfOversubscribed
	IfLevels  // several hosts, and several ranks on at least one
	IfOneHost // all ranks on one host, with any links
	IfPuts    // Caps.Puts
	numConditions
)

var conditionNames = [numConditions]string{"always", "mapped", "memory", "oversubscribed", "levels", "onehost", "puts"}

// String returns the name that a table's JSON uses.
func (c Condition) String() string {
	if c >= numConditions {
		return fmt.Sprintf("condition(%d)", uint8(c))
	}
	return conditionNames[c]
}

// MarshalText returns the name, or an error for an invalid condition.
func (c Condition) MarshalText() ([]byte, error) {
	if c >= numConditions {
		return nil, fmt.Errorf("collectives: %v is none", c)
	}
	return []byte(c.String()), nil
}

// UnmarshalText accepts a name.
func (c *Condition) UnmarshalText(b []byte) error {
	if string(b) == "crowded" { // what tables called it before
		*c = IfOversubscribed
		return nil
	}
	i := slices.Index(conditionNames[:], string(b))
	if i < 0 {
		return fmt.Errorf("collectives: no condition %q; there are %v", clip(b), conditionNames)
	}
	*c = Condition(i)
	return nil
}

// MarshalText returns the name, or an error for an invalid kind.
func (k Kind) MarshalText() ([]byte, error) {
	if !k.Valid() {
		return nil, fmt.Errorf("collectives: %v is none", k)
	}
	return []byte(k.String()), nil
}

// UnmarshalText accepts a name; see ParseKind.
func (k *Kind) UnmarshalText(b []byte) (err error) {
	*k, err = ParseKind(clip(b))
	return err
}

// MarshalText returns the name, or an error for an invalid algorithm.
func (a Algo) MarshalText() ([]byte, error) {
	if !a.Valid() {
		return nil, fmt.Errorf("collectives: %v is none", a)
	}
	return []byte(a.String()), nil
}

// UnmarshalText accepts a name; see ParseAlgo.
func (a *Algo) UnmarshalText(b []byte) (err error) {
	*a, err = ParseAlgo(clip(b))
	return err
}

func clip(b []byte) string { return string(b[:min(len(b), 64)]) }

// Table selects the algorithm for a call. It has a list of rules for each kind: the first rule that
// applies decides; if none does, the algorithm is OneShot, which every kind has. A Table is
// immutable and valid: every algorithm in it has a plan for its kind, and appears only under the
// condition that it Requires. A nil *Table is the default one.
type Table struct {
	rules          [numKinds][]Rule
	oversubscribed *bool // the ranks that it was measured with; nil: it fits all
	hash           uint64
}

// oversubscribedField is the field of a table's JSON beside the kinds.
const oversubscribedField = "oversubscribed"

// MaxRules bounds the rules of one kind.
const MaxRules = 1024

// NewTable makes a table of rules, which it copies. A kind that is missing has the rules of
// DefaultTable; a kind with an empty list is always OneShot.
func NewTable(rules map[Kind][]Rule) (*Table, error) { return newTable(rules, nil) }

// NewMeasuredTable is NewTable for rules that were measured with more ranks on the host than
// processors (oversubscribed), or not: see Table.Fits.
func NewMeasuredTable(rules map[Kind][]Rule, oversubscribed bool) (*Table, error) {
	return newTable(rules, &oversubscribed)
}

func newTable(rules map[Kind][]Rule, oversubscribed *bool) (*Table, error) {
	t := &Table{rules: defaults, oversubscribed: oversubscribed}
	for k, list := range rules {
		if !k.Valid() {
			return nil, fmt.Errorf("collectives: table: %v is none", k)
		}
		if len(list) > MaxRules {
			return nil, fmt.Errorf("collectives: table: %d rules for %v, at most %d", len(list), k, MaxRules)
		}
		for i, r := range list {
			if err := r.check(k); err != nil {
				return nil, fmt.Errorf("collectives: table: rule %d of %v: %w", i, k, err)
			}
		}
		t.rules[k] = slices.Clone(list)
	}
	// FNV-1a over the canonical JSON: it uses names instead of numbers, so that the same rules have
	// the same hash in every version.
	b, err := json.Marshal(t)
	if err != nil {
		return nil, err
	}
	h := fnv.New64a()
	h.Write(b)
	t.hash = h.Sum64()
	return t, nil
}

func (r Rule) check(k Kind) error {
	switch {
	case r.When >= numConditions:
		return fmt.Errorf("%v is none", r.When)
	case r.MinRanks < 0 || r.MinRanks > MaxSize || r.MaxRanks < 0 || r.MaxRanks > MaxSize ||
		r.MaxRanks > 0 && r.MinRanks > r.MaxRanks:
		return fmt.Errorf("%d to %d ranks, want ascending numbers up to %d", r.MinRanks, r.MaxRanks, MaxSize)
	case r.MaxBytes < 0:
		return fmt.Errorf("up to %d bytes, want 0 or more", r.MaxBytes)
	case !r.Algo.Valid() || algos[r.Algo].makers[k] == nil:
		return fmt.Errorf("no %v plan; there are %v", r.Algo, Algorithms(k))
	case r.Algo.Requires() != Always && r.When != r.Algo.Requires():
		return fmt.Errorf("%v %v, want it only where memory is %v", r.Algo, r.When, r.Algo.Requires())
	}
	return nil
}

// defaultTable is set by init, because the rules refer to plan makers, which refer to Choose.
var defaultTable *Table

func init() {
	own := map[Kind][]Rule{}
	for k, list := range defaults {
		if Kind(k).Valid() {
			own[Kind(k)] = list
		}
	}
	t, err := NewTable(own)
	if err != nil {
		panic(err) // unreachable: a test covers it
	}
	defaultTable = t
}

// DefaultTable returns the built-in table, which is not measured: see choose.go.
func DefaultTable() *Table { return defaultTable }

func (t *Table) orDefault() *Table {
	if t == nil {
		return defaultTable
	}
	return t
}

// Rules returns a copy of the rules for k.
func (t *Table) Rules(k Kind) []Rule {
	if !k.Valid() {
		return nil
	}
	return slices.Clone(t.orDefault().rules[k])
}

// Hash identifies the rules: equal tables have equal hashes, in all processes, machines and
// versions.
func (t *Table) Hash() uint64 { return t.orDefault().hash }

// MarshalJSON writes the rules by kind: {"allreduce": [{"when": "mapped", "max_ranks": 8,
// "max_bytes": 2048, "algo": "oneshot"}, …], …}, and of a measured table "oversubscribed": false or
// true. The same table gives the same bytes.
func (t *Table) MarshalJSON() ([]byte, error) {
	all := map[string]any{}
	for _, k := range Kinds() {
		all[k.String()] = slices.Concat([]Rule{}, t.orDefault().rules[k]) // [] rather than null
	}
	if o := t.orDefault().oversubscribed; o != nil {
		all[oversubscribedField] = *o
	}
	return json.Marshal(all)
}

// UnmarshalJSON reads and validates the result of MarshalJSON, see NewTable. t must not be in use.
func (t *Table) UnmarshalJSON(b []byte) error {
	var all map[string]json.RawMessage
	if err := json.Unmarshal(b, &all); err != nil {
		return err
	}
	var oversubscribed *bool
	rules := map[Kind][]Rule{}
	for name, value := range all {
		if name == oversubscribedField {
			if err := json.Unmarshal(value, &oversubscribed); err != nil {
				return err
			}
			continue
		}
		var k Kind
		if err := k.UnmarshalText([]byte(name)); err != nil {
			return err
		}
		var list []Rule
		if err := json.Unmarshal(value, &list); err != nil {
			return err
		}
		rules[k] = list
	}
	read, err := newTable(rules, oversubscribed)
	if err != nil {
		return err
	}
	*t = *read
	return nil
}

// Fits reports whether n ranks on hosts (see Shape) share processors, or do not, as the ranks did
// with which t was measured. Among ranks that share processors each round costs much more, so that
// a table that does not fit is worse than the default one.
func (t *Table) Fits(n int, hosts []int, c Caps) bool {
	o := t.orDefault().oversubscribed
	_, most := spread(hosts, n)
	return o == nil || *o == c.oversubscribed(most)
}

// Choose returns the algorithm for a call. It uses only what all ranks share: never s.Rank, nor the
// counts of an AllToAllV. It never returns an algorithm that Requires what c lacks, nor one without
// a plan for s.Kind. For an invalid shape the result is meaningless.
func (t *Table) Choose(s Shape, c Caps) Algo {
	if !s.Kind.Valid() {
		return Auto
	}
	n := len(s.Active)
	total := s.Elem * s.Count
	switch s.Kind {
	case ReduceScatter, AllGather, AllToAll, Gather, Scatter:
		total *= n
	case AllGatherV:
		total = 0
		for _, k := range s.Counts {
			total += k * s.Elem
		}
	case AllToAllV, Barrier:
		total = 0
	}
	hosts, most := spread(s.Hosts, n)
	for i := range t.orDefault().rules[s.Kind] {
		r := &t.orDefault().rules[s.Kind][i]
		var holds bool
		switch r.When {
		case Always:
			holds = true
		case IfMapped:
			holds = c.Mapped
		case IfMemory:
			holds = c.SharedMemory
		case IfOversubscribed:
			holds = c.oversubscribed(most)
		case IfLevels:
			holds = hosts > 1 && most > 1
		case IfOneHost:
			holds = hosts == 1
		case IfPuts:
			holds = c.Puts
		}
		if holds && n >= r.MinRanks && (r.MaxRanks == 0 || n <= r.MaxRanks) &&
			(r.MaxBytes == 0 || total <= r.MaxBytes) {
			return r.Algo
		}
	}
	return OneShot
}

// ChooseSent returns the algorithm by which a call is sent that LoadStore runs where its buffers
// can be loaded. Earlier calls and timing decide which of both happens. So a reduction that is sent
// combines every element once, from all ranks, as LoadStore does.
func (t *Table) ChooseSent(s Shape, c Caps) Algo {
	c.Mapped = false
	algo := t.Choose(s, c)
	_, most := spread(s.Hosts, len(s.Active))
	switch {
	case !s.Kind.Reduces() || algo.OnePass():
		return algo
	case s.Kind == ReduceScatter:
		return Pairwise
	case s.Kind == Reduce && s.Elem*s.Count <= 64<<10 && (len(s.Active) <= 8 || c.oversubscribed(most)):
		return OneShot // few rounds; the root of more ranks, or of longer vectors, folds too much alone
	}
	return TwoShot
}

// oversubscribed reports whether there are more ranks on a host than processors. most is the
// largest number of ranks on one.
func (c Caps) oversubscribed(most int) bool { return c.Cores > 0 && most > c.Cores }

// spread returns the number of hosts and the largest number of ranks on one.
func spread(hosts []int, n int) (count, most int) {
	if hosts == nil {
		return 1, n
	}
	on := map[int]int{}
	for _, h := range hosts {
		on[h]++
		most = max(most, on[h])
	}
	return len(on), most
}
