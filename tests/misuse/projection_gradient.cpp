// expect: constraints not satisfied
// The gradient of projected attention, by a projection of one's own that has none.
#include <attn/attention/linformer_backward.hpp>

/// Every other token.
struct every_other {
    attn::index_t size(attn::index_t, attn::index_t tokens) const { return tokens / 2; }
    attn::kernel::token_range range(attn::index_t, attn::index_t row, attn::index_t) const { return {2 * row, 2 * row + 1}; }
    template <attn::Scalar>
    std::size_t workspace_bytes(attn::index_t, attn::index_t) const {
        return 0;
    }
    void check(const attn::projection_context&) const {}
    void check_apart(const attn::output_memory&) const {}
    template <attn::Scalar T>
    void project(const attn::kernel::token_rows<T>& x, attn::index_t, attn::index_t first, attn::index_t count, const attn::row_block<T>& to,
                 attn::detail::scratch&) const {
        for (attn::index_t r = 0; r < count; ++r)
            for (attn::index_t c = 0; c < x.channels; ++c) to.data[r * to.row_stride + c] = x(2 * (first + r), c);
    }
};

int main() {
    attn::tensor<float> x({1, 1, 4, 8}), out(x.shape()), rows({1, 1, 4, 1}), of_x(x.shape());
    const attn::inputs<float> in{x, x, x};
    const attn::linformer_attention own{.key_projection = every_other{}};
    attn::attend(own, in, attn::outputs<float>{out, rows});
#ifdef ATTN_MISUSE
    attn::backward(own, in, {out, rows}, {x}, {{of_x}});
#else
    const attn::linformer_attention op{.key_projection = attn::identity_projection{}};
    attn::attend(op, in, attn::outputs<float>{out, rows});
    attn::backward(op, in, {out, rows}, {x}, {{of_x}});
#endif
}
