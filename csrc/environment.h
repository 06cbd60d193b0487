// The floating-point environment of the calling thread: to nearest, and denormal numbers are numbers.
//
// A program may have asked for denormals to be flushed to zero (torch.set_flush_denormal), which is a property of each
// thread: results would depend on which thread computed them. Every parallel region of the kernel starts with one of these.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace masterless {
inline namespace MASTERLESS_ISA {

class FloatEnvironment {
  public:
    FloatEnvironment() : before_(read()) { write(kDefault); }
    ~FloatEnvironment() { write(before_); }
    FloatEnvironment(const FloatEnvironment&) = delete;
    FloatEnvironment& operator=(const FloatEnvironment&) = delete;

  private:
#if defined(__x86_64__)
    using Word = uint32_t;
    static constexpr Word kDefault = 0x1F80;  // all exceptions masked
    static Word read() { return _mm_getcsr(); }
    static void write(Word word) { _mm_setcsr(word); }
#elif defined(__aarch64__)
    using Word = uint64_t;
    static constexpr Word kDefault = 0;
    static Word read() {
        Word word;
        __asm__ volatile("mrs %0, fpcr" : "=r"(word));
        return word;
    }
    static void write(Word word) { __asm__ volatile("msr fpcr, %0" : : "r"(word)); }
#else
    using Word = int;
    static constexpr Word kDefault = 0;
    static Word read() { return 0; }
    static void write(Word) {}
#endif

    Word before_;
};

}  // namespace MASTERLESS_ISA
}  // namespace masterless
