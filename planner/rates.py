"""How fast a plan trains, in tokens and floating-point operations a second: the one place that computes it."""

from __future__ import annotations

from planner.plan.plan import Plan
from profiler.datasheets import sheet_of_kind
from profiler.record import Profile


def with_rates(plan: Plan, profile: Profile) -> Plan:
    """The plan with `tokens_per_s`, `device_flops_per_s` and `mfu` of its prediction, as far as they are known.

    MFU, model FLOPs utilization, is what the model needs, without recompute, as a share of what the devices' data
    sheets promise for its type of numbers (Chowdhery et al., PaLM, arXiv 2204.02311, appendix B).

    Args:
        plan: the plan; idle devices do not count.
        profile: what it was made from.
    """
    prediction = plan.prediction
    found: dict[str, float] = {}
    tokens = plan.sample.tokens
    if tokens is not None:
        found["tokens_per_s"] = prediction.samples_per_s * tokens
    work = profile.work
    if work is not None:
        devices = [device for stage in plan.stages[: plan.ranks] for device in stage.devices]
        done_per_s = work.training_flops * prediction.samples_per_s
        found["device_flops_per_s"] = done_per_s / len(devices)
        sheets = [sheet_of_kind(device.kind) for device in devices]
        promised_per_s = sum(sheet.flops_per_s(work.dtype) for sheet in sheets if sheet is not None)
        if None not in sheets and promised_per_s:
            found["mfu"] = done_per_s / promised_per_s
    return plan.model_copy(update={"prediction": prediction.model_copy(update=found)})
