// The C interface, and the choice of the instruction set at run time.
//
// MASTERLESS_ISA=portable|avx2|avx512 in the environment asks for a particular build (for tests); one that the
// machine cannot run is not taken.
#include <cstdlib>
#include <cstring>

#include "kernel.h"

namespace masterless {

extern const Kernel kernel_portable;
#ifdef MASTERLESS_X86
extern const Kernel kernel_avx2;
extern const Kernel kernel_avx512;
#endif

namespace {

struct Choice {
    const char* name;
    const Kernel* kernel;
};

Choice choose() {
    const char* wanted = std::getenv("MASTERLESS_ISA");
    const auto may_be = [&](const char* name) { return !wanted || !*wanted || std::strcmp(wanted, name) == 0; };
#ifdef MASTERLESS_X86
    __builtin_cpu_init();
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    if (avx512 && may_be("avx512")) return {"avx512", &kernel_avx512};
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (avx2 && may_be("avx2")) return {"avx2", &kernel_avx2};
#endif
    (void)may_be;
    return {"portable", &kernel_portable};
}

const Choice& chosen() {
    static const Choice choice = choose();
    return choice;
}

}  // namespace
}  // namespace masterless

using masterless::chosen;

extern "C" {

void ml_step(MlTask* tasks, int64_t count, int32_t threads) { chosen().kernel->step(tasks, count, threads); }

void ml_decode(const MlStorage* storage, int64_t rows, int64_t cols, int32_t visible, void* out, int32_t out_is_bf16,
               int32_t threads) {
    chosen().kernel->decode(*storage, rows, cols, visible != 0, out, out_is_bf16 != 0, threads);
}

const char* ml_instruction_set(void) { return chosen().name; }

int32_t ml_has_openmp(void) {
#ifdef _OPENMP
    return 1;
#else
    return 0;
#endif
}

int64_t ml_storage_size(void) { return (int64_t)sizeof(MlStorage); }
int64_t ml_task_size(void) { return (int64_t)sizeof(MlTask); }
int64_t ml_thread_bytes(void) { return (int64_t)chosen().kernel->thread_bytes; }

}  // extern "C"
