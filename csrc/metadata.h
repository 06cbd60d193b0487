// What is known of blocks when they are encoded, and where what rounding loses goes.
#pragma once

#include "log_code.h"

namespace masterless {
inline namespace MASTERLESS_ISA {

struct Metadata {  // of one block
    float scale = 0.0f;
    float inverse = 0.0f;  // 1 / scale, on the finest grid
    bool fits = false;      // it is known that no number of the block lies beyond the outermost levels
    bool is_plain = false;  // the scale has plain units
    LogBlock log;
};

// `scale` for numbers up to `absmax`.
inline Metadata scaled_block(const MlStorage& s, float scale, float absmax) {
    Metadata block;
    block.scale = scale;
    block.inverse = 1.0f / (scale * (1.0f / (float)(1 << s.hidden)));
    block.fits = absmax <= scale * s.max_level, block.is_plain = Units::are_plain(scale);
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
        const vf sum = load<vf>(moment + e) + lost * share;
        store(moment + e, sum);
        return sum;
    }
};

}  // namespace MASTERLESS_ISA
}  // namespace masterless
