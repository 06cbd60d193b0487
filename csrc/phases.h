// How long each phase of a step takes, alone and in the cache; built only with MASTERLESS_PHASES (`benchmarks/phases.py`).
#pragma once

#include <chrono>
#include <string>

#include "pipeline.h"

namespace masterless {
inline namespace MASTERLESS_ISA {

class Phases {
  public:
    // The phases of a task's first span as JSON, in nanoseconds for every element, and the nanoseconds of a cycle. The
    // task's tensors are stepped on the way, many times.
    static std::string measure(MlTask& t, int repeats) {
        Workspace work;
        Pipeline p(t, work, nullptr, nullptr, true);
        const int64_t rows = std::min(t.rows, Pipeline::rows_together(t)), pitch = Pipeline::pitch(t);
        const Span s = rows > 1 ? Span{0, 0, (int)(rows * pitch), p.chunk(0, 0), (int)t.cols, (int)pitch}
                                : p.span(0, 0, std::min<int64_t>(t.cols, kMaxSpan));
        const auto step = [&] { rows > 1 ? p.step_rows(0, rows) : p.step(0, 0, s.n); };
        Phases phases(repeats, s.count());
        const auto store_moment = [&](const char* name, const MlStorage& stored, float* x, const Noted& noted,
                                      const Draw& draw) {
            if (!is_scaled(stored)) return;
            const bool by_chunks = are_log_chunks(stored, s, noted.statistics, draw);
            phases.add(std::string("scales of the ") + name, [&] {
                by_chunks ? fresh_log_chunks(stored, s, x, noted.statistics, work.second_blocks)
                          : fresh_blocks(stored, s, x, noted, work.blocks);
            });
            phases.add(std::string("rounding of the ") + name, [&] {
                by_chunks ? encode_log_chunks(stored, s, x, draw, work.second_blocks)
                          : encode(stored, t.cols, s, x, draw, work.blocks, work.codes());
            });
        };
        p.load_gradient(s);
        p.target(s);
        phases.add("decoding of the weight", [&] { p.decode_weight(s); });
        if (p.has_first_) phases.add("decoding of the first moment", [&] { decode(t.first, t.cols, s, work.codes(), work.m); });
        phases.add("decoding of the second moment", [&] { p.decode_second(s); });
        phases.add("decoding, rule, random numbers", [&] { p.target(s); });
        p.decode_weight(s);
        if (is_scaled(t.weight)) phases.add("scales of the weight", [&] { p.weight_blocks(s, false); });
        const Blocks blocks = p.weight_blocks(s, false);
        phases.add(p.inject_ ? "rounding of the weight, injection" : "rounding of the weight",
                   [&] { p.round_weight(s, blocks, false); });
        p.load_gradient(s);
        p.target(s);
        if (p.has_first_) store_moment("first moment", t.first, work.m, p.noted_first_, p.first_draw_);
        store_moment("second moment", t.second, work.v, p.noted_second_, p.second_draw_);
        phases.add("all", [&] {
            ++t.weight.key;  // thousands of steps with the same random numbers would lead somewhere
            step();
        });
        const auto chain = [&] {  // of dependent multiplications, each of three cycles
            uint64_t x = 1, factor = (uint64_t)s.n | 1;
            for (int i = 0; i < s.count(); i += 3) {
                x *= factor;
                __asm__ volatile("" : "+r"(x));
            }
        };
        phases.add("cycle", chain, step);  // at the frequency that vectors leave
        return phases.text_ + "}";
    }

  private:
    Phases(int repeats, int elements) : repeats_(repeats), elements_(elements) {}

    template <class F, class G>
    void add(const std::string& name, F&& pass, G&& before) {
        constexpr int kPasses = 40;
        double least = 1e30;
        for (int i = 0; i < repeats_; ++i) {
            for (int k = 0; k < kPasses; ++k) before();
            const auto start = std::chrono::steady_clock::now();
            for (int k = 0; k < kPasses; ++k) pass();
            const std::chrono::duration<double, std::nano> time = std::chrono::steady_clock::now() - start;
            least = time.count() < least ? time.count() : least;
        }
        text_ += (text_.size() > 1 ? ", \"" : "\"") + name + "\": " + std::to_string(least / kPasses / elements_);
    }

    template <class F>
    void add(const std::string& name, F&& pass) {
        add(name, pass, [] {});
    }

    int repeats_, elements_;
    std::string text_ = "{";
};

}  // namespace MASTERLESS_ISA
}  // namespace masterless
