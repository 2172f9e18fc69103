"""Threads that run one at a time, on a clock that jumps: the order of all they do follows from their sleeps.

Knows: whose turn it is. Refuses to know: what the tasks do. A task gives its turn away only in `sleep`, so
what happens between two sleeps is atomic, and the same sleeps give the same run.
"""

from __future__ import annotations

import heapq
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field


class Crash(BaseException):
    """The end of a process as its own code sees it: no handler for errors is to catch it."""


class TooLong(AssertionError):
    """The run does not come to an end: somebody waits for what never comes, or does the same for ever."""


@dataclass(eq=False)
class Life:
    """A process as the schedule sees it. frozen_until: stopped as by SIGSTOP."""

    name: str
    dead: bool = False
    frozen_until: float = 0.0


@dataclass(eq=False)
class Task:
    """A thread of a process. baton: free while it is this task's turn."""

    name: str
    life: Life
    baton: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.baton.acquire()


class Schedule:
    """The caller's thread is the first task. most_turns, most_s: how long a run may be."""

    def __init__(self, most_turns: int, most_s: float) -> None:
        self.now = 0.0
        self.num_turns = 0
        # what ended a task that should not have ended so
        self.failure: str | None = None
        self.current = Task("director", Life("director"))
        self.director = self.current
        self._most_turns = most_turns
        self._most_s = most_s
        self._waiting: list[tuple[float, int, Task]] = []
        self._threads: list[threading.Thread] = []
        self._num_pushed = 0

    def spawn(self, name: str, life: Life, run: Callable[[], None]) -> None:
        """A new task, whose first turn comes at this moment."""
        task = Task(name, life)
        thread = threading.Thread(target=self._run, args=(task, run), name=name, daemon=True)
        self._threads.append(thread)
        self._push(self.now, task)
        thread.start()

    def sleep(self, seconds: float) -> None:
        """Gives the turn to whoever wakes first. Raises Crash in a process that is dead by then."""
        me = self.current
        self._push(self.now + seconds, me)
        self._pass_on(me)
        if me.life.dead:
            raise Crash(me.name)
        if me is self.director and self.failure is not None:
            raise AssertionError(self.failure)
        self.num_turns += 1
        if self.num_turns > self._most_turns or self.now > self._most_s:
            raise TooLong(f"{self.num_turns} turns, {self.now:.0f} s")

    def end(self) -> None:
        """Lets every task come to its end; the director's last call."""
        for _, _, task in self._waiting:
            task.life.dead = True
        while self._waiting:
            me = self.current
            self._push(self.now + 1.0, me)
            self._pass_on(me)
            if not [task for _, _, task in self._waiting if task is not me]:
                break
        for thread in self._threads:
            thread.join(10.0)
            assert not thread.is_alive(), f"{thread.name} goes on"

    def _run(self, task: Task, run: Callable[[], None]) -> None:
        task.baton.acquire()
        try:
            if not task.life.dead:
                run()
        except Crash:
            pass
        except BaseException:
            self.failure = self.failure or f"{task.name}: {traceback.format_exc()}"
        finally:
            self.current = following = self._pop()
            following.baton.release()

    def _pass_on(self, me: Task) -> None:
        following = self._pop()
        if following is not me:
            self.current = following
            following.baton.release()
            me.baton.acquire()

    def _push(self, when: float, task: Task) -> None:
        self._num_pushed += 1
        heapq.heappush(self._waiting, (when, self._num_pushed, task))

    def _pop(self) -> Task:
        while True:
            when, _, task = heapq.heappop(self._waiting)
            if task.life.frozen_until > when and not task.life.dead:
                self._push(task.life.frozen_until, task)
                continue
            self.now = max(self.now, when)
            return task


class TurnLock:
    """In the place of a threading.RLock: whoever waits for it lets the others have their turns."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._owner: Task | None = None
        self._depth = 0

    def __enter__(self) -> None:
        me = self._schedule.current
        while self._owner not in (None, me):
            self._schedule.sleep(0.05)
        self._owner = me
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = None
