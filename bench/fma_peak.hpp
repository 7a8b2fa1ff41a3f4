// The most floating-point operations a second that this machine does with the compiled instruction set: what shares are shares of.
#pragma once

#include "attn/parallel/thread_pool.hpp"

namespace attn::bench {

/// Flops a second of multiply-adds on registers, on all threads of the pool at once: the best of a few bursts of about half a
/// millisecond. Clock and neighbours change within seconds, so it is measured beside every timing, not once.
template <Scalar T>
double fma_peak(thread_pool& threads);

/// The compiler that made this program, "gcc 12.2.0".
std::string compiler();
/// The instruction set it was compiled for, by xsimd's name, and the bits of its registers: "avx512bw, 512 bits".
std::string instruction_set();
/// Bits of a register of that instruction set.
int register_bits();

} // namespace attn::bench
