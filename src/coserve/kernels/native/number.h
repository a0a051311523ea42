#ifndef COSERVE_NUMBER_H
#define COSERVE_NUMBER_H

#include "bfloat16.h"

// The numbers that kernels read and write: the library is compiled once in bfloat16, and once in float32 with
// COSERVE_FLOAT32. Sums are in float32 in both.
#ifdef COSERVE_FLOAT32
typedef float number;

static inline float widen(number x) { return x; }
static inline number narrow(float x) { return x; }
#else
typedef bf16 number;

static inline float widen(number x) { return widen_bf16(x); }
static inline number narrow(float x) { return narrow_bf16(x); }
#endif

// As a number has it.
static inline float rounded(float x) { return widen(narrow(x)); }

// Products of pairs of bfloat16 numbers by the processor.
#if defined(__AVX512BF16__) && !defined(COSERVE_FLOAT32)
#define COSERVE_PAIRS
#endif

#endif
