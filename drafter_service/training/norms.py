"""RMSNorm whose backward is written out: torch's own one is made of some twenty passes on a CPU.

The same values as `nn.RMSNorm`, whose parameter and name it keeps, so that a net trained with it
is written and read as before. Knows no net but its norms.

Shapes: N rows, C normed width.
"""

from typing import Protocol

import torch
from torch import Tensor, nn


class TrainedNorm(nn.RMSNorm):
    """Takes the place of a plain norm while a net is trained."""

    def forward(self, x: Tensor) -> Tensor:
        """x * rsqrt(mean(x^2) + eps) * weight over the last dimension."""
        normed: Tensor = _Rms.apply(  # type: ignore[no-untyped-call]
            x, self.weight, self.eps
        )
        return normed


def with_trained_norms(net: nn.Module) -> None:
    """Replace every RMSNorm of `net`, keeping its weight."""
    for module in list(net.modules()):
        for name, child in module.named_children():
            if type(child) is nn.RMSNorm:
                norm = TrainedNorm(child.normalized_shape, child.eps)
                norm.weight = child.weight
                setattr(module, name, norm)


class _Kept(Protocol):
    """What a backward pass finds."""

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]: ...

    def save_for_backward(self, *tensors: Tensor) -> None: ...


class _Rms(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Kept, x: Tensor, weight_C: Tensor, eps: float) -> Tensor:
        width = x.shape[-1]
        x_NC = x.reshape(-1, width)
        length_N = torch.linalg.vector_norm(x_NC, dim=-1, keepdim=True).float()
        scale_N = (length_N.square() / width + eps).rsqrt().to(x.dtype)
        normed_NC = x_NC * scale_N
        ctx.save_for_backward(normed_NC, weight_C, scale_N)
        scaled: Tensor = (normed_NC * weight_C).view(x.shape)
        return scaled

    @staticmethod
    def backward(ctx: _Kept, *grads: Tensor) -> tuple[Tensor | None, ...]:
        normed_NC, weight_C, scale_N = ctx.saved_tensors
        grad_NC = grads[0].reshape(normed_NC.shape)
        product_NC = grad_NC * normed_NC
        width = normed_NC.shape[-1]
        dweight = product_NC.sum(0)
        along_N = (product_NC @ weight_C[:, None]) / width
        dx = (grad_NC * weight_C).addcmul_(normed_NC, along_N, value=-1)
        return dx.mul_(scale_N).view(grads[0].shape), dweight, None
