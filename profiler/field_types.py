"""Types of the fields of values: the bounds of `profiler.quantities` as pydantic checks them."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from profiler.quantities import (
    MOST_BYTES,
    MOST_LAYERS,
    MOST_PREDICTED_BYTES,
    MOST_PREDICTED_SECONDS,
    MOST_RELATIVE,
    MOST_SAMPLES,
    MOST_SECONDS,
    SHORTEST_STEP_S,
)

Seconds = Annotated[float, Field(ge=0, le=MOST_SECONDS)]
Bytes = Annotated[int, Field(ge=0, le=MOST_BYTES)]
DeviceBytes = Annotated[int, Field(gt=0, le=MOST_BYTES)]
Samples = Annotated[int, Field(gt=0, le=MOST_SAMPLES)]
Index = Annotated[int, Field(ge=0, lt=MOST_LAYERS)]
"""Of a layer, stage or rank."""
Elements = Annotated[int, Field(ge=0, le=MOST_BYTES)]
Extent = Annotated[int, Field(ge=0, le=MOST_BYTES)]
"""Of a tensor."""
PositiveExtent = Annotated[int, Field(gt=0, le=MOST_BYTES)]
Rate = Annotated[float, Field(ge=1e-3, le=1e30)]
"""Bytes or operations in a second."""
NoRate = Annotated[float, Field(ge=0, le=1e30)]
"""The same where 0 says that there is none."""
RelativeSize = Annotated[float, Field(ge=0, le=1e6)]
Share = Annotated[float, Field(ge=0, le=1)]
RelativeError = Annotated[float, Field(ge=0, le=MOST_RELATIVE)]
PredictedSeconds = Annotated[float, Field(ge=0, le=MOST_PREDICTED_SECONDS)]
PredictedBytes = Annotated[int, Field(ge=0, le=MOST_PREDICTED_BYTES)]
StepSeconds = Annotated[float, Field(ge=SHORTEST_STEP_S, le=MOST_PREDICTED_SECONDS)]
