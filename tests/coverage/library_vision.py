"""The second survey's models of pictures and volumes."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from tests.coverage.library_parts import MINI_BATCH, classes, entry, floats, found, image
from tests.coverage.survey_models import Candidate


def vision() -> Iterator[Candidate]:
    """All of them."""
    yield from vit_pytorch()
    yield from other_transformers()
    yield from diffusion()
    yield from medical()
    yield from segmentation()
    yield from classic()


def vit_pytorch() -> Iterator[Candidate]:
    small: dict[str, Any] = {"image_size": 32, "num_classes": 5}
    lib = "vit-pytorch"
    yield entry(
        lib, "vit_pytorch.cait:CaiT", image(), **small, patch_size=8, dim=32, depth=2, cls_depth=1, heads=2, mlp_dim=64,
        dropout=0.1, layer_dropout=0.05,
    )  # fmt: skip
    yield entry(
        lib, "vit_pytorch.cross_vit:CrossViT", image(48), image_size=48, num_classes=5, sm_dim=32, lg_dim=48,
        sm_enc_heads=2, lg_enc_heads=2, sm_enc_mlp_dim=64, lg_enc_mlp_dim=64, depth=1, lg_enc_depth=2,
    )  # fmt: skip
    yield entry(lib, "vit_pytorch.max_vit:MaxViT", image(112), num_classes=5, dim=32, depth=(1, 1), dim_conv_stem=32)
    yield entry(
        lib, "vit_pytorch.mobile_vit:MobileViT", image(64), image_size=(64, 64), dims=[24, 32, 48],
        channels=[8, 8, 16, 16, 24, 24, 32, 32, 48, 48, 64], num_classes=5,
    )  # fmt: skip
    yield entry(lib, "vit_pytorch.t2t:T2TViT", image(), **small, dim=32, depth=2, heads=2, mlp_dim=64)
    yield entry(
        lib, "vit_pytorch.nest:NesT", image(), **small, patch_size=4, dim=16, heads=2, num_hierarchies=2,
        block_repeats=(1, 1),
    )  # fmt: skip
    yield entry(
        lib, "vit_pytorch.regionvit:RegionViT", image(224), dim=(8, 16, 16, 32), depth=(1, 1, 1, 1), num_classes=5
    )
    yield entry(lib, "vit_pytorch.mae:MAE", image(), own_loss=True, build=_masked, decoder_dim=32, decoder_depth=1)
    yield entry(
        lib, "vit_pytorch.vivit:ViViT", floats(3, 4, 32, 32), **small, image_patch_size=8, frames=4, frame_patch_size=2,
        dim=32, spatial_depth=1, temporal_depth=1, heads=2, mlp_dim=64,
    )  # fmt: skip


def _coca(model: Any, **settings: Any) -> nn.Module:
    made: nn.Module = model(**settings)
    nn.init.normal_(made.get_parameter("text_decoder.text_projection"), std=0.2)  # the library leaves it as memory was
    return made


def _masked(kind: type[nn.Module], **settings: int) -> nn.Module:
    vit = found("vit_pytorch:ViT")
    encoder = vit(image_size=32, patch_size=8, num_classes=5, dim=32, depth=2, heads=2, mlp_dim=64, pool="mean")
    return kind(encoder=encoder, **settings)


def other_transformers() -> Iterator[Candidate]:
    yield entry(
        "mlp-mixer-pytorch", "mlp_mixer_pytorch:MLPMixer", image(), image_size=32, channels=3, patch_size=8, dim=32,
        depth=2, num_classes=5,
    )  # fmt: skip
    yield entry(
        "g-mlp-pytorch", "g_mlp_pytorch:gMLPVision", image(), image_size=32, patch_size=8, num_classes=5, dim=32,
        depth=3, prob_survival=0.99,
    )  # fmt: skip
    yield entry(
        "perceiver-pytorch", "perceiver_pytorch:Perceiver", floats(16, 16, 3), num_freq_bands=4, depth=2, max_freq=10.0,
        num_latents=8, latent_dim=32, latent_heads=2, num_classes=5, weight_tie_layers=True,
    )  # fmt: skip
    yield entry(
        "timesformer-pytorch", "timesformer_pytorch:TimeSformer", floats(4, 3, 32, 32), dim=32, num_frames=4,
        num_classes=5, image_size=32, patch_size=8, depth=2, heads=2,
    )  # fmt: skip
    yield entry("slot-attention", "slot_attention:SlotAttention", floats(20, 32), num_slots=4, dim=32)
    yield entry(
        "bottleneck-transformer-pytorch", "bottleneck_transformer_pytorch:BottleStack", floats(32, 16, 16), dim=32,
        fmap_size=16, dim_out=64, num_layers=2, heads=2, dim_head=16, rel_pos_emb=True,
    )  # fmt: skip
    yield entry(
        "halonet-pytorch", "halonet_pytorch:HaloAttention", floats(32, 16, 16), build=_convolved, dim=32, block_size=4,
        halo_size=2, dim_head=16, heads=2,
    )  # fmt: skip
    yield entry(
        "lambda-networks", "lambda_networks:LambdaLayer", floats(32, 16, 16), build=_convolved, dim=32, dim_out=32,
        r=7, dim_k=16, heads=4, dim_u=1,
    )  # fmt: skip
    yield entry(
        "open_clip_torch", "open_clip.model:CLIP", _pictures_and_texts, embed_dim=32,
        vision_cfg={"image_size": 32, "layers": 2, "width": 32, "head_width": 16, "patch_size": 8},
        text_cfg={"context_length": 16, "vocab_size": 64, "width": 32, "heads": 2, "layers": 2},
    )  # fmt: skip
    yield entry(
        "open_clip_torch", "open_clip.coca_model:CoCa", _pictures_and_texts, build=_coca, embed_dim=32,
        multimodal_cfg={"context_length": 16, "vocab_size": 64, "width": 32, "heads": 2, "layers": 2},
        vision_cfg={
            "image_size": 32, "layers": 2, "width": 32, "head_width": 16, "patch_size": 8, "attentional_pool": True,
            "attn_pooler_heads": 2, "output_tokens": True,
        },
        text_cfg={
            "context_length": 16, "vocab_size": 64, "width": 32, "heads": 2, "layers": 2, "embed_cls": True,
            "output_tokens": True,
        },
    )  # fmt: skip
    yield entry(
        "segment-anything-py", "segment_anything.modeling:ImageEncoderViT", image(64), img_size=64, patch_size=8,
        embed_dim=32, depth=2, num_heads=2, out_chans=16, use_rel_pos=True, window_size=4, global_attn_indexes=(1,),
    )  # fmt: skip
    yield entry("kornia", "kornia.models.vit:VisionTransformer", image(), image_size=32, patch_size=8, embed_dim=32,
                depth=2, num_heads=2)  # fmt: skip


def _convolved(kind: type[nn.Module], **settings: int) -> nn.Module:
    """Between convolutions, as the library's page shows."""
    return nn.Sequential(nn.Conv2d(32, 32, 1), kind(**settings), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 5, 1))


def _pictures_and_texts() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.rand(MINI_BATCH, 3, 32, 32), torch.randint(1, 64, (MINI_BATCH, 16))


def diffusion() -> Iterator[Candidate]:
    lib = "diffusers"
    blocks: dict[str, Any] = {
        "block_out_channels": (16, 32),
        "layers_per_block": 1,
        "norm_num_groups": 8,
        "sample_size": 16,
    }
    up_down: dict[str, Any] = {
        "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
        "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
    }
    yield entry(lib, "diffusers:UNet2DModel", _noisy(3, 16), **blocks, **up_down, attention_head_dim=8)
    yield entry(
        lib, "diffusers:UNet2DConditionModel", _noisy(4, 16, (7, 32)), **blocks, cross_attention_dim=32,
        attention_head_dim=8, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )  # fmt: skip
    coder: dict[str, Any] = {
        "down_block_types": ("DownEncoderBlock2D",) * 2,
        "up_block_types": ("UpDecoderBlock2D",) * 2,
        "block_out_channels": (8, 16),
        "norm_num_groups": 8,
    }
    yield entry(lib, "diffusers:AutoencoderKL", image(16), **coder, latent_channels=4)
    yield entry(lib, "diffusers:VQModel", image(16), **coder, latent_channels=3, num_vq_embeddings=32)
    small: dict[str, Any] = {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2}
    yield entry(
        lib, "diffusers:DiTTransformer2DModel",
        lambda: {"hidden_states": torch.randn(MINI_BATCH, 4, 8, 8), "timestep": torch.randint(1000, (MINI_BATCH,)),
                 "class_labels": classes()},
        **small, in_channels=4, sample_size=8, num_embeds_ada_norm=1000,
    )  # fmt: skip
    yield entry(
        lib, "diffusers:SD3Transformer2DModel",
        lambda: {"hidden_states": torch.randn(MINI_BATCH, 4, 8, 8),
                 "encoder_hidden_states": torch.randn(MINI_BATCH, 7, 32),
                 "pooled_projections": torch.randn(MINI_BATCH, 16), "timestep": torch.rand(MINI_BATCH) * 1000},
        **small, sample_size=8, in_channels=4, out_channels=4, joint_attention_dim=32, caption_projection_dim=32,
        pooled_projection_dim=16,
    )  # fmt: skip
    yield entry(
        lib, "diffusers:CogVideoXTransformer3DModel",
        lambda: {"hidden_states": torch.randn(MINI_BATCH, 4, 4, 8, 8),
                 "encoder_hidden_states": torch.randn(MINI_BATCH, 8, 32),
                 "timestep": torch.randint(1000, (MINI_BATCH,))},
        **small, in_channels=4, out_channels=4, text_embed_dim=32, sample_width=8, sample_height=8, sample_frames=13,
        time_embed_dim=8, max_text_seq_length=8, temporal_compression_ratio=4,
    )  # fmt: skip
    yield entry(
        lib, "diffusers:UNet1DModel", lambda: (torch.randn(MINI_BATCH, 14, 16), torch.randint(100, (MINI_BATCH,))),
        in_channels=14, out_channels=14, block_out_channels=(16, 32), time_embedding_type="positional", act_fn="mish",
        down_block_types=("DownResnetBlock1D",) * 2, up_block_types=("UpResnetBlock1D",),
        out_block_type="OutConv1DBlock", mid_block_type="MidResTemporalBlock1D", use_timestep_embedding=True,
        flip_sin_to_cos=False, freq_shift=1.0, downsample_each_block=False, extra_in_channels=0,
    )  # fmt: skip
    noise = "denoising_diffusion_pytorch:"
    yield entry("denoising-diffusion-pytorch", noise + "Unet", _noisy(3, 32), dim=16, dim_mults=(1, 2))
    yield entry(
        "denoising-diffusion-pytorch", noise + "GaussianDiffusion", image(), own_loss=True, build=_denoised,
        image_size=32, timesteps=100,
    )  # fmt: skip
    yield entry(
        "imagen-pytorch", "imagen_pytorch:Unet",
        lambda: {"x": torch.randn(MINI_BATCH, 3, 32, 32), "time": torch.rand(MINI_BATCH),
                 "text_embeds": torch.randn(MINI_BATCH, 8, 32)},
        dim=16, cond_dim=16, dim_mults=(1, 2), text_embed_dim=32, layer_attns=(False, True),
        layer_cross_attns=(False, True), attn_heads=2, attn_dim_head=8, max_text_len=8,
    )  # fmt: skip


def _noisy(channels: int, extent: int, context: tuple[int, ...] = ()):
    def sample() -> tuple[torch.Tensor, ...]:
        noised = torch.randn(MINI_BATCH, channels, extent, extent), torch.randint(100, (MINI_BATCH,))
        return (*noised, torch.randn(MINI_BATCH, *context)) if context else noised

    return sample


def _denoised(kind: type[nn.Module], **settings: int) -> nn.Module:
    return kind(found("denoising_diffusion_pytorch:Unet")(dim=16, dim_mults=(1, 2)), **settings)


def medical() -> Iterator[Candidate]:
    lib, nets = "monai", "monai.networks.nets:"
    flat: dict[str, Any] = {"spatial_dims": 2, "in_channels": 1, "out_channels": 2}
    yield entry(lib, nets + "UNet", image(32, 1), **flat, channels=(8, 16, 32), strides=(2, 2), num_res_units=1)
    yield entry(
        lib, nets + "SegResNet", floats(1, 16, 16, 16), in_channels=1, out_channels=2, init_filters=8, dropout_prob=0.1,
        blocks_down=(1, 2), blocks_up=(1,),
    )  # fmt: skip
    yield entry(
        lib, nets + "UNETR", image(32, 1), **flat, img_size=(32, 32), feature_size=8, hidden_size=32, mlp_dim=64,
        num_heads=2,
    )  # fmt: skip
    yield entry(lib, nets + "VNet", floats(1, 16, 16, 16))
    yield entry(
        lib, nets + "DynUNet", image(32, 1), **flat, kernel_size=[3, 3, 3], strides=[1, 2, 2],
        upsample_kernel_size=[2, 2], filters=[8, 16, 32], deep_supervision=True, deep_supr_num=1,
    )  # fmt: skip
    yield entry(lib, nets + "AttentionUnet", image(32, 1), **flat, channels=(8, 16, 32), strides=(2, 2))
    yield entry(lib, nets + "DenseNet121", image(32, 1), **flat, init_features=16, growth_rate=8, block_config=(2, 2))
    yield entry(
        lib, nets + "VQVAE", image(16, 1), **{**flat, "out_channels": 1}, channels=(16, 32), num_res_channels=16,
        num_res_layers=1, num_embeddings=16, embedding_dim=16, downsample_parameters=((2, 4, 1, 1),) * 2,
        upsample_parameters=((2, 4, 1, 1, 0),) * 2,
    )  # fmt: skip


def segmentation() -> Iterator[Candidate]:
    lib = "segmentation-models-pytorch"
    small: dict[str, Any] = {"encoder_weights": None, "classes": 2}
    for name in ("Unet", "MAnet", "FPN", "DeepLabV3Plus", "Segformer"):
        yield entry(lib, f"segmentation_models_pytorch:{name}", image(64), encoder_name="resnet18", **small)
    for name, task in (("yolov8n", "Detection"), ("yolo11n-seg", "Segmentation"), ("yolov8n-cls", "Classification")):
        yield entry(
            "ultralytics", f"ultralytics.nn.tasks:{task}Model", image(64), f"{name}.yaml", name=name, verbose=False
        )
    yield entry("kornia", "kornia.models.dexined:DexiNed", image(32), pretrained=False)
    yield entry("kornia", "kornia.feature:HardNet", lambda: torch.rand(MINI_BATCH, 1, 32, 32), pretrained=False)


def classic() -> Iterator[Candidate]:
    yield entry("efficientnet-pytorch", "efficientnet_pytorch:EfficientNet.from_name", image(32), "efficientnet-b0",
                num_classes=5, name="EfficientNet-B0")  # fmt: skip
    for name in ("se_resnet50", "xception"):
        yield entry("pretrainedmodels", f"pretrainedmodels:{name}", image(224), num_classes=5, pretrained=None)
    yield entry("resnest", "resnest.torch:resnest50", image(32), pretrained=False, num_classes=5)
    yield entry("facenet-pytorch", "facenet_pytorch:InceptionResnetV1", image(96))
    yield entry("lpips", "lpips:LPIPS", _two_pictures, pretrained=False, pnet_rand=True, pnet_tune=True, verbose=False,
                eval_mode=False)  # fmt: skip
    yield entry("byol-pytorch", "byol_pytorch:BYOL", image(32), own_loss=True, build=_own_latent, image_size=32,
                projection_size=64, projection_hidden_size=64)  # fmt: skip
    yield entry("lightly", "lightly.models.modules:BarlowTwinsProjectionHead", image(32), build=_projecting,
                input_dim=512, hidden_dim=64, output_dim=64)  # fmt: skip
    yield entry("compressai", "compressai.models:FactorizedPrior", image(64), N=16, M=24)
    yield entry("compressai", "compressai.models:MeanScaleHyperprior", image(64), N=16, M=24)
    families: dict[str, dict[str, Any]] = {
        "SwinIR": {"img_size": 16, "embed_dim": 16, "depths": (2, 2), "num_heads": (2, 2), "window_size": 8},
        "NAFNet": {"width": 8, "middle_blk_num": 1, "enc_blk_nums": [1, 1], "dec_blk_nums": [1, 1]},
        "ESRGAN": {"num_filters": 16, "num_blocks": 2},
    }
    for family, settings in families.items():
        name = {"ESRGAN": "RRDBNet"}.get(family, family)
        yield entry("spandrel", f"spandrel.architectures.{family}:{name}", image(16), **settings)
    yield entry(
        "pytorchvideo", "pytorchvideo.models:create_slowfast", _slow_and_fast, model_depth=50, model_num_class=5,
        slowfast_channel_reduction_ratio=(8,), head_pool_kernel_sizes=((4, 1, 1), (16, 1, 1)),
    )  # fmt: skip
    yield entry(
        "pytorchvideo", "pytorchvideo.models.x3d:create_x3d", floats(3, 4, 64, 64), input_clip_length=4,
        input_crop_size=64, model_num_class=5,
    )  # fmt: skip
    yield entry("snntorch", "snntorch:Leaky", image(16, 1), build=_spiking, beta=0.9)
    yield entry("kymatio", "kymatio.torch:Scattering2D", image(16, 1), build=_scattered, J=2, shape=(16, 16))


def _two_pictures() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.rand(MINI_BATCH, 3, 64, 64), torch.rand(MINI_BATCH, 3, 64, 64)


def _slow_and_fast() -> tuple[list[torch.Tensor]]:
    return ([torch.rand(MINI_BATCH, 3, 4, 32, 32), torch.rand(MINI_BATCH, 3, 16, 32, 32)],)


def _own_latent(kind: type[nn.Module], **settings: int) -> nn.Module:
    net = found("torchvision.models:resnet18")(weights=None)
    return kind(net, hidden_layer="avgpool", augment_fn=nn.Identity(), augment_fn2=nn.Identity(), **settings)


def _projecting(kind: type[nn.Module], **settings: int) -> nn.Module:
    net = found("torchvision.models:resnet18")(weights=None)
    net.fc = nn.Identity()
    return nn.Sequential(net, kind(**settings))


class _Spiking(nn.Module):
    """Two layers of spiking neurons over a few steps of time, as the library's tutorial has them."""

    def __init__(self, kind: Any, beta: float) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(256, 32), nn.Linear(32, 5)
        self.one: Any = kind(beta=beta)
        self.two: Any = kind(beta=beta)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        one, two = self.one.init_leaky(), self.two.init_leaky()
        spikes, potentials = [], []
        for _ in range(5):
            spike, one = self.one(self.first(x.flatten(1)), one)
            spike, two = self.two(self.second(spike), two)
            spikes.append(spike)
            potentials.append(two)
        return torch.stack(spikes), torch.stack(potentials)


def _spiking(kind: type[nn.Module], beta: float) -> nn.Module:
    return _Spiking(kind, beta)


def _scattered(kind: type[nn.Module], **settings: int) -> nn.Module:
    return nn.Sequential(kind(**settings), nn.Flatten(), nn.Linear(81 * 16, 32), nn.ReLU(), nn.Linear(32, 5))
