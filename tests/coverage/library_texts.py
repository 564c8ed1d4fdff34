"""The second survey's models of texts: transformers, state spaces, experts, adapters."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from tests.coverage.library_parts import MINI_BATCH, VOCABULARY, entry, floats, found, some_tokens, tokens
from tests.coverage.survey_models import Candidate


def texts() -> Iterator[Candidate]:
    """All of them."""
    yield from transformers_of_texts()
    yield from language_models()


def transformers_of_texts() -> Iterator[Candidate]:
    lib = "x-transformers"
    core: dict[str, Any] = {"dim": 32, "depth": 2, "heads": 2}
    yield entry(lib, "x_transformers:Decoder", tokens(), build=_x_text, name="Decoder: rotary, swish GLU", **core,
                rotary_pos_emb=True, ff_glu=True, ff_swish=True, attn_dropout=0.1, ff_dropout=0.1)  # fmt: skip
    yield entry(lib, "x_transformers:Encoder", tokens(), build=_x_text, name="Encoder: ALiBi, residual attention",
                **core, alibi_pos_bias=True, residual_attn=True)  # fmt: skip
    yield entry(
        lib, "x_transformers:XTransformer", lambda: (some_tokens(), some_tokens()), own_loss=True, dim=32,
        enc_num_tokens=VOCABULARY, enc_depth=2, enc_heads=2, enc_max_seq_len=16, dec_num_tokens=VOCABULARY,
        dec_depth=2, dec_heads=2, dec_max_seq_len=16,
    )  # fmt: skip
    yield entry(lib, "x_transformers:ContinuousTransformerWrapper", floats(16, 8), build=_x_values)
    lm: dict[str, Any] = {"num_tokens": VOCABULARY, "dim": 32, "depth": 2}
    yield entry("performer-pytorch", "performer_pytorch:PerformerLM", tokens(), **lm, heads=2, dim_head=16,
                max_seq_len=16, causal=False)  # fmt: skip
    yield entry("reformer-pytorch", "reformer_pytorch:ReformerLM", tokens(32), **lm, heads=2, max_seq_len=32,
                bucket_size=8, n_hashes=2, causal=True)  # fmt: skip
    yield entry("linformer", "linformer:LinformerLM", tokens(), **lm, heads=2, seq_len=16, k=8)
    yield entry("linear-attention-transformer", "linear_attention_transformer:LinearAttentionTransformerLM", tokens(),
                **lm, heads=2, max_seq_len=16, causal=True, blindspot_size=1)  # fmt: skip
    yield entry("nystrom-attention", "nystrom_attention:Nystromformer", floats(16, 32), dim=32, depth=2, heads=2,
                dim_head=16, num_landmarks=4)  # fmt: skip
    yield entry("perceiver-pytorch", "perceiver_pytorch:PerceiverLM", tokens(), **lm, max_seq_len=16, num_latents=8,
                latent_dim=32, cross_heads=1, latent_heads=2)  # fmt: skip
    yield entry("g-mlp-pytorch", "g_mlp_pytorch:gMLP", tokens(), **lm, seq_len=16, causal=True)
    yield entry("h-transformer-1d", "h_transformer_1d:HTransformer1D", tokens(32), **lm, causal=False, max_seq_len=32,
                heads=2, dim_head=16, block_size=8)  # fmt: skip
    yield entry("block-recurrent-transformer-pytorch", "block_recurrent_transformer_pytorch:BlockRecurrentTransformer",
                tokens(), **lm, dim_head=16, heads=2, max_seq_len=16, block_width=8, num_state_vectors=8)  # fmt: skip
    yield entry("soft-moe-pytorch", "soft_moe_pytorch:SoftMoE", floats(16, 32), build=_mixed, dim=32, seq_len=16,
                num_experts=4)  # fmt: skip
    yield entry("st-moe-pytorch", "st_moe_pytorch:MoE", floats(16, 32), build=_mixed, dim=32, num_experts=4)
    yield entry("electra-pytorch", "electra_pytorch:Electra", tokens(), build=_electra, own_loss=True)
    yield entry("enformer-pytorch", "enformer_pytorch:Enformer.from_hparams", tokens(1024, 5), dim=24,
                depth=1, heads=2, output_heads={"human": 5}, target_length=4, num_downsamples=5,
                dim_divisible_by=4, name="Enformer")  # fmt: skip


def _x_text(layers: type[nn.Module], **settings: Any) -> nn.Module:
    return found("x_transformers:TransformerWrapper")(num_tokens=64, max_seq_len=16, attn_layers=layers(**settings))


def _x_values(kind: type[nn.Module]) -> nn.Module:
    layers = found("x_transformers:Encoder")(dim=32, depth=2, heads=2)
    return kind(dim_in=8, dim_out=4, max_seq_len=16, attn_layers=layers)


def _mixed(kind: type[nn.Module], **settings: int) -> nn.Module:
    return _Mixed(kind(**settings))


class _Mixed(nn.Module):
    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.embed, self.experts, self.head = nn.Linear(32, 32), experts, nn.Linear(32, 5)

    def forward(self, x: torch.Tensor) -> Any:
        mixed = self.experts(self.embed(x))
        outputs, *losses = mixed if isinstance(mixed, tuple) else (mixed,)
        return self.head(x + outputs), *losses[:1]


class _Hidden(nn.Module):
    """A discriminator of ELECTRA: hidden states of a small transformer."""

    def __init__(self, embed: nn.Embedding, out: int) -> None:
        super().__init__()
        self.embed = embed
        self.blocks = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 2, 64, batch_first=True), 2)
        self.out = nn.Linear(32, out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.blocks(self.embed(x)))


def _electra(kind: type[nn.Module]) -> nn.Module:
    embed = nn.Embedding(VOCABULARY, 32)
    electra = kind(_Hidden(embed, VOCABULARY), _Hidden(embed, 1), mask_token_id=2, pad_token_id=0,
                   num_tokens=VOCABULARY)  # fmt: skip
    return _First(electra)


class _First(nn.Module):
    """Of what a model returns, the first, its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any) -> Any:
        return self.model(*args)[0]


def language_models() -> Iterator[Candidate]:
    yield entry(
        "mambapy", "mambapy.mamba:MambaConfig", floats(16, 32), build=_mamba, name="Mamba", d_model=32, n_layers=2
    )
    yield entry("mambapy", "mambapy.jamba:JambaLMConfig", tokens(), build=_jamba, name="JambaLM", vocab_size=64,
                d_model=32, n_layers=2, mlp_size=64, d_state=8, num_experts=4,
                num_experts_per_tok=2, expert_layer_offset=1, attn_layer_offset=1, expert_layer_period=2,
                attn_layer_period=2, num_attention_heads=2, num_key_value_heads=2)  # fmt: skip
    sizes: dict[str, dict[str, Any]] = {
        "pythia-14m": {},
        "Llama-3.2-1B": {"n_query_groups": 2, "intermediate_size": 64},
        "Mixtral-8x7B-v0.1": {"n_query_groups": 2, "intermediate_size": 64, "n_expert": 4},
    }
    for name, settings in sizes.items():
        yield entry("litgpt", "litgpt.config:Config.from_name", tokens(), name, build=_litgpt, name=name,
                    **{"n_layer": 2, "n_embd": 32, "n_head": 4, "padded_vocab_size": 64, "block_size": 32,
                       **settings})  # fmt: skip
    adapters: dict[str, dict[str, Any]] = {
        "LoraConfig": {"r": 4, "lora_dropout": 0.1},
        "IA3Config": {},
        "PrefixTuningConfig": {"num_virtual_tokens": 4},
        "AdaLoraConfig": {"init_r": 4, "total_step": 100},
    }
    for name, settings in adapters.items():
        yield entry("peft", f"peft:{name}", _texts_with_labels, build=_adapted, own_loss=True, **settings)
    yield entry("xlstm", "xlstm:xLSTMLMModelConfig", tokens(), build=_xlstm)
    retnet: dict[str, Any] = {"vocab_size": 64, "decoder_layers": 2, "decoder_embed_dim": 32,
              "decoder_value_embed_dim": 32,
              "decoder_retention_heads": 2, "decoder_ffn_embed_dim": 64, "no_output_layer": False}  # fmt: skip
    yield entry("torchscale", "torchscale.architecture.config:RetNetConfig", tokens(), build=_retnet, name="RetNet",
                **retnet)  # fmt: skip
    yield entry("torchscale", "torchscale.architecture.config:EncoderConfig", tokens(), build=_torchscale,
                name="Encoder: DeepNorm, stochastic depth", vocab_size=64, encoder_layers=2, encoder_embed_dim=32,
                encoder_ffn_embed_dim=64, encoder_attention_heads=2, deepnorm=True, drop_path_rate=0.1)  # fmt: skip
    yield entry("sentence-transformers", "sentence_transformers:SentenceTransformer", _features, build=_sentences)
    yield entry(
        "openai-whisper", "whisper.model:ModelDimensions",
        lambda: (torch.randn(MINI_BATCH, 80, 32), some_tokens()), build=_whisper, name="Whisper", n_mels=80,
        n_audio_ctx=16, n_audio_state=32, n_audio_head=2, n_audio_layer=2, n_vocab=64, n_text_ctx=16, n_text_state=32,
        n_text_head=2, n_text_layer=2,
    )  # fmt: skip
    yield entry("chronos-forecasting", "chronos.chronos_bolt:ChronosBoltModelForForecasting",
                lambda: {"context": torch.randn(MINI_BATCH, 32), "target": torch.randn(MINI_BATCH, 8)}, build=_chronos,
                own_loss=True)  # fmt: skip


def _mamba(config: Any, **settings: int) -> nn.Module:
    return found("mambapy.mamba:Mamba")(config(**settings))


def _jamba(config: Any, **settings: int) -> nn.Module:
    import inspect

    known = inspect.signature(config).parameters
    return found("mambapy.jamba:JambaLM")(config(**{key: value for key, value in settings.items() if key in known}))


def _litgpt(from_name: Any, name: str, **settings: int) -> nn.Module:
    return found("litgpt.model:GPT")(from_name(name, **settings))


def _texts_with_labels() -> dict[str, torch.Tensor]:
    ids = some_tokens()
    return {"input_ids": ids, "labels": ids.clone()}


def _adapted(config: Any, **settings: Any) -> nn.Module:
    small = found("transformers:GPT2Config")(vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=32,
                                             bos_token_id=0, eos_token_id=0)  # fmt: skip
    model = found("transformers:GPT2LMHeadModel")(small)
    return found("peft:get_peft_model")(model, config(task_type="CAUSAL_LM", **settings))


def _xlstm(config: Any) -> nn.Module:
    mlstm = found("xlstm:mLSTMBlockConfig")(
        mlstm=found("xlstm:mLSTMLayerConfig")(conv1d_kernel_size=4, qkv_proj_blocksize=4, num_heads=2)
    )
    slstm = found("xlstm:sLSTMBlockConfig")(
        slstm=found("xlstm:sLSTMLayerConfig")(backend="vanilla", num_heads=2, conv1d_kernel_size=4),
        feedforward=found("xlstm:FeedForwardConfig")(proj_factor=1.3, act_fn="gelu"),
    )
    return found("xlstm:xLSTMLMModel")(
        config(mlstm_block=mlstm, slstm_block=slstm, context_length=16, num_blocks=2, embedding_dim=32, slstm_at=[1],
               vocab_size=64)
    )  # fmt: skip


def _retnet(config: Any, **settings: Any) -> nn.Module:
    return found("torchscale.architecture.retnet:RetNetDecoder")(config(**settings), embed_tokens=nn.Embedding(64, 32))


def _torchscale(config: Any, **settings: Any) -> nn.Module:
    made = found("torchscale.architecture.encoder:Encoder")
    positions = found("torchscale.component.embedding:PositionalEmbedding")(32, 32)
    return made(config(**settings), embed_tokens=nn.Embedding(64, 32), embed_positions=positions)


def _features() -> tuple[dict[str, torch.Tensor]]:
    return ({"input_ids": some_tokens(), "attention_mask": torch.ones(MINI_BATCH, 16, dtype=torch.int64)},)


class _Embedding(nn.Module):
    """A part of a sentence transformer: a mapping of features in, one with more features out."""

    def __init__(self) -> None:
        super().__init__()
        config = found("transformers:BertConfig")(vocab_size=64, hidden_size=32, num_hidden_layers=2,
                                                  num_attention_heads=2, intermediate_size=64)  # fmt: skip
        self.model = found("transformers:BertModel")(config)

    def forward(self, features: dict[str, torch.Tensor], **_: Any) -> dict[str, torch.Tensor]:
        states = self.model(features["input_ids"], features["attention_mask"])
        return {**features, "token_embeddings": states.last_hidden_state}


def _sentences(kind: Any) -> nn.Module:
    parts = "sentence_transformers.models:"
    pooling = found(parts + "Pooling")(32, "mean")
    return kind(modules=[_Embedding(), pooling, found(parts + "Normalize")()], device="cpu")


def _whisper(dimensions: Any, **settings: int) -> nn.Module:
    model = found("whisper.model:Whisper")(dimensions(**settings))
    nn.init.normal_(model.decoder.positional_embedding, std=0.1)  # it is left as memory was
    return model


def _chronos(kind: Any) -> nn.Module:
    config = found("transformers:T5Config")(
        vocab_size=2, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_decoder_layers=2, num_heads=2, pad_token_id=0,
        decoder_start_token_id=0, dropout_rate=0.1,
    )  # fmt: skip
    config.chronos_config = {"context_length": 32, "prediction_length": 8, "input_patch_size": 8,
                             "input_patch_stride": 8, "quantiles": [0.1, 0.5, 0.9], "use_reg_token": True}  # fmt: skip
    return kind(config)
