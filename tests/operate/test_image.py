"""`deploy/Dockerfile` and `deploy/compose.yaml` without a container engine: their commands run in a directory."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers.image import Image, copy_context, read_instructions
from tests.helpers.programs import DEADLINE, find_free_port, make_flags
from tests.helpers.training import ROOT, TINY

DEPLOY = ROOT / "deploy"
SHORT = {**TINY, "max_iters": 3, "eval_interval": 3, "gradient_accumulation_steps": 2, "device": "cpu"}


def read_services() -> dict[str, Any]:
    """Return the services of the compose file. The variables with a default have the default, except GPUS=2."""
    text = (DEPLOY / "compose.yaml").read_text().replace("${GPUS:-1}", "2")
    services: dict[str, Any] = yaml.safe_load(re.sub(r"\$\{\w+:-(\w+)\}", r"\1", text))["services"]
    return services


def test_a_dockerfile_is_read_as_instructions(tmp_path):
    """Comments are left out, and continued lines are joined. The context has no file that .dockerignore names."""
    instructions = read_instructions((DEPLOY / "Dockerfile").read_text())
    assert [name for name, _ in instructions][:4] == ["FROM", "SHELL", "RUN", "ARG"]
    assert instructions[2][1].split("&&")[1].split()[-2:] == ["g++", "make"]
    for path in (
        "a/__pycache__/b.pyc",
        "out/run",
        "nanoGPT/data/x/train.bin",
        "nanoGPT/data/x/prepare.py",
        "a/out/kept",
    ):
        (tmp_path / "from" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "from" / path).touch()
    shutil.copy(ROOT / ".dockerignore", tmp_path / "from")
    copy_context(tmp_path / "from", tmp_path / "to")
    copied = {str(path.relative_to(tmp_path / "to")) for path in (tmp_path / "to").rglob("*") if path.is_file()}
    assert copied == {".dockerignore", "a/out/kept", "nanoGPT/data/x/prepare.py"}


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Image]:
    """Both stages of the Dockerfile, with the CPU build of PyTorch, or with the one that TORCH selects, as for make."""
    folder = tmp_path_factory.mktemp("image")
    image = Image(folder / "work", {"TORCH": os.environ.get("TORCH", "cpu")})
    try:
        image.build(DEPLOY / "Dockerfile", ROOT, "workshop")
        yield image
    finally:
        shutil.rmtree(folder)  # several GB


def run_until(image: Image, words: list[str], pattern: str) -> str:
    """Run a program in the image until its output matches a pattern, stop it, and return the match."""
    output = image.folder.with_name("output.txt")
    with open(output, "w") as file:
        environment = image.make_environment()
        program = subprocess.Popen(
            words, cwd=image.folder, env=environment, stdout=file, stderr=file, start_new_session=True
        )
    deadline = time.monotonic() + DEADLINE
    try:
        while not (match := re.search(pattern, output.read_text())):
            assert program.poll() is None and time.monotonic() < deadline, output.read_text()
            time.sleep(0.1)
        return match[0]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGKILL)
        program.wait()


@pytest.mark.slow
def test_the_image_is_built_and_its_services_start(image):
    """The RUN lines of both stages succeed. Then the shell, the notebooks, a run on two ranks, and two nodes start."""
    assert image.packages == ["g++", "make"] and all(map(shutil.which, image.packages))
    services = read_services()
    shell = image.run([services["shell"]["command"]], stdin="make help\n.venv/bin/python -c 'import torch'\n")
    assert shell.returncode == 0 and "phase3" in shell.stdout, shell.stdout
    assert services["workshop"]["command"] == image.command
    assert "/lab?token=" in run_until(image, image.command, r"http://\S+")
    flags = make_flags(**SHORT)
    trained = image.run([*services["train"]["command"], f"ARGS={' '.join(flags)} --out_dir=out/train"])
    assert trained.returncode == 0 and "A sample from" in trained.stdout, trained.stdout
    check_two_nodes(image, services, flags)


def check_two_nodes(image: Image, services: dict[str, Any], flags: list[str]) -> None:
    """Assert that the services node0 and node1 train one job. The names of the services become this machine."""
    port, nodes = find_free_port(), []
    for name in ("node0", "node1"):
        given = {key: str(value) for key, value in services[name]["environment"].items()}
        environment = image.make_environment(**{**given, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GPUS": "1"})
        nodes.append(subprocess.Popen([*services[name]["command"], *flags], cwd=image.folder, env=environment))
    try:
        assert [node.wait(DEADLINE) for node in nodes] == [0, 0]
    finally:
        for node in nodes:
            node.kill()
    out = image.folder / Path(services["node0"]["environment"]["OUT_DIR"])
    assert '"world_size": 2' in (out / "env.json").read_text()
