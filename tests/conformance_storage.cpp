// Every registered operator on tensors that are stored in 16 bits: they are widened first, and the result is rounded last.
#include "catch.hpp"
#include "executors.hpp"
#include "layouts.hpp"

namespace attn::testing {

namespace {

using bits = std::uint16_t;

float widened(bits b, narrow_format format) {
    return format == narrow_format::half ? detail::widened<narrow_format::half>(b) : detail::widened<narrow_format::bfloat16>(b);
}
bits narrowed(float x, narrow_format format) {
    return format == narrow_format::half ? detail::narrowed<narrow_format::half>(x) : detail::narrowed<narrow_format::bfloat16>(x);
}

/// A tensor as it is stored, and what it is computed with.
struct stored_tensor {
    narrow_format format;
    tensor<float> wide;
    placed<float> as_floats;
    placed<bits> as_bits;

    /// The numbers of `from`, rounded; some of them subnormal ones of half.
    stored_tensor(tensor<float> from, narrow_format f, layout l) : format(f), wide(std::move(from)), as_floats(shape{}, l), as_bits(shape{}, l) {
        tensor<bits> stored(wide.shape());
        for (index_t e = 0; f != narrow_format::none && e < wide.shape().size(); ++e) {
            stored.data()[e] = narrowed(wide.data()[e] * (e % 7 == 3 ? 0x1p-18F : 1), f);
            wide.data()[e] = widened(stored.data()[e], f);
        }
        if (f == narrow_format::none) as_floats = placed<float>(wide, l);
        else as_bits = placed<bits>(stored, l);
    }
    stored_view<const float> view() {
        if (format == narrow_format::none) return as_floats.view();
        return {as_bits.view().data(), format, as_bits.view().shape(), as_bits.view().strides()};
    }
};

struct storage {
    narrow_format format;
    layout where;
};

std::string name_of(narrow_format f) { return f == narrow_format::none ? "float" : f == narrow_format::half ? "half" : "bfloat16"; }

/// q, k, v and out stored so, against floats.
template <Executor E>
void check_storage(const attention_case& c, const problem& p, const std::array<storage, 4>& s, E& executor) {
    INFO(c.name << ": " << describe(p));
    INFO("q " << name_of(s[0].format) << ", k " << name_of(s[1].format) << ", v " << name_of(s[2].format) << ", out " << name_of(s[3].format));
    INFO("layouts " << static_cast<int>(s[0].where) << static_cast<int>(s[1].where) << static_cast<int>(s[2].where) << static_cast<int>(s[3].where));
    const auto op = c.make<float>(p);
    auto numbers = random_given<float>(p);
    stored_tensor q(std::move(numbers.queries), s[0].format, s[0].where), k(std::move(numbers.keys), s[1].format, s[1].where),
        v(std::move(numbers.values), s[2].format, s[2].where);
    const auto expected = attend(*op, inputs<float>{q.wide, k.wide, v.wide, p.positions}, c.has_log_sum_exp);

    const auto format = s[3].format;
    placed<float> out(format == narrow_format::none ? expected.values.shape() : shape{}, s[3].where);
    placed<bits> narrow_out(format == narrow_format::none ? shape{} : expected.values.shape(), s[3].where);
    tensor<float> log_sum_exp(expected.log_sum_exp.shape());
    const auto view = narrow_out.view();
    const outputs<float> to{format == narrow_format::none ? stored_view<float>(out.view()) : stored_view<float>(view.data(), format, view.shape(), view.strides()),
                            c.has_log_sum_exp ? log_sum_exp.view() : tensor_view<float>()};
    workspace memory(op->narrow_workspace_bytes(p.shapes(), executor.concurrency()));
    std::ranges::fill(memory.bytes(), std::byte{0xff});
    op->attend({q.view(), k.view(), v.view(), p.positions}, to, execution(executor, memory));

    CHECK(same_bits(log_sum_exp, expected.log_sum_exp));
    if (format == narrow_format::none) {
        CHECK(same_bits(out.copy(), expected.values));
    } else {
        tensor<bits> rounded(expected.values.shape());
        for (index_t e = 0; e < rounded.shape().size(); ++e) rounded.data()[e] = narrowed(expected.values.data()[e], format);
        CHECK(same_bits(narrow_out.copy(), rounded));
    }
    CHECK((out.guards_intact() && narrow_out.guards_intact()));
    CHECK((q.as_bits.guards_intact() && k.as_bits.guards_intact() && v.as_bits.guards_intact()));
}

} // namespace

TEST_CASE("every operator: 16-bit tensors are widened first and rounded last", "[conformance][portable]") {
    std::mt19937 random(8);
    constexpr std::array formats{narrow_format::none, narrow_format::bfloat16, narrow_format::half};
    const auto any = [&] { return storage{formats[random() % 3], all_layouts[random() % all_layouts.size()].value}; };
    auto problems = sample_problems(12, 11);
    problems.push_back({1, 2, 2, 145, 257, 64, 64});
    problems.push_back({2, 4, 2, 33, 131, 17, 20});
    thread_pool pool(3);
    for_each_case(problems, [&](const auto& c, const problem& p) {
        sequential here;
        const auto each = [](narrow_format f) { return storage{f, layout::head_major}; };
        for (const auto f : {narrow_format::bfloat16, narrow_format::half}) check_storage(c, p, {each(f), each(f), each(f), each(f)}, here);
        check_storage(c, p, {any(), any(), any(), any()}, pool);
    });
}

} // namespace attn::testing
