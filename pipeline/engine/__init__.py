"""Tokenmill's own engine, usable as a library: `from pipeline.engine import Engine, SamplingParams`.

Imports neither hydra nor datasets nor pyarrow.
"""

from pipeline.engine.engine import Engine, EngineStats
from pipeline.request import Completion, FinishReason, Request, RowKey, SamplingParams

__all__ = ["Completion", "Engine", "EngineStats", "FinishReason", "Request", "RowKey", "SamplingParams"]
