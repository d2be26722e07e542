"""Execute a Dockerfile without a container engine: in a directory, with the instructions that this repository uses.

COPY copies the files that .dockerignore leaves in. RUN runs in the shell of the image, in the directory that stands for
WORKDIR, with the variables of ARG and ENV, a new home directory, and the variables with which this machine reaches its
packages. The base image and `apt-get` are left out: they would change this machine. A cache mount is an option of the
engine only.
"""

import fnmatch
import json
import os
import re
import shlex
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

KEPT = re.compile(r"PIP_|UV_|SSL_|REQUESTS_|CURL_|.*_proxy$|.*_PROXY$|LANG$|TMPDIR$")
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
CONTINUATION = re.compile(r"\\\n")


def read_instructions(text: str) -> list[tuple[str, str]]:
    """Return the instructions of a Dockerfile, each as its name and its arguments."""
    lines = CONTINUATION.sub(" ", re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE)).splitlines()
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in lines if line.strip())]


def copy_context(source: Path, target: Path) -> None:
    """Copy a build context without the paths that match .dockerignore."""
    patterns = [line for line in (source / ".dockerignore").read_text().splitlines() if line and line[0] != "#"]

    def find_ignored(folder: str, names: list[str]) -> set[str]:
        paths = {name: os.path.relpath(os.path.join(folder, name), source) for name in names}
        anywhere = [pattern.removeprefix("**/") for pattern in patterns if pattern.startswith("**/")]
        return {
            name
            for name, path in paths.items()
            if any(fnmatch.fnmatch(name, pattern) for pattern in anywhere)
            or any(path.count("/") == p.count("/") and fnmatch.fnmatch(path, p) for p in patterns)
        }

    shutil.copytree(source, target, symlinks=True, ignore=find_ignored, dirs_exist_ok=True)


@dataclass
class Image:
    """The result of the stages of a Dockerfile, in a directory that stands for the working directory of the image.

    Attributes:
        folder: the directory.
        arguments: of `docker build --build-arg`.
        shell: the words that start a command.
        environment: the variables of ENV.
        command: the words of the last CMD.
        packages: the Debian packages that the image installs.
    """

    folder: Path
    arguments: dict[str, str]
    shell: list[str] = field(default_factory=lambda: ["/bin/sh", "-c"])
    environment: dict[str, str] = field(default_factory=dict)
    command: list[str] = field(default_factory=list)
    packages: list[str] = field(default_factory=list)

    def make_environment(self, **more: str) -> dict[str, str]:
        """Return the environment of a process in the image."""
        home = self.folder.with_name("home")
        home.mkdir(exist_ok=True)
        kept = {name: value for name, value in os.environ.items() if KEPT.match(name)}
        python = str(Path(shutil.which("python3") or "").parent)  # that of the base image
        return {**kept, "HOME": str(home), "PATH": f"{python}:{SYSTEM_PATH}", **self.environment, **more}

    def build(self, dockerfile: Path, context: Path, target: str) -> None:
        """Execute the stages up to a target, each on the result of the one before it."""
        declared: dict[str, str] = {}
        stage = ""
        for name, rest in read_instructions(dockerfile.read_text()):
            if name == "FROM":
                if stage == target:
                    return
                base, _, new_stage = rest.partition(" AS ")
                assert not stage or base == stage, f"{rest} does not continue {stage}"
                stage, declared = new_stage, {}
            elif name == "ARG":
                variable, _, default = rest.partition("=")
                declared[variable] = self.arguments.get(variable, default)
            elif name == "ENV":
                self.environment |= dict(word.split("=", 1) for word in shlex.split(rest))
            elif name == "SHELL":
                self.shell = json.loads(rest)
            elif name == "CMD":
                self.command = json.loads(rest)
            elif name == "WORKDIR":
                self.folder.mkdir(parents=True, exist_ok=True)
            elif name == "COPY":
                assert rest == ". .", rest
                copy_context(context, self.folder)
            else:
                assert name == "RUN", name
                self._run(re.sub(r"--mount=\S+\s+", "", rest).strip(), declared)
        assert stage == target, f"{dockerfile} has no stage {target}"

    def _run(self, command: str, declared: dict[str, str]) -> None:
        """Execute a RUN instruction; of one that calls apt-get, record the packages only."""
        if command.startswith("apt-get"):
            (words,) = re.findall(r"apt-get install ([^&]*)", command)
            self.packages += [word for word in words.split() if not word.startswith("-")]
            return
        done = self.run([*self.shell, command], **declared)
        assert done.returncode == 0, f"RUN {command}\n{done.stdout}"

    def run(
        self, words: list[str], stdin: str = "", timeout: float = 1800, **more: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a program in the image until it exits. Standard error is part of the output."""
        return subprocess.run(
            words,
            cwd=self.folder,
            env=self.make_environment(**more),
            input=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
        )
