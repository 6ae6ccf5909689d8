"""`Recorder`: logs what the optimizers get at each step, and keeps the log within its budget.

Hooks around ``optimizer.step`` copy the gradients into memory of the log, as they are after reduction, accumulation,
unscaling and clipping. `made_step`, at the end of a training step, adds the other values and publishes the file.

Invariants:

- The files of a chain lead, each from the step of the one before, from the chain's base to its last step. A file is
  complete or absent.
- Each full save begins a chain, whose name it has. So does a restore.
- No file ends at a step that left gradients unused: the file of a later step has it, too.
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
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from tierfs.checkpoint.notes import LoggedStep, logged_steps, remove_steps
from tierfs.checkpoint.step_logs import make_room, open_log
from tierfs.clock import boot_id
from tierfs.dcp.save.fill import copy_in
from tierfs.dcp.save.gpu_staging import GpuStaging
from tierfs.dcp.save.shard_file import ShardFile
from tierfs.digest import checksum
from tierfs.errors import CapacityError, InvalidInputError, TierfsError
from tierfs.host.pending.levels import Level
from tierfs.session.settings import ranks_here
from tierfs.store import Store
from tierfs.train.agree import World
from tierfs.train.handle import SaveHandle
from tierfs.train.optimizers import parameters_of
from tierfs.train.replay.logged_file import StepFacts, commit_log, gradients_of
from tierfs.train.replay.others import ALL, Others
from tierfs.train.replay.parts import Parts, groups_of, kind_of, local
from tierfs.train.replay.policy import Replay, StepLog
from tierfs.train.run import RunDirectory
from tierfs.train.state import DictState, TrainState
from tierfs.units import format_bytes

CHAIN = "replay"
"""The name of a checkpoint's chain among the facts of its own description."""
SHORT_CHAINS_MAX = 3
"""After this many chains in a row without a file, nothing more is logged: the reason recurs at each step."""
HELD_MAX = 16
"""A chain ends after this many steps in a row that leave gradients unused, although an optimizer made a step."""
LOOK_EVERY_S = 1.0
AHEAD = 4
"""The log has memory ahead for so many steps, but not for more of its ring than 1/AHEAD: new memory is slow."""
BESIDE_BYTES = 128 << 20
"""Memory of the log beyond its rings: for the file that a full ring refuses, and room between files."""
STEPS_A_TURN = 8
"""Samples of the weights take other places after this many steps, because choosing places costs more than a sample."""
_AMP = ("grad_scale", "found_inf")
"""Attributes that a GradScaler sets while an optimizer with its own unscaling makes a step."""
_logger = logging.getLogger("tierfs.train")


class Recorder(StepLog):
    """Logs the steps of one rank. All methods run on the training thread."""

    def __init__(self, policy: Replay, run: RunDirectory, world: World) -> None:
        super().__init__()
        self.policy = policy
        self._parent = ""
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
        self._others = Others()
        self._held = 0
        self._is_seen = False  # whether the running step of an optimizer was seen from its beginning
        self._file: ShardFile | None = None
        self._events: list[dict[str, Any]] = []
        self._metrics: dict[int, dict[str, float]] = {}
        self._files: deque[tuple[LoggedStep, int]] = deque()  # each with its length in bytes
        self._left: list[LoggedStep] = []
        self._memory: Store | None = None
        self._has_room = False
        self._saves: deque[SaveHandle] = deque(maxlen=16)
        self._looked_s = 0.0
        policy.recorder = self

    @property
    def _used(self) -> int:
        return sum(length for _, length in self._files)

    @property
    def memory(self) -> Store:
        """The run's log in shared memory. A log of a higher level is in the run's store."""
        if self._memory is None:
            budget_bytes = ranks_here() * self.policy.ring_bytes + BESIDE_BYTES
            self._memory = open_log(*self.run.open(), budget_bytes=budget_bytes)
        return self._memory

    def logged(self) -> list[LoggedStep]:
        """Return the files of the run's log. Raises as `logged_steps` does."""
        store, run = self.run.open()
        return logged_steps(run, store, self.memory)

    def made_step(self, step: int, state: TrainState | DictState, metrics: Mapping[str, Any]) -> None:
        """Publish the file of a finished step, or of several. Remove files that a full save has made useless.

        Raises:
            InvalidInputError: The state or its optimizer cannot be logged.
        """
        if self._is_off:
            return
        self._last = step
        self._bind(state)
        assert self._parts is not None
        self.is_between = self._parts.has_unused_gradients
        if self.chain and self._check_weights():
            self._metrics[step] = {name: float(value) for name, value in metrics.items()}
            self._held = self._held + 1 if self.is_between and self._events else 0
            if self._held > HELD_MAX:
                self._end(
                    f"gradients were left unused at {HELD_MAX} steps: zero those of the model before manager.step()"
                )
            elif len(self._metrics) >= self.policy.every and not self.is_between:
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
            is_proof = any(at % self.policy.prove_every == 0 for at in self._metrics)
            values, changed, problem = self._others.look(parts, ALL if is_proof else self._at // STEPS_A_TURN)
            if problem:
                self._end(problem)
                return
            copy_in(file, changed, at_once=True)
            facts = StepFacts(
                parent=self._parent,
                base=self._base,
                rank=self._same[0],
                build=parts.build(),
                structure=self._structure,
                events=self._events,
                groups=[groups_of(optimizer) for optimizer in parts.optimizers],
                values={**values, **parts.values()},
                frozen=(frozen := parts.frozen()),
                digest=parts.digest(frozen, self._others.digests) if is_proof else "",
                sample=(self._turn, checksum(self._mark[1]).hex()),
                metrics=self._metrics,
            )
            self._check_room(file)
            _, run = self.run.open()
            remove_steps(run, self._left)
            self._left = []
            logged = LoggedStep(file.store, self.chain, self._at, step, self.world.rank, self.world.size)
            length = commit_log(file, logged.path(run), facts)
        except InvalidInputError:
            self._end("")
            raise
        except TierfsError as error:
            self._end(str(error))
            return
        self._file, self._events, self._metrics = None, [], {}
        self._files.append((logged, length))
        self._at, self._short = step, 0

    def _check_room(self, file: ShardFile) -> None:
        if self._used + sum(len(run.view) for run in file.runs) > self.policy.ring_bytes:
            raise CapacityError(f"the log has {format_bytes(self._used)} of ring={self.policy.ring!r}", tier="ram")

    def _open_file(self) -> ShardFile:
        if self._file is None:
            store, _ = self.run.open(write=True)
            if self._level is Level.STAGED and not self._has_room:
                assert self._parts is not None
                self._has_room, length = True, sum(local(each).nbytes for each in self._parts.parameters)
                make_room(self.memory, min(AHEAD * length, self.policy.ring_bytes // AHEAD))
            self._file = ShardFile(store if self._level > Level.STAGED else self.memory, self._gpu, waits=False)
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
        if torch.compiler.is_compiling():
            return  # this call is not made each time that the compiled step is
        self._is_seen = True
        if self._is_paused or not self.chain:
            return
        if any(each is not None for each in (*args[1:], *kwargs.values())):
            raise InvalidInputError("Replay cannot log optimizer.step(closure): the closure computes other gradients")
        parts = self._parts
        assert parts is not None
        if not self._check_weights():
            return
        if any(id(each) not in parts.names for each in parameters_of(optimizer)):
            self._end("a parameter was added to the optimizer")
            return
        prefix = f"{len(self._events)}:" if self._events else ""
        tensors, forms = gradients_of(optimizer, parts.names, prefix)
        try:
            taken = tensors if self._same[0] == self.world.rank else []
            file = self._open_file()
            copy_in(file, taken, at_once=True)
            self._check_room(file)
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
                **forms,
                "amp": {name: value.detach().cpu().clone() for name, value in amp.items()},
            }
        )

    def _after_step(self, *_: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if self._is_seen and not self._is_paused:
            self._note_weights()
        self._is_seen = False

    def _note_weights(self) -> None:
        """Note the weights and the optimizers' state, which only ``optimizer.step`` may change from now on."""
        assert self._parts is not None
        self._turn = self._at // STEPS_A_TURN
        self._mark = self._parts.mark(self._turn)

    def _check_weights(self) -> bool:
        """Return whether only ``optimizer.step`` has changed the weights since the last look; else end the chain."""
        assert self._parts is not None
        if self._mark == self._parts.mark(self._turn):
            return True
        self._end(
            "parameters or the optimizer's state were changed outside of optimizer.step(), or inside torch.compile, "
            "which hides its calls"
        )
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
        self.is_fresh = False
        if self._is_off:
            return {}
        if step != self._last:
            self.made_step(step, state, {})
        assert self._parts is not None
        if self._metrics and not self._parts.has_unused_gradients:
            self._publish(step)
        if self._metrics or self._events or (self.chain and not self._check_weights()):
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
        kept: Sequence[tuple[LoggedStep, int]],
        left: list[LoggedStep],
    ) -> None:
        """Begin a chain at a restored step, whose state belongs to the chain or save ``parent``.

        ``kept`` are this rank's files that lead to the step, with their lengths in bytes, ``left`` its other files,
        which the run leaves behind. They are removed before the next file is published.
        """
        self._is_off, self._short, self._others = False, 0, Others()
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
        self._note_weights()
        if problem := self._others.begin(self._parts, self._at // STEPS_A_TURN):
            self._end(problem)

    def close(self) -> None:
        """Remove the hooks, and release memory that no file has. The log stays."""
        self._end("")
        self._hooks.close()
        self._is_off = True
        if self._memory is not None and self._memory.tiers is not None:
            self._memory.tiers.close()
            self._memory = None

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
        newest, (_, run) = max(each.step for each in done), self.run.open()
        if not self._is_clean:  # files of earlier processes, which no restore needs any more
            rank, size = self.world.rank, self.world.size
            mine = (one for one in self.logged() if one.rank == rank or (one.rank >= size and rank == 0))
            remove_steps(run, [one for one in mine if not one.chain.startswith(self._session)])
            self._is_clean = True
        remove_steps(run, [one for one, _ in self._files if one.step <= newest])
        self._files = deque(each for each in self._files if each[0].step > newest)
        self._saves = deque((each for each in self._saves if each.step > newest), maxlen=self._saves.maxlen)
