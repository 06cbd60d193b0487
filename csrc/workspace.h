// The working memory of a thread: buffers for a span, and what is noted of it.
#pragma once

#include "codec.h"

namespace masterless {
inline namespace MASTERLESS_ISA {

constexpr int kStrip = 1024;  // elements that are only looked at or converted: they stay in the L1 cache
constexpr int kMaxChunks = kMaxSpan / kChunk;  // of a long row, and of short ones that are stepped together

// The buffers of a thread. They lie as close together as the spans of a task allow: far apart, even if they all fit, some
// push others out of the L1 cache (AMD finds a way in it by a hash of the address).
struct Workspace {
    float *g, *w, *m, *v;
    uint8_t *visible, *hidden;
    BlockArrays blocks, first_blocks;
    LogBlocks second_blocks[kMaxChunks / kRows];
    vf weight_peaks[kMaxSpan / kGroup], first_peaks[kMaxChunks];
    LogChunk second_statistics[kMaxChunks];
    uint64_t weight_words[kMaxChunks], first_words[kMaxChunks], second_words[kMaxChunks];

    explicit Workspace(int64_t longest = kMaxSpan) { arrange(longest); }

    // For spans of up to so many elements.
    void arrange(int64_t longest) {
        const int64_t n = longest < kMaxSpan ? (longest + 15) / 16 * 16 : kMaxSpan, pitch = 4 * n + kOdd;
        uint8_t* at = memory_;
        for (float** buffer : {&g, &w, &m, &v}) *buffer = (float*)at, at += pitch;
        visible = at, at += 2 * n + 64;
        hidden = at;
    }

    Codes codes() { return {visible, hidden}; }

  private:
    // Keeps what is read a little later in one buffer from the lower address bits of what is stored in another.
    static constexpr int kOdd = 9 * 64;
    alignas(64) uint8_t memory_[4 * (4 * kMaxSpan + kOdd) + 3 * kMaxSpan + 128];
};

}  // namespace MASTERLESS_ISA
}  // namespace masterless
