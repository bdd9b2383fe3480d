# SPDX-License-Identifier: Apache-2.0
"""What makes a grouped tensor usable as a parameter: assignment, copies, optimizers.

The values lie either in the packed buffers of :class:`GroupedTensorStorage`,
of which ``quantized_tensors`` are views, or, where there is no packed layout
for the quantizer, in ``quantized_tensors`` themselves.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch

from ..quantized_tensor import QuantizedTensor

__all__ = ["PackedParameterMixin", "dispatch", "is_quantized", "plain"]

_BUFFERS = (
    "rowwise_data", "columnwise_data", "scale_inv", "columnwise_scale_inv", "amax",
    "columnwise_amax", "scale", "first_dims", "last_dims", "tensor_offsets",
)  # fmt: skip
_FACTS = (
    "num_tensors", "quantizer", "tensor_shapes", "fake_dtype", "offsets", "scale_inv_offsets",
    "columnwise_scale_inv_offsets", "logical_shape", "_with_gemm_swizzled_scales",
    "row_scaled_nvfp4", "nvfp4_use_4over6", "nvfp4_e4m3_max",
)  # fmt: skip


def _shell(cls: type, shape, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A contiguous ``cls`` without memory of its own."""
    return torch.Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype, device=device)


def _place(tensor: torch.Tensor) -> torch.device:
    """Where torch takes the tensor to be, whatever its class says."""
    return torch._C.TensorBase.device.__get__(tensor)


def _on(member: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The same quantized memory in a wrapper that says where it is."""
    facts = {"shape": member.shape, "dtype": member.dtype, "device": device}
    return type(member)(**{**member.get_metadata(), **facts})


class PackedParameterMixin:
    """For ``GroupedTensor``."""

    @classmethod
    def from_members(cls, members: Sequence[torch.Tensor], quantizer) -> torch.Tensor:
        """Group quantized tensors that keep memory and quantizers of their own.

        Parameters
        ----------
        members : sequence of QuantizedTensor
            Of one shape ``[out, in]`` and one dtype.
        quantizer : Quantizer
            The first member's.

        Returns
        -------
        GroupedTensor
            ``[len(members), out, in]``, without a packed buffer.
        """
        lead = members[0]
        rows, columns = lead.shape
        grouped = _shell(cls, (len(members), rows, columns), lead.dtype, lead.device)
        cls._initialize_storage_fields(
            grouped,
            (len(members) * rows, columns),
            lead.dtype,
            num_tensors=len(members),
            shapes=[(rows, columns)] * len(members),
            quantizer=quantizer,
        )
        grouped.quantized_tensors = list(members)
        return grouped

    @property
    def members(self) -> Sequence[torch.Tensor]:
        """One tensor an expert, which shares the memory of this one."""
        if self.quantizer is None:
            return self.rowwise_data.view(self.shape).unbind()
        if self.quantized_tensors is None:
            self.quantized_tensors = self.split_into_quantized_tensors()
        return self.quantized_tensors

    def _is_packed(self) -> bool:
        return self.rowwise_data is not None or self.columnwise_data is not None

    def _set_data(self, tensor: torch.Tensor) -> None:
        """``param.data = tensor``: the kernels read that memory from now on.

        Quantized parameters take the values instead.

        Raises
        ------
        RuntimeError
            Where the tensor's size or layout does not fit.
        """
        grouped = isinstance(tensor, PackedParameterMixin)
        fits = tensor.shape == self.shape if grouped else tensor.numel() == self.numel()
        if not fits or not tensor.is_contiguous():
            raise RuntimeError(
                f"A grouped parameter of shape {tuple(self.shape)} can take the data of a "
                f"contiguous tensor with {self.numel()} elements, not of one with shape "
                f"{tuple(tensor.shape)} and strides {tensor.stride()}."
            )
        if grouped:
            for name in (*_BUFFERS, *_FACTS, "quantized_tensors"):
                setattr(self, name, getattr(tensor, name))
        elif self.quantizer is not None:
            values = tensor.detach().to(self.device).view(self.shape)
            if self._is_packed():
                self.quantize_(values)
            else:
                for member, value in zip(self.members, values.unbind()):
                    member.data = value
            self._set_nominal_dtype(tensor.dtype)
            return
        else:
            self.rowwise_data = tensor.detach().view(-1)
            self.fake_dtype = tensor.dtype
            self.quantized_tensors = self.split_into_quantized_tensors()
        if self.dtype != tensor.dtype or self.device != tensor.device:
            shell = _shell(type(self), self.shape, tensor.dtype, tensor.device)
            torch.Tensor.data.__set__(self, shell)  # pylint: disable=unnecessary-dunder-call

    def _set_nominal_dtype(self, dtype: torch.dtype) -> None:
        """Make ``dtype`` the one that quantized values dequantize to."""
        if self.dtype == dtype:
            return
        shell = _shell(type(self), self.shape, dtype, self.device)
        torch.Tensor.data.__set__(self, shell)  # pylint: disable=unnecessary-dunder-call
        self.fake_dtype = dtype
        if self._is_packed():
            self.quantized_tensors = self._members_like(self)

    data = property(lambda self: torch.Tensor.data.__get__(self), _set_data)

    def quantize_(self, tensor: torch.Tensor, *, noop_flag=None) -> torch.Tensor:
        """Overwrite the values with those of ``tensor``, ``[groups, ...]`` or flat."""
        values = tensor.detach().reshape(self.shape)
        with torch.no_grad():
            if self.quantizer is None:
                memory = plain(self)
                if memory.data_ptr() != values.data_ptr():
                    memory.copy_(values)
                # Called below autograd, where nothing counts; saved views of it must notice.
                torch.autograd.graph.increment_version(self.rowwise_data)
            else:
                for member, value in zip(self.members, values.unbind()):
                    member.quantize_(value, noop_flag=noop_flag)
        return self

    def dequantize(self, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The values as a plain tensor ``[groups, ...]``; a view where they lie in one."""
        dtype = self.dtype if dtype is None else dtype
        if self.quantizer is None:
            return self.rowwise_data.view(self.shape).to(dtype)
        return torch.stack([member.dequantize(dtype=dtype) for member in self.members])

    def _members_like(self, source: torch.Tensor) -> list[torch.Tensor]:
        """Views of the packed buffers, of which those hold that ``source``'s members hold."""
        made = self.split_into_quantized_tensors()
        if made and _place(made[0]) != self.device:
            made = [_on(member, self.device) for member in made]
        for new, old in zip(made, source.members):
            for name, value in vars(old).items():
                # A transpose, for one, may have been dropped, or be marked as stale.
                if value is None or isinstance(value, bool):
                    setattr(new, name, value)
        return made

    def _copied(self, device: torch.device, buffer: Callable, member: Callable) -> torch.Tensor:
        """A copy on ``device``, by functions that copy a packed buffer and a lone member."""
        out = _shell(type(self), self.shape, self.dtype, device)
        for name in _FACTS:
            setattr(out, name, copy.copy(getattr(self, name)))
        if self.quantizer is not None:
            out.quantizer = self.quantizer.copy()
        for name in _BUFFERS:
            value = getattr(self, name)
            setattr(out, name, None if value is None else buffer(value))
        if self._is_packed():
            out.quantized_tensors = out._members_like(self)
        else:
            out.quantized_tensors = [member(each) for each in self.members]
        return out

    def __deepcopy__(self, memo: dict) -> torch.Tensor:
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError("Only grouped tensors that are leaves can be deep-copied.")
        out = self._copied(
            self.device,
            lambda tensor: copy.deepcopy(tensor, memo),
            lambda member: copy.deepcopy(member, memo),
        )
        memo[id(self)] = out
        out.requires_grad_(self.requires_grad)
        if self.quantizer is not None:
            # torch copies .grad and attributes with every tensor but a plain parameter.
            out.grad = copy.deepcopy(self.grad, memo)
            for name in vars(self).keys() - {*_BUFFERS, *_FACTS, "quantized_tensors"}:
                setattr(out, name, copy.deepcopy(getattr(self, name), memo))
        if getattr(self, "_is_param", False):
            out._is_param = True
        return out

    def __reduce_ex__(self, protocol):
        # A checkpoint holds plain tensors: it loads without this class, and in either layout.
        if self.quantizer is None and self._is_packed() and not getattr(self, "_is_param", False):
            return self.rowwise_data.view(self.shape).__reduce_ex__(protocol)
        return super().__reduce_ex__(protocol)


def dispatch(func, args: tuple, kwargs: dict):
    """What separate quantized weights do in a copy; NotImplemented for anything else.

    A copy between quantized tensors takes their bits; clones, and moves to another device, stay
    quantized.
    """
    if func is torch.ops.aten.copy_.default:
        target, source, *_ = args
        if getattr(target, "quantizer", None) is None or target.shape != source.shape:
            return NotImplemented
        grouped = isinstance(source, PackedParameterMixin)
        for member, value in zip(target.members, source.members if grouped else source.unbind()):
            member.copy_(value)
        return target
    if func is torch.ops.aten.clone.default:
        source = args[0]
        if source.quantizer is None:
            return NotImplemented
        return source._copied(source.device, torch.clone, torch.clone)
    if func is torch.ops.aten._to_copy.default:
        (source,) = args
        if source.quantizer is None or kwargs.get("dtype") not in (None, source.dtype):
            return NotImplemented
        device = torch.device(kwargs.get("device") or source.device)
        how = {"device": device, "non_blocking": kwargs.get("non_blocking", False)}

        def move(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(copy=True, **how)

        def move_member(member: torch.Tensor) -> torch.Tensor:
            # Inside a dispatch, .to() would dequantize it.
            return member.clone() if _place(member) == device else func(member, **how)

        out = source._copied(device, move, move_member)
        return out.requires_grad_(source.requires_grad)
    return NotImplemented


def is_quantized(tensor: torch.Tensor) -> bool:
    """Whether a parameter is quantized, a grouped one included."""
    if isinstance(tensor, PackedParameterMixin):
        return tensor.quantizer is not None
    return isinstance(tensor, QuantizedTensor)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """A grouped tensor's memory ``[groups, ...]`` where that is one plain tensor.

    Anything else comes back as it is.
    """
    if not isinstance(tensor, PackedParameterMixin):
        return tensor
    if tensor.quantizer is None and tensor.rowwise_data is not None and tensor.all_same_shape():
        return tensor.rowwise_data.view(tensor.shape)
    return tensor
