"""The structure of a sample as text: what is written, what may be read, and that reading runs nothing."""

import json
import sys
from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import nn
from torch.utils import _pytree as pytree

from profiler import trace
from profiler.errors import ArgumentError
from profiler.sample_tree import LEAF, MOST_DEPTH, alike, dumps, loads
from profiler.tracing.sample import describe_sample


class Pair(NamedTuple):
    first: Any
    second: Any


structures = st.recursive(
    st.just(LEAF),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3).map(OrderedDict)
        | st.builds(Pair, inner, inner)
    ),
    max_leaves=8,
)


@given(structures)
def test_a_structure_survives_and_has_the_form_of_earlier_plans(structure: Any) -> None:
    text = dumps(structure)
    assert loads(text) == structure
    assert pytree.tree_structure(loads(text)) == pytree.tree_structure(structure)
    assert alike(loads(text), structure)
    if "namedtuple" not in text:
        assert text == pytree.treespec_dumps(pytree.tree_structure(structure))


def node(kind: str | None, context: str | None = "null", children: Any = ()) -> dict[str, Any]:
    return {"type": kind, "context": context, "children_spec": [*children]}


ENUM = json.dumps({"__enum__": True, "fqn": "intruder:Enum.of", "name": "x"})
FACTORY = json.dumps({"default_factory_module": "intruder", "default_factory_name": "x", "dict_context": []})


@pytest.mark.parametrize(
    "tree",
    [
        node("builtins.list", ENUM),
        node("builtins.dict", ENUM),
        node("collections.defaultdict", FACTORY),
        node("collections.namedtuple", '"intruder.Point"'),
        node("collections.namedtuple", '["intruder:Point", "x", "y"]', [node(None, None)]),
        node("collections.namedtuple", '["intruder:Point", "x;import intruder"]', [node(None, None)]),
        node("collections.namedtuple", '["intruder:Point()", "x"]', [node(None, None)]),
        node("collections.deque"),
        node("intruder.Point"),
        node("builtins.dict", '["a"]'),
        node("builtins.dict", '["a", "a"]', [node(None, None), node(None, None)]),
        node("builtins.dict", "null"),
        node("builtins.tuple", '["a"]', [node(None, None)]),
        node(None, None, [node(None, None)]),
        {"type": None},
        [],
    ],
)
def test_a_text_that_names_anything_else_is_refused_and_nothing_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tree: Any
) -> None:
    """torch's reader imports the module that an enum's or a default dict's text names; a plan's text must not."""
    (tmp_path / "intruder.py").write_text("raise SystemExit('a file ran code')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="is no structure of tuples, lists and dicts"):
        loads(json.dumps([1, tree]))
    assert "intruder" not in sys.modules


@pytest.mark.parametrize("text", ["", "1", "[1]", "[2, null]", "[" * 100_000, '[1, {"type": '])
def test_a_text_that_is_no_structure_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no structure"):
        loads(text)


def test_containers_inside_each_other_have_a_limit() -> None:
    deep: Any = LEAF
    for _ in range(MOST_DEPTH):
        deep = [deep]
    assert loads(dumps(deep)) == deep
    with pytest.raises(ValueError, match="more than 32 deep"):
        dumps([deep])


def test_tracing_by_a_text_imports_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan's sample was read by torch before the plan's fingerprint was looked at; the module in it was imported."""
    (tmp_path / "intruder.py").write_text("raise SystemExit('a file ran code')")
    monkeypatch.syspath_prepend(tmp_path)
    spec = describe_sample(torch.zeros(4, 3))
    bad = json.dumps([1, node("builtins.tuple", "null", [node("builtins.list", ENUM, [node(None, None)]), node(None)])])
    with pytest.raises(ValueError, match="is no structure"):
        trace(nn.Linear(3, 3), spec.model_copy(update={"tree": bad}))
    assert "intruder" not in sys.modules


def test_a_named_tuple_whose_class_is_not_here_is_one_of_the_same_fields(tmp_path: Path) -> None:
    """In a process that `launch` starts the script's own classes have come by value, and are in no module."""
    text = dumps((Pair(LEAF, [LEAF]),)).replace(f"{__name__}:Pair", "intruder:Pair")
    (found,) = loads(text)
    assert (type(found).__name__, found._fields, found.second) == ("Pair", ("first", "second"), [LEAF])
    assert "intruder" not in sys.modules
    assert alike(found, Pair(LEAF, [LEAF]))
    assert not alike(found, Pair(LEAF, [LEAF, LEAF]))
    assert not alike(found, (LEAF, [LEAF]))


class Derived(Pair):
    pass


@dataclass
class Point:
    x: torch.Tensor


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (Point(torch.zeros(4, 3)), "a container that cannot be written to a plan .Point.; let the model take tuples"),
        (
            (torch.zeros(4, 3), Point(torch.zeros(4, 3))),
            "a container that cannot be written to a plan .Point.; let the model take tuples, named tuples, lists or",
        ),
        (Derived(torch.zeros(4, 3), 1), "a container that cannot be written to a plan .Derived."),
        ((torch.zeros(4, 3), defaultdict(list)), "a container that cannot be written to a plan .defaultdict."),
        ((torch.zeros(4, 3), torch.device("cpu")), "holds a device; tensors, numbers, strings and None can be traced"),
        (
            (torch.zeros(4, 3), namedtuple("Local", "x")(torch.zeros(4))),
            "the named tuple Local is not to be found as Local in .*; define it there, outside of functions",
        ),
        ((torch.zeros(4, 3), {2.5: torch.zeros(4)}), "the key 2.5, which is neither a string nor a whole number"),
    ],
)
def test_other_containers_in_a_sample_are_refused(sample: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        describe_sample(sample)
