// Attention of one query per sequence over its pages, with sums in float32.
//
// Each query is computed alone and in one order, so that its bits do not depend on other rows or on the number
// of threads. Strides and lengths are in elements. See ops.py for shapes.

#include <math.h>
#include <stdlib.h>

#include "number.h"
#include "kernels.h"
#include "vector.h"

enum { LANES = sizeof(vector) / sizeof(float), PAIR = 2, BESIDE = 4 };  // of a vector, queries, keys
enum { LINE = 64 / sizeof(number) };  // numbers that memory is fetched by

#ifndef COSERVE_FLOAT32
typedef uint32_t bits __attribute__((vector_size(sizeof(vector))));
typedef bf16 narrows __attribute__((vector_size(sizeof(vector) / 2)));
#endif

INLINE vector widened(const number *x) {
#ifdef COSERVE_FLOAT32
    vector wide;
    memcpy(&wide, x, sizeof wide);
    return wide;
#else
    narrows narrow;
    memcpy(&narrow, x, sizeof narrow);
    return (vector)(__builtin_convertvector(narrow, bits) << 16);
#endif
}

// Queries [share, key_width] of one sequence and group over the positions from `first` to `end` in its pages. `k`
// and `v` are the group's slots.
typedef struct {
    const number *q, *k, *v;
    const i64 *table;
    i64 head_stride, page_size, first, end, share, key_width, value_width;
    float scale;
    number *out;
} Group;

// The same row in the sequence's next page, or in this one where there is none: to be fetched ahead. Pages in
// random order take 1.1 ms for 16 sequences of 280 tokens, 16 heads of 64 on 8 groups, one core; 2.0 without.
static inline i64 ahead(const Group *s, i64 page) {
    i64 last = (s->end - 1) / s->page_size, next = page < last ? page + 1 : page;
    return (s->table[next] - page) * s->page_size;
}

// scores[first ... end] of `height` queries [height, width] in float32, `room` from one to the next; four keys at a
// time, of which those beyond a page's end are its last once more.
INLINE void score(const int height, const Group *s, const float *q, i64 width, float *scores, i64 room) {
    for (i64 t = s->first; t < s->end;) {
        i64 page = t / s->page_size, stop = (page + 1) * s->page_size;
        const number *keys = s->k + (s->table[page] - page) * s->page_size * width;
        const number *next = s->k + ahead(s, page) * width;
        for (stop = stop < s->end ? stop : s->end; t < stop; t += BESIDE) {
            const number *key[BESIDE];
            vector sums[PAIR][BESIDE] = {0};
            i64 j = 0;
            for (int n = 0; n < BESIDE; n++) {
                i64 at = t + n < stop ? t + n : stop - 1;
                key[n] = keys + at * width;
                for (i64 i = 0; i < width; i += LINE) __builtin_prefetch(next + at * width + i);
            }
            for (; j + LANES <= width; j += LANES) {
                vector x[BESIDE];
                for (int n = 0; n < BESIDE; n++) x[n] = widened(key[n] + j);
                for (int h = 0; h < height; h++) {
                    vector query;
                    memcpy(&query, q + h * width + j, sizeof query);
                    for (int n = 0; n < BESIDE; n++) sums[h][n] += query * x[n];
                }
            }
            for (int h = 0; h < height; h++) {
                four found = totals(sums[h]);
                for (int n = 0; n < BESIDE && t + n < stop; n++) {
                    float rest = 0.0f;
                    for (i64 i = j; i < width; i++) rest += q[h * width + i] * widen(key[n][i]);
                    scores[h * room + t + n] = found[n] + rest;
                }
            }
        }
        t = stop;
    }
}

// The sums of values times weights[first ... end] of `height` queries, `room` from one to the next; four vectors of
// each value at a time.
INLINE void weigh(const int height, const Group *s, const float *weights, i64 room, i64 width, number *out) {
    enum { VECTORS = 4, NUMBERS = VECTORS * LANES };
    i64 j = 0;
    for (; j + NUMBERS <= width; j += NUMBERS) {
        vector sums[PAIR][VECTORS] = {0};
        for (i64 t = s->first; t < s->end;) {
            i64 page = t / s->page_size, stop = (page + 1) * s->page_size;
            const number *values = s->v + (s->table[page] - page) * s->page_size * width + j;
            const number *next = s->v + ahead(s, page) * width + j;
            for (stop = stop < s->end ? stop : s->end; t < stop; t++) {
                vector x[VECTORS];
                for (int n = 0; n < NUMBERS; n += LINE) __builtin_prefetch(next + t * width + n);
                for (int n = 0; n < VECTORS; n++) x[n] = widened(values + t * width + n * LANES);
                for (int h = 0; h < height; h++)
                    for (int n = 0; n < VECTORS; n++) sums[h][n] += weights[h * room + t] * x[n];
            }
        }
        for (int h = 0; h < height; h++)
            for (int n = 0; n < NUMBERS; n++) out[h * width + j + n] = narrow(sums[h][n / LANES][n % LANES]);
    }
    for (; j < width; j++)
        for (int h = 0; h < height; h++) {
            float sum = 0.0f;
            for (i64 t = s->first; t < s->end; t++) {
                i64 slot = s->table[t / s->page_size] * s->page_size + t % s->page_size;
                sum += weights[h * room + t] * widen(s->v[slot * width + j]);
            }
            out[h * width + j] = narrow(sum);
        }
}

// exp(x - largest) / sum, in place.
static inline void softmax(float *x, i64 count) {
    float most = -INFINITY;
#pragma omp simd reduction(max : most)
    for (i64 t = 0; t < count; t++) most = x[t] > most ? x[t] : most;
    float share = 1.0f / exponentials(x, count, most);
    for (i64 t = 0; t < count; t++) x[t] *= share;
}

// `height` queries of a group, from `head` on: keys and values are read once for all. `scores` has `room` for each,
// and is followed by the queries.
INLINE void attend_queries(const int height, const Group *s, i64 head, float *scores, i64 room) {
    float *queries = scores + PAIR * room;
    i64 width = s->key_width;
    for (int h = 0; h < height; h++)
        for (i64 j = 0; j < width; j++)
            queries[h * width + j] = widen(s->q[(head + h) * s->head_stride + j]) * s->scale;
    if (width == 64)  // as a constant it is unrolled
        score(height, s, queries, 64, scores, room);
    else if (width == 128)
        score(height, s, queries, 128, scores, room);
    else
        score(height, s, queries, width, scores, room);
    for (int h = 0; h < height; h++) softmax(scores + h * room + s->first, s->end - s->first);
    weigh(height, s, scores, room, s->value_width, s->out + head * s->value_width);
}

static void attend_pairs(const Group *s, float *scores, i64 room) {
    i64 h = 0;
    for (; h + PAIR <= s->share; h += PAIR) attend_queries(PAIR, s, h, scores, room);
    if (h < s->share) attend_queries(1, s, h, scores, room);
}

#ifdef COSERVE_PAIRS
#include <immintrin.h>

// A group's queries together, in pages of whole blocks of 16 positions and widths of whole vectors of 32: keys and
// values are read once, scores are inner products of pairs, 16 at a time. Half the time of one query
// after another in the caches (16 heads of 64 on 8 groups, 280 tokens: 22 us and 51).

enum { KEYS = 16, TOGETHER = 4, AHEAD = 4 };  // positions of a block, queries, blocks that are fetched ahead

// Block i of the positions from `begin` on is in 16 slots from starts[i] on. `room`: the positions that fit.
typedef struct {
    const i64 *starts;
    i64 begin, count, room;
} Blocks;

// Has a block of the keys fetched, or of the values, which come after the keys.
static inline void fetch(const Group *s, const Blocks *b, i64 block) {
    int is_value = block >= b->count;
    if (is_value) block -= b->count;
    if (block >= b->count) return;
    i64 width = is_value ? s->value_width : s->key_width;
    const char *from = (const char *)((is_value ? s->v : s->k) + b->starts[block] * width);
    for (i64 i = 0; i < KEYS * width * 2; i += 64) _mm_prefetch(from + i, _MM_HINT_T0);
}

static inline __m512bh numbers(const number *x) { return (__m512bh)_mm512_loadu_si512(x); }

// The sums of four vectors' quarters: lane 4 q + i is that of quarter q of x[i].
static inline __m512 of_quarters(const __m512 *x) {
    __m512 a = _mm512_add_ps(_mm512_unpacklo_ps(x[0], x[1]), _mm512_unpackhi_ps(x[0], x[1]));
    __m512 b = _mm512_add_ps(_mm512_unpacklo_ps(x[2], x[3]), _mm512_unpackhi_ps(x[2], x[3]));
    __m512d c = _mm512_castps_pd(a), d = _mm512_castps_pd(b);
    return _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(c, d)), _mm512_castpd_ps(_mm512_unpackhi_pd(c, d)));
}

static inline __m512 of_pairs(__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}

// Inner products of a query with 16 keys that lie together.
static inline __attribute__((always_inline)) __m512 products(const number *q, const number *keys, const i64 width) {
    __m512 quarters[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        __m512 sums[4];
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
            sums[j] = _mm512_setzero_ps();
            for (i64 n = 0; n < width; n += 32)
                sums[j] = _mm512_dpbf16_ps(sums[j], numbers(q + n), numbers(keys + (4 * i + j) * width + n));
        }
        quarters[i] = of_quarters(sums);
    }
    return of_pairs(of_pairs(quarters[0], quarters[1]), of_pairs(quarters[2], quarters[3]));
}

// The scores of `height` queries in float32, `b->room` from one query to the next; returns each one's most.
static inline __attribute__((always_inline)) void score_blocks(const int height, const i64 key_width, const Group *s,
                                                               const Blocks *b, const number *q, float *scores,
                                                               float *most) {
    __m512 highest[TOGETHER];
#pragma GCC unroll 4
    for (int h = 0; h < height; h++) highest[h] = _mm512_set1_ps(-INFINITY);
    for (i64 i = 0; i < b->count; i++) {
        i64 before = s->first - (b->begin + i * KEYS), after = s->end - (b->begin + i * KEYS);
        __mmask16 seen = 0xffff;
        if (before > 0) seen &= (__mmask16)(0xffff << before);
        if (after < KEYS) seen &= (__mmask16)((1 << after) - 1);
        fetch(s, b, i + AHEAD);
        const number *keys = s->k + b->starts[i] * key_width;
#pragma GCC unroll 4
        for (int h = 0; h < height; h++) {
            __m512 found = products(q + h * s->head_stride, keys, key_width);
            found = _mm512_mask_mul_ps(_mm512_set1_ps(-INFINITY), seen, found, _mm512_set1_ps(s->scale));
            highest[h] = _mm512_max_ps(highest[h], found);
            _mm512_storeu_ps(scores + h * b->room + i * KEYS, found);
        }
    }
    for (int h = 0; h < height; h++) most[h] = _mm512_reduce_max_ps(highest[h]);
}

// exp(x - most) of whole blocks, in place; returns one over their sum.
static float weights_of(float *x, i64 count, float most) { return 1.0f / exponentials(x, count, most); }

// Sums of values times weights for `height` queries, 32 * `vectors` numbers of each value from `column` on. Even and
// odd numbers are added up apart.
static inline __attribute__((always_inline)) void weigh_blocks(const int height, const int vectors, const Group *s,
                                                         const Blocks *b, i64 column, const float *weights,
                                                         const float *shares, number *out) {
    __m512 sums[TOGETHER][2][2];
#pragma GCC unroll 4
    for (int h = 0; h < height; h++)
#pragma GCC unroll 2
        for (int n = 0; n < vectors; n++) sums[h][n][0] = sums[h][n][1] = _mm512_setzero_ps();
    const __m512i high = _mm512_set1_epi32((int)0xffff0000);
    for (i64 i = 0; i < b->count; i++) {
        i64 at = b->begin + i * KEYS, t = at < s->first ? s->first : at;
        i64 stop = at + KEYS < s->end ? at + KEYS : s->end;
        if (column == 0) fetch(s, b, b->count + i + AHEAD);
        const number *values = s->v + b->starts[i] * s->value_width + column;
        for (; t < stop; t++) {
            __m512 even[2], odd[2];
#pragma GCC unroll 2
            for (int n = 0; n < vectors; n++) {
                __m512i both = _mm512_loadu_si512(values + (t - at) * s->value_width + 32 * n);
                even[n] = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
                odd[n] = _mm512_castsi512_ps(_mm512_and_si512(both, high));
            }
#pragma GCC unroll 4
            for (int h = 0; h < height; h++) {
                __m512 weight = _mm512_set1_ps(weights[h * b->room + t - b->begin]);
#pragma GCC unroll 2
                for (int n = 0; n < vectors; n++) {
                    sums[h][n][0] = _mm512_fmadd_ps(weight, even[n], sums[h][n][0]);
                    sums[h][n][1] = _mm512_fmadd_ps(weight, odd[n], sums[h][n][1]);
                }
            }
        }
    }
#pragma GCC unroll 4
    for (int h = 0; h < height; h++)
#pragma GCC unroll 2
        for (int n = 0; n < vectors; n++) {
            float even[16], odd[16];
            number *to = out + h * s->value_width + column + 32 * n;
            _mm512_storeu_ps(even, sums[h][n][0]);
            _mm512_storeu_ps(odd, sums[h][n][1]);
            for (int i = 0; i < 16; i++) {
                to[2 * i] = narrow(even[i] * shares[h]);
                to[2 * i + 1] = narrow(odd[i] * shares[h]);
            }
        }
}

static inline __attribute__((always_inline)) void attend_blocks(const int height, const Group *s, const Blocks *b, i64 head,
                                                                float *scores) {
    const number *q = s->q + head * s->head_stride;
    number *out = s->out + head * s->value_width;
    float most[TOGETHER], shares[TOGETHER];
    for (i64 i = 0; i < AHEAD; i++) fetch(s, b, i);
    if (s->key_width == 64)  // as a constant it is unrolled
        score_blocks(height, 64, s, b, q, scores, most);
    else if (s->key_width == 128)
        score_blocks(height, 128, s, b, q, scores, most);
    else
        score_blocks(height, s->key_width, s, b, q, scores, most);
    for (int h = 0; h < height; h++) shares[h] = weights_of(scores + h * b->room, b->count * KEYS, most[h]);
    i64 column = 0;
    for (; column + 64 <= s->value_width; column += 64) weigh_blocks(height, 2, s, b, column, scores, shares, out);
    if (column < s->value_width) weigh_blocks(height, 1, s, b, column, scores, shares, out);
}

// Returns 0, with nothing done, where pages or widths have no whole blocks.
static int attend_together(const Group *s, float *scores, i64 *starts, i64 room) {
    if (s->page_size % KEYS || s->key_width % 32 || s->value_width % 32) return 0;
    Blocks b = {starts, s->first / KEYS * KEYS, 0, room};
    for (i64 t = b.begin; t < s->end; t += KEYS)
        starts[b.count++] = s->table[t / s->page_size] * s->page_size + t % s->page_size;
    for (i64 h = 0; h < s->share; h += TOGETHER) switch (s->share - h) {
        case 1: attend_blocks(1, s, &b, h, scores); break;
        case 2: attend_blocks(2, s, &b, h, scores); break;
        case 3: attend_blocks(3, s, &b, h, scores); break;
        default: attend_blocks(4, s, &b, h, scores); break;
        }
    return 1;
}
#else
enum { KEYS = 16, TOGETHER = PAIR };

static int attend_together(const Group *s, float *scores, i64 *starts, i64 room) { return 0; }
#endif

// One query per sequence over its pages. q [batch, heads, key_width] with strides; keys and values
// [groups, slots, width]; tables [batch, pages]; lengths [batch]; out [batch, heads, value_width].
void attend_pages(const number *q, i64 row_stride, i64 head_stride, const number *keys, const number *values,
                  i64 slots, const i64 *tables, i64 pages, i64 page_size, const i64 *lengths, i64 window,
                  i64 batch, i64 heads, i64 groups, i64 key_width, i64 value_width, float scale, number *out,
                  int threads) {
    i64 share = heads / groups, positions = pages * page_size;
#pragma omp parallel num_threads(threads) if (parallel : threads > 1)
    {
        float *room = malloc(sizeof(float) * (size_t)(positions * TOGETHER + PAIR * key_width));
        i64 *starts = malloc(sizeof(i64) * (size_t)(positions / KEYS + 1));
#pragma omp for collapse(2) schedule(dynamic)
        for (i64 b = 0; b < batch; b++)
            for (i64 g = 0; g < groups; g++) {
                i64 end = lengths[b], first = window > 0 && end > window ? end - window : 0, head = g * share;
                Group own = {q + b * row_stride + head * head_stride,
                             keys + g * slots * key_width,
                             values + g * slots * value_width,
                             tables + b * pages,
                             head_stride, page_size, first, end, share, key_width, value_width, scale,
                             out + (b * heads + head) * value_width};
                if (!attend_together(&own, room, starts, positions)) attend_pairs(&own, room, positions);
            }
        free(room);
        free(starts);
    }
}
