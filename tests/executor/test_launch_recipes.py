"""The scripts of notebooks/launching: those that can run here do, of the others what can be said without a cluster."""

import contextlib
import os
import random
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "notebooks" / "launching"
JOINED_BY = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


def environment() -> dict[str, str]:
    path = os.pathsep.join(entry for entry in sys.path if entry)
    kept = {name: value for name, value in os.environ.items() if name not in JOINED_BY}
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}


def ended(*commands: list[str], folder: Path) -> list[str]:
    """What these processes print, side by side, once all have ended well."""
    started = [
        subprocess.Popen(
            command, cwd=folder, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for command in commands
    ]
    printed = [process.communicate(timeout=240)[0] for process in started]
    assert [process.returncode for process in started] == [0] * len(started), printed
    return printed


def free_port() -> int:
    """One that the Slurm script might choose."""
    for port in random.sample(range(20_000, 32_000), 100):
        with socket.socket() as taken, contextlib.suppress(OSError):
            taken.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")


def loss_in(printed: str) -> str:
    found = re.findall(r"loss (\S+) after 20 steps", printed)
    assert len(found) == 1, printed
    return str(found[0])


def test_one_machine_and_two_train_as_one_process(tmp_path: Path) -> None:
    shutil.copy(RECIPES / "train.py", tmp_path)
    ended([sys.executable, "train.py", "plan", "2"], folder=tmp_path)
    (alone,) = ended([sys.executable, "train.py"], folder=tmp_path)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--log-dir", str(tmp_path / "logs")]
    (one,) = ended([*torchrun, "--standalone", "--nproc-per-node", "2", "train.py"], folder=tmp_path)
    asked = ["--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    both = ended(
        *([*torchrun, *asked, "--node-rank", str(node), "train.py"] for node in range(2)),
        folder=tmp_path,
    )
    assert loss_in(one) == loss_in("".join(both)) == loss_in(alone)


LAST_THREADS = """
import atexit
from pathlib import Path
names = map(Path.read_text, Path("/proc/self/task").glob("*/comm"))
atexit.register(lambda: print([name for name in names if "gloo" in name]))
from train import *
train(Plan.load("plan.json"))
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads have no names here")
def test_no_thread_of_gloo_outlives_python(tmp_path: Path) -> None:
    """With such threads 4 of 85 trainings ended with SIGABRT or SIGSEGV after the last step."""
    shutil.copy(RECIPES / "train.py", tmp_path)
    (tmp_path / "last.py").write_text(LAST_THREADS)
    ended([sys.executable, "train.py", "plan", "2"], folder=tmp_path)
    command = ["env", "WORLD_SIZE=2", "MASTER_ADDR=127.0.0.1", f"MASTER_PORT={free_port()}"]
    printed = ended(*([*command, f"RANK={rank}", sys.executable, "last.py"] for rank in range(2)), folder=tmp_path)
    assert [text.splitlines()[-1] for text in printed] == ["[]", "[]"]


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_the_slurm_script_is_one_and_sets_what_a_process_joins_by() -> None:
    script = RECIPES / "slurm.sh"
    subprocess.run(["bash", "-n", script], check=True)
    text = script.read_text(encoding="utf-8")
    assert all(re.search(rf"\b{name}=", text) for name in JOINED_BY)
    asked = dict(re.findall(r"#SBATCH --([\w-]+)=(\S+)", text))
    assert asked["ntasks-per-node"] == asked["gpus-per-node"]


def test_slurm_starts_processes_that_train(tmp_path: Path) -> None:
    """The script itself, with an srun that starts the tasks here."""
    for recipe in ("train.py", "slurm.sh"):
        shutil.copy(RECIPES / recipe, tmp_path)
    ended([sys.executable, "train.py", "plan", "2"], folder=tmp_path)
    tools = tmp_path / "bin"
    tools.mkdir()
    stand_ins = {
        "scontrol": "echo 127.0.0.1",
        "srun": 'shift 2\nfor r in 0 1; do SLURM_PROCID=$r SLURM_LOCALID=$r SLURM_NTASKS=2 "$@" & done\n'
        "for task in $(jobs -p); do wait $task || exit 1; done",
        "python": f'exec {sys.executable} "$@"',
    }
    for tool, body in stand_ins.items():
        (tools / tool).write_text(f"#!/bin/bash\n{body}\n")
        (tools / tool).chmod(0o755)
    command = [
        "env",
        f"PATH={tools}:{os.environ['PATH']}",
        f"SLURM_JOB_ID={free_port() - 20_000}",
        "SLURM_JOB_NODELIST=here",
    ]
    (printed,) = ended([*command, "bash", "slurm.sh"], folder=tmp_path)
    loss_in(printed)


def test_the_kubernetes_file_is_an_indexed_job_and_its_service() -> None:
    service, job = yaml.safe_load_all((RECIPES / "kubernetes.yaml").read_text(encoding="utf-8"))
    assert (service["kind"], job["kind"], job["apiVersion"]) == ("Service", "Job", "batch/v1")
    assert service["spec"] == {"clusterIP": "None", "selector": {"job-name": job["metadata"]["name"]}}
    spec = job["spec"]
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"]
    pod = spec["template"]["spec"]
    assert pod["subdomain"] == service["metadata"]["name"]
    (container,) = pod["containers"]
    options = dict(option[2:].split("=", 1) for option in container["command"] if option.startswith("--"))
    assert int(options["nnodes"]) == spec["completions"]
    assert int(options["nproc-per-node"]) == container["resources"]["limits"]["nvidia.com/gpu"]
    assert options["master-addr"] == f"{job['metadata']['name']}-0.{pod['subdomain']}"
