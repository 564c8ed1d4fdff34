"""The one runtime: walks the list of actions of a process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from executor.measure.action_times import ActionTimes
from executor.run.in_process import InProcess
from executor.run.program import Instruction, Move, Program
from executor.run.stage_runner import MicroBatch, StageRunner
from executor.run.transport import Transport
from executor.watch.position import Logbook, Phase
from planner.plan.actions import Action, ActionKind
from profiler.errors import ExecutionError
from profiler.machine.backend import HOST, backend_of
from profiler.torch_private import is_profiled

_Place = tuple[int, int]  # stage and micro-batch


class Runtime:
    """Carries out programs.

    Args:
        runners: the stages of this process.
        remote: transport to other processes.
        log: where each action is noted before it begins.
        check_finite: whether a loss that is not finite is an error.
    """

    def __init__(self, runners: Mapping[int, StageRunner], remote: Transport, log: Logbook, check_finite: bool) -> None:
        self._runners = runners
        self._local = InProcess()
        self._remote = remote
        self._log = log
        self._check_finite = check_finite
        self.action_times = ActionTimes(next(iter(runners.values())).device)

    @property
    def slots_bytes(self) -> int:
        """What messages between processes lie in, in addition to tensors."""
        return self._remote.slots_bytes

    def run(self, program: Program, batches: Sequence[MicroBatch]) -> None:
        """Carry out a program on the micro-batches of one replica; the logbook says of any failure where it was."""
        work = _Work(self._runners, self._local, self._remote, program, batches)
        note, waited, carry_out = self._log.action, self.action_times.waited, work.carry_out
        profiled, check_finite = is_profiled(), self._check_finite
        mark = self.action_times.start(program.actions)
        self._local.begin(())
        self._remote.begin(program.remote)
        for instruction in program.instructions:
            note(instruction.numbers)
            if instruction.posts:
                self._remote.post(instruction.posts)
            if instruction.prepares:
                self._remote.prepare(instruction.prepares)
            if profiled:
                with torch.profiler.record_function(str(instruction.action)):
                    carry_out(instruction)
            else:
                carry_out(instruction)
            if instruction.waits:
                waited(self._remote.waiting_since_s)
            mark()
            if check_finite and instruction.has_loss:
                self._refuse_infinite(
                    self._runners[instruction.action.stage].loss_of(batches[instruction.action.micro_batch])
                )
        self._log.phase(Phase.END_OF_STEP)
        self._remote.end()

    def _refuse_infinite(self, loss: Tensor | None) -> None:
        if loss is not None and not bool(torch.isfinite(loss)):
            raise ExecutionError(
                f"{self._log.position}: the loss of this micro-batch is {loss.item()}; look at its samples, or "
                "lower the learning rate"
            )


class _Work:
    """What is under way in one run: received messages that wait for their action, and results that wait to leave."""

    def __init__(
        self,
        runners: Mapping[int, StageRunner],
        local: Transport,
        remote: Transport,
        program: Program,
        batches: Sequence[MicroBatch],
    ) -> None:
        self._runners = runners
        self._local = local
        self._remote = remote
        self._training = program.training
        self._batches = batches
        self._incoming: dict[_Place, dict[str, Tensor]] = {}
        self._outgoing: dict[_Place, dict[str, Tensor]] = {}
        # By channel the values without a gradient; of what is sent, by the channel's complement.
        self._absent: dict[int, list[str]] = {}

    def carry_out(self, instruction: Instruction) -> None:
        """Do what the action says."""
        action = instruction.action
        if instruction.move is None:
            self._compute(instruction)
        elif instruction.receives:
            self._receive(action, instruction.move)
        else:
            self._send(action, instruction.move)

    def _receive(self, action: Action, move: Move) -> None:
        received = (self._remote if move.is_remote else self._local).receive(move.transfer)
        channel = move.transfer.channel
        if move.says_which:
            exists = received.pop(0).tolist()
            self._absent[channel] = [name for name, there in zip(move.names, exists, strict=True) if not there]
        values = dict(zip(move.names, received, strict=True))
        for name in self._absent.get(channel, ()):
            del values[name]
        self._incoming.setdefault((action.stage, action.micro_batch), {}).update(values)

    def _send(self, action: Action, move: Move) -> None:
        place = (action.stage, action.micro_batch)
        outgoing = self._outgoing.pop(place) if move.is_last else self._outgoing[place]
        if action.kind is ActionKind.SEND_B:
            tensors = self._gradients(action, move, outgoing)
        else:
            tensors = [outgoing[name] for name in move.names]
        (self._remote if move.is_remote else self._local).send(move.transfer, tensors)

    def _gradients(self, action: Action, move: Move, found: Mapping[str, Tensor]) -> list[Tensor]:
        """The message with the gradients of a stage's inputs.

        A value without a path to the loss has none, which is not the same as zeros: weight decay would move what no
        gradient reaches. Which ones exist follows from the graph, so the first micro-batch to go back says it for all.
        """
        known = self._absent.get(~move.transfer.channel)
        if known == [] and all(name in found for name in move.names):
            return [found[name] for name in move.names]
        absent = [name for name in move.names if name not in found]
        for name in self._absent.setdefault(~move.transfer.channel, absent):
            if name in found:
                raise ExecutionError(
                    f"{action}: {name} has a gradient, but had none in the micro-batches that went back before; "
                    "let loss_fn use the same outputs in every micro-batch of a step, with weight 0 where need be"
                )
        device = self._runners[action.stage].device
        tensors = [
            torch.zeros(spec.shape, dtype=spec.dtype, device=device) if name in absent else found[name]
            for name, spec in zip(move.names, move.specs, strict=True)
        ]
        if move.says_which:
            exists = torch.tensor([name not in absent for name in move.names], device=HOST)
            tensors.insert(0, backend_of(device).from_host(exists, device))
        return tensors

    def _compute(self, instruction: Instruction) -> None:
        action, layers = instruction.action, instruction.layers
        runner = self._runners[action.stage]
        number = action.micro_batch
        batch = self._batches[number]
        before = self._batches[number - 1].index if number else None
        place = (action.stage, number)
        if action.kind is ActionKind.R:
            runner.recompute(layers, batch, before)
            return
        if action.kind is ActionKind.W:
            runner.weights(batch)
            return
        received = self._incoming.pop(place, {})
        if action.kind is ActionKind.B or action.kind is ActionKind.I:
            self._outgoing[place] = runner.backward(layers, batch, received, before)
        elif self._training:
            self._outgoing[place] = runner.forward(layers, batch, received, before, keep=instruction.keep)
        else:
            self._outgoing[place] = runner.evaluate(layers, batch, received)
