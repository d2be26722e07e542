"""Prepare FineWeb-Edu's sample of 10 billion GPT-2 tokens, streamed from the Hugging Face hub: 20 GB in shards.

    python nanoGPT/data/fineweb_edu/prepare.py
    python nanoGPT/data/fineweb_edu/prepare.py --max_tokens=50000000        # a small part, for a first try
    python nanoGPT/data/fineweb_edu/prepare.py --input='folder/*.parquet'   # your own files, offline

After an interruption, run the command again: it continues after the last complete shard. The first shard is the val
split.
"""

import sys

from nanoGPT.files import DATA
from nanoGPT.job.program import command_line, report_errors
from nanoGPT.prepare.streaming import SHARD_TOKENS, hub_corpus, parquet_corpus, prepare_stream


def main(input: str | None = None, shard_tokens: int = SHARD_TOKENS, max_tokens: int | None = None) -> None:
    """Prepare FineWeb-Edu's sample, or your own parquet files instead.

    Args:
        input: glob pattern of local parquet files with a column `text`; default: download from the hub.
        shard_tokens: tokens per shard file.
        max_tokens: stop after this many tokens.
    """
    corpus = parquet_corpus(input) if input is not None else hub_corpus("HuggingFaceFW/fineweb-edu", "sample-10BT")
    prepare_stream(DATA / "fineweb_edu", corpus, shard_tokens, max_tokens)


if __name__ == "__main__":
    with report_errors():
        command_line(main, sys.argv[1:])
