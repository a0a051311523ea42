// Decoder layers' decode rows by the other kernels, one after another: what the modules compute by these, bit for bit,
// in one call, with the low-rank bypasses of adapters and with weights of their own. See layer.py for shapes.

#include <stdlib.h>

#include "bfloat16.h"
#include "kernels.h"

// Rows [begin, end) with a weight of their own: of a linear [outs, ins] with a bias or null, instead of the layer's;
// of a norm [hidden] factors of the layer's output.
typedef struct {
    const bf16 *weight, *bias;
    i64 begin, end;
} OwnWeight;

typedef struct {
    const bf16 *packed, *bias;  // the bias is null where there is none
    i64 outputs;
} Linear;

typedef struct {
    const Segment *segments;  // low-rank bypasses of some rows
    i64 count;
} Bypass;

typedef struct {
    const OwnWeight *weights;  // in order of their rows
    i64 count;
} OwnRows;

typedef struct {
    const bf16 *weight;
    float eps;
    int is_centred;
} Norm;

typedef struct {
    Linear query, key, value, out, gate, up, down;
    Norm first, second;
    i64 hidden, heads, groups, width, window;
    float scale;
} Layer;

typedef struct {
    Bypass query, key, value, out, gate, up, down;
} Bypasses;

typedef struct {
    OwnRows query, key, value, out, gate, up, down, first, second;
} LayerOwnWeights;

typedef struct {
    const i64 *table, *lengths;
    i64 pages, page_size, batch;
} Pages;

static i64 most(i64 a, i64 b) { return a > b ? a : b; }

// y += x, rounded.
static void add(const bf16 *x, bf16 *y, i64 count) {
#pragma omp simd
    for (i64 i = 0; i < count; i++) y[i] = narrow(widen(x[i]) + widen(y[i]));
}

// The rows [begin, end) by the layer's own weight.
static void common(const bf16 *x, const Linear *of, bf16 *y, i64 begin, i64 end, i64 ins, int threads) {
    if (begin < end)
        linear(x + begin * ins, ins, of->packed, of->bias, y + begin * of->outputs, end - begin, ins, of->outputs,
               threads);
}

// Padding goes along with the last row: alone it would read a weight of its own.
static i64 end_of(const OwnWeight *own, i64 rows, i64 batch) { return own->end == batch ? rows : own->end; }

static void product(const bf16 *x, const Linear *of, const Bypass *added, const OwnRows *own, bf16 *y, i64 rows,
                    i64 batch, i64 ins, int threads) {
    i64 done = 0;
    for (i64 i = 0; i < own->count; i++) {
        const OwnWeight *one = own->weights + i;
        common(x, of, y, done, one->begin, ins, threads);
        done = end_of(one, rows, batch);
        linear_unpacked(x + one->begin * ins, ins, one->weight, one->bias, y + one->begin * of->outputs,
                        done - one->begin, ins, of->outputs, threads);
    }
    common(x, of, y, done, rows, ins, threads);
    if (added->count > 0) add_lora(x, ins, added->segments, added->count, y, ins, of->outputs, threads);
}

static void norm(const bf16 *x, const Norm *of, const OwnRows *own, bf16 *y, i64 rows, i64 batch, i64 hidden,
                 int threads) {
    rms_norm(x, of->weight, y, rows, hidden, of->eps, of->is_centred, threads);
    for (const OwnWeight *one = own->weights; one < own->weights + own->count; one++)
        for (i64 row = one->begin; row < end_of(one, rows, batch); row++) {
            bf16 *to = y + row * hidden;
#pragma omp simd
            for (i64 j = 0; j < hidden; j++) to[j] = narrow(widen(to[j]) * widen(one->weight[j]));
        }
}

// The slot of each sequence's newest position.
static void find_slots(const Pages *pages, i64 *slots) {
    for (i64 i = 0; i < pages->batch; i++) {
        i64 at = pages->lengths[i] - 1;
        slots[i] = pages->table[i * pages->pages + at / pages->page_size] * pages->page_size + at % pages->page_size;
    }
}

// x and y [rows, hidden]; cosine and sine [rows, width]; keys and values [groups, slots, width]; newest [batch]. Rows
// beyond the batch are padding. One thread passes over fewer numbers than `grain`.
static void decode_layer(const Layer *layer, const Bypasses *added, const LayerOwnWeights *own, const Pages *pages,
                         bf16 *keys, bf16 *values, i64 slots, const i64 *newest, const bf16 *x, const bf16 *cosine,
                         const bf16 *sine, bf16 *y, i64 rows, i64 grain, int threads) {
    i64 hidden = layer->hidden, width = layer->width, batch = pages->batch;
    i64 of_q = layer->heads * width, of_k = layer->groups * width, inner = layer->gate.outputs;
    i64 span = most(hidden, of_q), wide = most(2 * inner, 2 * of_q + 3 * of_k);
    bf16 *room = malloc(sizeof(bf16) * (size_t)(rows * (span + wide)));
    bf16 *normed = room, *q = room + rows * span, *k = q + rows * of_q, *v = k + rows * of_k;
    bf16 *turned_q = v + rows * of_k, *turned_k = turned_q + rows * of_q;
    bf16 *gate = room + rows * span, *up = gate + rows * inner;
#define THREADS(numbers) ((numbers) >= grain ? threads : 1)
#define PRODUCT(x, of, ins, y) product(x, &layer->of, &added->of, &own->of, y, rows, batch, ins, threads)
#define NORM(x, of, y) norm(x, &layer->of, &own->of, y, rows, batch, hidden, THREADS(rows * hidden))
    NORM(x, first, normed);
    PRODUCT(normed, query, hidden, q);
    PRODUCT(normed, key, hidden, k);
    PRODUCT(normed, value, hidden, v);
    rotate(q, of_q, width, cosine, sine, turned_q, rows, layer->heads, width, THREADS(rows * of_q));
    rotate(k, of_k, width, cosine, sine, turned_k, rows, layer->groups, width, THREADS(rows * of_k));
    write_slots(turned_k, width, of_k, newest, keys, slots, layer->groups, batch, width, THREADS(rows * of_k));
    write_slots(v, width, of_k, newest, values, slots, layer->groups, batch, width, THREADS(rows * of_k));
    bf16 *attended = normed;
    attend_pages(turned_q, of_q, width, keys, values, slots, pages->table, pages->pages, pages->page_size,
                 pages->lengths, layer->window, batch, layer->heads, layer->groups, width, width, layer->scale, attended,
                 THREADS(batch * pages->pages * pages->page_size * of_q));
    memset(attended + batch * of_q, 0, sizeof(bf16) * (size_t)((rows - batch) * of_q));
    PRODUCT(attended, out, of_q, y);
    add(x, y, rows * hidden);
    NORM(y, second, normed);
    PRODUCT(normed, gate, hidden, gate);
    PRODUCT(normed, up, hidden, up);
    silu_mul(gate, up, gate, rows * inner, THREADS(rows * inner));
    PRODUCT(gate, down, inner, normed);
    add(normed, y, rows * hidden);
    free(room);
}

// `count` layers, one after another, each with its bypasses, rows' own weights, keys and values.
void decode_layers(const Layer *const *layers, const Bypasses *const *added, const LayerOwnWeights *const *own,
                   const Pages *pages, bf16 *const *keys, bf16 *const *values, i64 slots, const bf16 *x,
                   const bf16 *cosine, const bf16 *sine, bf16 *y, i64 rows, i64 count, i64 grain, int threads) {
    bf16 *between = malloc(sizeof(bf16) * (size_t)(rows * layers[0]->hidden));
    i64 *newest = malloc(sizeof(i64) * (size_t)pages->batch);
    find_slots(pages, newest);
    for (i64 i = 0; i < count; i++) {
        bf16 *to = (count - i) % 2 ? y : between;  // the last one's is y
        decode_layer(layers[i], added[i], own[i], pages, keys[i], values[i], slots, newest, x, cosine, sine, to, rows,
                     grain, threads);
        x = to;
    }
    free(newest);
    free(between);
}
