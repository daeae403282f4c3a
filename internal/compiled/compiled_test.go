package compiled

import (
	"errors"
	"strings"
	"testing"
)

func TestMissingCompilerIsNamed(t *testing.T) {
	t.Setenv("CC", "no-such-compiler")
	s := Source{Variable: "CC", Compiler: "cc", Dir: "internal/compiled", Files: "*.go"}
	_, err := s.Make(t.Context())
	if !errors.Is(err, ErrNoCompiler) || !strings.Contains(err.Error(), "no-such-compiler") {
		t.Errorf("%v, want an error that names the missing compiler", err)
	}
}
