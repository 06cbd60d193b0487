// The C interface between Python and the kernel: plain structs of numbers and pointers, no PyTorch headers.
//
// Contract:
//   * This file is the only statement of the interface. `ml_interface` describes structs and enumerations, field by field,
//     and `backends/cpu/interface.py` reads that description: nothing is written down twice.
//   * A tensor is `rows` x `cols` as `layout.py` sees it; all arrays are contiguous in that order.
//   * Everything that a format or a policy determines is computed once, in Python, from the specification
//     (`formats/`) and handed over as numbers; the kernel derives no constant of its own.
#pragma once

#include <cstdint>

#pragma GCC visibility push(default)
extern "C" {

// --- enumerations: the constant here, and the name in Python ----------------------------------------------------------

#define ML_KINDS(ITEM)                                                                      \
    ITEM(ML_NONE, none)           /* nothing is stored */                                   \
    ITEM(ML_FLOAT32, float32)     /* plain */                                               \
    ITEM(ML_BFLOAT16, bfloat16)   /* plain */                                               \
    ITEM(ML_LINEAR, linear)       /* level = code - zero_code, `hidden` finer bits apart */ \
    ITEM(ML_MINIFLOAT, minifloat) /* level = a tiny float: exponent and mantissa bits */    \
    ITEM(ML_TABLE, table)         /* level = table[code] */                                 \
    ITEM(ML_LOG, log)             /* bits of the value = top - code * step */               \
    ITEM(ML_FACTORED, factored)   /* row and column means */

#define ML_SCALE_KINDS(ITEM) \
    ITEM(ML_SCALE_BF16, bf16) ITEM(ML_SCALE_FP32, fp32) ITEM(ML_SCALE_POW2, pow2) ITEM(ML_SCALE_E8M0, e8m0) \
    ITEM(ML_SCALE_E4M3, e4m3)

#define ML_SCALE_POLICIES(ITEM) ITEM(ML_HELD, held) ITEM(ML_RECOMPUTE, recompute) ITEM(ML_FROZEN, frozen)

#define ML_ROUNDINGS(ITEM) \
    ITEM(ML_NEAREST, nearest) ITEM(ML_STOCHASTIC, stochastic) ITEM(ML_STOCHASTIC_LOG, stochastic-log) \
    ITEM(ML_STOCHASTIC_VALUE, stochastic-value)

#define ML_RULES(ITEM)                            \
    ITEM(ML_ADAM, adam)                           \
    ITEM(ML_ADAM_UPDATE_UNITS, adam_update_units) \
    ITEM(ML_ADABELIEF, adabelief)                 \
    ITEM(ML_RMSPROP, rmsprop)                     \
    ITEM(ML_SGD, sgd)                             \
    ITEM(ML_SGD_NESTEROV, sgd_nesterov)           \
    ITEM(ML_LION, lion)                           \
    ITEM(ML_ADAFACTOR, adafactor)                 \
    /* With the momentum in units of the weight: these come last. */ \
    ITEM(ML_ADAM_WEIGHT_UNITS, adam_weight_units)                    \
    ITEM(ML_RMSPROP_WEIGHT_UNITS, rmsprop_weight_units)              \
    ITEM(ML_SGD_WEIGHT_UNITS, sgd_weight_units)                      \
    ITEM(ML_SGD_NESTEROV_WEIGHT_UNITS, sgd_nesterov_weight_units)    \
    ITEM(ML_ADAFACTOR_WEIGHT_UNITS, adafactor_weight_units)

#define ML_ENUMERATOR(constant, name) constant,
enum MlKind : int32_t { ML_KINDS(ML_ENUMERATOR) };
enum MlScaleKind : int32_t { ML_SCALE_KINDS(ML_ENUMERATOR) };
enum MlScalePolicy : int32_t { ML_SCALE_POLICIES(ML_ENUMERATOR) };
enum MlRounding : int32_t { ML_ROUNDINGS(ML_ENUMERATOR) };
enum MlRule : int32_t { ML_RULES(ML_ENUMERATOR) };
#undef ML_ENUMERATOR

// --- structs ----------------------------------------------------------------------------------------------------------

// One stored tensor: a weight, a first or a second moment.
#define ML_STORAGE_FIELDS(FIELD)                                                                \
    FIELD(int32_t, kind)                                                                        \
    FIELD(int32_t, bits)             /* of the packed code */                                   \
    FIELD(int32_t, hidden)           /* finer bits, packed apart */                             \
    FIELD(int32_t, is_signed)                                                                   \
    FIELD(int32_t, zero_code)        /* code of zero on the finest grid */                      \
    FIELD(int32_t, scale_kind)                                                                  \
    FIELD(int32_t, per_tensor)       /* one scale for everything */                             \
    FIELD(int32_t, adjacent)         /* neighbouring codes of 4 bits share a byte */            \
    FIELD(int32_t, rounding)         /* set by the kernel, from the task */                     \
    FIELD(int32_t, exponent_bits)    /* minifloats */                                           \
    FIELD(int32_t, mantissa_bits)    /* minifloats */                                           \
    FIELD(int32_t, level_count)      /* tables */                                               \
    FIELD(int32_t, low_rank)         /* log: which sorted lane minimum is the lowest level */   \
    FIELD(int64_t, block)            /* elements that share a scale (a row: cols) */            \
    FIELD(int64_t, blocks_per_row)                                                              \
    FIELD(int64_t, row_bytes)        /* of `codes` */                                           \
    FIELD(int64_t, hidden_row_bytes)                                                            \
    FIELD(float, limit)              /* largest magnitude of a level, on the finest grid */     \
    FIELD(float, max_level)          /* largest magnitude of a level: scale = absmax / this */  \
    FIELD(float, negative_factor)    /* by how much more a negative number counts in an absmax */ \
    FIELD(float, overflow_level)     /* a held scale gives way above this many scales ... */    \
    FIELD(float, waste_level)        /* ... and below this many */                              \
    FIELD(float, fresh_factor)       /* and is then absmax * fresh_factor */                    \
    FIELD(float, scale_limit)        /* the largest scale that may be stored */                 \
    FIELD(uint64_t, key)             /* of the random bits; set by the kernel, from the task */ \
    FIELD(const float*, levels)             /* tables: rising, padded with +inf to 256 */       \
    FIELD(const uint8_t*, code_of_level)    /* tables: 256 entries */                           \
    FIELD(const float*, level_of_code)      /* tables: 256 entries */                           \
    FIELD(uint8_t*, codes)                                                                      \
    FIELD(uint8_t*, hidden_codes)                                                               \
    FIELD(void*, values)             /* plain values, or the master copy of a weight */         \
    FIELD(void*, scale)              /* bf16, fp32, or bytes (e8m0, e4m3) */                    \
    FIELD(const float*, tensor_scale)       /* e4m3: the unit of the scales, of every row */    \
    FIELD(int16_t*, top)             /* log: the upper half of a float */                       \
    FIELD(int16_t*, step)            /* log */                                                  \
    FIELD(float*, row)               /* factored */                                             \
    FIELD(float*, col)               /* factored */

// One parameter's step. What changes from step to step comes last: Python fills in the rest once.
#define ML_TASK_FIELDS(FIELD)                                                                       \
    FIELD(MlStorage, weight)                                                                        \
    FIELD(MlStorage, first)                                                                         \
    FIELD(MlStorage, second)                                                                        \
    FIELD(int64_t, rows)                                                                            \
    FIELD(int64_t, cols)                                                                            \
    FIELD(int64_t, matrix_rows)      /* rows of one matrix of a stack */                            \
    FIELD(int64_t, tile)             /* elements of a row that stand or fall together */            \
    FIELD(int64_t, first_row)        /* of this shard in the whole parameter */                     \
    FIELD(int32_t, rule)                                                                            \
    FIELD(int32_t, indivisible)      /* one bad gradient keeps the whole parameter from moving */   \
    FIELD(int32_t, weight_rounding)                                                                 \
    FIELD(int32_t, first_rounding)                                                                  \
    FIELD(int32_t, second_rounding)                                                                 \
    FIELD(int32_t, maximize)                                                                        \
    FIELD(int32_t, inject_error)                                                                    \
    FIELD(int32_t, pays_back)        /* the weight gets what of a momentum is too large for one */  \
    FIELD(int32_t, statistics_given) /* of the whole, by the ranks that share it: scalars, means */ \
    FIELD(const void*, grad)                                                                        \
    FIELD(const float*, mean_rows)   /* with `statistics_given`: of the row factors, by matrix */   \
    FIELD(uint64_t, weight_key)      /* of the random bits */                                       \
    FIELD(uint64_t, first_key)                                                                      \
    FIELD(uint64_t, second_key)                                                                     \
    FIELD(int32_t, grad_is_bf16)                                                                    \
    FIELD(int32_t, must_be_finite)   /* one bad gradient keeps all tasks from moving */             \
    FIELD(int32_t, has_l2)                                                                          \
    FIELD(int32_t, scale_policy)                                                                    \
    FIELD(int32_t, adafactor_without_buffer)                                                        \
    FIELD(float, step_size)                                                                         \
    FIELD(float, decay)                                                                             \
    FIELD(float, l2)                                                                                \
    FIELD(float, keep1)                                                                             \
    FIELD(float, rate1)                                                                             \
    FIELD(float, keep2)                                                                             \
    FIELD(float, rate2)                                                                             \
    FIELD(float, bias2)                                                                             \
    FIELD(float, eps)                                                                               \
    FIELD(float, clip)                                                                              \
    FIELD(float, inject)                                                                            \
    FIELD(float, bias2_before)                                                                      \
    FIELD(float, reach)                                                                             \
    FIELD(float, payback)                                                                           \
    FIELD(double, adafactor_step_size)      /* before the weight's RMS is known */                  \
    FIELD(double, adafactor_rate1)          /* likewise, of a momentum in units of the weight */    \
    FIELD(double, adafactor_min_rms)                                                                \
    FIELD(double, adafactor_clip_threshold)                                                         \
    FIELD(int64_t, bad)              /* out: gradients (or their squares), targets not finite */

#define ML_MEMBER(type, name) type name;
struct MlStorage {
    ML_STORAGE_FIELDS(ML_MEMBER)
};
struct MlTask {
    ML_TASK_FIELDS(ML_MEMBER)
};
#undef ML_MEMBER

// --- functions --------------------------------------------------------------------------------------------------------

// Performs all steps in one parallel region. With `only_survey`, or if a gradient that must be finite is not, nothing
// moves and only the counts of bad elements are filled in; returns whether anything was allowed to move.
int32_t ml_step(MlTask* tasks, int64_t count, int32_t threads, int32_t only_survey);

// Sums of the squared gradient over rows (`row_sums`) and columns, in whole units of the power of two that `peak` (the
// largest magnitude) and `count` (the longest sum) determine: what ranks that share a matrix add up.
void ml_square_sums(MlTask* task, double peak, int64_t count, double* row_sums, double* col_sums, int32_t threads);

// Decodes a whole stored tensor to fp32 or bf16 (round to nearest even); `visible` leaves hidden bits out.
void ml_decode(const MlStorage* storage, int64_t rows, int64_t cols, int32_t visible, void* out, int32_t out_is_bf16,
               int32_t threads);

// Stores a whole dense tensor (fp32 or bf16) under new metadata, rounded to nearest. Not for one scale a tensor; a tensor's
// scale of scales must be there.
void ml_encode(const MlStorage* storage, int64_t rows, int64_t cols, const void* in, int32_t in_is_bf16, int32_t threads);

// Asks for the cache lines at these addresses, which may be any: nothing is read.
void ml_ask_for(const uint64_t* addresses, int64_t count);

const char* ml_instruction_set(void);  // the one that runs: "avx512", "avx2", "neon" or "portable"
int32_t ml_has_openmp(void);
const char* ml_interface(void);  // the structs and enumerations above, as JSON
int64_t ml_thread_bytes(void);   // working memory of one thread

}  // extern "C"
#pragma GCC visibility pop
