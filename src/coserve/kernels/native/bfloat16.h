#ifndef COSERVE_BFLOAT16_H
#define COSERVE_BFLOAT16_H

#include <stdint.h>
#include <string.h>

typedef uint16_t bf16;
typedef int64_t i64;

static inline float widen_bf16(bf16 x) {
    uint32_t bits = (uint32_t)x << 16;
    float y;
    memcpy(&y, &bits, 4);
    return y;
}

// To the nearest, ties to even; any NaN becomes a quiet one.
static inline bf16 narrow_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return x != x ? (bf16)0x7fc0 : (bf16)rounded;
}

#endif
