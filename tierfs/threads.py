"""The threads of a process: daemons in the background, helpers for CPU-bound work, threads for requests.

`Processors` shares work among as many threads as there are processors. A call never waits for a free helper, only for
helpers that already work on its own tasks. So nested calls cannot deadlock.

`Transfers` bounds the threads that move chunks. A task on these threads never submits another task to them and waits
for it, so tasks cannot deadlock.

`Pool` bounds the requests of a task that goes through a whole store.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from typing import Generic, TypeVar

from tierfs._fork import PerProcess

THREADS_MAX = 16
WORKERS = 16
_In = TypeVar("_In")
_Out = TypeVar("_Out")


def start_daemon(task: Callable[..., object], *arguments: object, name: str) -> threading.Thread | None:
    """Run ``task(*arguments)`` on a daemon thread of this name.

    Returns:
        The thread; ``None`` if none can start. From Python 3.12 on, an exiting interpreter starts no threads, though
        saves on other threads may still run. A process without memory for a thread starts none either.
    """
    thread = threading.Thread(target=task, args=arguments, name=f"tierfs-{name}", daemon=True)
    try:
        thread.start()
    except RuntimeError:
        return None
    return thread


class Processors:
    """Helper threads for `share_out`. Safe for use by many threads.

    Args:
        threads_max: Most threads that work at once, callers included. Fewer if there are fewer processors.
    """

    def __init__(self, threads_max: int = THREADS_MAX) -> None:
        self.threads_max = threads_max
        self._lock = threading.Lock()
        self._turns = threading.Semaphore(self.count)
        self._places = threading.Semaphore(self.count)
        self._busy = 0
        self._helpers: ThreadPoolExecutor | None = None

    def __repr__(self) -> str:
        return f"Processors(threads_max={self.threads_max}, busy={self._busy})"

    @property
    def count(self) -> int:
        """How many threads work at once."""
        return min(len(os.sched_getaffinity(0)), self.threads_max)

    def share_out(
        self, task: Callable[[_In], object], arguments: Iterable[_In], *, threads_max: int | None = None
    ) -> None:
        """Run ``task`` on every argument: on this thread, and on a helper for each processor that is idle now.

        With concurrent or nested calls, a process has no more helpers than other processors. A call that gets no helper
        runs alone. More threads would slow each other down: on two processors, sixteen threads copy and hash a tenth
        slower than two.

        Args:
            task: Called with each argument.
            arguments: Started in this order.
            threads_max: Most threads for this call, the caller included; by default one for each processor.

        Raises:
            BaseException: The error of the first failed task in the order of arguments, after all running tasks have
                ended. Tasks after it may not have started; all before it have run.
        """
        job = _SharedTasks(task, arguments)
        wanted = len(job) if threads_max is None else min(len(job), threads_max)
        helpers = self._take(wanted - 1)
        try:
            # No thread can start if memory is exhausted or the interpreter is exiting.
            with contextlib.suppress(RuntimeError):
                for _ in range(helpers):
                    self._threads().submit(job.help)
            job.work()
        finally:
            job.end()
            self._give_back(helpers)
        job.raise_first()

    def turn(self) -> AbstractContextManager[object]:
        """Return a context manager that waits for a turn: only as many threads as processors have one at a time.

        For the CPU-bound work that threads do between waits. More threads would contend for the GIL and evict each
        other's data from the caches. Code in the block may wait for no other thread, except for helpers of its own
        `share_out` calls. The main thread neither waits nor counts: an interrupt could make it leave without releasing
        its turn.
        """
        return contextlib.nullcontext() if threading.current_thread() is threading.main_thread() else self._turns

    def place(self) -> AbstractContextManager[object]:
        """Return a context manager that bounds the threads that hold a resource while they wait for a `turn`.

        As many threads as processors may be inside. They may also wait for the resource there, such as a free slot,
        while other threads take their turns. Code in the block must not wait for another thread's place. The main
        thread neither waits nor counts, as in `turn`.
        """
        return contextlib.nullcontext() if threading.current_thread() is threading.main_thread() else self._places

    def _take(self, wanted: int) -> int:
        """Reserve up to ``wanted`` helpers for a caller, which also works itself. Return how many."""
        with self._lock:
            helpers = max(0, min(wanted, self.count - self._busy - 1))
            self._busy += helpers + 1
        return helpers

    def _give_back(self, helpers: int) -> None:
        with self._lock:
            self._busy -= helpers + 1

    def _threads(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._helpers is None:
                # Not the threads of `Transfers`: those wait for requests, and helpers would wait behind them.
                self._helpers = ThreadPoolExecutor(self.threads_max, thread_name_prefix="tierfs-share")
            return self._helpers


class _SharedTasks(Generic[_In]):
    """The tasks of one call of `share_out`."""

    def __init__(self, task: Callable[[_In], object], arguments: Iterable[_In]) -> None:
        self._task = task
        self._waiting = deque(enumerate(arguments))
        self._errors: dict[int, BaseException] = {}
        self._helping = 0
        self._changed = threading.Condition(threading.Lock())

    def __len__(self) -> int:
        return len(self._waiting)

    def work(self) -> None:
        """Run tasks that no other thread has started, until none is left or one fails."""
        while True:
            try:
                number, argument = self._waiting.popleft()
            except IndexError:
                return
            try:
                self._task(argument)
            except Exception as error:  # noqa: BLE001 - raised by the caller
                self._errors[number] = error
                self._waiting.clear()

    def help(self) -> None:
        """Run tasks on a helper thread, unless none is left."""
        with self._changed:
            if not self._waiting:
                return
            self._helping += 1
        try:
            self.work()
        except BaseException as error:  # noqa: BLE001 - raised by the caller
            self._errors[-1] = error
        finally:
            with self._changed:
                self._helping -= 1
                self._changed.notify()

    def end(self) -> None:
        """Start no more tasks, and wait for the running ones.

        An interrupt does not end the wait: running tasks use memory that the caller lent. Afterwards the task
        is dropped, because a helper refers to the job for a moment longer.
        """
        self._waiting.clear()
        while True:
            try:
                with self._changed:
                    self._changed.wait_for(lambda: not self._helping)
            except BaseException as interrupt:  # noqa: BLE001, PERF203 - raised by the caller
                self._errors[-1] = interrupt
            else:
                break
        del self._task

    def raise_first(self) -> None:
        """Raise the error of the first task that failed; an interrupt takes precedence."""
        try:
            if self._errors:
                raise self._errors[min(self._errors)]
        finally:
            self._errors.clear()  # the errors refer to the job and the caller's memory: do not leave a cycle


processors = PerProcess(Processors)
"""This process's `Processors`."""


class Errand(Generic[_In, _Out]):
    """A task that runs once, although two threads may try to run it.

    If no thread can be started, the task stays in the executor's queue while the caller runs it.
    """

    def __init__(self, task: Callable[[_In], _Out], argument: _In) -> None:
        self.future: Future[_Out] = Future()
        self._todo = [(task, argument)]

    def run(self) -> None:
        """Run the task, unless another thread has begun it."""
        try:
            task, argument = self._todo.pop()
        except IndexError:
            return
        try:
            if self.future.set_running_or_notify_cancel():
                self.future.set_result(task(argument))
        except BaseException as error:  # noqa: BLE001 - raised in the thread that waits for the future
            self.future.set_exception(error)
            # Drop this frame's references: the future refers to the error, and the error to this frame. Otherwise the
            # future would keep borrowed memory alive.
            del self, task, argument

    def cancel(self) -> bool:
        """Cancel the task unless it has begun, and drop its references. Return whether it was cancelled."""
        is_cancelled = self.future.cancel()
        if is_cancelled:
            self._todo.clear()
        return is_cancelled


class Transfers:
    """Threads for requests to the object tier. ``name`` is the prefix of the threads' names."""

    def __init__(self, workers: int = WORKERS, *, name: str = "tierfs-transfer") -> None:
        self.workers = workers
        self._name = name
        # Reentrant: garbage collection may run while this thread holds it, and finalize a file that submits tasks.
        self._lock = threading.RLock()
        self._places = threading.BoundedSemaphore(workers)
        self._executor: ThreadPoolExecutor | None = None

    def __repr__(self) -> str:
        return f"Transfers(workers={self.workers})"

    def submit(self, task: Callable[[_In], _Out], argument: _In) -> Future[_Out]:
        """Start ``task(argument)`` on a thread. If none can take it, as at interpreter exit, run it here."""
        errand = Errand(task, argument)
        self._start(errand)
        return errand.future

    def send(self, task: Callable[[_In], _Out], argument: _In) -> Future[_Out]:
        """Start ``task(argument)`` once fewer sent tasks are unfinished than there are threads.

        This bounds the memory of tasks in flight, however many files are written at once.
        """
        self._places.acquire()
        try:
            future = self.submit(task, argument)
        except BaseException:
            self._places.release()
            raise
        future.add_done_callback(lambda _: self._places.release())
        return future

    def map(self, task: Callable[[_In], _Out], arguments: Iterable[_In]) -> list[_Out]:
        """Run ``task`` on every argument and return the results in order.

        If the call is interrupted, it starts no further task and raises when the running tasks have ended. The caller
        may then reuse memory that it lent to them. A request that hangs delays this until its timeout.

        Raises:
            BaseException: The first error of a task, after every task has ended.
        """
        items = list(arguments)
        if len(items) < 2:  # noqa: PLR2004 - one item needs no thread
            return [task(item) for item in items]
        errands = [Errand(task, item) for item in items]
        try:
            for errand in errands:
                self._start(errand)
            errors = [error for error in [errand.future.exception() for errand in errands] if error is not None]
        except BaseException:
            while not all(errand.future.done() for errand in errands):
                with contextlib.suppress(BaseException):  # another interrupt must not cut this one's wait short
                    wait([errand.future for errand in errands if not errand.cancel()])
            raise
        if errors:
            raise errors[0]
        return [errand.future.result() for errand in errands]

    def _start(self, errand: Errand[_In, _Out]) -> None:
        with self._lock:
            if self._executor is None:
                self._executor = ThreadPoolExecutor(self.workers, thread_name_prefix=self._name)
            try:
                self._executor.submit(errand.run)
            except RuntimeError:
                pass
            else:
                return
        errand.run()


transfers = PerProcess(Transfers)
"""This process's `Transfers`."""


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
