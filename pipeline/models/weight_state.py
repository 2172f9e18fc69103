"""Whether a model's weights are still those of before: what is kept of old ones must go.

K/V in the prefix cache, and the addresses inside CUDA graphs, belong to the weights they were made with.
"""

from __future__ import annotations

import torch
from torch import nn

# Of each parameter: where it lies, and how often it was written to.
WeightState = tuple[tuple[int, int], ...]


def weight_state(model: nn.Module) -> WeightState:
    """Differs from an earlier one if a parameter was replaced or changed in place since.

    Blind to writes through `.data`, and to those of tensors made under torch.inference_mode.
    """
    return tuple((parameter.data_ptr(), _version(parameter)) for parameter in model.parameters())


def _version(parameter: torch.Tensor) -> int:
    return 0 if parameter.is_inference() else parameter._version
