"""The stream of claims that a worker draws its rows from: waits where there is nothing, ends when all is.

Knows: waiting, and how it ends when the job stops. Refuses to know: whose unit is next (`claims.py`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

from pipeline.cluster.claims import Claim, Claims, Verdict

# So soon a wait ends once the job is told to stop.
_SLICE_S = 0.1


class Work(Iterator[Claim]):
    """Iterate for claims, each taken when it is asked for. Leaving the context ends it, also in a wait.

    stopped: asked while it waits. commit: makes what is finished durable, from any thread. verdict: why it
    ended; None if it was told to.
    """

    def __init__(
        self,
        claims: Claims,
        stopped: Callable[[], bool] = lambda: False,
        commit: Callable[[], None] = lambda: None,
    ) -> None:
        self._claims = claims
        self._stopped = stopped
        self._commit = commit
        self._closed = threading.Event()
        self._first: Claim | None = None
        self.verdict: Verdict | None = None

    def begin(self) -> bool:
        """Takes the first claim already now; False if there is nothing to do for this worker."""
        self._first = next(self, None)
        return self._first is not None

    @property
    def is_complete(self) -> bool:
        """Whether it ended because nothing of the job is left, whoever made it."""
        return self.verdict is Verdict.complete

    @property
    def num_others(self) -> int:
        """To how many other workers what is left was left."""
        return len(self._claims.others.workers) if self.verdict is Verdict.with_others else 0

    def __iter__(self) -> Work:
        return self

    def __next__(self) -> Claim:
        first, self._first = self._first, None
        if first is not None:
            return first
        while self.verdict is None and not self._closed.is_set() and not self._stopped():
            step = self._claims.advance()
            if isinstance(step, Claim):
                return step
            if step is not Verdict.wait:
                self.verdict = step
            elif self._claims.wants_commit:
                self._commit()
            else:
                self._claims.wait(_SLICE_S)
        raise StopIteration

    def __enter__(self) -> Work:
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
