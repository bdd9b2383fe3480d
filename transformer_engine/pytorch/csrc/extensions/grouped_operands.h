// SPDX-License-Identifier: Apache-2.0
//
// Operands of a grouped GEMM: one tensor a group, or one packed tensor for all.
//
// A packed operand is a plain tensor. [groups, rows, columns] holds one matrix a
// group; [rows, columns] is cut along its rows by the splits. Groups of a packed
// operand are pointers into its memory: no tensor is made for any of them.

#ifndef TRANSFORMER_ENGINE_PYTORCH_CSRC_EXTENSIONS_GROUPED_OPERANDS_H_
#define TRANSFORMER_ENGINE_PYTORCH_CSRC_EXTENSIONS_GROUPED_OPERANDS_H_

#include <optional>
#include <string>
#include <vector>

#include "../common.h"

namespace transformer_engine::pytorch {

class GroupedOperand {
 public:
  GroupedOperand() = default;
  // Not explicit: C++ callers hand over the vectors they always did.
  GroupedOperand(const std::vector<py::handle>& each);  // NOLINT(runtime/explicit)
  GroupedOperand(std::vector<at::Tensor> each);         // NOLINT(runtime/explicit)
  // A torch.Tensor is packed; any other sequence is a list. False for everything else.
  bool load(py::handle source);

  bool packed() const { return packed_.defined(); }
  // The packed tensor, or the only one of a list (single_output).
  const at::Tensor& whole() const { return packed() ? packed_ : tensors_.at(0); }
  // Groups of a list, or matrices of a packed tensor; nullopt where splits cut it.
  std::optional<size_t> count() const;
  // Group i as a plain tensor; of a packed [groups, ...] operand a view.
  at::Tensor operator[](size_t i) const { return packed() ? packed_.select(0, i) : tensors_[i]; }
  // Null where group i is a quantized tensor.
  const at::Tensor* plain(size_t i) const;
  // All groups, checked: layout, splits, contiguity.
  std::vector<TensorWrapper> wrap(const char* name, size_t groups,
                                  const std::vector<int64_t>& splits) const;
  // What a Python caller gets back: the packed tensor, or a list.
  py::object to_python() const;

 private:
  at::Tensor packed_;
  std::vector<at::Tensor> tensors_;    // undefined where the group is quantized
  std::vector<py::object> quantized_;  // empty where all are plain
};

struct GroupedGemmInputs {
  std::vector<TensorWrapper> A, B;
};

/*! Check every operand of a grouped GEMM, before anything is written or launched.
 *
 *  An error names the operand and the group, what was found and what was expected.
 *  Returns the inputs, ready for the GEMM.
 */
GroupedGemmInputs check_grouped_gemm(const GroupedOperand& A, bool transa, const GroupedOperand& B,
                                     bool transb, const std::optional<GroupedOperand>& D,
                                     DType D_type, const std::vector<int64_t>& splits,
                                     const GroupedOperand& bias, DType bias_type,
                                     bool single_output, const GroupedOperand& pre_gelu, bool grad,
                                     const std::vector<at::Tensor>& workspace);

// The binding of te_general_grouped_gemm; see gemm.cpp.
py::object grouped_gemm(GroupedOperand A, bool transa, GroupedOperand B, bool transb,
                        std::optional<GroupedOperand> D, DType D_type,
                        std::vector<int64_t> m_splits, GroupedOperand bias, DType bias_type,
                        bool single_output, GroupedOperand pre_gelu_out, bool grad,
                        std::vector<at::Tensor> workspace, size_t workspaceSize, bool accumulate,
                        bool use_split_accumulator, int math_sm_count);

// (offset in bytes, shape) of each group of an operand, as the GEMM would see it.
std::vector<std::pair<int64_t, std::vector<size_t>>> grouped_operand_layout(
    const GroupedOperand& operand, const std::vector<int64_t>& splits);

}  // namespace transformer_engine::pytorch

namespace pybind11::detail {

template <>
struct type_caster<transformer_engine::pytorch::GroupedOperand> {
  PYBIND11_TYPE_CASTER(transformer_engine::pytorch::GroupedOperand,
                       const_name("Union[torch.Tensor, Sequence[torch.Tensor]]"));
  bool load(handle source, bool) { return value.load(source); }
};

}  // namespace pybind11::detail

#endif  // TRANSFORMER_ENGINE_PYTORCH_CSRC_EXTENSIONS_GROUPED_OPERANDS_H_
