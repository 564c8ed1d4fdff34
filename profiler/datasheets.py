"""What manufacturers print about devices and links, for planning without the hardware. Torch-free.

    Device.of("H100-80GB"), Cluster.of("8xA100-40GB", link="nvlink3")

Rates are those of dense arithmetic (without structured sparsity). Memory is what programs find on such a device. What
training reaches of the rates is in `profiler.timing.roofline`.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from pydantic import Field

from profiler.arguments import meant
from profiler.errors import ArgumentError
from profiler.quantities import shown
from profiler.value import Value

GB: Final = 1e9
TERA: Final = 1e12
GIB: Final = 2**30


class DataSheet(Value):
    """One accelerator.

    Attributes:
        memory_bytes: of the device, as programs find it.
        memory_bytes_per_s: bandwidth of that memory.
        float32_flops_per_s: multiply-adds counted as two, in float32 arithmetic.
        tf32_flops_per_s: of float32 convolutions, which torch lets round their factors by default; the float32 rate
            where the device has no such mode.
        half_flops_per_s: of matrix products in float16 with float32 sums.
        bfloat16_flops_per_s: of those in bfloat16; the float32 rate where the matrix units do not know the type.
        float64_flops_per_s: of those in float64; None where the device has no such arithmetic.
        link: usual kind of connection of neighbours in one host, see `LINKS`.
        source: document that prints these figures, but for the memory.
        compiles: whether programs for it are compiled as a whole, so that nobody asks for single operations.
        matrix_share: of the printed rates, what the largest matrix products reach, see `MATRIX_SHARES`.
    """

    memory_bytes: int = Field(gt=0)
    memory_bytes_per_s: float = Field(gt=0)
    float32_flops_per_s: float = Field(gt=0)
    tf32_flops_per_s: float = Field(gt=0)
    half_flops_per_s: float = Field(gt=0)
    bfloat16_flops_per_s: float = Field(gt=0)
    float64_flops_per_s: float | None = Field(gt=0)
    link: str
    source: str
    compiles: bool = False
    matrix_share: float = Field(default=0.8, gt=0, le=1)

    def flops_per_s(self, dtype: str) -> float:
        """Of matrix products in a dtype, torch name without the prefix; 0 where the device has no such arithmetic."""
        rates = {
            "float16": self.half_flops_per_s,
            "bfloat16": self.bfloat16_flops_per_s,
            "float64": self.float64_flops_per_s or 0.0,
        }
        return rates.get(dtype, self.float32_flops_per_s)


def _sheet(
    total_gib: float,
    bandwidth: float,
    float32: float,
    tf32: float,
    half: float,
    float64: float | None,
    link: str,
    source: str,
    *,
    has_bfloat16: bool = True,
    compiles: bool = False,
) -> DataSheet:
    """From GiB, GB/s and TFLOP/s."""
    return DataSheet(
        memory_bytes=int(total_gib * GIB),
        memory_bytes_per_s=bandwidth * GB,
        float32_flops_per_s=float32 * TERA,
        tf32_flops_per_s=tf32 * TERA,
        half_flops_per_s=half * TERA,
        bfloat16_flops_per_s=(half if has_bfloat16 else float32) * TERA,
        float64_flops_per_s=None if float64 is None else float64 * TERA,
        link=link,
        source=source,
        compiles=compiles,
    )


_V100 = "NVIDIA Tesla V100 data sheet, SXM2 (https://images.nvidia.com/content/technologies/volta/pdf/volta-v100-datasheet-update-us-1165301-r5.pdf)"
_P100 = (
    "NVIDIA Tesla P100 data sheet, NVLink (https://images.nvidia.com/content/tesla/pdf/nvidia-tesla-p100-datasheet.pdf)"
)
_P40 = "NVIDIA Tesla P40 data sheet (https://images.nvidia.com/content/pdf/tesla/184427-Tesla-P40-Datasheet-NV-Final-Letter-Web.pdf)"
_A100 = "NVIDIA A100 data sheet, SXM (https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf)"
_H100 = "NVIDIA H100 data sheet, SXM (https://resources.nvidia.com/en-us-tensor-core/nvidia-tensor-core-gpu-datasheet)"
_H200 = "NVIDIA H200 data sheet, SXM (https://nvdam.widen.net/s/nb5zzzsjdf/hpc-datasheet-sc23-h200-datasheet-3002446)"
_GH200 = (
    "NVIDIA GH200 Grace Hopper Superchip data sheet, its GPU "
    "(https://resources.nvidia.com/en-us-grace-cpu/grace-hopper-superchip)"
)
_B200 = "NVIDIA Blackwell architecture technical brief, HGX B200 (https://resources.nvidia.com/en-us-blackwell-architecture)"
_L40S = "NVIDIA L40S data sheet (https://resources.nvidia.com/en-us-l40s/l40s-datasheet-28413)"
_MI300X = "AMD Instinct MI300X data sheet (https://www.amd.com/en/products/accelerators/instinct/mi300/mi300x.html)"
_CLOUD_TPU = (
    "Google Cloud, TPU system architecture, one chip (https://cloud.google.com/tpu/docs/system-architecture-tpu-vm)"
)
_TPU = (
    "Jouppi et al., A domain-specific supercomputer for training deep neural networks, CACM 63(7), 2020, table 3 "
    "(https://doi.org/10.1145/3360307); one of a chip's two cores, as GPipe counts accelerators"
)

# Memory: "80 GB" are 80 * 2**30 bytes less what error correction and the driver take, or XLA on a TPU: the least total
# in GiB that public messages name where memory ran out. Among them at https://github.com/ are
# HiDream-ai/VAREdit/issues/6 (A100-80GB), TianheWu/CoSeR/issues/10 (A100-40GB), vllm-project/vllm/issues/27508 (H100),
# Lightning-AI/litgpt/issues/1892 (GH200-96GB), liucongg/ChatGLM-Finetuning/issues/73 (V100-32GB),
# Morizeyao/GPT2-Chinese/issues/215 (V100-16GB), LinkSoul-AI/Chinese-Llama-2-7b/issues/56 (P40),
# zai-org/CogVideo/issues/36 (RTX4090, 23.68 there), GaoLii/DSP/issues/10 (RTX3090, 23.70 there),
# zai-org/CogVLM/issues/236 (A10), hpcaitech/Open-Sora/issues/697 (T4, 14.75 there), sokrypton/ColabFold/issues/62
# (TPUv2), erfanzar/EasyDeL/issues/166 (TPUv4). A GH200-144GB says that it has 153,008,209,920 bytes.
#
# TPUs multiply float32 matrices by rounding factors to bfloat16, so all their rates are one; float64 they lack.
# Shares of float32 that are float64: 1/64 by NVIDIA's whitepapers of GA102 (V2.1, 2021; RTX 3090, A10) and Ada (V2.1,
# 2023; RTX 4090, L4), 1/32 by that of Turing (WP-09183-001, 2018; T4). A100 and later multiply float64 in matrix units.
_PRINTED: Final = MappingProxyType(
    {
        "V100-16GB": _sheet(15.75, 900, 15.7, 15.7, 125, 7.8, "nvlink2", _V100, has_bfloat16=False),
        "V100-32GB": _sheet(31.74, 900, 15.7, 15.7, 125, 7.8, "nvlink2", _V100, has_bfloat16=False),
        "P100-16GB": _sheet(15.90, 732, 10.6, 10.6, 21.2, 5.3, "nvlink1", _P100, has_bfloat16=False),
        "P40-24GB": _sheet(22.38, 346, 12, 12, 12, 12 / 32, "pcie3", _P40, has_bfloat16=False),
        "A100-40GB": _sheet(39.50, 1555, 19.5, 156, 312, 19.5, "nvlink3", _A100),
        "A100-80GB": _sheet(79.25, 2039, 19.5, 156, 312, 19.5, "nvlink3", _A100),
        "H100-80GB": _sheet(79.11, 3350, 67, 494.5, 989, 67, "nvlink4", _H100),
        "H200-141GB": _sheet(139.72, 4800, 67, 494.5, 989, 67, "nvlink4", _H200),
        "GH200-96GB": _sheet(94.88, 4000, 67, 494.5, 989, 67, "nvlink4", _GH200),
        "GH200-144GB": _sheet(142.49, 4900, 67, 494.5, 989, 67, "nvlink4", _GH200),
        "B200-180GB": _sheet(178.35, 8000, 80, 1100, 2250, 40, "nvlink5", _B200),
        "MI300X-192GB": _sheet(191.69, 5300, 163.4, 653.7, 1307.4, 163.4, "xgmi3", _MI300X),
        "L40S-48GB": _sheet(44.40, 864, 91.6, 183, 362.05, 91.6 / 64, "pcie4", _L40S),
        "L4-24GB": _sheet(
            22.03,
            300,
            30.3,
            60,
            121,
            30.3 / 64,
            "pcie4",
            "NVIDIA L4 data sheet (https://www.nvidia.com/en-us/data-center/l4/)",
        ),
        "A10-24GB": _sheet(
            21.99,
            600,
            31.2,
            62.5,
            125,
            31.2 / 64,
            "pcie4",
            "NVIDIA A10 data sheet (https://www.nvidia.com/en-us/data-center/products/a10-gpu/)",
        ),
        "RTX3090-24GB": _sheet(
            23.69,
            936,
            35.6,
            35.6,
            71,
            35.6 / 64,
            "pcie4",
            "NVIDIA Ampere GA102 GPU architecture whitepaper, appendix A (V2.1, 2021)",
        ),
        "RTX4090-24GB": _sheet(
            23.52,
            1008,
            82.6,
            82.6,
            165.2,
            82.6 / 64,
            "pcie4",
            "NVIDIA Ada GPU architecture whitepaper, appendix A (V2.1, 2023)",
        ),
        "T4-16GB": _sheet(
            14.57,
            320,
            8.1,
            8.1,
            65,
            8.1 / 32,
            "pcie3",
            "NVIDIA T4 data sheet (https://www.nvidia.com/en-us/data-center/tesla-t4/)",
            has_bfloat16=False,
        ),
        "TPUv2-8GB": _sheet(7.48, 350, 23, 23, 23, None, "tpuv2", _TPU, compiles=True),
        "TPUv3-16GB": _sheet(15.48, 450, 61.5, 61.5, 61.5, None, "tpuv3", _TPU, compiles=True),
        "TPUv4-32GB": _sheet(30.75, 1200, 275, 275, 275, None, "tpuv4", _CLOUD_TPU, compiles=True),
        "TPUv5e-16GB": _sheet(15.75, 819, 197, 197, 197, None, "tpuv5e", _CLOUD_TPU, compiles=True),
        "TPUv5p-95GB": _sheet(95.74, 2765, 459, 459, 459, None, "tpuv5p", _CLOUD_TPU, compiles=True),
    }
)
MATRIX_SHARES: Final = MappingProxyType(
    {
        "A100-40GB": 0.859,
        "A100-80GB": 0.859,
        "H100-80GB": 0.801,
        "H200-141GB": 0.803,
        "GH200-96GB": 0.830,
        "GH200-144GB": 0.830,
        "B200-180GB": 0.776,
        "MI300X-192GB": 0.601,
    }
)
"""Best of all shapes in bfloat16, of the printed rate: the others keep the usual 0.8 [assumed]. From S. Bekman, Machine
Learning Engineering, "Maximum Achievable Matmul FLOPS comparison table"
(https://github.com/stas00/ml-engineering/tree/master/compute/accelerator)."""


DATA_SHEETS: Final = MappingProxyType(
    {
        name: sheet.model_copy(update={"matrix_share": MATRIX_SHARES.get(name, sheet.matrix_share)})
        for name, sheet in _PRINTED.items()
    }
)


class LinkSheet(Value):
    """One kind of connection, in one direction.

    Attributes:
        bytes_per_s: as printed.
        latency_s: of a message between two devices, an assumption: the launch of a send and a receive, and the hop.
        source: document that prints the bandwidth.
        of_each_device: whether each device of a host usually has one to other hosts, as in DGX and HGX systems.
    """

    bytes_per_s: float = Field(gt=0)
    latency_s: float = Field(ge=0)
    source: str
    of_each_device: bool = False


_NVLINK = "NVIDIA NVLink (https://www.nvidia.com/en-us/data-center/nvlink/), half of the total of both directions"
_PCIE = "PCI-SIG base specifications: 16 lanes of 8, 16 and 32 GT/s with 128b/130b coding"
_ETHERNET = "IEEE 802.3"
_INFINIBAND = "InfiniBand Trade Association, 4 lanes"

LINKS: Final = MappingProxyType(
    {
        "nvlink1": LinkSheet(bytes_per_s=80 * GB, latency_s=10e-6, source=_NVLINK),
        "nvlink2": LinkSheet(bytes_per_s=150 * GB, latency_s=10e-6, source=_NVLINK),
        "nvlink3": LinkSheet(bytes_per_s=300 * GB, latency_s=10e-6, source=_NVLINK),
        "nvlink4": LinkSheet(bytes_per_s=450 * GB, latency_s=10e-6, source=_NVLINK),
        "nvlink5": LinkSheet(bytes_per_s=900 * GB, latency_s=10e-6, source=_NVLINK),
        "xgmi3": LinkSheet(bytes_per_s=64 * GB, latency_s=10e-6, source=f"{_MI300X}, one of seven links"),
        "pcie3": LinkSheet(bytes_per_s=15.75 * GB, latency_s=20e-6, source=_PCIE),
        "pcie4": LinkSheet(bytes_per_s=31.5 * GB, latency_s=20e-6, source=_PCIE),
        "pcie5": LinkSheet(bytes_per_s=63 * GB, latency_s=20e-6, source=_PCIE),
        "10gbe": LinkSheet(bytes_per_s=1.25 * GB, latency_s=50e-6, source=_ETHERNET),
        "25gbe": LinkSheet(bytes_per_s=3.125 * GB, latency_s=50e-6, source=_ETHERNET),
        "100gbe": LinkSheet(bytes_per_s=12.5 * GB, latency_s=30e-6, source=_ETHERNET),
        "hdr": LinkSheet(bytes_per_s=25 * GB, latency_s=15e-6, source=_INFINIBAND, of_each_device=True),
        "ndr": LinkSheet(bytes_per_s=50 * GB, latency_s=15e-6, source=_INFINIBAND, of_each_device=True),
        "tpuv2": LinkSheet(
            bytes_per_s=62 * GB, latency_s=10e-6, source=f"{_TPU.split(';', maxsplit=1)[0]}, 496 Gbit/s"
        ),
        "tpuv3": LinkSheet(
            bytes_per_s=82 * GB, latency_s=10e-6, source=f"{_TPU.split(';', maxsplit=1)[0]}, 656 Gbit/s"
        ),
        "tpuv4": LinkSheet(
            bytes_per_s=50 * GB, latency_s=10e-6, source=f"{_CLOUD_TPU}, one of six links of 400 Gbit/s"
        ),
        "tpuv5e": LinkSheet(
            bytes_per_s=50 * GB, latency_s=10e-6, source=f"{_CLOUD_TPU}, one of four links of 400 Gbit/s"
        ),
        "tpuv5p": LinkSheet(
            bytes_per_s=100 * GB, latency_s=10e-6, source=f"{_CLOUD_TPU}, one of six links of 800 Gbit/s"
        ),
    }
)
LINK_EFFICIENCY: Final = 0.8
"""Share of a link's printed bandwidth that large messages reach [assumed]."""
ERROR: Final = 0.5
"""Relative error to expect of seconds that follow from data sheets and that nothing was fitted to [assumed]."""


def data_sheet(name: str) -> DataSheet:
    """The data sheet of a device, see `full_name`.

    Raises:
        ArgumentError: it is not in the table.
    """
    return DATA_SHEETS[full_name(name)]


# As torch.cuda.get_device_name says them of the form whose sheet this is: SXM where there is one.
_NAMES_BY_DRIVER: Final = MappingProxyType(
    {
        "Tesla V100-SXM2-16GB": "V100-16GB",
        "Tesla V100-SXM2-32GB": "V100-32GB",
        "Tesla P100-SXM2-16GB": "P100-16GB",
        "Tesla T4": "T4-16GB",
        "NVIDIA A100-SXM4-40GB": "A100-40GB",
        "NVIDIA A100-SXM4-80GB": "A100-80GB",
        "NVIDIA H100 80GB HBM3": "H100-80GB",
        "NVIDIA H200": "H200-141GB",
        "NVIDIA B200": "B200-180GB",
        "NVIDIA L40S": "L40S-48GB",
        "NVIDIA L4": "L4-24GB",
        "NVIDIA A10": "A10-24GB",
        "NVIDIA GeForce RTX 3090": "RTX3090-24GB",
        "NVIDIA GeForce RTX 4090": "RTX4090-24GB",
        "AMD Instinct MI300X": "MI300X-192GB",
    }
)


def sheet_of_kind(kind: str) -> DataSheet | None:
    """The data sheet of a `Device.kind`: the table's name or the driver's; None if there is none."""
    return DATA_SHEETS.get(_NAMES_BY_DRIVER.get(kind, kind))


def full_name(name: str) -> str:
    """The table's name of a device, however its letters are written; the memory may be left out if there is one size.

    >>> full_name("h100"), full_name("a100-40gb")
    ('H100-80GB', 'A100-40GB')

    Raises:
        ArgumentError: it is not in the table.
    """
    if not isinstance(name, str):
        raise ArgumentError(f"{shown(name)} is no kind of device; pass one of {', '.join(DATA_SHEETS)}")
    asked = name.lower()
    found = [known for known in DATA_SHEETS if asked in (known.lower(), known.split("-")[0].lower())]
    if len(found) != 1:
        hint = f"; which {name}: {' or '.join(found)}" if found else meant(name.upper(), DATA_SHEETS)
        raise ArgumentError(f"no data sheet of a device {shown(name)}{hint}; known are {', '.join(DATA_SHEETS)}")
    return found[0]


def link_sheet(name: str) -> LinkSheet:
    """The entry of a link, however its letters are written.

    Raises:
        ArgumentError: it is not in the table.
    """
    if not isinstance(name, str) or name.lower() not in LINKS:
        hint = meant(str(name).lower(), LINKS)
        raise ArgumentError(f"no data sheet of a link {shown(name)}{hint}; known are {', '.join(LINKS)}")
    return LINKS[name.lower()]
