"""Copy a phase into a directory of its own, with the part of the core that it uses.

    make copy PHASE=phase3 TO=../my-trainer
    make copy PHASE=phase3 TO=../my-trainer WITH=operate,measure      # also what watches and measures runs

The directory contains the programs and configurations of the phase, the modules that they import, the programs that
sample, export and verify, the scripts that prepare its datasets, the prepared datasets up to 64 MiB, tests and a
README. Nothing in it needs this repository.
"""

import ast
import json
import re
import shutil
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path
from shlex import quote

from bench.phases import ROOT, find_package
from nanoGPT.errors import ConfigError
from nanoGPT.files import DATA
from nanoGPT.job.command import command_line, report_errors
from workshop.imports import find_modules, find_needed_modules

TEMPLATES = Path(__file__).parent / "copied"
MAX_DATASET_BYTES = 64 << 20
IGNORED = ["out/", "build/", "__pycache__/", "*.egg-info/", ".venv/", "nanoGPT/data/*/*.bin", "nanoGPT/data/*/meta.*"]
IGNORED.append("nanoGPT/data/.downloads/")
# Modules of a phase: its programs, and those that a flag loads. The modules that they import are copied, too.
PHASE_MODULES = ("train", "evaluate", "minimal", "naive", "backends", "muon")
CORE_MODULES = ["nanoGPT.sample", "nanoGPT.export", "nanoGPT.checkpoint.verify"]
CORE_MODULES += [f"nanoGPT.options.{name}" for name in ("llama", "muon", "sampling")]
CORE_MODULES += ["nanoGPT.prepare.text", "nanoGPT.prepare.own_text"]
ADDITIONS = ("operate", "measure", "phase2_triton")  # phase2_triton: for --kernels in another phase
LESSONS = {
    "nanoGPT": "`nanoGPT/distributed/ddp.py` averages the gradients with DDP.",
    "phase1_zero1": "`phase1_zero1/naive.py` is ZeRO-1 in its simplest form, `phase1_zero1/zero1.py` the real one.",
    "phase2_triton": "`phase2_triton/kernels/` has the Triton kernels.",
    "phase3_fsdp": "`phase3_fsdp/minimal.py` is FSDP in one file, `phase3_fsdp/fsdp.py` has all options.",
}
TRAIN = r"make (?:baseline|phase\d)(?: GPUS=(?P<ranks>\d+))?(?: CONFIG=(?P<config>\S+))?"
NO_CHOICE = "leave it out: what this trainer shards is not an option"
# Sentences that name a target of make, and what they say in a copy.
SENTENCES = {
    "`make data DATASET={quote(name)}`": "`python -m nanoGPT.data.{name}.prepare`",
    "make data DATASET={quote(folder.name)}": "python -m nanoGPT.data.{folder.name}.prepare",
    "`make data INPUT=FILE`": "`python -m nanoGPT.prepare.own_text --input=FILE`",
    "`make data`": "`python -m nanoGPT.data.shakespeare.prepare`",
    'make baseline DEVICE=cpu ARGS="--decay_lr=False --log_interval=1"': "train.py --decay_lr=False --log_interval=1",
    "\nIMPLEMENTATION.md lists what `train.py` adds.": "",
    ".venv/bin/": "",
    ', "\n                "or evaluate the model on several ranks with `make evaluate`': "",
    "leave it out: make phase3 always shards the model, and make baseline uses DDP": NO_CHOICE,
    "leave it out: make phase1 always shards the optimizer, and make baseline uses DDP": NO_CHOICE,
    "use it with `make evaluate`, which solves problems": "leave it out: it is not a flag of training",
    "such as operate,measure,my_metrics;": "such as my_metrics;",
    ", as operate/deploy/slurm.sh does,": "",
    "\n    (`tests/phase3/test_activation_checkpointing.py`)": "",
    "--out_dir=../out/my-run": "--out_dir=out/my-run",
    "`make phase3`": "the trainer of FSDP",
    " (`make diff FROM=phase1_zero1/naive.py TO=phase1_zero1/zero1.py` compares the functions of both versions)": "",
}


def find_requirements(paths: list[Path]) -> list[str]:
    """Return the requirements of this project, such as torch>=2.11, that these source files import."""
    installed, packages = packages_distributions(), set()
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                packages |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                packages.add(node.module.split(".")[0])
    names = {distribution for package in packages for distribution in installed.get(package, [])}
    requirements = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    return [line for line in requirements if (re.match(r"[\w-]+", line) or [""])[0] in names]


def rewrite(text: str) -> str:
    """Return a source text whose sentences name the commands of a copy instead of targets of make."""
    for sentence, replacement in SENTENCES.items():
        text = text.replace(sentence, replacement)

    def name_command(match: re.Match[str]) -> str:
        launcher = f"torchrun --standalone --nproc_per_node={match['ranks']}" if match["ranks"] else "python"
        return f"{launcher} train.py" + (f" {match['config']}" if match["config"] else "")

    text = re.sub(TRAIN, name_command, text)
    # The marks of exercises and of the diffs mean nothing here.
    text = re.sub(r"^ *# (END )?SOLUTION\n|  # \[\w+:\w+\]$", "", text, flags=re.MULTILINE)
    return re.sub(r"# \[\w+:\w+\] ", "# ", text)


def list_modules(package: str, datasets: list[str], packages: list[str]) -> dict[str, Path]:
    """Return the modules that belong to the copy of a phase, by name.

    Args:
        package: of the phase.
        datasets: whose scripts belong to the copy.
        packages: further packages to copy.
    """
    modules = find_modules()
    names = [f"{package}.{name}" for name in PHASE_MODULES]
    names += [*CORE_MODULES, *(f"nanoGPT.data.{name}.prepare" for name in datasets)]
    if packages:
        names += [name for name in modules if name.split(".")[0] in packages or name == f"{package}.costs"]
    return find_needed_modules(names)


def copy_modules(package: str, to: Path, datasets: list[str], packages: list[str]) -> list[Path]:
    """Copy the modules, and return their files. The phase's train.py and evaluate.py go to the top of the directory."""
    needed = list_modules(package, datasets, packages)
    config = min((to / "config").glob("*gpt2*.py"))
    for name, path in needed.items():
        is_top_level = name in (f"{package}.train", f"{package}.evaluate")
        target = to / path.name if is_top_level else to / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        text = rewrite(path.read_text()).replace(f"from {package}.train import", "from train import")
        text = text.replace("config/train_gpt2.py", f"config/{config.name}")
        target.write_text(text)
        for table in path.parent.glob("*.json"):  # tile sizes of the kernels
            shutil.copyfile(table, target.parent / table.name)
    return list(needed.values())


def copy_configs(package: str, to: Path) -> list[str]:
    """Copy the configurations of a phase, and return the datasets that they and the defaults name."""
    (to / "config").mkdir()
    datasets = {"shakespeare", "shakespeare_char"}
    for path in (ROOT / package / "config").glob("*.py"):
        (to / "config" / path.name).write_text(text := rewrite(path.read_text()))
        datasets |= set(re.findall(r'^dataset = "(\w+)"', text, re.MULTILINE))
    return sorted(datasets)


def copy_datasets(to: Path, datasets: list[str]) -> None:
    """Copy the prepared datasets of at most MAX_DATASET_BYTES."""
    for folder in (DATA / name for name in datasets):
        files = [path for path in folder.iterdir() if path.suffix in (".bin", ".json")]
        if sum(path.stat().st_size for path in files) <= MAX_DATASET_BYTES:
            for path in files:
                shutil.copyfile(path, to / "nanoGPT" / "data" / folder.name / path.name)


def write_project(package: str, to: Path, copied: list[Path]) -> None:
    """Write requirements.txt, pyproject.toml, README.md, OBSERVERS.md, LICENSE, .gitignore and the tests."""
    web = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["web"]
    copied_packages = sorted({path.relative_to(ROOT).parts[0] for path in copied})
    (to / "requirements.txt").write_text("".join(f"{line}\n" for line in find_requirements(copied)))
    name = re.sub(r"[^A-Za-z0-9]+", "-", to.resolve().name).strip("-") or "trainer"  # as pip requires it
    (to / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["setuptools>=77"]\nbuild-backend = "setuptools.build_meta"\n\n'
        f'[project]\nname = "{name}"\nversion = "0.1.0"\nrequires-python = ">=3.11"\n'
        f'dynamic = ["dependencies"]\n\n[project.optional-dependencies]\nweb = {json.dumps(web)}\n\n'
        '[tool.setuptools.dynamic]\ndependencies = {file = "requirements.txt"}\n\n'
        f"[tool.setuptools.packages.find]\ninclude = {[f'{each}*' for each in copied_packages]}\nnamespaces = false\n"
    )
    title = ast.get_docstring(ast.parse((to / "train.py").read_text())) or ""
    config = min((to / "config").glob("*gpt2*.py"))
    (dataset,) = re.findall(r'^dataset = "(\w+)"', config.read_text(), re.MULTILINE)
    values = {"title": title.split(":")[0], "config": f"config/{config.name}", "dataset": dataset}
    readme = (TEMPLATES / "README.md").read_text().format(**values, lesson=LESSONS[package])
    (to / "README.md").write_text(readme)
    shutil.copyfile(ROOT / "LICENSE", to / "LICENSE")
    (to / ".gitignore").write_text("\n".join(IGNORED) + "\n")
    guide = (ROOT / "docs" / "observers.md").read_text().replace("phase3_fsdp/train.py", "train.py")
    if not (to / "operate").is_dir():
        guide = guide.replace("--observers=operate,measure,my_metrics", "--observers=my_metrics")
    (to / "OBSERVERS.md").write_text(rewrite(guide.replace("from nanoGPT.train import", "from train import")))
    (to / "tests").mkdir()
    shutil.copyfile(TEMPLATES / "test_training.py", to / "tests" / "test_training.py")


def create_new_directory(to: Path) -> Path:
    """Create a directory if it does not exist, and return it.

    Raises:
        ConfigError: it exists and is not empty.
    """
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise ConfigError(f"TO={to} exists and is not an empty directory: use a new directory")
    to.mkdir(parents=True, exist_ok=True)
    return to


def copy_phase(phase: str, to: Path, packages: tuple[str, ...] = ()) -> None:
    """Copy a phase into a new directory.

    Args:
        phase: baseline, phase1, phase2 or phase3.
        to: a directory that does not exist yet or is empty.
        packages: further packages to copy: operate, measure, phase2_triton.

    Raises:
        ConfigError: the phase or a package is unknown, or the directory cannot be used.
    """
    package = find_package(phase)
    if unknown := sorted({*packages} - {*ADDITIONS}):
        raise ConfigError(f"WITH={','.join(packages)} names {unknown[0]}: use {', '.join(ADDITIONS)}")
    create_new_directory(to)
    datasets = copy_configs(package, to)
    copied = copy_modules(package, to, datasets, list(packages))
    copy_datasets(to, datasets)
    write_project(package, to, copied)
    command = f"cd {quote(str(to))} && python train.py"
    print(f"copied {phase} with {len(copied)} modules into {to}: read its README.md, or run {command}")


def main(phase: str, to: str, packages: str = "") -> None:
    """Copy a phase into a directory of its own.

    Args:
        phase: baseline, phase1, phase2 or phase3.
        to: a new directory.
        packages: further packages to copy: operate,measure,phase2_triton.
    """
    if not to:
        raise ConfigError("TO= is empty: use a new directory, such as TO=../my-trainer")
    copy_phase(phase, Path(to), tuple(filter(None, packages.split(","))))


if __name__ == "__main__":
    with report_errors():
        command_line(main, sys.argv[1:])
