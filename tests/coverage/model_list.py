"""The models that tracing is measured on: 23 of transformers and 8 of our own, all tiny and with random weights.

Each can be built with any number of blocks (where it has blocks) and any dropout, so that one list serves every test.
"""

import importlib
import logging
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from gpt import GPT, Config, next_token_loss
from torch import Tensor, nn
from torch.nn import functional

from profiler.run.loss import LossFunction
from tests.models.amoebanet import AmoebaNet
from tests.models.densenet import DenseNet
from tests.models.gnmt import GNMT
from tests.models.mixture_of_experts import MixtureOfExperts
from tests.models.shape_branch import ShapeBranch
from tests.models.transformer import Translator
from tests.models.unet import UNet

BATCH_SIZE = 4
VOCABULARY = 64
CLASSES = 5


@dataclass(frozen=True)
class Case:
    """A model with a batch to train it on.

    Attributes:
        model: in training mode.
        sample: what it is called with; the first dimension of every tensor is the batch.
        loss_fn: None if the model computes its loss.
        target: what `loss_fn` compares the output with.
    """

    model: nn.Module
    sample: Any
    loss_fn: LossFunction | None = None
    target: Tensor | None = None


@dataclass(frozen=True)
class Entry:
    """A model of the list.

    Attributes:
        name: as its makers call it.
        family: what it is an example of.
        make: from the number of blocks and the dropout probability.
        blocks: whether `make` heeds the number of blocks, all alike.
    """

    name: str
    family: str
    make: Callable[[int, float], Case]
    blocks: bool = True

    def build(self, *, blocks: int = 2, dropout: float = 0.0) -> Case:
        """The model and its batch, the same at each call."""
        torch.manual_seed(0)
        case = self.make(blocks, dropout)
        case.model.train()
        return case


@cache
def transformers() -> Any:
    """The package, imported without a download and without a word.

    Its modules load on first use, and some then warn or log (torchvision is not installed, for instance).
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    logging.getLogger("transformers").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module("transformers")


def hugging_face(model: str, config: str, sample: Mapping[str, Any], /, **settings: Any) -> Case:
    """A model of transformers with random weights; quiet, for building a model loads its modules."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        package = transformers()
        built = getattr(package, model)(getattr(package, config)(**settings))
    return Case(built, dict(sample))


def tokens(length: int = 12) -> Tensor:
    """(batch, length) of int64, without the special tokens 0 to 2."""
    return torch.randint(3, VOCABULARY, (BATCH_SIZE, length))


def classes() -> Tensor:
    return torch.randint(CLASSES, (BATCH_SIZE,))


def images(extent: int) -> Tensor:
    return torch.randn(BATCH_SIZE, 3, extent, extent)


def padded(ids: Tensor) -> Tensor:
    """A mask that hides the last two tokens of the last sequence."""
    mask = torch.ones_like(ids)
    mask[-1, -2:] = 0
    return mask


def causal(*, mask: bool = False) -> dict[str, Any]:
    ids = tokens()
    extra = {"attention_mask": padded(ids)} if mask else {}
    return {"input_ids": ids, "labels": ids.clone(), "use_cache": False, **extra}


def masked() -> dict[str, Any]:
    ids = tokens()
    return {"input_ids": ids, "attention_mask": padded(ids), "labels": tokens()}


def translated() -> dict[str, Any]:
    ids = tokens()
    return {"input_ids": ids, "attention_mask": padded(ids), "labels": tokens(9), "use_cache": False}


def pictured(extent: int) -> dict[str, Any]:
    return {"pixel_values": images(extent), "labels": classes()}


SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
GROUPED = {**SPECIAL, **SIZE, "num_key_value_heads": 2}


def bert_like(blocks: int, dropout: float) -> dict[str, Any]:
    return {
        **SIZE,
        "num_hidden_layers": blocks,
        "hidden_dropout_prob": dropout,
        "attention_probs_dropout_prob": dropout,
    }


def gpt2(blocks: int, dropout: float) -> Case:
    return hugging_face(
        "GPT2LMHeadModel",
        "GPT2Config",
        causal(),
        vocab_size=VOCABULARY,
        n_embd=32,
        n_layer=blocks,
        n_head=4,
        n_positions=64,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
    )


def llama_like(name: str, **settings: Any) -> Callable[[int, float], Case]:
    def make(blocks: int, dropout: float) -> Case:
        return hugging_face(
            f"{name}ForCausalLM",
            f"{name}Config",
            causal(mask=True),
            **GROUPED,
            num_hidden_layers=blocks,
            attention_dropout=dropout,
            **settings,
        )

    return make


def phi3(blocks: int, dropout: float) -> Case:
    return hugging_face(
        "Phi3ForCausalLM",
        "Phi3Config",
        causal(),
        **GROUPED,
        num_hidden_layers=blocks,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attention_dropout=dropout,
    )


def opt(blocks: int, dropout: float) -> Case:
    return hugging_face(
        "OPTForCausalLM",
        "OPTConfig",
        causal(),
        vocab_size=VOCABULARY,
        hidden_size=32,
        word_embed_proj_dim=32,
        ffn_dim=64,
        num_hidden_layers=blocks,
        num_attention_heads=4,
        max_position_embeddings=64,
        dropout=dropout,
        attention_dropout=dropout,
    )


def bloom(blocks: int, dropout: float) -> Case:
    return hugging_face(
        "BloomForCausalLM",
        "BloomConfig",
        causal(),
        vocab_size=VOCABULARY,
        hidden_size=32,
        n_layer=blocks,
        n_head=4,
        hidden_dropout=dropout,
        attention_dropout=dropout,
    )


def falcon(blocks: int, dropout: float) -> Case:
    return hugging_face(
        "FalconForCausalLM",
        "FalconConfig",
        causal(),
        **SPECIAL,
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=blocks,
        num_attention_heads=4,
        hidden_dropout=dropout,
        attention_dropout=dropout,
    )


def gpt_neox(blocks: int, dropout: float) -> Case:
    return hugging_face(
        "GPTNeoXForCausalLM",
        "GPTNeoXConfig",
        causal(),
        **SIZE,
        num_hidden_layers=blocks,
        hidden_dropout=dropout,
        attention_dropout=dropout,
    )


def mamba(blocks: int, dropout: float) -> Case:
    return hugging_face(
        "MambaForCausalLM",
        "MambaConfig",
        causal(),
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=blocks,
        state_size=4,
    )


def bert(blocks: int, dropout: float) -> Case:
    return hugging_face("BertForMaskedLM", "BertConfig", masked(), **bert_like(blocks, dropout))


def roberta(blocks: int, dropout: float) -> Case:
    return hugging_face("RobertaForMaskedLM", "RobertaConfig", masked(), **bert_like(blocks, dropout))


def deberta_v2(blocks: int, dropout: float) -> Case:
    return hugging_face(
        "DebertaV2ForMaskedLM",
        "DebertaV2Config",
        masked(),
        **bert_like(blocks, dropout),
        relative_attention=True,
        position_buckets=8,
        pos_att_type=["p2c", "c2p"],
        norm_rel_ebd="layer_norm",
        share_att_key=True,
    )


def albert(blocks: int, dropout: float) -> Case:
    return hugging_face("AlbertForMaskedLM", "AlbertConfig", masked(), **bert_like(blocks, dropout), embedding_size=16)


def t5(blocks: int, dropout: float) -> Case:
    return hugging_face(
        "T5ForConditionalGeneration",
        "T5Config",
        translated(),
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=blocks,
        num_heads=4,
        dropout_rate=dropout,
        decoder_start_token_id=0,
    )


def bart(blocks: int, dropout: float) -> Case:
    return hugging_face(
        "BartForConditionalGeneration",
        "BartConfig",
        translated(),
        vocab_size=VOCABULARY,
        d_model=32,
        encoder_layers=blocks,
        decoder_layers=blocks,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_position_embeddings=64,
        dropout=dropout,
        attention_dropout=dropout,
        activation_dropout=dropout,
    )


def vision_like(name: str, **settings: Any) -> Callable[[int, float], Case]:
    def make(blocks: int, dropout: float) -> Case:
        return hugging_face(
            f"{name}ForImageClassification",
            f"{name}Config",
            pictured(16),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=blocks,
            num_attention_heads=4,
            image_size=16,
            patch_size=4,
            num_labels=CLASSES,
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
            **{key: value(dropout) if callable(value) else value for key, value in settings.items()},
        )

    return make


def resnet(blocks: int, dropout: float) -> Case:
    return hugging_face(
        "ResNetForImageClassification",
        "ResNetConfig",
        pictured(32),
        embedding_size=8,
        hidden_sizes=[8, 16],
        depths=[blocks, blocks],
        layer_type="basic",
        num_labels=CLASSES,
    )


def segformer(blocks: int, dropout: float) -> Case:
    return hugging_face(
        "SegformerForSemanticSegmentation",
        "SegformerConfig",
        {"pixel_values": images(32), "labels": torch.randint(CLASSES, (BATCH_SIZE, 32, 32))},
        hidden_sizes=[8, 16],
        depths=[blocks, blocks],
        num_encoder_blocks=2,
        num_attention_heads=[1, 2],
        sr_ratios=[2, 1],
        patch_sizes=[7, 3],
        strides=[4, 2],
        mlp_ratios=[2, 2],
        decoder_hidden_size=16,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        classifier_dropout_prob=dropout,
        drop_path_rate=dropout,
        num_labels=CLASSES,
    )


def amoebanet(blocks: int, dropout: float) -> Case:
    # Its rounding is large: in float32 the eager model's own gradients are 4e-5 from those in float64 (with 16 filters
    # 6e-5), where the traced ones are 1e-14 from the eager ones.
    return Case(AmoebaNet(3 * (blocks // 2), 32, CLASSES), images(64), functional.cross_entropy, classes())


def unet(blocks: int, dropout: float) -> Case:
    target = torch.randint(2, (BATCH_SIZE, 16, 16))
    return Case(UNet(depth=blocks, channels=4), images(16), functional.cross_entropy, target)


def gnmt(blocks: int, dropout: float) -> Case:
    model = GNMT(VOCABULARY, width=16, layers=blocks + 1, dropout=dropout)
    return Case(model, (tokens(), tokens(9)), next_token_loss, tokens(9))


def densenet(blocks: int, dropout: float) -> Case:
    model = DenseNet(growth=4, blocks=(blocks, blocks), num_classes=CLASSES, dropout=dropout)
    return Case(model, images(16), functional.cross_entropy, classes())


def tied_gpt(blocks: int, dropout: float) -> Case:
    model = GPT(Config(vocabulary=VOCABULARY, context=12, width=32, heads=4, blocks=blocks, dropout=dropout))
    return Case(model, tokens(), next_token_loss, tokens())


def mixture(blocks: int, dropout: float) -> Case:
    model = MixtureOfExperts(VOCABULARY, width=32, heads=4, blocks=blocks, experts=4)
    return Case(model, {"ids": tokens(), "labels": tokens()})


def translator(blocks: int, dropout: float) -> Case:
    model = Translator(VOCABULARY, width=32, heads=4, layers=blocks, dropout=dropout, longest=64)
    source = tokens() * padded(tokens())
    return Case(model, (source, tokens(9)), next_token_loss, tokens(9))


def shape_branch(blocks: int, dropout: float) -> Case:
    model = ShapeBranch(width=16, blocks=blocks, num_classes=CLASSES)
    return Case(model, torch.randn(BATCH_SIZE, 16, 16), functional.cross_entropy, classes())


MODELS = (
    Entry("gpt2", "decoder", gpt2),
    Entry("llama", "decoder", llama_like("Llama")),
    Entry("mistral", "decoder", llama_like("Mistral", sliding_window=8)),
    Entry("qwen2", "decoder", llama_like("Qwen2")),
    Entry("qwen3", "decoder", llama_like("Qwen3", head_dim=8)),
    Entry("gemma2", "decoder", llama_like("Gemma2", head_dim=8, sliding_window=8)),
    Entry("phi3", "decoder", phi3),
    Entry("opt", "decoder", opt),
    Entry("bloom", "decoder", bloom),
    Entry("falcon", "decoder", falcon),
    Entry("gpt_neox", "decoder", gpt_neox),
    Entry("mixtral", "mixture of experts", llama_like("Mixtral", num_local_experts=4, num_experts_per_tok=2)),
    Entry("mamba", "state space", mamba),
    Entry("bert", "encoder", bert),
    Entry("roberta", "encoder", roberta),
    Entry("deberta-v2", "encoder", deberta_v2),
    Entry("albert", "encoder", albert),
    Entry("t5", "encoder-decoder", t5),
    Entry("bart", "encoder-decoder", bart),
    Entry("vit", "vision", vision_like("ViT")),
    Entry("beit", "vision", vision_like("Beit", use_relative_position_bias=True, drop_path_rate=lambda p: p)),
    Entry("resnet", "vision", resnet, blocks=False),
    Entry("segformer", "vision", segformer, blocks=False),
    Entry("AmoebaNet-D", "own, vision", amoebanet, blocks=False),
    Entry("U-Net", "own, vision", unet, blocks=False),
    Entry("GNMT", "own, encoder-decoder", gnmt),
    Entry("DenseNet", "own, vision", densenet, blocks=False),
    Entry("GPT with tied weights", "own, decoder", tied_gpt),
    Entry("mixture of experts", "own, decoder", mixture),
    Entry("nn.Transformer", "own, encoder-decoder", translator),
    Entry("branch on a shape", "own", shape_branch, blocks=False),
)
BY_NAME: Mapping[str, Entry] = {entry.name: entry for entry in MODELS}
