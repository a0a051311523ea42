// A decoder layer's decode rows by the other kernels, one after another: what the modules compute by these, bit for
// bit, in one call, with the low-rank bypasses of adapters. See layer.py for shapes.

#include <stdlib.h>

#include "bfloat16.h"
#include "kernels.h"

typedef struct {
    const bf16 *packed, *bias;  // the bias is null where there is none
    i64 outputs;
    const Segment *segments;  // low-rank bypasses of some rows
    i64 count;
} Linear;

typedef struct {
    Linear query, key, value, out, gate, up, down;
    const bf16 *first_norm, *second_norm;
    i64 hidden, heads, groups, width, window;
    float first_eps, second_eps, scale;
    int first_is_centred, second_is_centred;
} Layer;

typedef struct {
    bf16 *keys, *values;
    const i64 *slot_mapping, *table, *lengths;
    i64 slots, pages, page_size, batch;
} Pages;

static i64 most(i64 a, i64 b) { return a > b ? a : b; }

// y += x, rounded.
static void add(const bf16 *x, bf16 *y, i64 count) {
#pragma omp simd
    for (i64 i = 0; i < count; i++) y[i] = narrow(widen(x[i]) + widen(y[i]));
}

static void product(const bf16 *x, const Linear *of, bf16 *y, i64 rows, i64 ins, int threads) {
    linear(x, ins, of->packed, of->bias, y, rows, ins, of->outputs, threads);
    if (of->count > 0) add_lora(x, ins, of->segments, of->count, y, ins, of->outputs, threads);
}

// x and y [rows, hidden]; cosine and sine [rows, width]. Rows beyond the batch are padding. One thread passes over
// fewer numbers than `grain`.
void decode_layer(const Layer *layer, const Pages *pages, const bf16 *x, const bf16 *cosine, const bf16 *sine, bf16 *y,
                  i64 rows, i64 grain, int threads) {
    i64 hidden = layer->hidden, width = layer->width, batch = pages->batch;
    i64 of_q = layer->heads * width, of_k = layer->groups * width, inner = layer->gate.outputs;
    i64 span = most(hidden, of_q), wide = most(2 * inner, 2 * of_q + 3 * of_k);
    bf16 *room = malloc(sizeof(bf16) * (size_t)(rows * (span + wide)));
    bf16 *normed = room, *q = room + rows * span, *k = q + rows * of_q, *v = k + rows * of_k;
    bf16 *turned_q = v + rows * of_k, *turned_k = turned_q + rows * of_q;
    bf16 *gate = room + rows * span, *up = gate + rows * inner;
#define THREADS(numbers) ((numbers) >= grain ? threads : 1)
#define PRODUCT(x, of, ins, y) product(x, &(of), y, rows, ins, threads)
    rms_norm(x, layer->first_norm, normed, rows, hidden, layer->first_eps, layer->first_is_centred,
             THREADS(rows * hidden));
    PRODUCT(normed, layer->query, hidden, q);
    PRODUCT(normed, layer->key, hidden, k);
    PRODUCT(normed, layer->value, hidden, v);
    rotate(q, of_q, width, cosine, sine, turned_q, rows, layer->heads, width, THREADS(rows * of_q));
    rotate(k, of_k, width, cosine, sine, turned_k, rows, layer->groups, width, THREADS(rows * of_k));
    write_slots(turned_k, width, of_k, pages->slot_mapping, pages->keys, pages->slots, layer->groups, batch, width,
                THREADS(rows * of_k));
    write_slots(v, width, of_k, pages->slot_mapping, pages->values, pages->slots, layer->groups, batch, width,
                THREADS(rows * of_k));
    bf16 *attended = normed;
    attend_pages(turned_q, of_q, width, pages->keys, pages->values, pages->slots, pages->table, pages->pages,
                 pages->page_size, pages->lengths, layer->window, batch, layer->heads, layer->groups, width, width,
                 layer->scale, attended, THREADS(batch * pages->pages * pages->page_size * of_q));
    memset(attended + batch * of_q, 0, sizeof(bf16) * (size_t)((rows - batch) * of_q));
    PRODUCT(attended, layer->out, of_q, y);
    add(x, y, rows * hidden);
    rms_norm(y, layer->second_norm, normed, rows, hidden, layer->second_eps, layer->second_is_centred,
             THREADS(rows * hidden));
    PRODUCT(normed, layer->gate, hidden, gate);
    PRODUCT(normed, layer->up, hidden, up);
    silu_mul(gate, up, gate, rows * inner, THREADS(rows * inner));
    PRODUCT(gate, layer->down, inner, normed);
    add(normed, y, rows * hidden);
    free(room);
}
