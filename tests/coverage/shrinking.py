"""Tiny configurations of transformers' models, made from the names of their fields alone.

A configuration is a dataclass. Each field whose name says what it counts (layers, heads, width) gets a small number
that goes with the others; every probability of dropping something becomes 0; configurations inside are shrunk too.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

from tests.coverage.model_list import transformers

VOCABULARY = 64
WIDTH = 32
IMAGE = 32

# Patterns of field names with what a number becomes; the first that matches counts.
_NUMBERS: tuple[tuple[str, int], ...] = (
    (r"vocab_size.*|.*_vocab_size|num_embeddings|n_words|num_tokens|codebook_size", VOCABULARY),
    (r"num_kv_shared_layers", 0),
    (r"(num_)?(hidden_|encoder_|decoder_|text_)*layers|n_(decoder_)?layers?|num_.*layers|depth", 2),
    (r".*(first_k_dense_replace|num_dense_layers).*", 1),
    (r"num_hidden_groups|num_blocks|decoder_n_layers", 2),
    (r".*key_value_heads|num_kv_heads|n_kv_heads|num_query_groups|multi_query_group_num", 2),
    (r".*(attention_heads?|num_heads|n_heads?|_heads)", 4),
    (r"qk_rope_head_dim|rotary_dim|rope_head_dim|partial_rotary_dim", 4),
    (r".*(head_dim|head_size|d_kv|attention_head_dim|kv_channels)", 8),
    (r".*lora_rank|q_lora_rank|kv_lora_rank|.*_rank", 8),
    (r"num_experts_per_tok|moe_topk|num_selected_experts|moe_k|top_?k|num_experts_per_token|moe_num_active.*", 2),
    (r"n_group|topk_group|num_expert_groups?|n_groups|mamba_n_groups|num_limited_groups", 1),
    (r"(moe_)?n(um)?_(local_|routed_)?experts|moe_num_experts|expert_num|num_moe_experts|.*n_routed_experts", 4),
    (r"n(um)?_shared_experts", 1),
    (r".*(intermediate_size|ffn_dim|ffn_hidden_size|ffn_size|d_ff|feed_forward).*", 64),
    (r".*(d_inner|n_inner|inner_dim|mlp_dim).*", 64),
    (r".*(embedding_size|embedding_dim|embed_dim|projection_dim|proj_size|decoder_hidden_size|word_embed.*dim)", WIDTH),
    (r"(.*_)?(hidden_size|d_model|n_embd|hidden_dim|width|embedding_width|d_embed|emb_dim)", WIDTH),
    (r"dim|.*attention_dim|.*_width|neck_hidden_.*|fusion_hidden_size", WIDTH),
    (r"(.*_)?(max_position_embeddings|n_positions|n_ctx|max_seq_len|max_sequence_length|context_length)", VOCABULARY),
    (r"max_source_positions|max_target_positions|max_length", VOCABULARY),
    (r".*image_size", IMAGE),
    (r"(.*_)?patch_size", 8),
    (r".*(sliding_window|attention_window|window_size|local_window).*", 4),
    (r".*chunk_size|.*_chunk_length|block_size", 4),
    (r".*state_size|mamba_d_state|ssm_state_size", 8),
    (r"num_frames", 4),
    (r"num_labels", 5),
)
# The same for lists, with what stands at a position.
_LISTS: tuple[tuple[str, Callable[[int], int]], ...] = (
    (r".*(hidden_sizes|embed_dims?|channels|dims|widths)", lambda position: 8 * 2**position),
    (r".*heads", lambda position: 2**position),
    (r".*(depths|layers|num_blocks|num_encoder_blocks|block_repeats)", lambda _: 1),
)

# What fields without a default number become: models read them all the same.
_MISSING: Mapping[str, int] = {
    "head_dim": 8,
    "num_key_value_heads": 4,
    "num_experts_per_tok": 2,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
}


def small_settings(config: Any) -> dict[str, Any]:
    """Keyword arguments that make a configuration of this class tiny; those of configurations inside as dicts."""
    settings: dict[str, Any] = {}
    inside = getattr(config, "sub_configs_defaults", None) or {}
    tokens = 0
    for field in dataclasses.fields(config):
        value = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        if field.name in inside:
            settings[field.name] = _inner_settings(inside[field.name])
        elif re.fullmatch(r".*_token_(id|index)", field.name) and isinstance(value, int) and value >= VOCABULARY:
            tokens += 1
            settings[field.name] = VOCABULARY - tokens
        elif (small := _small(field.name, value)) is not None:
            settings[field.name] = small
    if "kv_lora_rank" in settings and "num_key_value_heads" in settings:  # latent attention has a key for each head
        settings["num_key_value_heads"] = settings["num_attention_heads"]
    return settings


def _inner_settings(specification: Any) -> dict[str, Any]:
    """The same of a configuration inside, whose class may be told by the name of its model alone."""
    kind, name = specification.config_class, getattr(specification, "model_type", None)
    if not dataclasses.is_dataclass(kind):
        if name is None:
            return {}
        kind = transformers().CONFIG_MAPPING[name]
    return {**small_settings(kind), **({"model_type": name} if name else {})}


def _small(name: str, value: Any) -> Any:
    """What a field becomes; None leaves it as it is."""
    if value is None:
        return _MISSING.get(name)
    if "drop" in name and isinstance(value, int | float) and not isinstance(value, bool):
        return type(value)(0)
    if "drop" in name and isinstance(value, list | tuple):
        return type(value)(0.0 for _ in value)
    if isinstance(value, int) and not isinstance(value, bool):
        return next((min(small, value) for pattern, small in _NUMBERS if re.fullmatch(pattern, name)), None)
    if isinstance(value, list | tuple) and value and all(isinstance(item, int) for item in value):
        made = next((make for pattern, make in _LISTS if re.fullmatch(pattern, name)), None)
        return None if made is None else type(value)(made(position) for position in range(len(value)))
    return None
