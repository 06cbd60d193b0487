// Random bits as a pure function of a counter: `rounding.dither` of the specification.
//
// Contract: element e of chunk c gets the upper 16 bits of mix(a + e * W) + b, where (a, b) are the two halves of
// SplitMix64(key, c). No state, so threads, shards and order do not show.
#pragma once

#include "simd.h"

namespace masterless {
inline namespace MASTERLESS_ISA {

constexpr int kChunk = 128;  // elements packed together, and numbered together by the random bits
constexpr uint32_t kWeyl = 0x18701E9Bu, kMultiplier = 0xCDF7CC2Bu;

// 32 random bits an element, of which the upper 16 are used, kLanes elements of a chunk after the other.
class ChunkRandom {
  public:
    ChunkRandom(uint64_t key, uint64_t chunk) {
        uint64_t z = key + (chunk + 1) * 0x9E3779B97F4A7C15u;
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
        z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
        z ^= z >> 31;
        counter_ = (uint32_t)z + (vu)lane_numbers() * kWeyl;
        offset_ = splat((uint32_t)(z >> 32));
    }

    vu next() {
        const vu x = counter_;
        counter_ += kLanes * kWeyl;
        return (x ^ (x >> 12)) * kMultiplier + offset_;
    }

  private:
    vu counter_, offset_;
};

// What stochastic rounding compares a fraction with, (u + 1/2) / 2^16, in units of a power of two: multiplying by that is
// exact, and mostly costs nothing where the threshold is used.
constexpr float kThresholdUnit = kConvertsUnsigned ? 0x1p-32f : 0x1p-16f;
inline vf threshold(vu words) {
    return kConvertsUnsigned ? to_float((words & 0xFFFF0000u) | 0x8000u) : to_float((vi)(words >> 16)) + 0.5f;
}

// The integer u below 2^16 that a threshold was made of.
inline vu dither(vf threshold) { return (vu)to_int(threshold * (kThresholdUnit * 0x1p16f)); }

// Where the thresholds of one stored tensor go, one an element; nowhere if it is rounded to nearest.
struct Draw {
    uint64_t key = 0;
    float* thresholds = nullptr;
};

}  // namespace MASTERLESS_ISA
}  // namespace masterless
