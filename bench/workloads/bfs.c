/* Breadth-first searches from random vertices of a directed graph in compressed rows, its edges by the law of R-MAT
 * (0.57, 0.19, 0.19, 0.05). One operation is one edge looked at.
 *
 * The edges of a vertex are drawn together: how many there are, and where they end, given where they begin. So the graph
 * is built in order, and needs no memory but its own.
 * Verified: all edges read at the end are those that were drawn; in the last search every vertex that was reached has a
 * neighbour one level before it, and no edge leads further than one level on. */
#include "common.h"

#define EDGES_PER_VERTEX 16
/* Offset, level, place in the queue; and the edges. */
#define VERTEX_BYTES (8 + 1 + 4 + 4 * EDGES_PER_VERTEX)
#define UNREACHED 0xff
#define SUPPORTED 0x80

static inline uint64_t edges_expected(uint64_t vertex, uint64_t bits, uint64_t edges) {
    /* In 2^-16 of an edge. */
    double expected = (double)edges * 65536;
    for (uint64_t bit = 0; bit < bits; bit++) expected *= vertex >> bit & 1 ? 0.24 : 0.76;
    return (uint64_t)expected;
}

/* Where an edge of this vertex ends. */
static inline uint32_t target_of(uint64_t vertex, uint64_t bits, uint64_t *state) {
    /* Of 65536: 0.19 of 0.76, and 0.05 of 0.24. */
    static const uint64_t ones[2] = {16384, 13653};
    uint64_t target = 0, draw = 0;
    for (uint64_t bit = 0; bit < bits; bit++, draw >>= 16) {
        if (bit % 4 == 0) draw = xorshift(state) * 0x2545F4914F6CDD1Dul;
        target |= (uint64_t)((draw & 0xffff) < ones[vertex >> bit & 1]) << bit;
    }
    return (uint32_t)target;
}

int main(int argc, char **argv) {
    struct options opt =
        options_parse(argc, argv, (struct options){.data_mib = 128, .seed = 1, .threads = 1, .passes = 4});
    uint64_t bits = 1, state = mix(opt.seed) | 1, errors = 0, checksum = 0, edges = 0, drawn = 0, read = 0;
    while ((2ul << bits) * VERTEX_BYTES <= opt.data_mib << 20) bits++;
    uint64_t vertices = 1ul << bits, looked = 0, reached = 0;
    /* Rounded up at every vertex, at most. */
    uint64_t room = vertices * (EDGES_PER_VERTEX + 1);
    uint64_t *offsets = data_allocate((vertices + PAGE_WORDS) * 8);
    uint32_t *targets = data_allocate(room * 4), *queue = data_allocate(vertices * 4);
    uint8_t *level = data_allocate(vertices < PAGE_BYTES ? PAGE_BYTES : vertices);

    struct moment start = moment_now();
    for (uint64_t vertex = 0; vertex < vertices; vertex++) {
        uint64_t count = edges_expected(vertex, bits, vertices * EDGES_PER_VERTEX) + (xorshift(&state) >> 48);
        offsets[vertex] = edges;
        for (count >>= 16; count > 0; count--, edges++) {
            targets[edges] = target_of(vertex, bits, &state);
            drawn += mix(edges ^ (uint64_t)targets[edges] << 32);
        }
    }
    offsets[vertices] = edges;
    struct moment filled = moment_now();

    for (uint64_t pass = 0; pass < opt.passes; pass++) {
        uint64_t root, head = 0;
        do root = (xorshift(&state) >> 16) % vertices;
        while (offsets[root] == offsets[root + 1]);
        memset(level, UNREACHED, vertices);
        level[root] = 0;
        queue[0] = (uint32_t)root;
        for (reached = 1; head < reached; head++) {
            uint64_t vertex = queue[head];
            for (uint64_t edge = offsets[vertex]; edge < offsets[vertex + 1]; edge++) {
                uint32_t target = targets[edge];
                if (level[target] != UNREACHED) continue;
                level[target] = level[vertex] + 1;
                queue[reached++] = target;
            }
            looked += offsets[vertex + 1] - offsets[vertex];
        }
        checksum = mix(checksum ^ reached ^ (uint64_t)level[queue[reached - 1]] << 48);
    }
    struct moment searched = moment_now();

    if (level[queue[reached - 1]] >= SUPPORTED / 2) errors++;
    for (uint64_t vertex = 0; vertex < vertices; vertex++) {
        uint8_t own = level[vertex] == UNREACHED ? UNREACHED : level[vertex] & (SUPPORTED - 1);
        for (uint64_t edge = offsets[vertex]; edge < offsets[vertex + 1]; edge++) {
            uint32_t target = targets[edge];
            read += mix(edge ^ (uint64_t)target << 32);
            if (own == UNREACHED) continue;
            if (level[target] == UNREACHED || (level[target] & (SUPPORTED - 1)) > own + 1) errors++;
            else if ((level[target] & (SUPPORTED - 1)) == own + 1) level[target] |= SUPPORTED;
        }
    }
    if (read != drawn || edges > room) errors++;
    uint64_t unsupported = 0;
    for (uint64_t vertex = 0; vertex < vertices; vertex++) {
        if (level[vertex] < SUPPORTED) unsupported++;
        checksum = checksum * 31 + level[vertex];
    }
    /* The first one needs no neighbour, though it may have one behind it. */
    if (unsupported != 1) errors++;
    struct moment checked = moment_now();

    result_open("bfs", vertices * 13 + edges * 4);
    result_phase("fill", edges, start, filled);
    result_phase("search", looked, filled, searched);
    result_phase("check", edges, searched, checked);
    return result_close(checksum, errors);
}
