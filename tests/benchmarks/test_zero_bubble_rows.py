"""Throughput that the simulator predicts for published measurements of zero-bubble schedules, row by row.

python -m pytest -q -s -m benchmark tests/benchmarks/test_zero_bubble_rows.py

`tests/data/zb_profiled_times.csv` says what one stage took for one micro-batch in 48 runs: forward, gradients of
inputs, of parameters, and a message, in ms. Nothing else is known, so all stages take the same (the first and the last
hold one layer less, for the embedding and the head are theirs), and the optimizer's step takes no time. All stages
begin a step together, as they do when the optimizer's step is synchronized; the wait for the first input,
(p - 1) (T_F + T_comm), is what post-validation would save at most.

Interleaved runs have a chunk for each layer (the paper's experiments use the most that there are), embedding and head
counted as one layer each. ZB-1p and ZB-2p may hold what p and 2 p micro-batches need, and one more waiting; until the
gradients of its parameters are made one needs 32 of 34 parts, as in the paper's table of a Transformer's bytes.
"""

import csv
from pathlib import Path

import numpy as np
import pytest

from planner.cost.layer_costs import Floats
from planner.kernel.makespan import makespan_s
from planner.solve.own_orders import best_orders
from tests.planner.made_up import room_for

ROWS = Path(__file__).parent.parent / "data" / "zb_profiled_times.csv"
WAITS = 32 / 34
"""Bytes until the gradients of parameters are made, of those until the gradients of inputs are."""


def seconds(row: dict[str, str], stages: int, *, parts: int = 1) -> Floats:
    """Of all passes and messages, each stage cut into so many chunks."""
    table = np.zeros((6, stages * parts, int(row["micro_batches"])))
    for place, name in ((0, "T_F_ms"), (2, "T_B_ms"), (5, "T_W_ms")):
        table[place] = float(row[name]) / 1e3 / parts
    table[3:5] = float(row["T_comm_ms"]) / 1e3
    return table


def predicted_s(row: dict[str, str]) -> float:
    """Seconds of a step of the row's schedule."""
    stages = int(row["pp"])
    if row["schedule"].startswith("ZB"):
        many = {"ZB-1p": 1, "ZB-2p": 2}[row["schedule"]] * stages
        of = seconds(row, stages)
        room = room_for(np.full(stages, many + WAITS), np.ones(stages), np.full(stages, WAITS), of.shape[2])
        found = best_orders(of, room)
        assert found is not None
        return found[0]
    chunks = (int(row["layers"]) + 2) // stages if row["schedule"] == "1F1B-I" else 1
    table = seconds(row, stages, parts=chunks)
    table[2] += table[5]
    return makespan_s("1f1b" if chunks == 1 else "interleaved", table[:5], chunks)


@pytest.mark.benchmark
def test_predicted_throughput_of_each_row() -> None:
    with ROWS.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    print(f"\n{'model':18} {'K':>3} {'M':>4} {'size':>4} {'schedule':>9} {'step':>9} {'samples/s':>10} {'bubble':>7}")
    steps: dict[tuple[str, str], dict[str, float]] = {}
    for row in rows:
        step_s = predicted_s(row)
        count, size = int(row["micro_batches"]), int(row["micro_batch_size"])
        busy_s = count * sum(float(row[name]) for name in ("T_F_ms", "T_B_ms", "T_W_ms")) / 1e3
        steps.setdefault((row["model"], row["micro_batches"]), {})[row["schedule"]] = step_s
        print(
            f"{row['model']:18} {row['pp']:>3} {count:4} {size:4} {row['schedule']:>9} {step_s:7.3f} s "
            f"{size * count / step_s:10.3f} {1 - busy_s / step_s:7.2%}"
        )
    for found in steps.values():
        assert found["ZB-2p"] <= found["ZB-1p"] <= found["1F1B"]
        assert found["1F1B-I"] < found["1F1B"]
