"""The files of `operate/deploy/`: linters and schemas accept them, all that they name exists, and a node resumes."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import check_jsonschema
import jsonschema
import kubernetes_validate
import yaml

from tests.helpers.programs import DEADLINE, await_steps, make_flags
from tests.helpers.training import ROOT, TINY, gap, tiny, train
from workshop.ranks import losses

DEPLOY = ROOT / "operate" / "deploy"
FIELDS = {**TINY, "n_layer": 1, "gradient_accumulation_steps": 2, "compile": False}
COMPOSE_SCHEMA = Path(check_jsonschema.__file__).parent / "builtin_schemas" / "vendor" / "compose-spec.json"
SERVICE, JOB = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
JOBSET = yaml.safe_load((DEPLOY / "jobset.yaml").read_text())
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text().replace("${GPUS:-1}", "1"))
SKY = yaml.safe_load((DEPLOY / "skypilot.yaml").read_text())


def test_linters_and_schemas_accept_the_files():
    """Linters accept the scripts and the Dockerfile, and the schemas of compose and Kubernetes the other files."""
    for program, name in (("shellcheck", "node.sh"), ("shellcheck", "slurm.sh"), ("hadolint", "Dockerfile")):
        subprocess.run([Path(sys.executable).with_name(program), DEPLOY / name], check=True, timeout=DEADLINE)
        assert name == "Dockerfile" or os.access(DEPLOY / name, os.X_OK)
    jsonschema.validate(COMPOSE, json.loads(COMPOSE_SCHEMA.read_text()))
    (replicated,) = JOBSET["spec"]["replicatedJobs"]
    job_of_set = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "node"}, **replicated["template"]}
    for resource in (SERVICE, JOB, job_of_set):
        kubernetes_validate.validate(resource, kubernetes_validate.latest_version(), strict=True)


def test_the_files_use_inputs_of_the_script():
    """node.sh ignores variables that it does not know, so each variable that the files set is one of its inputs."""
    inputs = set(re.findall(r"\$\{([A-Z_]+):", (DEPLOY / "node.sh").read_text()))
    for service in COMPOSE["services"].values():
        assert service.get("environment", {}).keys() <= inputs
    assert all(f"${name}" in SKY["setup"] + SKY["run"] for name in SKY["envs"])
    assert set(re.findall(r"([A-Z_]+)=\$", SKY["run"])) <= inputs


def pod_of(job: dict[str, Any], rank: int) -> tuple[list[str], dict[str, str]]:
    """Return the command of a pod of an indexed Job, and the environment that Kubernetes sets."""
    (container,) = job["template"]["spec"]["containers"]
    environment = {each["name"]: each["value"] for each in container["env"]}
    assert job["completions"] == job["parallelism"] == int(environment["NNODES"])
    assert container["resources"]["limits"]["nvidia.com/gpu"] == int(environment["GPUS"])
    return [*container["command"], *container["args"]], {**environment, "JOB_COMPLETION_INDEX": str(rank)}


def test_each_file_starts_the_launcher_for_its_node(tmp_path):
    """The second node of each file starts the launcher with its rank, its GPUS and the address of the first node."""
    service = COMPOSE["services"]["node1"]
    sky = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NUM_GPUS_PER_NODE": "8"}
    sky |= {"SKYPILOT_NODE_RANK": "1", "CONFIG": "config/train_gpt2_xl.py", "DATASET": "shakespeare"}
    jobs = {
        "node0": (service["command"], {name: str(value) for name, value in service["environment"].items()}),
        f"nanogpt-0.{SERVICE['metadata']['name']}": pod_of(JOB["spec"], 1),
        "nanogpt-node-0-0.nanogpt": pod_of(JOBSET["spec"]["replicatedJobs"][0]["template"]["spec"], 1),
        "10.0.0.1": (["bash", "-euc", SKY["run"].replace("/shared/run", str(tmp_path))], sky),
    }
    for address, (words, environment) in jobs.items():
        environment = {**os.environ, "PY": "echo", **environment, "OUT_DIR": str(tmp_path)}
        printed = subprocess.check_output(words, cwd=ROOT, env=environment, text=True, timeout=DEADLINE)
        gpus = 1 if address == "node0" else 8
        assert f"--gpus={gpus} --nnodes=2 --node_rank=1 --master_addr={address} phase3_fsdp/train.py" in printed


def test_a_node_resumes_after_an_eviction(tmp_path, python):
    """If Kubernetes stops a pod, it exits with 75, so that the Job starts it again. Then the run resumes."""
    out, fields = tmp_path / "run", {**FIELDS, "decay_lr": False}
    words, environment = pod_of(JOB["spec"], 0)
    environment |= {"NNODES": "1", "GPUS": "2", "MASTER_ADDR": "127.0.0.1", "OUT_DIR": str(out), "PY": python}

    def start(**changes: int) -> subprocess.Popen:
        command = [*words[:4], *make_flags(**{**fields, **changes})]
        return subprocess.Popen(command, cwd=ROOT, env={**os.environ, **environment})

    with start(max_iters=100_000, eval_interval=100_000) as node:
        await_steps(out, 2, node)
        node.terminate()  # the first process of the pod only, as the kubelet does
        assert node.wait(DEADLINE) == 75
    (checkpoint,) = (out / "checkpoints").glob("step-*")
    fields |= {"max_iters": int(checkpoint.name.removeprefix("step-")) + 2}
    with start() as node:
        assert node.wait(DEADLINE) == 0
    one = train("nanoGPT", 1, tiny("nanoGPT", tmp_path / "one", **fields))
    assert gap(losses(out), one) < 1e-5
