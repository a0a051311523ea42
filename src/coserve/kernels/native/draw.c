// Draws the next token of each row of logits: the largest sum of a score and a noise that is hashed from the row's
// key and the token, among the tokens that top-k, top-p and min-p leave.
//
// The plain twin is model/sample.py with the noise of model/noise.py. Its logarithms, exponentials and sums round
// differently. So a row is left to it (UNDECIDED) where two sums are nearer to each other than that can matter, or the
// share of the likelihood below the winner is as near to the border of top-p, and where a number is not finite.
// All other rows get the twin's token. See draw.py for shapes.

#include <math.h>
#include <stdlib.h>

#include "bfloat16.h"
#include "exponential.h"

enum { BLOCK = 64, UNDECIDED = -1 };  // tokens that are passed over together

static const float NEAR = 2e-6f;     // relative distance of two sums, each of which rounds four times at most
static const double BORDER = 1e-4;  // relative distance of two shares, of sums of as many numbers as there are tokens
static const float ALMOST_ONE = 0x1.fffffep-1f;
static const float LN2 = 0.693147181f;

// splitmix64
static inline uint64_t mixed(uint64_t x) {
    x += 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

// 53 bits as a number in (0, 1), rounded once as the twin does: near 1, where a unit in the last place moves the noise
// by more than NEAR, two roundings end elsewhere. In two parts, as vectors of doubles are made of 32-bit integers.
static inline float uniform(uint64_t bits) {
    double high = (int32_t)(bits >> 33), low = (int32_t)((bits >> 11) & 0x3fffff) + 1;
    float x = (float)(high * 0x1p-31 + low * 0x1p-53);
    return x > ALMOST_ONE ? ALMOST_ONE : x;
}

// log(x) of a normal number, within 2 units in the last place, also near 1. Cephes' polynomial.
static inline float logarithm(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    int32_t power = (int32_t)(bits - 0x3f3504f3) >> 23;  // of a factor from the root of a half to that of two
    bits -= (uint32_t)power << 23;
    float m, n = (float)power;
    memcpy(&m, &bits, 4);
    m -= 1.0f;
    float square = m * m, p = 7.0376836292e-2f;
    p = p * m - 1.1514610310e-1f;
    p = p * m + 1.1676998740e-1f;
    p = p * m - 1.2420140846e-1f;
    p = p * m + 1.4249322787e-1f;
    p = p * m - 1.6668057665e-1f;
    p = p * m + 2.0000714765e-1f;
    p = p * m - 2.4999993993e-1f;
    p = p * m + 3.3333331174e-1f;
    p = p * m * square - 2.12194440e-4f * n - 0.5f * square;
    return m + p + 0.693359375f * n;
}

// -log(-log(1 - u)); what 1 - u loses by rounding is added to its logarithm.
static inline float gumbel(float u) {
    float rest = 1.0f - u, lost = u - (1.0f - rest);
    return -logarithm(lost / rest - logarithm(rest));
}

// No less than gumbel(u), up to rounding: -log(1 - u) is at least u, and log2(u) at least its bits read as a number.
static inline float most_gumbel(float u) {
    int32_t bits;
    memcpy(&bits, &u, 4);
    return LN2 * (127.0f - 0x1p-23f * (float)bits);
}

static float largest(const float *x, i64 count) {
    float most = -INFINITY;
#pragma omp simd reduction(max : most)
    for (i64 j = 0; j < count; j++) most = x[j] > most ? x[j] : most;
    return most;
}

static int has_nan(const float *x, i64 count) {
    int found = 0;
#pragma omp simd reduction(| : found)
    for (i64 j = 0; j < count; j++) found |= x[j] != x[j];
    return found;
}

// Makes all below `border` minus infinity.
static void drop(float *x, i64 count, float border) {
#pragma omp simd
    for (i64 j = 0; j < count; j++) x[j] = x[j] < border ? -INFINITY : x[j];
}

// The sum of exp(x - most) of all below `border`.
static double mass(const float *x, i64 count, float border, float most) {
    double sum = 0.0;
    for (i64 begin = 0; begin < count; begin += BLOCK) {
        i64 end = begin + BLOCK < count ? begin + BLOCK : count;
        float part = 0.0f;
#pragma omp simd reduction(+ : part)
        for (i64 j = begin; j < end; j++) part += x[j] < border ? exponential(x[j] - most) : 0.0f;
        sum += part;
    }
    return sum;
}

// Orders as the numbers do.
static inline int32_t ordered(float x) {
    int32_t bits;
    memcpy(&bits, &x, 4);
    return bits ^ ((bits >> 31) & 0x7fffffff);
}

// The k-th largest of x [count], from 1 on: bit by bit the greatest lower bound of k numbers, until there are k.
static float kth_largest(const float *x, i64 count, i64 k) {
    int32_t bound = INT32_MIN;
    for (int bit = 31; bit >= 0; bit--) {
        int32_t tried = (int32_t)((uint32_t)bound + (1u << bit)), above = 0;
#pragma omp simd reduction(+ : above)
        for (i64 j = 0; j < count; j++) above += ordered(x[j]) >= tried;
        if (above >= k) bound = tried;
        if (above == k) break;
    }
    float least = INFINITY;
#pragma omp simd reduction(min : least)
    for (i64 j = 0; j < count; j++) {
        float own = ordered(x[j]) >= bound ? x[j] : INFINITY;
        least = own < least ? own : least;
    }
    return least;
}

// The token with the largest sum of score and noise, of those with a score of at least `least`. Noises are worked out
// only of blocks in which one may be large enough.
static i64 winner(const float *x, i64 count, uint64_t key, float least) {
    float best = -INFINITY, second = -INFINITY, near = INFINITY;
    i64 at = UNDECIDED;
    for (i64 begin = 0; begin < count; begin += BLOCK) {
        i64 wide = begin + BLOCK < count ? BLOCK : count - begin;
        float u[BLOCK], sums[BLOCK], most = -INFINITY;
#pragma omp simd reduction(max : most)
        for (i64 j = 0; j < wide; j++) {
            float score = x[begin + j] >= least ? x[begin + j] : -INFINITY;
            u[j] = uniform(mixed(key + (uint64_t)(begin + j)));
            sums[j] = score;
            score += most_gumbel(u[j]);
            most = score > most ? score : most;
        }
        if (most == -INFINITY || most < best - near) continue;
#pragma omp simd
        for (i64 j = 0; j < wide; j++) sums[j] += gumbel(u[j]);
        for (i64 j = 0; j < wide; j++) {
            if (sums[j] > best) {
                second = best;
                best = sums[j];
                near = NEAR * (fabsf(best) + 64.0f);
                at = begin + j;
            } else if (sums[j] > second) {
                second = sums[j];
            }
        }
    }
    return second < best - near ? at : UNDECIDED;
}

typedef struct {
    const float *temperature, *tail, *floor;
    const i64 *seed, *top_k;
} Columns;

// Takes the numbers of x [count] for its own use.
static i64 draw_row(float *x, i64 count, const Columns *of, i64 slot, i64 position) {
    float most = largest(x, count), temperature = of->temperature[slot], tail = of->tail[slot];
    if (has_nan(x, count)) return UNDECIDED;
    if (temperature == 0.0f) {
        i64 first = 0;
        while (x[first] != most) first++;
        return first;
    }
#pragma omp simd
    for (i64 j = 0; j < count; j++) x[j] /= temperature;
    most /= temperature;
    if (!isfinite(most)) return UNDECIDED;
    if (of->top_k[slot] > 0) drop(x, count, kth_largest(x, count, of->top_k[slot]));
    uint64_t key = mixed(mixed((uint64_t)of->seed[slot]) + (uint64_t)position);
    float least = most + of->floor[slot];
    if (tail < 0.0f) return winner(x, count, key, least);
    // Tokens are kept whose share, with all that are no likelier, exceeds the tail. Who wins against all wins against
    // the kept ones too, if kept; else neither it nor any that is no likelier is kept, and the others are drawn from.
    double total = mass(x, count, INFINITY, most), below = 0.0;
    for (;;) {
        i64 at = winner(x, count, key, least);
        if (at == UNDECIDED) return UNDECIDED;
        float own = x[at], next = nextafterf(own, INFINITY);  // of equal ones the later are likelier
        float *rest = x + at + 1;
        i64 left = count - at - 1;
        below += mass(x, at + 1, next, most) + mass(rest, left, own, most);
        drop(x, at + 1, next);
        drop(rest, left, own);
        if (largest(x, count) == -INFINITY) return at;  // the likeliest is kept
        if (fabs(below / total - tail) <= BORDER * tail) return UNDECIDED;
        if (below / total > tail) return at;
    }
}

// tokens [rows] of logits [rows, count], in bfloat16 or, where `is_wide`, float32; rows are `stride` numbers apart.
void draw(const void *logits, i64 stride, int is_wide, const Columns *of, const i64 *slots, const i64 *positions,
          i64 *tokens, i64 rows, i64 count, int threads) {
#pragma omp parallel num_threads(threads) if (parallel : threads > 1)
    {
        float *x = malloc(sizeof(float) * (size_t)count);
#pragma omp for schedule(dynamic)
        for (i64 i = 0; i < rows; i++) {
            if (is_wide) {
                memcpy(x, (const float *)logits + i * stride, sizeof(float) * (size_t)count);
            } else {
                const bf16 *from = (const bf16 *)logits + i * stride;
#pragma omp simd
                for (i64 j = 0; j < count; j++) x[j] = widen_bf16(from[j]);
            }
            tokens[i] = draw_row(x, count, of, slots[i], positions[i]);
        }
        free(x);
    }
}
