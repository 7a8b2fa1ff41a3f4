#include "softmax_case.hpp"

#include "attn/pattern/causal.hpp"
#include "attn/pattern/local.hpp"
#include "attn/pattern/strided.hpp"
#include "attn/pattern/lengths.hpp"
#include "attn/pattern/tiles.hpp"

namespace attn::testing {

using namespace pattern;

/// A random mask, different in every batch entry and head.
static const auto mask_case = softmax_case("softmax_mask", "2 n m (d_k + d_v)", []<class T>(const problem& p) {
    tensor<bool> mask({p.batch, p.heads, p.queries, p.keys});
    std::mt19937 random(11);
    std::generate_n(mask.data(), mask.shape().size(), [&] { return random() % 4 != 0; });
    return made{softmax_attention{.pattern = tiles(mask.view(), p.positions.first_query[0], p.positions.first_key[0])}};
}, [](const problem& p) { return p.positions.first_query.count() == 0 && p.positions.first_key.count() == 0; });

/// Keys past a length of their own in every batch entry are hidden. Of several entries the first sees none at all.
static const auto lengths_case = softmax_case("softmax_lengths", "2 n length (d_k + d_v)", []<class T>(const problem& p) {
    auto length = std::make_shared<std::vector<index_t>>();
    for (index_t b = 0; b < p.batch; ++b) {
        const auto present = p.batch == 1 ? 2 * p.keys / 3 : p.keys * b / (p.batch - 1);
        length->push_back(std::max<index_t>(0, p.positions.first_key[b] + present));
    }
    return made{softmax_attention{.pattern = lengths{*length}}, length};
});

/// A union of a window and a stride runs as two passes whose results merge.
static const auto union_case = softmax_case("softmax_local_strided", "2 n (w + m / s) (d_k + d_v)", []<class T>(const problem&) {
    return made{softmax_attention{.pattern = causal{} & (local{11} | strided{8})}};
});

} // namespace attn::testing
