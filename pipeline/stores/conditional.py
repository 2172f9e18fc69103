"""Whether an object store can create a name for one of several who ask: found out by asking.

Knows: the attempt, and how to word a refusal. Refuses to know: kinds of stores by their names.
"""

from __future__ import annotations

import secrets
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pipeline.stores.patience import NOT_OFFERED
from pipeline.stores.remote import RemoteStore, url_of

_AT_ONCE = 4


class NoConditionalCreate(ValueError):
    """The object store overwrites what it should refuse to; says which key to look at."""


def require_conditional_create(store: RemoteStore, job: Path) -> None:
    """Raises NoConditionalCreate unless of several who create one name, at once and later, one succeeds."""
    path = job / f".probe-{secrets.token_hex(8)}"
    try:
        with ThreadPoolExecutor(_AT_ONCE) as threads:
            attempts = [threads.submit(store.create_new, path, b"%d" % number) for number in range(_AT_ONCE)]
            num_won = sum(attempt.result() for attempt in attempts)
        num_won += store.create_new(path, b"late")
    except (NotImplementedError, TypeError) as error:
        raise _refusal(job, str(error)) from error
    except OSError as error:
        if error.errno not in NOT_OFFERED:
            raise
        raise _refusal(job, str(error)) from error
    finally:
        store.remove(path)
    if num_won != 1:
        raise _refusal(job, f"{num_won} of {_AT_ONCE + 1} attempts at one name succeeded")


def _refusal(job: Path, why: str) -> NoConditionalCreate:
    return NoConditionalCreate(
        f"output.dir={url_of(job)}: this store does not refuse to create a name that is taken ({why}), by "
        "which workers agree on who does what: choose an output.dir on a shared file system, or in a store "
        "with conditional writes (S3 and its like: If-None-Match)"
    )
