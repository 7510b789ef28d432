/* The 8-bit format of optimizer state: bitsandbytes' dynamic maps, blockwise (Dettmers et al. 2022, arXiv:2110.02861).
 *
 * A block of 256 elements shares a scale, its largest magnitude; an element is a code for its share of that. The share
 * is 0, 1, or one of 7 decades, 1e-7 to 1e-6 up to 0.1 to 1, each cut into equal steps, twice as many in each as in the
 * one below: 1 to 64 steps with a sign, 2 to 128 without. A code stands for the middle of its step.
 *
 * A class is 0 for zero, 1 to 7 for the decades, 8 for one. Within a class, code and share are linear functions of each
 * other, so coding and decoding are table lookups by class and one fused multiply-add.
 */
#ifndef LIGHTNING_CXL_BLOCKWISE_TABLES_H
#define LIGHTNING_CXL_BLOCKWISE_TABLES_H

#include "number_formats.h"

enum { BLOCKWISE_SIZE = 256, BLOCKWISE_DECADES = 7 };

/* 2^-31, added to every share: it makes the exponent's lower 5 bits tell all binades apart; the tables allow for it */
#define BLOCKWISE_SHIFT 4.656612873077393e-10f

/* For one of the two maps. Vector lookups take rows of 16 and 32 floats, and the lower 4 and 5 bits of an index. */
struct blockwise_map {
    float threshold[32]; /* by binade of the share: where the next class begins; its lower 4 bits: the class below */
    float slope[16], offset[16], last[16]; /* by class: code = slope * share + offset, at most the last of its class */
    float step[16], base[16]; /* by binade of the code's middle: share = step * middle + base */
};

static struct blockwise_map blockwise_signed, blockwise_unsigned;

static float blockwise_tagged(const double threshold, const int class_below)
{
    return cxl_float((cxl_bits((float)threshold) & ~15u) | (uint32_t)class_below);
}

static void blockwise_fill(struct blockwise_map *map, const int is_unsigned)
{
    const int first_binade = 126 + is_unsigned; /* of the middle of code 0; as float32 exponent */
    double thresholds[BLOCKWISE_DECADES + 1], step = 0.0, edge = 1e-7;
    for (int k = 0; k < BLOCKWISE_DECADES; k++, edge *= 10.0) {
        const double below = step, count = (double)(1 << (k + is_unsigned)), first = count - is_unsigned;
        step = 9.0 * edge / count;
        thresholds[k] = k ? edge + (step - below) / 4.0 : (edge + step / 2.0) / 2.0; /* half way between neighbours */
        map->slope[k + 1] = (float)(1.0 / step);
        map->offset[k + 1] = (float)(first - (edge + BLOCKWISE_SHIFT) / step);
        map->last[k + 1] = (float)(first + count - 0.5);
        map->step[(first_binade + k + 1) & 15] = (float)step;
        map->base[(first_binade + k + 1) & 15] = (float)(edge - step * count);
    }
    thresholds[BLOCKWISE_DECADES] = 1.0 - step / 4.0;
    map->offset[8] = map->last[8] = is_unsigned ? 255.0f : 128.0f;
    map->base[(first_binade + 8) & 15] = 1.0f;
    double low = BLOCKWISE_SHIFT;
    for (int binade = 0, k = 0; binade < 32; binade++, low *= 2.0) {
        const int inside = k <= BLOCKWISE_DECADES && thresholds[k] + BLOCKWISE_SHIFT < 2.0 * low;
        map->threshold[(96 + binade) & 31] = blockwise_tagged(inside ? thresholds[k] + BLOCKWISE_SHIFT : 3e38, k);
        k += inside;
    }
}

static void blockwise_init(void)
{
    blockwise_fill(&blockwise_signed, 0);
    blockwise_fill(&blockwise_unsigned, 1);
}

#endif
