"""A bounded number of concurrent requests, for tasks that go through a whole store."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import TypeVar

_In = TypeVar("_In")
_Out = TypeVar("_Out")


class Pool:
    """A thread pool for requests, or another executor.

    Args:
        concurrency: Most requests in flight. With 1, there are no threads and the caller's thread runs every task.
        executor: Runs the tasks instead of threads. The caller shuts it down.
    """

    def __init__(self, concurrency: int, executor: Executor | None = None) -> None:
        self.concurrency = concurrency
        self._executor, self._is_own = executor, executor is None
        if executor is None and concurrency > 1:
            self._executor = ThreadPoolExecutor(concurrency, thread_name_prefix="tierfs-upkeep")

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        if self._executor is not None and self._is_own:
            self._executor.shutdown(cancel_futures=True)

    def map(self, task: Callable[[_In], _Out], arguments: Iterable[_In]) -> Iterator[_Out]:
        """Yield the results in order.

        At most twice ``concurrency`` tasks are in progress or finished without their result being taken.
        """
        if self._executor is None:
            yield from map(task, arguments)
            return
        begun: deque[Future[_Out]] = deque()
        for argument in arguments:
            begun.append(self._executor.submit(task, argument))
            if len(begun) >= 2 * self.concurrency:
                yield begun.popleft().result()
        while begun:
            yield begun.popleft().result()
