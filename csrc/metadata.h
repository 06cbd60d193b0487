// What is known of blocks when they are encoded, and where what rounding loses goes.
#pragma once

#include "log_code.h"
#include "span.h"

namespace masterless {
inline namespace MASTERLESS_ISA {

// What is known of some blocks, number by number: what is computed for a vector of them is stored as one.
struct Blocks {
    const float *scale = nullptr, *inverse = nullptr;
    const int32_t* known = nullptr;
    const LogBlock* log = nullptr;
};

struct BlockArrays {
    static constexpr int kLength = kMaxBlocks + kLanes;  // whole vectors from any block on
    alignas(64) float scale[kLength], inverse[kLength];
    int32_t known[kLength];
    LogBlock log[kLength];

    operator Blocks() const { return {scale, inverse, known, log}; }
};

struct Metadata {  // of one block
    static constexpr int32_t kFits = 1;   // no number of the block lies beyond the outermost levels
    static constexpr int32_t kPlain = 2;  // the scale has plain units (`Units`)
    float scale = 0.0f;
    float inverse = 0.0f;  // 1 / scale, on the finest grid
    int32_t known = 0;     // kFits, kPlain
    LogBlock log;

    operator Blocks() const { return {&scale, &inverse, &known, &log}; }
};

// `scale` for numbers up to `absmax`.
inline Metadata scaled_block(const MlStorage& s, float scale, float absmax) {
    Metadata block;
    block.scale = scale;
    block.inverse = 1.0f / (scale * (1.0f / (float)(1 << s.hidden)));
    block.known = (absmax <= scale * s.max_level ? Metadata::kFits : 0) | (Units::are_plain(scale) ? Metadata::kPlain : 0);
    return block;
}

// Where what rounding loses goes: moment += (number - what was stored) * share, element by element.
struct Injection {
    float* moment = nullptr;  // null: it is dropped
    vf share{};
    vf* peaks = nullptr;  // the largest magnitudes of the moment in every chunk of the span, raised from zero; or null

    explicit operator bool() const { return moment != nullptr; }

    Injection from(int e) const { return {moment ? moment + e : nullptr, share}; }

    vf operator()(int e, vf lost) const {
        const vf sum = fma(lost, share, load<vf>(moment + e));
        store(moment + e, sum);
        return sum;
    }
};

}  // namespace MASTERLESS_ISA
}  // namespace masterless
