package main

import (
	"errors"
	"fmt"
	"go/build"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
)

// vocabulary is tab, newline and the printable ASCII characters; anything else reads as '?'.
const vocabulary = 2 + '~' - ' ' + 1

func encode(text []byte) []byte {
	out := make([]byte, len(text))
	for i, c := range text {
		switch {
		case c == '\t':
			out[i] = 0
		case c == '\n':
			out[i] = 1
		case c >= ' ' && c <= '~':
			out[i] = c - ' ' + 2
		default:
			out[i] = '?' - ' ' + 2
		}
	}
	return out
}

func decode(tokens []byte) string {
	out := make([]byte, len(tokens))
	for i, t := range tokens {
		switch t {
		case 0:
			out[i] = '\t'
		case 1:
			out[i] = '\n'
		default:
			out[i] = t - 2 + ' '
		}
	}
	return string(out)
}

// readText returns up to limit bytes of the file at path, or of the .go files in and below the
// directory at path, in the order of their names, less what is in directories named cmd, vendor and
// testdata. An empty path is the Go standard library's source.
func readText(path string, limit int) ([]byte, error) {
	if path == "" {
		var err error
		if path, err = standardLibrary(); err != nil {
			return nil, err
		}
	}
	var text []byte
	add := func(name string) error {
		f, err := os.Open(name)
		if err != nil {
			return err
		}
		defer f.Close()
		part, err := io.ReadAll(io.LimitReader(f, int64(limit-len(text))))
		text = append(text, part...)
		return err
	}
	info, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	if !info.IsDir() {
		err = add(path)
	} else {
		err = filepath.WalkDir(path, func(name string, d fs.DirEntry, err error) error {
			switch {
			case err != nil:
				return err
			case d.IsDir() && slices.Contains([]string{"testdata", "vendor", "cmd"}, d.Name()) && name != path:
				return fs.SkipDir
			case len(text) >= limit:
				return fs.SkipAll
			case d.Type().IsRegular() && strings.HasSuffix(name, ".go"):
				return add(name)
			}
			return nil
		})
	}
	if err == nil && len(text) == 0 {
		err = fmt.Errorf("no text in %s: give a file, or a directory with .go files", path)
	}
	return text, err
}

// standardLibrary finds src under GOROOT: the one that built this program, else the go command's.
func standardLibrary() (string, error) {
	roots := []string{build.Default.GOROOT}
	if out, err := exec.Command("go", "env", "GOROOT").Output(); err == nil {
		roots = append(roots, strings.TrimSpace(string(out)))
	}
	for _, root := range roots {
		if root == "" {
			continue
		}
		// src may be a link, which a walk does not follow.
		if src, err := filepath.EvalSymlinks(filepath.Join(root, "src")); err == nil {
			return src, nil
		}
	}
	return "", errors.New("no Go standard library source here: neither GOROOT nor `go env GOROOT` has a src " +
		"directory; name a file or directory with --text")
}
