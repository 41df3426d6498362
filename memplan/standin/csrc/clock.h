/* What graphs need of the clock. */
#ifndef MEMPLAN_CLOCK_H
#define MEMPLAN_CLOCK_H

#pragma GCC visibility push(hidden)
double take_captured(void); /* what was captured since the last call */
#pragma GCC visibility pop

#endif
