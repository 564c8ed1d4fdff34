"""Models of further libraries, chosen when the list before them was done, none of them traced before that."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from tests.coverage.library_parts import MINI_BATCH, VOCABULARY, entry, floats, found, image, some_tokens, tokens
from tests.coverage.survey_models import Candidate


def more() -> Iterator[Candidate]:
    """All of them."""
    yield from attentions()
    yield from zoo()
    yield from dear_ones()


def attentions() -> Iterator[Candidate]:
    lm: dict[str, Any] = {"num_tokens": VOCABULARY, "dim": 32, "depth": 2}
    yield entry("sinkhorn-transformer", "sinkhorn_transformer:SinkhornTransformerLM", tokens(32), **lm, heads=2,
                max_seq_len=32, bucket_size=8)  # fmt: skip
    yield entry("sinkhorn-transformer", "sinkhorn_transformer:SinkhornTransformerLM", tokens(32), **lm, heads=2,
                max_seq_len=32, bucket_size=8, reversible=True, name="SinkhornTransformerLM, reversible")  # fmt: skip
    yield entry("axial-attention", "axial_attention:AxialImageTransformer", floats(16, 8, 8), dim=16, depth=2, heads=2,
                reversible=False)  # fmt: skip
    yield entry("axial-attention", "axial_attention:AxialAttention", floats(8, 8, 16), dim=16, dim_index=3, heads=2,
                num_dimensions=2)  # fmt: skip
    yield entry("deformable-attention", "deformable_attention:DeformableAttention", floats(32, 16, 16), dim=32,
                dim_head=16, heads=2, downsample_factor=4, offset_kernel_size=6)  # fmt: skip
    yield entry("point-transformer-pytorch", "point_transformer_pytorch:PointTransformerLayer", _points, dim=16,
                pos_mlp_hidden_dim=16, num_neighbors=4)  # fmt: skip
    yield entry("point-transformer-pytorch", "point_transformer_pytorch:MultiheadPointTransformerLayer", _points,
                dim=16, heads=2, dim_head=8, pos_mlp_hidden_dim=16)  # fmt: skip
    yield entry("invariant-point-attention", "invariant_point_attention:IPABlock", floats(8, 32), dim=32, heads=2,
                scalar_key_dim=8, scalar_value_dim=8, point_key_dim=4, point_value_dim=4,
                require_pairwise_repr=False, build=_folded)  # fmt: skip
    yield entry("MEGABYTE-pytorch", "MEGABYTE_pytorch:MEGABYTE", tokens(), build=_own_loss, own_loss=True, heads=2,
                num_tokens=VOCABULARY, dim=(32, 16), depth=(1, 2), max_seq_len=(4, 4), dim_head=16)  # fmt: skip
    yield entry("mixture-of-experts", "mixture_of_experts:MoE", floats(16, 32), dim=32, num_experts=4)
    yield entry("mixture-of-experts", "mixture_of_experts:HeirarchicalMoE", floats(16, 32), dim=32, num_experts=(2, 2))
    yield entry("isab-pytorch", "isab_pytorch:ISAB", floats(16, 32), dim=32, heads=2, num_latents=8)
    yield entry("minGRU-pytorch", "minGRU_pytorch.minLM:minLM", tokens(), **lm)
    yield entry("minGRU-pytorch", "minGRU_pytorch.minLM:minLM", tokens(), **lm, use_lstm=True, enable_conv=True,
                name="minLM of minLSTM")  # fmt: skip
    yield entry("Mega-pytorch", "mega_pytorch:Mega", tokens(), **lm)
    yield entry("simple-hierarchical-transformer", "simple_hierarchical_transformer:HierarchicalTransformer",
                tokens(16), **lm, seq_len=16, dim_head=16, heads=2, hierarchies=(1, 2), window_sizes=(8, None),
                build=_own_loss, own_loss=True)  # fmt: skip
    yield entry("titans-pytorch", "titans_pytorch:MemoryAsContextTransformer", tokens(16), **lm, segment_len=8,
                dim_head=16, heads=2, num_residual_streams=1)  # fmt: skip
    yield entry("CoCa-pytorch", "coca_pytorch.coca_pytorch:CoCa", _picture_text, build=_coca, own_loss=True)
    yield entry("x-clip", "x_clip:CLIP", _text_picture, dim_text=32, dim_image=32, dim_latent=16,
                num_text_tokens=VOCABULARY, text_enc_depth=1, text_seq_len=16, text_heads=2, text_dim_head=16,
                visual_enc_depth=1, visual_heads=2, visual_dim_head=16, visual_image_size=32, visual_patch_size=8,
                build=_own_loss, own_loss=True)  # fmt: skip


def zoo() -> Iterator[Candidate]:
    for name in ("resnet20", "seresnet20", "diaresnet20", "shakeshakeresnet20_2x16d", "nin", "ror3_56"):
        yield entry("pytorchcv", "pytorchcv.model_provider:get_model", image(), f"{name}_cifar10", name=name)
    yield entry("x-unet", "x_unet:XUnet", image(32), dim=8, dim_mults=(1, 2), num_blocks_per_stage=(1, 1),
                num_self_attn_per_stage=(0, 1), nested_unet_depths=(1, 0), nested_unet_dim=8)  # fmt: skip
    yield entry("rectified-flow-pytorch", "rectified_flow_pytorch:Unet", _noisy, dim=8, dim_mults=(1, 2),
                attn_dim_head=8, attn_heads=2)  # fmt: skip
    yield entry("nnAudio", "nnAudio.features:CQT1992v2", floats(4096), sr=4000, hop_length=256, fmin=60, n_bins=24,
                trainable=True, verbose=False)  # fmt: skip
    yield entry("nnAudio", "nnAudio.features:MelSpectrogram", floats(4096), sr=4000, n_fft=256, n_mels=16,
                trainable_mel=True, verbose=False)  # fmt: skip
    yield entry("torchcde", "torchcde:cdeint", floats(8, 3), build=_controlled)
    yield entry("torchsde", "torchsde:sdeint", floats(4), build=_stochastic)


def dear_ones() -> Iterator[Candidate]:
    """Models of which a tiny configuration once took minutes."""
    yield entry("monai", "monai.networks.nets:SwinUNETR", floats(1, 64, 64), in_channels=1, out_channels=2,
                feature_size=12, spatial_dims=2)  # fmt: skip
    yield entry("diffusers", "diffusers:AutoencoderKLWan", floats(3, 5, 16, 16), base_dim=8, z_dim=4,
                dim_mult=[1, 2, 2], num_res_blocks=1, temperal_downsample=[False, True],
                latents_mean=[0.0] * 4, latents_std=[1.0] * 4)  # fmt: skip
    yield entry("basicsr", "tests.coverage.library_more:basic_vsr", floats(3, 3, 64, 64), name="BasicVSR")


def basic_vsr() -> nn.Module:
    """Of a library that asks for a file which torchvision has no more."""
    former = ModuleType("torchvision.transforms.functional_tensor")
    former.rgb_to_grayscale = found("torchvision.transforms.functional:rgb_to_grayscale")  # type: ignore[attr-defined]
    sys.modules[former.__name__] = former
    made: nn.Module = found("basicsr.archs.basicvsr_arch:BasicVSR")(num_feat=8, num_block=2)
    return made


def _points() -> tuple[Tensor, Tensor]:
    return torch.randn(MINI_BATCH, 8, 16), torch.randn(MINI_BATCH, 8, 3)


def _noisy() -> tuple[Tensor, Tensor]:
    return torch.rand(MINI_BATCH, 3, 16, 16), torch.rand(MINI_BATCH)


def _picture_text() -> dict[str, Any]:
    return {"text": some_tokens(), "images": torch.randn(MINI_BATCH, 3, 32, 32), "return_loss": True}


def _text_picture() -> tuple[Tensor, Tensor]:
    return some_tokens(), torch.randn(MINI_BATCH, 3, 32, 32)


def _coca(kind: type[nn.Module]) -> nn.Module:
    simple = found("vit_pytorch.simple_vit_with_patch_dropout:SimpleViT")
    vit = simple(image_size=32, patch_size=8, num_classes=5, dim=32, depth=1, heads=2, mlp_dim=32, patch_dropout=0.5)
    pictures = found("vit_pytorch.extractor:Extractor")(vit, return_embeddings_only=True, detach=False)
    return kind(dim=32, img_encoder=pictures, image_dim=32, num_tokens=VOCABULARY, unimodal_depth=1, multimodal_depth=1,
                dim_head=16, heads=2, num_img_queries=8)  # fmt: skip


class _Wrapped(nn.Module):
    def __init__(self, inner: nn.Module, **settings: Any) -> None:
        super().__init__()
        self.inner, self.settings = inner, settings

    def forward(self, *args: Tensor) -> Any:
        return self.inner(*args, **self.settings)


class _First(_Wrapped):
    def forward(self, *args: Tensor) -> Any:
        return self.inner(*args, **self.settings)[0]


def _own_loss(kind: type[nn.Module], **settings: Any) -> nn.Module:
    loss = _Wrapped(kind(**settings), return_loss=True)
    return loss if kind.__name__ != "HierarchicalTransformer" else _First(loss)


class _Folded(_Wrapped):
    """Frames that stand still."""

    def forward(self, *args: Tensor) -> Any:
        (x,) = args
        rotations = torch.eye(3).expand(len(x), x.shape[1], 3, 3)
        return self.inner(x, rotations=rotations, translations=x[..., :3])


def _folded(kind: type[nn.Module], **settings: Any) -> nn.Module:
    return _Folded(kind(**settings))


class _Controlled(nn.Module):
    """A neural controlled differential equation, as in the library's own example."""

    def __init__(self, solve: Any) -> None:
        super().__init__()
        self.solve = solve
        self.initial, self.field, self.readout = nn.Linear(3, 4), nn.Linear(4, 12), nn.Linear(4, 1)

    def derivative(self, _: Tensor, z: Tensor) -> Tensor:
        return self.field(z).tanh().view(*z.shape[:-1], 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        coefficients = found("torchcde:linear_interpolation_coeffs")(x)
        path = found("torchcde:LinearInterpolation")(coefficients)
        z = self.solve(X=path, func=self.derivative, z0=self.initial(path.evaluate(path.interval[0])), adjoint=False,
                       t=path.interval, method="rk4", options={"step_size": 1.0})  # fmt: skip
        return self.readout(z[:, -1])


def _controlled(solve: Any) -> nn.Module:
    return _Controlled(solve)


class _Stochastic(nn.Module):
    """A stochastic differential equation with a noise of its own, as in the library's own example."""

    noise_type, sde_type = "diagonal", "ito"

    def __init__(self, solve: Any) -> None:
        super().__init__()
        self.solve = solve
        self.drift, self.diffusion = nn.Linear(4, 4), nn.Linear(4, 4)

    def f(self, _: Tensor, y: Tensor) -> Tensor:
        return self.drift(y)

    def g(self, _: Tensor, y: Tensor) -> Tensor:
        return self.diffusion(y).sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        solved: Tensor = self.solve(self, x, torch.tensor([0.0, 1.0]), dt=0.25, method="euler")
        return solved[-1]


def _stochastic(solve: Any) -> nn.Module:
    return _Stochastic(solve)
