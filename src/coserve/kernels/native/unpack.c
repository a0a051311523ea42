// Columns of a weight that oneDNN has packed into panels, [outputs / panel][inputs / 2][panel][2], as they were loaded.
//
// Products with the transpose read them: a block of columns lies in a core's cache between the two.

#include <string.h>

#include "number.h"
#include "kernels.h"
#include "transpose.h"

enum { SQUARE = 16 };  // outputs, and pairs of inputs, that are turned together

// SQUARE pairs of inputs, `panel` pairs apart in memory, of SQUARE outputs to rows of `width` pairs.
static void turn(const bf16 *from, i64 panel, bf16 *to, i64 width, i64 pairs) {
#if defined(__AVX512F__)
    if (pairs == SQUARE) {
        __m512i x[SQUARE];
#pragma GCC unroll 16
        for (int p = 0; p < SQUARE; p++) x[p] = _mm512_loadu_si512(from + p * panel * 2);
        transpose(SQUARE, x);
#pragma GCC unroll 16
        for (int o = 0; o < SQUARE; o++) _mm512_storeu_si512(to + o * width * 2, x[o]);
        return;
    }
#endif
    for (i64 p = 0; p < pairs; p++)
        for (int o = 0; o < SQUARE; o++) memcpy(to + (o * width + p) * 2, from + (p * panel + o) * 2, 4);
}

// to [outs, count] = the `count` columns from `begin` on of a weight [outs, ins]; both even, `panel` a multiple of SQUARE.
void unpack_columns(const bf16 *packed, bf16 *to, i64 outs, i64 ins, i64 panel, i64 begin, i64 count, int threads) {
    i64 width = count / 2;
#pragma omp parallel for num_threads(threads) if (parallel : threads > 1)
    for (i64 out = 0; out < outs; out += SQUARE) {
        const bf16 *own = packed + (out / panel * ins + begin) * panel + out % panel * 2;
        bf16 *row = to + out * count;
        for (i64 p = 0; p < width; p += SQUARE) {
            i64 pairs = width - p < SQUARE ? width - p : SQUARE;
            turn(own + p * panel * 2, panel, row + p * 2, width, pairs);
        }
    }
}
