// The C interface, and the choice of the instruction set at run time.
//
// MASTERLESS_ISA=portable|avx2|avx512|neon in the environment asks for a particular build (for tests); one that the
// machine cannot run is not taken.
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <string>
#include <type_traits>

#include "kernel.h"

namespace masterless {

extern const Kernel kernel_portable;
#ifdef MASTERLESS_X86
extern const Kernel kernel_avx2;
extern const Kernel kernel_avx512;
#endif
#ifdef MASTERLESS_ARM
extern const Kernel kernel_neon;
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
#ifdef MASTERLESS_ARM
    if (may_be("neon")) return {"neon", &kernel_neon};
#endif
    (void)may_be;
    return {"portable", &kernel_portable};
}

const Choice& chosen() {
    static const Choice choice = choose();
    return choice;
}

// --- the interface in words: {"name": {"size": ..., "fields": {"name": ["i" | "u" | "f" | "p" | struct, offset, size]}}} ---

template <class T>
const char* letter() {
    if (std::is_pointer<T>::value) return "p";
    if (std::is_floating_point<T>::value) return "f";
    if (std::is_class<T>::value) return "MlStorage";
    return std::is_signed<T>::value ? "i" : "u";
}

std::string field(const char* name, const char* kind, size_t offset, size_t size) {
    return std::string("\"") + name + "\": [\"" + kind + "\", " + std::to_string(offset) + ", " + std::to_string(size) + "], ";
}

std::string closed(std::string text) {
    text.resize(text.size() - 2);  // the last comma
    return text + "}";
}

std::string describe() {
    std::string text = "{";
#define ML_DESCRIBE_FIELD(type, name) text += field(#name, letter<type>(), offsetof(Struct, name), sizeof(type));
#define ML_DESCRIBE_STRUCT(type, fields)                                                       \
    {                                                                                          \
        using Struct = type;                                                                   \
        text += "\"" #type "\": {\"size\": " + std::to_string(sizeof(type)) + ", \"fields\": {"; \
        fields(ML_DESCRIBE_FIELD) text = closed(text) + "}, ";                                 \
    }
    ML_DESCRIBE_STRUCT(MlStorage, ML_STORAGE_FIELDS)
    ML_DESCRIBE_STRUCT(MlTask, ML_TASK_FIELDS)
#define ML_DESCRIBE_ITEM(constant, name) text += "\"" #name "\": " + std::to_string((int)constant) + ", ";
#define ML_DESCRIBE_ENUM(type, items) text += "\"" #type "\": {"; items(ML_DESCRIBE_ITEM) text = closed(text) + ", ";
    ML_DESCRIBE_ENUM(MlKind, ML_KINDS)
    ML_DESCRIBE_ENUM(MlScaleKind, ML_SCALE_KINDS)
    ML_DESCRIBE_ENUM(MlScalePolicy, ML_SCALE_POLICIES)
    ML_DESCRIBE_ENUM(MlRounding, ML_ROUNDINGS)
    ML_DESCRIBE_ENUM(MlRule, ML_RULES)
    return closed(text);
}

}  // namespace
}  // namespace masterless

using masterless::chosen;

extern "C" {

int32_t ml_step(MlTask* tasks, int64_t count, int32_t threads, int32_t only_survey) {
    return chosen().kernel->step(tasks, count, threads, only_survey != 0);
}

void ml_square_sums(MlTask* task, double peak, int64_t count, double* row_sums, double* col_sums, int32_t threads) {
    chosen().kernel->square_sums(*task, peak, count, row_sums, col_sums, threads);
}

void ml_decode(const MlStorage* storage, int64_t rows, int64_t cols, int32_t visible, void* out, int32_t out_is_bf16,
               int32_t threads) {
    chosen().kernel->decode(*storage, rows, cols, visible != 0, out, out_is_bf16 != 0, threads);
}

void ml_encode(const MlStorage* storage, int64_t rows, int64_t cols, const void* in, int32_t in_is_bf16, int32_t threads) {
    chosen().kernel->encode(*storage, rows, cols, in, in_is_bf16 != 0, threads);
}

void ml_ask_for(const uint64_t* addresses, int64_t count) {
    for (int64_t i = 0; i < count; ++i) __builtin_prefetch((const void*)addresses[i], 0, 2);
}

const char* ml_instruction_set(void) { return chosen().name; }

int32_t ml_has_openmp(void) {
#ifdef _OPENMP
    return 1;
#else
    return 0;
#endif
}

const char* ml_interface(void) {
    static const std::string description = masterless::describe();
    return description.c_str();
}

#ifdef MASTERLESS_PHASES
__attribute__((visibility("default"))) const char* ml_phases(MlTask* task, int32_t repeats) {
    static std::string phases;
    phases = chosen().kernel->phases(*task, repeats);
    return phases.c_str();
}
#endif

int64_t ml_thread_bytes(void) { return (int64_t)chosen().kernel->thread_bytes; }

}  // extern "C"
