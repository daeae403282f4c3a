/* A library that has Tutti's version function only. GREEDY bytes are thread-local. */
#include <stdint.h>

#ifdef GREEDY
static __thread __attribute__((tls_model("initial-exec"))) char memory[GREEDY];

char *greedy_memory(void)
{
	return memory;
}
#endif

uint32_t tutti_abi_version(void)
{
	return VERSION;
}
