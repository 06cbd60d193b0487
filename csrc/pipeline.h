// The step of one parameter, span by span: decode, rule, round the weight, inject the error, encode.
//
// Contract, as in `reference.py`:
//   * A tile (whole chunks and whole blocks of a row) with a gradient or a target that is not finite keeps every byte it
//     had.
//   * A tile normally fits into the buffers and is read once. A row that is one tile and longer than a buffer is walked
//     several times instead: to know its scales first, then to store it. The result is the same.
//   * Working memory is `Workspace`, one a thread, whatever the size of the parameter.
#pragma once

#include <algorithm>
#include <cmath>

#include "passage.h"
#include "workspace.h"

namespace masterless {
inline namespace MASTERLESS_ISA {

// Metadata that is known before a span is encoded, because its block is longer than the span.
struct Known {
    const Metadata* weight = nullptr;
    const Metadata* first = nullptr;
    const Metadata* second = nullptr;
};

class Pipeline {
  public:
    static constexpr uint32_t kLargestRoot = 0x5F7FFFFFu;  // bits of the largest float whose square is finite

    // `weight_scale`: the scale of a weight that has only one, once it is known. `mean_rows`: of factored second
    // moments, the mean of the row factors of every matrix. `surveyed`: it is known that all gradients are finite.
    Pipeline(MlTask& task, Workspace& work, const Metadata* weight_scale, const float* mean_rows, bool surveyed = false)
        : t_(task), b_(arranged(work, task)), c_(task), weight_scale_(weight_scale), mean_rows_(mean_rows), surveyed_(surveyed),
          has_first_(task.first.kind != ML_NONE), inject_(task.inject_error && task.first.kind != ML_NONE),
          stores_weight_(task.scale_policy != ML_FROZEN), stores_first_(has_first_ && !keeps_first(task)),
          any_(any_function(task)), weight_draw_(draw(task.weight, work.weight_words)),
          first_draw_(draw(task.first, work.first_words)), second_draw_(draw(task.second, work.second_words)) {}

    static int64_t unit_length(const MlTask& t) { return std::max<int64_t>(t.tile, kMaxSpan); }

    // How many rows are taken together: of short ones some, for each has a cost of its own.
    static int64_t rows_together(const MlTask& t) {
        const bool by_row = t.weight.tensor_scale || t.first.tensor_scale || t.second.tensor_scale;  // other units
        const bool one_scale = is_scaled(t.weight) && t.weight.per_tensor;
        if (t.cols <= 0 || 2 * pitch(t) > kMaxSpan || one_scale || by_row) return 1;
        return std::min(kMaxSpan / pitch(t), (int64_t)kMaxChunks / chunks_per_row(t));
    }

    // Whether a row's end is no end of anything, so that all rows are as good as one: chunks, blocks and codes of the next row
    // follow those of the last.
    static bool is_continuous(const MlTask& t) {
        const auto goes_on = [&](const MlStorage& s) {
            if (s.kind == ML_FACTORED || s.per_tensor || s.tensor_scale) return false;
            return !is_scaled(s) || (kChunk % s.block == 0 && s.row_bytes == packed_offset(t.cols, s.bits));
        };
        return t.cols % kChunk == 0 && t.tile == kChunk && goes_on(t.weight) && goes_on(t.first) && goes_on(t.second);
    }

    static int64_t chunks_per_row(const MlTask& t) { return (t.cols + kChunk - 1) / kChunk; }
    static int64_t pitch(const MlTask& t) { return (t.cols + kLanes - 1) / kLanes * kLanes; }

    Span span(int64_t row, int64_t col, int64_t n) const { return {row, col, (int)n, chunk(row, col), (int)n, (int)n}; }

    // Steps some whole rows that fit together (`rows_together`). Returns the bad gradients.
    int64_t step_rows(int64_t row, int64_t rows) {
        if (rows == 1) return step(row, 0, t_.cols);
        const Span s{row, 0, (int)(rows * pitch(t_)), chunk(row, 0), (int)t_.cols, (int)pitch(t_)};
        const bool finite = load_gradient(s);
        if (finite && target(s, s.has_whole_vectors())) {
            finish(s, Known{});
            return 0;
        }
        if (finite && stopped_ >= 0) {  // a row is a chunk
            const int64_t done = stopped_;
            put_back(done * t_.cols, t_.cols);
            if (done) finish({row, 0, (int)(done * t_.cols), s.chunk, s.length, s.pitch}, Known{});
            const int64_t bad = step(row + done, 0, t_.cols), rest = rows - done - 1;
            return rest ? bad + step_rows(row + done + 1, rest) : bad;
        }
        if (finite) put_back(0, s.n);
        int64_t bad = 0;
        for (int64_t i = row; i < row + rows; ++i) bad += step(i, 0, t_.cols);
        return bad;
    }

    // Steps `n` elements from a tile's start: some whole tiles, or a single long one. Returns the bad gradients.
    int64_t step(int64_t row, int64_t col, int64_t n) {
        if (n > kMaxSpan) return step_long(row, col, n);
        const Span s = span(row, col, n);
        const bool finite = load_gradient(s);
        if (finite && target(s, n % kLanes == 0)) {
            finish(s, Known{weight_scale_});
            return 0;
        }
        const int64_t found = n > t_.tile ? 0 : finite ? count_lost(s.n) : count_bad(s.n);
        if (n > t_.tile && finite && stopped_ >= 0) {
            const int64_t done = (int64_t)stopped_ * kChunk, tile = std::min<int64_t>(kChunk, n - done), rest = n - done - tile;
            put_back(done, tile);
            if (done) finish(span(row, col, done), Known{weight_scale_});
            const int64_t bad = step(row, col + done, tile);
            return rest ? bad + step(row, col + done + tile, rest) : bad;
        }
        if (finite) put_back(0, s.n);
        if (n <= t_.tile) return found;
        int64_t bad = 0;
        for (int64_t e = 0; e < n; e += t_.tile) bad += step(row, col + e, n - e < t_.tile ? n - e : t_.tile);
        return bad;
    }

    // The gradient as stored; false if an element or its square is not finite.
    bool load_gradient(const Span& s) {
        const int64_t at = s.row * t_.cols + s.col;
        g_ = b_.g, narrow_g_ = nullptr;
        if (surveyed_ && s.has_whole_vectors()) {  // nothing to look at: the rule reads it where it lies
            if (t_.grad_is_bf16)
                narrow_g_ = (const uint16_t*)t_.grad + at;
            else
                g_ = (const float*)t_.grad + at;
            return true;
        }
        if (t_.grad_is_bf16) {
            if (s.has_whole_vectors()) return widen_gradient((const uint16_t*)t_.grad + at, s.n);
            widen_rows(b_.g, (const uint16_t*)t_.grad + at, s);
        } else if (s.has_whole_vectors()) {
            g_ = (const float*)t_.grad + at;
        } else {
            copy_rows_in(b_.g, (const float*)t_.grad + at, s);
        }
        clear_rest(s, b_.g);
        vi largest{};  // as float bits, which puts infinity and NaN above the numbers
        for (int e = 0; e < s.n; e += kLanes) largest = max(largest, bits(magnitude(load<vf>(g_ + e))));
        return note_largest(largest);
    }

    // The largest magnitude of the gradient that was loaded.
    float gradient_peak() const { return from_bits(largest_); }

    // Elements of the loaded gradient that are not finite, or whose square is not.
    int64_t count_bad(int n) const {
        int64_t bad = 0;
        for (int e = 0; e < n; ++e) bad += (bits(g_[e]) & 0x7FFFFFFFu) > kLargestRoot;
        return bad;
    }

    // Targets that are not finite.
    int64_t count_lost(int n) const {
        int64_t bad = 0;
        for (int e = 0; e < n; ++e) bad += !std::isfinite(w_[e]);
        return bad;
    }

    const float* gradient() const { return g_; }
    const uint16_t* narrow_gradient() const { return narrow_g_; }  // bf16 that is read where it lies, or none

    void decode_weight(const Span& s) { decode(t_.weight, t_.cols, s, b_.codes(), b_.w); }

    // From the loaded gradient: w becomes the target W~, m and v the new moments; false if a target is not finite. With
    // `in_place` a plain fp32 weight is its own buffer, and buffer w what it was, or what its last chunk was.
    bool target(const Span& s, bool in_place = false) {
        in_place = in_place && t_.weight.kind == ML_FLOAT32 && stores_weight_;
        w_ = in_place ? (float*)t_.weight.values + s.row * t_.cols + s.col : b_.w;
        const Passage how = passage_of(s, in_place);
        weight_draw_.prepare(t_.weight.key, s.chunk, s.chunks());
        first_draw_.prepare(t_.first.key, s.chunk, s.chunks());
        second_draw_.prepare(t_.second.key, s.chunk, s.chunks());
        const bool by_chunks = how.function != nullptr;
        noted_weight_.peaks = by_chunks && how.weight != From::kPlace ? b_.weight_peaks : nullptr;
        noted_weight_.by_groups = how.weight == From::kGroups;
        noted_first_.peaks = by_chunks ? b_.first_peaks : nullptr;
        noted_second_.statistics = by_chunks && t_.second.kind == ML_LOG ? b_.second_statistics : nullptr;
        if (!in_place && how.weight == From::kBuffer) decode_weight(s);
        const bool decodes = how.moments == Moments::kBuffer;
        if (has_first_ && decodes) decode(t_.first, t_.cols, s, b_.codes(), b_.m);
        if (decodes || t_.second.kind == ML_FACTORED) decode_second(s);
        return apply_rule(s, by_chunks ? how.function : any_, in_place);
    }

    // The rule on what is decoded.
    bool apply_rule(const Span& s, RuleFunction rule, bool in_place) {
        const int at_a_time = rule == any_ ? kLanes : kChunk;
        stopped_ = -1;
        const Tile tile{g_, narrow_g_, w_, b_.m, b_.v, in_place ? b_.w : nullptr, &stopped_,
                        b_.weight_peaks, b_.first_peaks, b_.second_statistics,
                        ahead(s, t_.grad, t_.grad_is_bf16 ? 16 : 32, at_a_time),
                        in_place ? ahead(s, t_.weight.values, 32, at_a_time) : after(s, t_.weight, at_a_time),
                        after(s, t_.first, kChunk), after(s, t_.second, kChunk), &c_, &weight_levels_, &first_levels_};
        const bool finite = rule(t_, s, tile);
        for (float* buffer : {b_.w, b_.m, b_.v}) clear_rest(s, buffer);
        return finite;
    }

    void decode_second(const Span& s) {
        if (t_.second.kind == ML_FACTORED)
            factored_estimate(s);
        else if (t_.second.kind != ML_NONE)
            decode(t_.second, t_.cols, s, b_.codes(), b_.v);
    }

  private:
    friend class Phases;

    // Of a weight that was stepped where it lies: so many elements from element `at` of the span, as they were.
    void put_back(int64_t at, int64_t n) {
        if (w_ != b_.w) copy_floats(w_ + at, b_.w, (int)n);
    }

    // Spans of one length go the same way.
    const Passage& passage_of(const Span& s, bool in_place) {
        const int kind = 4 * s.length + 2 * in_place + (narrow_g_ != nullptr);
        if (kind != passage_kind_) {
            passage_ = passage(t_, c_, s, narrow_g_ != nullptr, in_place, inject_);
            passage_kind_ = kind;
        }
        return passage_;
    }

    static Workspace& arranged(Workspace& work, const MlTask& task) {
        work.arrange(std::max(unit_length(task), rows_together(task) * pitch(task)));
        return work;
    }

    uint64_t chunk(int64_t row, int64_t col) const {
        return (uint64_t)((t_.first_row + row) * chunks_per_row(t_) + col / kChunk);
    }

    bool note_largest(vi float_bits) {
        largest_ = (uint32_t)horizontal_max(float_bits);
        return largest_ <= kLargestRoot;
    }

    // Whole vectors of a bf16 gradient, checked as they pass.
    bool widen_gradient(const uint16_t* in, int n) {
        vi largest{};
        for (int e = 0; e < n; e += kLanes) {
            const vf g = load_bf16(in + e);
            store(b_.g + e, g);
            largest = max(largest, bits(magnitude(g)));
        }
        return note_largest(largest);
    }

    // A master copy loses nothing, so its visible code is simply the nearest.
    static Draw draw(const MlStorage& s, uint64_t* words) {
        const bool plain = s.kind == ML_NONE || s.kind == ML_FLOAT32 || s.kind == ML_FACTORED;
        const bool master = is_scaled(s) && s.values;
        return {plain || master || s.rounding == ML_NEAREST ? nullptr : words};
    }

    // Of a weight that is stepped where it lies.
    NextSpan next_span(const Span& s) const {
        if (w_ == b_.w || t_.grad_is_bf16) return {};
        const int64_t end = (s.row * t_.cols + s.col + s.count()) * 4 + Upcoming::kAhead;
        return {(const char*)t_.grad + end, (const char*)t_.weight.values + end};
    }

    // A gradient or a weight that lies in place, as far ahead as it is asked for.
    Upcoming ahead(const Span& s, const void* start, int bits, int elements) const {
        return {(const char*)start + (s.row * t_.cols + s.col) * bits / 8 + Upcoming::kAhead, elements * bits / 8};
    }

    // Arrays are contiguous across rows, so what follows a span is what the next one reads. Of what is not stored so, nothing:
    // a request for what is at no address is a walk through the page tables, every time.
    Upcoming after(const Span& s, const MlStorage& stored, int elements) const {
        if (stored.kind == ML_NONE || stored.kind == ML_FACTORED) return {(const char*)t_.grad, 0};
        const bool has_codes = is_scaled(stored) && !stored.values;
        const int bits = has_codes ? stored.bits : stored.kind == ML_BFLOAT16 ? 16 : 32;
        const void* const start = has_codes ? stored.codes : stored.values;
        return {(const char*)start + (s.row * t_.cols + s.col + s.count()) * bits / 8, elements * bits / 8};
    }

    // row_i / mean(row) * col_j
    void factored_estimate(const Span& s) {
        int64_t row = s.row;
        for (int start = 0; start < s.n; start += s.pitch, ++row) {
            const int64_t matrix = row / t_.matrix_rows;
            const float mean = mean_rows_[matrix], ratio = mean > 0.0f ? t_.second.row[row] / mean : 0.0f;
            const float* col = t_.second.col + matrix * t_.cols + s.col;
            for (int e = 0; e < s.length; ++e) b_.v[start + e] = ratio * col[e];
        }
        clear_rest(s, b_.v);
    }

    // Rounds and stores the target and the new moments. Metadata is a long chain of dependent operations: each is begun
    // ahead of something that need not wait for it.
    void finish(const Span& s, const Known& known) {
        const bool stores_second = t_.second.kind != ML_NONE && t_.second.kind != ML_FACTORED;
        const bool by_chunks =
            stores_second && !known.second && are_log_chunks(t_.second, s, noted_second_.statistics, second_draw_);
        if (by_chunks) fresh_log_chunks(t_.second, s, b_.v, noted_second_.statistics, b_.second_blocks);
        if (stores_weight_) round_weight(s, known.weight ? Blocks(*known.weight) : weight_blocks(s, false), false);
        Blocks of_first;
        if (stores_first_) of_first = moment_blocks(t_.first, s, b_.m, noted_first_, known.first, b_.first_blocks);
        NextSpan next = next_span(s);
        if (by_chunks) {
            encode_log_chunks(t_.second, s, b_.v, second_draw_, b_.second_blocks, next);
            if (next.gradient) next.pass(s.chunks());
        } else if (stores_second) {
            encode(t_.second, t_.cols, s, b_.v, second_draw_,
                   moment_blocks(t_.second, s, b_.v, noted_second_, known.second, b_.blocks), b_.codes());
        }
        if (stores_first_) encode(t_.first, t_.cols, s, b_.m, first_draw_, of_first, b_.codes(), {}, false, next);
    }

    // Stores the target (unless `dry`), and injects what rounding lost into the first moment.
    void round_weight(const Span& s, const Blocks& blocks, bool dry) {
        const MlStorage& weight = t_.weight;
        Injection inject = inject_ ? Injection{b_.m, splat(t_.inject)} : Injection{};
        if (inject && noted_first_.peaks) {
            if (is_scaled(weight) && !weight.values) {
                inject.peaks = b_.first_peaks;
                std::fill_n(b_.first_peaks, s.chunks(), vf{});
            } else {
                noted_first_.peaks = nullptr;  // plain weights do not note them
            }
        }
        encode(weight, t_.cols, s, w_, weight_draw_, blocks, b_.codes(), inject, dry);
        if (inject) clear_rest(s, b_.m);
        if (inject && t_.first.kind == ML_FLOAT32) saturate(b_.m, s.n);
    }

    // What an injection may carry past the largest finite number stops there, as in every other format.
    static void saturate(float* x, int n) {
        const vf largest = splat(kLargest);
        for (int e = 0; e < n; e += kLanes) store(x + e, min(max(load<vf>(x + e), -largest), largest));
    }

    // The weight's scales under its policy; stored, unless `dry`.
    Blocks weight_blocks(const Span& s, bool dry) {
        const MlStorage& weight = t_.weight;
        if (!is_scaled(weight)) return {};
        const int64_t first = metadata_index(weight, s);
        scale_blocks(weight, s, b_.w, noted_weight_, b_.blocks, dry, [&](vf peaks, int at, int count) {
            const vf held = read_scales(weight, s.row, first + at, count);
            return next_scale(weight, t_.scale_policy, peaks, held, scale_unit(weight, s.row));
        });
        return b_.blocks;
    }

    // The metadata of a moment's blocks: what is known of it, or new and stored.
    Blocks moment_blocks(const MlStorage& moment, const Span& s, const float* x, const Noted& noted, const Metadata* known,
                         BlockArrays& fresh) {
        if (known) return *known;
        if (is_scaled(moment)) fresh_blocks(moment, s, x, noted, fresh);
        return fresh;
    }

    // --- a row that is one tile and does not fit into the buffers ---------------------------------------------

    template <class F>
    void for_each_part(int64_t row, int64_t col, int64_t n, F&& f) {
        for (int64_t e = 0; e < n; e += kMaxSpan) f(span(row, col + e, n - e < kMaxSpan ? n - e : kMaxSpan));
    }

    static bool is_long(const MlStorage& s) { return is_scaled(s) && s.block > kMaxSpan; }

    int64_t step_long(int64_t row, int64_t col, int64_t n) {
        int64_t bad = 0;
        for_each_part(row, col, n, [&](const Span& s) { bad += load_gradient(s) ? 0 : count_bad(s.n); });
        if (bad) return bad;

        Metadata weight, first, second;
        Known known{weight_scale_};
        if (!known.weight && is_long(t_.weight)) {
            Summary summary(t_.weight, n);
            for_each_part(row, col, n, [&](const Span& s) {
                bad += retarget(s) ? 0 : count_lost(s.n);
                summary.add(b_.w, s.n);
            });
            if (bad) return bad;
            const float held = read_scale(t_.weight, row, row * t_.weight.blocks_per_row);
            const float peak = summary.largest();
            weight = scaled_block(t_.weight, next_scale(t_.weight, t_.scale_policy, peak, held, 1.0f), peak);
            known.weight = &weight;
        }
        if (is_long(t_.first) || is_long(t_.second)) {
            Summary of_first(t_.first, n), of_second(t_.second, n);
            for_each_part(row, col, n, [&](const Span& s) {
                bad += retarget(s) ? 0 : count_lost(s.n);
                if (bad) return;
                round_weight_dry(s, known.weight);
                if (is_long(t_.first)) of_first.add(b_.m, s.n);
                if (is_long(t_.second)) of_second.add(b_.v, s.n);
            });
            if (bad) return bad;
            if (is_long(t_.first)) first = of_first.fresh(), known.first = &first;
            if (is_long(t_.second)) second = of_second.fresh(), known.second = &second;
        }
        for_each_part(row, col, n, [&](const Span& s) { retarget(s), finish(s, known); });
        // Written last: until here the row was decoded under the metadata it had.
        if (known.weight == &weight) write_metadata(t_.weight, row, row, weight);
        if (known.first && stores_first_) write_metadata(t_.first, row, row, first);
        if (known.second) write_metadata(t_.second, row, row, second);
        return 0;
    }

    bool retarget(const Span& s) {
        load_gradient(s);
        return target(s);
    }

    void round_weight_dry(const Span& s, const Metadata* known) {
        round_weight(s, known ? Blocks(*known) : weight_blocks(s, true), true);
    }

    MlTask& t_;
    Workspace& b_;
    const Scalars c_;
    const Table weight_levels_ = code_levels(t_.weight), first_levels_ = code_levels(t_.first);
    Passage passage_;
    int passage_kind_ = -1;
    const float* g_ = nullptr;  // the loaded gradient and the target: in the workspace, or where they are stored
    const uint16_t* narrow_g_ = nullptr;  // of a bf16 gradient that is read there, instead of g_
    float* w_ = nullptr;
    uint32_t largest_ = 0;  // float bits of the loaded gradient's largest magnitude
    const Metadata* weight_scale_;
    const float* mean_rows_;
    const bool surveyed_;
    const bool has_first_, inject_;
    const bool stores_weight_, stores_first_;
    const RuleFunction any_;
    const Draw weight_draw_, first_draw_, second_draw_;
    Noted noted_weight_, noted_first_, noted_second_;  // of the span whose target is known
    int stopped_ = -1;  // likewise: the chunk that the rule stopped at, or -1 if it did not
};

}  // namespace MASTERLESS_ISA
}  // namespace masterless
