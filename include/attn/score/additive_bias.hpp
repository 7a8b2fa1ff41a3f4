// A bias tensor, and Swin's relative position table as one.
#pragma once

#include "../core/output_memory.hpp"
#include "../core/tensor.hpp"
#include "score_function.hpp"

namespace attn::inline ATTN_INSTRUCTION_SET {

/// The bias that is left for one batch entry and head: bias(i, j) = rows(i - first_query, j - first_key) for absolute positions i and j. A
/// stride of 0 means the same bias for all queries, or keys. The call is on numbers: keys lie side by side in memory and queries in lanes,
/// so a kernel transposes tiles of the rows and treats a bias of -infinity as below.
template <Scalar T>
struct head_bias {
    stored_rows<const T> rows;
    index_t first_query, first_key;

    /// The bias of one pair.
    T bias(index_t query, index_t key) const { return rows(query - first_query, key - first_key); }

    /// score + bias; -infinity wherever the bias is, also for a score that is NaN or infinite.
    template <detail::ScoreNumber S>
    S operator()(S score, index_t query, index_t key) const {
        return detail::plus_bias(score, static_cast<S>(bias(query, key)));
    }
    friend constexpr bool operator==(const head_bias&, const head_bias&) = default;
};

/// A bias tensor: score + bias(b, h, i - first_query, j - first_key); -infinity hides key j from query i.
/// bias: (entries, heads or 1, queries or 1, keys or 1), any strides; an extent of 1 is the same for all, and batch entry b has entry
/// b mod entries: one for all, one for each, or those of an image's windows, image after image. Where T is float, it may be stored in 16
/// bits, and is widened as it is added. A view, so what it refers to outlives the attention operator.
/// first_query, first_key: the absolute positions of its row 0 and column 0, so that one tensor for a whole sequence also serves its
/// chunks: one number, or a view of some that are repeated as the entries are. Throws attention_error if the entries do not divide the
/// batch, if heads are another count than the inputs', if the rows or columns leave out a position that occurs, or if it has no memory.
/// More of them than needed is fine.
template <Scalar T>
struct additive_bias {
    static constexpr bool compares_positions = false;
    stored_view<const T> bias;
    per_batch first_query = 0;
    per_batch first_key = 0;

    /// The gradient of the bias, in its shape: summed over whatever it was repeated for.
    template <class U>
    struct gradients {
        tensor_view<U> bias = {}; ///< not wanted without memory
    };
    template <Scalar U>
    void check_gradients(const gradients<U>& wanted, const auto& check) const {
        check("wanted.score.bias", wanted.bias, bias.shape());
    }
    template <Scalar U>
    void find_gradients(const gradients<U>& wanted, const auto& sums) const {
        sums.of_table(wanted.bias, first_query, first_key);
    }

    constexpr head_bias<T> at(index_t batch, index_t head) const {
        const auto& s = bias.shape();
        const detail::table_place at(s, batch, head);
        const auto rows = bias.rows(at.entry, at.head);
        return {.rows = {rows.data, rows.format, s.tokens == 1 ? 0 : rows.row_stride, s.channels == 1 ? 0 : rows.channel_stride},
                .first_query = s.tokens == 1 ? 0 : first_query.repeated(batch),
                .first_key = s.channels == 1 ? 0 : first_key.repeated(batch)};
    }
    void check(const score_context& context) const {
        const auto& s = bias.shape();
        if (const auto problem = detail::problem_of(bias); !problem.empty()) context.refuse("additive_bias", problem);
        const auto name = [&] { return "additive_bias of shape " + to_string(s); };
        context.require_broadcast(s, name);
        context.for_each_entry(name, first_query, first_key, [&](const score_context& c, index_t b) {
            if (s.tokens != 1) c.require_covered(name, "query", first_query.repeated(b), s.tokens, c.first_query, c.end_query);
            if (s.channels != 1) c.require_covered(name, "key", first_key.repeated(b), s.channels, c.first_key, c.end_key);
        });
    }
    void check_apart(const output_memory& out) const {
        out.require_apart("the bias of the score", bias);
        out.require_apart("the bias's first_query", first_query);
        out.require_apart("the bias's first_key", first_key);
    }
};

/// Deduces an additive_bias of its tensor's scalar type; of a 16-bit one, float.
template <StoredTensor B, class... Others>
additive_bias(const B&, const Others&...) -> additive_bias<detail::computed_t<B>>;

namespace detail {

/// Where the pairs of a window's tokens are in a table of relative positions, (1, 1, (2 height - 1) (2 width - 1), heads).
template <Scalar T>
class window_offsets {
public:
    /// Throws shape_error unless the table is one of such a window, which a tensor can hold.
    window_offsets(std::string_view operation, std::string_view argument, const tensor_view<const T>& table, index_t height, index_t width)
        : heads_(table.shape().channels), height_(height), width_(width) {
        const auto& s = table.shape();
        check_view(operation, argument, table);
        check_shape<T>(operation, "the window", {.tokens = height, .channels = width});
        const auto across = 2 * width - 1, down = 2 * height - 1;
        if (height < 1 || width < 1 || s.batch != 1 || s.heads != 1 ||
            s.tokens != product(std::max<index_t>(down, 0), std::max<index_t>(across, 0)))
            detail::raise(shape_error(operation, argument, "has shape ", s, ", but a window of ", height, " x ", width, " needs (1, 1, ",
                                      down, " x ", across, ", heads)"));
    }
    shape bias_shape() const { return {1, heads_, height_ * width_, height_ * width_}; }
    /// Calls f(head, i, j, place in the table) for all pairs of tokens, in order.
    void for_each(const auto& f) const {
        for_each_number(bias_shape(), [&](index_t, index_t h, index_t i, index_t j) {
            const auto y = i / width_ - j / width_ + height_ - 1, x = i % width_ - j % width_ + width_ - 1;
            f(h, i, j, y * (2 * width_ - 1) + x);
        });
    }

private:
    index_t heads_, height_, width_;
};

} // namespace detail

/// The bias of a window of height x width tokens, row-major, from a table with a number for each head and relative position:
///     bias(0, h, i, j) = table[(y_i - y_j + height - 1) (2 width - 1) + (x_i - x_j + width - 1), h]
/// of shape (1, heads, height width, height width). table: (1, 1, (2 height - 1) (2 width - 1), heads), any strides: a checkpoint's
/// relative_position_bias_table. For additive_bias, which is how it takes part in attention. Throws shape_error for a table of another
/// shape or a window that no tensor can hold. Liu et al. 2021, "Swin Transformer: Hierarchical Vision Transformer using Shifted Windows",
/// and its code.
template <TensorLike V>
[[nodiscard]] tensor<detail::scalar_t<V>> window_bias(const V& table, index_t height, index_t width) {
    using T = detail::scalar_t<V>;
    const tensor_view<const T> from = table;
    const detail::window_offsets<T> offsets("window_bias", "table", from, height, width);
    tensor<T> bias(offsets.bias_shape());
    offsets.for_each([&](index_t h, index_t i, index_t j, index_t place) { bias(0, h, i, j) = from(0, 0, place, h); });
    return bias;
}

/// The gradient of a loss with respect to the table of a window_bias, from its gradient with respect to the bias, which is that of the
/// additive_bias (softmax_attention's wanted.score.bias):
///     of_table[p, h] = sum of of_bias(0, h, i, j) over the pairs i, j whose place in the table is p
/// in one order, summed in double. Shapes as of window_bias; both may have any strides. Throws shape_error for others, and if what is
/// written overlaps what is read.
template <TensorLike B, TensorLike V>
void window_bias_gradient(const B& of_bias, index_t height, index_t width, V&& of_table) {
    using T = detail::scalar_t<std::remove_cvref_t<V>>;
    const tensor_view<const T> from = of_bias;
    const tensor_view<T> to = of_table;
    const detail::window_offsets<T> offsets("window_bias_gradient", "of_table", to, height, width);
    detail::check_view("window_bias_gradient", "of_bias", from);
    if (from.shape() != offsets.bias_shape())
        detail::raise(
            shape_error("window_bias_gradient", "of_bias", "has shape ", from.shape(), ", but ", offsets.bias_shape(), " is needed"));
    output_memory("window_bias_gradient", "of_table", to).require_apart("of_bias", from);
    tensor<double> sums(to.shape());
    offsets.for_each(
        [&](index_t h, index_t i, index_t j, index_t place) { sums(0, 0, place, h) += static_cast<double>(from(0, h, i, j)); });
    for (index_t p = 0; p < to.shape().tokens; ++p)
        for (index_t h = 0; h < to.shape().channels; ++h) to(0, 0, p, h) = static_cast<T>(sums(0, 0, p, h));
}

} // namespace attn
