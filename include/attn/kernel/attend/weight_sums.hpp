// The state of pointwise attention: sums of values whose weights are what their scores have become.
#pragma once

#include "softmax_state.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET::kernel {

/// For each row, over the keys seen so far, with scores x: o = unit sum x v, and l = 1, which nothing is divided by. A key whose score is
/// -infinity is not seen.
template <Scalar T>
struct weight_sums : softmax_state<T> {
    using lanes = simd::lanes<T>;

    /// Takes in scores[keys][rows], which are weights but for hidden keys, whose weight is 0. rows: whole registers.
    template <class E>
    const E* push(T* scores, index_t keys, index_t rows, const std::uint64_t*) {
        const lanes zero = T{0};
        for (T* at = scores; at < scores + keys * rows; at += lanes::size) {
            const auto x = lanes::load(at);
            select(x == lanes(this->hidden), zero, x).store(at);
        }
        std::fill_n(this->sum, rows, T{1});
        std::fill_n(this->factor, rows, T{1});
        return scores;
    }

    /// Joins the sums over two disjoint sets of keys: out = out_a + o_b.
    struct merge {
        lanes maximum, sum, a = T{1}, b = T{1};

        merge(lanes m_a, lanes l_a, lanes, lanes) : maximum(m_a), sum(l_a) {}
    };
};

} // namespace attn::kernel
