"""The second survey's models of sounds and time series."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from tests.coverage.library_parts import MINI_BATCH, entry, floats, found
from tests.coverage.survey_models import Candidate


def series() -> Iterator[Candidate]:
    """All of them."""
    yield from sounds()
    yield from time_series()


def sounds() -> Iterator[Candidate]:
    yield entry("conformer", "conformer:Conformer", floats(16, 32), dim=32, depth=2, dim_head=16, heads=2,
                conv_kernel_size=7, attn_dropout=0.1, ff_dropout=0.1, conv_dropout=0.1)  # fmt: skip
    lengths = torch.full((MINI_BATCH,), 16)
    yield entry("torchaudio", "torchaudio.models:Conformer", lambda: (torch.randn(MINI_BATCH, 16, 32), lengths),
                input_dim=32, num_heads=2, ffn_dim=64, num_layers=2, depthwise_conv_kernel_size=7)  # fmt: skip
    yield entry("torchaudio", "torchaudio.models:ConvTasNet", floats(1, 400), enc_num_feats=16, msk_num_feats=16,
                msk_num_hidden_feats=16, msk_num_layers=2, msk_num_stacks=2)  # fmt: skip
    yield entry("torchaudio", "torchaudio.models:wav2vec2_model", floats(800), extractor_mode="group_norm",
                extractor_conv_layer_config=[(16, 10, 5), (16, 3, 2)], extractor_conv_bias=False, encoder_embed_dim=32,
                encoder_projection_dropout=0.1, encoder_pos_conv_kernel=8, encoder_pos_conv_groups=4,
                encoder_num_layers=2, encoder_num_heads=2, encoder_attention_dropout=0.1, encoder_ff_interm_features=64,
                encoder_ff_interm_dropout=0.1, encoder_dropout=0.1, encoder_layer_norm_first=False,
                encoder_layer_drop=0.1, aux_num_out=8)  # fmt: skip
    yield entry("torchaudio", "torchaudio.models:WaveRNN", lambda: (
        torch.randn(MINI_BATCH, 1, 8 * 12), torch.randn(MINI_BATCH, 1, 16, 16)), upsample_scales=[2, 2, 2], n_classes=8,
        hop_length=8, n_res_block=1, n_rnn=16, n_fc=16, n_freq=16, n_hidden=16, n_output=16)  # fmt: skip
    lobes = "speechbrain.lobes.models."
    yield entry("speechbrain", lobes + "ECAPA_TDNN:ECAPA_TDNN", floats(30, 20), 20, lin_neurons=16,
                channels=[16, 16, 16, 16, 48], attention_channels=8, se_channels=8)  # fmt: skip
    yield entry("speechbrain", lobes + "Xvector:Xvector", floats(30, 20), in_channels=20, lin_neurons=16,
                tdnn_channels=[16, 16, 16, 16, 32])  # fmt: skip
    yield entry("speechbrain", lobes + "CRDNN:CRDNN", floats(16, 20), input_shape=[None, None, 20], cnn_channels=[8, 8],
                rnn_layers=1, rnn_neurons=16, dnn_neurons=16)  # fmt: skip
    yield entry("speechbrain", lobes + "transformer.TransformerASR:TransformerASR",
                lambda: (torch.randn(MINI_BATCH, 16, 20), torch.randint(1, 30, (MINI_BATCH, 6))), 30, 20, d_model=32,
                nhead=2, num_encoder_layers=2, num_decoder_layers=1, d_ffn=64, kernel_size=7,
                encoder_module="conformer", attention_type="RelPosMHAXL", normalize_before=True,
                causal=False)  # fmt: skip
    small: dict[str, Any] = {"n_src": 2, "n_filters": 16, "bn_chan": 16}
    yield entry("asteroid", "asteroid.models:ConvTasNet", floats(400), **small, n_blocks=2, n_repeats=1, hid_chan=16,
                skip_chan=16)  # fmt: skip
    yield entry(
        "asteroid", "asteroid.models:DPRNNTasNet", floats(400), **small, hid_size=16, chunk_size=10, n_repeats=1
    )
    yield entry(
        "asteroid", "asteroid.models:DPTNet", floats(400), **small, ff_hid=16, chunk_size=10, n_repeats=1, n_heads=2
    )
    yield entry("encodec", "encodec.modules:SEANetEncoder", floats(1, 320), build=_codec, name="EncodecModel")
    yield entry("vocos", "vocos.models:VocosBackbone", floats(20, 16), build=_vocoder)
    yield entry("openunmix", "openunmix.model:OpenUnmix", floats(2, 33, 10), nb_bins=33, nb_channels=2, hidden_size=16,
                nb_layers=1)  # fmt: skip


def _codec(encoder: Any) -> nn.Module:
    small: dict[str, Any] = {"n_filters": 4, "dimension": 16, "ratios": [4, 2], "lstm": 1}
    decoder = found("encodec.modules:SEANetDecoder")(**small)
    quantizer = found("encodec.quantization:ResidualVectorQuantizer")(dimension=16, n_q=2, bins=16)
    return found("encodec.model:EncodecModel")(encoder(**small), decoder, quantizer, [12.0, 24.0], 24000, 1)


def _vocoder(kind: Any) -> nn.Module:
    head = found("vocos.heads:ISTFTHead")(dim=16, n_fft=32, hop_length=8)
    return nn.Sequential(kind(input_channels=20, dim=16, intermediate_dim=32, num_layers=2), head)


def time_series() -> Iterator[Candidate]:
    yield entry("iTransformer", "iTransformer:iTransformer", floats(16, 7), num_variates=7, lookback_len=16, dim=32,
                depth=2, heads=2, pred_length=(4, 8), use_reversible_instance_norm=True)  # fmt: skip
    forecast: dict[str, Any] = {"context_length": 12, "prediction_length": 4}
    models = "pytorch_forecasting.models."
    yield entry("pytorch-forecasting", models + "nbeats:NBeats", _forecasting, **forecast, widths=[16, 32],
                num_blocks=[1, 1], num_block_layers=[2, 2], expansion_coefficient_lengths=[3, 3])  # fmt: skip
    reals: dict[str, Any] = {
        "x_reals": ["value"],
        "time_varying_reals_encoder": ["value"],
        "time_varying_reals_decoder": [],
    }
    yield entry("pytorch-forecasting", models + "nhits:NHiTS", _forecasting, **forecast, **reals, hidden_size=16,
                n_blocks=[1, 1], pooling_sizes=[2, 1], downsample_frequencies=[2, 1])  # fmt: skip
    yield entry("pytorch-forecasting", models + "temporal_fusion_transformer:TemporalFusionTransformer", _forecasting,
                **{**reals, "time_varying_reals_decoder": ["value"]}, hidden_size=16,
                max_encoder_length=12)  # fmt: skip
    yield entry(
        "gluonts", "gluonts.torch.model.deepar.module:DeepARModel",
        lambda: {
            "feat_static_cat": torch.zeros(MINI_BATCH, 1, dtype=torch.int64),
            "feat_static_real": torch.randn(MINI_BATCH, 1), "past_time_feat": torch.randn(MINI_BATCH, 20, 1),
            "past_target": torch.rand(MINI_BATCH, 20), "past_observed_values": torch.ones(MINI_BATCH, 20),
            "future_time_feat": torch.randn(MINI_BATCH, 4, 1), "future_target": torch.rand(MINI_BATCH, 4),
        },
        build=_likelihood, own_loss=True, freq="D", context_length=12, prediction_length=4, num_layers=2,
        hidden_size=16, lags_seq=[1, 2, 7],
    )  # fmt: skip
    yield entry("pytorch-tcn", "pytorch_tcn:TCN", floats(4, 32), num_inputs=4, num_channels=[8, 8, 8])
    yield entry("ncps", "ncps.torch:CfC", floats(8, 4), 4, 16, build=_liquid)
    yield entry("ncps", "ncps.torch:LTC", floats(6, 4), 4, 12, build=_liquid)


def _forecasting() -> tuple[dict[str, torch.Tensor]]:
    """What the library's data loader yields for one series without covariates."""
    return (
        {
            "encoder_cat": torch.zeros(MINI_BATCH, 12, 0, dtype=torch.int64),
            "encoder_cont": torch.randn(MINI_BATCH, 12, 1),
            "encoder_target": torch.randn(MINI_BATCH, 12),
            "encoder_lengths": torch.full((MINI_BATCH,), 12),
            "decoder_cat": torch.zeros(MINI_BATCH, 4, 0, dtype=torch.int64),
            "decoder_cont": torch.randn(MINI_BATCH, 4, 1),
            "decoder_target": torch.randn(MINI_BATCH, 4),
            "decoder_lengths": torch.full((MINI_BATCH,), 4),
            "target_scale": torch.tensor([[0.0, 1.0]]).repeat(MINI_BATCH, 1),
        },
    )


class _Likelihood(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: torch.Tensor) -> torch.Tensor:
        return self.model.log_prob(**inputs).neg().mean() if hasattr(self.model, "log_prob") else self.model.loss(
            **inputs).mean()  # fmt: skip


def _likelihood(kind: Any, **settings: Any) -> nn.Module:
    return _Likelihood(kind(**settings))


def _liquid(kind: Any, inputs: int, units: int) -> nn.Module:
    wiring = found("ncps.wirings:AutoNCP")(units, 3)
    return kind(inputs, wiring)
