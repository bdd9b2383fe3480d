// SPDX-License-Identifier: Apache-2.0

#include "grouped_operands.h"

#include <torch/csrc/autograd/python_variable.h>

#include <array>
#include <string>
#include <utility>
#include <vector>

#include "../extensions.h"
#include "pybind.h"

namespace transformer_engine::pytorch {

namespace {

using Dims = std::array<size_t, 2>;

std::string text(const at::Tensor& t) {
  return c10::str(t.scalar_type(), " ", t.sizes(), " with strides ", t.strides(), " on ",
                  t.device());
}

std::string text(const Dims& dims) { return c10::str("[", dims[0], ", ", dims[1], "]"); }

std::string text(DType type) { return c10::toString(GetATenDType(type)); }

bool has_elements(const at::Tensor* t) { return t && t->defined() && t->numel() != 0; }

bool high_precision(DType type) {
  return type == DType::kFloat32 || type == DType::kFloat16 || type == DType::kBFloat16;
}

// cuBLAS adds in fp32: from two inputs of one type to that type or to fp32.
bool known_combination(DType A, DType B, DType D) {
  if (!high_precision(A) || !high_precision(B)) return true;  // scaled ones check themselves
  return A == B && (D == A || D == DType::kFloat32);
}

// A tensor that no kernel can take as a dense matrix is refused; empty ones are not read.
void check_contiguous(const char* name, const std::string& group, const at::Tensor* t) {
  NVTE_CHECK(!has_elements(t) || t->is_contiguous(), "Grouped GEMM: operand ", name, group,
             " must be contiguous, got ", text(*t));
}

// Fp8 and other tensors that the extension has a converter for.
bool is_quantized(PyObject* object) {
  for (const auto& converter : detail::custom_types_converters) {
    if (std::get<0>(converter)(object)) return true;
  }
  return false;
}

std::string of_group(size_t i) { return ", group " + std::to_string(i) + ","; }

// All memory of one call is on one device.
class OneDevice {
 public:
  void add(const char* name, const std::string& group, const at::Tensor* t) {
    if (!has_elements(t)) return;
    if (!device_) {
      device_ = t->device();
      first_ = name + group;
    }
    NVTE_CHECK(t->device() == *device_, "Grouped GEMM: operand ", name, group, " is on ",
               t->device().str(), ", but ", first_, " is on ", device_->str());
  }

 private:
  std::optional<at::Device> device_;
  std::string first_;
};

void check_count(const char* name, const GroupedOperand& operand, size_t groups) {
  const auto found = operand.count();
  NVTE_CHECK(!found || *found == groups, "Grouped GEMM: operand ", name, " has ", found.value_or(0),
             " groups, expected ", groups);
}

size_t number_of_groups(const GroupedOperand& A, const GroupedOperand& B, size_t splits) {
  if (A.count()) return *A.count();
  return B.count().value_or(splits);
}

}  // namespace

GroupedOperand::GroupedOperand(const std::vector<py::handle>& each) {
  init_extension();
  for (const auto& item : each) {
    const size_t i = tensors_.size();
    if (THPVariable_CheckExact(item.ptr()) ||
        (THPVariable_Check(item.ptr()) && !is_quantized(item.ptr()))) {
      tensors_.push_back(THPVariable_Unpack(item.ptr()));
    } else {
      NVTE_CHECK(!item.is_none(), "Grouped GEMM: group ", i, " of an operand is None");
      tensors_.emplace_back();
      quantized_.resize(each.size());
      quantized_[i] = py::reinterpret_borrow<py::object>(item);
    }
  }
}

GroupedOperand::GroupedOperand(std::vector<at::Tensor> each) : tensors_(std::move(each)) {}

bool GroupedOperand::load(py::handle source) {
  if (THPVariable_Check(source.ptr())) {
    NVTE_CHECK(THPVariable_CheckExact(source.ptr()),
               "Grouped GEMM: a packed operand must be a plain torch.Tensor, got ",
               Py_TYPE(source.ptr())->tp_name, "; hand over a list of its groups");
    packed_ = THPVariable_Unpack(source.ptr());
    return true;
  }
  if (!PySequence_Check(source.ptr()) || PyUnicode_Check(source.ptr())) return false;
  const auto items = py::reinterpret_steal<py::object>(PySequence_Fast(source.ptr(), "a sequence"));
  if (!items) throw py::error_already_set();
  std::vector<py::handle> each(PySequence_Fast_GET_SIZE(items.ptr()));
  for (size_t i = 0; i < each.size(); ++i) each[i] = PySequence_Fast_GET_ITEM(items.ptr(), i);
  *this = GroupedOperand(each);
  return true;
}

std::optional<size_t> GroupedOperand::count() const {
  if (!packed()) return tensors_.size();
  if (packed_.dim() == 3) return static_cast<size_t>(packed_.size(0));
  return std::nullopt;
}

const at::Tensor* GroupedOperand::plain(size_t i) const {
  if (packed()) return &packed_;
  return tensors_[i].defined() ? &tensors_[i] : nullptr;
}

std::vector<TensorWrapper> GroupedOperand::wrap(const char* name, size_t groups,
                                                const std::vector<int64_t>& splits) const {
  std::vector<TensorWrapper> wrapped;
  wrapped.reserve(groups);
  if (!packed()) {
    const auto none = py::none();
    for (size_t i = 0; i < groups; ++i) {
      if (const at::Tensor* t = plain(i)) {
        check_contiguous(name, of_group(i), t);
        wrapped.emplace_back(makeTransformerEngineTensor(*t));
      } else {
        wrapped.emplace_back(makeTransformerEngineTensor(quantized_[i], none));
      }
    }
    return wrapped;
  }
  NVTE_CHECK(packed_.dim() == 2 || packed_.dim() == 3, "Grouped GEMM: packed operand ", name,
             " must be [groups, rows, columns], or [rows, columns] with splits, got ",
             text(packed_));
  check_contiguous(name, ",", &packed_);
  const bool cut = packed_.dim() == 2;
  NVTE_CHECK(!cut || splits.size() == groups, "Grouped GEMM: packed operand ", name, " needs ",
             groups, " splits, got ", splits.size());
  const auto type = GetTransformerEngineDType(packed_.scalar_type());
  const size_t columns = packed_.size(-1);
  const size_t pitch = columns * packed_.element_size();
  const int64_t all = packed_.size(0);
  char* place = static_cast<char*>(packed_.data_ptr());
  int64_t row = 0;
  for (size_t i = 0; i < groups; ++i) {
    const int64_t rows = cut ? splits[i] : packed_.size(1);
    NVTE_CHECK(!cut || (rows >= 0 && rows <= all - row), "Grouped GEMM: packed operand ", name,
               of_group(i), " should have ", rows, " rows from row ", row, " on, but there are ",
               all, " rows: ", text(packed_));
    row += rows;
    wrapped.emplace_back(makeTransformerEngineTensor(
        place, std::vector<size_t>{static_cast<size_t>(rows), columns}, type));
    if (place) place += rows * pitch;
  }
  return wrapped;
}

py::object GroupedOperand::to_python() const {
  return packed() ? py::cast(packed_) : py::cast(tensors_);
}

GroupedGemmInputs check_grouped_gemm(const GroupedOperand& A, bool transa, const GroupedOperand& B,
                                     bool transb, const std::optional<GroupedOperand>& D,
                                     DType D_type, const std::vector<int64_t>& splits,
                                     const GroupedOperand& bias, DType bias_type,
                                     bool single_output, const GroupedOperand& pre_gelu, bool grad,
                                     const std::vector<at::Tensor>& workspace) {
  NVTE_CHECK(!workspace.empty(), "Grouped GEMM: no workspace");
  const size_t groups = number_of_groups(A, B, splits.size());
  for (const auto& [name, operand] : {std::pair{"A", &A}, {"B", &B}}) {
    check_count(name, *operand, groups);
  }
  const bool one_output = D && (single_output || D->packed());
  if (D && !one_output) check_count("D", *D, groups);
  NVTE_CHECK(!one_output || D->packed() || D->count() == 1, "Grouped GEMM: operand D has ",
             D->count().value_or(0), " tensors, expected one for all groups");
  for (const auto& [name, operand] : {std::pair{"bias", &bias}, {"pre_gelu_out", &pre_gelu}}) {
    NVTE_CHECK((operand->packed() ? static_cast<size_t>(operand->whole().size(0))
                                  : *operand->count()) == groups,
               "Grouped GEMM: operand ", name, " does not have ", groups, " groups");
    if (operand->packed()) check_contiguous(name, ",", &operand->whole());
  }

  GroupedGemmInputs inputs{A.wrap("A", groups, splits), B.wrap("B", groups, splits)};
  OneDevice device;
  size_t written = 0;
  for (size_t i = 0; i < groups; ++i) {
    const auto group = of_group(i);
    const TensorWrapper &a = inputs.A[i], &b = inputs.B[i];
    const Dims a_dims = get_2d_dims(a.shape()), b_dims = get_2d_dims(b.shape());
    const size_t inner = transa ? a_dims[1] : a_dims[0];
    NVTE_CHECK(inner == (transb ? b_dims[0] : b_dims[1]), "Grouped GEMM: operand B", group, " is ",
               text(b_dims), ", which does not go with A ", text(a_dims), " where transa=", transa,
               " and transb=", transb);
    const Dims d_dims{transb ? b_dims[1] : b_dims[0], transa ? a_dims[0] : a_dims[1]};
    const size_t size = d_dims[0] * d_dims[1];
    written += size;

    auto d_type = D_type;
    if (D && !one_output) {
      const at::Tensor* d = D->plain(i);
      NVTE_CHECK(d, "Grouped GEMM: operand D", group, " must be a plain tensor");
      check_contiguous("D", group, d);
      NVTE_CHECK(static_cast<size_t>(d->numel()) == size, "Grouped GEMM: operand D", group,
                 " must have the elements of ", text(d_dims), ", got ", text(*d));
      device.add("D", group, d);
      d_type = GetTransformerEngineDType(d->scalar_type());
    }
    if (a.numel() != 0 && b.numel() != 0) {
      NVTE_CHECK(known_combination(a.dtype(), b.dtype(), d_type),
                 "Grouped GEMM: there is no GEMM for the types of operands A, B and D", group,
                 " got ", text(a.dtype()), ", ", text(b.dtype()), " and ", text(d_type));
    }
    device.add("A", group, A.plain(i));
    device.add("B", group, B.plain(i));

    const size_t bias_size = grad ? b_dims[1] : d_dims[1];
    for (const auto& [name, operand, wanted] :
         {std::tuple{"bias", &bias, bias_size}, {"pre_gelu_out", &pre_gelu, size}}) {
      const at::Tensor* t = operand->plain(i);
      NVTE_CHECK(t, "Grouped GEMM: operand ", name, group, " must be a plain tensor");
      if (!has_elements(t)) continue;
      check_contiguous(name, group, t);
      const size_t found = operand->packed() ? t->numel() / groups : t->numel();
      NVTE_CHECK(found == wanted, "Grouped GEMM: operand ", name, group, " must have ", wanted,
                 " elements, got ", text(*t));
      NVTE_CHECK(GetTransformerEngineDType(t->scalar_type()) == bias_type, "Grouped GEMM: operand ",
                 name, group, " must be ", text(bias_type), ", got ", text(*t));
      device.add(name, group, t);
    }
  }

  if (one_output) {
    const at::Tensor& d = D->whole();
    NVTE_CHECK(d.defined(), "Grouped GEMM: operand D must be a plain tensor");
    check_contiguous("D", ", one for all groups,", &d);
    const size_t found = d.numel();
    // Rows after the last group are padding. Weight gradients have none.
    NVTE_CHECK(transb && D->packed() ? found == written : found >= written,
               "Grouped GEMM: operand D, one for all groups, must have ", written,
               " elements, got ", text(d));
    NVTE_CHECK(!has_elements(&d) || GetTransformerEngineDType(d.scalar_type()) == D_type,
               "Grouped GEMM: operand D, one for all groups, must be ", text(D_type), ", got ",
               text(d));
    device.add("D", ", one for all groups,", &d);
  }
  device.add("workspace", "", &workspace[0]);
  NVTE_CHECK(workspace[0].is_cuda(), "Grouped GEMM: operands must be on a CUDA device, not on ",
             workspace[0].device().str());
  return inputs;
}

std::optional<std::vector<at::Tensor>> te_general_grouped_gemm(
    std::vector<py::handle> A, bool transa, std::vector<py::handle> B, bool transb,
    std::optional<std::vector<at::Tensor>> D, DType D_type, std::vector<int64_t> m_splits,
    std::vector<at::Tensor> bias, DType bias_type, bool single_output,
    std::vector<at::Tensor> pre_gelu_out, bool grad, std::vector<at::Tensor> workspace,
    size_t workspaceSize, bool accumulate, bool use_split_accumulator, int math_sm_count) {
  std::optional<GroupedOperand> outputs;
  if (D) outputs.emplace(std::move(*D));
  grouped_gemm(A, transa, B, transb, std::move(outputs), D_type, std::move(m_splits), bias,
               bias_type, single_output, std::move(pre_gelu_out), grad, std::move(workspace),
               workspaceSize, accumulate, use_split_accumulator, math_sm_count);
  return bias;
}

std::vector<std::pair<int64_t, std::vector<size_t>>> grouped_operand_layout(
    const GroupedOperand& operand, const std::vector<int64_t>& splits) {
  const size_t groups = operand.count().value_or(splits.size());
  const auto wrapped = operand.wrap("operand", groups, splits);
  std::vector<std::pair<int64_t, std::vector<size_t>>> layout;
  for (const auto& each : wrapped) {
    const auto shape = each.shape();
    const auto* first = static_cast<const char*>(wrapped[0].dptr());
    layout.emplace_back(static_cast<const char*>(each.dptr()) - first,
                        std::vector<size_t>(shape.data, shape.data + shape.ndim));
  }
  return layout;
}

}  // namespace transformer_engine::pytorch
