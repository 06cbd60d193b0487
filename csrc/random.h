// Random bits as a pure function of a counter: `rounding.dither` of the specification.
//
// Contract: element e of chunk c gets the upper 16 bits of mix(a + e * W) + b, where a is the lower half of
// SplitMix64(the weight's key, c), the same for all that is rounded of an element, and b the upper quarter of
// SplitMix64(the own key, c), in its place. No state, so threads, shards and order do not show.
#pragma once

#include "simd.h"

namespace masterless {
inline namespace MASTERLESS_ISA {

constexpr int kChunk = 128;  // elements packed together, and numbered together by the random bits
constexpr uint32_t kWeyl = 0x18701E9Bu, kMultiplier = 0xCDF7CC2Bu;

// SplitMix64 of key and chunk number.
inline uint64_t chunk_word(uint64_t key, uint64_t chunk) {
    uint64_t z = key + (chunk + 1) * 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

// The mixed words of a chunk, kLanes elements after the other: the upper 16 bits, and half a unit below them.
class ChunkRandom {
  public:
    explicit ChunkRandom(uint64_t word_of_weight) : counter_((uint32_t)word_of_weight + (vu)lane_numbers() * kWeyl) {}

    // Those of the elements that are `later` than the next ones.
    vu at(int later) const { return mixed(counter_ + (uint32_t)later * kWeyl); }

    void advance() { counter_ += kLanes * kWeyl; }

    vu next() {
        const vu word = at(0);
        advance();
        return word;
    }

  private:
    static vu mixed(vu x) { return (((x ^ (x >> 12)) * kMultiplier) & 0xFFFF0000u) | 0x8000u; }

    vu counter_;
};

// What one purpose adds to the mixed words of a chunk. It leaves the half unit alone. Where only signed integers become
// floats, 2^31 is added here, for nothing, and comes off below.
inline vu chunk_offset(uint64_t key, uint64_t chunk) {
    return splat(((uint32_t)(chunk_word(key, chunk) >> 48) << 16) + (kConvertsUnsigned ? 0 : 0x80000000u));
}

// What stochastic rounding compares a fraction with, (u + 1/2) / 2^16, in units of a power of two: multiplying by that is
// exact, and mostly costs nothing where the threshold is used.
constexpr float kThresholdUnit = 0x1p-32f;

// The random numbers of one stored tensor in one chunk; of a tensor that is rounded to nearest there are none.
struct ChunkDraw {
    const uint32_t* words = nullptr;  // mixed, of the chunk's elements
    vu offset{};

    vf threshold(int i) const {  // exact: of a word 17 bits count
        const vu word = load<vu>(words + i) + offset;
        return kConvertsUnsigned ? to_float(word) : to_float((vi)word) + 0x1p31f;
    }
};

// The integer u below 2^16 that a threshold was made of.
inline vu dither(vf threshold) { return (vu)to_int(threshold * (kThresholdUnit * 0x1p16f)); }

// The random numbers of one stored tensor in a span: its key, and the mixed words, which all tensors of an element share.
struct Draw {
    uint64_t key = 0;
    const uint32_t* words = nullptr;  // none: it is rounded to nearest

    explicit operator bool() const { return words != nullptr; }

    // Of the chunk with this number, from element e of the span on.
    ChunkDraw at(uint64_t chunk, int e) const { return {words + e, chunk_offset(key, chunk)}; }
};

}  // namespace MASTERLESS_ISA
}  // namespace masterless
