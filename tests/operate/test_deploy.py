"""The files of `deploy/`: linters and schemas accept them, all that they name exists, and two nodes form one job."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import check_jsonschema
import jsonschema
import kubernetes_validate
import pytest
import yaml

from tests.helpers.marks import mark_slow
from tests.helpers.programs import DEADLINE, await_steps, find_free_port, make_flags
from tests.helpers.training import ROOT, TINY, gap, tiny, train
from workshop.ranks import losses

DEPLOY = ROOT / "deploy"
SHORT = {**TINY, "n_layer": 1, "eval_iters": 1, "max_iters": 3, "gradient_accumulation_steps": 2, "compile": False}
LONG = {**SHORT, "max_iters": 100000, "eval_interval": 100000}
COMPOSE_SCHEMA = Path(check_jsonschema.__file__).parent / "builtin_schemas" / "vendor" / "compose-spec.json"


def read(name: str, **replacements: str) -> str:
    """Return the text of a file in deploy/, with some words replaced."""
    text = (DEPLOY / name).read_text()
    for old, new in replacements.items():
        assert old in text
        text = text.replace(old, new)
    return text


JOBSET_VERSION = "jobset.x-k8s.io/v1alpha2"
WORDS = {"type": "string"}
NUMBER = {"type": "integer", "minimum": 0}
FLAG = {"type": "boolean"}


def make_schema(required: tuple[str, ...] = (), **fields: Any) -> dict[str, Any]:
    """Return the schema of an object that has only these fields, as the API server rejects unknown ones."""
    return {"type": "object", "properties": fields, "required": list(required), "additionalProperties": False}


# The fields of JobSet's CustomResourceDefinition that deploy/jobset.yaml may use. The template is that of a Job, which
# has its own schema.
RULE = make_schema(
    ("action", "name"),
    name=WORDS,
    action={"enum": ["FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts", "RestartJob"]},
    onJobFailureReasons={"type": "array", "items": {"enum": ["BackoffLimitExceeded", "PodFailurePolicy"]}},
    targetReplicatedJobs={"type": "array", "items": WORDS},
)
JOBSET_SCHEMA = make_schema(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": JOBSET_VERSION},
    kind={"const": "JobSet"},
    metadata=make_schema(("name",), name=WORDS),
    spec=make_schema(
        network=make_schema(enableDNSHostnames=FLAG, publishNotReadyAddresses=FLAG, subdomain=WORDS),
        failurePolicy=make_schema(
            maxRestarts=NUMBER,
            restartStrategy={"enum": ["Recreate", "BlockingRecreate", "InPlaceRestart"]},
            rules={"type": "array", "items": RULE},
        ),
        replicatedJobs={
            "type": "array",
            "items": make_schema(("name", "template"), name=WORDS, replicas=NUMBER, template={"type": "object"}),
        },
    ),
)


def lint(program: str, text: str, tmp_path: Path) -> str:
    """Return the findings of a linter; empty if it has none."""
    (tmp_path / "file").write_text(text)
    words = [Path(sys.executable).with_name(program), tmp_path / "file"]
    completed = subprocess.run(words, capture_output=True, text=True, timeout=DEADLINE)
    return completed.stdout if completed.returncode else ""


def check_compose(text: str) -> None:
    jsonschema.validate(yaml.safe_load(text), json.loads(COMPOSE_SCHEMA.read_text()))


def check_kubernetes(text: str) -> None:
    for resource in yaml.safe_load_all(text):
        kubernetes_validate.validate(resource, kubernetes_validate.latest_version(), strict=True)


def check_jobset(text: str) -> None:
    jobset = yaml.safe_load(text)
    jsonschema.validate(jobset, JOBSET_SCHEMA)
    for each in jobset["spec"]["replicatedJobs"]:
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": each["name"]}, **each["template"]}
        check_kubernetes(yaml.safe_dump(job))


def test_linters_and_schemas_accept_the_files(tmp_path):
    """Linters, and the schemas of compose, Kubernetes and JobSet, accept the files, and reject planted mistakes."""
    for script in ("node.sh", "slurm.sh"):
        assert os.access(DEPLOY / script, os.X_OK)
        assert lint("shellcheck", read(script), tmp_path) == ""
    assert "SC2086" in lint("shellcheck", read("node.sh", **{'"$code"': "$code"}), tmp_path)
    assert lint("hadolint", read("Dockerfile"), tmp_path) == ""
    assert "DL3006" in lint("hadolint", read("Dockerfile", **{":3.12-slim-bookworm": ""}), tmp_path)
    check_compose(read("compose.yaml"))
    with pytest.raises(jsonschema.ValidationError, match="comand"):
        check_compose(read("compose.yaml", command="comand"))
    check_kubernetes(read("kubernetes.yaml"))
    with pytest.raises(kubernetes_validate.ValidationError, match="completion"):
        check_kubernetes(read("kubernetes.yaml", completions="completion"))
    check_jobset(read("jobset.yaml"))
    for wrong in ({"maxRestarts": "restarts"}, {"FailJobSet": "Fail"}):
        with pytest.raises(jsonschema.ValidationError):
            check_jobset(read("jobset.yaml", **wrong))
    with pytest.raises(kubernetes_validate.ValidationError, match="parallel"):
        check_jobset(read("jobset.yaml", parallelism="parallel"))


def check_pods(job: dict[str, Any], inputs: set[str], first_host: str) -> None:
    """Assert that the specification of an indexed Job is consistent, and sets only variables that node.sh reads."""
    (container,) = job["template"]["spec"]["containers"]
    environment = {each["name"]: each["value"] for each in container["env"]}
    assert environment.keys() <= inputs
    assert environment["MASTER_ADDR"] == first_host
    assert job["completions"] == job["parallelism"] == int(environment["NNODES"])
    assert container["resources"]["limits"]["nvidia.com/gpu"] == int(environment["GPUS"])
    assert environment["OUT_DIR"].startswith(container["volumeMounts"][0]["mountPath"])


def test_everything_that_the_files_name_exists():
    """Make targets and variables, build stages, host names and mounted directories are consistent."""
    makefile = (ROOT / "Makefile").read_text()
    texts = {path.name: path.read_text() for path in DEPLOY.iterdir()}
    code = re.sub(r"#.*", "", "\n".join(texts.values())).replace('"', "").replace(",", "")
    commands = re.findall(r"(?:^ *|&& |\[|cache/pip )make ((?:[\w./-]+(?:=\S*)? ?)+)", code, re.MULTILINE)
    words = {word for command in commands for word in command.split() if not word.startswith("-")}
    targets = {word for word in words if "=" not in word}
    assert targets == {"setup", "data", ".venv/.notebooks", "jupyter", "phase3"}
    subprocess.run(["make", "--dry-run", *targets], cwd=ROOT, check=True, capture_output=True, timeout=DEADLINE)
    for name in {word.split("=")[0] for word in words if "=" in word}:
        assert re.search(rf"^{name} \?=", makefile, re.MULTILINE), name
    inputs = set(re.findall(r"\$\{([A-Z_]+):", texts["node.sh"]))

    compose = yaml.safe_load(texts["compose.yaml"])
    stages = set(re.findall(r"^FROM \S+ AS (\w+)", texts["Dockerfile"], re.MULTILINE))
    for service in compose["services"].values():
        assert service["build"]["target"] in stages and (DEPLOY / service["build"]["context"]).samefile(ROOT)
        assert service.get("environment", {}).keys() <= inputs
    assert compose["services"]["node1"]["environment"]["MASTER_ADDR"] in compose["services"]

    service, job = yaml.safe_load_all(texts["kubernetes.yaml"])
    name, subdomain = job["metadata"]["name"], service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": name}
    assert job["spec"]["template"]["spec"]["subdomain"] == subdomain
    check_pods(job["spec"], inputs, f"{name}-0.{subdomain}")
    jobset = yaml.safe_load(texts["jobset.yaml"])
    (replicated,) = jobset["spec"]["replicatedJobs"]
    host = f"{jobset['metadata']['name']}-{replicated['name']}-0-0.{jobset['spec']['network']['subdomain']}"
    check_pods(replicated["template"]["spec"], inputs, host)

    sky = yaml.safe_load(texts["skypilot.yaml"])
    assert all(f"${name}" in sky["setup"] + sky["run"] for name in sky["envs"])
    assert set(re.findall(r"([A-Z_]+)=\$", sky["run"])) | {"OUT_DIR"} <= inputs


def test_an_image_leaves_out_what_git_ignores():
    """.dockerignore contains every pattern of .gitignore, so that an image contains no run and no .venv of the host."""
    ignored = {line.strip("/").removeprefix("**/") for line in (ROOT / ".dockerignore").read_text().splitlines()}
    assert {line.strip("/") for line in (ROOT / ".gitignore").read_text().splitlines()} <= ignored


def pod_of(job: dict[str, Any], rank: int, flags: list[str]) -> tuple[list[str], dict[str, str]]:
    """Return the command of a pod of an indexed Job, and the environment that Kubernetes sets."""
    (container,) = job["spec"]["template"]["spec"]["containers"]
    environment = {each["name"]: each["value"] for each in container["env"]}
    return [*container["command"], *container["args"], *flags], {**environment, "JOB_COMPLETION_INDEX": str(rank)}


def kubernetes_node(rank: int, out: Path, flags: list[str]) -> tuple[list[str], dict[str, str]]:
    """Return the command and the environment of a pod of the Job."""
    replaced = {"/shared/run": str(out), "nanogpt-0.nanogpt": "127.0.0.1", 'value: "8"': 'value: "1"'}
    _, job = yaml.safe_load_all(read("kubernetes.yaml", **replaced))
    return pod_of(job, rank, flags)


def jobset_node(rank: int, out: Path, flags: list[str]) -> tuple[list[str], dict[str, str]]:
    """Return the command and the environment of a pod of the JobSet."""
    replaced = {"/shared/run": str(out), "value: nanogpt-node-0-0.nanogpt": "value: 127.0.0.1"}
    jobset = yaml.safe_load(read("jobset.yaml", **replaced, **{'value: "8"': 'value: "1"'}))
    return pod_of(jobset["spec"]["replicatedJobs"][0]["template"], rank, flags)


def compose_node(rank: int, out: Path, flags: list[str]) -> tuple[list[str], dict[str, str]]:
    """Return the command and the environment of a container of the compose file."""
    replaced = {"out/two-containers": str(out), "MASTER_ADDR: node0": "MASTER_ADDR: 127.0.0.1", "${GPUS:-1}": "1"}
    service = yaml.safe_load(read("compose.yaml", **replaced))["services"][f"node{rank}"]
    return [*service["command"], *flags], {name: str(value) for name, value in service["environment"].items()}


def skypilot_node(rank: int, out: Path, flags: list[str]) -> tuple[list[str], dict[str, str]]:
    """Return the command of a machine, and the environment that SkyPilot sets. The flags become a config file."""
    fields = dict(flag.removeprefix("--").split("=") for flag in flags)
    config = out.parent / "tiny.py"
    config.write_text("".join(f"{name} = {SHORT[name]!r}\n" for name in fields if name in SHORT))
    environment = {"CONFIG": str(config), "DATASET": "shakespeare_char", "SKYPILOT_NUM_NODES": "2"}
    environment |= {"SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.2", "SKYPILOT_NUM_GPUS_PER_NODE": "1"}
    command = yaml.safe_load(read("skypilot.yaml", **{"/shared/run": str(out)}))["run"]
    return ["bash", "-euc", command], {**environment, "SKYPILOT_NODE_RANK": str(rank)}


Node = Callable[[int, Path, list[str]], tuple[list[str], dict[str, str]]]


@contextlib.contextmanager
def two_nodes(build: Node, python: str, out: Path, **fields: Any) -> Iterator[list[subprocess.Popen]]:
    """Start the commands of two nodes on this machine, and kill what is left of them at the end."""
    port, nodes = find_free_port(), []
    for rank in range(2):
        words, environment = build(rank, out, make_flags(**fields))
        environment = {**os.environ, "PY": python, "MASTER_PORT": port, **environment}
        with open(out.parent / f"node{rank}.txt", "a") as file:
            nodes.append(
                subprocess.Popen(words, cwd=ROOT, env=environment, stdout=file, stderr=file, start_new_session=True)
            )
    try:
        yield nodes
    finally:
        for node in nodes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(node.pid, signal.SIGKILL)
            node.wait()


def exit_codes(nodes: list[subprocess.Popen], out: Path) -> list[int]:
    """Wait for the nodes, print what they printed, and return their exit codes."""
    codes = [node.wait(DEADLINE) for node in nodes]
    print(*(path.read_text() for path in sorted(out.parent.glob("node*.txt"))), sep="\n")
    return codes


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of the same run with the baseline in one process."""
    return train("nanoGPT", 1, tiny("nanoGPT", tmp_path_factory.mktemp("one"), **SHORT))


@pytest.mark.parametrize("build", [skypilot_node, *mark_slow(compose_node)])
def test_two_nodes_form_one_job(build, one_process, tmp_path, python):
    """The commands of two containers, or of two machines of SkyPilot, train one job with the losses of one process."""
    out = tmp_path / "run"
    with two_nodes(build, python, out, **SHORT) as nodes:
        assert exit_codes(nodes, out) == [0, 0]
    assert json.loads((out / "env.json").read_text())["world_size"] == 2
    assert gap(losses(out), one_process) < 1e-5


@pytest.mark.parametrize("build", [kubernetes_node, *mark_slow(jobset_node)])
def test_two_pods_form_one_job_and_resume_after_an_eviction(build, tmp_path, python):
    """If Kubernetes stops one of two pods, both exit with 75, so that the Job starts them again. Then they resume."""
    out = tmp_path / "run"
    with two_nodes(build, python, out, **LONG) as nodes:
        await_steps(out, 2, nodes[0])
        nodes[1].send_signal(signal.SIGTERM)  # to the first process of the pod only, as the kubelet does
        assert exit_codes(nodes, out) == [75, 75]
    (checkpoint,) = (out / "checkpoints").glob("step-*")
    steps = int(checkpoint.name.removeprefix("step-"))
    assert json.loads((out / "env.json").read_text())["world_size"] == 2
    with two_nodes(build, python, out, **{**LONG, "max_iters": steps + 2}) as nodes:
        assert exit_codes(nodes, out) == [0, 0]
    assert list(losses(out)) == list(range(steps + 2))
    assert f"resuming after {steps} updates" in (tmp_path / "node0.txt").read_text()
