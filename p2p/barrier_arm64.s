#include "textflag.h"

// func storeBarrier()
TEXT ·storeBarrier(SB), NOSPLIT, $0-0
	DMB $0xb
	RET

// func loadBarrier()
TEXT ·loadBarrier(SB), NOSPLIT, $0-0
	DMB $0x9
	RET
