package bootstrap

import (
	"fmt"
	"strconv"
	"strings"
)

// maxHosts bounds the hosts of a list: a few bytes can describe any number.
const maxHosts = 1 << 16

// ExpandHosts returns the hosts of a list in the format of Slurm's SLURM_JOB_NODELIST, in order:
// names separated by commas, with numbers in brackets, such as "gpu[007-009,12],login" or
// "r[1-2]n[0-3]". Numbers keep their leading zeros.
func ExpandHosts(list string) ([]string, error) {
	bad := func(why string) error { return fmt.Errorf("host list %q: %s", clip(list), why) }
	var hosts []string
	for rest := strings.TrimSpace(list); ; {
		name, after, err := cutHost(rest)
		if err != nil {
			return nil, bad(err.Error())
		}
		all := []string{""}
		for name != "" {
			prefix, inside, bracket := strings.Cut(name, "[")
			for i := range all {
				all[i] += prefix
			}
			if name = ""; !bracket {
				break
			}
			inside, name, _ = strings.Cut(inside, "]") // cutHost has checked it
			numbers, err := expandNumbers(inside)
			if err != nil {
				return nil, bad(err.Error())
			}
			if len(all)*len(numbers)+len(hosts) > maxHosts {
				return nil, bad(fmt.Sprintf("more than %d hosts", maxHosts))
			}
			longer := make([]string, 0, len(all)*len(numbers))
			for _, a := range all {
				for _, n := range numbers {
					longer = append(longer, a+n)
				}
			}
			all = longer
		}
		if hosts = append(hosts, all...); len(hosts) > maxHosts {
			return nil, bad(fmt.Sprintf("more than %d hosts", maxHosts))
		}
		if after == "" {
			return hosts, nil
		}
		rest = after[1:]
	}
}

// cutHost splits a list after its first name; after begins with the comma, or is "" at the end.
func cutHost(list string) (name, after string, err error) {
	end, open := len(list), false
scan:
	for i, c := range []byte(list) {
		switch {
		case c == '[' && open, c == ']' && !open:
			return "", "", fmt.Errorf("a bracket in the wrong place")
		case c == '[' || c == ']':
			open = c == '['
		case c == ',' && !open:
			end = i
			break scan
		case c <= ' ' || c >= 0x7f || c == '/':
			return "", "", fmt.Errorf("%q does not belong into a name", c)
		}
	}
	switch {
	case open:
		return "", "", fmt.Errorf("a bracket that is not closed")
	case end == 0:
		return "", "", fmt.Errorf("an empty name")
	}
	return list[:end], list[end:], nil
}

// expandNumbers returns the numbers of "007-009,12".
func expandNumbers(list string) (all []string, err error) {
	for part := range strings.SplitSeq(list, ",") {
		from, to, isRange := strings.Cut(part, "-")
		if !isRange {
			to = from
		}
		lo, err1 := strconv.ParseUint(from, 10, 32)
		hi, err2 := strconv.ParseUint(to, 10, 32)
		if err1 != nil || err2 != nil || lo > hi || len(from) > 10 {
			return nil, fmt.Errorf("%q: expected a number, or a range such as 07-12", clip(part))
		}
		if hi-lo >= maxHosts || len(all) > maxHosts {
			return nil, fmt.Errorf("more than %d hosts", maxHosts)
		}
		for n := lo; n <= hi; n++ {
			all = append(all, fmt.Sprintf("%0*d", len(from), n))
		}
	}
	return all, nil
}
