"""How a question about a tensor's value becomes an answer and a check, while the model is traced.

    if x.sum() > 0:          True  <---  answer: what the sample's run had here
                               |
                               +-->  a node of the graph: check[model.py:31 is True](gt)

A tensor's own truth is asked of the tensor. A number (`x.max().item()`) stays a symbol, and what is checked is each
condition on it, so that other micro-batches may have other numbers; only where that does not do, as for a size, the
number itself is fixed and checked.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from profiler.conditions.answers import Answers, FromDecisions, Undecided
from profiler.conditions.chance import Lot, Ways
from profiler.conditions.check import Check
from profiler.conditions.drawn_numbers import drawn_as_operations, refuse_numbers_left
from profiler.conditions.numbers import numbers_function, reads_values
from profiler.conditions.reading import COMPARISONS, CONDITIONS, NUMBERS, Spot, spot_of
from profiler.conditions.sources import followed_from
from profiler.conditions.spelled_out import spelled_out
from profiler.errors import NotTraceableError
from profiler.observe.counts import counts_now
from profiler.observe.source_place import Place, keep_together_advice, place_now, place_of_node, setting_advice
from profiler.opaque.operators import LIBRARY
from profiler.sample_spec import Decision
from profiler.torch_private import asserted, can_carry, has_side_effect, unknown_value_errors

LIBRARY.define("condition(Tensor value, int site) -> ()")
LIBRARY.define("condition_on_number(SymInt value, int site) -> ()")
LIBRARY.impl("condition", lambda value, site: None, "CompositeExplicitAutograd")
LIBRARY.impl("condition", lambda value, site: None, "Meta")
LIBRARY.impl("condition_on_number", lambda value, site: None, "CompositeExplicitAutograd")
has_side_effect(torch.ops.gpipe_autoplan.condition.default)
has_side_effect(torch.ops.gpipe_autoplan.condition_on_number.default)

LARGEST_LIST = 64  # elements of a tensor that is made a list; each becomes a check [chosen]


class Questions:
    """The questions of one trace that only values answer, and what was decided.

    Args:
        model: that is traced.
        answers: to take; None for none, so that a question stays the error that it is.
        fix_numbers: fix every number that all of the sample's runs agree on, in place of the conditions on it.
        ways: to take at conditions that random numbers decide; None to refuse these.
    """

    def __init__(
        self, model: nn.Module, answers: Answers | None, *, fix_numbers: bool = False, ways: Ways | None = None
    ) -> None:
        self.decisions: list[Decision] = []
        self._model = model
        self._answers = answers
        self._fix_numbers = fix_numbers
        self._ways = ways
        self._ways_taken = 0
        self._lots: set[tuple[str, str]] = set()  # where random numbers decide
        self._left_open: dict[int, NotTraceableError] = {}  # by position of a decision that chance alone may excuse
        self._places: list[Place] = []
        self._counts: list[Mapping[str, int | float]] = []  # before each decision
        self._values: dict[Any, tuple[Any, ...]] = {}  # symbol of a number -> what it is in each of the runs

    def same_again(self) -> Questions:
        """For one more call of the model: it answers as these questions were."""
        answers = FromDecisions(self.decisions) if self._answers else None
        return Questions(self._model, answers, ways=None if self._ways is None else Ways())

    @property
    def decided(self) -> list[Decision]:
        """The decisions that are checked: not those that random numbers make anew each time."""
        return [decision for decision in self.decisions if (decision.module, decision.code) not in self._lots]

    @contextlib.contextmanager
    def answered(self) -> Iterator[None]:
        """Within, questions of the model's are answered and checks put into the graph that is being traced."""
        if self._answers is None:
            yield
            return
        with contextlib.ExitStack() as patches:
            for kind, name, ask in (
                (torch.SymBool, "__bool__", self._asked),
                (torch.SymInt, "__int__", self._made_number),
                (torch.SymInt, "__index__", self._made_number),
            ):
                patches.enter_context(mock.patch.object(kind, name, ask(getattr(kind, name))))
            patches.enter_context(_Mode(self))
            if self._ways is not None:
                patches.enter_context(drawn_as_operations())
            yield

    def condition(self, tensor: Tensor, ask: Callable[[], Any]) -> bool:
        """Whether a tensor of one element is true."""
        place = place_now(self._model)
        values = self._read(spot_of(place))
        try:
            return bool(ask())
        except NotTraceableError:
            raise
        except Exception as problem:
            answer = self._decide(place, tuple(map(bool, values)), problem, condition=True)
        torch.ops.gpipe_autoplan.condition(tensor, len(self.decisions) - 1)
        return bool(answer)

    def number(self, tensor: Tensor, ask: Callable[[], Any]) -> Any:
        """The element of a tensor: as a symbol, if it may be one, or fixed."""
        place = place_now(self._model)
        values = self._read(spot_of(place))
        problem: Exception | None = None
        try:
            found = ask()
        except NotTraceableError:
            raise
        except Exception as unknown:
            problem, found = unknown, None
        if isinstance(found, bool | int | float | complex):
            return found
        if problem is None and not self._fixes(place, values, tensor):
            for symbol in found.node.expr.free_symbols:
                self._values[symbol] = tuple(map(int, values)) if tensor.dtype == torch.bool else values
            return found
        answer = self._decide(place, values, problem, condition=tensor.dtype == torch.bool)
        torch.ops.gpipe_autoplan.condition(tensor, len(self.decisions) - 1)
        return answer

    def _fixes(self, place: Place, values: tuple[Any, ...], tensor: Tensor) -> bool:
        """Whether a number that could stay a symbol is fixed all the same."""
        assert self._answers is not None, "somebody asks"
        if isinstance(self._answers, FromDecisions):
            return self._answers.has_number(spot_of(place))
        changes = can_carry(tensor) and tensor.requires_grad  # with the parameters, in every step
        return self._fix_numbers and not changes and bool(values) and all(value == values[0] for value in values)

    def _read(self, spot: Spot) -> tuple[Any, ...]:
        assert self._answers is not None, "somebody asks"
        return self._answers.read(spot)

    def _decide(
        self, place: Place, values: tuple[Any, ...], problem: BaseException | None, *, condition: bool
    ) -> bool | int | float:
        assert self._answers is not None, "somebody asks"
        spot = spot_of(place)
        try:
            if condition and self._ways is not None and self._ways.decide_at(spot.module, spot.line):
                answer: bool | int | float = self._ways.way(self._ways_taken)
                self._ways_taken += 1
            else:
                answer = self._answers.decide(spot, values, condition=condition)
        except Undecided as reason:
            cure = setting_advice(self._model, place) or keep_together_advice(place.modules)
            refusal = NotTraceableError(
                f"cannot trace the model: in {place}: the forward pass branches on the values of a tensor, and no way "
                f"can be taken for all micro-batches: {reason}; {cure}, or make the branch independent of data "
                "(torch.where)",
                modules=place.modules,
            )
            if self._ways is None or not condition:
                raise refusal from problem
            refusal.__cause__ = problem
            self._left_open[len(self.decisions)] = refusal
            answer = False
        self.decisions.append(Decision(module=spot.module, line=spot.line, answer=answer))
        self._places.append(place)
        self._counts.append({} if self._ways is None else counts_now())
        return answer

    def _asked(self, ask: Callable[[Any], bool]) -> Callable[[Any], bool]:
        """What takes the place of a symbolic condition's `__bool__`."""

        def asked(question: Any) -> bool:
            try:
                return ask(question)
            except unknown_value_errors() as problem:
                place = place_now(self._model)
                answer = self._decide(place, self._in_each_run(question), problem, condition=True)
            as_number = torch.sym_ite(question, 1, 0)
            torch.ops.gpipe_autoplan.condition_on_number(as_number, len(self.decisions) - 1)
            return bool(answer)

        return asked

    def _made_number(self, convert: Callable[[Any], int]) -> Callable[[Any], int]:
        """What takes the place of a symbolic number's `__int__`."""

        def made(number: Any) -> int:
            try:
                return convert(number)
            except unknown_value_errors() as problem:
                place = place_now(self._model)
                answer = self._decide(place, self._in_each_run(number), problem, condition=False)
            torch.ops.gpipe_autoplan.condition_on_number(number, len(self.decisions) - 1)
            return int(answer)

        return made

    def _in_each_run(self, symbolic: Any) -> tuple[Any, ...]:
        """What a symbolic condition or number is for each of the sample's runs; nothing if that is not known."""
        expression = symbolic.node.expr
        symbols = expression.free_symbols
        known = [self._values.get(symbol, ()) for symbol in symbols if symbol in self._values]
        sizes: Sequence[int] = getattr(self._answers, "sizes", ())
        if not all(len(values) == len(sizes) for values in known):
            return ()
        found = []
        for run, size in enumerate(sizes):
            value = expression.subs({s: self._values[s][run] if s in self._values else size for s in symbols})
            if not (value.is_Boolean or value.is_Integer) or value.free_symbols:
                return ()
            found.append(bool(value) if value.is_Boolean else int(value))
        return tuple(found)

    def put_into(self, root: fx.GraphModule) -> None:
        """Let checks take the places of the questions, in the graph and in its regions.

        Raises:
            NotTraceableError: a condition is drawn by lot, so that a check of it would fail in some step.
        """
        for part in root.modules():
            if isinstance(part, fx.GraphModule):
                _keep_assertions(part.graph)
                if self._answers is not None:
                    self._put_into(part.graph)
                refuse_numbers_left(part.graph)
                part.recompile()

    def _put_into(self, graph: fx.Graph) -> None:
        for node in graph.find_nodes(op="call_function", target=torch.ops.gpipe_autoplan.condition.default):
            value, site = node.args
            node.target, node.args = self._kept(value, site, None), (value,)
        for node in graph.find_nodes(op="call_function", target=torch.ops.gpipe_autoplan.condition_on_number.default):
            value, site = node.args
            taken, function = numbers_function(value)
            node.target, node.args = self._kept(value, site, function), tuple(taken)
        for node in reversed(graph.nodes):
            value = node.meta.get("val")
            number = value is not None and not isinstance(value, Tensor | tuple | list)
            told = node.target is torch.ops.aten._assert_scalar.default  # of extents, which follow from the inputs
            if node.op == "call_function" and not node.users and (number or told):
                graph.erase_node(node)

    def _kept(self, value: fx.Node, site: int, numbers: fx.GraphModule | None) -> Check | Lot:
        """What keeps a decision in the graph: a check, or a mark where random numbers make it."""
        decision = self.decisions[site]
        chance = self._is_chance(value, site)
        if chance:
            return Lot(decision, self._places[site], self._counts[site], numbers)
        return Check(decision, numbers)

    def _is_chance(self, value: fx.Node, site: int) -> bool:
        """Whether random numbers alone decide, as with layer drop: both ways are needed then.

        Raises:
            NotTraceableError: they do, and are not expected to; or they do not, and nothing else has an answer.
        """
        place, decision = self._places[site], self.decisions[site]
        chance = _is_drawn(value)
        expected = self._ways is not None and isinstance(decision.answer, bool)
        if expected and self._ways is not None and self._ways.places is not None:
            expected = chance == self._ways.decide_at(decision.module, decision.line)
            chance = chance or not expected
        if chance and not expected:
            cure = setting_advice(self._model, place) or keep_together_advice(place.modules)
            raise NotTraceableError(
                f"cannot trace the model: in {place}: the forward pass branches on the values of a tensor, which are "
                f"random numbers; {cure}",
                modules=place.modules,
            )
        if not chance and site in self._left_open:
            raise self._left_open[site]
        if chance:
            self._lots.add((decision.module, decision.code))
        return chance


def _is_drawn(value: fx.Node) -> bool:
    """Whether a value follows from random numbers and constants alone."""
    seen = followed_from([value])
    drawn = any(torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) for node in seen)
    return drawn and all(node.op == "call_function" for node in seen)


def _keep_assertions(graph: fx.Graph) -> None:
    """Let a check take the place of each `torch._check` on a value: the trace may have drawn conclusions from it."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten._assert_scalar.default):
        taken, function = numbers_function(node.args[0]) if isinstance(node.args[0], fx.Node) else ([], None)
        if function is not None and reads_values(function):
            spot = spot_of(place_of_node(node))
            decision = Decision(module=spot.module, line=spot.line, answer=True)
            node.target, node.args = Check(decision, function), tuple(taken)


class _Mode(TorchFunctionMode):
    """Sees each call that reads a tensor's value."""

    def __init__(self, questions: Questions) -> None:
        super().__init__()
        self._questions = questions

    def __torch_function__(
        self, func: Any, types: Sequence[Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        number = self._questions.number
        args, named = spelled_out(func, args, kwargs or {}, lambda tensor: number(tensor, tensor.item))
        if func in CONDITIONS:
            return self._questions.condition(args[0], lambda: func(*args, **named))
        if func in NUMBERS:
            listed = func is Tensor.tolist
            return self._listed(args[0]) if listed else number(args[0], lambda: func(*args, **named))
        if COMPARISONS.get(func) is torch.eq and args[0].shape != args[1].shape:
            return False  # as shapes tell; nothing is read
        tensor = self._condition_in(func, args, named)
        if tensor is None:
            return func(*args, **named)
        answer = self._questions.condition(tensor, lambda: bool(tensor))
        return asserted(answer, args[1]) if func is asserted else answer

    def _condition_in(self, func: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> Tensor | None:
        """The tensor of whose truth a function makes a bool, if it does."""
        if func in COMPARISONS:
            each: Tensor = COMPARISONS[func](*args, **named)
            return each.all()
        if func is Tensor.__contains__ and isinstance(args[1], Tensor | int | float):
            found: Tensor = args[0] == args[1]
            return found.any()
        return args[0] if func is asserted and isinstance(args[0], Tensor) else None

    def _listed(self, tensor: Tensor) -> Any:
        if tensor.dim() == 0:
            return self._questions.number(tensor, tensor.item)
        extents = [len(tensor)] if tensor.dim() == 1 else []
        if extents and extents[0] > LARGEST_LIST:
            raise NotTraceableError(
                f"cannot trace the model: in {place_now(self._questions._model)}: it makes a list of a tensor of "
                f"{extents[0]} elements, and {LARGEST_LIST} can be checked"
            )
        return [self._listed(part) for part in tensor.unbind(0)]
