/* k-means (Lloyd) over points of 16 floats, 8 centres. One operation is one point in one pass.
 *
 * Verified: the inertia never grows (what Lloyd's algorithm promises), each pass assigns all points, and every point read
 * back at the end equals what was generated. */
#include "common.h"

#define DIMENSIONS 16
#define CENTRES 8

static inline float coordinate(uint64_t point, uint64_t dimension, uint64_t seed) {
    uint64_t cluster = mix(point ^ seed) % CENTRES;
    uint64_t centre = mix(cluster * DIMENSIONS + dimension + seed) % 1000;
    uint64_t noise = mix(point * DIMENSIONS + dimension + ~seed) >> 40;
    return (float)centre + (float)noise * 0x1p-18f;
}

int main(int argc, char **argv) {
    struct options opt =
        options_parse(argc, argv, (struct options){.data_mib = 128, .seed = 1, .threads = 1, .passes = 4});
    uint64_t points = (opt.data_mib << 20) / (DIMENSIONS * sizeof(float)), errors = 0;
    float *at = data_allocate(points * DIMENSIONS * sizeof(float));
    double centres[CENTRES][DIMENSIONS];

    struct moment start = moment_now();
    for (uint64_t p = 0; p < points; p++)
        for (uint64_t d = 0; d < DIMENSIONS; d++) at[p * DIMENSIONS + d] = coordinate(p, d, opt.seed);
    struct moment filled = moment_now();

    for (uint64_t c = 0; c < CENTRES; c++)
        for (uint64_t d = 0; d < DIMENSIONS; d++) centres[c][d] = at[c * (points / CENTRES) * DIMENSIONS + d];
    double inertia_before = 0;
    for (uint64_t pass = 0; pass < opt.passes; pass++) {
        double sums[CENTRES][DIMENSIONS] = {{0}}, inertia = 0;
        uint64_t counts[CENTRES] = {0}, assigned = 0;
        for (uint64_t p = 0; p < points; p++) {
            const float *point = at + p * DIMENSIONS;
            uint64_t best = 0;
            double best_distance = 1e300;
            for (uint64_t c = 0; c < CENTRES; c++) {
                double distance = 0;
                for (uint64_t d = 0; d < DIMENSIONS; d++) {
                    double gap = point[d] - centres[c][d];
                    distance += gap * gap;
                }
                if (distance < best_distance) best_distance = distance, best = c;
            }
            inertia += best_distance;
            counts[best]++;
            for (uint64_t d = 0; d < DIMENSIONS; d++) sums[best][d] += point[d];
        }
        for (uint64_t c = 0; c < CENTRES; c++) {
            assigned += counts[c];
            if (counts[c])
                for (uint64_t d = 0; d < DIMENSIONS; d++) centres[c][d] = sums[c][d] / counts[c];
        }
        if (assigned != points) errors++;
        if (pass > 0 && inertia > inertia_before * (1 + 1e-9)) errors++;
        inertia_before = inertia;
    }
    struct moment clustered = moment_now();
    for (uint64_t p = 0; p < points; p++)
        if (at[p * DIMENSIONS + p % DIMENSIONS] != coordinate(p, p % DIMENSIONS, opt.seed)) errors++;
    struct moment checked = moment_now();

    uint64_t checksum = 0;
    for (uint64_t c = 0; c < CENTRES; c++)
        for (uint64_t d = 0; d < DIMENSIONS; d++) {
            uint64_t bits;
            memcpy(&bits, &centres[c][d], 8);
            checksum = mix(checksum ^ bits);
        }
    result_open("kmeans", points * DIMENSIONS * sizeof(float));
    result_phase("fill", points, start, filled);
    result_phase("cluster", points * opt.passes, filled, clustered);
    result_phase("check", points, clustered, checked);
    return result_close(checksum, errors);
}
