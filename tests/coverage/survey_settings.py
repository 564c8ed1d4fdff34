"""What the tiny configurations of the survey need beyond what the names of their fields tell.

Names that start with an underscore are about the sample: `_image` is the extent of images, `_length` that of texts,
`_samples` that of sounds, `_features` (time, frequency) that of spectra, `_pictures` that of videos; `_sample` holds
further arguments.
"""

from collections.abc import Mapping
from typing import Any

_REFORMER = {
    "axial_pos_shape": (4, 4),
    "axial_pos_embds_dim": (16, 16),
    "attn_layers": ["local", "lsh"],
    "lsh_attn_chunk_length": 4,
    "local_attn_chunk_length": 4,
    "num_buckets": 4,
    "_length": 16,
}

SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "GPTNeoForCausalLM": {"attention_types": [[["global", "local"], 1]]},
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"]},
    "LongcatFlashForCausalLM": {"qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "head_dim": 8},
    "Mamba2ForCausalLM": {"num_heads": 8, "head_dim": 8, "n_groups": 1},
    "ReformerModelWithLMHead": {**_REFORMER, "is_decoder": True},
    "ReformerForMaskedLM": {**_REFORMER, "is_decoder": False},
    "XmodForCausalLM": {"default_language": "en_XX"},
    "XmodForMaskedLM": {"default_language": "en_XX"},
    "EsmForMaskedLM": {"vocab_size": 64, "pad_token_id": 0, "mask_token_id": 3},
    "PerceiverForMaskedLM": {"_length": 64, "d_latents": 32, "num_latents": 16},
    "WhisperForConditionalGeneration": {"_features": (80, 128)},
    "WhisperForAudioClassification": {"_features": (80, 128)},
    "BitForImageClassification": {"num_groups": 2},
    "DonutSwinForImageClassification": {"image_size": 64, "_image": 64, "window_size": 2},
    "SwinForImageClassification": {"image_size": 64, "_image": 64, "window_size": 2},
    "Swinv2ForImageClassification": {"image_size": 64, "_image": 64, "window_size": 2},
    "LevitForImageClassification": {"image_size": 224, "_image": 224, "patch_size": 16},
    "LevitForImageClassificationWithTeacher": {"image_size": 224, "_image": 224, "patch_size": 16},
    "EfficientNetForImageClassification": {
        "in_channels": [32, 16],
        "out_channels": [16, 24],
        "kernel_sizes": [3, 3],
        "strides": [1, 2],
        "num_block_repeats": [1, 1],
        "expand_ratios": [1, 6],
        "width_coefficient": 1.0,
        "depth_coefficient": 1.0,
        "hidden_dim": 1280,
    },
    "HieraForImageClassification": {"image_size": [64, 64], "_image": 64},
    "MobileViTForImageClassification": {"image_size": 128, "_image": 128},
    "MobileViTV2ForImageClassification": {"image_size": 128, "_image": 128},
}
