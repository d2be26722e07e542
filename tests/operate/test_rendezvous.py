"""A node that dies during the rendezvous of an elastic job does not end the job."""

import torch.distributed as dist

from tests.helpers.programs import Program


def test_nodes_meet_again_if_the_first_one_dies(tmp_path):
    """If the first node dies before it has published its address, the others start a new rendezvous."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    words = "tests.helpers.lost_node", str(store.port), str(tmp_path / "died")
    nodes = [Program(*words) for _ in range(2)]
    while not (dead := [node for node in nodes if node.poll() is not None]):
        nodes[0].process.join(0.1)
    assert [node.returncode for node in dead] == [9]
    (survivor,) = set(nodes) - set(dead)
    newcomer = Program(*words)
    for node in (survivor, newcomer):
        output, _ = node.communicate()
        assert node.returncode == 0 and "2 nodes\nclosed: False\n" in output, output
    assert "the first node of this rendezvous is lost: the other nodes start a new one" in survivor.output()
