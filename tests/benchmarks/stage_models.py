"""Unlike models of a size at which a CPU trains, for the benchmarks of the profiler."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from gpt import GPT, Config, next_token_loss
from torch import Tensor, nn
from torch.nn import functional

from profiler.run.loss import LossFunction
from tests.coverage.model_list import hugging_face
from tests.models.amoebanet import AmoebaNet
from tests.models.densenet import DenseNet
from tests.models.gnmt import GNMT
from tests.models.mixture_of_experts import MixtureOfExperts
from tests.models.unet import UNet

BATCH = 16


@dataclass(frozen=True)
class Model:
    """A model in training mode with a batch of `BATCH` samples.

    Attributes:
        sample: what it is called with.
        loss_fn: None if it returns its loss.
        target: for `loss_fn`.
    """

    model: nn.Module
    sample: Any
    loss_fn: LossFunction | None = None
    target: Tensor | None = None


def _tokens(vocabulary: int, length: int) -> Tensor:
    return torch.randint(3, vocabulary, (BATCH, length))


def _images(extent: int) -> Tensor:
    return torch.randn(BATCH, 3, extent, extent)


def _classes() -> Tensor:
    return torch.randint(10, (BATCH,))


def _gpt() -> Model:
    ids = _tokens(256, 128)
    return Model(GPT(Config(vocabulary=256, context=128, width=256, blocks=6)), ids, next_token_loss, ids)


def _llama() -> Model:
    ids = _tokens(1000, 96)
    case = hugging_face(
        "LlamaForCausalLM",
        "LlamaConfig",
        {"input_ids": ids, "labels": ids.clone(), "use_cache": False},
        vocab_size=1000,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=128,
        bos_token_id=1,
        eos_token_id=2,
    )
    return Model(case.model.train(), case.sample)


def _t5() -> Model:
    sample = {"input_ids": _tokens(1000, 64), "labels": _tokens(1000, 48), "use_cache": False}
    case = hugging_face(
        "T5ForConditionalGeneration",
        "T5Config",
        sample,
        vocab_size=1000,
        d_model=192,
        d_kv=32,
        d_ff=512,
        num_layers=4,
        num_heads=6,
        decoder_start_token_id=0,
    )
    return Model(case.model.train(), case.sample)


def _wide_vocabulary() -> Model:
    ids = _tokens(50_000, 32)
    return Model(GPT(Config(vocabulary=50_000, context=32, width=96, blocks=8)), ids, next_token_loss, ids)


def _experts() -> Model:
    ids = _tokens(256, 64)
    return Model(MixtureOfExperts(width=96, blocks=4, experts=4), {"ids": ids, "labels": ids.clone()})


def _densenet() -> Model:
    model = DenseNet(growth=16, blocks=(4, 6, 4), num_classes=10)
    return Model(model, _images(64), functional.cross_entropy, _classes())


def _unet() -> Model:
    return Model(UNet(depth=3, channels=16), _images(64), functional.cross_entropy, torch.randint(2, (BATCH, 64, 64)))


def _amoebanet() -> Model:
    return Model(AmoebaNet(6, 64, 10), _images(64), functional.cross_entropy, _classes())


def _lstm() -> Model:
    model = GNMT(1000, width=256, layers=4, dropout=0.1)
    return Model(model, (_tokens(1000, 24), _tokens(1000, 20)), next_token_loss, _tokens(1000, 20))


MODELS: Mapping[str, Callable[[], Model]] = {
    "GPT": _gpt,
    "GPT of 50k words": _wide_vocabulary,
    "mixture of experts": _experts,
    "Llama": _llama,
    "T5": _t5,
    "DenseNet": _densenet,
    "U-Net": _unet,
    "AmoebaNet-D": _amoebanet,
    "LSTM (GNMT)": _lstm,
}
UNLIKE = ("GPT of 50k words", "T5", "AmoebaNet-D", "U-Net", "DenseNet", "LSTM (GNMT)", "mixture of experts")
"""Those that have little in common."""


def build(name: str) -> Model:
    """The model of that name, the same at each call."""
    torch.manual_seed(0)
    return MODELS[name]()
