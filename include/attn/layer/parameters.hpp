// Named tensors: the weights of layers, in memory.
#pragma once

#include "linear.hpp"
#include "named_tensor.hpp"

#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace attn::inline ATTN_INSTRUCTION_SET {

/// A tensor that is missing or is not as it should be, by name; or a file that is not what it says.
struct parameter_error : attention_error {
    static constexpr error_kind kind = error_kind::parameter;
    using attention_error::attention_error;
};

/// Tensors of any number of dimensions, row-major, by name: "layers.0.attn.q.weight". Layers refer to them, so that several may share one;
/// adding others, or moving the whole, leaves them where they are. Read from a file by read_safetensors. As views of up to four dimensions
/// (batch, heads, tokens, channels), fewer than four are the last ones: a matrix (outputs, inputs) is (1, 1, outputs, inputs). They hold
/// float, double or 16-bit numbers; linears of float read 16-bit weights as they lie, and what else is asked for in another type is
/// converted. What a file has of other types, such as a counter of whole numbers, is kept as bytes for whoever asks for these, and written
/// back.
class parameters {
public:
    using extents = std::vector<index_t>;
    /// A size that is not asked for: whatever the tensor has.
    static constexpr index_t as_stored = -1;

    /// None. They are moved, and never copied.
    parameters() = default;
    /// Takes what another holds, where it lies.
    parameters(parameters&&) = default;
    /// Takes what another holds, where it lies.
    parameters& operator=(parameters&&) = default;

    /// A new tensor of zeros, to be filled. Throws parameter_error if there is one of that name.
    template <Storage S>
    tensor_view<S> add(const std::string& name, const extents& size) {
        if constexpr (Narrow<S>) {
            const auto stored = add(name, size, narrow_format_of<S>);
            return {static_cast<S*>(stored.data()), stored.shape(), stored.strides()};
        } else {
            const auto s = shape_of(name, size);
            auto& e = new_entry(name, size);
            e.is_double = std::same_as<S, double>;
            e.numbers<S>() = tensor<S>(s);
            return e.numbers<S>().view();
        }
    }
    /// A new tensor of numbers from which a training may begin: of several dimensions, random ones within 1 / sqrt(numbers of an output),
    /// all equally likely, as PyTorch's linears begin; of one dimension, ones, as norms do, or zeros if the name ends in "bias". For a seed
    /// and a name they are the same on every machine. Throws parameter_error as add.
    template <Scalar T>
    tensor_view<T> add_initial(const std::string& name, const extents& size, std::uint64_t seed = 0) {
        const auto added = add<T>(name, size);
        const auto numbers = elements<T>(name);
        if (size.size() < 2) {
            if (!name.ends_with("bias")) std::ranges::fill(numbers, T{1});
            return added;
        }
        for (const char letter : name)
            seed = (seed ^ static_cast<unsigned char>(letter)) * 0x100000001b3; // FNV-1a's: another seed for each name
        const auto limit = 1 / std::sqrt(static_cast<double>(std::max<index_t>(1, added.shape().size() / std::max<index_t>(1, size[0]))));
        detail::random_numbers uniform{seed};
        std::ranges::generate(numbers, [&] { return static_cast<T>((2 * uniform() - 1) * limit); });
        return added;
    }
    /// Adds a tensor of a format that the program learns as it runs: none for float.
    stored_view<float> add(const std::string& name, const extents& size, narrow_format format) {
        if (format == narrow_format::none) return add<float>(name, size);
        const auto s = shape_of(name, size);
        auto& e = new_entry(name, size);
        e.format = format;
        e.bits = tensor<std::uint16_t>(s);
        return {e.bits.data(), format, e.bits.shape(), e.bits.view().strides()};
    }
    /// A tensor of numbers that nothing here computes with: the name of their type, as the file has it, and their bytes. Throws
    /// parameter_error if there is one of that name.
    void add_bytes(const std::string& name, const extents& size, const std::string& type, std::string bytes) {
        static_cast<void>(shape_of(name, size));
        auto& e = new_entry(name, size);
        e.other_type = type;
        e.other_bytes = std::move(bytes);
    }
    /// The tensor of that name. If it holds numbers of another type they are converted, once; not by two threads at a time.
    /// Throws parameter_error if it is missing or of another size, or kept as bytes.
    template <Scalar T>
    tensor_view<const T> get(const std::string& name, const extents& size) & {
        if (auto& e = find(entries_, name); e.size == size && !e.holds<T>() && e.other_type.empty()) e.convert<T>();
        return std::as_const(*this).get<T>(name, size);
    }
    /// The tensor of that name, of parameters that are const and so convert nothing; by any number of threads. Throws parameter_error as
    /// the get that converts, and if its numbers are of another type, and were never asked for in this one.
    template <Scalar T>
    tensor_view<const T> get(const std::string& name, const extents& size) const& {
        const auto& e = find(entries_, name);
        if (!e.other_type.empty()) refuse(name, "holds numbers of type ", e.other_type, ", which are kept as bytes");
        check_size(name, e, size);
        if (!e.holds<T>()) refuse(name, "holds ", e.type(), ", and const parameters convert nothing");
        return e.numbers<T>().view();
    }
    /// The tensor of that name, as it lies if T is float and it is stored in 16 bits; else as get has it.
    template <Scalar T>
    stored_view<const T> get_stored(const std::string& name, const extents& size) & {
        return stored_of<T>(*this, name, size);
    }
    /// The tensor of that name as it lies, or as get of const parameters has it, which converts nothing.
    template <Scalar T>
    stored_view<const T> get_stored(const std::string& name, const extents& size) const& {
        return stored_of<T>(*this, name, size);
    }
    /// The tensor of that name and one dimension, of as many numbers as it has if no count is given.
    template <Scalar T>
    std::span<const T> get_vector(const std::string& name, index_t count = as_stored) & {
        return vector_of<T>(*this, name, count);
    }
    /// The tensor of that name and one dimension, as get of const parameters has it, which converts nothing.
    template <Scalar T>
    std::span<const T> get_vector(const std::string& name, index_t count = as_stored) const& {
        return vector_of<T>(*this, name, count);
    }
    /// The linear whose weight (outputs, inputs) is `name`.weight, as get_stored has it, and whose bias (outputs), if it has one, is
    /// `name`.bias; or `name`_weight and `name`_bias, as PyTorch calls in_proj's. Dimensions behind the outputs are joined: a convolution's
    /// (outputs, channels, height, width) is a linear of patches. Throws parameter_error as get, and if the sizes are not those that are
    /// given, if any are.
    template <Scalar T>
    linear<T> get_linear(const std::string& name, index_t outputs = as_stored, index_t inputs = as_stored) & {
        return linear_of<T>(*this, name, outputs, inputs);
    }
    /// The linear of that name, as get_linear has it, but of const parameters, which convert nothing.
    template <Scalar T>
    linear<T> get_linear(const std::string& name, index_t outputs = as_stored, index_t inputs = as_stored) const& {
        return linear_of<T>(*this, name, outputs, inputs);
    }
    /// The tensor of that name, to be written, such as a weight that an optimiser moves. Throws parameter_error if it is missing, was added
    /// as numbers of another type, or has been converted to one, which would not follow.
    template <Scalar T>
    tensor_view<T> writable(const std::string& name) & {
        using other = std::conditional_t<std::same_as<T, double>, float, double>;
        auto& e = find(entries_, name);
        if (!e.was_added_as<T>()) refuse(name, "holds ", e.type(), ", and is written as that alone");
        if (e.numbers<other>().data()) refuse(name, "has been converted to another type, which would not follow what is written");
        return e.numbers<T>().view();
    }
    /// All numbers of the tensor of that name, in their order, to be written: see writable.
    template <Scalar T>
    std::span<T> elements(const std::string& name) & {
        const auto all = writable<T>(name);
        return {all.data(), static_cast<std::size_t>(all.shape().size())};
    }
    // What they give lies in the parameters, so these are to have a name.
    template <Scalar T>
    void get(const std::string&, const extents&) const&& = delete;
    template <Scalar T>
    void get_stored(const std::string&, const extents&) const&& = delete;
    template <Scalar T>
    void get_vector(const std::string&, index_t = as_stored) const&& = delete;
    template <Scalar T>
    void get_linear(const std::string&, index_t = as_stored, index_t = as_stored) const&& = delete;
    template <Scalar T>
    void writable(const std::string&) const&& = delete;
    template <Scalar T>
    void elements(const std::string&) const&& = delete;

    /// Whether there is a tensor of that name.
    bool contains(const std::string& name) const { return entries_.contains(name); }
    /// Whether there is the weight of a linear of that name, as get_linear finds it.
    bool contains_linear(const std::string& name) const { return contains(name + ".weight") || contains(name + "_weight"); }
    /// What get_linear looks up for a linear of that name: the names of its weight and its bias.
    struct linear_tensors {
        std::string weight; ///< of the weight
        std::string bias;   ///< of the bias, which may be missing
    };
    /// The names of the tensors of a linear; `name`.weight and `name`.bias if it is missing.
    linear_tensors names_of_linear(const std::string& name) const {
        const std::string end = contains_linear(name) && !contains(name + ".weight") ? "_" : ".";
        return {name + end + "weight", name + end + "bias"};
    }
    /// The extents of a tensor.
    const extents& size(const std::string& name) const { return find(entries_, name).size; }
    /// Whether the tensor was added as double.
    bool is_double(const std::string& name) const { return find(entries_, name).is_double; }
    /// The 16-bit format in which the tensor was added; none if as float or double.
    narrow_format format(const std::string& name) const { return find(entries_, name).format; }
    /// The type of a tensor that is kept as bytes; "" of the others.
    const std::string& other_type(const std::string& name) const { return find(entries_, name).other_type; }
    /// The bytes of a tensor that is kept so; none of the others.
    std::string_view other_bytes(const std::string& name) const { return find(entries_, name).other_bytes; }
    /// Texts by name, which a file has beside its tensors: safetensors' "__metadata__", such as {"format", "pt"}.
    std::map<std::string, std::string>& metadata() { return metadata_; }
    /// Texts by name, which a file has beside its tensors, to be read.
    const std::map<std::string, std::string>& metadata() const { return metadata_; }
    /// All names, sorted.
    std::vector<std::string> names() const {
        std::vector<std::string> result;
        for (const auto& [name, e] : entries_) result.push_back(name);
        return result;
    }

    /// Extents as text: "(64, 32)".
    static std::string text_of(const extents& size) {
        std::string text = "(";
        for (std::size_t i = 0; i < size.size(); ++i) text.append(i > 0 ? ", " : "").append(std::to_string(size[i]));
        return text.append(")");
    }
    /// Throws parameter_error about the tensor.
    [[noreturn, gnu::cold]] static void refuse(std::string_view name, const auto&... problem) {
        detail::raise(parameter_error(detail::joined({"tensor \"", name, "\" ", detail::piece_of(problem)...})));
    }

private:
    static void check_size(const std::string& name, const detail::named_tensor& e, const extents& needed) {
        if (e.size != needed) refuse(name, "has shape ", text_of(e.size), ", but ", text_of(needed), " is needed");
    }
    template <Scalar T>
    static stored_view<const T> stored_of(auto& self, const std::string& name, const extents& size) {
        if constexpr (std::same_as<T, float>)
            if (const auto& e = find(self.entries_, name); e.format != narrow_format::none) {
                check_size(name, e, size);
                return e.stored();
            }
        return self.template get<T>(name, size);
    }
    template <Scalar T>
    static std::span<const T> vector_of(auto& self, const std::string& name, index_t count) {
        if (count == as_stored) {
            const auto& size = find(self.entries_, name).size;
            if (size.size() != 1) refuse(name, "has shape ", text_of(size), ", but one dimension is needed");
            count = size[0];
        }
        return {self.template get<T>(name, {count}).data(), static_cast<std::size_t>(count)};
    }
    template <Scalar T>
    static linear<T> linear_of(auto& self, const std::string& name, index_t outputs, index_t inputs) {
        const auto [weight, bias] = self.names_of_linear(name);
        const auto size = find(self.entries_, weight).size;
        const auto needed = [](index_t extent) { return extent == as_stored ? std::string("any") : std::to_string(extent); };
        index_t joined = 1;
        for (std::size_t i = 1; i < size.size(); ++i) joined = detail::product(joined, size[i]);
        if (size.size() < 2 || (outputs != as_stored && outputs != size[0]) || (inputs != as_stored && inputs != joined))
            refuse(weight, "has shape ", text_of(size), ", but (", needed(outputs), ", ", needed(inputs), ") is needed");
        const auto stored = stored_of<T>(self, weight, size);
        const shape rows{1, 1, size[0], joined};
        linear<T> l{{stored.data(), stored.format(), rows, {rows.size(), rows.size(), joined, 1}}};
        if (self.contains(bias)) l.bias = vector_of<T>(self, bias, size[0]);
        return l;
    }
    detail::named_tensor& new_entry(const std::string& name, const extents& size) {
        const auto [at, is_new] = entries_.try_emplace(name);
        if (!is_new) refuse(name, "is there already");
        at->second.size = size;
        return at->second;
    }
    /// The entry of that name, const as the entries are.
    static auto find(auto& entries, const std::string& name) -> decltype((entries.begin()->second)) {
        const auto at = entries.find(name);
        if (at == entries.end()) refuse(name, "is missing");
        return at->second;
    }
    /// More than four dimensions are joined in front.
    static shape shape_of(const std::string& name, const extents& size) {
        shape s{1, 1, 1, 1};
        index_t* const last_first[] = {&s.channels, &s.tokens, &s.heads, &s.batch};
        for (std::size_t i = 0; i < size.size(); ++i) {
            const auto extent = size[size.size() - 1 - i];
            if (extent < 0) refuse(name, "has the negative shape ", text_of(size));
            auto& joined = *last_first[std::min<std::size_t>(i, 3)];
            joined = detail::product(joined, extent);
        }
        if (!detail::problem_of(s, sizeof(double)).empty())
            refuse(name, "has shape ", text_of(size), ", which is more than ", detail::max_bytes_text);
        return s;
    }

    std::map<std::string, detail::named_tensor> entries_;
    std::map<std::string, std::string> metadata_;
};

} // namespace attn
