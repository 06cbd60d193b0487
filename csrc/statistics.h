// What needs a whole parameter before any of it moves: non-finite gradients of an indivisible parameter, factored
// second moments, Adafactor's step size, and the scale of a weight that has only one.
//
// Contract:
//   * Sums are exact (`sums.h`), so that threads may add in any order.
//   * The work is a list of phases; within a phase items are independent, between phases all threads meet.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <memory>
#include <mutex>

#include "pipeline.h"
#include "sums.h"

namespace masterless {
inline namespace MASTERLESS_ISA {

// Elements of one item of work, about: what an item reads first was not asked for ahead. Items of a step are longer, as long
// as there are kItems of them for every thread.
constexpr int64_t kGrain = 65536, kLargestGrain = 524288, kItems = 32;
constexpr int64_t kAlone = 32768;  // up to so many elements no other thread is worth waking

// The largest of many non-negative floats, whose bits have the same order.
class SharedPeak {
  public:
    void raise(float x) {
        const uint32_t b = bits(x);
        uint32_t old = bits_.load(std::memory_order_relaxed);
        while (old < b && !bits_.compare_exchange_weak(old, b, std::memory_order_relaxed)) {
        }
    }
    float value() const { return from_bits(bits_.load(std::memory_order_relaxed)); }

  private:
    std::atomic<uint32_t> bits_{0};
};

// Statistics of one parameter; empty for the ordinary ones.
struct Statistics {
    MlTask* task = nullptr;
    std::atomic<int64_t> bad{0};
    int64_t matrices = 0;
    std::unique_ptr<SharedPeak[]> gradient_peak;  // of every matrix; factored second moments
    std::unique_ptr<float[]> mean_rows;           // of every matrix; factored second moments
    std::unique_ptr<double[]> column_sums;        // of every matrix; factored second moments
    std::mutex adding;                            // to those
    SharedPeak weight_peak, update_peak, target_peak;
    std::atomic<int64_t> weight_sum{0}, update_sum{0};  // of squares, in units of the peaks
    Metadata weight_scale;

    void open(MlTask& t) {
        task = &t;
        if (!needed() || !factored()) return;
        matrices = t.rows / t.matrix_rows;
        gradient_peak.reset(new SharedPeak[(size_t)matrices]);
        mean_rows.reset(new float[(size_t)matrices]);
        column_sums.reset(new double[(size_t)(matrices * t.cols)]());
    }

    bool empty() const { return task->rows <= 0 || task->cols <= 0; }
    bool needed() const { return task->indivisible && !task->statistics_given && !empty(); }
    const float* row_means() const { return task->statistics_given ? task->mean_rows : mean_rows.get(); }
    bool stopped() const { return bad.load(std::memory_order_relaxed) != 0; }
    bool factored() const { return task->second.kind == ML_FACTORED; }
    bool adafactor() const { return task->rule == ML_ADAFACTOR || task->rule == ML_ADAFACTOR_WEIGHT_UNITS; }
    bool one_scale() const { return is_scaled(task->weight) && task->weight.per_tensor; }

    int64_t rows_per_item() const { return task->cols < kGrain ? kGrain / task->cols : 1; }
    int64_t row_items() const { return (task->rows + rows_per_item() - 1) / rows_per_item(); }
    Pipeline pipeline(Workspace& work, bool surveyed = false) {
        return Pipeline(*task, work, nullptr, row_means(), surveyed);
    }

    // Calls f(pipeline, span) for all spans of an item's rows.
    template <class F>
    void for_each_span(int64_t item, Workspace& work, F&& f) {
        const int64_t first = item * rows_per_item(), last = first + rows_per_item();
        Pipeline p = pipeline(work);
        for (int64_t row = first; row < last && row < task->rows; ++row)
            for (int64_t col = 0; col < task->cols; col += kStrip)
                f(p, p.span(row, col, task->cols - col < kStrip ? task->cols - col : kStrip));
    }
};

// --- steps shared by the phases -----------------------------------------------------------------------------

// The gradient to descend on, perhaps with the other sign, which no statistic sees. With L2 buffer w becomes the weight.
inline const float* load_squarable(const MlTask& t, Pipeline& p, Workspace& work, const Span& s) {
    p.load_gradient(s);
    if (!t.has_l2) return p.gradient();
    p.decode_weight(s);
    for (int e = 0; e < s.n; e += kLanes)
        store(work.g + e, descent_gradient(load<vf>(p.gradient() + e), load<vf>(work.w + e), t.maximize, true, splat(t.l2)));
    return work.g;
}

// Elements of the gradient that are not finite, or whose squares are not, also with weight decay.
inline int64_t count_not_squarable(const MlTask& t, Pipeline& p, Workspace& work, const Span& s) {
    const bool finite = p.load_gradient(s);
    if (!t.has_l2) return finite ? 0 : p.count_bad(s.n);
    p.decode_weight(s);
    const auto is_bad = [](float g) { return (bits(g) & 0x7FFFFFFFu) > Pipeline::kLargestRoot; };
    int64_t bad = 0;
    for (int e = 0; e < s.n; e += kLanes) {
        const vf g = load<vf>(p.gradient() + e), whole = descent_gradient(g, load<vf>(work.w + e), t.maximize, true, splat(t.l2));
        for (int i = 0; i < kLanes && e + i < s.n; ++i) bad += is_bad(g[i]) || is_bad(whole[i]);
    }
    return bad;
}

// Buffer g becomes Adafactor's update before clipping, buffer w the weight.
inline void load_adafactor_update(const MlTask& t, Pipeline& p, Workspace& work, const Span& s) {
    const float* const g = load_squarable(t, p, work, s);
    if (!t.has_l2) p.decode_weight(s);
    p.decode_second(s);
    const Scalars c(t);
    for (int e = 0; e < s.n; e += kLanes) {
        const vf v = load<vf>(work.v + e);
        const SecondMoment second{v, v * c.keep2, vf{}, t.second.kind == ML_FACTORED, true, &c};
        const Update u = Adafactor::step<false, Root::kCoarse>(load<vf>(g + e), vf{}, second, c);
        store(work.g + e, quotient(u.direction, u.denominator, c));
    }
    for (int e = s.n; e % kLanes; ++e) work.g[e] = 0.0f;
}

inline SumUnit factored_unit(const Statistics& x, int64_t matrix) {
    const int64_t rows = x.task->matrix_rows, cols = x.task->cols;
    return SumUnit(square(x.gradient_peak[(size_t)matrix].value()), rows > cols ? rows : cols);
}

inline SumUnit weight_unit(const Statistics& x) {
    return SumUnit(square(x.weight_peak.value()), x.task->rows * x.task->cols);
}

inline SumUnit update_unit(const Statistics& x) {
    return SumUnit(square(x.update_peak.value()), x.task->rows * x.task->cols);
}

// --- the phases ---------------------------------------------------------------------------------------------

struct Phase {
    bool (*applies)(const Statistics&);
    int64_t (*items)(const Statistics&);
    void (*run)(Statistics&, int64_t item, Workspace&);
    void (*close)(Statistics&);  // by one thread, after all items
};

inline int64_t row_items(const Statistics& x) { return x.row_items(); }
inline void nothing(Statistics&) {}

// The largest of n floats (or bf16 numbers) without their signs, as integers; V is a vector of T. This waits for memory
// only, which answers faster to several streams, asked ahead of time.
template <class V, class T>
inline T largest_magnitude(const T* x, int64_t n, T mask) {
    constexpr int kStreams = 4, kAhead = 2048, kWidth = sizeof(V) / sizeof(T);
    const int64_t part = n / (kStreams * kWidth) * kWidth;
    V largest[kStreams] = {};
    for (int64_t e = 0; e < part; e += kWidth)
        for (int i = 0; i < kStreams; ++i) {
            const T* const here = x + i * part + e;
            __builtin_prefetch((const char*)here + kAhead, 0, 2);  // into the second cache: the step comes too late for the first
            const V number = load<V>(here) & mask;
            largest[i] = number > largest[i] ? number : largest[i];
        }
    T most = 0;
    for (const V& of_stream : largest)
        for (int i = 0; i < kWidth; ++i) most = of_stream[i] > most ? of_stream[i] : most;
    for (int64_t e = kStreams * part; e < n; ++e) most = (T)(x[e] & mask) > most ? (T)(x[e] & mask) : most;
    return most;
}

// The largest magnitude of n gradient elements, as the bits of a float.
inline uint32_t largest_bits(const MlTask& t, int64_t at, int64_t n) {
    typedef int16_t Halves __attribute__((vector_size(sizeof(vi))));
    if (!t.grad_is_bf16) return (uint32_t)largest_magnitude<vi>((const int32_t*)t.grad + at, n, (int32_t)0x7FFFFFFF);
    return (uint32_t)largest_magnitude<Halves>((const int16_t*)t.grad + at, n, (int16_t)0x7FFF) << 16;
}

// Counts the gradients that are not finite, when nothing else is asked of them.
inline void count_bad(Statistics& x, int64_t item, Workspace& work) {
    const MlTask& t = *x.task;
    const int64_t rows = x.rows_per_item(), at = item * rows * t.cols, end = (item + 1) * rows * t.cols;
    const int64_t last = t.rows * t.cols;
    if (largest_bits(t, at, (end < last ? end : last) - at) <= Pipeline::kLargestRoot) return;
    x.for_each_span(item, work, [&](Pipeline& p, const Span& s) {
        if (!p.load_gradient(s)) x.bad += p.count_bad(s.n);
    });
}

// The peaks of the matrices that an item's rows belong to, when nothing else is asked of them; false if a gradient is
// not finite.
inline bool raise_peaks(Statistics& x, int64_t item) {
    const MlTask& t = *x.task;
    const int64_t end = std::min((item + 1) * x.rows_per_item(), t.rows);
    for (int64_t row = item * x.rows_per_item(), next; row < end; row = next) {
        const int64_t matrix = row / t.matrix_rows;
        next = std::min((matrix + 1) * t.matrix_rows, end);
        const uint32_t largest = largest_bits(t, row * t.cols, (next - row) * t.cols);
        if (largest > Pipeline::kLargestRoot) return false;
        x.gradient_peak[(size_t)matrix].raise(from_bits(largest));
    }
    return true;
}

inline void survey(Statistics& x, int64_t item, Workspace& work) {
    if (!x.needed()) return count_bad(x, item, work);
    const bool only_peaks = x.factored() && !x.task->has_l2 && !x.adafactor();
    if (only_peaks && raise_peaks(x, item)) return;
    x.for_each_span(item, work, [&](Pipeline& p, const Span& s) {
        x.bad += count_not_squarable(*x.task, p, work, s);
        if (x.factored()) {
            const float peak = x.task->has_l2 ? absmax(load_squarable(*x.task, p, work, s), s.n) : p.gradient_peak();
            x.gradient_peak[(size_t)(s.row / x.task->matrix_rows)].raise(peak);
        }
        if (x.adafactor()) {
            p.decode_weight(s);
            x.weight_peak.raise(absmax(work.w, s.n));
        }
    });
}

// Row sums and column sums of the squares are taken in one pass, kSumRows rows at a time, strip by strip: the sums of a strip
// stay in the L1 cache. Those of narrow matrices go on over all rows of an item, and are added to the matrix's once.
constexpr int kSumRows = 32;

inline int64_t rows_per_sum_item(const Statistics& x) {
    const int64_t cols = x.task->cols;
    return cols > kStrip ? kSumRows : std::max<int64_t>(1, kGrain / (kSumRows * cols)) * kSumRows;
}
inline int64_t sum_items_per_matrix(const Statistics& x) {
    return (x.task->matrix_rows + rows_per_sum_item(x) - 1) / rows_per_sum_item(x);
}
inline int64_t sum_items(const Statistics& x) { return x.matrices * sum_items_per_matrix(x); }

// Adds the squares of a strip of up to kSumRows rows to the sums of its columns and rows, in whole units.
class StripSums {
  public:
    StripSums(Statistics& x, int64_t matrix, Workspace& work)
        : t_(*x.task), work_(work), pipeline_(x.pipeline(work)), unit_(factored_unit(x, matrix)), halved_(unit_),
          by_halves_(t_.grad_is_bf16 && HalvedSquares::suits(unit_)) {}

    double unit() const { return unit_.unit; }

    void add(int64_t first_row, int rows, int64_t col, int n, double* col_sums, double* row_sums) {
        static_assert(kStrip / kLanes <= 256 && kSumRows <= 256, "sums of halves fit");
        alignas(64) uint64_t columns[kStrip];
        alignas(64) uint32_t upper[kStrip], lower[kStrip];
        const int in_vectors = (n + kLanes - 1) / kLanes * kLanes;
        std::fill_n(columns, in_vectors, 0), std::fill_n(upper, in_vectors, 0), std::fill_n(lower, in_vectors, 0);
        int i = 0, in_halves = 0;
        if (!t_.has_l2 && n % kLanes == 0)  // where they lie, several rows at a time
            for (const int64_t pitch = t_.cols; i + kSumsTogether <= rows; i += kSumsTogether) {
                const uint16_t* const narrow = (const uint16_t*)t_.grad + (first_row + i) * pitch + col;
                const float* const wide = (const float*)t_.grad + (first_row + i) * pitch + col;
                const auto read_narrow = [=](int r, int e) {  // and asks for the rows that follow
                    Upcoming::ask_for((const char*)(narrow + (r + kSumsTogether) * pitch + e));
                    return load_bf16(narrow + r * pitch + e);
                };
                if (by_halves_)
                    halved_.add<kSumsTogether>(n, upper, lower, row_sums + i, read_narrow), in_halves += kSumsTogether;
                else if (t_.grad_is_bf16)
                    add_squares<kSumsTogether>(n, unit_, columns, row_sums + i, read_narrow);
                else
                    add_squares<kSumsTogether>(n, unit_, columns, row_sums + i,
                                               [=](int r, int e) { return load<vf>(wide + r * pitch + e); });
            }
        const int in_wholes = rows - in_halves;
        for (; i < rows; ++i) {
            const float* const g = load_squarable(t_, pipeline_, work_, pipeline_.span(first_row + i, col, n));
            add_squares<1>(n, unit_, columns, row_sums + i, [=](int, int e) { return load<vf>(g + e); });
        }
        for (int e = 0; in_wholes && e < n; ++e) col_sums[e] += sum_of_wholes(columns[e], in_wholes);
        for (int e = 0; in_halves && e < n; ++e) col_sums[e] += halved_.sum(upper[e], lower[e], (uint32_t)in_halves);
    }

  private:
    MlTask& t_;
    Workspace& work_;
    Pipeline pipeline_;
    SumUnit unit_;
    HalvedSquares halved_;
    bool by_halves_;
};

inline void factored_sums(Statistics& x, int64_t item, Workspace& work) {
    const MlTask& t = *x.task;
    const int64_t per_item = rows_per_sum_item(x), per_matrix = sum_items_per_matrix(x), matrix = item / per_matrix;
    const int64_t start = item % per_matrix * per_item, end = std::min(start + per_item, t.matrix_rows);
    StripSums strips(x, matrix, work);
    double found[kStrip] = {};
    for (int64_t first = start; first < end; first += kSumRows) {
        const int rows = (int)std::min<int64_t>(kSumRows, end - first);
        double row_sums[kSumRows] = {};
        for (int64_t col = 0; col < t.cols; col += kStrip) {
            const int n = (int)std::min<int64_t>(kStrip, t.cols - col);
            strips.add(matrix * t.matrix_rows + first, rows, col, n, found, row_sums);
            if (t.cols <= kStrip && first + rows < end) continue;
            double* const sums = x.column_sums.get() + matrix * t.cols + col;
            const std::lock_guard<std::mutex> alone(x.adding);
            for (int e = 0; e < n; ++e) sums[e] += found[e], found[e] = 0.0;
        }
        float* const row = t.second.row + matrix * t.matrix_rows + first;
        for (int i = 0; i < rows; ++i)
            row[i] = finite(row[i] * t.keep2 + (float)(row_sums[i] * strips.unit() / (double)t.cols) * t.rate2);
    }
}

inline int64_t matrix_items(const Statistics& x) { return x.matrices; }

// The column factors of a matrix from their sums, and the mean of its row factors.
inline void factored_columns(Statistics& x, int64_t matrix, Workspace&) {
    const MlTask& t = *x.task;
    const int64_t rows = t.matrix_rows;
    const SumUnit of_squares = factored_unit(x, matrix);
    const double* const sums = x.column_sums.get() + matrix * t.cols;
    float* const col = t.second.col + matrix * t.cols;
    for (int64_t e = 0; e < t.cols; ++e)
        col[e] = finite(col[e] * t.keep2 + (float)(sums[e] * of_squares.unit / (double)rows) * t.rate2);
    const float* row = t.second.row + matrix * rows;
    const SumUnit unit(largest_of(row, rows), rows);
    x.mean_rows[(size_t)matrix] = (float)(exact_sum(row, rows, unit) * unit.unit / (double)rows);
}

inline void adafactor_peak(Statistics& x, int64_t item, Workspace& work) {
    const SumUnit unit = weight_unit(x);
    x.for_each_span(item, work, [&](Pipeline& p, const Span& s) {
        load_adafactor_update(*x.task, p, work, s);
        x.update_peak.raise(absmax(work.g, s.n));
        x.weight_sum += (int64_t)sum_of_squares(work.w, s.n, unit);
    });
}

inline void adafactor_sum(Statistics& x, int64_t item, Workspace& work) {
    const SumUnit unit = update_unit(x);
    x.for_each_span(item, work, [&](Pipeline& p, const Span& s) {
        load_adafactor_update(*x.task, p, work, s);
        x.update_sum += (int64_t)sum_of_squares(work.g, s.n, unit);
    });
}

// The step is relative to the weight's RMS, and an update whose RMS exceeds a threshold is scaled down.
inline void adafactor_close(Statistics& x) {
    MlTask& t = *x.task;
    const double count = (double)(t.rows * t.cols);
    const double rms_weight = std::sqrt((double)x.weight_sum.load() * weight_unit(x).unit / count);
    const double rms_update = std::sqrt((double)x.update_sum.load() * update_unit(x).unit / count);
    const double alpha = std::fmax(t.adafactor_min_rms, rms_weight) * t.adafactor_step_size;
    const double clip = 1.0 / std::fmax(1.0, rms_update / t.adafactor_clip_threshold);
    t.step_size = (float)(t.adafactor_without_buffer ? alpha * clip : alpha);
    t.clip = (float)clip;
    if (t.rule != ML_ADAFACTOR_WEIGHT_UNITS || t.adafactor_without_buffer) return;
    const bool moves = alpha != 0.0;
    t.step_size = moves ? 1.0f : 0.0f;
    t.rate1 = moves ? (float)(t.adafactor_rate1 * clip * alpha) : 0.0f;
    if (!moves) t.keep1 = 1.0f, t.inject = 0.0f;
}

inline void target_peak(Statistics& x, int64_t item, Workspace& work) {
    x.for_each_span(item, work, [&](Pipeline& p, const Span& s) {
        p.load_gradient(s);
        if (!p.target(s)) x.bad += p.count_lost(s.n);
        x.target_peak.raise(block_peak(x.task->weight, work.w, s.n));
    });
}

inline void one_scale_close(Statistics& x) {
    const MlStorage& weight = x.task->weight;
    const float peak = x.target_peak.value();
    const float held = read_scale(weight, 0, 0);
    x.weight_scale = scaled_block(weight, next_scale(weight, x.task->scale_policy, peak, held, 1.0f), peak);
}

inline bool is_factored(const Statistics& x) { return x.needed() && x.factored(); }
inline bool is_adafactor(const Statistics& x) { return x.needed() && x.adafactor(); }
inline bool has_one_scale(const Statistics& x) { return x.needed() && x.one_scale(); }
inline bool is_surveyed(const Statistics& x) { return x.needed() || (x.task->must_be_finite && !x.empty()); }
inline bool is_not_empty(const Statistics& x) { return !x.empty(); }

constexpr Phase kSurveyAll = {is_not_empty, row_items, survey, nothing};
constexpr Phase kPhases[] = {
    {is_surveyed, row_items, survey, nothing},
    {is_factored, sum_items, factored_sums, nothing},
    {is_factored, matrix_items, factored_columns, nothing},
    {is_adafactor, row_items, adafactor_peak, nothing},
    {is_adafactor, row_items, adafactor_sum, adafactor_close},
    {has_one_scale, row_items, target_peak, one_scale_close},
};

}  // namespace MASTERLESS_ISA
}  // namespace masterless
