"""Measure everything that needs a GPU, in pieces of a few minutes: `make gpu-campaign`.

    python -m bench.campaign --minutes=9 --to=DIR               # run the next parts; call it again to continue
    python -m bench.campaign --to=DIR --stages=kernels,times    # only these stages
    python -m bench.campaign --to=DIR --retry                   # first repeat the parts that failed, were skipped, ...
    python -m bench.campaign --to=DIR --again=kernels.loss      # ... or only this part
    python -m bench.campaign --dry_run --to=DIR                 # without a GPU: every part with tiny shapes
    python -m bench.campaign --report --from=DIR                # write the results into bench/results and the documents

The parts run in order of worth (`parts.py`). Each writes its result when it ends, so a kill loses one part. At its end
a call writes all results into one file, DIR/campaign.tar.gz, which --from also accepts. The command needs torch, triton
and numpy. Parts that train also need the packages of pyproject.toml. On a machine without a
network, name a directory that contains their wheels with --wheels. This command does not use tyro, because tyro may be
one of the packages that only the wheels provide.
"""

import argparse
import importlib.metadata
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from bench.campaign.folder import CampaignFolder, Part, open_campaign
from bench.campaign.identity import describe_campaign
from bench.campaign.parts import list_parts
from bench.campaign.scheduler import Worker, build_environment, find_pending, find_problems, run_parts
from nanoGPT.cli.command_line import expand_home
from nanoGPT.cli.program import report_errors
from nanoGPT.errors import ConfigError, did_you_mean


class Parser(argparse.ArgumentParser):
    """A parser that reports an error in one sentence."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; --help lists all flags")


def parse_arguments(words: list[str]) -> argparse.Namespace:
    """Parse the command line.

    Raises:
        ConfigError: a flag is unknown or missing, or a value is invalid.
    """
    parser = Parser("python -m bench.campaign", allow_abbrev=False, description="Measure everything that needs a GPU.")
    parser.add_argument("--minutes", type=float, default=9.0, help="time of this call (default: 9)")
    parser.add_argument("--to", type=Path, help="directory of the campaign; it is created")
    parser.add_argument("--dry_run", action="store_true", help="run every part on the CPU with tiny shapes")
    parser.add_argument("--stages", help="run only these stages, such as kernels,times")
    parser.add_argument("--retry", action="store_true", help="repeat parts that failed, were skipped or found problems")
    parser.add_argument("--again", help="repeat these parts, such as kernels.loss,times.loss")
    parser.add_argument("--wheels", type=Path, help="directory of wheels to use, for packages that are not installed")
    parser.add_argument("--nanogpt", type=Path, help="checkout of nanoGPT to run next to the baseline")
    parser.add_argument("--commit", help="git commit of this code, if this machine has no git")
    parser.add_argument("--report", action="store_true", help="write the results of --from into bench/results")
    parser.add_argument("--from", type=Path, dest="source", help="directory or campaign.tar.gz to report")
    options = parser.parse_args(list(map(expand_home, words)))
    needed, other = ("source", "to") if options.report else ("to", "source")
    names = {"source": "--from", "to": "--to"}
    if getattr(options, needed) is None or getattr(options, other) is not None:
        use = "--report --from=DIR" if options.report else "--to=DIR"
        raise ConfigError(f"write {use}, and leave out {names[other]}")
    if not options.minutes > 0:
        raise ConfigError(f"--minutes={options.minutes:g} is out of range: use a number above 0")
    if options.nanogpt and not (options.nanogpt / "train.py").is_file():
        raise ConfigError(f"--nanogpt={options.nanogpt} is not a checkout of nanoGPT: it has no train.py")
    return options


def select_parts(parts: list[Part], stages: str | None) -> list[Part]:
    """Return the parts of the stages in a comma-separated list; all parts for None.

    Raises:
        ConfigError: there is no such stage.
    """
    if stages is None:
        return parts
    known = list(dict.fromkeys(part.stage for part in parts))
    for stage in stages.split(","):
        if stage not in known:
            raise ConfigError(f"--stages={stages}: there is no stage {stage!r}, use some of {','.join(known)}")
    return [part for part in parts if part.stage in stages.split(",")]


def forget_parts(parts: list[Part], folder: CampaignFolder, retry: bool, again: str | None) -> None:
    """Delete the records of the parts that --retry and --again name, so that they run again.

    Raises:
        ConfigError: there is no such part.
    """
    named = again.split(",") if again is not None else []
    keys = [part.key for part in parts]
    for name in named:
        if name not in keys:
            raise ConfigError(f"--again={again}: there is no part {name!r}{did_you_mean(name, keys)}")
    for part in parts:
        record = folder.read(part)
        has_failed = record["state"] in ("failed", "skipped") or find_problems(record)
        if part.key in named or (retry and has_failed):
            folder.forget(part)


def is_installed(wheel: Path) -> bool:
    """Return whether the distribution of a wheel is installed already, in any version."""
    try:
        importlib.metadata.distribution(wheel.name.partition("-")[0])
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def unpack_wheels(wheels: Path, site: Path) -> None:
    """Unpack wheels into a directory from which Python can import them.

    A wheel of an installed package is left out: it would replace, for example, the torch that uses this GPU.

    Raises:
        ConfigError: the directory contains no wheels.
    """
    files = sorted(wheels.glob("*.whl"))
    if not files:
        raise ConfigError(f"--wheels={wheels} contains no wheels: fill it with pip download")
    shutil.rmtree(site, ignore_errors=True)
    site.mkdir()
    for file in files:
        if not is_installed(file):
            shutil.unpack_archive(file, site, "zip")


def run_campaign(options: argparse.Namespace) -> None:
    """Run the parts that fit into the minutes, and print what is left.

    Raises:
        ConfigError: there is no GPU, or the directory cannot be used.
    """
    parts = select_parts(list_parts(options.dry_run), options.stages)
    folder = CampaignFolder(options.to)
    folder.create(describe_campaign(options.dry_run))
    with folder.lock():
        forget_parts(parts, folder, options.retry, options.again)
        site = folder.path / "site"
        if options.wheels:
            unpack_wheels(options.wheels, site)
        environment = build_environment(options.dry_run, site if site.exists() else None)
        nanogpt = str(options.nanogpt.resolve()) if options.nanogpt else None
        settings = {"folder": str(folder.path), "dry_run": options.dry_run, "nanogpt": nanogpt}
        settings["commit"] = options.commit
        try:
            run_parts(parts, folder, lambda: Worker(settings, environment), 60 * options.minutes)
        finally:
            archive = folder.write_archive()
        print(f"all results so far are in {archive}")
        print_summary(parts, folder, [flag for flag in ("--retry", "--again") if getattr(options, flag[2:])])


def print_summary(parts: Sequence[Part], folder: CampaignFolder, repeating_flags: Sequence[str]) -> None:
    """Print the parts with problems, the number of parts that are left, and what to run next.

    Args:
        repeating_flags: flags of this call that would repeat the same parts again.
    """
    records = {part.key: folder.read(part) for part in parts}
    failed = [key for key, record in records.items() if record["state"] == "failed"]
    skipped = [key for key, record in records.items() if record["state"] == "skipped"]
    wrong = [key for key, record in records.items() if find_problems(record)]
    for label, keys in (("failed", failed), ("skipped", skipped), ("with problems", wrong)):
        if keys:
            print(f"{len(keys)} parts {label}: {', '.join(keys)}")
    if failed or skipped or wrong:
        print(f"the reasons are in {folder.path / 'parts'}; --retry repeats these parts")
    left = find_pending(parts, folder)
    if not left:
        print(f"nothing is left of {len(parts)} parts; write the results with --report --from={folder.path}")
        return
    stages = ", ".join(dict.fromkeys(part.stage for part in left))
    without = f" without {' and '.join(repeating_flags)}" if repeating_flags else ""
    print(f"{len(left)} of {len(parts)} parts are left ({stages}): run the same command again{without}")


def main(words: list[str]) -> None:
    """Run or report a campaign."""
    options = parse_arguments(words)
    if options.report:
        from bench.campaign.report import write_report

        write_report(open_campaign(options.source))
    else:
        run_campaign(options)


if __name__ == "__main__":
    with report_errors():
        main(sys.argv[1:])
