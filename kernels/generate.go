package kernels

//go:generate go run ./internal/gen -out kernels_amd64.s -decl kernels_amd64.go -pkg kernels
