"""Run a function on real ranks, from a notebook, an exercise or a test.

    from workshop.ranks import run_on_ranks

    def total(x):
        t = torch.tensor(x + dist.get_rank()); dist.all_reduce(t); return t.item()

    run_on_ranks(total, 4, 1.0)        # [10.0, 10.0, 10.0, 10.0]

The code is in `operate/ranks.py`, because benchmarks use it, too.
"""

from operate.ranks import RankFailed, losses, run_on_ranks, start_ranks

__all__ = ["RankFailed", "losses", "run_on_ranks", "start_ranks"]
