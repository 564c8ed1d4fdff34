"""The second survey's models of tables, graphs and densities, and layers that no other list has."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from tests.coverage.library_parts import MINI_BATCH, VOCABULARY, Calling, classes, entry, floats, found, some_tokens
from tests.coverage.survey_models import Candidate


def others() -> Iterator[Candidate]:
    """All of them."""
    yield from tables()
    yield from structures()
    yield from densities()


def tables() -> Iterator[Candidate]:
    mixed: dict[str, Any] = {"categories": (10, 5, 6), "num_continuous": 4, "dim": 16, "depth": 2, "heads": 2}

    def row() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randint(5, (MINI_BATCH, 3)), torch.randn(MINI_BATCH, 4)

    yield entry("tab-transformer-pytorch", "tab_transformer_pytorch:TabTransformer", row, **mixed)
    yield entry("tab-transformer-pytorch", "tab_transformer_pytorch:FTTransformer", row, **mixed)
    yield entry("pytorch-tabnet", "pytorch_tabnet.tab_network:TabNet", floats(8), 8, 3,
                group_attention_matrix=torch.eye(8))  # fmt: skip
    yield entry("rtdl_revisiting_models", "rtdl_revisiting_models:FTTransformer", lambda: row()[::-1],
                n_cont_features=4, cat_cardinalities=[10, 5, 6], d_out=2, n_blocks=2, d_block=16, attention_n_heads=2,
                attention_dropout=0.1, ffn_d_hidden=32, ffn_d_hidden_multiplier=None, ffn_dropout=0.1,
                residual_dropout=0.0)  # fmt: skip
    yield entry("rtdl_revisiting_models", "rtdl_revisiting_models:ResNet", floats(8), d_in=8, d_out=2, n_blocks=2,
                d_block=16, d_hidden=None, d_hidden_multiplier=2.0, dropout1=0.1, dropout2=0.0)  # fmt: skip
    for name in ("DeepFM", "xDeepFM", "DCN"):
        yield entry("deepctr-torch", f"deepctr_torch.models:{name}",
                    lambda: torch.cat([torch.randint(5, (MINI_BATCH, 2)).float(), torch.rand(MINI_BATCH, 1)], 1),
                    build=_clicks)  # fmt: skip
    yield entry("pykan", "kan:KAN", floats(3), width=[3, 4, 1], grid=3, k=3, auto_save=False)
    yield entry("siren-pytorch", "siren_pytorch:SirenNet", floats(2), dim_in=2, dim_hidden=16, dim_out=3, num_layers=3)
    yield entry("stable-baselines3", "stable_baselines3.common.policies:ActorCriticPolicy", floats(4), build=_policy)


def _clicks(kind: Any) -> nn.Module:
    columns = "deepctr_torch.inputs:"
    features = [found(columns + "SparseFeat")(f"c{index}", vocabulary_size=5, embedding_dim=4) for index in range(2)]
    features.append(found(columns + "DenseFeat")("d", 1))
    return kind(features, features, dnn_hidden_units=(16, 8))


class _Valued(nn.Module):
    """A policy as its training calls it: the observation's action, valued."""

    def __init__(self, policy: Any) -> None:
        super().__init__()
        self.policy = policy

    def forward(self, observations: torch.Tensor) -> Any:
        actions = torch.zeros(len(observations), dtype=torch.int64)
        return self.policy.evaluate_actions(observations, actions)


def _policy(kind: Any) -> nn.Module:
    spaces = "gymnasium.spaces:"
    box = found(spaces + "Box")(low=-1.0, high=1.0, shape=(4,))
    return _Valued(kind(box, found(spaces + "Discrete")(3), lambda _: 1e-3))


def structures() -> Iterator[Candidate]:
    def graphs() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(MINI_BATCH, 12, 8), (torch.rand(MINI_BATCH, 12, 12) < 0.3).float()

    dense = "torch_geometric.nn.dense:"
    for name in ("DenseGCNConv", "DenseGATConv", "DenseSAGEConv"):
        yield entry("torch_geometric", dense + name, graphs, build=_pooled, name=f"{name} with pooling")
    yield entry("egnn-pytorch", "egnn_pytorch:EGNN_Network",
                lambda: (some_tokens(12), torch.randn(MINI_BATCH, 12, 3)), num_tokens=64, dim=16, depth=2,
                num_nearest_neighbors=4)  # fmt: skip
    yield entry("neuraloperator", "neuralop.models:FNO", floats(1, 16, 16), n_modes=(4, 4), in_channels=1,
                out_channels=1, hidden_channels=8, n_layers=2)  # fmt: skip
    yield entry("neuraloperator", "neuralop.models:TFNO", floats(1, 16, 16), n_modes=(4, 4), in_channels=1,
                out_channels=1, hidden_channels=8, n_layers=2, factorization="tucker", rank=0.5)  # fmt: skip
    yield entry("vector-quantize-pytorch", "vector_quantize_pytorch:VectorQuantize", floats(16, 32), build=_quantized,
                dim=32, codebook_size=16)  # fmt: skip
    yield entry("vector-quantize-pytorch", "vector_quantize_pytorch:ResidualFSQ", floats(16, 32), build=_quantized,
                dim=32, levels=[4, 4, 4], num_quantizers=2)  # fmt: skip
    yield entry("e3nn", "e3nn.o3:FullyConnectedTensorProduct", floats(4), build=_equivariant)


class _Pooled(nn.Module):
    """Two convolutions of dense graphs around a pooling of nodes, as the library's example for proteins has them."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        heads = {"heads": 2, "concat": False} if "GAT" in kind.__name__ else {}
        self.assign, self.embed = kind(8, 4, **heads), kind(8, 16, **heads)
        self.after, self.head = kind(16, 16, **heads), nn.Linear(16, 3)
        self.pool = found("torch_geometric.nn.dense:dense_diff_pool")

    def forward(self, x: torch.Tensor, adjacency: torch.Tensor) -> tuple[torch.Tensor, ...]:
        assigned, embedded = self.assign(x, adjacency), self.embed(x, adjacency).relu()
        x, adjacency, linked, entropy = self.pool(embedded, adjacency, assigned)
        return self.head(self.after(x, adjacency).relu().mean(1)), linked, entropy


def _pooled(kind: Any) -> nn.Module:
    return _Pooled(kind)


class _Quantized(nn.Module):
    def __init__(self, quantizer: nn.Module) -> None:
        super().__init__()
        self.before, self.quantizer, self.after = nn.Linear(32, 32), quantizer, nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        quantized, _, *loss = self.quantizer(self.before(x))
        return self.after(quantized), *loss


def _quantized(kind: Any, **settings: Any) -> nn.Module:
    return _Quantized(kind(**settings))


class _Equivariant(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.first = kind("0e + 1o", "0e + 1o", "8x0e + 4x1o")
        self.second = kind("8x0e + 4x1o", "0e + 1o", "0e")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x, x), x)


def _equivariant(kind: Any) -> nn.Module:
    return _Equivariant(kind)


def densities() -> Iterator[Candidate]:
    yield entry("nflows", "nflows.flows.autoregressive:MaskedAutoregressiveFlow", floats(4), build=_density,
                features=4, hidden_features=16, num_layers=3, num_blocks_per_layer=1)  # fmt: skip
    yield entry("normflows", "normflows:NormalizingFlow", floats(4), build=_coupled, own_loss=True)
    yield entry("zuko", "zuko.flows:NSF", floats(4), build=_given, features=4, transforms=2, hidden_features=(16,))
    yield entry("torchdiffeq", "torchdiffeq:odeint_adjoint", floats(4), build=_flowing, name="odeint_adjoint, dopri5")
    yield entry("torchdiffeq", "torchdiffeq:odeint", floats(4), build=_flowing, name="odeint, rk4", method="rk4")
    yield entry("gpytorch", "gpytorch.models:ApproximateGP", lambda: (
        torch.randn(MINI_BATCH, 4), torch.randn(MINI_BATCH)), build=_process, own_loss=True)  # fmt: skip
    yield entry("pytorch-metric-learning", "pytorch_metric_learning.losses:ArcFaceLoss",
                lambda: (torch.randn(MINI_BATCH, 8), classes()), build=_margins, own_loss=True)  # fmt: skip
    yield entry("pytorch-crf", "torchcrf:CRF", lambda: (some_tokens(), torch.randint(5, (MINI_BATCH, 16))),
                build=_tagging, own_loss=True)  # fmt: skip


def _density(kind: Any, **settings: int) -> nn.Module:
    return Calling(kind(**settings), "log_prob")


def _coupled(kind: Any) -> nn.Module:
    import normflows  # type: ignore[import-not-found]

    flows: list[nn.Module] = []
    for _ in range(3):
        net = normflows.nets.MLP([2, 16, 4], init_zeros=True)
        flows += [normflows.flows.AffineCouplingBlock(net), normflows.flows.Permute(4, mode="swap")]
    return Calling(kind(normflows.distributions.DiagGaussian(4), flows), "forward_kld")


class _Given(nn.Module):
    def __init__(self, flow: nn.Module) -> None:
        super().__init__()
        self.flow = flow

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.flow().log_prob(x)


def _given(kind: Any, **settings: Any) -> nn.Module:
    return _Given(kind(**settings))


class _Flowing(nn.Module):
    """An ordinary differential equation between two linear layers."""

    def __init__(self, solve: Any, **settings: str) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(4, 8), nn.Linear(8, 2)
        self.slope = _Slope()
        self.solve, self.settings = solve, settings

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states = self.solve(self.slope, self.before(x), torch.tensor([0.0, 1.0]).to(x), **self.settings)
        return self.after(states[-1])


class _Slope(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))

    def forward(self, _: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.net(y)


def _flowing(solve: Any, **settings: str) -> nn.Module:
    return _Flowing(solve, **settings)


class _Process(nn.Module):
    """Deep kernel learning: a variational Gaussian process on features, with its evidence bound."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        import gpytorch  # type: ignore[import-not-found]

        class Process(kind):  # type: ignore[misc]
            def __init__(self, points: torch.Tensor) -> None:
                spread = gpytorch.variational.CholeskyVariationalDistribution(len(points))
                super().__init__(gpytorch.variational.VariationalStrategy(self, points, spread))
                self.mean = gpytorch.means.ConstantMean()
                self.kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

            def forward(self, x: torch.Tensor) -> Any:
                return gpytorch.distributions.MultivariateNormal(self.mean(x), self.kernel(x))

        self.features = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        self.process = Process(torch.randn(5, 2))
        self.likelihood = gpytorch.likelihoods.GaussianLikelihood()
        self.bound = gpytorch.mlls.VariationalELBO(self.likelihood, self.process, num_data=100)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return -self.bound(self.process(self.features(x)), y)


def _process(kind: Any) -> nn.Module:
    return _Process(kind)


class _WithLoss(nn.Module):
    """A network and a loss that has parameters of its own."""

    def __init__(self, net: nn.Module, loss: nn.Module, sign: float = 1.0) -> None:
        super().__init__()
        self.net, self.loss, self.sign = net, loss, sign

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.sign * self.loss(self.net(x), y)


def _margins(kind: Any) -> nn.Module:
    net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16))
    return _WithLoss(net, kind(num_classes=5, embedding_size=16))


class _Mean(nn.Module):
    def __init__(self, crf: nn.Module) -> None:
        super().__init__()
        self.crf = crf

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.crf(x, y, reduction="mean")


def _tagging(kind: Any) -> nn.Module:
    net = nn.Sequential(nn.Embedding(VOCABULARY, 16), nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 5))
    return _WithLoss(net, _Mean(kind(5, batch_first=True)), -1.0)
