"""Products in 8 bits: linear layers whose stored codes are multiplied as they are, by 8-bit activations.

Contract:
    * The weight is stored with one scale per row (``int8:row``, ``fp8:row``: what "int8" and "fp8" name), so a scale
      belongs to an output and comes after the sum: ``y_ij = (sum_k a_ik c_jk) s_i t_j``. Nothing is decoded.
    * Activations are rounded to the same 8 bits, to nearest, with one scale per token: ``s = absmax / 127`` (int8) or
      ``absmax / 448`` (E4M3), fp32, and ``a = round(x / s)``. That changes the forward pass, so it is asked for.
    * **int8**: `torch._int_mm`. The sum is an integer and exact, the scales are applied in fp32 one after the other:
      every device gives the same bits.
    * **fp8**: `torch._scaled_mm`, with a result in bf16. The operands have the same bits on every device; the sum is
      the device's own (fp32 on a CPU, in an order of its own). Where torch has not the operation, `reference_product`
      multiplies the same operands in fp32.
    * **Gradients** are straight-through: rounding an activation counts as the identity. The derivatives are those of
      the product that was computed, ``dx = dy W`` and ``dW = dy^T a s``, in the dtype of the activations; the backward
      pass keeps the 8-bit activations, half of bf16's bytes, and decodes the weight.
    * A token with a number that is not finite gives outputs that are not finite.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from masterless.formats import Format, minifloat
from masterless.tensor.quantized import QuantizedTensor, local_of

KINDS = ("int8", "fp8")
_MULTIPLE = 16  # what the operations ask of both sides of a weight
_SMALLEST_BATCH = 32  # rows of a product in int8: torch._int_mm wants more than 16 on a GPU


def products_of(format: Format) -> str | None:
    """The kind of product that stored codes of this format can take part in as they are; None if there is none."""
    if format.granularity != "row" or format.bits != 8 or format.fine_bits:
        return None
    if format.kind == "linear":
        return "int8"
    return "fp8" if minifloat(format) == (4, 3, 0x80) else None


def quantized_activations(x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Rows of `x` as 8-bit numbers, and the scale of each: fp32 ``[rows, 1]``."""
    x = x.float()
    scale = x.abs().amax(1, keepdim=True) / x.new_tensor(127.0 if kind == "int8" else 448.0)
    t = x / torch.where(scale == 0, 1.0, scale)
    if kind == "int8":
        return t.nan_to_num(0.0, 0.0, 0.0).round().clamp(-127, 127).to(torch.int8), scale
    return t.clamp(-448.0, 448.0).to(torch.float8_e4m3fn), scale


def stored_operand(weight: QuantizedTensor, kind: str) -> tuple[Tensor, Tensor]:
    """A weight's codes as 8-bit numbers ``[out, in]``, and its scales: fp32 ``[1, out]``."""
    tensors = weight.stored.tensors
    codes, scale = tensors["codes"].view(weight.shape), tensors["scale"].float().view(1, -1)
    if kind == "int8":
        return (codes ^ 0x80).view(torch.int8), scale  # from an offset of 128 to two's complement
    return codes.view(torch.float8_e4m3fn), scale


def reference_product(a: Tensor, s: Tensor, c: Tensor, t: Tensor, kind: str) -> Tensor:
    """The product of 8-bit operands in plain torch: ``[rows, out]``, fp32 (int8) or bf16 (fp8)."""
    if kind == "int8":
        return (a.double() @ c.double().t()).float() * s * t  # sums below 2^53: exact
    return ((a.float() @ c.float().t()) * s * t).to(torch.bfloat16)


def _product(a: Tensor, s: Tensor, c: Tensor, t: Tensor, kind: str) -> Tensor:
    """As `reference_product`, by torch's operation for 8-bit numbers."""
    if kind == "int8":
        padded = F.pad(a, (0, 0, 0, max(0, _SMALLEST_BATCH - len(a))))
        return torch._int_mm(padded, c.t())[: len(a)].float() * s * t
    if s.device.type not in ("cpu", "cuda"):
        return reference_product(a, s, c, t, kind)
    return torch._scaled_mm(a, c.t(), scale_a=s, scale_b=t, out_dtype=torch.bfloat16)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Any, kind: str) -> Tensor:  # type: ignore[override]
        rows = x.reshape(-1, x.shape[-1])
        a, s = quantized_activations(rows, kind)
        ctx.save_for_backward(a, s)
        ctx.weight, ctx.changes, ctx.dtype = weight, weight.changes, x.dtype
        y = _product(a, s, *stored_operand(weight, kind), kind) if len(rows) else rows.new_empty(0, len(weight))
        return y.to(x.dtype).view(*x.shape[:-1], len(weight))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        weight = ctx.weight
        if weight.changes != ctx.changes:
            raise RuntimeError(
                f"a quantized parameter of shape {tuple(weight.shape)} was changed between the forward and the "
                f"backward pass that needs it; step the optimizer after backward()"
            )
        a, s = ctx.saved_tensors
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = grad @ weight.seen(grad.dtype)
        if ctx.needs_input_grad[1]:
            seen = (a.float() * s).to(grad.dtype)
            dw = (grad.reshape(-1, grad.shape[-1]).t() @ seen).to(weight.dtype)
        return dx, dw, None


class LowBitLinear(nn.Linear):
    """A linear layer that multiplies in 8 bits as long as its weight is stored in them; made by `use_products_`."""

    products: str

    @torch._disable_dynamo
    def forward(self, input: Tensor) -> Tensor:
        """As `torch.nn.Linear`."""
        weight = self.weight
        if not isinstance(weight, QuantizedTensor) or products_of(weight.format) != self.products:
            return F.linear(input, weight, self.bias)
        device = input.device.type
        if torch.is_autocast_enabled(device):
            input = input.to(torch.get_autocast_dtype(device))
        y = _Product.apply(input, weight, self.products)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def extra_repr(self) -> str:
        """As `torch.nn.Linear`, with the kind of product."""
        return f"{super().extra_repr()}, products={self.products!r}"


def use_products_(model: nn.Module, products: str | None) -> list[str]:
    """Lets a model's linear layers multiply in 8 bits: INT8 or FP8 codes times activations of the same kind.

    The weights stay what they are. Activations are rounded to 8 bits, one scale per token, which changes the loss a
    little (docs/gpu.md has a measurement); gradients are straight-through. Speed needs hardware and a torch with such
    products: elsewhere it is the same numbers, slower. `torch.compile` runs these layers outside its graphs.

    Args:
        model: has linear layers stored as "int8" or "fp8", with both sides multiples of 16; others are left alone.
        products: "int8", "fp8", or None to decode again as usual.

    Returns:
        The names of the layers that multiply in another way now.

    >>> model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 10))
    >>> from masterless import quantize_
    >>> _ = quantize_(model, "fp8")
    >>> use_products_(model, "fp8")
    ['0']
    """
    if products is not None and products not in KINDS:
        raise ValueError(f"use_products_: unknown products {products!r}; choose one of {', '.join(KINDS)}, or None")
    changed = []
    for name, module in model.named_modules():
        if type(module) not in (nn.Linear, LowBitLinear) or getattr(module, "products", None) == products:
            continue
        if products is None:
            del module.products
            module.__class__ = nn.Linear
        elif _fits(module, products):
            module.__class__, module.products = LowBitLinear, products
        else:
            continue
        changed.append(name)
    if products is not None and not any(getattr(m, "products", None) == products for m in model.modules()):
        raise ValueError(
            f"use_products_: no linear layer of the model is stored as '{products}' with one scale per row and sides "
            f"that are multiples of {_MULTIPLE}; call quantize_(model, {products!r}) first"
        )
    return changed


def _fits(module: Any, products: str) -> bool:
    weight = local_of(module.weight)
    stored = isinstance(weight, QuantizedTensor) and products_of(weight.format) == products
    return stored and not any(n % _MULTIPLE for n in module.weight.shape)
