// Package args checks arguments that package endpoint and its directory have in common.
package args

import (
	"context"
	"fmt"
)

// Context returns an error if ctx, of a call of who, is nil. Calls look for that before they do
// anything.
func Context(ctx context.Context, who any, call string) error {
	if ctx == nil {
		return fmt.Errorf("%v: %s: ctx is nil, want a context, such as context.Background()", who, call)
	}
	return nil
}
