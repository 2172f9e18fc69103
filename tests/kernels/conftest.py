"""The kernels run on the GPU when there is one, else through Triton's interpreter.

Triton decides at import whether its own functions are interpreted, and tests of other rooms may have brought
it in by then (transformers does): without a GPU it is imported here once more, and the environment left as
it was.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import Any

import torch


def _import_interpreted() -> None:
    for name in list(sys.modules):
        # The native part stays: it cannot be loaded twice, and knows nothing of interpretation.
        if name.split(".")[0] == "triton" and not name.startswith("triton._C"):
            del sys.modules[name]
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        import triton
        import triton.language  # noqa: F401
    finally:
        del os.environ["TRITON_INTERPRET"]
        if before is not None:
            os.environ["TRITON_INTERPRET"] = before
    triton.knobs.runtime.interpret = True
    _allow_new_numpy()


def _allow_new_numpy() -> None:
    """numpy 2.4 makes no int of an array of shape [1], which is how Triton 3.6 interprets a range."""
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


if importlib.util.find_spec("triton") and not torch.cuda.is_available():
    _import_interpreted()
