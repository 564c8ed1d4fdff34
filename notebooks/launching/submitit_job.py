"""Slurm from Python, by submitit: python submitit_job.py NODES DEVICES_PER_NODE [local]"""

import sys

import submitit  # type: ignore[import-not-found]
from train import train

from planner import Plan


def task() -> float:
    # It would show each task one device, and the plan names all of a node.
    submitit.helpers.TorchDistributedEnvironment().export(set_cuda_visible_devices=False)
    return train(Plan.load("plan.json"))


if __name__ == "__main__":
    nodes, devices = int(sys.argv[1]), int(sys.argv[2])
    executor = submitit.AutoExecutor("jobs", cluster="local" if "local" in sys.argv else None)
    executor.update_parameters(
        nodes=nodes, tasks_per_node=devices, timeout_min=60, slurm_additional_parameters={"gpus_per_node": devices}
    )
    job = executor.submit(task)
    print("losses:", job.results())
