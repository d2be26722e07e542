"""The directory of a campaign: one JSON file per part, so that a kill loses only the part that was running.

DIR/campaign.json       the GPU, the versions and the code that all calls share
DIR/parts/              STAGE.NAME.json: state, seconds, and the result, the traceback or the reason
DIR/logs/               STAGE.NAME.log: what the part printed
DIR/configs.json        tile sizes, as far as they are tuned
DIR/campaign.tar.gz     all results in one file, written at the end of every call
"""

import contextlib
import fcntl
import io
import json
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nanoGPT.errors import ConfigError
from nanoGPT.files import write_atomically

MAX_INTERRUPTIONS = 2  # a part that is interrupted this often has failed
ARCHIVE = "campaign.tar.gz"
ARCHIVED = ("campaign.json", "configs.json", "baseline.json", "parts", "logs", "profile-*")


@dataclass(frozen=True)
class Part:
    """One measurement or check of the campaign; a call runs all of a part or nothing of it.

    Attributes:
        stage: the stage that it belongs to.
        name: unique within the stage.
        function: `module:function`; it is called with the Settings and the arguments, and returns a JSON object.
        arguments: JSON values.
        estimate_seconds: a part that does not fit into the remaining time waits for the next call.
    """

    stage: str
    name: str
    function: str
    arguments: tuple[Any, ...] = ()
    estimate_seconds: float = 30.0

    @property
    def key(self) -> str:
        return f"{self.stage}.{self.name}"


class CampaignFolder:
    """Reads and writes the state of each part."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()

    def create(self, settings: dict[str, Any]) -> None:
        """Create the directory, or check that it contains a campaign with the same settings.

        Raises:
            ConfigError: it contains another campaign, or other files.
        """
        file = self.path / "campaign.json"
        if file.exists():
            previous = self.read_settings()
            changed = [
                f"{name} {previous.get(name)}, not {value}"
                for name, value in settings.items()
                if previous.get(name) != value
            ]
            if changed:
                raise ConfigError(f"{self.path} contains a campaign with {', '.join(changed)}: use another --to")
            return
        if self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            raise ConfigError(f"{self.path} exists and does not contain a campaign: use a new directory for --to")
        for name in ("parts", "logs"):
            (self.path / name).mkdir(parents=True)
        write_atomically(file, (json.dumps(settings) + "\n").encode())

    def read_settings(self) -> dict[str, Any]:
        """Return the settings of the campaign.

        Raises:
            ConfigError: the directory contains no campaign.
        """
        try:
            settings: dict[str, Any] = json.loads((self.path / "campaign.json").read_text())
        except (OSError, ValueError):
            raise ConfigError(
                f"{self.path} does not contain a campaign: run python -m bench.campaign --to first"
            ) from None
        return settings

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the directory for one process.

        Raises:
            ConfigError: another process holds it.
        """
        with open(self.path / "campaign.json") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(f"another campaign is writing into {self.path}: wait, or use another --to") from None
            yield

    def read(self, part: Part) -> dict[str, Any]:
        """Return the record of a part; of one that has not started, with the state `pending`."""
        path = self.path / "parts" / f"{part.key}.json"
        try:
            record: dict[str, Any] = json.loads(path.read_text())
            return record
        except FileNotFoundError:
            return {"state": "pending", "interruptions": 0}
        except ValueError:
            raise ConfigError(f"{path} is damaged: delete it, and run the campaign again") from None

    def write(self, part: Part, state: str, **fields: Any) -> None:
        """Write the record of a part. The states are running, done, failed and skipped."""
        record = {**asdict(part), "state": state, "interruptions": self.read(part)["interruptions"], **fields}
        path = self.path / "parts" / f"{part.key}.json"
        write_atomically(path, (json.dumps(record, indent=1) + "\n").encode())

    def forget(self, part: Part) -> None:
        """Delete the record of a part, so that it runs again."""
        (self.path / "parts" / f"{part.key}.json").unlink(missing_ok=True)

    def record_interruption(self, part: Part, reason: str) -> None:
        """Make a part pending again that was stopped while it ran. After MAX_INTERRUPTIONS it has failed."""
        count = self.read(part)["interruptions"] + 1
        state = "failed" if count >= MAX_INTERRUPTIONS else "pending"
        self.write(part, state, interruptions=count, reason=f"{reason}; interrupted {count} times")

    def write_archive(self) -> Path:
        """Write all results into one file, which `--report` reads, and return its path."""
        path = self.path / ARCHIVE
        content = io.BytesIO()
        with tarfile.open(fileobj=content, mode="w:gz") as archive:
            for member in sorted(member for pattern in ARCHIVED for member in self.path.glob(pattern)):
                archive.add(member, member.name)
        write_atomically(path, content.getvalue())
        return path

    def log_path(self, part: Part) -> Path:
        return self.path / "logs" / f"{part.key}.log"


def open_campaign(source: Path) -> CampaignFolder:
    """Return the campaign in a directory, or in an archive, which is unpacked into a temporary directory.

    Raises:
        ConfigError: the file is no archive of a campaign.
    """
    if not source.is_file():
        return CampaignFolder(source)
    folder = Path(tempfile.mkdtemp(prefix="campaign-"))
    try:
        with tarfile.open(source) as archive:
            archive.extractall(folder, filter="data")
    except (tarfile.TarError, OSError, EOFError) as error:
        raise ConfigError(f"--from={source} is not a complete {ARCHIVE} ({error}): copy it again") from None
    return CampaignFolder(folder)
