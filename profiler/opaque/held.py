"""A module or function that is called as it is, with what a call needs; what it does is looked for at each call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from profiler.observe.data_writes import DataWrites
from profiler.observe.drawn_from import drawn_from
from profiler.observe.elsewhere import constants_reached
from profiler.observe.gradients_so_far import READS_GRADIENT, GradientsLeftAlone
from profiler.observe.python_state import (
    Attribute,
    attributes_of,
    attributes_of_tensors,
    changed_names,
    put_all_back,
    put_back,
    put_on_tensors,
)
from profiler.observe.random_states import OF_PYTHON_AND_NUMPY, generators_in, python_and_numpy_states, seeded
from profiler.observe.standing_in import standing_in
from profiler.observe.storage_watch import is_strided, storage_bytes
from profiler.observe.type_checkers import checkers_of, first_items_checked
from profiler.opaque.called_functions import CalledFunction, content_of
from profiler.opaque.statistics import Measured, is_measurable, measuring, moving
from profiler.torch_private import gradient_hooks


class Changed(Enum):
    """What becomes of the attributes that a call changes."""

    REFUSED = auto()  # if they are changed in call after call: a cache may be made
    PUT_BACK = auto()
    LEFT = auto()


@dataclass(frozen=True, slots=True)
class Done:
    """What a module has done in a call.

    Attributes:
        result: what it returned.
        written: names of the buffers that it wrote.
        replaced: those of them in whose place it has put another tensor, which its backward pass may not see, and that.
        draws: whether it drew random numbers of other generators than torch's own.
        left: attributes that it changed, as it has left them.
        measured: statistics of its batch normalizations, in the order of their calls.
    """

    result: Any
    written: set[str]
    replaced: Mapping[str, Tensor]
    draws: bool
    left: Mapping[str, Attribute] = field(default_factory=dict)
    measured: Sequence[Measured] = ()


class Refused(Exception):  # noqa: N818 - caught and turned into an error of our tree
    """A module that is called as it is did what no layer may do."""


class ChangesAttribute(Refused):
    """It changed an attribute, once more."""


class Held:
    """A module with what a call of it needs: its parameters and buffers by name, and its modes.

    Args:
        path: of the module in the model; of a `CalledFunction` the function's name.
        module: the module.
    """

    def __init__(self, path: str, module: nn.Module) -> None:
        self.path = path
        self.is_function = isinstance(module, CalledFunction)
        self.module = module
        self.forward: Callable[..., Any] = module.forward
        self.own_forward: Any = module.__dict__.get("forward")  # set on the instance, not the class
        self.parameters: Mapping[str, Tensor] = dict(module.named_parameters())
        self.buffers: Mapping[str, Tensor] = dict(module.named_buffers())
        self._flags = [(part, part.training) for part in module.modules()]
        self.generators = drawn_from(module).generators
        self.moving = moving(module)
        self._measurable = {path: part for path, part in self.moving.items() if is_measurable(part)}
        self._checkers = checkers_of(module)
        self.constants = constants_reached(module)

    def __str__(self) -> str:
        """What an error calls it."""
        return f"{'function' if self.is_function else 'module'} {self.path!r}"

    @property
    def names(self) -> tuple[str, ...]:
        """Of parameters, then buffers: the first arguments of a call."""
        return (*self.parameters, *self.buffers)

    def momentum(self, path: str) -> float:
        """Of one of its batch normalizations."""
        found: float = getattr(self._measurable[path], "momentum")  # noqa: B009 - of its class only torch knows
        return found

    def call(
        self,
        tensors: Mapping[str, Tensor],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        made: dict[str, Any],
        *,
        may_draw: bool,
        seed: int | None,
        changed: Changed = Changed.REFUSED,
    ) -> Done:
        """Call the module with other parameters and buffers.

        Args:
            tensors: its parameters and buffers by name.
            args: of the call.
            kwargs: of the call.
            made: attributes that earlier calls have changed, and what these were before. It may make a cache: change
                an attribute once, and again where somebody has put that back.
            may_draw: whether it may draw from random generators other than torch's own: Python's and numpy's, and
                those that it holds.
            seed: of these, which are afterwards as they were; None to let them draw on.
            changed: what becomes of attributes that it changes.

        Raises:
            Refused: it changed an attribute, drew random numbers that it must not, or wrote an argument.
        """
        given = {**tensors}
        versions = {name: tensor._version for name, tensor in tensors.items()}
        entering = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        attributes, on_tensors = attributes_of(self.module), attributes_of_tensors(tensors)
        writes = DataWrites({**tensors, **{f"argument {position}": leaf for position, leaf in enumerate(entering)}})
        checks = first_items_checked(self._checkers)
        ids = {id(tensor) for tensor in tensors.values()}

        def refuse_gradients() -> NoReturn:
            raise Refused(f"it {READS_GRADIENT}; do that between steps")

        looks = [*self._looks(tensors, entering, args, kwargs)]
        if not may_draw:
            looks.append((_DRAWS, python_and_numpy_states))
        with _unchanged(looks):
            with (
                self.seeded(seed) as drawn,
                self._modes(),
                standing_in(self.module, given),
                measuring(self._measurable) as measured,
                checks,
                writes,
                GradientsLeftAlone(lambda tensor: id(tensor) in ids, refuse_gradients),
            ):
                forward = self.module.forward if "" in self._measurable else self.forward
                result = forward(*args, **kwargs)
                drew = drawn()
            put = put_on_tensors(on_tensors, attributes_of_tensors(tensors))
            if put:
                raise Refused(f"it sets {put[0]!r}, an attribute of a tensor; keep it in a buffer (register_buffer)")
            left = self._left(attributes, made, changed)
            through_data = writes.written()
            if through_data - tensors.keys():
                raise Refused(_WRITES_ARGUMENT)
            replaced = {name: given[name] for name in self.buffers if given[name] is not tensors[name]}
            for name, value in replaced.items():
                _refuse_another_kind(name, tensors[name], value)
            written = self._written(tensors, versions, through_data | replaced.keys())
        return Done(result, written, replaced, drew, left, measured)

    def _looks(
        self, tensors: Mapping[str, Tensor], entering: Sequence[Tensor], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Iterator[tuple[str, Callable[[], Any]]]:
        """What a call leaves as it was: the reason to refuse one that does not, and what to look at."""
        for name, constant in self.constants.items():
            yield (
                f"it writes {name!r}, a tensor that is no buffer; make it one (register_buffer)",
                partial(getattr, constant, "_version"),
            )
        yield _WRITES_ARGUMENT, lambda: [tensor._version for tensor in entering]
        yield _FREES_ARGUMENT, lambda: [storage_bytes(tensor) for tensor in entering if is_strided(tensor)]
        yield _HOOKS_ARGUMENT, lambda: [*map(gradient_hooks, (*tensors.values(), *entering))]
        yield "it changes one of its arguments; let it work on a copy", lambda: self._settings(args, kwargs)

    def _written(self, tensors: Mapping[str, Tensor], versions: Mapping[str, int], otherwise: Set[str]) -> set[str]:
        """Names of the buffers that a call has written, in place or otherwise."""
        written = {name for name, tensor in tensors.items() if tensor._version != versions[name]} | otherwise
        if written & self.parameters.keys():
            raise Refused(f"it writes its parameter {min(written & self.parameters.keys())!r}; use a buffer for that")
        return written

    def _left(self, before: dict[str, Attribute], made: dict[str, Any], changed: Changed) -> Mapping[str, Attribute]:
        """The attributes that a call has changed, now that it is done with."""
        now = attributes_of(self.module)
        names = changed_names(before, now)
        left = {name: now[name] for name in names if name in now}
        if changed is Changed.PUT_BACK:
            put_all_back(before, now)
        elif changed is Changed.REFUSED:
            found = {name: before[name].key if name in before else None for name in names}
            repeated = [name for name in names if made.setdefault(name, found[name]) != found[name]]
            if repeated:
                put_back(before, repeated)
                raise ChangesAttribute(f"it changes its attribute {repeated[0]!r}; make it a buffer (register_buffer)")
        return left

    @contextlib.contextmanager
    def as_left(self, left: Mapping[str, Attribute]) -> Iterator[None]:
        """Within, these attributes are as a call has left them: its backward pass may read them."""
        before = attributes_of(self.module) if left else {}
        put_back(left, left)
        try:
            yield
        finally:
            if left:
                put_all_back(before, attributes_of(self.module))

    def _settings(self, *arguments: Any) -> list[bytes | None]:
        """What those arguments hold that a function alone may take: configurations and the like."""
        if not self.is_function:
            return []
        return [content_of(leaf) for leaf in pytree.tree_leaves(arguments) if not isinstance(leaf, Tensor)]

    def seeded(self, seed: int | None) -> contextlib.AbstractContextManager[Callable[[], bool]]:
        """Within, random generators other than torch's own draw what the seed says."""
        if seed is None:
            return contextlib.nullcontext(lambda: False)
        held = generators_in(value for part in self.module.modules() for value in part.__dict__.values())
        every = {id(generator): generator for generator in (*OF_PYTHON_AND_NUMPY, *held, *self.generators)}
        return seeded([*every.values()], seed)

    @contextlib.contextmanager
    def _modes(self) -> Iterator[None]:
        """Training or evaluation mode as they were when the model was traced."""
        now = [(part, part.training) for part, _ in self._flags]
        for part, flag in self._flags:
            part.training = flag
        try:
            yield
        finally:
            for part, flag in now:
                part.training = flag


_DRAWS = "it draws from Python's or numpy's random generator, and did not when traced"
_WRITES_ARGUMENT = "it writes one of its arguments in place; let it work on a copy"
_FREES_ARGUMENT = "it frees the memory of an argument, which others may read; let it keep its input"
_HOOKS_ARGUMENT = (
    "it hooks the gradient of an argument or parameter, of which a layer may have a part; let it hook a value of its "
    "own (x = x.view_as(x))"
)


def _refuse_another_kind(name: str, buffer: Tensor, value: Tensor) -> None:
    """What a buffer is replaced with is copied into it; floats of fewer bits are the same there.

    Raises:
        Refused: it does not fit into it.
    """
    puts = "it puts a tensor of {} in the place of its buffer {!r}, of {}; let it keep its {}"
    if value.shape != buffer.shape:
        raise Refused(puts.format(f"shape {list(value.shape)}", name, f"shape {list(buffer.shape)}", "shape"))
    floats = value.dtype.is_floating_point and buffer.dtype.is_floating_point
    if value.dtype != buffer.dtype and not (floats and torch.promote_types(value.dtype, buffer.dtype) == buffer.dtype):
        raise Refused(puts.format(value.dtype, name, buffer.dtype, "dtype"))


@contextlib.contextmanager
def _unchanged(looks: Sequence[tuple[str, Callable[[], Any]]]) -> Iterator[None]:
    """Within, all that is looked at stays as it is.

    Raises:
        Refused: for the reason that stands with what has changed.
    """
    before = [look() for _, look in looks]
    yield
    for (reason, look), was in zip(looks, before, strict=True):
        if look() != was:
            raise Refused(reason)
