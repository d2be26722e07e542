"""Prepare OpenWebText: about 9 billion GPT-2 tokens, streamed from the Hugging Face hub, 18 GB in shards.

    python nanoGPT/data/openwebtext/prepare.py
    python nanoGPT/data/openwebtext/prepare.py --max_tokens=50000000        # a small part, for a first try

After an interruption, run the command again: it continues after the last complete shard. The first shard is the val
split.
"""

import sys

from nanoGPT.files import DATA
from nanoGPT.job.command import command_line, report_errors
from nanoGPT.prepare.streaming import hub_corpus, prepare_stream


def main(max_tokens: int | None = None) -> None:
    """Prepare OpenWebText.

    Args:
        max_tokens: stop after this many tokens.
    """
    prepare_stream(DATA / "openwebtext", hub_corpus("Skylion007/openwebtext"), max_tokens=max_tokens)


if __name__ == "__main__":
    with report_errors():
        command_line(main, sys.argv[1:])
