// What an operator of one's own has beside the members that are misspelt here.
#pragma once

#include <attn/attention/attention.hpp>

struct small_operator {
    static constexpr std::string_view name = "small_operator";

    template <attn::Scalar T>
    void check(const attn::inputs<T>& in) const {
        attn::check_inputs(name, in);
    }
    attn::shape output_shape(const attn::input_shapes& s) const { return s.values; }
    template <attn::Scalar>
    std::size_t workspace_bytes(const attn::input_shapes&, attn::index_t) const {
        return 0;
    }
    template <attn::Scalar T>
    void forward(const attn::inputs<T>&, const attn::outputs<T>&, const attn::execution&) const {}
};
