"""Take part in a rendezvous of two nodes, in which the first node of the first round dies before it has an address.

    python -m tests.helpers.lost_node PORT FILE

The process that creates FILE is the one that dies, with the exit code 9. The others print the number of nodes.
"""

import os
import sys
from pathlib import Path
from typing import Any

from torch.distributed.elastic.rendezvous import RendezvousParameters, rendezvous_handler_registry
from torch.distributed.elastic.rendezvous.api import RendezvousInfo, RendezvousStoreInfo

from operate.elastic import RENDEZVOUS, register_rendezvous

BUILD = RendezvousStoreInfo.build


class Rounds:
    """Stands for a NodeMonitor: there are no ranks to end."""

    def leave_round(self) -> None:
        """Do nothing."""

    def enter_round(self, info: RendezvousInfo) -> None:
        """Print the number of nodes."""
        print(f"{info.world_size} nodes", flush=True)


def build_or_die(rank: int, *arguments: object, **options: object) -> RendezvousStoreInfo:
    """Publish the address of the first node, or die as the first one that tries it."""
    if rank == 0:
        try:
            FILE.touch(exist_ok=False)
        except FileExistsError:
            pass
        else:
            os._exit(9)
    return BUILD(rank, *arguments, **options)  # type: ignore[arg-type]


if __name__ == "__main__":
    FILE = Path(sys.argv[2])
    RendezvousStoreInfo.build = staticmethod(build_or_die)  # type: ignore[method-assign]
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    register_rendezvous(Rounds(), lambda: False)  # type: ignore[arg-type]
    settings: dict[str, Any] = {
        "is_host": "0",
        "keep_alive_interval": 1,
        "keep_alive_max_attempt": 10,  # on a busy machine, a node can be silent for seconds
        "read_timeout": 10,
    }
    parameters = RendezvousParameters(RENDEZVOUS, f"127.0.0.1:{sys.argv[1]}", "job", 2, 2, **settings)
    handler = rendezvous_handler_registry.create_handler(parameters)
    handler.next_rendezvous()
    handler.shutdown()
    print(f"closed: {handler.is_closed()}", flush=True)
