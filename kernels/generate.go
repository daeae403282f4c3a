package kernels

//go:generate go run ./internal/gen -asm kernels_amd64.s -decl kernels_amd64.go -pkg kernels
