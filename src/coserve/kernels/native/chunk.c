// Causal attention of chunks of queries by tile registers (AMX), in bfloat16 with sums in float32: scores of a block of
// queries with some keys, their softmax, and its products with the values follow each other in the caches, with a
// running maximum (flash attention). Keys and values are brought into the registers' order once for all queries of a
// group. Strides are in elements. See ops.py for shapes.

#include <math.h>
#include <stdlib.h>

#include "kernels.h"
#include "tiles.h"
#include "transpose.h"
#include "vector.h"

#if defined(COSERVE_TILES) && defined(COSERVE_VECTORS)

enum { ROWS = 2 * TALL, SOME = 256 };  // queries of a block, and keys whose scores are computed together

// One batch entry's tensors; q [heads, rows, key_width], k [groups, length, key_width], v [groups, length, value_width].
typedef struct {
    const bf16 *q, *k, *v;
    i64 q_head, q_row, k_row, v_row;  // strides
    i64 rows, length, share, key_width, value_width, window;
    float scale;
} Chunk;

// What a thread computes with: a block's queries, its keys and values in the order of registers, scores, weights, sums.
typedef struct {
    bf16 *queries, *weights;
    int32_t *keys, *values;
    float *scores, *sums;
} Room;

static i64 up_to(i64 x, i64 of) { return (x + of - 1) / of * of; }

// Keys [length, width] as [length / TALL][width / 2][TALL] pairs; zeros behind the last.
static void turn_keys(const bf16 *k, i64 stride, i64 length, i64 width, int32_t *to) {
    for (i64 t = 0; t < up_to(length, DEEP); t += TALL)
        for (i64 j = 0; j < width; j += DEEP) {
            __m512i pairs[TALL];
            for (int m = 0; m < TALL; m++)
                pairs[m] = t + m < length ? _mm512_loadu_si512(k + (t + m) * stride + j) : _mm512_setzero_si512();
            transpose(TALL, pairs);
            for (int p = 0; p < TALL; p++) _mm512_store_si512(to + (t / TALL * width / 2 + j / 2 + p) * TALL, pairs[p]);
        }
}

// Values [length, width] as [length / DEEP][width / TALL][TALL pairs of keys][TALL]; zeros behind the last.
static void pair_values(const bf16 *v, i64 stride, i64 length, i64 width, int32_t *to) {
    for (i64 t = 0; t < up_to(length, DEEP); t += 2)
        for (i64 j = 0; j < width; j += TALL) {
            __m256i none = _mm256_setzero_si256();
            __m256i even = t < length ? _mm256_loadu_si256((const __m256i *)(v + t * stride + j)) : none;
            __m256i odd = t + 1 < length ? _mm256_loadu_si256((const __m256i *)(v + (t + 1) * stride + j)) : none;
            __m512i pairs = _mm512_or_si512(_mm512_cvtepu16_epi32(even),
                                            _mm512_slli_epi32(_mm512_cvtepu16_epi32(odd), 16));
            i64 at = (t / DEEP * width + j) * TALL + t % DEEP / 2 * TALL;
            _mm512_store_si512(to + at, pairs);
        }
}

// scores [ROWS, SOME] of a block's queries [ROWS, width] with `count` keys.
static void score(const bf16 *queries, i64 width, const int32_t *keys, i64 count, float *scores) {
    i64 bytes = width * (i64)sizeof(bf16), block = width / 2 * TALL;
    for (i64 t = 0; t < count; t += DEEP) {
        const int32_t *first = keys + t / TALL * block, *second = first + block;
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (i64 j = 0; j < width; j += DEEP) {
            _tile_loadd(4, queries + j, bytes);
            _tile_loadd(5, queries + TALL * width + j, bytes);
            _tile_loadd(6, first + j / 2 * TALL, TALL * 4);
            _tile_loadd(7, second + j / 2 * TALL, TALL * 4);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(0, scores + t, SOME * 4);
        _tile_stored(1, scores + t + TALL, SOME * 4);
        _tile_stored(2, scores + TALL * SOME + t, SOME * 4);
        _tile_stored(3, scores + TALL * SOME + t + TALL, SOME * 4);
    }
}

// One row's weights [count] of the scores that are rounded as a product is, those outside of [first, end) zeros; updates
// the row's maximum and sum, and returns what its sums so far are multiplied by.
static float weigh(float *scores, i64 first, i64 end, i64 count, float scale, float *most, float *sum, bf16 *weights) {
    float highest = *most, factor;
    if (first < end) {
        __m512 high = _mm512_set1_ps(-INFINITY);
        for (i64 t = first / WIDTH * WIDTH; t < end; t += WIDTH) {
            __mmask16 seen = 0xffff;
            if (t < first) seen &= (__mmask16)(0xffff << (first - t));
            if (end - t < WIDTH) seen &= (__mmask16)((1 << (end - t)) - 1);
            __m512 x = _mm512_mul_ps(rounded16(_mm512_loadu_ps(scores + t)), _mm512_set1_ps(scale));
            x = _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), seen, x);
            _mm512_storeu_ps(scores + t, x);
            high = _mm512_max_ps(high, x);
        }
        float own = _mm512_reduce_max_ps(high);
        if (!(own <= highest)) highest = own;
    }
    factor = *most == -INFINITY ? 0.0f : exponential(*most - highest);
    __m512 total = _mm512_setzero_ps(), least = _mm512_set1_ps(highest);
    for (i64 t = 0; t < count; t += WIDTH) {
        __m512 y = _mm512_setzero_ps();
        if (t + WIDTH > first && t < end) y = exponential16(_mm512_sub_ps(_mm512_loadu_ps(scores + t), least));
        total = _mm512_add_ps(total, y);
        narrow16(y, weights + t);
    }
    *most = highest;
    *sum = *sum * factor + _mm512_reduce_add_ps(total);
    return factor;
}

// sums [ROWS, width] += weights [ROWS, SOME] of `count` keys times their values.
static void add_values(const bf16 *weights, const int32_t *values, i64 count, i64 width, float *sums) {
    i64 bytes = width * 4;
    for (i64 j = 0; j < width; j += 2 * TALL) {
        int is_last = j + TALL == width;  // then the second half is computed twice and stored once
        i64 second = is_last ? j : j + TALL;
        _tile_loadd(0, sums + j, bytes);
        _tile_loadd(1, sums + second, bytes);
        _tile_loadd(2, sums + TALL * width + j, bytes);
        _tile_loadd(3, sums + TALL * width + second, bytes);
        for (i64 t = 0; t < count; t += DEEP) {
            _tile_loadd(4, weights + t, SOME * 2);
            _tile_loadd(5, weights + TALL * SOME + t, SOME * 2);
            _tile_loadd(6, values + (t / DEEP * width + j) * TALL, TALL * 4);
            _tile_loadd(7, values + (t / DEEP * width + second) * TALL, TALL * 4);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(0, sums + j, bytes);
        _tile_stored(1, sums + second, bytes);
        _tile_stored(2, sums + TALL * width + j, bytes);
        _tile_stored(3, sums + TALL * width + second, bytes);
    }
}

// The block of queries from `begin` on of one head: out has `out_row` from one row to the next, lse [rows] or null.
static void attend_block(const Chunk *c, const bf16 *q, i64 begin, bf16 *out, i64 out_row, float *lse, const Room *room) {
    i64 count = c->rows - begin < ROWS ? c->rows - begin : ROWS, width = c->value_width;
    i64 position = c->length - c->rows + begin;  // of the first query
    float most[ROWS], sum[ROWS];
    for (i64 m = 0; m < ROWS; m++) {
        bf16 *to = room->queries + m * c->key_width;
        if (m < count)
            memcpy(to, q + (begin + m) * c->q_row, sizeof(bf16) * (size_t)c->key_width);
        else
            memset(to, 0, sizeof(bf16) * (size_t)c->key_width);
        most[m] = -INFINITY, sum[m] = 0.0f;
    }
    memset(room->sums, 0, sizeof(float) * (size_t)(ROWS * width));
    i64 start = c->window && position >= c->window ? (position - c->window + 1) / DEEP * DEEP : 0;
    for (i64 from = start; from < position + count; from += SOME) {
        i64 left = up_to(position + count - from, DEEP), some = left < SOME ? left : SOME;
        score(room->queries, c->key_width, room->keys + from * c->key_width / 2, some, room->scores);
        for (i64 m = 0; m < ROWS; m++) {
            bf16 *weights = room->weights + m * SOME;
            if (m >= count) {
                memset(weights, 0, sizeof(bf16) * (size_t)some);
                continue;
            }
            i64 at = position + m, first = c->window && at >= c->window ? at - c->window + 1 - from : 0;
            i64 end = at + 1 - from < some ? at + 1 - from : some;
            float factor = weigh(room->scores + m * SOME, first > 0 ? first : 0, end, some, c->scale, most + m, sum + m,
                                 weights);
            float *row = room->sums + m * width;
            if (factor != 1.0f)
                for (i64 j = 0; j < width; j++) row[j] *= factor;
        }
        add_values(room->weights, room->values + from * width / 2, some, width, room->sums);
    }
    for (i64 m = 0; m < count; m++) {
        __m512 share = _mm512_set1_ps(1.0f / sum[m]);
        for (i64 j = 0; j < width; j += WIDTH)
            narrow16(_mm512_mul_ps(_mm512_loadu_ps(room->sums + m * width + j), share), out + (begin + m) * out_row + j);
        if (lse != NULL) lse[begin + m] = most[m] + logf(sum[m]);
    }
}

static void *aligned(i64 bytes) { return aligned_alloc(64, (size_t)up_to(bytes, 64)); }

int attends_chunks(i64 key_width, i64 value_width) {
    return has_tiles() && key_width % DEEP == 0 && value_width % TALL == 0;
}

void attend_chunks(const bf16 *q, const i64 *q_strides, const bf16 *k, const i64 *k_strides, const bf16 *v,
                   const i64 *v_strides, i64 batch, i64 heads, i64 groups, i64 rows, i64 length, i64 key_width,
                   i64 value_width, float scale, i64 window, bf16 *out, float *lse, int threads) {
    i64 share = heads / groups, out_row = heads * value_width, padded = up_to(length, DEEP);
#pragma omp parallel num_threads(threads) if (parallel : threads > 1)
    {
        Room room = {aligned(ROWS * key_width * 2), aligned(ROWS * SOME * 2),  aligned(padded * key_width * 2),
                     aligned(padded * value_width * 2), aligned(ROWS * SOME * 4), aligned(ROWS * value_width * 4)};
        configure_tiles(ROWS);
#pragma omp for schedule(dynamic)
        for (i64 i = 0; i < batch * groups; i++) {
            i64 b = i / groups, g = i % groups;
            Chunk chunk = {q + b * q_strides[0],
                           k + b * k_strides[0] + g * k_strides[1],
                           v + b * v_strides[0] + g * v_strides[1],
                           q_strides[1], q_strides[2], k_strides[2], v_strides[2],
                           rows, length, share, key_width, value_width, window, scale};
            turn_keys(chunk.k, chunk.k_row, length, key_width, room.keys);
            pair_values(chunk.v, chunk.v_row, length, value_width, room.values);
            for (i64 h = g * share; h < (g + 1) * share; h++)
                for (i64 begin = 0; begin < rows; begin += ROWS)
                    attend_block(&chunk, chunk.q + h * chunk.q_head, begin,
                                 out + b * rows * out_row + h * value_width, out_row,
                                 lse == NULL ? NULL : lse + (b * heads + h) * rows, &room);
        }
        _tile_release();
        free(room.queries);
        free(room.weights);
        free(room.keys);
        free(room.values);
        free(room.scores);
        free(room.sums);
    }
}
#else
int attends_chunks(i64 key_width, i64 value_width) { return 0; }

void attend_chunks(const bf16 *q, const i64 *q_strides, const bf16 *k, const i64 *k_strides, const bf16 *v,
                   const i64 *v_strides, i64 batch, i64 heads, i64 groups, i64 rows, i64 length, i64 key_width,
                   i64 value_width, float scale, i64 window, bf16 *out, float *lse, int threads) {}
#endif
