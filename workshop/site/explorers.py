"""Put a recording into an interactive page, as the data for its script.

A page contains the line `<!-- explorer: NAME -->`. The build replaces it with the recording
`docs/data/NAME.json`, which the script `workshop/site/static/NAME.js` reads. Each was recorded once, with a program in
`workshop/site/recordings`. Commit 412b0bb is the last that has all of these programs. The one of the page "Will it
fit?" is needed after a change of the planner: `git checkout 6472289 -- workshop/site/recordings` brings it back.
"""

import json
from typing import Any

from bench.tables.records import read_result
from nanoGPT.errors import ConfigError
from workshop.site.sources import ROOT

RECORDINGS = ROOT / "docs" / "data"


def render_explorer(name: str) -> str:
    """Return the block of an interactive page, in MyST Markdown.

    Raises:
        ConfigError: the recording is missing or damaged.
    """
    path = RECORDINGS / f"{name}.json"
    if not path.exists():
        raise ConfigError(f"there is no recording {path}: restore it from git")
    result = read_result(path)
    data = json.dumps(result, separators=(",", ":")).replace("</", "<\\/")
    return (
        f'<div class="explorer" data-explorer="{name}"><script type="application/json">{data}</script>\n'
        f'<div class="explorer-live"></div></div>\n\n{describe_recording(result)}\n'
    )


def describe_recording(result: dict[str, Any]) -> str:
    """Return a sentence with the command, the hardware and the commit of a recording."""
    return (
        f"`{result['settings']['command']}` recorded this run on {result['hardware']} with torch "
        f"{result['versions']['torch']} at commit {result['git_commit'][:10]} on {result['time'][:10]}."
    )
