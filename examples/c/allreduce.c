/*
 * Sums a vector over all ranks, with a blocking call and with a started operation.
 *
 *     cc allreduce.c $(pkg-config --cflags --libs tutti) -o allreduce
 *     tutti run -n 4 -- ./allreduce
 *
 * This needs an installed library: docs/c.md says how, and how to do without.
 */
#include <stdio.h>
#include <stdlib.h>

#include "tutti.h"

static void check(int code, const char *what)
{
	if (code != TUTTI_OK) {
		fprintf(stderr, "%s: %s: %s\n", what, tutti_code_name(code), tutti_last_error());
		exit(1);
	}
}

int main(void)
{
	tutti_group group;
	tutti_work work;
	tutti_op op;
	int32_t rank, size, i;
	float x[1000], y[1000];

	check(tutti_join(NULL, &group), "join"); /* rank, size and store: from the environment */
	check(tutti_rank(group, &rank), "rank");
	check(tutti_size(group, &size), "size");
	for (i = 0; i < 1000; i++)
		x[i] = (float)(rank + i);
	check(tutti_allreduce(group, x, 1000, TUTTI_FLOAT32, TUTTI_SUM), "allreduce");

	/* The program may compute while the maximum of the sums is under way. */
	op = tutti_op_allreduce(y, x, 1000, TUTTI_FLOAT32, TUTTI_MAX);
	check(tutti_start(group, &op, &work), "start");
	check(tutti_work_wait(work, -1), "wait");
	check(tutti_work_release(work), "release");

	printf("rank %d of %d: %g\n", rank, size, (double)y[10]);
	check(tutti_close(group), "close");
	return 0;
}
