"""Where a model cannot be traced, why, and what its user can do: from an exception to one line of text."""

from __future__ import annotations

import inspect
import linecache
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import fx, nn

from profiler.observe.named_functions import name_in_file, name_of_function

_OURS = __name__.partition(".")[0]
_TORCH = f"{Path(torch.__file__).parent}{os.sep}"


@dataclass(frozen=True, slots=True)
class Place:
    """Where in a model something happens.

    Attributes:
        modules: paths of the modules whose code is under way, outermost first; "" for the model itself.
        line: `file:line "code"` of the innermost line of theirs, or of a function that they call.
        nearby: that line and the few before it, for what its code is about.
        functions: names of the functions that the innermost module is in, outermost first; see
            `profiler.observe.named_functions`.
    """

    modules: tuple[str, ...]
    line: str
    nearby: str
    functions: tuple[str, ...] = ()

    def __str__(self) -> str:
        """`module 'a.b', file:line "code"`."""
        path = self.modules[-1] if self.modules else ""
        return f"{f'module {path!r}' if path else 'the model'}, {self.line}"


def place_of(model: nn.Module, problem: BaseException) -> Place:
    """Where an exception came from; one of the export's end, which tells no line, the module that it names."""
    named = re.search(r"exported program constant.* model attribute: ([\w.]+)\.\w+\.", str(problem), re.DOTALL)
    if named and named[1] in dict(model.named_modules()):
        return place_of_call(model, named[1])
    return _place(model, _frames_of(problem.__traceback__))


def place_of_node(node: fx.Node) -> Place:
    """Where an operation of a traced graph comes from."""
    stack = node.meta.get("nn_module_stack") or {}
    frames = [line.strip() for line in (node.meta.get("stack_trace") or "").strip().splitlines()]
    found = [(i, re.match(r'File "([^"]+)", line (\d+)', line)) for i, line in enumerate(frames)]
    own = [(i, m) for i, m in found if m and not m[1].startswith(_TORCH)]
    named = [(m[1], frames[i].rpartition(" in ")[2]) for i, m in own]
    functions = [called for file, name in named if (called := name_in_file(file, name)) is not None]
    line = f'{own[-1][1][1]}:{own[-1][1][2]} "{frames[own[-1][0] + 1]}"' if own and own[-1][0] + 1 < len(frames) else ""
    return Place(tuple(str(path) for path, _ in stack.values()), line or "its call", "", tuple(functions))


def place_of_call(model: nn.Module, path: str = "") -> Place:
    """The beginning of a module's forward pass, for what happens at no line of it that is known."""
    return Place((path,) if path else (), _definition(model.get_submodule(path)), "")


def place_now(model: nn.Module) -> Place:
    """Where the model's forward pass is at this moment."""
    frames: list[tuple[FrameType, int]] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        frames.append((frame, frame.f_lineno))
        frame = frame.f_back
    return _place(model, reversed(frames))


def _frames_of(trace: TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    while trace is not None:
        yield trace.tb_frame, trace.tb_lineno
        trace = trace.tb_next


def _place(model: nn.Module, frames: Iterable[tuple[FrameType, int]]) -> Place:
    # By their attributes: of models that share modules, export runs stand-ins with the same ones. A list of modules
    # that is handed to a function has no forward pass that could be under way.
    paths = {id(vars(module)): name for name, module in model.named_modules() if _has_forward(module)}
    modules: dict[str, None] = {}
    functions: dict[str, None] = {}
    line, nearby = _definition(model), ""
    for frame, number in frames:
        names = frame.f_code.co_varnames[: frame.f_code.co_argcount]
        owner = frame.f_locals.get(names[0]) if names else None
        path = paths.get(id(vars(owner))) if isinstance(owner, nn.Module) else None
        under_way = not _is_of(frame, "torch") or frame.f_code.co_name in ("forward", "_call_impl")
        if path is not None and under_way and not _is_of(frame, _OURS):
            modules.pop(path, None)
            modules[path] = None
            functions.clear()
        if modules and not _is_of(frame, "torch") and not _is_of(frame, _OURS):
            file = frame.f_code.co_filename
            line = f'{file}:{number} "{linecache.getline(file, number).strip()}"'
            nearby = " ".join(linecache.getline(file, each) for each in range(number - 4, number + 2))
            code = frame.f_code
            called = name_of_function(str(frame.f_globals.get("__name__", "")), code.co_name, code)
            if called is not None:
                functions[called] = None
    return Place(tuple(modules), line, nearby, tuple(functions))


def _has_forward(module: nn.Module) -> bool:
    return own_forward(module) is not nn.Module.forward


def own_forward(module: nn.Module) -> Any:
    """The forward pass of its class; None of a scripted module, whose class has none that can be asked for."""
    return getattr(type(module), "forward", None)


def _definition(model: nn.Module) -> str:
    """Where the model's forward pass begins, for what happens before or after all of its lines."""
    forward = own_forward(model)
    code = getattr(inspect.unwrap(forward), "__code__", None) if forward else None
    return "its call" if code is None else f'{code.co_filename}:{code.co_firstlineno} "def forward"'


def _is_of(frame: FrameType, package: str) -> bool:
    name = str(frame.f_globals.get("__name__", ""))
    return name == package or name.startswith(f"{package}.")


OWN_GENERATOR = "from a torch.Generator of the model's own, which a recomputed pass would draw anew"
OWN_GENERATOR_CURE = "draw from torch's own generator (leave generator out)"


def explanation(model: nn.Module, problem: BaseException, place: Place) -> str:
    """What cannot be traced, where, and what to do."""
    words = str(problem)
    setting = setting_advice(model, place) if "data-dependent" in words else ""
    if setting:
        cause, cure = "the forward pass branches on the values of a tensor", setting
    elif "data-dependent" in words:
        cause = "the forward pass branches on the values of a tensor"
        cure = f"{keep_together_advice(place.modules)}, or make the branch independent of data (torch.where)"
    elif "in output, which is not a known type" in words:
        kind = words.partition("<class '")[2].partition("'")[0]
        cause = f"it returns a {kind}, and layers return tensors in tuples, lists, dicts and the like"
        cure = "leave it out (transformers' caches: use_cache=False)"
    elif "fake tensor in the exported program constant" in words:
        cause = "somewhere in it a tensor is made of another by no operation of torch's, which a graph would freeze"
        cure = f"{keep_together_advice(place.modules)}, or make it by an operation (detach, clone)"
    elif str(torch.Generator) in words:  # torch 2.11 has no place for one in a graph
        cause, cure = f"it draws random numbers {OWN_GENERATOR}", OWN_GENERATOR_CURE
    else:
        lines = (line.strip() for line in words.splitlines())
        cause = next((line for line in lines if line), type(problem).__name__)
        cure = (
            "see whether the model runs on the sample by itself; if it does, "
            f"{keep_together_advice(place.modules)}, or change that line to operations that torch.export can follow"
        )
    return f"cannot trace the model: in {place}: {cause}; {cure}"


def keep_together_advice(modules: Sequence[str]) -> str:
    """The setting that lets the innermost module be called as it is."""
    path = modules[-1] if modules else ""
    if not path:
        return "move that part into a submodule and name it in keep_together, which has it called as it is"
    return f"have that module called as it is, in one layer: keep_together=[{path!r}]"


def setting_advice(model: nn.Module, place: Place) -> str:
    """What turns the layer drop or the masking of features off that the lines are about; "" for anything else."""
    drop = _layer_drop_setting(model, place)
    if drop:
        return f"this is layer drop: {drop}"
    config = getattr(model, "config", None)
    if "mask" in place.nearby and getattr(config, "apply_spec_augment", False):
        return "this is the masking of features: set apply_spec_augment to False in the model's configuration"
    return ""


def _layer_drop_setting(model: nn.Module, place: Place) -> str:
    """What turns the layer drop off that the lines are about; "" if they are about something else."""
    found = re.search(r"\b\w*layer_?drop\w*", place.nearby)
    if not found or not place.modules:
        return ""
    module = model.get_submodule(place.modules[-1])
    value: Any = getattr(module, found[0], None)
    config = getattr(module, "config", None) or getattr(model, "config", None)
    names = [
        name
        for name, held in vars(config).items()
        if re.search("layer_?drop", name) and held and (value is None or held == value)
    ] if config is not None else []  # fmt: skip
    if not names:
        return f"set {found[0]} to 0 in the model or its configuration"
    held = ", ".join(f"{name} from {getattr(config, name)} to 0" for name in names)
    return f"set {held} in the model's configuration"
