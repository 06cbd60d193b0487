// The C interface between Python and the kernel: plain structs of numbers and pointers, no PyTorch headers.
//
// Contract:
//   * `src/masterless/kernels/cpu.py` mirrors these structs field by field and checks their sizes at load time.
//   * A tensor is `rows` x `cols` as `layout.py` sees it; all arrays are contiguous in that order.
//   * Everything that a format or a policy determines is computed once, in Python, from the specification
//     (`formats.py`, `scaling.py`) and handed over as numbers; the kernel derives no constant of its own.
#pragma once

#include <cstdint>

#pragma GCC visibility push(default)
extern "C" {

enum MlKind : int32_t {
    ML_NONE = 0,       // nothing is stored
    ML_FLOAT32 = 1,    // plain
    ML_BFLOAT16 = 2,   // plain
    ML_LINEAR = 3,     // level = code - zero_code, with `hidden` finer bits apart
    ML_MINIFLOAT = 4,  // level = a tiny float: exponent and mantissa bits
    ML_TABLE = 5,      // level = table[code]
    ML_LOG = 6,        // bits of the value = top - code * step
    ML_FACTORED = 7,   // row and column means
};

enum MlScaleKind : int32_t { ML_SCALE_BF16 = 0, ML_SCALE_FP32 = 1, ML_SCALE_POW2 = 2 };

enum MlScalePolicy : int32_t { ML_HELD = 0, ML_RECOMPUTE = 1, ML_FROZEN = 2 };

enum MlRounding : int32_t { ML_NEAREST = 0, ML_STOCHASTIC = 1, ML_STOCHASTIC_LOG = 2 };

enum MlRule : int32_t {
    ML_ADAM = 0,
    ML_ADAM_UPDATE_UNITS = 1,
    ML_ADABELIEF = 2,
    ML_RMSPROP = 3,
    ML_SGD = 4,
    ML_SGD_NESTEROV = 5,
    ML_LION = 6,
    ML_ADAFACTOR = 7,
    // With the momentum in units of the weight: these come last.
    ML_ADAM_WEIGHT_UNITS = 8,
    ML_RMSPROP_WEIGHT_UNITS = 9,
    ML_SGD_WEIGHT_UNITS = 10,
    ML_SGD_NESTEROV_WEIGHT_UNITS = 11,
    ML_ADAFACTOR_WEIGHT_UNITS = 12,
};

// One stored tensor: a weight, a first or a second moment.
struct MlStorage {
    int32_t kind;
    int32_t bits;          // of the packed code
    int32_t hidden;        // finer bits, packed apart
    int32_t is_signed;
    int32_t zero_code;     // code of zero on the finest grid
    int32_t scale_kind;
    int32_t per_tensor;    // one scale for everything
    int32_t rounding;      // set by the kernel, from the task
    int32_t exponent_bits;  // minifloats
    int32_t mantissa_bits;  // minifloats
    int32_t level_count;    // tables
    int32_t low_rank;       // log: which of the sorted lane minima is the lowest level
    int64_t block;          // elements that share a scale (a row: cols)
    int64_t blocks_per_row;
    int64_t row_bytes;      // of `codes`
    int64_t hidden_row_bytes;
    float limit;            // largest magnitude of a level, on the finest grid
    float max_level;        // largest magnitude of a level; scale = absmax / max_level
    float overflow_level;   // a held scale gives way above this many scales ...
    float waste_level;      // ... and below this many
    float fresh_factor;     // and is then absmax * fresh_factor
    float scale_limit;      // the largest scale that may be stored
    uint64_t key;           // of the random bits; set by the kernel, from the task
    const float* levels;             // tables: rising, padded with +inf to 256
    const uint8_t* code_of_level;    // tables: 256 entries
    const float* level_of_code;      // tables: 256 entries
    uint8_t* codes;
    uint8_t* hidden_codes;
    void* values;   // plain values, or the master copy of a weight
    void* scale;    // bf16 or fp32
    int16_t* top;   // log
    int16_t* step;  // log
    float* row;     // factored
    float* col;     // factored
};

// One parameter's step. What changes from step to step comes last and in one piece: Python caches the rest.
struct MlTask {
    MlStorage weight, first, second;
    int64_t rows, cols;
    int64_t matrix_rows;  // rows of one matrix of a stack
    int64_t tile;         // elements of a row that stand or fall together
    int32_t rule;
    int32_t indivisible;  // one bad gradient keeps the whole parameter from moving

    const void* grad;
    int64_t first_row;                          // of this shard in the whole parameter
    uint64_t weight_key, first_key, second_key;  // of the random bits
    int32_t weight_rounding, first_rounding, second_rounding;
    int32_t grad_is_bf16;
    int32_t maximize;
    int32_t has_l2;
    int32_t inject_error;
    int32_t scale_policy;
    int32_t adafactor_without_buffer;
    float step_size, decay, l2, keep1, rate1, keep2, rate2, bias2, eps, clip, inject;
    double adafactor_step_size;  // before the weight's RMS is known
    double adafactor_rate1;      // likewise; 0 unless the momentum is in units of the weight
    double adafactor_min_rms;
    double adafactor_clip_threshold;
    int64_t bad;  // out: gradient elements that are not finite (or whose square is not)
};

// Performs all steps in one parallel region.
void ml_step(MlTask* tasks, int64_t count, int32_t threads);

// Decodes a whole stored tensor to fp32 or bf16 (round to nearest even); `visible` leaves hidden bits out.
void ml_decode(const MlStorage* storage, int64_t rows, int64_t cols, int32_t visible, void* out, int32_t out_is_bf16,
               int32_t threads);

const char* ml_instruction_set(void);  // the one that runs: "avx512", "avx2" or "portable"
int32_t ml_has_openmp(void);
int64_t ml_storage_size(void);  // sizeof(MlStorage)
int64_t ml_task_size(void);     // sizeof(MlTask)
int64_t ml_thread_bytes(void);  // working memory of one thread

}  // extern "C"
#pragma GCC visibility pop
