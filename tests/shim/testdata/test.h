/* What the test programs share. */
#ifndef TEST_H
#define TEST_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tutti.h"

#define FAIL(...) \
	do { \
		fprintf(stderr, "%s:%d: ", __FILE__, __LINE__); \
		fprintf(stderr, __VA_ARGS__); \
		fputc('\n', stderr); \
		fflush(stderr); \
		_Exit(1); \
	} while (0)

/* TRUE ends the program with an error unless the condition holds. */
#define TRUE(condition) \
	do { \
		if (!(condition)) \
			FAIL("not true: %s", #condition); \
	} while (0)

/* CODE ends the program with an error unless the call returns the code. */
#define CODE(want, call) \
	do { \
		int code_ = (call); \
		if (code_ != (want)) \
			FAIL("%s is %s, want %s; the last error is: %s", #call, tutti_code_name(code_), #want, \
			     tutti_last_error()); \
	} while (0)

#define OK(call) CODE(TUTTI_OK, call)

/* SAYS ends the program with an error unless the last error contains the text. */
#define SAYS(text) \
	do { \
		if (strstr(tutti_last_error(), text) == NULL) \
			FAIL("the last error is \"%s\", want \"...%s...\"", tutti_last_error(), text); \
	} while (0)

#endif
