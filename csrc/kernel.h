// What one instruction set's build of the kernel offers to the dispatcher.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "abi.h"

namespace masterless {

struct Kernel {
    bool (*step)(MlTask* tasks, int64_t count, int threads, bool only_survey);
    void (*square_sums)(MlTask& task, double peak, int64_t count, double* row_sums, double* col_sums, int threads);
    void (*decode)(const MlStorage& stored, int64_t rows, int64_t cols, bool visible, void* out, bool out_is_bf16,
                   int threads);
    void (*encode)(const MlStorage& stored, int64_t rows, int64_t cols, const void* in, bool in_is_bf16, int threads);
    size_t thread_bytes;
#ifdef MASTERLESS_PHASES
    std::string (*phases)(MlTask& task, int repeats);
#endif
};

}  // namespace masterless
