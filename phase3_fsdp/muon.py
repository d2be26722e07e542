"""Muon with FSDP: each rank orthogonalizes some of the matrices, and no rank stores a full momentum.

Muon (Jordan et al. 2024) orthogonalizes the update of a full matrix, but with FSDP each rank has only some of its rows.
If the ranks all-gathered every update, all of them would compute the same. Instead each matrix has an owner, as in
phase 1. An all-to-all sends the rows of every update to its owner, and a second one returns the orthogonalized rows:

                           rank 0            rank 1
    momentum, updates      a0 b0 c0 d0       a1 b1 c1 d1       rows of the matrices A, B, C and D, in fp32
    all-to-all             a0 a1 b0 b1       c0 c1 d0 d1       full updates of the owner's matrices, in bf16
    orthogonalize          A' B'             C' D'             1/S of the multiplications on each of S ranks
    all-to-all             a0 b0 c0 d0       a1 b1 c1 d1       every rank updates its rows of all matrices

For P elements on S ranks, each all-to-all sends on average P(S-1)/S^2 elements per rank. An all-gather would send
P(S-1)/S. The update is the same as that of `torch.optim.Muon` on full matrices. With several replicas of the model, the
ranks of each replica do this among themselves.
"""

import math
from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from nanoGPT.distributed.sharding import local_shard, row_range
from nanoGPT.options.muon import MuonWithAdamW, assign_owners, configure_muon, count_multiplications
from nanoGPT.shared_optimizer import SharedOptimizer, run_closure
from nanoGPT.train_config import TrainConfig

Received = Callable[[], Tensor]  # waits for an all-to-all, and returns what this rank received
ROUND_BYTES = 64 * 2**20  # maximum bytes of full bf16 updates per owner and round (or one matrix)


def configure_sharded_muon(model: nn.Module, config: TrainConfig) -> MuonWithAdamW:
    """Return Muon for the matrices of the blocks, and AdamW for all other parameters of a model from `shard_model`."""
    return configure_muon(model, config, ShardedMuon)


class ShardedMuon(SharedOptimizer):
    """`torch.optim.Muon` for matrices that `fully_shard` has sharded by rows.

    The matrices are processed in rounds, so that a rank never stores many full matrices. The all-to-alls of a round run
    while another round is orthogonalized.

    Args:
        groups: parameter groups of DTensors with two dimensions, all on the same mesh. Their options are those of
            `torch.optim.Muon`, with "match_rms_adamw" for `adjust_lr_fn`. The options of the Newton-Schulz iterations
            are those of the first group.
    """

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, torch.optim.Muon([torch.zeros(1, 1)]).defaults)
        matrices = [p for group in self.param_groups for p in group["params"]]
        self.options = {p: group for group in self.param_groups for p in group["params"]}
        for group in self.param_groups:
            if group["adjust_lr_fn"] != "match_rms_adamw":
                raise ValueError(f"adjust_lr_fn={group['adjust_lr_fn']} is not supported: use match_rms_adamw")
        mesh = matrices[0].device_mesh
        self.device = torch.device(mesh.device_type)  # of the all-to-alls, also if CPU offload keeps shards on the CPU
        self.group, self.num_shards, self.rank = mesh.get_group(-1), mesh.size(-1), mesh.get_local_rank(mesh.ndim - 1)
        self.rounds = list(self._plan_rounds(matrices))

    def _plan_rounds(self, matrices: list[DTensor]) -> Iterator["Round"]:
        """Yield the rounds. Every round has the next matrices of each owner, those with the most multiplications first.

        Owners wait for each other in every round, so their matrices in a round should have equal costs.
        """
        owner = assign_owners(matrices, self.num_shards, count_multiplications)
        owned = [
            sorted((p for p in matrices if owner[p] == rank), key=lambda p: (-count_multiplications(p), tuple(p.shape)))
            for rank in range(self.num_shards)
        ]
        size = max(1, ROUND_BYTES // (2 * max(p.numel() for p in matrices)))
        for begin in range(0, max(map(len, owned)), size):
            yield Round([owned_by_rank[begin : begin + size] for owned_by_rank in owned], self.rank)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every matrix with a gradient. `closure`, if given, computes the loss first. Collective.

        Raises:
            RuntimeError: no matrix has a gradient.
        """
        loss = run_closure(closure)
        if all(param.grad is None for param in self.options):
            raise RuntimeError("no matrix has a gradient: call backward() first")
        to_owners: Received | None = self._send_to_owners(0)
        to_shards: Received | None = None
        for i, current in enumerate(self.rounds):
            assert to_owners
            batches = current.join_rows(to_owners())
            to_owners = self._send_to_owners(i + 1) if i + 1 < len(self.rounds) else None
            rows = current.split_into_rows(self._orthogonalize(batches))
            previous, to_shards = to_shards, self._exchange(rows, current.to_owners[::-1])
            if previous:
                self._apply(self.rounds[i - 1], previous())
            del previous, rows  # otherwise their memory would stay allocated during the next round
        assert to_shards
        self._apply(self.rounds[-1], to_shards())
        return loss

    def _send_to_owners(self, index: int) -> Received:
        """Update the momentum of a round, and start to send the updates to their owners."""
        return self._exchange(self._compute_updates(self.rounds[index]), self.rounds[index].to_owners)

    def _compute_updates(self, matrices: "Round") -> Tensor:
        """Update the momentum of a round, and return this rank's rows of the updates: 1-D, bf16, in `local_order`."""
        updates = []
        for param in matrices.local_order:
            if param.grad is None:  # every rank skips the same matrices
                updates.append(torch.zeros_like(local_shard(param), dtype=torch.bfloat16).flatten())
                continue
            options, state = self.options[param], self.state[param]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(param.grad)
            grad, momentum = local_shard(param.grad), local_shard(state["momentum_buffer"])
            momentum.lerp_(grad, 1 - options["momentum"])
            update = grad.lerp(momentum, options["momentum"]) if options["nesterov"] else momentum
            updates.append(update.bfloat16().flatten())
        return torch.cat(updates)

    def _exchange(self, sent: Tensor, sizes: tuple[list[int], list[int]]) -> Received:
        """Start an all-to-all of `sizes[0][r]` elements to each rank r and `sizes[1][r]` elements from it.

        Returns:
            A function that waits and returns the received tensor. On a GPU only the stream waits.
        """
        buffers = [sent.to(self.device)]  # both must stay alive until the end of the all-to-all
        if self.num_shards == 1:
            return buffers.pop
        buffers.append(buffers[0].new_empty(sum(sizes[1])))
        work = dist.all_to_all_single(buffers[1], buffers[0], sizes[1], sizes[0], group=self.group, async_op=True)

        def wait() -> Tensor:
            work.wait()
            return buffers[1]

        return wait

    def _orthogonalize(self, batches: list[Tensor]) -> list[Tensor]:
        """Return the orthogonalized updates of all batches. The batches are freed one after another."""
        options, result = self.param_groups[0], list[Tensor]()
        while batches:
            steps, eps = options["ns_steps"], options["eps"]
            result += orthogonalize(batches.pop(0), options["ns_coefficients"], steps, eps).unbind()
        return result

    def _apply(self, matrices: "Round", rows: Tensor) -> None:
        """Apply weight decay and this rank's orthogonalized rows, which are in `local_order`."""
        shards = [local_shard(p) for p in matrices.local_order]
        for param, shard, update in zip(
            matrices.local_order, shards, rows.split([shard.numel() for shard in shards]), strict=True
        ):
            if param.grad is None:
                continue
            options = self.options[param]
            shard.mul_(1 - options["lr"] * options["weight_decay"])
            scale = 0.2 * math.sqrt(max(param.shape))  # gives the update the RMS of AdamW's updates (Liu et al. 2025)
            shard.add_(update.view_as(shard).to(shard.device), alpha=-options["lr"] * scale)


class Round:
    """Matrices that are orthogonalized at the same time, and which of their elements each rank sends.

    Args:
        owned: the matrices of each owner.
        rank: this rank's index among the owners.

    Attributes:
        local_order: all matrices, those of rank 0 first.
        to_owners: the numbers of elements that this rank sends to each owner, and receives from each rank as an owner.
    """

    def __init__(self, owned: list[list[DTensor]], rank: int) -> None:
        self.local_order = [param for matrices in owned for param in matrices]
        self.mine, self.num_shards = owned[rank], len(owned)
        self.parts = [[self._count_elements(p, r) for p in self.mine] for r in range(self.num_shards)]
        sent = [sum(local_shard(p).numel() for p in matrices) for matrices in owned]
        self.to_owners = sent, [sum(sizes) for sizes in self.parts]

    def _count_elements(self, param: DTensor, rank: int) -> int:
        begin, end = row_range(len(param), self.num_shards, rank)
        return (end - begin) * param.shape[1]

    def join_rows(self, received: Tensor) -> list[Tensor]:
        """Return the full matrices of this owner, from the rows of all ranks: one batch (k, m, n) per shape."""
        by_rank = received.split(self.to_owners[1])
        rows = [part.split(sizes) for part, sizes in zip(by_rank, self.parts, strict=True)]
        batches = []
        for shape, group in groupby(range(len(self.mine)), key=lambda i: self.mine[i].shape):
            indices = list(group)
            batches.append(received.new_empty(len(indices), *shape))
            for matrix, i in zip(batches[-1], indices, strict=True):
                torch.cat([part[i] for part in rows], out=matrix.view(-1))
        return batches

    def split_into_rows(self, matrices: list[Tensor]) -> Tensor:
        """Return the rows of this owner's matrices: first those for rank 0, then those for rank 1, and so on."""
        ranges = [[row_range(len(m), self.num_shards, r) for m in matrices] for r in range(self.num_shards)]
        parts = [m[begin:end].flatten() for each in ranges for m, (begin, end) in zip(matrices, each, strict=True)]
        return torch.cat(parts) if parts else self.local_order[0].to_local().new_empty(0, dtype=torch.bfloat16)


def orthogonalize(
    matrices: Tensor, coefficients: tuple[float, float, float], steps: int = 5, eps: float = 1e-7
) -> Tensor:
    """Return nearly orthogonal matrices with the singular vectors of the given ones, by Newton-Schulz iterations.

    For a matrix X = U S V', an iteration computes aX + b(XX')X + c(XX')^2 X = U (aS + bS^3 + cS^5) V'. Only matrix
    products are needed. With Muon's coefficients, singular values between 0 and 1 quickly become about 1 (Jordan et al.
    2024).

    Args:
        matrices: (batch, m, n), bf16; it is overwritten. The iterations use the smaller of XX' and X'X.
        coefficients: a, b and c.
        steps: number of iterations.
        eps: smallest norm by which a matrix is divided.

    Returns:
        (batch, m, n), bf16.
    """
    a, b, c = coefficients
    is_tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if is_tall else matrices
    x.div_(x.norm(dim=(1, 2), keepdim=True).clamp(min=eps))  # no singular value exceeds the Frobenius norm
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x
