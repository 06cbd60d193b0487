// All steps of one call, in one parallel region. Compiled once for every instruction set (`MASTERLESS_ISA` names it).
#include <algorithm>
#include <vector>

#include "environment.h"
#include "kernel.h"
#include "statistics.h"
#ifdef MASTERLESS_PHASES
#include "phases.h"
#endif

namespace masterless {
inline namespace MASTERLESS_ISA {

// Items of work of several parameters, numbered through.
class WorkList {
  public:
    void clear() { ends_.clear(); }
    void add(int64_t items) { ends_.push_back((ends_.empty() ? 0 : ends_.back()) + items); }
    int64_t size() const { return ends_.empty() ? 0 : ends_.back(); }

    // The parameter that an item belongs to; `item` becomes its number there.
    size_t locate(int64_t& item) const {
        const auto it = std::upper_bound(ends_.begin(), ends_.end(), item);
        if (it != ends_.begin()) item -= *(it - 1);
        return (size_t)(it - ends_.begin());
    }

  private:
    std::vector<int64_t> ends_;
};

// How a parameter is cut for the step itself: into units (whole tiles), and some units make an item.
struct Cut {
    int64_t all_rows, cols;  // of the parameter; if it is continuous, of a single row that is as good
    int64_t rows, length, per_row, units, units_per_item;  // a unit is some whole rows, or a part of one

    Cut(const MlTask& t, int64_t grain) : all_rows(t.rows), cols(t.cols) {
        const bool as_one = Pipeline::is_continuous(t);
        if (as_one) cols *= all_rows, all_rows = 1;
        rows = as_one ? 1 : Pipeline::rows_together(t);
        length = std::min(Pipeline::unit_length(t), std::max<int64_t>(cols, 1));
        per_row = (cols + length - 1) / length;
        units = (all_rows + rows - 1) / rows * per_row;
        units_per_item = std::max<int64_t>(1, grain / (rows * length));
    }

    int64_t items() const { return (units + units_per_item - 1) / units_per_item; }
};

void set_randomness(MlTask& t) {
    t.weight.key = t.weight_key, t.weight.rounding = t.weight_rounding;
    t.first.key = t.first_key, t.first.rounding = t.first_rounding;
    t.second.key = t.second_key, t.second.rounding = t.second_rounding;
}

void step_item(MlTask& t, Statistics& x, const Cut& cut, int64_t item, Workspace& work) {
    Pipeline pipeline(t, work, x.one_scale() ? &x.weight_scale : nullptr, x.row_means(), is_surveyed(x));
    const int64_t first = item * cut.units_per_item, last = std::min(first + cut.units_per_item, cut.units);
    int64_t bad = 0;
    for (int64_t unit = first; unit < last; ++unit) {
        const int64_t row = unit / cut.per_row * cut.rows, col = unit % cut.per_row * cut.length;
        bad += cut.rows > 1 ? pipeline.step_rows(row, std::min(cut.rows, cut.all_rows - row))
                            : pipeline.step(row, col, std::min(cut.length, cut.cols - col));
    }
    if (bad) x.bad += bad;
}

bool step(MlTask* tasks, int64_t count, int threads, bool only_survey) {
    std::vector<Statistics> statistics((size_t)count);
    int64_t elements = 0;
    for (int64_t i = 0; i < count; ++i) {
        set_randomness(tasks[i]);
        statistics[(size_t)i].open(tasks[i]);
        elements += tasks[i].rows * tasks[i].cols;
    }
    std::vector<Phase> phases;
    for (const Phase& phase : kPhases)
        if (std::any_of(statistics.begin(), statistics.end(), phase.applies)) phases.push_back(phase);
    if (only_survey) phases.assign(1, kSurveyAll);
    WorkList list;
    bool halted = false;  // a gradient that must be finite is not: nothing at all moves
    if (elements <= kAlone) threads = 1;
    const int64_t grain = std::min(std::max(kGrain, elements / (kItems * threads)), kLargestGrain);

#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        const FloatEnvironment environment;
        Workspace work;
        for (const Phase& phase : phases) {
#pragma omp single
            {
                list.clear();
                for (const Statistics& x : statistics)
                    list.add(!halted && !x.stopped() && phase.applies(x) ? phase.items(x) : 0);
            }
#pragma omp for schedule(dynamic)
            for (int64_t item = 0; item < list.size(); ++item) {
                int64_t local = item;
                Statistics& x = statistics[list.locate(local)];
                phase.run(x, local, work);
            }
#pragma omp single
            for (Statistics& x : statistics) {
                if (!x.stopped() && phase.applies(x)) phase.close(x);
                halted |= x.stopped() && x.task->must_be_finite;
            }
        }
#pragma omp single
        {
            list.clear();
            for (const Statistics& x : statistics)
                list.add(only_survey || halted || x.stopped() ? 0 : Cut(*x.task, grain).items());
        }
#pragma omp for schedule(dynamic)
        for (int64_t item = 0; item < list.size(); ++item) {
            int64_t local = list.size() - 1 - item;  // backwards: what was surveyed last may still be in a cache
            const size_t i = list.locate(local);
            step_item(tasks[i], statistics[i], Cut(tasks[i], grain), local, work);
        }
    }
    for (Statistics& x : statistics) {
        x.task->bad = x.bad;
        // Only now: until here the weight was decoded under the scale it had.
        const bool moved = !only_survey && !halted && !x.stopped();
        if (moved && x.needed() && x.one_scale()) write_metadata(x.task->weight, 0, 0, x.weight_scale);
    }
    return !only_survey && !halted;
}

void square_sums(MlTask& t, double peak, int64_t count, double* row_sums, double* col_sums, int threads) {
    Statistics x;
    x.open(t);
    const SumUnit unit(peak * peak, count);
    std::fill(col_sums, col_sums + t.cols, 0.0);
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        const FloatEnvironment environment;
        Workspace work;
        std::vector<uint64_t> columns((size_t)(t.cols + kLanes), 0);  // exact sums: their order does not show
        int64_t rows = 0;
#pragma omp for schedule(static)
        for (int64_t item = 0; item < x.row_items(); ++item)
            x.for_each_span(item, work, [&](Pipeline& p, const Span& s) {
                const float* const g = load_squarable(t, p, work, s);
                if (s.col == 0) row_sums[s.row] = 0.0, ++rows;
                add_squares<1>(s.n, unit, columns.data() + s.col, row_sums + s.row, [=](int, int e) { return load<vf>(g + e); });
            });
#pragma omp critical
        for (int64_t e = 0; e < t.cols; ++e) col_sums[e] += sum_of_wholes(columns[(size_t)e], rows);
    }
}

// --- whole tensors ------------------------------------------------------------------------------------------

void decode_all(const MlStorage& stored, int64_t rows, int64_t cols, bool visible, void* out, bool out_is_bf16,
                int threads) {
    const MlStorage s = visible ? visible_part(stored) : stored;
    const int64_t per_row = (cols + kStrip - 1) / kStrip, units = rows * per_row;
#pragma omp parallel num_threads(threads) if (units * kStrip > kAlone)
    {
        const FloatEnvironment environment;
        Workspace work;
#pragma omp for schedule(static)
        for (int64_t unit = 0; unit < units; ++unit) {
            const int64_t row = unit / per_row, col = unit % per_row * kStrip, at = row * cols + col;
            const int n = (int)std::min<int64_t>(kStrip, cols - col);
            const Span span{row, col, n, 0, n, n};
            decode(s, cols, span, work.codes(), work.w);
            if (out_is_bf16)
                encode_bf16((uint16_t*)out + at, work.w, span.n, nullptr, Injection{});
            else
                copy_floats((float*)out + at, work.w, span.n);
        }
    }
}

void encode_all(const MlStorage& s, int64_t rows, int64_t cols, const void* in, bool in_is_bf16, int threads) {
    // Whole chunks and whole blocks, or the one block of a row.
    const int64_t length = s.block >= cols ? cols : kStrip, per_row = (cols + length - 1) / length, units = rows * per_row;
#pragma omp parallel num_threads(threads) if (rows * cols > kAlone)
    {
        const FloatEnvironment environment;
        Workspace work;
        const auto load_part = [&](const Span& span) {
            const int64_t at = span.row * cols + span.col;
            in_is_bf16 ? widen_rows(work.w, (const uint16_t*)in + at, span) : copy_rows_in(work.w, (const float*)in + at, span);
            clear_rest(span, work.w);
        };
        const auto for_each_part = [&](int64_t row, int64_t col, int64_t n, auto&& f) {
            for (int64_t e = 0; e < n; e += kMaxSpan) {
                const int part = (int)std::min<int64_t>(kMaxSpan, n - e);
                const Span span{row, col + e, part, 0, part, part};
                load_part(span);
                f(span);
            }
        };
#pragma omp for schedule(static)
        for (int64_t unit = 0; unit < units; ++unit) {
            const int64_t row = unit / per_row, col = unit % per_row * length, n = std::min(length, cols - col);
            Metadata of_all;
            if (n > kMaxSpan) {  // one block: its metadata needs a look at all of it first
                Summary summary(s, n);
                for_each_part(row, col, n, [&](const Span& span) { summary.add(work.w, span.n); });
                of_all = summary.fresh();
                write_metadata(s, row, row, of_all);
            }
            for_each_part(row, col, n, [&](const Span& span) {
                if (n <= kMaxSpan) fresh_blocks(s, span, work.w, Noted{}, work.blocks);
                encode(s, cols, span, work.w, Draw{}, n <= kMaxSpan ? Blocks(work.blocks) : Blocks(of_all), work.codes());
            });
        }
    }
}

}  // namespace MASTERLESS_ISA

extern const Kernel MASTERLESS_KERNEL;
const Kernel MASTERLESS_KERNEL = {
    step, square_sums, decode_all, encode_all, sizeof(Workspace),
#ifdef MASTERLESS_PHASES
    Phases::measure,
#endif
};

}  // namespace masterless
