// Codes of 1 to 8 bits to bytes and back, a chunk of 128 at a time: `packing.py` of the specification.
//
// Contract: a code is cut into planes of 8, 4, 2 and 1 bits, highest bits first; a plane of p bits over n codes is
// h = ceil(n * p / 8) bytes, byte i holding codes i, i + h, i + 2h, ... from its lowest bits up. Unused bits are zero.
// Unpacked codes are one byte each; the loops have constant trip counts for full chunks and become plain vector code.
#pragma once

#include "random.h"

namespace masterless {
inline namespace MASTERLESS_ISA {

template <int P>
inline int plane_bytes(int n) {
    return (n * P + 7) / 8;
}

template <int P, bool kFirst>
inline void unpack_plane(const uint8_t* data, int n, int low, uint8_t* codes) {
    constexpr int kPerByte = 8 / P, kMask = (1 << P) - 1;
    const int height = plane_bytes<P>(n);
    for (int j = 0; j < kPerByte; ++j) {
        const int count = n - j * height < height ? n - j * height : height;
        uint8_t* out = codes + j * height;
        for (int i = 0; i < count; ++i) {
            const uint8_t code = (uint8_t)(((data[i] >> (j * P)) & kMask) << low);
            out[i] = kFirst ? code : (uint8_t)(out[i] | code);
        }
    }
}

template <int P>
inline void pack_plane(const uint8_t* codes, int n, int low, uint8_t* data) {
    constexpr int kPerByte = 8 / P, kMask = (1 << P) - 1;
    const int height = plane_bytes<P>(n);
    for (int j = 0; j < kPerByte; ++j) {
        const int count = n - j * height < height ? n - j * height : height;
        const uint8_t* in = codes + j * height;
        for (int i = 0; i < count; ++i) {
            const uint8_t code = (uint8_t)(((in[i] >> low) & kMask) << (j * P));
            data[i] = j == 0 ? code : (uint8_t)(data[i] | code);
        }
    }
}

template <bool kFirst>
inline const uint8_t* unpack_planes_of(int width, const uint8_t* data, int n, int low, uint8_t* codes) {
    switch (width) {
        case 8: unpack_plane<8, kFirst>(data, n, low, codes); return data + plane_bytes<8>(n);
        case 4: unpack_plane<4, kFirst>(data, n, low, codes); return data + plane_bytes<4>(n);
        case 2: unpack_plane<2, kFirst>(data, n, low, codes); return data + plane_bytes<2>(n);
        default: unpack_plane<1, kFirst>(data, n, low, codes); return data + plane_bytes<1>(n);
    }
}

inline uint8_t* pack_plane_of(int width, const uint8_t* codes, int n, int low, uint8_t* data) {
    switch (width) {
        case 8: pack_plane<8>(codes, n, low, data); return data + plane_bytes<8>(n);
        case 4: pack_plane<4>(codes, n, low, data); return data + plane_bytes<4>(n);
        case 2: pack_plane<2>(codes, n, low, data); return data + plane_bytes<2>(n);
        default: pack_plane<1>(codes, n, low, data); return data + plane_bytes<1>(n);
    }
}

// The n codes of one chunk (n < 128 at the end of a row) to one byte each; returns the end of the chunk's bytes.
inline const uint8_t* unpack_chunk(const uint8_t* data, int n, int bits, uint8_t* codes) {
    bool first = true;
    for (int width = 8, low = bits; width >= 1; width /= 2) {
        if (low < width) continue;
        low -= width;
        data = first ? unpack_planes_of<true>(width, data, n, low, codes)
                     : unpack_planes_of<false>(width, data, n, low, codes);
        first = false;
    }
    return data;
}

inline uint8_t* pack_chunk(const uint8_t* codes, int n, int bits, uint8_t* data) {
    for (int width = 8, low = bits; width >= 1; width /= 2) {
        if (low < width) continue;
        low -= width;
        data = pack_plane_of(width, codes, n, low, data);
    }
    return data;
}

// A run of `n` codes that starts at a chunk.
inline void unpack(const uint8_t* data, int n, int bits, uint8_t* codes) {
    for (int e = 0; e < n; e += kChunk) data = n - e >= kChunk ? unpack_chunk(data, kChunk, bits, codes + e)
                                                               : unpack_chunk(data, n - e, bits, codes + e);
}

inline void pack(const uint8_t* codes, int n, int bits, uint8_t* data) {
    for (int e = 0; e < n; e += kChunk) data = n - e >= kChunk ? pack_chunk(codes + e, kChunk, bits, data)
                                                               : pack_chunk(codes + e, n - e, bits, data);
}

// Bytes that the whole chunks before element `e` (a multiple of a chunk) take.
inline int64_t packed_offset(int64_t e, int bits) { return e / 8 * bits; }

}  // namespace MASTERLESS_ISA
}  // namespace masterless
