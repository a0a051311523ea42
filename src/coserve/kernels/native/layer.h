#ifndef COSERVE_LAYER_H
#define COSERVE_LAYER_H

#include "number.h"
#include "kernels.h"

typedef struct {
    const number *packed, *bias;  // the bias is null where there is none
    i64 outputs;
} Linear;

typedef struct {
    const Segment *segments;  // low-rank bypasses of some rows
    i64 count;
} Bypass;

typedef struct {
    const number *weight;
    float eps;
    int is_centred;
} Norm;

typedef struct {
    i64 heads, groups, width, window;
    float scale;
} Attention;

typedef struct {
    Linear query, key, value, out, gate, up, down;
    Norm first, second;
    i64 hidden;
    Attention attention;
} Layer;

typedef struct {
    Bypass query, key, value, out, gate, up, down;
    Bypass attention, feed_forward;  // of the sublayers' outputs
} Bypasses;

#endif
