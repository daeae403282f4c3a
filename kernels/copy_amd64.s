//go:build !purego && !race

#include "textflag.h"

// func moveString(dst, src unsafe.Pointer, n int)
TEXT ·moveString(SB), NOSPLIT, $0-24
	MOVQ dst+0(FP), DI
	MOVQ src+8(FP), SI
	MOVQ n+16(FP), CX
	CLD
	REP; MOVSB
	RET

// func Acquire(at uintptr, n int)
TEXT ·Acquire(SB), NOSPLIT, $0-16
	MOVQ  at+0(FP), AX
	MOVQ  n+8(FP), CX
	TESTQ CX, CX
	JLE   done
	MOVQ  AX, DX
	ANDQ  $63, DX
	ADDQ  DX, CX      // from the beginning of the first line
	SUBQ  DX, AX

line:
	BYTE $0x0f; BYTE $0x0d; BYTE $0x08 // PREFETCHW (AX)
	ADDQ $64, AX
	SUBQ $64, CX
	JG   line

done:
	RET
