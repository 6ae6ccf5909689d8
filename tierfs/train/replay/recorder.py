"""`Recorder`: logs what the optimizers get at each step, and keeps the log within its budget.

Hooks around ``optimizer.step`` copy the gradients into memory of the ram tier, as they are after reduction, accumulation,
unscaling and clipping. `made_step`, at the end of a training step, adds the other values and publishes the file.

Invariants:

- The files of a chain lead, each from the step of the one before, from the chain's base to its last step. A file is
  complete or absent.
- Each full save begins a chain, whose name it has. So does a restore.
- A chain ends at the first step that cannot be logged. Then the policy asks for a full save.
- Files are removed only if they lead to the step of a complete full save, or to an earlier one.
"""

from __future__ import annotations

import logging
import secrets
import socket
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch

from tierfs.checkpoint.notes import LoggedStep, logged_steps
from tierfs.clock import boot_id
from tierfs.dcp.save.gpu_staging import GpuStaging
from tierfs.dcp.save.gpu_tensors import copy_in
from tierfs.dcp.save.shard_file import ShardFile
from tierfs.digest import checksum
from tierfs.errors import CapacityError, InvalidInputError, NotFoundError, TierfsError
from tierfs.host.pending.levels import Level
from tierfs.session.settings import ranks_here
from tierfs.store import Store, delete
from tierfs.train.agree import World
from tierfs.train.handle import SaveHandle
from tierfs.train.replay.parts import (
    Parts,
    StepFacts,
    check_gradient,
    commit_log,
    groups_of,
    kind_of,
    local,
    parameters_of,
)
from tierfs.train.replay.policy import Replay
from tierfs.train.run import RunDirectory
from tierfs.train.state import DictState, TrainState
from tierfs.train.values import digests_of
from tierfs.units import format_bytes

CHAIN = "replay"
"""The name of a checkpoint's chain among the facts of its own description."""
SHORT_CHAINS_MAX = 3
"""After this many chains in a row without a file, nothing more is logged: the reason recurs at each step."""
LOOK_EVERY_S = 1.0
STEPS_A_TURN = 8
"""Samples of the weights take other places after this many steps, because choosing places costs more than a sample."""
_AMP = ("grad_scale", "found_inf")
"""Attributes that a GradScaler sets while an optimizer with its own unscaling makes a step."""
_logger = logging.getLogger("tierfs.train")


class Recorder:
    """Logs the steps of one rank. All methods run on the training thread.

    Attributes:
        chain: The chain that the next file belongs to; empty while nothing is logged.
        wants_save: Whether the log needs a full save.
    """

    def __init__(self, policy: Replay, run: RunDirectory, world: World) -> None:
        self.policy = policy
        self.chain = self._parent = ""
        self.wants_save = True
        self._level = Level.parse(policy.level)
        self.run = run
        self.world = world
        self._gpu = GpuStaging("ram", None)
        self._session = world.from_first(f"{time.time_ns():016x}-{secrets.token_hex(4)}", world.training)
        # A host here is what has one ram tier, so that its ranks can read each other's files.
        self._hosts = world.gather((boot_id(), socket.gethostname(), run.state_dir), world.training)
        self._same = [world.rank]  # the ranks of this host that have the same gradients; the first one logs them
        self._chains = 0
        self._short = 0  # chains in a row that ended without a file
        self._base = self._at = self._last = -1  # the chain's base, the last step with a file, the last one made
        self._is_off = self._is_paused = self._is_clean = False
        self._parts: Parts | None = None
        self._structure: list[list[list[str]]] = []
        self._hooks = ExitStack()
        self._turn = 0
        self._mark: tuple[list[int], bytes] = [], b""  # of the weights, as the last step of an optimizer left them
        self._others: dict[str, str] = {}  # the digests of tensors that are neither parameters nor their state
        self._file: ShardFile | None = None
        self._events: list[dict[str, Any]] = []
        self._metrics: dict[int, dict[str, float]] = {}
        self._files: deque[tuple[int, str, int]] = deque()  # step, path and bytes
        self._left: list[str] = []
        self._saves: deque[SaveHandle] = deque(maxlen=16)
        self._looked_s = 0.0
        policy.recorder = self

    @property
    def _used(self) -> int:
        return sum(length for _, _, length in self._files)

    def made_step(self, step: int, state: TrainState | DictState, metrics: Mapping[str, Any]) -> None:
        """Publish the file of a finished step, or of several. Remove files that a full save has made useless.

        Raises:
            InvalidInputError: The state or its optimizer cannot be logged.
        """
        if self._is_off:
            return
        self._last = step
        self._bind(state)
        if self.chain and self._check_weights():
            self._metrics[step] = {name: float(value) for name, value in metrics.items()}
            if len(self._metrics) >= self.policy.every:
                self._publish(step)
        try:
            self._release()
        except TierfsError as error:  # what is left is removed after a later full save
            _logger.warning("%s: old files of the log could not be removed: %s", self.run.url, error)
        self.wants_save = self.wants_save or self._used > self.policy.ring_bytes // 2

    def _publish(self, step: int) -> None:
        assert self._parts is not None
        parts = self._parts
        try:
            file = self._open_file()
            values, tensors = parts.others()
            digests = digests_of(tensors)
            new = [(name, each) for name, each in tensors.items() if digests.get(name) != self._others.get(name)]
            copy_in(file, new, at_once=True)
            facts = StepFacts(
                parent=self._parent,
                base=self._base,
                rank=self._same[0],
                build=parts.build(),
                structure=self._structure,
                events=self._events,
                groups=[groups_of(optimizer) for optimizer in parts.optimizers],
                values={**values, **parts.values()},
                digest=parts.digest() if step % self.policy.prove_every == 0 else "",
                sample=(self._turn, checksum(self._mark[1]).hex()),
                metrics=self._metrics,
            )
            if self._used + sum(run.memory.length for run in file.runs) > self.policy.ring_bytes:
                raise CapacityError(f"the log has {format_bytes(self._used)} of ring={self.policy.ring!r}", tier="ram")
            store, run = self.run.open()
            self._remove(store, self._left)
            self._left = []
            path = LoggedStep(self.chain, self._at, step, self.world.rank, self.world.size).path(run)
            length = commit_log(file, path, facts, self._level)
        except InvalidInputError:
            self._end("")
            raise
        except TierfsError as error:
            self._end(str(error))
            return
        self._file, self._events, self._metrics, self._others = None, [], {}, digests
        self._files.append((step, path, length))
        self._at, self._short = step, 0

    def _open_file(self) -> ShardFile:
        if self._file is None:
            store, _ = self.run.open(write=True)
            assert self._parts is not None
            needed = ranks_here() * (self.policy.ring_bytes // len(self._same) + self._parts.nbytes())
            has = 0 if store.tiers is None else store.tiers.ram.budget_bytes
            if has < needed:  # otherwise a full save would wait for room that the log never gives
                raise InvalidInputError(
                    f"Replay(ring={self.policy.ring!r}) and a full save of the ranks here need {format_bytes(needed)} in the "
                    f"ram tier, which has {format_bytes(has)}: lower ring=, or raise ram= (TIERFS_RAM)"
                )
            self._file = ShardFile(store, self._gpu, waits=False)
        return self._file

    def _bind(self, state: TrainState | DictState) -> None:
        """Hook the optimizers of a state. If they or their parameters are others than before, the chain ends."""
        parts = self._parts
        if parts is not None and parts.takes(state) and parts.structure() == self._structure:
            return
        parts = Parts(state)
        self.policy.check(parts.optimizers)
        self._end("the optimizer has other parameters than before")
        self._parts, self._structure = parts, parts.structure()
        rank = self.world.rank
        self._same = sorted(each for each in parts.replicas(rank) if self._hosts[each] == self._hosts[rank])
        self._hooks.close()
        for optimizer in parts.optimizers:
            self._hooks.callback(optimizer.register_step_pre_hook(self._before_step).remove)
            self._hooks.callback(optimizer.register_step_post_hook(self._after_step).remove)
        self._note_weights()

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Copy the gradients of an optimizer that is about to make a step.

        Raises:
            InvalidInputError: It is called with a closure, or a gradient cannot be logged.
        """
        if self._is_paused or not self.chain or torch.compiler.is_compiling():
            return
        if any(each is not None for each in (*args[1:], *kwargs.values())):
            raise InvalidInputError("Replay cannot log optimizer.step(closure): the closure computes other gradients")
        parts = self._parts
        assert parts is not None
        if not self._check_weights():
            return
        prefix = f"{len(self._events)}:" if self._events else ""
        tensors: list[tuple[str, torch.Tensor]] = []
        none, sparse, strides = [], {}, {}
        for each in parameters_of(optimizer):
            name = parts.names.get(id(each))
            if name is None:
                self._end("a parameter was added to the optimizer")
                return
            if each.grad is None:
                none.append(name)
                continue
            check_gradient(name, each, each.grad)
            gradient = local(each.grad)
            if gradient.layout is torch.sparse_coo:
                sparse[name] = [list(gradient.shape), gradient.is_coalesced()]
                pair = gradient._indices(), gradient._values()
                tensors += zip((f"{prefix}{name}:indices", f"{prefix}{name}:values"), pair, strict=True)
                continue
            if not gradient.is_contiguous():
                strides[name] = list(gradient.stride())
            tensors.append((f"{prefix}{name}", gradient))
        try:
            taken = tensors if self._same[0] == self.world.rank else []
            copy_in(self._open_file(), taken, at_once=True)
        except InvalidInputError:
            raise
        except TierfsError as error:
            self._end(str(error))
            return
        amp = {name: value for name in _AMP if (value := getattr(optimizer, name, None)) is not None}
        self._events.append(
            {
                "optimizer": next(at for at, each in enumerate(parts.optimizers) if each is optimizer),
                "kind": kind_of(optimizer),
                "groups": groups_of(optimizer),
                "none": none,
                "sparse": sparse,
                "strides": strides,
                "amp": {name: value.detach().cpu().clone() for name, value in amp.items()},
            }
        )

    def _after_step(self, *_: Any) -> None:
        if not self._is_paused:
            self._note_weights()

    def _note_weights(self) -> None:
        """Note the weights, which only ``optimizer.step`` may change from now on."""
        assert self._parts is not None
        self._turn = self._at // STEPS_A_TURN
        self._mark = self._parts.mark(self._turn)

    def _check_weights(self) -> bool:
        """Return whether only ``optimizer.step`` has changed the weights since the last look; else end the chain."""
        assert self._parts is not None
        if self._mark == self._parts.mark(self._turn):
            return True
        self._end("parameters were changed outside of optimizer.step()")
        return False

    def _end(self, why: str) -> None:
        """End the chain. Nothing is logged until the next full save."""
        if self._file is not None:
            self._file.abort()
        self._file, self._events, self._metrics = None, [], {}
        if not self.chain:
            return
        self._short = self._short + 1 if self._at == self._base else 0
        self.chain, self.wants_save = "", True
        if self._short >= SHORT_CHAINS_MAX:
            self._is_off, self.wants_save = True, False
            _logger.error("%s: steps are logged no longer: %s", self.run.url, why)
        elif why:
            _logger.warning("%s: no step after %d is logged until a full save: %s", self.run.url, self._at, why)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Log nothing inside the context: torch makes steps with zero gradients to create an optimizer's state."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False
            if self._parts is not None:
                self._note_weights()

    @property
    def next_chain(self) -> str:
        """The name of the chain that begins with the next full save. It is the same on all ranks."""
        return f"{self._session}-{self._chains + 1:08x}"

    def before_save(self, step: int, state: TrainState | DictState) -> dict[str, str]:
        """Publish the file of the steps that have none, so that the chain leads to the state of a full save.

        Return the name of the chain that begins with the save, for its description; nothing if nothing is logged.
        """
        if self._is_off:
            return {}
        if step != self._last:
            self.made_step(step, state, {})
        if self._metrics:
            self._publish(step)
        if self._events or (self.chain and not self._check_weights()):
            self._end("")  # the state is that of a later step than the last one with a file
        return {CHAIN: self.next_chain}

    def saved(self, step: int, state: TrainState | DictState, handle: SaveHandle) -> None:
        """Begin a chain at a full save, whose state was just copied."""
        self._begin(step, state, self.chain)
        self._saves.append(handle)

    def restored(
        self,
        step: int,
        state: TrainState | DictState,
        parent: str,
        kept: Sequence[tuple[int, str, int]],
        left: list[str],
    ) -> None:
        """Begin a chain at a restored step, whose state belongs to the chain or save ``parent``.

        ``kept`` are the step, path and bytes of this rank's files that lead to the step, ``left`` the paths of its other
        files, which the run leaves behind. They are removed before the next file is published.
        """
        self._is_off, self._short = False, 0
        self._files, self._left = deque(kept), left
        self._saves.clear()
        self._begin(step, state, parent)

    def _begin(self, step: int, state: TrainState | DictState, parent: str) -> None:
        self._bind(state)
        self._end("")
        assert self._parts is not None
        self.chain, self._parent, self.wants_save = self.next_chain, parent, False
        self._chains += 1
        self._base = self._at = self._last = step
        self._others = digests_of(self._parts.others()[1])
        self._note_weights()

    def close(self) -> None:
        """Remove the hooks, and release memory that no file has. The log stays."""
        self._end("")
        self._hooks.close()
        self._is_off = True

    def _release(self) -> None:
        """Remove the files that lead to the step of a complete full save, or to an earlier one."""
        now_s = time.monotonic()
        if self._level > Level.STAGED and now_s - self._looked_s < LOOK_EVERY_S:
            return
        self._looked_s = now_s
        done = [each for each in self._saves if each.done and each.error is None]
        if self._level > Level.STAGED:
            done = [each for each in done if Level.parse(each.level) >= self._level]
        if not done:
            return
        newest, (store, run) = max(each.step for each in done), self.run.open()
        if not self._is_clean:  # files of earlier processes, which no restore needs any more
            rank, size = self.world.rank, self.world.size
            mine = (one for one in logged_steps(store, run) if one.rank == rank or (one.rank >= size and rank == 0))
            self._remove(store, [one.path(run) for one in mine if not one.chain.startswith(self._session)])
            self._is_clean = True
        while self._files and self._files[0][0] <= newest:
            self._remove(store, [self._files[0][1]])
            self._files.popleft()
        self._saves = deque((each for each in self._saves if each.step > newest), maxlen=self._saves.maxlen)

    @staticmethod
    def _remove(store: Store, paths: Sequence[str]) -> None:
        for path in paths:
            with suppress(NotFoundError):
                delete(store, path)
