/* A function library in C: what its tests load, and an example. */
#include "farfield_functions.h"

/* Adds up the bytes of the region, a page at a time. The argument is empty; the answer is a number. */
static void sum(const ff_memory_table *memory, const ff_call_table *calls, size_t count, const ff_result_table *results)
{
    for (size_t call = 0; call < count; call++) {
        ff_byte_slice answer = {0, 0};
        ff_status status = {FF_OK, 0, 0};
        uint8_t page[4096], encoded[10];
        uint64_t sum = 0, steps = 0;
        if (calls[call].argument.len != 0)
            status.code = FF_ARGUMENT;
        for (uint64_t offset = 0; status.code == FF_OK && offset < memory->region_bytes; offset += sizeof page) {
            status = memory->read(memory->context, offset, page, sizeof page);
            for (size_t i = 0; i < sizeof page; i++)
                sum += page[i];
            steps += 2;
        }
        /* A varint: seven bits a byte, the lowest first. */
        for (answer.data = encoded; sum >= 128; sum >>= 7)
            encoded[answer.len++] = (uint8_t)(sum | 128);
        encoded[answer.len++] = (uint8_t)sum;
        results->ended(results->context, call, status, answer, steps);
    }
}

static const ff_function_entry functions[] = {
    {{(const uint8_t *)"example.sum", 11}, 1, 0, sum},
};

static const ff_function_table table = {FF_ABI_VERSION, 0, functions, 1};

const ff_function_table *farfield_functions(void)
{
    return &table;
}
