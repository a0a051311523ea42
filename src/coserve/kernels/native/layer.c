// Decoder layers by the other kernels, one after another: what the modules compute by these, bit for bit, in one call,
// with the low-rank bypasses of adapters and with weights of their own. Attention over other rows than decode rows is
// the caller's, between the layer's two halves. See layer.py for shapes.

#include <stdlib.h>

#include "layer.h"

// How rows use a weight of their own: instead of the module's [outs, ins], with a bias or null; its outputs or inputs
// times (1 + weight); added to its outputs; or, where `SCALES`, its outputs times weight.
enum { REPLACES, CHANGES, ENTERS, ADDS, SCALES };

enum { MANY = 2 };  // ranges of rows a thread

// Rows [begin, end) with a weight of their own. One that replaces a linear's may have but some of its outputs and inputs,
// at these indices; null where it has all. The linear's other outputs are zeros.
typedef struct {
    const number *weight, *bias;
    const i64 *outputs, *inputs;
    i64 outs, ins, begin, end, use;
} OwnWeight;

typedef struct {
    const OwnWeight *weights;  // in order of their rows
    i64 count;
} OwnRows;

typedef struct {
    OwnRows query, key, value, out, gate, up, down, first, second;
} LayerOwnWeights;

typedef struct {
    const i64 *table, *lengths;
    i64 pages, page_size, batch;
} Pages;

// Rows [rows, ...] of which the first `batch` are somebody's. One thread passes over fewer numbers than `grain`.
typedef struct {
    i64 rows, batch, grain;
    int threads;
} Step;

static int threads_for(const Step *step, i64 numbers) { return numbers >= step->grain ? step->threads : 1; }

// y += x, rounded.
static void add(const number *x, number *y, i64 count) {
#pragma omp simd
    for (i64 i = 0; i < count; i++) y[i] = narrow(widen(x[i]) + widen(y[i]));
}

// One row by the weight: all uses but REPLACES.
static void change(const OwnWeight *own, number *row, i64 width) {
    const number *w = own->weight;
    if (own->use == ADDS) {
        add(w, row, width);
    } else if (own->use == SCALES) {
#pragma omp simd
        for (i64 i = 0; i < width; i++) row[i] = narrow(widen(row[i]) * widen(w[i]));
    } else {
#pragma omp simd
        for (i64 i = 0; i < width; i++) row[i] = narrow(widen(row[i]) + widen(row[i]) * widen(w[i]));
    }
}

// The module's inputs or its outputs, of the rows that have a weight for these.
static void change_rows(const OwnRows *own, int inputs, number *x, i64 width) {
    for (const OwnWeight *one = own->weights; one < own->weights + own->count; one++)
        if (one->use != REPLACES && (one->use == ENTERS) == inputs)
            for (i64 row = one->begin; row < one->end; row++) change(one, x + row * width, width);
}

// A linear's product for the rows [begin, end), by the layer's own weight or by theirs.
typedef struct {
    const Linear *of;
    const OwnWeight *own;  // null for the layer's
    i64 begin, end;
    number *y;
} Range;

// A linear, the weights that rows have instead of it, and its output of all rows.
typedef struct {
    const Linear *of;
    const OwnRows *own;
    number *y;
} Product;

// Padding goes along with the last row: alone it would read a weight of its own.
static i64 end_of(const OwnWeight *own, const Step *step) { return own->end == step->batch ? step->rows : own->end; }

// The ranges of a product in order; returns how many.
static i64 find_ranges(const Product *one, const Step *step, Range *ranges) {
    i64 done = 0, count = 0;
    for (const OwnWeight *own = one->own->weights; own < one->own->weights + one->own->count; own++)
        if (own->use == REPLACES) {
            if (done < own->begin) ranges[count++] = (Range){one->of, NULL, done, own->begin, one->y};
            done = end_of(own, step);
            ranges[count++] = (Range){one->of, own, own->begin, done, one->y};
        }
    if (done < step->rows) ranges[count++] = (Range){one->of, NULL, done, step->rows, one->y};
    return count;
}

// As `linear_unpacked`, with a weight that has some of the outputs and inputs.
static void multiply_pruned(const OwnWeight *own, const number *x, i64 ins, number *y, i64 rows, i64 outs, int threads) {
    number *room = malloc(sizeof(number) * (size_t)(rows * (own->ins + own->outs)));
    number *kept = room, *product = own->outputs == NULL ? y : room + rows * own->ins;
    if (own->inputs != NULL)
        for (i64 m = 0; m < rows; m++)
            for (i64 i = 0; i < own->ins; i++) kept[m * own->ins + i] = x[m * ins + own->inputs[i]];
    linear_unpacked(own->inputs == NULL ? x : kept, own->ins, own->weight, own->bias, product, rows, own->ins, own->outs,
                    threads);
    if (own->outputs != NULL) {
        memset(y, 0, sizeof(number) * (size_t)(rows * outs));
        for (i64 m = 0; m < rows; m++)
            for (i64 n = 0; n < own->outs; n++) y[m * outs + own->outputs[n]] = product[m * own->outs + n];
    }
    free(room);
}

static void multiply(const Range *range, const number *x, i64 ins, int threads) {
    const number *from = x + range->begin * ins;
    i64 rows = range->end - range->begin, outs = range->of->outputs;
    number *to = range->y + range->begin * outs;
    if (range->own == NULL)
        linear(from, ins, range->of->packed, range->of->bias, to, rows, ins, outs, threads);
    else if (range->own->outputs != NULL || range->own->inputs != NULL)
        multiply_pruned(range->own, from, ins, to, rows, outs, threads);
    else
        linear_unpacked(from, ins, range->own->weight, range->own->bias, to, rows, ins, outs, threads);
}

// The products of linears that read the same x. Where there are many ranges each is one thread's: a product of 6 rows,
// 256x704, takes 13 us with two threads and 19 with one, so two of them side by side 9 each.
static void multiply_all(const number *x, i64 ins, const Product *products, i64 count, const Step *step) {
    i64 room = 0, found = 0;
    for (i64 i = 0; i < count; i++) room += 2 * products[i].own->count + 1;
    Range *ranges = malloc(sizeof(Range) * (size_t)room);
    for (i64 i = 0; i < count; i++) found += find_ranges(products + i, step, ranges + found);
    if (found < MANY * step->threads || step->threads == 1) {
        for (i64 i = 0; i < found; i++) multiply(ranges + i, x, ins, step->threads);
    } else {
#pragma omp parallel for schedule(dynamic) num_threads(step->threads)
        for (i64 i = 0; i < found; i++) multiply(ranges + i, x, ins, 1);
    }
    free(ranges);
}

// What rows have beside a linear's product.
static void finish(const number *x, i64 ins, const Product *one, const Bypass *added, const Step *step) {
    i64 outs = one->of->outputs;
    if (added->count > 0) add_lora(x, ins, added->segments, added->count, one->y, ins, outs, step->threads);
    change_rows(one->own, 0, one->y, outs);
}

static void norm(const number *x, const Norm *of, const OwnRows *own, number *y, const Step *step, i64 hidden) {
    rms_norm(x, of->weight, y, step->rows, hidden, of->eps, of->is_centred, threads_for(step, step->rows * hidden));
    change_rows(own, 0, y, hidden);
}

// A sublayer's output with the bypasses of its own.
static void leave(const Bypass *added, number *y, const Step *step, i64 hidden) {
    if (added->count > 0) add_lora(y, hidden, added->segments, added->count, y, hidden, hidden, step->threads);
}

#define PRODUCT(of, y) {&layer->of, &own->of, y}

// What attends, but for the rotary embedding: q [rows, heads, width], k and v [rows, groups, width].
static void attention_products(const Layer *layer, const Bypasses *added, const LayerOwnWeights *own, const number *x,
                               number *q, number *k, number *v, const Step *step) {
    i64 hidden = layer->hidden;
    number *normed = malloc(sizeof(number) * (size_t)(step->rows * hidden));
    norm(x, &layer->first, &own->first, normed, step, hidden);
    Product products[] = {PRODUCT(query, q), PRODUCT(key, k), PRODUCT(value, v)};
    multiply_all(normed, hidden, products, 3, step);
    finish(normed, hidden, products, &added->query, step);
    finish(normed, hidden, products + 1, &added->key, step);
    finish(normed, hidden, products + 2, &added->value, step);
    free(normed);
}

// Heads [rows, heads, width] with the rotary embedding.
static void rotate_heads(const number *x, i64 heads, i64 width, const number *cosine, const number *sine, number *y,
                         const Step *step) {
    i64 all = heads * width;
    rotate(x, all, width, cosine, sine, y, step->rows, heads, width, threads_for(step, step->rows * all));
}

// The layer's output y from its input x and what attention gave, which is changed.
static void after_attention(const Layer *layer, const Bypasses *added, const LayerOwnWeights *own, const number *x,
                            number *attended, number *y, const Step *step) {
    i64 hidden = layer->hidden, of_q = layer->query.outputs, inner = layer->gate.outputs, rows = step->rows;
    number *normed = malloc(sizeof(number) * (size_t)(rows * (hidden + 2 * inner)));
    number *gate = normed + rows * hidden, *up = gate + rows * inner;
    change_rows(&own->out, 1, attended, of_q);
    Product out = PRODUCT(out, y);
    multiply_all(attended, of_q, &out, 1, step);
    finish(attended, of_q, &out, &added->out, step);
    leave(&added->attention, y, step, hidden);
    add(x, y, rows * hidden);
    norm(y, &layer->second, &own->second, normed, step, hidden);
    Product gated[] = {PRODUCT(gate, gate), PRODUCT(up, up)};
    multiply_all(normed, hidden, gated, 2, step);
    finish(normed, hidden, gated, &added->gate, step);
    finish(normed, hidden, gated + 1, &added->up, step);
    silu_mul(gate, up, gate, rows * inner, threads_for(step, rows * inner));
    change_rows(&own->down, 1, gate, inner);
    Product down = PRODUCT(down, normed);
    multiply_all(gate, inner, &down, 1, step);
    finish(gate, inner, &down, &added->down, step);
    leave(&added->feed_forward, normed, step, hidden);
    add(normed, y, rows * hidden);
    free(normed);
}

// The slot of each sequence's newest position.
static void find_slots(const Pages *pages, i64 *slots) {
    for (i64 i = 0; i < pages->batch; i++) {
        i64 at = pages->lengths[i] - 1;
        slots[i] = pages->table[i * pages->pages + at / pages->page_size] * pages->page_size + at % pages->page_size;
    }
}

// Decode rows' attention over their pages, which get k and v at `newest` [batch], from what `attention_products` gives:
// attended [rows, heads, width], zeros for padding.
static void attend_decode(const Attention *shape, const Pages *pages, number *keys, number *values, i64 slots,
                          const i64 *newest, const number *plain_q, const number *plain_k, const number *v,
                          const number *cosine, const number *sine, number *attended, const Step *step) {
    i64 heads = shape->heads, groups = shape->groups, width = shape->width;
    i64 of_q = heads * width, of_k = groups * width, rows = step->rows, batch = step->batch;
    number *q = malloc(sizeof(number) * (size_t)(rows * (of_q + of_k)));
    number *k = q + rows * of_q;
    rotate_heads(plain_q, heads, width, cosine, sine, q, step);
    rotate_heads(plain_k, groups, width, cosine, sine, k, step);
    write_slots(k, width, of_k, newest, keys, slots, groups, batch, width, threads_for(step, rows * of_k));
    write_slots(v, width, of_k, newest, values, slots, groups, batch, width, threads_for(step, rows * of_k));
    attend_pages(q, of_q, width, keys, values, slots, pages->table, pages->pages, pages->page_size, pages->lengths,
                 shape->window, batch, heads, groups, width, width, shape->scale, attended,
                 threads_for(step, batch * pages->pages * pages->page_size * of_q));
    memset(attended + batch * of_q, 0, sizeof(number) * (size_t)((rows - batch) * of_q));
    free(q);
}

// As `decode_layers`, one layer; newest [batch].
static void decode_layer(const Layer *layer, const Bypasses *added, const LayerOwnWeights *own, const Pages *pages,
                         number *keys, number *values, i64 slots, const i64 *newest, const number *x, const number *cosine,
                         const number *sine, number *y, const Step *step) {
    i64 of_q = layer->query.outputs, of_k = layer->key.outputs, rows = step->rows;
    number *q = malloc(sizeof(number) * (size_t)(rows * (2 * of_q + 2 * of_k)));
    number *k = q + rows * of_q, *v = k + rows * of_k, *attended = v + rows * of_k;
    attention_products(layer, added, own, x, q, k, v, step);
    attend_decode(&layer->attention, pages, keys, values, slots, newest, q, k, v, cosine, sine, attended, step);
    after_attention(layer, added, own, x, attended, y, step);
    free(q);
}

// `count` layers, one after another, each with its bypasses, rows' own weights, keys and values [groups, slots, width],
// for decode rows x [rows, hidden] with cosine and sine [rows, width]; y [rows, hidden].
void decode_layers(const Layer *const *layers, const Bypasses *const *added, const LayerOwnWeights *const *own,
                   const Pages *pages, number *const *keys, number *const *values, i64 slots, const number *x,
                   const number *cosine, const number *sine, number *y, i64 rows, i64 count, i64 grain, int threads) {
    Step step = {rows, pages->batch, grain, threads};
    number *between = malloc(sizeof(number) * (size_t)(rows * layers[0]->hidden));
    i64 *newest = malloc(sizeof(i64) * (size_t)pages->batch);
    find_slots(pages, newest);
    for (i64 i = 0; i < count; i++) {
        number *to = (count - i) % 2 ? y : between;  // the last one's is y
        decode_layer(layers[i], added[i], own[i], pages, keys[i], values[i], slots, newest, x, cosine, sine, to, &step);
        x = to;
    }
    free(newest);
    free(between);
}

// A layer up to its attention: see `attention_products`, with q and k rotated; the first `batch` of the rows are
// somebody's.
void layer_begin(const Layer *layer, const Bypasses *added, const LayerOwnWeights *own, const number *x,
                 const number *cosine, const number *sine, number *q, number *k, number *v, i64 rows, i64 batch, i64 grain,
                 int threads) {
    Step step = {rows, batch, grain, threads};
    const Attention *shape = &layer->attention;
    i64 of_q = layer->query.outputs;
    number *plain_q = malloc(sizeof(number) * (size_t)(rows * (of_q + layer->key.outputs)));
    number *plain_k = plain_q + rows * of_q;
    attention_products(layer, added, own, x, plain_q, plain_k, v, &step);
    rotate_heads(plain_q, shape->heads, shape->width, cosine, sine, q, &step);
    rotate_heads(plain_k, shape->groups, shape->width, cosine, sine, k, &step);
    free(plain_q);
}

// The rest of a layer: see `after_attention`.
void layer_end(const Layer *layer, const Bypasses *added, const LayerOwnWeights *own, const number *x, number *attended,
               number *y, i64 rows, i64 batch, i64 grain, int threads) {
    Step step = {rows, batch, grain, threads};
    after_attention(layer, added, own, x, attended, y, &step);
}

// What lies between two layers' attention, of rows without anything of their own: the rest of a layer, and the
// `attention_products` of the one that follows; null where none does.
void layer_slice(const Layer *layer, const Layer *following, const number *x, number *attended, number *y, number *q, number *k,
                 number *v, i64 rows, i64 grain, int threads) {
    static const Bypasses none;
    static const LayerOwnWeights bare;
    Step step = {rows, rows, grain, threads};
    after_attention(layer, &none, &bare, x, attended, y, &step);
    if (following != NULL) attention_products(following, &none, &bare, y, q, k, v, &step);
}

// What lies between two slices: see `attend_decode`.
void layer_attend(const Attention *shape, const Pages *pages, number *keys, number *values, i64 slots, const number *q,
                  const number *k, const number *v, const number *cosine, const number *sine, number *attended, i64 rows,
                  i64 grain, int threads) {
    Step step = {rows, pages->batch, grain, threads};
    i64 *newest = malloc(sizeof(i64) * (size_t)pages->batch);
    find_slots(pages, newest);
    attend_decode(shape, pages, keys, values, slots, newest, q, k, v, cosine, sine, attended, &step);
    free(newest);
}
