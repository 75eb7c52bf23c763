// A model's weight (plain, stored as in a file, or rounded) and the products of a rounded one.

#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "panels.h"
#include "products.h"
#include "team.h"

namespace {

using at::Tensor;

struct Matrix {
  Tensor weight;  // (rows, columns), or (E, rows, columns); bytes if stored or rounded
  std::optional<Tensor> bias;
  int64_t packed_rows = 0, packed_columns = 0;  // of a stored or rounded weight
  std::optional<panels::Layout> layout{};  // of a stored weight
  std::optional<Tensor> order{};           // (columns,) int32: which input each column multiplies
  // A plain weight whose products are not rounded to the model's dtype; it may be float32 itself.
  bool wide = false;

  bool plain() const { return !layout; }
  // Whether a plain weight has bfloat16 numbers, and its inputs and products are in float32.
  template <typename S>
  bool halved() const {
    return (std::is_same_v<S, float> || wide) && plain() && weight.scalar_type() == at::kBFloat16;
  }
  // Of a weight with several experts, the rows of all.
  int64_t rows() const { return plain() ? weight.numel() / weight.size(-1) : packed_rows; }
  int64_t columns() const { return plain() ? weight.size(-1) : packed_columns; }
  int64_t row_bytes() const {
    return layout ? layout->panel_bytes / panels::ROWS : columns() * weight.element_size();
  }
};

template <typename S>
const S* numbers(const Tensor& tensor) {
  return static_cast<const S*>(tensor.const_data_ptr());
}

template <typename S>
const S* numbers(const std::optional<Tensor>& tensor) {
  return tensor ? numbers<S>(*tensor) : nullptr;
}

// Raises a ValueError in Python. It must be called before threads start, because an exception that
// leaves a team of threads ends the process.
template <typename... Words>
void require(bool holds, const Words&... words) {
  if (!holds) throw std::invalid_argument(c10::str(words...));
}

template <typename S>
void check(const Tensor& tensor, at::IntArrayRef shape, const char* name) {
  constexpr auto dtype = c10::CppTypeToScalarType<S>::value;
  require(tensor.scalar_type() == dtype && tensor.sizes() == shape && tensor.is_contiguous() &&
              tensor.device().is_cpu(),
          name, " must be a contiguous ", dtype, " tensor of shape ", shape, " on the CPU, as when ",
          "the model was opened; got ", tensor.scalar_type(), " ", tensor.sizes(), " on ",
          tensor.device(), "; open the model again");
}

// The layout of the rows of a file (rows, bytes).
panels::Layout layout_of(const Tensor& rows, const std::string& format, int64_t columns,
                         int64_t group) {
  const panels::Layout layout = panels::layout_of(format, columns, group);
  const int64_t count = rows.dim() == 2 ? rows.size(0) : -1;
  check<uint8_t>(rows, {count, layout.row_bytes}, "a stored weight");
  return layout;
}

inline int64_t panels_of(int64_t rows) { return (rows + panels::ROWS - 1) / panels::ROWS; }
// The bytes that products read.
inline int64_t bytes_of(const panels::Layout& layout, int64_t rows) {
  return layout.format->panel ? panels_of(rows) * layout.panel_bytes : rows * layout.row_bytes;
}

// The rows of a file arranged in panels.
Tensor arranged(const Tensor& rows, const std::string& format, int64_t columns) {
  const panels::Layout layout = layout_of(rows, format, columns, 0);
  require(layout.format->arrange, format, " is not arranged in panels");
  const Tensor out = at::empty({bytes_of(layout, rows.size(0))}, at::kByte);
  const auto* from = numbers<uint8_t>(rows);
  auto* to = static_cast<uint8_t*>(out.data_ptr());
  const int64_t grain = 1 + (1 << 12) / layout.columns;
  at::parallel_for(0, panels_of(rows.size(0)), grain, [&](int64_t first, int64_t last) {
    for (int64_t panel = first; panel < last; ++panel) {
      const int64_t row = panel * panels::ROWS, count = std::min(panels::ROWS, rows.size(0) - row);
      layout.format->arrange(layout, from + row * layout.row_bytes, count,
                             to + panel * layout.panel_bytes);
    }
  });
  return out;
}

// A matrix of the bytes that products read: panels, or rows.
Matrix stored_matrix(Tensor bytes, std::optional<Tensor> bias, const std::string& format,
                     int64_t rows, int64_t columns, int64_t group, std::optional<Tensor> order) {
  const panels::Layout layout = panels::layout_of(format, columns, group);
  check<uint8_t>(bytes, {bytes_of(layout, rows)}, "a stored weight");
  Matrix made{bytes, bias, rows, columns, layout, order};
  if (!order) return made;
  check<int32_t>(*order, {columns}, "the order of columns");
  const int32_t* from = numbers<int32_t>(order);
  std::vector<bool> taken(columns);
  for (int64_t i = 0; i < columns; ++i) {
    require(from[i] >= 0 && from[i] < columns && !taken[from[i]], "columns are not in an order");
    taken[from[i]] = true;
  }
  return made;
}

// The rows of a file unpacked to float32 (rows, columns), their columns in the order of the inputs.
Tensor unpacked(const Tensor& rows, const std::string& format, int64_t columns, int64_t group,
                const std::optional<Tensor>& by) {
  const Tensor out = at::empty({rows.size(0), columns}, at::kFloat);
  auto* to = static_cast<float*>(out.data_ptr());
  const auto* from = numbers<uint8_t>(rows);
  const int32_t* order = numbers<int32_t>(by);
  const auto layout = layout_of(rows, format, columns, group);
  const int64_t grain = 1 + (1 << 16) / layout.columns;
  at::parallel_for(0, rows.size(0), grain, [&](int64_t first, int64_t last) {
    std::vector<float> made(layout.columns);
    for (int64_t row = first; row < last; ++row) {
      layout.format->unpack(layout, from + row * layout.row_bytes, made.data());
      for (int64_t i = 0; i < columns; ++i) to[row * columns + (order ? order[i] : i)] = made[i];
    }
  });
  return out;
}

// Some rows of a stored matrix times packed inputs. Rows count from the matrix's row `begin`;
// `weight` points to the first of `mine`, and `then` is read next.
template <typename S, typename O>
void stored_product(const Matrix& matrix, int64_t begin, Range mine, const uint8_t* weight,
                    const float* inputs, int64_t tokens, const uint8_t* then, O* out,
                    int64_t stride) {
  const S* bias = numbers<S>(matrix.bias);
  const auto write = [&](int64_t t, int64_t row, int64_t count, const float* sums) {
    ::finish(sums, bias ? bias + begin + row : nullptr, count, out + t * stride + row);
  };
  matrix.layout->format->multiply(*matrix.layout, weight, mine.first, mine.last, inputs, tokens,
                                  then, write);
}

}  // namespace
