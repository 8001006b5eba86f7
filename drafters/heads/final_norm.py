# The target's final norm, for heads that apply it by themselves.

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from drafters.errors import ConfigError
from drafters.heads.layers import rms_norm

if TYPE_CHECKING:
    from drafters.target import FrozenTarget

__all__ = ["norm_gain"]


@torch.no_grad()
def norm_gain(target: "FrozenTarget") -> Tensor:
    """Gain [D] of the target's final norm, float32, read off what the norm makes of equal entries (in some families it
    is 1 + weight). Raises ConfigError when that norm is no RMSNorm."""
    norm, spec = target.final_norm, target.spec
    if target.device.type == "meta":  # an outline, of which only sizes are asked
        return torch.ones(spec.hidden_size, device="meta")
    # A power of two, large against eps: the root mean square is exact.
    gain_D = norm(torch.full((1, 1, spec.hidden_size), 1024.0, device=target.device))[0, 0].to(target.device).float()
    probe_BD = torch.randn(4, spec.hidden_size, generator=torch.Generator().manual_seed(0)).to(target.device)
    wanted_BD = norm(probe_BD[:, None])[:, 0].to(target.device).float()
    error = (rms_norm(probe_BD, gain_D, spec.rms_norm_eps, dtype=torch.float32) - wanted_BD).norm() / wanted_BD.norm()
    if not error <= 1e-3:
        raise ConfigError(
            f"drafter: the target's final norm, {type(norm).__name__}, is no RMSNorm, and these settings need one; "
            "accepted: drafter.adapter=null (layer skip), drafter.block=qwen3, drafter.init=random, or another drafter"
        )
    return gain_D.cpu().clone()
