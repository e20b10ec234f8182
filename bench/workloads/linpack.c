/* Solves a dense system in the way of LINPACK: LU with partial pivoting, in panels of 64 columns, column-major. One
 * operation is one thousand floating-point operations.
 *
 * Verified as HPL does: the residual |Ax - b| / (eps * (|A| |x| + |b|) * n) must stay below 16. */
#include "common.h"

#define PANEL 64ul

static uint64_t n;
static double *m;

#define AT(row, column) m[(column) * n + (row)]

static inline double element(uint64_t row, uint64_t column, uint64_t seed) {
    return (double)(mix(column * n + row + seed) >> 11) * 0x1p-53 - 0.5;
}

static inline double magnitude(double x) { return x < 0 ? -x : x; }

static inline void swap_rows(uint64_t a, uint64_t b, uint64_t from, uint64_t to) {
    for (uint64_t column = from; column < to; column++) {
        double t = AT(a, column);
        AT(a, column) = AT(b, column);
        AT(b, column) = t;
    }
}

int main(int argc, char **argv) {
    struct options opt =
        options_parse(argc, argv, (struct options){.data_mib = 32, .seed = 1, .threads = 1, .passes = 1});
    while ((n + PANEL) * (n + PANEL) * 8 <= opt.data_mib << 20) n += PANEL;
    if (n == 0) usage_error(argv[0], "--data-mib is too small");
    uint64_t bytes = (n * n * 8 + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES;
    m = data_allocate(bytes);
    double *x = calloc(n, sizeof *x), *b = calloc(n, sizeof *b);
    uint64_t *pivots = calloc(n, sizeof *pivots), errors = 0;
    if (!x || !b || !pivots) usage_error(argv[0], "no memory");

    struct moment start = moment_now();
    for (uint64_t j = 0; j < n; j++)
        for (uint64_t i = 0; i < n; i++) AT(i, j) = element(i, j, opt.seed);
    for (uint64_t i = 0; i < n; i++) x[i] = b[i] = element(i, n, opt.seed);
    struct moment filled = moment_now();

    for (uint64_t p = 0; p < n; p += PANEL) {
        uint64_t end = p + PANEL;
        for (uint64_t k = p; k < end; k++) {
            uint64_t best = k;
            for (uint64_t i = k + 1; i < n; i++)
                if (magnitude(AT(i, k)) > magnitude(AT(best, k))) best = i;
            pivots[k] = best;
            if (AT(best, k) == 0) errors++;
            if (best != k) swap_rows(k, best, p, end);
            double scale = 1 / AT(k, k);
            for (uint64_t i = k + 1; i < n; i++) AT(i, k) *= scale;
            for (uint64_t j = k + 1; j < end; j++) {
                double factor = AT(k, j);
                for (uint64_t i = k + 1; i < n; i++) AT(i, j) -= AT(i, k) * factor;
            }
        }
        /* The trailing columns, one at a time: exchange rows, solve with the panel's triangle, update the rest. */
        for (uint64_t j = end; j < n; j++) {
            for (uint64_t k = p; k < end; k++)
                if (pivots[k] != k) swap_rows(k, pivots[k], j, j + 1);
            for (uint64_t k = p; k < end; k++) {
                double factor = AT(k, j);
                for (uint64_t i = k + 1; i < n; i++) AT(i, j) -= AT(i, k) * factor;
            }
        }
        for (uint64_t j = 0; j < p; j++)
            for (uint64_t k = p; k < end; k++)
                if (pivots[k] != k) swap_rows(k, pivots[k], j, j + 1);
    }
    for (uint64_t k = 0; k < n; k++) {
        double t = x[k];
        x[k] = x[pivots[k]];
        x[pivots[k]] = t;
    }
    for (uint64_t j = 0; j < n; j++)
        for (uint64_t i = j + 1; i < n; i++) x[i] -= AT(i, j) * x[j];
    for (uint64_t j = n; j-- > 0;) {
        x[j] /= AT(j, j);
        for (uint64_t i = 0; i < j; i++) x[i] -= AT(i, j) * x[j];
    }
    struct moment solved = moment_now();

    double a_norm = 0, x_norm = 0, b_norm = 0, worst = 0;
    for (uint64_t i = 0; i < n; i++) {
        double row = 0, product = 0;
        for (uint64_t j = 0; j < n; j++) {
            double value = element(i, j, opt.seed);
            row += magnitude(value);
            product += value * x[j];
        }
        if (row > a_norm) a_norm = row;
        if (magnitude(x[i]) > x_norm) x_norm = magnitude(x[i]);
        if (magnitude(b[i]) > b_norm) b_norm = magnitude(b[i]);
        if (magnitude(product - b[i]) > worst) worst = magnitude(product - b[i]);
    }
    double residual = worst / (0x1p-53 * (a_norm * x_norm + b_norm) * (double)n);
    if (!(residual < 16)) errors++;

    uint64_t checksum = 0;
    for (uint64_t i = 0; i < n; i++) {
        uint64_t bits;
        memcpy(&bits, &x[i], 8);
        checksum = mix(checksum ^ bits);
    }
    result_open("linpack", n * n * 8);
    result_phase("fill", n * n, start, filled);
    result_phase("solve", 2 * n * n * n / 3000 + 1, filled, solved);
    return result_close(checksum, errors);
}
