#include "textflag.h"

// func loadBarrier()
TEXT ·loadBarrier(SB), NOSPLIT, $0-0
	LFENCE
	RET
