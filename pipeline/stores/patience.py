"""Asking a server that may be away for a while.

Knows: which failures a second attempt may mend, how long to go on, and how to word the end. Refuses to
know: what is asked.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_FIRST_WAIT_S = 0.2
_LONGEST_WAIT_S = 10.0
_AT_FIRST_S = 5.0
# What no second attempt mends.
_FINAL = (FileNotFoundError, FileExistsError, PermissionError, ImportError, NotImplementedError, TypeError)
NOT_OFFERED = (errno.ENOSYS, errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP)


class StoreUnreachable(OSError):
    """The object store did not answer for long; says how to go on."""


class Patience:
    """Repeats requests, at growing intervals, for so many seconds. Safe to use from several threads.

    For less where nothing was ever answered: a mistyped address is as likely there.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._answered = False
        self._gave_up = False

    def ask(self, url: str, request: Callable[[], T]) -> T:
        """The answer. url: what is asked for, to be named.

        Raises StoreUnreachable, FileNotFoundError, FileExistsError if the server refused a name that is
        taken, and whatever else no second attempt would mend.
        """
        patience = self._seconds if self._answered else min(self._seconds, _AT_FIRST_S)
        end, wait = time.monotonic() + patience, _FIRST_WAIT_S
        while True:
            try:
                answer = request()
                self._answered, self._gave_up = True, False
                return answer
            # every kind of store fails in a way of its own
            except Exception as error:
                if _is_taken(error):
                    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), url) from error
                if isinstance(error, _FINAL) or getattr(error, "errno", None) in NOT_OFFERED:
                    # it answered, if not as wished
                    self._answered, self._gave_up = True, False
                    raise
                # who gave up once does not wait as long again for each thing left to do
                if self._gave_up or time.monotonic() + wait > end:
                    self._gave_up = True
                    raise _unreachable(url, error) from error
            time.sleep(wait)
            wait = min(2 * wait, _LONGEST_WAIT_S)


def _is_taken(error: Exception) -> bool:
    """Whether a name was to be created that there is; not every server says which condition failed."""
    response = getattr(error.__cause__, "response", None)
    code = response.get("Error", {}).get("Code") if isinstance(response, dict) else None
    return isinstance(error, FileExistsError) or code in ("PreconditionFailed", "412")


def _unreachable(url: str, error: Exception) -> StoreUnreachable:
    why = " ".join(str(error).split()) or type(error).__name__
    return StoreUnreachable(
        f"output.dir: {url} cannot be reached: {why}. What was committed is safe: start the same command "
        "again once the store answers"
    )
