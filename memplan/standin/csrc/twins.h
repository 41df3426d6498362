/* Descriptors in the real cuDNN for those of its graph interface (cudnn.c); statuses are cuDNN's. */
#ifndef MEMPLAN_TWINS_H
#define MEMPLAN_TWINS_H

#include <stdint.h>

#pragma GCC visibility push(hidden)
void *twin_create(int type); /* NULL where cuDNN cannot be asked */
void twin_destroy(void *twin);
int twin_set(void *twin, int name, int type, int64_t count, const void *values);
int twin_get(void *twin, int name, int type, int64_t requested, int64_t *count, void *values);
int twin_finalize(void *twin, int type);
int twin_has_clusters(void *config); /* say whether a kernel of blocks in clusters is meant */
#pragma GCC visibility pop

#endif
