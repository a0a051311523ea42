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
    i64 rows, length, key_width, value_width, window;
    float scale;
} Chunk;

// All entries' tensors with their outer strides, of batch entries, heads and rows.
typedef struct {
    const bf16 *q, *k, *v;
    const i64 *q_strides, *k_strides, *v_strides;
    i64 batch, heads, groups, rows, length, key_width, value_width, window;
    float scale;
} Whole;

static Chunk chunk_of(const Whole *all, i64 b, i64 g) {
    const i64 *k = all->k_strides, *v = all->v_strides;
    return (Chunk){.q = all->q + b * all->q_strides[0],
                   .k = all->k + b * k[0] + g * k[1],
                   .v = all->v + b * v[0] + g * v[1],
                   .q_head = all->q_strides[1],
                   .q_row = all->q_strides[2],
                   .k_row = k[2],
                   .v_row = v[2],
                   .rows = all->rows,
                   .length = all->length,
                   .key_width = all->key_width,
                   .value_width = all->value_width,
                   .window = all->window,
                   .scale = all->scale};
}

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

// Rows [ROWS, width], of which `count` are somebody's and the others zeros.
static void copy_rows(const bf16 *x, i64 stride, i64 count, i64 width, bf16 *to) {
    for (i64 m = 0; m < ROWS; m++, to += width)
        if (m < count)
            memcpy(to, x + m * stride, sizeof(bf16) * (size_t)width);
        else
            memset(to, 0, sizeof(bf16) * (size_t)width);
}

// The block of queries from `begin` on of one head: out has `out_row` from one row to the next, lse [rows] or null.
static void attend_block(const Chunk *c, const bf16 *q, i64 begin, bf16 *out, i64 out_row, float *lse, const Room *room) {
    i64 count = c->rows - begin < ROWS ? c->rows - begin : ROWS, width = c->value_width;
    i64 position = c->length - c->rows + begin;  // of the first query
    float most[ROWS], sum[ROWS];
    copy_rows(q + begin * c->q_row, c->q_row, count, c->key_width, room->queries);
    for (i64 m = 0; m < ROWS; m++) most[m] = -INFINITY, sum[m] = 0.0f;
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

// What the way back needs of one batch entry beside its `Chunk`: the gradient of the output and the output [heads, rows,
// value_width] with their strides, and the log-sum-exp of scores.
typedef struct {
    const bf16 *grad, *out;
    i64 grad_head, grad_row, out_head, out_row;
    const float *lse;
} Given;

// What a thread goes back with. Keys and values are turned for products with queries and with gradients, keys are paired
// for those with gradients of scores; sums for keys and values [width, padded length] are turned, those for queries not.
typedef struct {
    bf16 *queries, *turned_queries, *grads, *turned_grads, *dscores;
    int32_t *keys, *values, *paired_keys, *weights, *paired_dscores;
    float *scores, *products, *dq, *dk, *dv;
} BackRoom;

// x [ROWS, width] as [width, ROWS].
static void turn_block(const bf16 *x, i64 width, bf16 *to) {
    for (i64 j = 0; j < width; j += TALL) {
        __m512i pairs[TALL];
        for (int p = 0; p < TALL; p++) {
            __m256i even = _mm256_loadu_si256((const __m256i *)(x + 2 * p * width + j));
            __m256i odd = _mm256_loadu_si256((const __m256i *)(x + (2 * p + 1) * width + j));
            pairs[p] = _mm512_or_si512(_mm512_cvtepu16_epi32(even), _mm512_slli_epi32(_mm512_cvtepu16_epi32(odd), 16));
        }
        transpose(TALL, pairs);
        for (int c = 0; c < TALL; c++) _mm512_store_si512(to + (j + c) * ROWS, pairs[c]);
    }
}

// The weights and the gradients of scores of one query for keys [t, t + WIDTH), of which it attends to [first, end).
static inline void weigh_back(const float *scores, const float *products, i64 t, i64 first, i64 end, float scale,
                              float lse, float owed, __m512 *weight, __m512 *dscore) {
    *weight = *dscore = _mm512_setzero_ps();
    if (t + WIDTH <= first || t >= end) return;
    __mmask16 seen = 0xffff;
    if (t < first) seen &= (__mmask16)(0xffff << (first - t));
    if (end - t < WIDTH) seen &= (__mmask16)((1 << (end - t)) - 1);
    __m512 factor = _mm512_set1_ps(scale), x = _mm512_mul_ps(rounded16(_mm512_loadu_ps(scores + t)), factor);
    *weight = _mm512_maskz_mov_ps(seen, exponential16(_mm512_sub_ps(x, _mm512_set1_ps(lse))));
    __m512 owing = _mm512_sub_ps(_mm512_loadu_ps(products + t), _mm512_set1_ps(owed));
    *dscore = _mm512_maskz_mul_ps(seen, _mm512_mul_ps(owing, *weight), factor);
}

static inline __m512i paired(__m512 even, __m512 odd) {
    __m512i low = _mm512_srli_epi32(_mm512_castps_si512(rounded16(even)), 16);
    return _mm512_or_si512(low, _mm512_castps_si512(rounded16(odd)));
}

// sums [width, ...] += turned [width, ROWS] times pairs [count / TALL][ROWS / 2][TALL] of queries; sums have `stride`.
static void add_turned(const bf16 *turned, const int32_t *pairs, i64 count, i64 width, float *sums, i64 stride) {
    for (i64 j = 0; j < width; j += 2 * TALL) {
        _tile_loadd(4, turned + j * ROWS, ROWS * 2);
        _tile_loadd(5, turned + (j + TALL) * ROWS, ROWS * 2);
        for (i64 t = 0; t < count; t += 2 * TALL) {
            float *low = sums + j * stride + t, *high = low + TALL * stride;
            _tile_loadd(0, low, stride * 4);
            _tile_loadd(1, low + TALL, stride * 4);
            _tile_loadd(2, high, stride * 4);
            _tile_loadd(3, high + TALL, stride * 4);
            _tile_loadd(6, pairs + t * TALL, TALL * 4);
            _tile_loadd(7, pairs + (t + TALL) * TALL, TALL * 4);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
            _tile_stored(0, low, stride * 4);
            _tile_stored(1, low + TALL, stride * 4);
            _tile_stored(2, high, stride * 4);
            _tile_stored(3, high + TALL, stride * 4);
        }
    }
}

// The way back of the block of queries from `begin` on of head `h`: dq [rows, ...] has `dq_row` from one to the next.
static void go_back(const Chunk *c, const Given *of, i64 h, i64 begin, bf16 *dq, i64 dq_row, i64 padded,
                    const BackRoom *room) {
    i64 count = c->rows - begin < ROWS ? c->rows - begin : ROWS, position = c->length - c->rows + begin;
    const bf16 *out = of->out + h * of->out_head + begin * of->out_row;
    const float *lse = of->lse + h * c->rows + begin;
    float owed[ROWS];
    copy_rows(c->q + h * c->q_head + begin * c->q_row, c->q_row, count, c->key_width, room->queries);
    copy_rows(of->grad + h * of->grad_head + begin * of->grad_row, of->grad_row, count, c->value_width, room->grads);
    turn_block(room->queries, c->key_width, room->turned_queries);
    turn_block(room->grads, c->value_width, room->turned_grads);
    for (i64 m = 0; m < count; m++) {
        __m512 sum = _mm512_setzero_ps();
        for (i64 j = 0; j < c->value_width; j += WIDTH)
            sum = _mm512_fmadd_ps(widen16(room->grads + m * c->value_width + j), widen16(out + m * of->out_row + j), sum);
        owed[m] = _mm512_reduce_add_ps(sum);
    }
    memset(room->dq, 0, sizeof(float) * (size_t)(ROWS * c->key_width));
    i64 start = c->window && position >= c->window ? (position - c->window + 1) / DEEP * DEEP : 0;
    for (i64 from = start; from < position + count; from += SOME) {
        i64 left = up_to(position + count - from, DEEP), some = left < SOME ? left : SOME;
        score(room->queries, c->key_width, room->keys + from * c->key_width / 2, some, room->scores);
        score(room->grads, c->value_width, room->values + from * c->value_width / 2, some, room->products);
        for (i64 m = 0; m < ROWS; m += 2)
            for (i64 t = 0; t < some; t += WIDTH) {
                __m512 weights[2], dscores[2];
                for (i64 i = 0; i < 2; i++) {
                    i64 row = m + i, at = position + row, first = c->window && at >= c->window ? at - c->window + 1 - from : 0;
                    i64 end = row < count ? at + 1 - from : 0;
                    weigh_back(room->scores + row * SOME, room->products + row * SOME, t, first, end, c->scale,
                               row < count ? lse[row] : 0.0f, row < count ? owed[row] : 0.0f, weights + i, dscores + i);
                    narrow16(dscores[i], room->dscores + row * SOME + t);
                }
                _mm512_store_si512(room->weights + (t + m / 2) * TALL, paired(weights[0], weights[1]));
                _mm512_store_si512(room->paired_dscores + (t + m / 2) * TALL, paired(dscores[0], dscores[1]));
            }
        add_values(room->dscores, room->paired_keys + from * c->key_width / 2, some, c->key_width, room->dq);
        add_turned(room->turned_grads, room->weights, some, c->value_width, room->dv + from, padded);
        add_turned(room->turned_queries, room->paired_dscores, some, c->key_width, room->dk + from, padded);
    }
    for (i64 m = 0; m < count; m++)
        for (i64 j = 0; j < c->key_width; j += WIDTH)
            narrow16(_mm512_loadu_ps(room->dq + m * c->key_width + j), dq + (begin + m) * dq_row + j);
}

// Turned sums [width, padded] as [length, width], rounded.
static void turn_back(const float *sums, i64 padded, i64 length, i64 width, bf16 *to) {
    for (i64 t = 0; t < length; t += TALL)
        for (i64 j = 0; j < width; j += TALL) {
            __m512i lines[TALL];
            for (int c = 0; c < TALL; c++) lines[c] = _mm512_loadu_si512(sums + (j + c) * padded + t);
            transpose(TALL, lines);
            for (int m = 0; m < TALL && t + m < length; m++)
                narrow16(_mm512_castsi512_ps(lines[m]), to + (t + m) * width + j);
        }
}

static void *aligned(i64 bytes) { return aligned_alloc(64, (size_t)up_to(bytes, 64)); }

int attends_chunks(i64 key_width, i64 value_width) {
    return has_tiles() && key_width % DEEP == 0 && value_width % TALL == 0;
}

void attend_chunks(const bf16 *q, const i64 *q_strides, const bf16 *k, const i64 *k_strides, const bf16 *v,
                   const i64 *v_strides, i64 batch, i64 heads, i64 groups, i64 rows, i64 length, i64 key_width,
                   i64 value_width, float scale, i64 window, bf16 *out, float *lse, int threads) {
    Whole all = {q, k, v, q_strides, k_strides, v_strides, batch, heads, groups, rows, length, key_width,
                 value_width, window, scale};
    i64 share = heads / groups, out_row = heads * value_width, padded = up_to(length, DEEP);
#pragma omp parallel num_threads(threads) if (parallel : threads > 1)
    {
        Room room = {aligned(ROWS * key_width * 2), aligned(ROWS * SOME * 2),  aligned(padded * key_width * 2),
                     aligned(padded * value_width * 2), aligned(ROWS * SOME * 4), aligned(ROWS * value_width * 4)};
        configure_tiles(ROWS);
#pragma omp for schedule(dynamic)
        for (i64 i = 0; i < batch * groups; i++) {
            i64 b = i / groups, g = i % groups;
            Chunk chunk = chunk_of(&all, b, g);
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

int goes_back_chunks(i64 key_width, i64 value_width) {
    return attends_chunks(key_width, value_width) && value_width % DEEP == 0;
}

void attend_chunks_back(const bf16 *grad, const i64 *grad_strides, const bf16 *q, const i64 *q_strides, const bf16 *k,
                        const i64 *k_strides, const bf16 *v, const i64 *v_strides, const bf16 *out,
                        const i64 *out_strides, const float *lse, i64 batch, i64 heads, i64 groups, i64 rows,
                        i64 length, i64 key_width, i64 value_width, float scale, i64 window, bf16 *dq, bf16 *dk,
                        bf16 *dv, int threads) {
    Whole all = {q, k, v, q_strides, k_strides, v_strides, batch, heads, groups, rows, length, key_width,
                 value_width, window, scale};
    i64 share = heads / groups, padded = up_to(length, DEEP), wide = key_width, tall = value_width;
#pragma omp parallel num_threads(threads) if (parallel : threads > 1)
    {
        BackRoom room = {aligned(ROWS * wide * 2),   aligned(ROWS * wide * 2),   aligned(ROWS * tall * 2),
                         aligned(ROWS * tall * 2),   aligned(ROWS * SOME * 2),   aligned(padded * wide * 2),
                         aligned(padded * tall * 2), aligned(padded * wide * 2), aligned(ROWS * SOME * 2),
                         aligned(ROWS * SOME * 2),   aligned(ROWS * SOME * 4),   aligned(ROWS * SOME * 4),
                         aligned(ROWS * wide * 4),   aligned(padded * wide * 4), aligned(padded * tall * 4)};
        configure_tiles(ROWS);
#pragma omp for schedule(dynamic)
        for (i64 i = 0; i < batch * groups; i++) {
            i64 b = i / groups, g = i % groups;
            Chunk chunk = chunk_of(&all, b, g);
            Given of = {grad + b * grad_strides[0], out + b * out_strides[0], grad_strides[1], grad_strides[2],
                        out_strides[1], out_strides[2], lse + b * heads * rows};
            turn_keys(chunk.k, chunk.k_row, length, wide, room.keys);
            turn_keys(chunk.v, chunk.v_row, length, tall, room.values);
            pair_values(chunk.k, chunk.k_row, length, wide, room.paired_keys);
            memset(room.dk, 0, sizeof(float) * (size_t)(padded * wide));
            memset(room.dv, 0, sizeof(float) * (size_t)(padded * tall));
            for (i64 h = g * share; h < (g + 1) * share; h++)
                for (i64 begin = 0; begin < rows; begin += ROWS)
                    go_back(&chunk, &of, h, begin, dq + (b * rows * heads + h) * wide, heads * wide, padded, &room);
            turn_back(room.dk, padded, length, wide, dk + i * length * wide);
            turn_back(room.dv, padded, length, tall, dv + i * length * tall);
        }
        _tile_release();
        void *rooms[] = {room.queries, room.turned_queries, room.grads, room.turned_grads, room.dscores,
                       room.keys, room.values, room.paired_keys, room.weights, room.paired_dscores,
                       room.scores, room.products, room.dq, room.dk, room.dv};
        for (size_t i = 0; i < sizeof(rooms) / sizeof(rooms[0]); i++) free(rooms[i]);
    }
}
#else
int attends_chunks(i64 key_width, i64 value_width) { return 0; }

void attend_chunks(const bf16 *q, const i64 *q_strides, const bf16 *k, const i64 *k_strides, const bf16 *v,
                   const i64 *v_strides, i64 batch, i64 heads, i64 groups, i64 rows, i64 length, i64 key_width,
                   i64 value_width, float scale, i64 window, bf16 *out, float *lse, int threads) {}

int goes_back_chunks(i64 key_width, i64 value_width) { return 0; }

void attend_chunks_back(const bf16 *grad, const i64 *grad_strides, const bf16 *q, const i64 *q_strides, const bf16 *k,
                        const i64 *k_strides, const bf16 *v, const i64 *v_strides, const bf16 *out,
                        const i64 *out_strides, const float *lse, i64 batch, i64 heads, i64 groups, i64 rows,
                        i64 length, i64 key_width, i64 value_width, float scale, i64 window, bf16 *dq, bf16 *dk,
                        bf16 *dv, int threads) {}
#endif
