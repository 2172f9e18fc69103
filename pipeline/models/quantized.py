"""Checkpoints whose weights are quantised: can transformers load this one here, found out before it tries.

Knows transformers' quantisers and what they say is missing; refuses to know tensors. What such
layers compute may depend on the whole batch, so a loaded model is also compared with itself
(`self_check.check_step_equals_eager`).
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers.quantizers.auto import AutoHfQuantizer

from pipeline.models.load_errors import one_line


def quantization_of(hf_config: Any) -> dict[str, Any] | None:
    """The configuration's quantization_config as a dict; None if the weights are plain."""
    found = getattr(hf_config, "quantization_config", None)
    if found is None:
        return None
    return dict(found) if isinstance(found, dict) else dict(found.to_dict())


def check_quantization(path: str, hf_config: Any, device: torch.device) -> None:
    """Raises ValueError, naming the missing package, unless transformers can load the weights here."""
    settings = quantization_of(hf_config)
    if settings is None:
        return
    method = settings.get("quant_method") or "(none)"
    what = f"model.path={path}: its weights are quantised (quant_method {method})"
    try:
        known = AutoHfQuantizer.supports_quant_method(settings)
    except ValueError:
        known = False
    if not known:
        # transformers would take the numbers for plain weights and leave their scales out.
        raise ValueError(
            f"{what}, which this version of transformers does not know: take an unquantised checkpoint"
        )
    try:
        quantizer = AutoHfQuantizer.from_config(copy.deepcopy(settings), pre_quantized=True)
        quantizer.validate_environment(dtype=torch.float32, device_map={"": device}, weights_only=True)
    except Exception as error:  # each quantiser says it its own way
        raise ValueError(
            f"{what} and cannot be loaded here: {one_line(error)}; or take an unquantised checkpoint"
        ) from error
