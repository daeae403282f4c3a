/*
 * tutti_dl.h: opens libtutti.so while a program runs, instead of linking it.
 *
 * A program that links the library starts the Go runtime when it starts, in every process. One
 * that opens it with the first group keeps children that it forks before that free of Go.
 *
 *     static tutti_dl tutti;
 *     char why[512];
 *     if (tutti_dl_open(&tutti, "libtutti.so", why, sizeof why) != 0)
 *         errx(1, "%s", why);
 *     tutti.tutti_join(NULL, &group);
 *
 * It needs dlopen (-ldl on old systems) and tutti.h, of whose functions it uses the types only.
 */
#ifndef TUTTI_DL_H
#define TUTTI_DL_H

#ifndef TUTTI_NO_HELPERS
#define TUTTI_NO_HELPERS /* they call the library's functions by name */
#endif

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#include "tutti.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The functions of tutti.h, each under its own name. */
#define TUTTI_DL_MEMBER(name) __typeof__(&name) name;
typedef struct tutti_dl {
	TUTTI_FUNCTIONS(TUTTI_DL_MEMBER)
} tutti_dl;
#undef TUTTI_DL_MEMBER

/* Writes to why what dlopen's message means and what to do about it. */
static inline void tutti_dl_explain(const char *path, const char *message, char *why, size_t cap)
{
	const char *advice = "";

	if (message == NULL)
		message = "no reason was given";
	if (strstr(message, "static TLS block") != NULL)
		advice = ". The libraries of this process have used up the memory for thread-local variables of libraries "
		         "that are opened late. Set LD_PRELOAD to the path of libtutti.so, or import it earlier, or raise "
		         "GLIBC_TUNABLES=glibc.rtld.optional_static_tls=2048";
	else if (strstr(message, "initial-exec TLS") != NULL || strstr(message, "libc.musl") != NULL ||
	         strstr(message, "ld-linux") != NULL || strstr(message, "libc.so.6") != NULL)
		advice = ". This looks like musl (Alpine), on which a Go library cannot be opened while a program runs. Use an "
		         "image with glibc 2.28 or later";
	else if (strstr(message, "GLIBC_") != NULL)
		advice = ". The library was built on a newer system: build it on this one (make shim)";
	else if (strstr(message, "cannot open shared object file: No such file") != NULL)
		advice = ". Build it (make shim), and set LD_LIBRARY_PATH to its directory or give its path";
	snprintf(why, cap, "cannot open %s: %s%s", path, message, advice);
}

/* Opens the library at path and fills tutti. It returns 0, or -1 after writing to why what to
 * do. The library stays open. */
static inline int tutti_dl_open(tutti_dl *tutti, const char *path, char *why, size_t cap)
{
	uint32_t version;
	const char *missing = NULL;
	void *handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);

	if (handle == NULL) {
		tutti_dl_explain(path, dlerror(), why, cap);
		return -1;
	}
	*(void **)(void *)&tutti->tutti_abi_version = dlsym(handle, "tutti_abi_version");
	if (tutti->tutti_abi_version == NULL) {
		snprintf(why, cap, "%s is not Tutti's library: it has no tutti_abi_version", path);
		return -1;
	}
	version = tutti->tutti_abi_version();
	if (version >> 16 != TUTTI_ABI_MAJOR || (version & 0xffff) + 1 < TUTTI_ABI_MINOR + 1) {
		snprintf(why, cap, "%s has version %u.%u of the interface, and this program needs %d.%d: install the library "
		                   "that belongs to it, or build the program anew", path, (unsigned)(version >> 16),
		         (unsigned)(version & 0xffff), TUTTI_ABI_MAJOR, TUTTI_ABI_MINOR);
		return -1;
	}
#define TUTTI_DL_RESOLVE(name) \
	*(void **)(void *)&tutti->name = dlsym(handle, #name); \
	if (tutti->name == NULL) \
		missing = #name;
	TUTTI_FUNCTIONS(TUTTI_DL_RESOLVE)
#undef TUTTI_DL_RESOLVE
	if (missing != NULL) {
		snprintf(why, cap, "%s has no function %s: it is damaged", path, missing);
		return -1;
	}
	return 0;
}

#ifdef __cplusplus
}
#endif

#endif /* TUTTI_DL_H */
