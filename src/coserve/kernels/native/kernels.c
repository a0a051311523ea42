// Kernels of a CPU, with sums in float32: one pass over memory each.
//
// Each row is computed alone and in one order, so that its bits do not depend on other rows or on the number
// of threads. Strides and lengths are in elements. See ops.py for shapes.

#include <math.h>
#include <stdlib.h>

#include "number.h"
#include "kernels.h"
#include "vector.h"

// y = w * rounded(x / rms(x)), or x / rms(x) * (1 + w) rounded once where `centred`.
void rms_norm(const number *x, const number *w, number *y, i64 rows, i64 width, float eps, int centred, int threads) {
#pragma omp parallel for num_threads(threads) if (parallel : threads > 1)
    for (i64 i = 0; i < rows; i++) {
        const number *from = x + i * width;
        number *to = y + i * width;
        float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
        for (i64 j = 0; j < width; j++) sum += widen(from[j]) * widen(from[j]);
        float scale = 1.0f / sqrtf(sum / (float)width + eps);
        if (centred) {
#pragma omp simd
            for (i64 j = 0; j < width; j++) to[j] = narrow(widen(from[j]) * scale * (1.0f + widen(w[j])));
        } else {
#pragma omp simd
            for (i64 j = 0; j < width; j++) to[j] = narrow(rounded(widen(from[j]) * scale) * widen(w[j]));
        }
    }
}

// Rotary embedding of rows of heads [rows, heads, width], with strides; cos and sin [rows, width]. Rounded as
// x * cos + rotate_half(x) * sin is, operation by operation.
void rotate(const number *x, i64 row_stride, i64 head_stride, const number *cosine, const number *sine, number *y,
            i64 rows, i64 heads, i64 width, int threads) {
    i64 half = width / 2;
#pragma omp parallel for num_threads(threads) if (parallel : threads > 1)
    for (i64 i = 0; i < rows; i++) {
        const number *c = cosine + i * width, *s = sine + i * width;
        for (i64 h = 0; h < heads; h++) {
            const number *from = x + i * row_stride + h * head_stride;
            number *to = y + (i * heads + h) * width;
#pragma omp simd
            for (i64 j = 0; j < half; j++) {
                float a = widen(from[j]), b = widen(from[half + j]);
                to[j] = narrow(rounded(a * widen(c[j])) + rounded(-b * widen(s[j])));
                to[half + j] = narrow(rounded(b * widen(c[half + j])) + rounded(a * widen(s[half + j])));
            }
        }
    }
}

// y = rounded(silu(gate)) * up.
void silu_mul(const number *gate, const number *up, number *y, i64 count, int threads) {
    i64 vectors = 0, width = 1;
#ifdef COSERVE_VECTORS
    vectors = count / WIDTH, width = WIDTH;
#pragma omp parallel for num_threads(threads) if (parallel : threads > 1)
    for (i64 i = 0; i < vectors; i++) {
        __m512 x = widen16(gate + i * WIDTH), one = _mm512_set1_ps(1.0f);
        __m512 e = exponential16(_mm512_xor_ps(x, _mm512_set1_ps(-0.0f)));
        __m512 silu = rounded16(_mm512_div_ps(x, _mm512_add_ps(one, e)));
        narrow16(_mm512_mul_ps(silu, widen16(up + i * WIDTH)), y + i * WIDTH);
    }
#endif
#pragma omp parallel for simd num_threads(threads) if (parallel : threads > 1 && vectors == 0)
    for (i64 i = vectors * width; i < count; i++) {
        float x = widen(gate[i]);
        y[i] = narrow(rounded(x / (1.0f + exponential(-x))) * widen(up[i]));
    }
}

// Writes x [groups, rows, width], with strides, into slots [rows] of pool [groups, places, width].
void write_slots(const number *x, i64 group_stride, i64 row_stride, const i64 *slots, number *pool, i64 places,
                 i64 groups, i64 rows, i64 width, int threads) {
#pragma omp parallel for num_threads(threads) if (parallel : threads > 1)
    for (i64 i = 0; i < rows; i++)
        for (i64 g = 0; g < groups; g++)
            memcpy(pool + (g * places + slots[i]) * width, x + g * group_stride + i * row_stride,
                   sizeof(number) * (size_t)width);
}

// Compares as the number does: both zeros are equal, and NaN is larger than all else.
#ifdef COSERVE_FLOAT32
typedef int32_t order;
enum { LOWEST = INT32_MIN, INFINITE = 0x7f800000 };

static inline order rank(number x) {
    int32_t all;
    memcpy(&all, &x, 4);
    int32_t size = all & 0x7fffffff;
    return size > 0x7f800000 ? INT32_MAX : all < 0 ? -size : size;
}
#else
typedef int16_t order;
enum { LOWEST = INT16_MIN, INFINITE = 0x7f80 };

static inline order rank(number x) {
    uint16_t size = x & 0x7fff;
    int16_t ranked = (int16_t)((x & 0x8000) ? -size : size);
    return size > 0x7f80 ? INT16_MAX : ranked;
}
#endif

// first [rows]: the first of the largest of each row of x [rows, count]; -1 where that is no finite number.
void argmax(const number *x, i64 *first, i64 rows, i64 count, int threads) {
#pragma omp parallel for num_threads(threads) if (parallel : threads > 1)
    for (i64 i = 0; i < rows; i++) {
        const number *row = x + i * count;
        order most = LOWEST;
        i64 at = 0;
        for (i64 begin = 0; begin < count; begin += 256) {
            i64 end = begin + 256 < count ? begin + 256 : count;
            order own = LOWEST;
#pragma omp simd reduction(max : own)
            for (i64 j = begin; j < end; j++) own = rank(row[j]) > own ? rank(row[j]) : own;
            if (own > most) {
                most = own;
                at = begin;
            }
        }
        while (rank(row[at]) != most) at++;
        first[i] = most >= INFINITE || most <= -INFINITE ? -1 : at;
    }
}
