// All steps of one call, in one parallel region. Compiled once for every instruction set (`MASTERLESS_ISA` names it).
#include <algorithm>
#include <vector>

#include "kernel.h"
#include "statistics.h"

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
    int64_t length, per_row, units, units_per_item;

    explicit Cut(const MlTask& t) {
        length = std::min(Pipeline::unit_length(t), std::max<int64_t>(t.cols, 1));
        per_row = (t.cols + length - 1) / length;
        units = t.rows * per_row;
        units_per_item = std::max<int64_t>(1, kGrain / length);
    }

    int64_t items() const { return (units + units_per_item - 1) / units_per_item; }
};

void set_randomness(MlTask& t) {
    t.weight.key = t.weight_key, t.weight.rounding = t.weight_rounding;
    t.first.key = t.first_key, t.first.rounding = t.first_rounding;
    t.second.key = t.second_key, t.second.rounding = t.second_rounding;
}

void step_item(MlTask& t, Statistics& x, int64_t item, Workspace& work) {
    const Cut cut(t);
    Pipeline pipeline(t, work, x.one_scale() ? &x.weight_scale : nullptr, x.mean_rows.get());
    const int64_t first = item * cut.units_per_item, last = std::min(first + cut.units_per_item, cut.units);
    int64_t bad = 0;
    for (int64_t unit = first; unit < last; ++unit) {
        const int64_t row = unit / cut.per_row, col = unit % cut.per_row * cut.length;
        bad += pipeline.step(row, col, std::min(cut.length, t.cols - col));
    }
    if (bad) x.bad += bad;
}

void step(MlTask* tasks, int64_t count, int threads) {
    std::vector<Statistics> statistics((size_t)count);
    bool any_needed = false;
    int64_t elements = 0;
    for (int64_t i = 0; i < count; ++i) {
        set_randomness(tasks[i]);
        statistics[(size_t)i].open(tasks[i]);
        any_needed |= statistics[(size_t)i].needed();
        elements += tasks[i].rows * tasks[i].cols;
    }
    WorkList list;
    if (elements <= kAlone) threads = 1;

#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        Workspace work;
        for (const Phase& phase : kPhases) {
            if (!any_needed) break;
#pragma omp single
            {
                list.clear();
                for (const Statistics& x : statistics)
                    list.add(x.needed() && !x.stopped() && phase.applies(x) ? phase.items(x) : 0);
            }
#pragma omp for schedule(dynamic)
            for (int64_t item = 0; item < list.size(); ++item) {
                int64_t local = item;
                Statistics& x = statistics[list.locate(local)];
                phase.run(x, local, work);
            }
#pragma omp single
            for (Statistics& x : statistics)
                if (x.needed() && !x.stopped() && phase.applies(x)) phase.close(x);
        }
#pragma omp single
        {
            list.clear();
            for (const Statistics& x : statistics) list.add(x.stopped() ? 0 : Cut(*x.task).items());
        }
#pragma omp for schedule(dynamic)
        for (int64_t item = 0; item < list.size(); ++item) {
            int64_t local = item;
            const size_t i = list.locate(local);
            step_item(tasks[i], statistics[i], local, work);
        }
    }
    for (Statistics& x : statistics) {
        x.task->bad = x.bad;
        // Only now: until here the weight was decoded under the scale it had.
        if (x.needed() && x.one_scale() && !x.stopped()) write_metadata(x.task->weight, 0, x.weight_scale);
    }
}

// --- whole tensors ------------------------------------------------------------------------------------------

void decode_all(const MlStorage& stored, int64_t rows, int64_t cols, bool visible, void* out, bool out_is_bf16,
                int threads) {
    const MlStorage s = visible ? visible_part(stored) : stored;
    const int64_t per_row = (cols + kSpan - 1) / kSpan, units = rows * per_row;
#pragma omp parallel num_threads(threads) if (units * kSpan > kAlone)
    {
        Workspace work;
#pragma omp for schedule(static)
        for (int64_t unit = 0; unit < units; ++unit) {
            const int64_t row = unit / per_row, col = unit % per_row * kSpan, at = row * cols + col;
            const Span span{row, col, (int)std::min<int64_t>(kSpan, cols - col), 0};
            decode(s, cols, span, work.codes(), work.w);
            if (out_is_bf16)
                encode_bf16((uint16_t*)out + at, work.w, span.n, nullptr, Injection{});
            else
                copy_floats((float*)out + at, work.w, span.n);
        }
    }
}

}  // namespace MASTERLESS_ISA

extern const Kernel MASTERLESS_KERNEL;
const Kernel MASTERLESS_KERNEL = {step, decode_all, sizeof(Workspace)};

}  // namespace masterless
