"""Models of libraries of other fields: spiking, Bayesian, hyperbolic, complex, reversible, molecules, keras.

Chosen when the lists before were done, none of them traced before that; most keep state or gradients in ways of their
own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tests.coverage.library_parts import MINI_BATCH, VOCABULARY, entry, floats, found, image, some_tokens, tokens
from tests.coverage.survey_models import Candidate

os.environ.setdefault("KERAS_BACKEND", "torch")  # asked for where keras is imported


def fields() -> Iterator[Candidate]:
    """All of them."""
    yield from spiking_and_bayesian()
    yield from geometries()
    yield from reversible()
    yield from texts_and_molecules()
    yield from pictures_and_sounds()
    yield from tables_and_private()


def spiking_and_bayesian() -> Iterator[Candidate]:
    yield entry("spikingjelly", "spikingjelly.activation_based.neuron:LIFNode", floats(8), build=_spiking)
    yield entry("spikingjelly", "spikingjelly.activation_based.neuron:ParametricLIFNode", floats(8), build=_spiking)
    yield entry("norse", "norse.torch:LIFRecurrentCell", floats(4, 8), build=_norse)
    yield entry("norse", "norse.torch:SequentialState", floats(1, 12, 12), build=_norse_convolutions)
    yield entry("blitz-bayesian-pytorch", "blitz.modules:BayesianLinear", floats(8), build=_twice)
    yield entry("blitz-bayesian-pytorch", "blitz.modules:BayesianLSTM", floats(5, 8), 8, 6, build=_first_of)
    yield entry("bayesian-torch", "bayesian_torch.layers:LinearReparameterization", floats(8), build=_divergence)
    yield entry("bayesian-torch", "bayesian_torch.layers:LinearFlipout", floats(8), build=_divergence)
    yield entry("torchbnn", "torchbnn:BayesLinear", floats(8), build=_torchbnn)
    yield entry("pyro-ppl", "pyro.nn:AutoRegressiveNN", floats(6), 6, [16, 16], param_dims=[2, 3])
    yield entry("pyro-ppl", "pyro.distributions.transforms:spline_autoregressive", floats(6), build=_flow)


def geometries() -> Iterator[Candidate]:
    yield entry("geoopt", "geoopt:PoincareBall", floats(8), build=_geoopt)
    yield entry("hypll", "hypll.nn:HLinear", floats(8), build=_hyperbolic)
    yield entry("complextorch", "complextorch.nn:Linear", floats(8), build=_complex)
    yield entry("complexPyTorch", "complexPyTorch.complexLayers:ComplexConv2d", image(12, 1), build=_complex_pictures)
    yield entry("complexPyTorch", "complexPyTorch.complexLayers:ComplexBatchNorm2d", image(12, 1),
                build=_complex_normalized)  # fmt: skip
    yield entry("pytorch-wavelets", "pytorch_wavelets:DWTForward", image(16), J=2, wave="db2", mode="symmetric",
                build=_wavelets)  # fmt: skip
    yield entry("ptwt", "ptwt:wavedec2", image(16), build=_learned_wavelets)
    yield entry("entmax", "entmax:EntmaxBisect", floats(8), build=_entmax)
    yield entry("entmax", "entmax:Sparsemax", floats(8), dim=-1, build=_sparsemax)


def reversible() -> Iterator[Candidate]:
    yield entry("memcnn", "memcnn:AdditiveCoupling", floats(8), build=_memcnn, keep_input=True)
    yield entry("memcnn", "memcnn:AdditiveCoupling", floats(8), name="AdditiveCoupling, input freed",
                build=_memcnn)  # fmt: skip
    yield entry("revtorch", "revtorch:ReversibleSequence", floats(8), build=_revtorch)
    yield entry("FrEIA", "FrEIA.modules:AllInOneBlock", floats(6), build=_invertible)
    yield entry("FrEIA", "FrEIA.modules:GLOWCouplingBlock", floats(6), build=_invertible)
    yield entry("torchdyn", "torchdyn.core:NeuralODE", floats(4), build=_neural_ode, sensitivity="autograd")
    yield entry("torchdyn", "torchdyn.core:NeuralODE", floats(4), build=_neural_ode, sensitivity="adjoint",
                name="NeuralODE, adjoint")  # fmt: skip


def texts_and_molecules() -> Iterator[Candidate]:
    lm: dict[str, Any] = {"num_tokens": VOCABULARY, "dim": 32, "depth": 2}
    yield entry("recurrent-memory-transformer-pytorch",
                "recurrent_memory_transformer_pytorch:RecurrentMemoryTransformer", tokens(), **lm, num_memory_tokens=4,
                seq_len=16, dim_head=16, heads=2, build=_first_of)  # fmt: skip
    yield entry("routing-transformer", "routing_transformer:RoutingTransformerLM", tokens(32), **lm, heads=2,
                max_seq_len=32, window_size=8, dim_head=16, causal=True)  # fmt: skip
    yield entry("routing-transformer", "routing_transformer:RoutingTransformerLM", tokens(32), **lm, heads=2,
                max_seq_len=32, window_size=8, dim_head=16, causal=True, reversible=True,
                name="RoutingTransformerLM, reversible")  # fmt: skip
    yield entry("yet-another-retnet", "yet_another_retnet.retnet:RetNet", _two_texts, num_tokens=VOCABULARY, d_model=32,
                nhead=2, num_layers=2, dim_feedforward=32)  # fmt: skip
    yield entry("sru", "sru:SRU", floats(5, 8), 8, 8, num_layers=2, layer_norm=True, build=_sru)
    yield entry("fair-esm", "esm.model.esm2:ESM2", tokens(12, 20), num_layers=2, embed_dim=32, attention_heads=2,
                build=_esm)  # fmt: skip
    yield entry("se3-transformer-pytorch", "se3_transformer_pytorch:SE3Transformer", _molecule, dim=8, depth=1,
                heads=2, dim_head=4, num_degrees=2)  # fmt: skip
    yield entry("equiformer-pytorch", "equiformer_pytorch:Equiformer", _molecule, dim=(8, 4), depth=1, heads=(2, 2),
                dim_head=(4, 4), num_degrees=2, num_neighbors=3, dim_in=8)  # fmt: skip
    yield entry("En-transformer", "en_transformer:EnTransformer", _molecule, dim=8, depth=2, heads=2, dim_head=32)
    yield entry("torchani", "torchani.nn:AtomicNetwork", floats(8), [8, 16, 1], activation="celu")


def pictures_and_sounds() -> Iterator[Candidate]:
    yield entry("flamingo-pytorch", "flamingo_pytorch:PerceiverResampler", floats(2, 6, 16), dim=16, depth=2,
                dim_head=8, heads=2, num_latents=4)  # fmt: skip
    yield entry("video-diffusion-pytorch", "video_diffusion_pytorch:Unet3D", _noisy_video, dim=8, dim_mults=(1, 2),
                attn_heads=2, attn_dim_head=8)  # fmt: skip
    yield entry("muse-maskgit-pytorch", "muse_maskgit_pytorch:VQGanVAE", image(16), dim=16, layers=2,
                codebook_size=16, use_vgg_and_gan=False, build=_own_reconstruction)  # fmt: skip
    yield entry("demucs", "demucs.demucs:Demucs", floats(1, 2048), sources=["a", "b"], audio_channels=1, channels=8,
                depth=3, dconv_attn=9, dconv_lstm=9, resample=False, rescale=0)  # fmt: skip
    yield entry("demucs", "demucs.htdemucs:HTDemucs", floats(1, 8192), sources=["a", "b"], audio_channels=1, channels=8,
                nfft=512, depth=3, t_layers=1, t_heads=2, segment=8192 / 44100, rescale=0)  # fmt: skip
    yield entry("super-image", "super_image:EdsrModel", image(12), build=_super_image, settings="EdsrConfig",
                scale=2, n_resblocks=2, n_feats=8)  # fmt: skip
    yield entry("super-image", "super_image:CarnModel", image(12), build=_super_image, settings="CarnConfig", scale=2)
    yield entry("deepinv", "deepinv.models:UNet", image(16), in_channels=3, out_channels=3, scales=2)
    yield entry("deepinv", "deepinv.models:DnCNN", image(12), depth=4, nf=8, pretrained=None)
    yield entry("dynamic-network-architectures", "dynamic_network_architectures.architectures.unet:PlainConvUNet",
                image(16), build=_nnunet)  # fmt: skip
    yield entry("dynamic-network-architectures", "dynamic_network_architectures.architectures.resnet:ResNetD",
                image(32), 5, 3, stochastic_depth_p=0.2, squeeze_excitation=True)  # fmt: skip
    yield entry("continual-inference", "continual:Conv1d", floats(4, 12), build=_continual)
    yield entry("keras", "keras:Sequential", floats(8), build=_keras)
    yield entry("keras", "keras:Model", image(12), build=_keras_pictures, name="Model, functional")


def tables_and_private() -> Iterator[Candidate]:
    yield entry("pythae", "pythae.models:VAE", _named_pictures, build=_pythae, settings="VAEConfig", latent_dim=4)
    yield entry("pythae", "pythae.models:BetaTCVAE", _named_pictures, build=_pythae, settings="BetaTCVAEConfig",
                latent_dim=4)  # fmt: skip
    yield entry("pythae", "pythae.models:VQVAE", _named_pictures, build=_pythae, settings="VQVAEConfig", latent_dim=4,
                num_embeddings=8)  # fmt: skip
    yield entry("tabm", "tabm:TabM", floats(6), n_num_features=6, d_out=3, k=4, n_blocks=2, d_block=16, dropout=0.1,
                start_scaling_init="random-signs")  # fmt: skip
    yield entry("rtdl_num_embeddings", "rtdl_num_embeddings:PeriodicEmbeddings", floats(6), build=_embedded)
    yield entry("loralib", "loralib:MergedLinear", floats(8), build=_lora)
    yield entry("opacus", "opacus.layers:DPLSTM", floats(5, 8), 8, 6, batch_first=True, build=_first_of)
    yield entry("opacus", "opacus.layers:DPMultiheadAttention", floats(5, 8), build=_attention)
    yield entry("opacus", "opacus.grad_sample:GradSampleModule", floats(8), build=_private)
    yield entry("higher", "higher:patch.monkeypatch", floats(8), build=_patched, name="monkeypatch")


class _First(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any) -> Any:
        return self.inner(*args)[0]


def _first_of(kind: type[nn.Module], *args: Any, **settings: Any) -> nn.Module:
    return _First(kind(*args, **settings))


class _Steps(nn.Module):
    """A network whose neurons keep their potentials from step to step, and are reset for each batch."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        found("spikingjelly.activation_based.functional:reset_net")(self.inner)
        return torch.stack([self.inner(x) for _ in range(3)]).mean(0)


def _spiking(kind: Any) -> nn.Module:
    neuron = found("spikingjelly.activation_based.surrogate:ATan")
    return _Steps(nn.Sequential(nn.Linear(8, 16), kind(surrogate_function=neuron()), nn.Linear(16, 4),
                                kind(surrogate_function=neuron())))  # fmt: skip


class _Norse(nn.Module):
    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell, self.readout = cell, nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        state, outputs = None, []
        for step in range(x.shape[1]):
            spikes, state = self.cell(x[:, step] * 50, state)
            outputs.append(self.readout(spikes))
        return torch.stack(outputs).sum(0)


def _norse(kind: Any) -> nn.Module:
    return _Norse(kind(8, 16))


def _norse_convolutions(kind: Any) -> nn.Module:
    cell, leaky = found("norse.torch:LIFCell"), found("norse.torch:LICell")
    return _First(kind(nn.Conv2d(1, 4, 3), cell(), nn.Flatten(), nn.Linear(400, 5), leaky()))


def _twice(kind: Any) -> nn.Module:
    return nn.Sequential(kind(8, 16), nn.ReLU(), kind(16, 4))


class _Divergence(nn.Module):
    """Each layer returns its output and its divergence from the prior."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: Tensor) -> Tensor:
        hidden, one = self.first(x)
        result, other = self.second(torch.relu(hidden))
        return result + 1e-3 * (one + other)


def _divergence(kind: Any) -> nn.Module:
    return _Divergence(kind(8, 16), kind(16, 4))


def _torchbnn(kind: Any) -> nn.Module:
    return nn.Sequential(*(kind(prior_mu=0, prior_sigma=0.1, in_features=8, out_features=8) for _ in range(2)))


class _Flow(nn.Module):
    def __init__(self, transform: Any) -> None:
        super().__init__()
        self.transform = transform

    def forward(self, x: Tensor) -> Tensor:
        y = self.transform(x)
        return y.sum(-1) - self.transform.log_abs_det_jacobian(x, y)


def _flow(make: Any) -> nn.Module:
    return _Flow(make(6, hidden_dims=[16]))


class _Poincare(nn.Module):
    """Points of a ball, moved by a parameter that lies on it."""

    def __init__(self, ball: Any) -> None:
        super().__init__()
        self.ball = ball
        self.linear = nn.Linear(8, 8)
        self.shift = found("geoopt:ManifoldParameter")(torch.rand(8) * 0.1, manifold=ball)

    def forward(self, x: Tensor) -> Tensor:
        return self.ball.logmap0(self.ball.mobius_add(self.ball.expmap0(self.linear(x) * 0.1), self.shift))


def _geoopt(kind: Any) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), _Poincare(kind(c=1.0)), nn.Linear(8, 3))


class _Hyperbolic(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        curvature = found("hypll.manifolds.poincare_ball:Curvature")(1.0, requires_grad=True)
        self.ball = found("hypll.manifolds.poincare_ball:PoincareBall")(curvature)
        self.first, self.second = kind(8, 16, manifold=self.ball), kind(16, 4, manifold=self.ball)
        self.relu = found("hypll.nn:HReLU")(manifold=self.ball)

    def forward(self, x: Tensor) -> Tensor:
        tangent = found("hypll.tensors:TangentTensor")(x * 0.1, manifold=self.ball)
        result: Tensor = self.second(self.relu(self.first(self.ball.expmap(tangent)))).tensor
        return result


def _hyperbolic(kind: Any) -> nn.Module:
    return _Hyperbolic(kind)


class _Complex(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.complex(x, x.flip(-1))
        for layer in self.layers:
            z = layer(z)
        return z.abs()


def _complex(kind: Any) -> nn.Module:
    return _Complex(kind(8, 16), found("complextorch.nn:modReLU")(-0.1), kind(16, 4))


def _complex_pictures(kind: Any) -> nn.Module:
    relu = found("complexPyTorch.complexLayers:ComplexReLU")
    normalized = found("complexPyTorch.complexLayers:NaiveComplexBatchNorm2d")
    return _Complex(kind(1, 4, 3), normalized(4), relu(), kind(4, 2, 3))


def _complex_normalized(kind: Any) -> nn.Module:
    convolution = found("complexPyTorch.complexLayers:ComplexConv2d")
    return _Complex(convolution(1, 4, 3), kind(4), convolution(4, 2, 3))


class _Wavelets(nn.Module):
    def __init__(self, transform: nn.Module) -> None:
        super().__init__()
        self.first, self.transform, self.last = nn.Conv2d(3, 4, 3, padding=1), transform, nn.LazyLinear(4)

    def forward(self, x: Tensor) -> Tensor:
        low, high = self.transform(self.first(x))
        return self.last(torch.cat([low.flatten(1), *(each.flatten(1) for each in high)], 1))


def _wavelets(kind: Any, **settings: Any) -> nn.Module:
    model = _Wavelets(kind(**settings))
    model(image(16)())
    return model


class _LearnedWavelets(nn.Module):
    def __init__(self, decompose: Any) -> None:
        super().__init__()
        self.decompose = decompose
        self.first, self.last = nn.Conv2d(3, 2, 3, padding=1), nn.Linear(162, 4)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.decompose(self.first(x), "haar", level=1)
        details = torch.cat([part.flatten(1) for part in parts[1]], 1)
        return self.last(torch.nn.functional.pad(details, (0, 162 - details.shape[1]))) + parts[0].mean()


def _learned_wavelets(decompose: Any) -> nn.Module:
    return _LearnedWavelets(decompose)


def _entmax(kind: Any) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), kind(alpha=1.3), nn.Linear(8, 4))


def _sparsemax(kind: Any, **settings: Any) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), kind(**settings), nn.Linear(8, 4))


def _memcnn(kind: Any, *, keep_input: bool = False) -> nn.Module:
    wrapped = found("memcnn:InvertibleModuleWrapper")
    branch = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)]
    return nn.Sequential(nn.Linear(8, 8), *(
        wrapped(kind(branch[2 * block], branch[2 * block + 1]), keep_input=keep_input) for block in range(2)
    ), nn.Linear(8, 3))  # fmt: skip


def _revtorch(kind: Any) -> nn.Module:
    block = found("revtorch:ReversibleBlock")
    blocks = [block(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh())) for _ in range(2)]
    return nn.Sequential(nn.Linear(8, 8), kind(nn.ModuleList(blocks)), nn.Linear(8, 3))


def _subnet(entering: int, leaving: int) -> nn.Module:
    return nn.Sequential(nn.Linear(entering, 16), nn.ReLU(), nn.Linear(16, leaving))


class _Likelihood(nn.Module):
    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        z, logarithm = self.network(x)
        result: Tensor = 0.5 * (z**2).sum(1) - logarithm
        return result


def _invertible(kind: Any) -> nn.Module:
    network = found("FrEIA.framework:SequenceINN")(6)
    for _ in range(3):
        network.append(kind, subnet_constructor=_subnet)
    return _Likelihood(network)


class _Solved(nn.Module):
    def __init__(self, solver: nn.Module) -> None:
        super().__init__()
        self.solver, self.last = solver, nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        _, path = self.solver(x, torch.linspace(0, 1, 4))
        return self.last(path[-1])


def _neural_ode(kind: Any, **settings: Any) -> nn.Module:
    field = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 4))
    return _Solved(kind(field, solver="rk4", **settings))


def _two_texts() -> tuple[Tensor, Tensor]:
    return some_tokens(), some_tokens()


class _Recurrent(nn.Module):
    """Time comes first in it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(x.transpose(0, 1))[0]
        return result.transpose(0, 1)


def _sru(kind: Any, *args: Any, **settings: Any) -> nn.Module:
    return _Recurrent(kind(*args, **settings))


class _Logits(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        return self.inner(x)["logits"]


def _esm(kind: Any, **settings: Any) -> nn.Module:
    return _Logits(kind(**settings))


def _molecule() -> tuple[Tensor, Tensor]:
    return torch.randn(MINI_BATCH, 6, 8), torch.randn(MINI_BATCH, 6, 3)


def _noisy_video() -> tuple[Tensor, Tensor]:
    return torch.randn(MINI_BATCH, 3, 2, 8, 8), torch.randint(10, (MINI_BATCH,))


class _Reconstruction(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        loss, reconstruction = self.inner(x, return_loss=True, return_recons=True)
        result: Tensor = reconstruction + loss
        return result


def _own_reconstruction(kind: Any, **settings: Any) -> nn.Module:
    return _Reconstruction(kind(**settings))


def _super_image(kind: Any, *, settings: str, **values: Any) -> nn.Module:
    made: nn.Module = kind(found(f"super_image:{settings}")(**values))
    return made


def _nnunet(kind: Any) -> nn.Module:
    made: nn.Module = kind(
        3, 3, (4, 8, 8), nn.Conv2d, 3, (1, 2, 2), (1, 1, 1), 2, (1, 1), conv_bias=True, norm_op=nn.InstanceNorm2d,
        norm_op_kwargs={"affine": True}, nonlin=nn.LeakyReLU, nonlin_kwargs={"inplace": True}, deep_supervision=True,
    )  # fmt: skip
    return made


def _continual(kind: Any) -> nn.Module:
    made: nn.Module = found("continual:Sequential")(kind(4, 8, 3), nn.ReLU(), kind(8, 4, 3))
    return made


def _keras(_: Any) -> nn.Module:
    found("keras.utils:clear_session")()  # it counts layers of a kind, in names of parameters
    layers, made = found("keras:layers"), found("keras:Sequential")
    model: nn.Module = made([layers.Dense(16, activation="relu"), layers.Dropout(0.1), layers.LayerNormalization(),
                             layers.Dense(4)])  # fmt: skip
    model(torch.randn(MINI_BATCH, 8))
    return model


def _keras_pictures(_: Any) -> nn.Module:
    found("keras.utils:clear_session")()
    layers, made = found("keras:layers"), found("keras:Model")
    entering = layers.Input((3, 12, 12))
    x = layers.Conv2D(4, 3, data_format="channels_first", activation="relu")(entering)
    x = layers.BatchNormalization(axis=1)(x)
    x = layers.GlobalAveragePooling2D(data_format="channels_first")(x)
    model: nn.Module = made(entering, layers.Dense(4)(x))
    return model


def _named_pictures() -> tuple[dict[str, Tensor]]:
    return ({"data": torch.rand(MINI_BATCH, 1, 8, 8)},)


def _pythae(kind: Any, *, settings: str, **values: Any) -> nn.Module:
    return _Loss(kind(found(f"pythae.models:{settings}")(input_dim=(1, 8, 8), **values)))


class _Loss(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, named: dict[str, Tensor]) -> Tensor:
        answer = self.inner(named)
        result: Tensor = answer.recon_x + answer.loss
        return result


def _embedded(kind: Any) -> nn.Module:
    return nn.Sequential(kind(6, 8, lite=False), nn.Flatten(), nn.Linear(48, 8), nn.ReLU(), nn.Linear(8, 3))


def _lora(kind: Any) -> nn.Module:
    merged = kind(8, 24, r=2, enable_lora=[True, False, True])
    model = nn.Sequential(merged, nn.Tanh(), found("loralib:Linear")(24, 4, r=2, lora_dropout=0.1))
    found("loralib:mark_only_lora_as_trainable")(model)
    return model


class _Attention(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(x, x, x)[0]
        return result


def _attention(kind: Any) -> nn.Module:
    return _Attention(kind(8, 2, batch_first=True))


def _private(kind: Any) -> nn.Module:
    made: nn.Module = kind(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)))
    return made


class _Patched(nn.Module):
    """A step of gradient descent inside the forward pass, as in meta learning."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        functional = found("higher:patch.monkeypatch")(self.inner, copy_initial_weights=False)
        weights = list(functional.parameters())
        gradients = torch.autograd.grad(functional(x).square().sum(), weights, create_graph=True)
        return functional(x, params=[w - 0.01 * g for w, g in zip(weights, gradients, strict=True)])


def _patched(_: Any) -> nn.Module:
    return _Patched()
