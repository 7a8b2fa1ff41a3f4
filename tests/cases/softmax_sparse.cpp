// The papers' sparse patterns, and the rows of the pattern table that no other case has. Only where the whole suite runs: the kernel is
// the one of the other cases, and each pattern costs seconds of compiling.
#include "softmax_case.hpp"

#include "attn/attention/sparse_attention.hpp"
#include "attn/pattern/block_diagonal.hpp"
#include "attn/pattern/dilated_window.hpp"
#include "attn/pattern/prefix.hpp"
#include "attn/pattern/block_sparse.hpp"

namespace attn::testing {

using namespace pattern;

namespace {

/// w = s = sqrt(m), at which a Sparse Transformer costs O(m sqrt m).
index_t root(const problem& p) { return std::max<index_t>(1, std::lround(std::sqrt(static_cast<double>(p.keys)))); }

template <class Make>
registered pattern_case(std::string name, std::string cost, Make pattern) {
    return softmax_case(std::move(name), std::move(cost),
                        [pattern]<class T>(const problem& p) { return made{softmax_attention{.pattern = pattern(p)}}; });
}

} // namespace

static const auto strided_heads = pattern_case("sparse_strided_heads", "2 n (w + m / s) / 2 (d_k + d_v)",
                                               [](const problem& p) { return sparse_transformer_strided_heads(root(p), p.heads / 2); });

static const auto strided_union =
    pattern_case("sparse_strided", "2 n (w + m / s / 2) (d_k + d_v)", [](const problem& p) { return sparse_transformer_strided(root(p)); });

static const auto symmetric = pattern_case("sparse_symmetric", "2 n (2 w + m / s) (d_k + d_v)",
                                           [](const problem& p) { return sparse_transformer_symmetric(root(p), root(p)); });

static const auto fixed_heads = pattern_case("sparse_fixed_heads", "2 n (l / 2 + m c / l / 2) (d_k + d_v)", [](const problem& p) {
    return sparse_transformer_fixed_heads{.block = 2 * root(p), .width = std::max<index_t>(1, root(p) / 4), .sub_blocks = 2};
});

static const auto longformer_case =
    pattern_case("sparse_longformer", "2 n (2 w + 2 g) (d_k + d_v)", [](const problem& p) { return longformer(root(p) / 2, 3); });

static const auto dilated =
    pattern_case("sparse_dilated", "2 n (2 w + 1) (d_k + d_v)", [](const problem& p) { return dilated_window{root(p) / 2, 3}; });

static const auto diagonal =
    pattern_case("sparse_block_diagonal", "2 n b (d_k + d_v)", [](const problem& p) { return block_diagonal{root(p)}; });

static const auto prefixed = pattern_case("softmax_prefix", "2 n (m / 2 + p) (d_k + d_v)", [](const problem& p) {
    return prefix{p.batch == 0 ? 0 : std::max<index_t>(0, p.positions.first_key[0] + p.keys / 4)};
});

/// Every second block of keys, another half in every head.
static const auto blocks = softmax_case(
    "sparse_blocks", "2 n m / 2 (d_k + d_v)",
    []<class T>(const problem& p) {
        const auto size = std::max<index_t>(1, root(p) / 2);
        const auto last_query = [&](index_t b) { return p.positions.first_query[b] + p.queries; };
        const auto last_key = [&](index_t b) { return p.positions.first_key[b] + p.keys; };
        index_t queries = 1, keys = 1;
        for (index_t b = 0; b < p.batch; ++b) queries = std::max(queries, last_query(b)), keys = std::max(keys, last_key(b));
        auto table = std::make_shared<tensor<bool>>(shape{1, p.heads, (queries + size - 1) / size, (keys + size - 1) / size});
        for (index_t h = 0; h < p.heads; ++h)
            for (index_t row = 0; row < table->shape().tokens; ++row)
                for (index_t column = 0; column < table->shape().channels; ++column)
                    (*table)(0, h, row, column) = (h + row + column) % 2 == 0;
        return made{softmax_attention{.pattern = block_sparse{table->view(), size}}, table};
    },
    [](const problem& p) {
        for (index_t b = 0; b < p.batch; ++b)
            for (const index_t first : {p.positions.first_query[b], p.positions.first_key[b]})
                if (first < 0 || first > 10'000) return false; // a table of all blocks from 0
        return true;
    });

} // namespace attn::testing
