"""A Ray cluster: python ray_job.py"""

import os
import socket

import ray  # type: ignore[import-not-found]

from planner import Plan

# Ray would show each actor one device, and the plan names all of a node.
SEE_ALL = {"env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}}


@ray.remote
class Process:
    def meeting_point(self) -> tuple[str, int]:
        with socket.socket() as free:
            free.bind(("", 0))
            return ray.util.get_node_ip_address(), free.getsockname()[1]

    def train(self, variables: dict[str, str]) -> float:
        os.environ.update(variables)
        from train import train

        return train(Plan.load("plan.json"))


if __name__ == "__main__":
    ray.init(runtime_env={"working_dir": ".", **SEE_ALL})
    plan = Plan.load("plan.json")
    count = plan.ranks * plan.replicas
    devices = int(plan.stages[0].device.name.startswith("cuda"))
    # Packed: neighbours of the pipeline share a node as long as it has devices.
    group = ray.util.placement_group([{"CPU": 1, "GPU": devices}] * count, strategy="PACK")
    ray.get(group.ready())
    ranks = [
        Process.options(placement_group=group, placement_group_bundle_index=rank, num_gpus=devices).remote()
        for rank in range(count)
    ]
    address, port = ray.get(ranks[0].meeting_point.remote())
    world = {"MASTER_ADDR": address, "MASTER_PORT": str(port), "WORLD_SIZE": str(count)}
    print(
        "losses:", ray.get([process.train.remote({**world, "RANK": str(rank)}) for rank, process in enumerate(ranks)])
    )
