"""The models that libraries offer for training, far beyond the list: each tiny, with random weights, and a batch.

transformers: every class that its automatic classes know for causal and masked language models, translation, image
classification and speech. timm: the first model of every family. torchvision: one model of every family.
"""

import contextlib
import importlib
import inspect
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tests.coverage.model_list import BATCH_SIZE, Case, padded, tokens, transformers
from tests.coverage.shrinking import IMAGE, small_settings
from tests.coverage.survey_settings import SETTINGS

CLASSES = 2


@dataclass(frozen=True)
class Candidate:
    """A model of a library.

    Attributes:
        library: where it comes from.
        name: of the class or of the variant.
        make: builds it with a batch, the same at each call.
    """

    library: str
    name: str
    make: Callable[[], Case]

    def build(self) -> Case:
        """The model in training mode, on one batch."""
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            case = self.make()
        case.model.train()
        return case


def candidates() -> Iterator[Candidate]:
    """All of them."""
    yield from transformers_models()
    yield from timm_models()
    yield from torchvision_models()


# Mapping of transformers' automatic classes -> what their models are called with.
TASKS: Mapping[str, str] = {
    "CAUSAL_LM": "text",
    "MASKED_LM": "text",
    "SEQ_TO_SEQ_CAUSAL_LM": "text",
    "IMAGE_CLASSIFICATION": "image",
    "SEMANTIC_SEGMENTATION": "map",
    "CTC": "speech",
    "SPEECH_SEQ_2_SEQ": "speech",
    "AUDIO_CLASSIFICATION": "sound class",
    "VIDEO_CLASSIFICATION": "video",
    "ZERO_SHOT_IMAGE_CLASSIFICATION": "pair",
    "OBJECT_DETECTION": "boxes",
    "TIME_SERIES_PREDICTION": "series",
}


def transformers_models() -> Iterator[Candidate]:
    """One candidate for each class."""
    known = importlib.import_module("transformers.models.auto.modeling_auto")
    seen: set[str] = set()
    for task, kind in TASKS.items():
        for names in getattr(known, f"MODEL_FOR_{task}_MAPPING_NAMES").values():
            for name in (names,) if isinstance(names, str) else names:
                if name not in seen:
                    seen.add(name)
                    yield Candidate("transformers", name, partial(hugging_face, name, kind))


def hugging_face(name: str, kind: str) -> Case:
    """A model of transformers by the name of its class."""
    with contextlib.suppress(ModuleNotFoundError):
        torchvision()  # parts of transformers import it where it is installed
    kind_of_model = getattr(transformers(), name)
    config_kind = kind_of_model.config_class
    settings = {**small_settings(config_kind), **SETTINGS.get(name, {})}
    config = config_kind(**{key: value for key, value in settings.items() if not key.startswith("_")})
    config.use_cache = False
    for token in ("pad_token_id", "decoder_start_token_id"):
        if getattr(config, token, None) is None:
            setattr(config, token, 0)
    model = kind_of_model(config)
    taken = inspect.signature(model.forward).parameters
    sample = {key: value for key, value in _sample(kind, config, settings).items() if key in taken}
    own_loss = {"labels", "return_loss", "future_values"} & sample.keys()
    return Case(model, sample, None if own_loss else mean_square)


def _sample(kind: str, config: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """All that a model of this kind may take; the signature of its forward says what it does."""
    ids = tokens(settings.get("_length", 12))
    extent = settings.get("_image", IMAGE)
    image = torch.randn(BATCH_SIZE, getattr(config, "num_channels", 3), extent, extent)
    classes = torch.randint(CLASSES, (BATCH_SIZE,))
    sound = {
        "input_values": torch.randn(BATCH_SIZE, settings.get("_samples", 4000)),
        "input_features": torch.randn(BATCH_SIZE, *settings.get("_features", (64, 80))),
    }
    boxes = {"class_labels": torch.zeros(1, dtype=torch.int64), "boxes": torch.full((1, 4), 0.5)}
    series = torch.randn(BATCH_SIZE, getattr(config, "context_length", 32), getattr(config, "num_input_channels", 1))
    samples: Mapping[str, dict[str, Any]] = {
        "text": {"input_ids": ids, "attention_mask": padded(ids), "labels": ids.clone(), "use_cache": False},
        "image": {"pixel_values": image, "labels": classes},
        "map": {"pixel_values": image, "labels": torch.randint(CLASSES, (BATCH_SIZE, extent, extent))},
        "video": {
            "pixel_values": image.unsqueeze(1).repeat(1, settings.get("_pictures", 4), 1, 1, 1),
            "labels": classes,
        },
        "pair": {"input_ids": ids, "pixel_values": image, "return_loss": True},
        "boxes": {"pixel_values": image, "labels": [boxes] * BATCH_SIZE},
        "speech": {**sound, "labels": torch.randint(3, 30, (BATCH_SIZE, 5))},
        "sound class": {**sound, "labels": classes},
        "series": {"past_values": series, "future_values": series[:, : getattr(config, "prediction_length", 8)]},
    }
    return {**samples[kind], **settings.get("_sample", {})}


def mean_square(output: Any, _: Any) -> Tensor:
    """A loss for models that compute none: how far everything that they return is from 1, squared."""
    values = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
    return torch.stack([(value - 1).square().mean() for value in values]).sum()


def without_dropout(model: nn.Module) -> None:
    """Set the probabilities of all modules that drop something to 0."""
    dropping = [part for part in model.modules() if re.search("drop|stochastic", type(part).__name__, re.I)]
    for part in dropping:
        for field in ("drop_prob", "p"):
            if isinstance(getattr(part, field, None), float):
                setattr(part, field, 0.0)


def timm_models() -> Iterator[Candidate]:
    """The smallest of each family that takes small images."""
    torchvision()  # timm uses parts of it
    timm = importlib.import_module("timm")
    for family in timm.list_modules():
        names = timm.list_models(module=family, include_tags=False)
        if names:
            smallest = _smallest(names)
            yield Candidate("timm", f"{family}: {smallest}", partial(_timm, smallest))


def _smallest(names: list[str]) -> str:
    """By its name: families call their small members nano or tiny."""
    sizes = ("test_", "atto", "femto", "pico", "nano", "zepto", "xxs", "xxt", "xt", "tiny", "small", "_s", "050", "_0")
    return next((name for size in sizes for name in names if size in name), names[0])


def _timm(name: str) -> Case:
    torchvision()
    timm = importlib.import_module("timm")
    settings = {"img_size": 128} if name.startswith("samvit") else {}
    model: nn.Module = timm.create_model(name, num_classes=CLASSES, **settings)
    known: Mapping[str, Any] = model.pretrained_cfg  # type: ignore[assignment]
    extent = known["input_size"][-1]
    if settings or not known.get("fixed_input_size"):
        extent = min(extent, 128)
    without_dropout(model)
    images, target = torch.randn(2, 3, extent, extent), torch.randint(CLASSES, (2,))
    return Case(model, images, nn.functional.cross_entropy, target)


# Families of torchvision's models -> their smallest member, with what it is called with.
TORCHVISION: Mapping[str, tuple[int, ...]] = {
    "alexnet": (3, 64, 64),
    "convnext_tiny": (3, 32, 32),
    "densenet121": (3, 32, 32),
    "efficientnet_b0": (3, 32, 32),
    "efficientnet_v2_s": (3, 32, 32),
    "googlenet": (3, 64, 64),
    "inception_v3": (3, 160, 160),
    "maxvit_t": (3, 224, 224),
    "mnasnet0_5": (3, 32, 32),
    "mobilenet_v2": (3, 32, 32),
    "mobilenet_v3_small": (3, 32, 32),
    "regnet_x_400mf": (3, 32, 32),
    "regnet_y_400mf": (3, 32, 32),
    "resnet18": (3, 32, 32),
    "resnext50_32x4d": (3, 32, 32),
    "shufflenet_v2_x0_5": (3, 32, 32),
    "squeezenet1_0": (3, 64, 64),
    "swin_t": (3, 64, 64),
    "swin_v2_t": (3, 64, 64),
    "vgg11_bn": (3, 32, 32),
    "vit_b_32": (3, 64, 64),
    "wide_resnet50_2": (3, 32, 32),
    "deeplabv3_mobilenet_v3_large": (3, 64, 64),
    "fcn_resnet50": (3, 64, 64),
    "lraspp_mobilenet_v3_large": (3, 64, 64),
    "mc3_18": (3, 4, 32, 32),
    "mvit_v1_b": (3, 4, 64, 64),
    "r2plus1d_18": (3, 4, 32, 32),
    "r3d_18": (3, 4, 32, 32),
    "s3d": (3, 16, 224, 224),
    "swin3d_t": (3, 8, 64, 64),
    "raft_small": (3, 128, 128),
    "fasterrcnn_mobilenet_v3_large_320_fpn": (3, 64, 64),
    "fcos_resnet50_fpn": (3, 64, 64),
    "keypointrcnn_resnet50_fpn": (3, 64, 64),
    "maskrcnn_resnet50_fpn": (3, 64, 64),
    "retinanet_resnet50_fpn": (3, 64, 64),
    "ssd300_vgg16": (3, 64, 64),
    "ssdlite320_mobilenet_v3_large": (3, 64, 64),
}
DETECTORS = re.compile("fasterrcnn|fcos|keypointrcnn|maskrcnn|retinanet|ssd")
# What makes some of them smaller.
SMALL: Mapping[str, Mapping[str, Any]] = {
    "vit_": {"image_size": 64},
    "mvit_": {"spatial_size": (64, 64), "temporal_size": 4},
    "fasterrcnn|fcos|keypointrcnn|maskrcnn|retinanet": {"min_size": 64, "max_size": 64},
}
SEGMENTERS = re.compile("deeplab|fcn|lraspp")


def torchvision_models() -> Iterator[Candidate]:
    """One of each family."""
    for name, shape in TORCHVISION.items():
        yield Candidate("torchvision", name, partial(_torchvision, name, shape))


def _torchvision(name: str, shape: tuple[int, ...]) -> Case:
    make: Callable[..., nn.Module] = torchvision().models.get_model
    settings = dict(next((given for pattern, given in SMALL.items() if re.match(pattern, name)), {}))
    if DETECTORS.match(name) or SEGMENTERS.match(name):
        settings["weights_backbone"] = None
    model = make(name, weights=None, **settings)
    without_dropout(model)
    images = torch.randn(BATCH_SIZE, *shape)
    if DETECTORS.match(name):
        return Case(model, (images, _boxes(shape)), mean_square)
    sample = (images, torch.randn(BATCH_SIZE, *shape)) if name.startswith("raft") else images
    return Case(model, sample, mean_square)


def _boxes(shape: tuple[int, ...]) -> list[dict[str, Tensor]]:
    """One object in each image."""
    found = {
        "boxes": torch.tensor([[4.0, 4.0, 40.0, 40.0]]),
        "labels": torch.ones(1, dtype=torch.int64),
        "masks": torch.ones(1, *shape[1:], dtype=torch.uint8),
        "keypoints": torch.ones(1, 17, 3),
    }
    return [found for _ in range(BATCH_SIZE)]


_OPERATORS: Any = torch.library.Library("torchvision", "FRAGMENT")  # what is defined in it lives as long as it does


@cache
def torchvision() -> Any:
    """The package, also where its compiled operators do not load: those of the wheel on PyPI need CUDA.

    Only detection uses them, and only on what a model predicts, not in training.
    """
    try:
        return importlib.import_module("torchvision")
    except RuntimeError:
        for name in ("nms", "qnms"):
            _OPERATORS.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return importlib.import_module("torchvision")
