#ifndef COSERVE_TILES_H
#define COSERVE_TILES_H

#include "number.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__linux__)
#define COSERVE_TILES
#include <immintrin.h>

enum { TALL = 16, DEEP = 32 };  // rows of a tile register, and inputs: numbers in bfloat16

// Registers for blocks of `height` rows, at most 2 * TALL: 0 to 3 sums, 4 and 5 inputs, 6 and 7 weights, each pair of
// sums and each of the inputs for TALL of the rows.
void configure_tiles(i64 height);
#endif

#endif
