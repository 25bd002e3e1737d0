// Copies of KV slabs between the pool and an arena: one call, and so one turn of the interpreter's lock, for many slabs.
#pragma once
#include <cstdint>
#include <cstring>

static void copy_slabs(char* to, const int64_t* to_index, int64_t to_stride, const char* from, const int64_t* from_index,
                       int64_t from_stride, int64_t bytes, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
        std::memcpy(to + to_index[i] * to_stride, from + from_index[i] * from_stride, (size_t)bytes);
    }
}
