"""What `--multirun` needs beyond Hydra: an output directory for each job, or no job at all.

Knows: how hydra's sweeps spread into jobs. A hydra callback, named in conf/config.yaml; it runs before
the first job, so that nothing has been written when a sweep is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from pipeline.failures import PastHydra
from pipeline.masking import mask
from pipeline.store import absolute


class SeparateOutputs(Callback):
    """Refuses a sweep in which two jobs would write to one directory."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        try:
            refuse_shared_output(config)
        except ValueError as error:
            raise PastHydra from error

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        # Hydra's sweeper has just saved the sweep as it was typed.
        record = Path(config.hydra.sweep.dir) / "multirun.yaml"
        if config.hydra.job.get("num") is not None and record.is_file():
            text = record.read_text(encoding="utf-8")
            if mask(text) != text:
                record.write_text(mask(text), encoding="utf-8")


def refuse_shared_output(config: DictConfig) -> None:
    """config: the sweep's own. Raises ValueError naming the directory, two jobs and the remedy."""
    given = [f"{key}={value}" for key, value in (config.hydra.sweeper.get("params") or {}).items()]
    typed = OmegaConf.to_container(config.hydra.overrides.task, resolve=False)
    assert isinstance(typed, list)
    overrides = OverridesParser.create().parse_overrides([*given, *map(str, typed)])
    swept = [override for override in overrides if override.is_sweep_override()]
    if not all(override.is_discrete_sweep() for override in swept):
        return  # another sweeper's, which picks values as it goes
    first: dict[str, str] = {}
    for job, directory in _jobs(config, overrides):
        label = " ".join(o for o in job if o.split("=")[0] in {s.get_key_element() for s in swept})
        if directory in first:
            raise ValueError(
                f"--multirun: the jobs [{first[directory]}] and [{label}] share output.dir={directory}; "
                f"give each its own, e.g. 'output.dir=outputs/sweep/{_name_of(swept, config)}'"
            )
        first[directory] = label


def _jobs(config: DictConfig, overrides: list[Override]) -> Iterator[tuple[list[str], str]]:
    """Each job's overrides and its output directory."""
    loader = GlobalHydra.instance().config_loader()
    before = HydraConfig.instance().cfg
    try:
        for job in BasicSweeper.split_arguments(overrides, max_batch_size=None)[0]:
            job_config = loader.load_sweep_config(config, list(job))
            HydraConfig.instance().set_config(job_config)  # output.dir may ask for ${hydra:...}
            yield list(job), absolute(str(job_config.output.dir))
    finally:
        HydraConfig.instance().cfg = before


def _name_of(swept: list[Override], config: DictConfig) -> str:
    """An interpolation that differs wherever the swept keys do."""
    keys = [override.key_or_group for override in swept]
    groups = set(config.hydra.runtime.choices)
    return "-".join(f"${{hydra:runtime.choices.{key}}}" if key in groups else f"${{{key}}}" for key in keys)
