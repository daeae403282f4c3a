//go:build !purego && !race

#include "textflag.h"

#define PREFETCHW_DI(offset) BYTE $0x0f; BYTE $0x0d; BYTE $0x8f; LONG $offset

// TAKE_AHEAD asks for the 256 bytes of dst 1 KiB ahead.
#define TAKE_AHEAD \
	PREFETCHW_DI(1024); \
	PREFETCHW_DI(1088); \
	PREFETCHW_DI(1152); \
	PREFETCHW_DI(1216)

// TO_LINE goes on to the first whole line of dst.
#define TO_LINE \
	MOVQ DI, AX; \
	NEGQ AX; \
	ANDQ $63, AX; \
	ADDQ AX, DI; \
	ADDQ AX, SI; \
	SUBQ AX, CX

// FIRST_AVX512 and FIRST_AVX2 load the arguments, move 64 bytes, and go on to whole lines.
#define FIRST_AVX512 \
	MOVQ dst+0(FP), DI; \
	MOVQ src+8(FP), SI; \
	MOVQ n+16(FP), CX; \
	VMOVDQU64 (SI), Z0; \
	VMOVDQU64 Z0, (DI); \
	TO_LINE

#define FIRST_AVX2 \
	MOVQ dst+0(FP), DI; \
	MOVQ src+8(FP), SI; \
	MOVQ n+16(FP), CX; \
	VMOVDQU (SI), Y0; \
	VMOVDQU 32(SI), Y1; \
	VMOVDQU Y0, (DI); \
	VMOVDQU Y1, 32(DI); \
	TO_LINE

// MOVE_AVX512 and MOVE_AVX2 move 256 bytes to whole lines, with the instruction STORE, and go on
// behind them.
#define MOVE_AVX512(STORE) \
	VMOVDQU64 (SI), Z0; \
	VMOVDQU64 64(SI), Z1; \
	VMOVDQU64 128(SI), Z2; \
	VMOVDQU64 192(SI), Z3; \
	STORE Z0, (DI); \
	STORE Z1, 64(DI); \
	STORE Z2, 128(DI); \
	STORE Z3, 192(DI); \
	ADDQ $256, DI; \
	ADDQ $256, SI; \
	SUBQ $256, CX

#define MOVE_AVX2(STORE) \
	VMOVDQU (SI), Y0; \
	VMOVDQU 32(SI), Y1; \
	VMOVDQU 64(SI), Y2; \
	VMOVDQU 96(SI), Y3; \
	VMOVDQU 128(SI), Y4; \
	VMOVDQU 160(SI), Y5; \
	VMOVDQU 192(SI), Y6; \
	VMOVDQU 224(SI), Y7; \
	STORE Y0, (DI); \
	STORE Y1, 32(DI); \
	STORE Y2, 64(DI); \
	STORE Y3, 96(DI); \
	STORE Y4, 128(DI); \
	STORE Y5, 160(DI); \
	STORE Y6, 192(DI); \
	STORE Y7, 224(DI); \
	ADDQ $256, DI; \
	ADDQ $256, SI; \
	SUBQ $256, CX

// LAST_AVX512 and LAST_AVX2 move the last 256 bytes, from CX on; a part of them is there already.
#define LAST_AVX512 \
	VMOVDQU64 (SI)(CX*1), Z0; \
	VMOVDQU64 64(SI)(CX*1), Z1; \
	VMOVDQU64 128(SI)(CX*1), Z2; \
	VMOVDQU64 192(SI)(CX*1), Z3; \
	VMOVDQU64 Z0, (DI)(CX*1); \
	VMOVDQU64 Z1, 64(DI)(CX*1); \
	VMOVDQU64 Z2, 128(DI)(CX*1); \
	VMOVDQU64 Z3, 192(DI)(CX*1); \
	VZEROUPPER

#define LAST_AVX2 \
	VMOVDQU (SI)(CX*1), Y0; \
	VMOVDQU 32(SI)(CX*1), Y1; \
	VMOVDQU 64(SI)(CX*1), Y2; \
	VMOVDQU 96(SI)(CX*1), Y3; \
	VMOVDQU 128(SI)(CX*1), Y4; \
	VMOVDQU 160(SI)(CX*1), Y5; \
	VMOVDQU 192(SI)(CX*1), Y6; \
	VMOVDQU 224(SI)(CX*1), Y7; \
	VMOVDQU Y0, (DI)(CX*1); \
	VMOVDQU Y1, 32(DI)(CX*1); \
	VMOVDQU Y2, 64(DI)(CX*1); \
	VMOVDQU Y3, 96(DI)(CX*1); \
	VMOVDQU Y4, 128(DI)(CX*1); \
	VMOVDQU Y5, 160(DI)(CX*1); \
	VMOVDQU Y6, 192(DI)(CX*1); \
	VMOVDQU Y7, 224(DI)(CX*1); \
	VZEROUPPER

// func moveString(dst, src unsafe.Pointer, n int)
TEXT ·moveString(SB), NOSPLIT, $0-24
	MOVQ dst+0(FP), DI
	MOVQ src+8(FP), SI
	MOVQ n+16(FP), CX
	CLD
	REP; MOVSB
	RET

// func moveAheadAVX512(dst, src unsafe.Pointer, n int)
TEXT ·moveAheadAVX512(SB), NOSPLIT, $0-24
	FIRST_AVX512
	SUBQ $1280, CX
	JLT  near

far:
	TAKE_AHEAD
	MOVE_AVX512(VMOVDQA64)
	JGE far

near: // no line behind dst is taken
	ADDQ $1024, CX
	JLT  last

line:
	MOVE_AVX512(VMOVDQA64)
	JGE line

last:
	LAST_AVX512
	RET

// func moveAheadAVX2(dst, src unsafe.Pointer, n int)
TEXT ·moveAheadAVX2(SB), NOSPLIT, $0-24
	FIRST_AVX2
	SUBQ $1280, CX
	JLT  near

far:
	TAKE_AHEAD
	MOVE_AVX2(VMOVDQA)
	JGE far

near: // no line behind dst is taken
	ADDQ $1024, CX
	JLT  last

line:
	MOVE_AVX2(VMOVDQA)
	JGE line

last:
	LAST_AVX2
	RET

// func moveNonTemporalAVX512(dst, src unsafe.Pointer, n int)
TEXT ·moveNonTemporalAVX512(SB), NOSPLIT, $0-24
	FIRST_AVX512
	SUBQ $256, CX
	JLT  last

lines:
	MOVE_AVX512(VMOVNTDQ)
	JGE lines

last: // stores follow in order
	SFENCE
	LAST_AVX512
	RET

// func moveNonTemporalAVX2(dst, src unsafe.Pointer, n int)
TEXT ·moveNonTemporalAVX2(SB), NOSPLIT, $0-24
	FIRST_AVX2
	SUBQ $256, CX
	JLT  last

lines:
	MOVE_AVX2(VMOVNTDQ)
	JGE lines

last: // stores follow in order
	SFENCE
	LAST_AVX2
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
