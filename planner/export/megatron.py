"""For Megatron-LM: `--pipeline-model-parallel-layout` and the options that go with it.

    Ettt|tttt|tttt|ttL        E: all before the first block, t: a block, L: all after the last; | begins a stage

Stage k runs on rank k mod (ranks), as here. Megatron builds the model itself, so blocks are counted and not named.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from itertools import groupby

from torch import nn

from planner.export.refusing import apart
from planner.export.target import Made, Recompute, Request, Target
from planner.export.units import block_paths, is_listed
from planner.plan.plan import Plan
from planner.plan.schedules import schedules_of
from profiler.errors import InfeasibleError
from profiler.precision import recipe_of
from profiler.text import counted
from profiler.tracing.sequence import LayerSequence

EMBEDDING, BLOCK, LOSS, NEXT_STAGE = "E", "t", "L", "|"
_PLAIN = 3
"""So many equal letters are written out; more as a letter with a count."""


def _lists(paths: Sequence[str]) -> dict[str, list[int]]:
    """Positions of the blocks of each list."""
    found: dict[str, list[int]] = {}
    for position, path in enumerate(paths):
        if is_listed(path):
            found.setdefault(path.rpartition(".")[0], []).append(position)
    return found


def _blocks(paths: Sequence[str]) -> range:
    """Positions of the transformer's blocks; none if there is not one list of them in a row."""
    lists = [positions for positions in _lists(paths).values() if len(positions) > 1]
    if len(lists) != 1 or lists[0] != list(range(lists[0][0], lists[0][-1] + 1)):
        return range(0)
    return range(lists[0][0], lists[0][-1] + 1)


def _borders(paths: Sequence[str]) -> range:
    """A stage may begin with any block, and with what follows the last."""
    blocks = _blocks(paths)
    return range(max(1, blocks.start), min(len(paths), blocks.stop + 1)) if blocks else range(0)


def _check(plan: Plan, model: nn.Module, sequence: LayerSequence) -> None:
    paths = block_paths(model)
    blocks = _blocks(paths)
    if not blocks:
        found = ", ".join(f"{len(positions)} in {name!r}" for name, positions in _lists(paths).items()) or "none"
        raise InfeasibleError(
            f"Megatron-LM lays out a transformer of one list of blocks, and this model has {found}; export to "
            "torch.distributed.pipelining, which takes any model"
        )
    for name, ranks in apart(plan, sequence).items():
        if ranks != [0, plan.ranks - 1]:
            raise InfeasibleError(
                f"Megatron-LM adds up gradients of word embeddings on the first and the last rank, and {name} is on "
                f"ranks {', '.join(map(str, ranks))}; untie it and plan again"
            )
    if plan.chunks > 1 and plan.M % plan.ranks:
        raise InfeasibleError(
            f"Megatron-LM's interleaved schedule takes whole groups of {plan.ranks} micro-batches, and M = {plan.M}; "
            f"plan with micro_batches={plan.ranks * max(1, round(plan.M / plan.ranks))}"
        )


def layout_text(stages: Sequence[Sequence[str]]) -> str:
    """The stages as Megatron's layout string, for letters of each.

    >>> layout_text(["Ettttt", "tttt", "ttL"])
    'Et*5|t*4|ttL'
    """
    return NEXT_STAGE.join(
        "".join(
            letter * len(run) if len(run := list(group)) <= _PLAIN else f"{letter}*{len(run)}"
            for letter, group in groupby(stage)
        )
        for stage in stages
    )


def _make(request: Request) -> Made:
    plan, paths = request.plan, [path for stage in request.unit_paths for path in stage]
    blocks = _blocks(paths)
    number = {path: position for position, path in enumerate(paths)}
    letters = ["".join(BLOCK for path in stage if number[path] in blocks) for stage in request.unit_paths]
    letters[0] = EMBEDDING + letters[0]
    letters[-1] += LOSS
    arguments = {
        "--pipeline-model-parallel-size": str(plan.ranks),
        "--pipeline-model-parallel-layout": layout_text(letters),
        "--num-layers": str(len(blocks)),
        "--micro-batch-size": str(request.micro_batch_size),
        "--global-batch-size": str(plan.batch_size),
    }
    if request.recomputes:
        arguments |= {
            "--recompute-granularity": "full",
            "--recompute-method": "uniform",
            "--recompute-num-layers": "1",
        }
    flags = [] if request.sequence.tied else ["--untie-embeddings-and-output-weights"]
    recipe = recipe_of(plan.sample.precision)
    if recipe is not None:
        flags += ["--bf16"] if recipe.casts_at_end else ["--bf16", "--accumulate-allreduce-grads-in-fp32"]
    if plan.shard_optimizer:
        flags.append("--use-distributed-optimizer")
    words = [word for pair in arguments.items() for word in pair] + flags
    notes = (
        f"{counted(plan.ranks * plan.replicas, 'process')} with tensor and context parallelism of 1; "
        f"Megatron-LM makes R = {plan.replicas} of them.",
        "Megatron-LM builds its own blocks: times and memory are predicted for those of this model.",
    )
    return Made(words, " ".join(map(shlex.quote, words)) + "\n", notes=notes)


TARGET = Target(
    name="megatron-lm",
    engine="Megatron-LM",
    make=_make,
    schedules=schedules_of("megatron-lm"),
    unit_paths=block_paths,
    between="a transformer's blocks",
    borders=_borders,
    tensors_between=1,
    recompute=Recompute.LISTED,
    adds_tied=True,
    averages_replicas=True,
    shards_optimizer=True,
    precisions=("bf16-mixed", "bf16-grads"),
    check=_check,
)
