"""Exercises on ZeRO-1 and ZeRO-2: buckets, shards, the order of collectives, clipping, and sharded gradients."""

from workshop.exercises.checks.zero1 import (
    check_buckets,
    check_clipping,
    check_order,
    check_partition,
    check_reduce,
    check_shards,
    train_unsharded,
)
from workshop.exercises.checks.zero1_variants import check_naive, check_owners, check_zero2
from workshop.exercises.exercise import Exercise, Mistake, plant_mistake

EXERCISES = [
    Exercise(
        name="zero1.1",
        title="Split the parameters into buckets",
        targets=("phase1_zero1.buckets:split_into_buckets",),
        task="""One collective over 25 MiB is faster than hundreds over single parameters. Split the parameters that
        need a gradient into buckets of at most `limit` bytes and one dtype. The bucket that fills first must come
        first.""",
        minutes=10,
        difficulty="easy",
        check=check_buckets,
        nudge="In which order does the backward pass compute the gradients?",
        idea="Go through the parameters from the last to the first, and keep one open bucket per dtype.",
        line="if not bucket or",
        mistakes=(
            plant_mistake(
                "reversed([p for p in params if p.requires_grad and p.numel()])",
                "[p for p in params if p.requires_grad]",
                "Begin at the end",
            ),
            plant_mistake("size + param.nbytes > limit", "size > limit", "above the limit"),
            plant_mistake("size + param.nbytes > limit", "size + param.nbytes >= limit", "does not fit"),
            plant_mistake(
                "open_buckets.get(param.dtype, ([], 0))",
                "open_buckets.get(torch.float32, ([], 0))",
                "must have one dtype",
            ),
        ),
    ),
    Exercise(
        name="zero1.2",
        title="Partition a bucket into equal slices",
        targets=("phase1_zero1.buckets:Bucket._partition",),
        task="""A reduce-scatter needs N slices of equal length. Return the padded length of a bucket with `numel`
        elements, and the slice of rank self.rank of self.world_size. Each slice begins at a multiple of ALIGN
        elements. Pad as little as possible.""",
        minutes=5,
        difficulty="easy",
        check=check_partition,
        nudge="How long must a slice be at least, and to which number do you round it?",
        idea="Round numel / world_size up to a multiple of ALIGN.",
        line="slice_length =",
        mistakes=(
            plant_mistake(
                "math.ceil(numel / (ALIGN * self.world_size))", "(numel // (ALIGN * self.world_size))", "Round up"
            ),
            plant_mistake(
                "ALIGN * math.ceil(numel / (ALIGN * self.world_size))",
                "math.ceil(numel / self.world_size)",
                "multiple of ALIGN",
            ),
            plant_mistake("return slice_length * self.world_size,", "return numel,", "must follow each other"),
        ),
    ),
    Exercise(
        name="zero1.3",
        title="Find the shards in a slice",
        targets=("phase1_zero1.buckets:Bucket._create_shards",),
        task="""This rank's slice of a bucket may begin and end inside a parameter. Return a Shard for each
        parameter that overlaps with self.local_slice: Shard(param, param_index, offset, bucket_slice, tensor, grad).
        param_index counts self.params, which lie in self.flat_params one after another. offset counts from the
        beginning of the parameter, and bucket_slice from the beginning of the bucket. tensor is a view into
        self.flat_params without padding, and grad one into self.local_grads, which begins where the slice begins. For
        a parameter in bfloat16 or float16, tensor is a copy in fp32 (the master weights).""",
        minutes=25,
        difficulty="hard",
        ranks=4,
        check=check_shards,
        nudge="Keep the position at which the current parameter begins in the bucket.",
        idea="The overlap is from max(begin of the parameter, begin of the slice) to min(end of both). It may be "
        "empty.",
        line="elements = slice",
        mistakes=(
            plant_mistake(
                "Shard(param, index, elements.start - begin,",
                "Shard(param, index, elements.start,",
                "The offset counts from the beginning of the parameter",
            ),
            plant_mistake("Shard(param, index,", "Shard(param, 0,", "the index counts self.params"),
            plant_mistake("elements.start < elements.stop", "True", "A shard is empty"),
            plant_mistake("elements.start < elements.stop", "elements.start <= elements.stop", "has no shard"),
            plant_mistake("is_low_precision = part.dtype", "is_low_precision = False and part.dtype", "a copy in fp32"),
            plant_mistake(
                "tensor = part.float() if is_low_precision else part", "tensor = part.clone()", "take a view"
            ),
            plant_mistake(
                "first = elements.start - self.local_slice.start", "first = 0", "the gradient of other elements"
            ),
            plant_mistake("part.float() if", "torch.zeros(len(part)) if", "has other values"),
        ),
    ),
    Exercise(
        name="zero1.4",
        title="Average the gradients of a bucket",
        targets=("phase1_zero1.buckets:Bucket._reduce",),
        task="""Plain data parallelism all-reduces gradients: every rank gets the full mean. In ZeRO-1 a rank
        updates only its slice. Start the collective that averages self.flat_grads and writes this rank's slice in
        place, asynchronously, and return its handle. self.local_slice is the slice of this rank, and self.group
        the process group.""",
        minutes=10,
        difficulty="easy",
        ranks=4,
        check=check_reduce,
        prepare=train_unsharded,
        nudge="Which collective gives each rank only its slice of the result?",
        idea="reduce_scatter(output, input, op, group, async_op=True); the output may be a slice of the input.",
        line="return reduce_scatter",
        mistakes=(
            plant_mistake("dist.ReduceOp.AVG", "dist.ReduceOp.SUM", "not the mean"),
            plant_mistake("self.group, async_op=True", "self.group", "waits for the other ranks"),
            plant_mistake("self.group, async_op=True", "None, async_op=True", "failed on a rank"),
            plant_mistake(
                "return reduce_scatter(local_grads, self.flat_grads, dist.ReduceOp.AVG, self.group, async_op=True)",
                "return dist.all_reduce(self.flat_grads, dist.ReduceOp.AVG, self.group, async_op=True)",
                "sends twice the bytes of a reduce-scatter",
            ),
            plant_mistake("reduce_scatter(local_grads,", "reduce_scatter(local_grads.clone(),", "This rank's slice"),
        ),
    ),
    Exercise(
        name="zero1.5",
        title="Clip by the global norm of sharded gradients",
        targets=("phase1_zero1.zero1:Zero1Optimizer.clip_grad_norm_",),
        task="""After the reduce-scatter, a rank has the mean gradient of its own slice only. Clip by the norm of
        the full gradient, and return that norm. self.reduce_gradients() returns the gradients of this rank's
        shards, a list of tensors. grad_norm(grads, group) and clip_grads(grads, norm, max_norm) are the functions of
        the baseline, and self.shard_group is the group over which the gradients are sharded.""",
        minutes=10,
        difficulty="easy",
        ranks=4,
        check=check_clipping,
        prepare=train_unsharded,
        nudge="Would all ranks compute the same factor?",
        idea="grad_norm takes the process group over which the gradients are sharded, and sums the squares over it.",
        line="norm = grad_norm",
        mistakes=(
            plant_mistake("grad_norm(grads, self.shard_group)", "grad_norm(grads)", "each rank clips by its own norm"),
            plant_mistake("    clip_grads(grads, norm, max_norm)\n", "", "scale this rank's shards"),
            Mistake(
                (
                    (
                        "norm = grad_norm(grads, self.shard_group)",
                        "norm = torch.nn.utils.clip_grad_norm_([p for b in self.buckets for p in b.params], max_norm)",
                    ),
                    ("    clip_grads(grads, norm, max_norm)\n", ""),
                    ("from torch import Tensor\n", "import torch\nfrom torch import Tensor\n"),
                ),
                "each rank clips by its own norm",
            ),
            plant_mistake("return norm", "return norm.float()", "rounding errors of fp32"),
            plant_mistake(
                "clip_grads(grads, norm, max_norm)", "[g.mul_(max_norm / norm) for g in grads]", "turns clipping off"
            ),
        ),
    ),
    Exercise(
        name="zero1.6",
        title="Reduce the buckets of all ranks in one order",
        targets=("phase1_zero1.zero1:Zero1Optimizer._reduce_ready_buckets",),
        task="""A bucket can be reduced as soon as all of its gradients are ready. But the buckets may fill in
        different orders on different ranks, and collectives match by the order of their calls. self._bucket_order is an
        order that all ranks share, and self._num_started counts the buckets of this step that were started. Start
        the next ones with self._start_reduce, as many as possible. With include_partial, do not wait for
        missing gradients.""",
        minutes=15,
        difficulty="medium",
        ranks=2,
        check=check_order,
        prepare=train_unsharded,
        nudge="Bucket 2 is ready, and bucket 1 comes before it in the common order. May bucket 2 start?",
        idea="Go through _bucket_order from _num_started on, and stop at the first bucket that is not ready.",
        line="if not (include_partial",
        mistakes=(
            plant_mistake("            break", "            continue", "Stop at the first bucket of the common order"),
            Mistake(
                (
                    (
                        "for bucket_index in self._bucket_order[self._num_started :]:",
                        "for bucket_index in [i for i in self._bucket_order if i not in "
                        "self.__dict__.setdefault('done', [])]:",
                    ),
                    ("            break", "            continue"),
                    (
                        "        self._num_started += 1",
                        "        self._num_started += 1\n        self.done.append(bucket_index)",
                    ),
                ),
                "in different orders",
            ),
            plant_mistake("if not (include_partial or self.buckets", "if not (self.buckets", "with include_partial"),
            plant_mistake(
                "if not (include_partial or self.buckets[bucket_index].is_ready)", "if not include_partial", "overlaps"
            ),
        ),
    ),
    Exercise(
        name="zero1.7",
        title="Write the step of naive ZeRO-1",
        targets=(
            "phase1_zero1.naive:NaiveZero1Optimizer.update_shards",
            "phase1_zero1.naive:NaiveZero1Optimizer._gather",
            "phase1_zero1.naive:NaiveZero1Optimizer.step",
        ),
        task="""In the simplest form of ZeRO-1, a rank has optimizer state only for the parameters that it owns:
        self.local_optimizer updates these. update_shards gives the local optimizer the current options of
        self.param_groups, and steps it. _gather broadcasts one parameter from its owner, self.owner[param]. step
        averages the gradients with self.reduce_gradients(), calls update_shards, and gathers every parameter of
        self.trainable_params. At the end, it sets self._is_reduced to False.""",
        minutes=15,
        difficulty="medium",
        ranks=2,
        check=check_naive,
        prepare=lambda: train_unsharded(max_norm=1e9),
        nudge="After the local update, which ranks have the new values of a parameter?",
        idea="dist.broadcast(param, src=owner) for each parameter, in the same order on all ranks.",
        line="dist.broadcast",
        mistakes=(
            plant_mistake("dist.broadcast(param, src=self.owner[param])", "pass", "Broadcast each"),
            plant_mistake(' if name != "params"', "", 'every option of a group except "params"'),
            plant_mistake("src=self.owner[param]", "src=0", "Only its owner has the new values"),
            plant_mistake(
                'local_group.update({name: value for name, value in group.items() if name != "params"})',
                "pass",
                "The learning rate changes in every step",
            ),
        ),
    ),
    Exercise(
        name="zero1.8",
        title="Assign parameters to ranks evenly",
        targets=("nanoGPT.options.muon:assign_owners",),
        task="""If each rank owns full parameters, the slowest rank decides how long a step takes. Return one owner
        per parameter, so that the largest total cost of a rank is small.""",
        minutes=10,
        difficulty="easy",
        check=check_owners,
        nudge="What happens to the balance if the largest parameter is assigned last?",
        idea="Sort by cost, largest first, and give each parameter to the rank with the smallest load so far.",
        line="for param in sorted",
        mistakes=(
            plant_mistake("sorted(params, key=cost, reverse=True)", "params", "Assign the largest parameters first"),
            plant_mistake("load.index(min(load))", "0", "One rank gets nearly all parameters"),
            plant_mistake("load[owner[param]] += cost(param)", "load[owner[param]] += 1", "smallest total cost"),
            plant_mistake("key=cost", "key=Tensor.numel", "ignore the argument"),
        ),
    ),
    Exercise(
        name="zero1.9",
        title="Write ZeRO-2: store only this rank's slice of the gradients",
        targets=("phase1_zero1.zero2:Zero2Bucket",),
        task="""In ZeRO-1 a rank keeps the full gradients, 4P bytes, and uses 1/N of them. Write the bucket of
        ZeRO-2. It allocates flat_grads when the first gradient arrives (Bucket._allocate_gradients does it),
        reduce-scatters it in every micro-batch, adds this rank's slice of the average to local_grads, and frees
        flat_grads. _free_full_gradients sets flat_grads to an empty tensor and grad_views to an empty list.

        The check counts the bytes of full gradients between the backward passes, and compares norms and weights
        with one process.""",
        minutes=40,
        difficulty="advanced",
        ranks=2,
        check=check_zero2,
        prepare=train_unsharded,
        nudge="Write down, for each method of Bucket, whether flat_grads exists before and after it.",
        idea="add_average waits, adds flat_grads[self.local_slice] to local_grads, frees flat_grads, and clears "
        "ready_params.",
        line="self.local_grads += ",
        mistakes=(
            Mistake(
                (
                    (
                        "        self.local_grads += self.flat_grads[self.local_slice]\n        "
                        "self._free_full_gradients()\n",
                        "        self.local_grads += self.flat_grads[self.local_slice]\n",
                    ),
                ),
                "ZeRO-2 frees the buffer",
            ),
            plant_mistake(
                "self.local_grads += self.flat_grads",
                "self.local_grads[:] = self.flat_grads",
                "add this rank's slice of every average",
            ),
            plant_mistake(
                "        self._free_full_gradients()\n        self.local_grads.zero_()\n",
                "        self._free_full_gradients()\n",
                "Set them to zero",
            ),
        ),
    ),
]
