package collectives

import (
	"slices"
	"sort"
)

// A frontier holds the steps that used each range last, which later steps have to be ordered after.
type frontier map[memKey][]use

// use is a range, the step that wrote it last, and those that have read it since.
type use struct {
	off, end int
	writer   int32 // -1: none yet
	readers  []int32
}

// use records that step reads or writes [off, end) of k, and calls after for the earlier steps that
// it must follow, possibly repeatedly: a reader follows the last writer, a writer the readers
// since, or else the last writer. Those follow all earlier ones.
func (f frontier) use(k memKey, off, end int, step int32, write bool, after func(step int32)) {
	if off >= end {
		return
	}
	us := f[k]
	i := sort.Search(len(us), func(i int) bool { return us[i].end > off })
	if i < len(us) && us[i].off < off { // split off the range before
		before := us[i]
		before.end = off
		before.readers = slices.Clone(before.readers)
		us[i].off = off
		us = slices.Insert(us, i, before)
		i++
	}
	j := i
	for at := off; at < end; j++ {
		if j == len(us) || us[j].off > at { // never used
			to := end
			if j < len(us) {
				to = min(end, us[j].off)
			}
			us = slices.Insert(us, j, use{off: at, end: to, writer: -1})
		}
		u := &us[j]
		if u.end > end { // split off the range behind
			behind := *u
			behind.off = end
			behind.readers = slices.Clone(behind.readers)
			u.end = end
			us = slices.Insert(us, j+1, behind)
			u = &us[j]
		}
		at = u.end
		if u.writer >= 0 && (!write || len(u.readers) == 0) {
			after(u.writer)
		}
		if !write {
			if len(u.readers) == 0 || u.readers[len(u.readers)-1] != step {
				u.readers = append(u.readers, step)
			}
			continue
		}
		for _, r := range u.readers {
			if r != step {
				after(r)
			}
		}
	}
	if write {
		us[i] = use{off: off, end: end, writer: step}
		us = slices.Delete(us, i+1, j)
	}
	f[k] = us
}
