"""The model that a command is about: what the user's function builds, or a language model from its configuration.

A configuration is a file as transformers writes it, or one of its model types; nothing is downloaded. The parameters of
such a model lie on the meta device: there is no memory for them, and costs do not depend on their values.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from executor.commands.functions import built_by, check_place, named_function
from executor.commands.interruption import interruption_later
from executor.commands.options import SAMPLES, Assignment, FloatType
from profiler.arguments import meant
from profiler.errors import ArgumentError
from profiler.quantities import MOST_LAYERS, check_count, shown

if TYPE_CHECKING:
    from torch import nn

Command = TypeVar("Command", bound=Callable[..., None])

SAMPLE_ROWS = 4
"""Samples of a made-up sample: more than one, since one is traced unlike others."""
_NAME_ONE = "name the model: either a function as MODEL, or a configuration with --hf"
LONGEST_BY_DEFAULT = 4096
"""Tokens of a sample at most, where nobody says how many [chosen]."""
_TOKENS = ("bos_token_id", "decoder_start_token_id", "eos_token_id", "pad_token_id")  # any configuration may have these
_MASKS = ("attention_mask", "decoder_attention_mask")
"""Of padding, in the sample of a model with a decoder of its own: some can be traced with them alone."""
_BLOCKS = re.compile(r"(n|num)_((hidden|encoder|decoder)_)?layers?|(en|de)coder_layers|\w*heads?")
"""Names of what no model has none of: other layers, such as those with experts, may all be left out."""
_ONE_BY_ONE = re.compile(r"\w*(layers?|blocks|experts)")
"""Names of what a model has a module of each of, where it counts something."""


@dataclass(frozen=True, slots=True)
class Built:
    """A model with what it is called with.

    Attributes:
        model: the module.
        sample: what it is called with.
        loss_fn: of its output and the target; None if it returns its loss.
        target: for `loss_fn`.
    """

    model: nn.Module
    sample: Any
    loss_fn: Callable[..., Any] | None = None
    target: Any = None


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where the model comes from: one of `reference` and `hf`."""

    reference: str | None
    hf: str | None
    changes: Mapping[str, Any]
    sequence: int | None
    dtype: str

    def check(self) -> None:
        """Notice at once what needs nothing to be loaded.

        Raises:
            ArgumentError: there is no such configuration.
            click.BadParameter: there is no such file.
            click.UsageError: no model is named, or two, or an option goes with the other kind.
        """
        from profiler.value import read_file

        if self.hf is not None:
            if self.reference is not None:
                raise click.UsageError(_NAME_ONE)
            if self.hf.endswith(".json"):
                read_file(self.hf, "configuration", ArgumentError)
            return
        if self.reference is None:
            raise click.UsageError(_NAME_ONE)
        for option, given in (("--set", self.changes), ("--sequence", self.sequence)):
            if given:
                raise click.UsageError(f"{option} goes with --hf; {self.reference} builds its model itself")
        check_place(self.reference, "MODEL")

    def build(self) -> Built:
        """The model.

        Raises:
            ArgumentError: the function fails to give a model, or the configuration is none of a language model.
            click.BadParameter: there is no such function.
        """
        if self.hf is not None:
            return _from_configuration(self.hf, self.changes, self.sequence, self.dtype)
        assert self.reference is not None
        return Built(*built_by(self.reference, named_function(self.reference, "MODEL")))


def model_options(command: Command) -> Command:
    """MODEL or --hf with its own options; they come as `model`, `hf`, `changes`, `sequence` and `dtype`."""
    for option in (
        click.option(
            "--dtype",
            type=FloatType("bfloat16", "float16", "float32"),
            default="bfloat16",
            show_default=True,
            help="Of the parameters, with --hf.",
        ),
        click.option("--sequence", type=SAMPLES, metavar="TOKENS", help="Tokens of a sample, with --hf."),
        click.option(
            "--set",
            "changes",
            type=Assignment("NAME=VALUE"),
            multiple=True,
            metavar="NAME=VALUE",
            help="Another value of the configuration, with --hf; repeatable.",
        ),
        click.option(
            "--hf",
            metavar="CONFIG",
            help="A language model's transformers configuration: a JSON file, or a model type such as llama.",
        ),
        click.argument("model", required=False),
    ):
        command = option(command)
    return command


def source_of(given: dict[str, Any]) -> ModelSource:
    """The source that these options name, checked; they are taken out."""
    source = ModelSource(
        reference=given.pop("model"),
        hf=given.pop("hf"),
        changes=dict(given.pop("changes")),
        sequence=given.pop("sequence"),
        dtype=given.pop("dtype"),
    )
    source.check()
    return source


def _from_configuration(named: str, changes: Mapping[str, Any], sequence: int | None, dtype: str) -> Built:
    with interruption_later():
        try:
            import transformers
        except ImportError as problem:
            raise ArgumentError(
                "--hf needs transformers, which is not installed; pip install transformers"
            ) from problem
        import torch

    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    config = _configuration(named, changes)
    build = _kind_of_model(config)
    _set_missing_tokens(config)
    given = sequence or min(LONGEST_BY_DEFAULT, getattr(config, "max_position_embeddings", LONGEST_BY_DEFAULT))
    most = getattr(config, "max_position_embeddings", None)
    if isinstance(most, int) and given > most:
        raise ArgumentError(f"--sequence is {given}, and max_position_embeddings of {named} is {most}; --set it, too")
    if given < 1:
        raise ArgumentError(f"max_position_embeddings of {named} is {most}, so no sample has a token; set 1 or more")
    try:
        with torch.device("meta"):
            model = build(config).to(getattr(torch, dtype)).train()
            tokens = torch.zeros(SAMPLE_ROWS, given, dtype=torch.int64)
    except Exception as problem:
        raise ArgumentError(
            f"transformers builds no model of {named}{_changed(changes)} ({type(problem).__name__}: {problem}); "
            f"change {'these values' if changes else 'its values with --set'}"
        ) from problem
    takes = inspect.signature(model.forward).parameters
    masks = [name for name in _MASKS if config.is_encoder_decoder and name in takes]
    return Built(model, {"input_ids": tokens, "labels": tokens, **dict.fromkeys(masks, tokens)})


def _changed(changes: Mapping[str, Any]) -> str:
    """The changes of a configuration as they were given."""
    return " with" * bool(changes) + "".join(f" --set {name}={value}" for name, value in changes.items())


def _configuration(named: str, changes: Mapping[str, Any]) -> Any:
    """The configuration, with caches for generation off, which training does not use."""
    from transformers import CONFIG_MAPPING, AutoConfig

    from profiler.value import read_file

    values: dict[str, Any] = {}
    kind = named
    if named.endswith(".json") or Path(named).is_file():
        try:
            values = json.loads(read_file(named, "configuration", ArgumentError))
        except (ValueError, RecursionError) as problem:
            raise ArgumentError(
                f"{named}: no JSON: {problem}; --hf takes a config.json as transformers writes it"
            ) from problem
        if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
            raise ArgumentError(f"{named} has no model_type; --hf takes a config.json as transformers writes it")
        kind = values.pop("model_type")
    if kind not in CONFIG_MAPPING:
        raise ArgumentError(
            f"{shown(kind)} is no JSON file and no model type of transformers{meant(kind, CONFIG_MAPPING, most=3)}; "
            "nothing is downloaded"
        )
    known = AutoConfig.for_model(kind).to_dict()
    for name in changes:
        if name not in known and name not in _TOKENS:
            near = meant(name, known, most=3)
            raise ArgumentError(f"--set {name}: the configuration of a {kind} has no such value{near}")
    changed = {name: _value(value, known.get(name)) for name, value in changes.items()}
    try:
        config = AutoConfig.for_model(kind, **{**values, **changed, "use_cache": False})
    except Exception as problem:
        raise ArgumentError(
            f"{named}{_changed(changes)} is no configuration that transformers takes: {problem}"
        ) from problem
    for path, value, usual in _counts(config.to_dict(), known):
        name = path.rpartition(".")[2]
        if (_BLOCKS.fullmatch(name) and usual > 0) or (_ONE_BY_ONE.fullmatch(name) and value > MOST_LAYERS):
            check_count(f"{path} of {named}", value, most=MOST_LAYERS)
    return config


def _counts(values: Mapping[str, Any], usual: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, int, int]]:
    """Each whole number of a configuration with its path, and what it is in the usual one of this type (or 1)."""
    for name, value in values.items():
        like = usual.get(name)
        if isinstance(value, dict):
            yield from _counts(value, like if isinstance(like, dict) else {}, f"{path}{name}.")
        elif isinstance(value, int) and not isinstance(value, bool):
            yield f"{path}{name}", value, like if isinstance(like, int) else 1


def _set_missing_tokens(config: Any) -> None:
    """Let a decoder begin with a token, which generation alone may need to know otherwise: costs are those of any."""
    if config.is_encoder_decoder:
        known = [getattr(config, name, None) for name in ("pad_token_id", "bos_token_id")]
        any_token = next((token for token in known if token is not None), 0)
        for name in ("pad_token_id", "decoder_start_token_id"):
            if getattr(config, name, None) is None:
                setattr(config, name, any_token)


def _value(text: int | str, like: Any) -> Any:
    """A value of --set: JSON where it is, such as 0.1, true or [1, 2]; else the text itself."""
    if isinstance(text, int) or isinstance(like, str):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _kind_of_model(config: Any) -> Callable[[Any], nn.Module]:
    """What builds the language model of a configuration with its loss."""
    import transformers

    for auto, known in (
        (transformers.AutoModelForSeq2SeqLM, transformers.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING),
        (transformers.AutoModelForCausalLM, transformers.MODEL_FOR_CAUSAL_LM_MAPPING),
        (transformers.AutoModelForMaskedLM, transformers.MODEL_FOR_MASKED_LM_MAPPING),
    ):
        if type(config) in known:
            return auto.from_config
    raise ArgumentError(
        f"a {config.model_type} is no language model with its own loss; pass a function that builds model and sample"
    )
