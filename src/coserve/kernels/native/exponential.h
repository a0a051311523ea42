#ifndef COSERVE_EXPONENTIAL_H
#define COSERVE_EXPONENTIAL_H

#include <math.h>

#include "bfloat16.h"

// exp(x) within 2 units in the last place; 0 below -87, infinite above 88. Cephes' polynomial.
static inline float exponential(float x) {
    float bounded = x < -87.0f ? -87.0f : x;
    bounded = bounded > 88.0f ? 88.0f : bounded;
    float n = nearbyintf(bounded * 1.44269504088896341f);
    float r = bounded - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    uint32_t bits = (uint32_t)((int32_t)n + 127) << 23;
    float power;
    memcpy(&power, &bits, 4);
    float y = p * power;
    y = x < -87.0f ? 0.0f : y;
    y = x > 88.0f ? INFINITY : y;
    return x != x ? x : y;
}

#endif
