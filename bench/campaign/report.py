"""Write the results of a campaign into bench/results, and then the tables and plots of the documents."""

from pathlib import Path
from typing import Any

from bench.campaign.folder import CampaignFolder
from bench.campaign.parts import KERNELS, list_parts
from bench.campaign.tiles import find_correct_kernels
from bench.tables.records import RESULTS, write_result_of
from nanoGPT.errors import ConfigError
from nanoGPT.files import PACKAGE

COMMAND = "python -m bench.campaign"
CONFIG_FILE = "phase2_triton/kernels/configs.json"
TUNED_CONTENDER = "ours (tuned tile sizes)"


def write_report(folder: CampaignFolder) -> None:
    """Write the result files, the tables and the plots, and print what is left to do by hand.

    The results of a dry run go into the directory of the campaign, because they measure nothing.

    Raises:
        ConfigError: the directory contains no campaign, or its first part has not run.
    """
    is_dry = folder.read_settings()["dry_run"]
    target = folder.path / "report" if is_dry else RESULTS
    target.mkdir(exist_ok=True)
    records = [folder.read(part) for part in list_parts()]
    records = [record for record in records if record["state"] not in ("pending", "running")]
    correct = find_correct_kernels(folder, KERNELS)
    paths = write_results(records, target, is_dry, correct)
    for path in paths:
        print(f"wrote {path}")
    if is_dry:
        print("this was a dry run: the documents are unchanged")
        return
    from bench.kernels import plots
    from bench.tables import tables

    plots.main(paths)
    tables.main()
    if (folder.path / "configs.json").exists():
        print(advise_on_tuned_table(folder.path / "configs.json", correct))


def advise_on_tuned_table(table: Path, correct: list[str]) -> str:
    """Return what to do with the tuned tile sizes: use them only if every kernel was correct with them."""
    if unchecked := [kernel for kernel in KERNELS if kernel not in correct]:
        return (
            f"do not use the tuned tile sizes {table}: with them, these kernels are wrong or were not checked: "
            f"{', '.join(unchecked)}"
        )
    return (
        f"to use the tuned tile sizes, copy {table} to {PACKAGE.parent / CONFIG_FILE}, and "
        "run `python -m bench.kernels.resources --write`; then measure again, because `ours` in the tables has the "
        "tile sizes that were committed"
    )


def write_results(records: list[dict[str, Any]], target: Path, is_dry: bool, correct: list[str]) -> list[Path]:
    """Write one result file for the kernels, one for the throughput, and one for everything else.

    The times with tuned tile sizes are those of a separate contender.

    Args:
        records: of all parts that have started, in order.
        target: directory of the files.
        is_dry: the campaign was a dry run.
        correct: kernels that are correct with the tuned tile sizes.

    Returns:
        The paths of the files.

    Raises:
        ConfigError: the part that describes the machine has not run.
    """
    results = {(record["stage"], record["name"]): record.get("result") for record in records}
    machine = results.get(("machine", "versions"))
    if machine is None:
        raise ConfigError("the campaign has not described its machine: run it again with --retry")
    origin, settings = machine["origin"], {"command": COMMAND, "interpreted": is_dry}

    def select(stage: str) -> dict[str, Any]:
        return {name: result for (each, name), result in results.items() if each == stage and result is not None}

    paths = []
    kernels, tuned = select("times"), select("tuned_times")
    if kernels:
        limits = next(iter(kernels.values()))["limits"]
        rows = [row for result in kernels.values() for row in result["rows"]]
        tuned_rows = [row for name in correct if name in kernels for row in tuned[name]["rows"]]
        rows += [{**row, "contender": TUNED_CONTENDER} for row in tuned_rows if row["contender"] == "ours"]
        paths.append(write_result_of(origin, target, "kernels", settings, {"limits": limits, "rows": rows}))
    if rows := list(select("throughput").values()):
        paths.append(write_result_of(origin, target, "gpu-throughput", settings, {"rows": rows}))
    others = [record for record in records if record["stage"] not in ("times", "tuned_times", "throughput")]
    paths.append(write_result_of(origin, target, "campaign", settings, {"parts": others}))
    return paths
