package directory

import (
	"errors"
	"fmt"
	"strings"
	"unicode"
	"unicode/utf8"

	"tutti/endpoint"
)

// Entry is a name and the endpoint that is published under it.
type Entry struct {
	Name string
	Info endpoint.Info
}

// Event is a change of the directory.
type Event struct {
	Entry      // if Gone: the one that there was
	Gone  bool // the name is not published any more
}

// Errors, wrapped by what the methods return.
var (
	ErrNoName    = errors.New("no endpoint publishes this name")
	ErrName      = errors.New("invalid name")
	ErrMalformed = errors.New("malformed entry")
	ErrWithdrawn = errors.New("withdrawn")
	ErrClosed    = errors.New("directory closed")
)

// TakenError says that another endpoint has a name.
type TakenError struct {
	Name string
	By   endpoint.Info // zero if its entry is malformed
}

func (e *TakenError) Error() string {
	by := "an entry that is malformed: remove it from the store, or choose another name"
	if e.By.ID != 0 {
		by = fmt.Sprintf("%v, which is alive: end it first, or choose another name", e.By)
	}
	return fmt.Sprintf("name %s is taken by %s", e.Name, by)
}

const (
	// MaxName bounds the bytes of a name.
	MaxName = 128

	keys     = "names/" // begins the keys of entries
	maxValue = 4 << 10  // of an entry
)

// CheckName returns an error that wraps ErrName unless name can be published: 1 to MaxName bytes of
// UTF-8, letters, digits, punctuation and symbols.
func CheckName(name string) error {
	if name == "" || len(name) > MaxName || !utf8.ValidString(name) || strings.ContainsFunc(name,
		func(r rune) bool { return !unicode.IsGraphic(r) || unicode.IsSpace(r) }) {
		return fmt.Errorf("%w: %.40q: want 1 to %d bytes of letters, digits and punctuation", ErrName, name, MaxName)
	}
	return nil
}

// encode returns the value of an entry.
func encode(info endpoint.Info) ([]byte, error) {
	b := []byte(info.String())
	if _, err := parse(b); err != nil {
		return nil, fmt.Errorf("endpoint %v cannot be published: %w", info, err)
	}
	return b, nil
}

// parse reads the value of an entry, which is untrusted.
func parse(b []byte) (endpoint.Info, error) {
	if len(b) > maxValue {
		return endpoint.Info{}, fmt.Errorf("%w: it has %d bytes, want at most %d", ErrMalformed, len(b), maxValue)
	}
	info, err := endpoint.ParseInfo(string(b))
	switch {
	case err != nil:
		return endpoint.Info{}, fmt.Errorf("%w: %w", ErrMalformed, err)
	case info.ID == 0:
		return endpoint.Info{}, fmt.Errorf("%w: it has no identity", ErrMalformed)
	case len(info.Addrs) == 0:
		return endpoint.Info{}, fmt.Errorf("%w: the endpoint does not listen", ErrMalformed)
	}
	return info, nil
}

// entryOf reads a key and its value.
func entryOf(key string, value []byte) (Entry, error) {
	name := strings.TrimPrefix(key, keys)
	if err := CheckName(name); err != nil {
		return Entry{}, fmt.Errorf("%w: %w", ErrMalformed, err)
	}
	info, err := parse(value)
	if err != nil {
		return Entry{}, fmt.Errorf("name %s: %w", name, err)
	}
	return Entry{name, info}, nil
}
