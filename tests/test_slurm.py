"""The Slurm script of the docs: its syntax, and that the programs it starts take its options."""

import os
import subprocess
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from tests.training import tiny_config, undrawn, write_folder
from vitascope import runs
from vitascope.cli.parsing import parse
from vitascope.cli.train import Train

SCRIPT = Path(__file__).parent.parent / "docs" / "examples" / "train.slurm"
STUBS = {
    "scontrol": 'test "$*" = "show hostnames gpu[01-03]" && printf "gpu%s\\n" 01 02 03',
    "srun": 'printf "%s\\n" "$@"',
}


def started(folder: Path, **variables: object) -> list[str]:
    """The words of the command that the script gives to srun."""
    for name, text in STUBS.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    job = {"NNODES": 3, "GPUS_ON_NODE": 4, "JOB_ID": 17, "JOB_NODELIST": "gpu[01-03]"}
    env = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    env |= {f"SLURM_{name}": str(value) for name, value in job.items()}
    env |= {name: str(value) for name, value in variables.items()}
    done = subprocess.run(["bash", str(SCRIPT)], env=env, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_script_is_valid_bash_and_asks_slurm_for_one_task_per_machine() -> None:
    subprocess.run(["bash", "-n", str(SCRIPT)], check=True)
    directives = [line.split()[1] for line in SCRIPT.read_text().splitlines() if line.startswith("#SBATCH")]
    assert "--ntasks-per-node=1" in directives
    assert "--requeue" in directives


@pytest.mark.parametrize("requeued", [False, True])
def test_torchrun_and_vitascope_take_the_options_of_the_script(tmp_path: Path, requeued: bool) -> None:
    data, run = write_folder(tmp_path / "greys"), tmp_path / "run"
    if requeued:
        with undrawn():
            runs.train(tiny_config(data, run=str(run), epochs=1))
    words = started(tmp_path, DATA=data, RUN=run)
    torchrun, own = words.index("torchrun"), words.index("--")
    options = get_args_parser().parse_args(words[torchrun + 1 :])
    assert (options.nnodes, options.nproc_per_node, options.rdzv_endpoint) == ("2:3", "4", "gpu01:29500")
    assert (options.max_restarts > 0, options.rdzv_id, options.training_script) == (
        True,
        "17",
        "vitascope.cli",
    )
    assert words[own + 1] == "train"
    request = parse(Train, "train", words[own + 2 :])
    if requeued:
        assert request.resume == str(run)
    else:
        named = {"data": str(data), "run": str(run), "streams": 3, "parallel": "fsdp", "compile": "on"}
        assert request.training.items() >= named.items()


def test_script_without_data_names_the_variable(tmp_path: Path) -> None:
    env = {**os.environ, "RUN": str(tmp_path)}
    done = subprocess.run(["bash", str(SCRIPT)], env=env, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "DATA: is the data to train on" in done.stderr
