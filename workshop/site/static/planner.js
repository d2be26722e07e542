// The planner's formulas for memory and communication, for every row of a plan (bench/plan/planner.py).
"use strict";

// Return the functions of the planner. `samples` is the recording docs/data/will_it_fit.json.
function makePlanner(samples) {
  const { constants, models, gpus, rows, polynomials, terms, categories } = samples;
  const [few, more] = constants.TRACED_LAYERS;
  const countBytes = makeBytesCounter(samples);
  const isOffloaded = (row) => Boolean(row.options.fsdp_cpu_offload);
  const isZero2 = (row) => row.options.zero_stage === 2;
  const countShards = (row, options) => Number(row.options.fsdp_shard_size ?? options.gpus);
  const tracedMicroBatches = (options) => Math.min(2, options.micro_batches);

  // Return the value of every term, such as B T C, for a case.
  function evaluateTerms(row, { model, block_size: T, batch_size: B, ...options }) {
    const [, h, C] = models[model], values = { B, T, C, h, 1: 1 }, N = countShards(row, options);
    return terms.map((term) => {
      const [factors, divisor] = term.split("/");
      return factors.split(" ").reduce((product, name) => product * values[name], 1) / (divisor ? N : 1);
    });
  }

  const evaluate = (polynomial, values) =>
    polynomials[polynomial].reduce((sum, [term, factor]) => sum + factor * values[term], 0);
  const extrapolate = ([first, second], layers) => first + ((layers - few) / (more - few)) * (second - first);

  // Return the formulas of the two traced models. Rows share formulas; on one GPU, ZeRO-2 is ZeRO-1.
  function formulasOf(row, options) {
    const source = isZero2(row) && options.gpus === 1
      ? rows.find((each) => each.phase === "phase1" && !isZero2(each)) : rows[row.source];
    const microBatches = row.phase === "phase1" ? 1 : tracedMicroBatches(options); // it always has gradient buffers
    const key = `${options.dtype} ${options.gpus > 1 ? "N" : "1"} ${microBatches}`;
    return source.formulas[`${key} ${options.model} ${options.block_size}`] ?? source.formulas[key];
  }

  // Return the bytes that the fused loss allocates inside its kernel.
  function lossWorkspace(row, { model, block_size: T, batch_size: B, dtype }) {
    if (row.phase !== "phase2" && !row.options.kernels) return 0;
    const tokens = B * T, C = models[model][2], V = constants.VOCAB, size = samples.dtype_bytes[dtype];
    const chunks = Math.max(1, Math.ceil((tokens * V * size) / constants.CHUNK_BYTES));
    return Math.max(1, Math.ceil(tokens / chunks)) * (V + C) * size + V * C * size;
  }

  // Return the bytes of each category at the memory peak of a step.
  function peakMemory(row, options) {
    const values = evaluateTerms(row, options), layers = models[options.model][0];
    const traced = formulasOf(row, options);
    const position = (name) => categories.indexOf(name);
    const total = (bytes) => bytes.reduce((sum, each) => sum + each, 0);
    const largest = (list) => list.reduce((best, each) => (total(each) > total(best) ? each : best));
    const state = isOffloaded(row) ? fullBytes(row, options).state : {};
    return largest(samples.memory_stages.map((stage, s) => {
      const peaks = traced.map((moments) => largest(moments[s].map((moment) =>
        samples.moments[moment].map((each) => evaluate(each, values)))));
      const bytes = categories.map((_, i) => extrapolate(peaks.map((peak) => peak[i]), layers));
      for (const name of Object.keys(state)) {
        const accumulates = name === "gradients" && options.micro_batches > 1 && stage !== "update";
        if (!accumulates) bytes[position(name)] = 0; // full gradients stay on the GPU until they are reduced
      }
      if (stage === "head") bytes[position("other")] += lossWorkspace(row, options);
      return bytes;
    }));
  }

  // Return countBytes for the full model, from the two models that the planner traces.
  function fullBytes(row, options) {
    const layers = models[options.model][0];
    const [first, second] = constants.TRACED_LAYERS.map((each) => countBytes(row, options, each));
    const combine = (name) => Object.fromEntries(Object.keys(first[name]).map((key) =>
      [key, extrapolate([first[name][key], second[name][key]], layers)]));
    return { state: combine("state"), traffic: combine("traffic") };
  }

  // Return the ranks in the group of a collective: with one replica per node, only the all-reduce is between nodes.
  const groupSize = (row, kind, options) =>
    (kind === "replicas" ? options.gpus / countShards(row, options) : countShards(row, options));
  const ringBytes = (kind, size, ranks) =>
    ((kind === "all-reduce" || kind === "replicas" ? 2 : 1) * size * (ranks - 1)) / ranks;
  const sentBytes = (row, traffic, options) => Object.entries(traffic).reduce((sum, [kind, size]) =>
    sum + ringBytes(kind, size, groupSize(row, kind, options)), 0);

  const countParams = ({ model, block_size: T }) => {
    const [layers, , C] = models[model];
    return layers * (12 * C * C + 2 * C) + (constants.VOCAB + T) * C + C;
  };
  const usableBytes = (gpu) => (0.92 * gpus[gpu].gib - 1) * constants.GIB;
  const peakBytes = (row, options) => peakMemory(row, options).reduce((sum, each) => sum + each, 0);

  // Return why a row cannot run, or an empty string.
  function findProblem(row, { model, gpus: count }) {
    if (row.cannot.includes(model)) return "its kernels do not accept this model";
    const isReplicated = "fsdp_shard_size" in row.options;
    return isReplicated && count <= constants.GPUS_PER_NODE ? "it needs two or more nodes of 8 GPUs" : "";
  }

  // Return whether a step fits: tensors into the memory of the GPU, and offloaded model state into that of the host.
  function fits(row, options) {
    const perGpu = (constants.HOST_GIB * constants.GIB) / constants.GPUS_PER_NODE;
    if (isOffloaded(row) && (16 * countParams(options)) / options.gpus > perGpu) return false;
    return peakBytes(row, options) <= usableBytes(options.gpu);
  }

  // Return the largest batch size that fits, up to the largest one of the page; 0 if even 1 does not fit.
  function largestBatch(row, options) {
    let good = 0, bad = Math.max(...samples.sizes.batch_size) + 1;
    while (bad - good > 1) {
      const middle = (good + bad) >> 1;
      if (fits(row, { ...options, batch_size: middle })) good = middle;
      else bad = middle;
    }
    return good;
  }

  // Return the planner's numbers for one row.
  function plan(options) {
    const row = rows[options.row], { state, traffic } = fullBytes(row, options);
    return { state_bytes: state, sent_bytes: sentBytes(row, traffic, options), peak: peakMemory(row, options),
      peak_bytes: peakBytes(row, options), fits: fits(row, options) };
  }

  return { plan, findProblem: (options) => findProblem(rows[options.row], options), usableBytes,
    largestBatch: (options) => largestBatch(rows[options.row], options) };
}

// Return the function that counts model state and communication exactly, as the `costs` modules of the phases do.
function makeBytesCounter(samples) {
  const { constants, models } = samples;
  const sum = (numbers) => numbers.reduce((total, each) => total + each, 0);

  // Return the parameters of a model: rows, elements in a row, and whether each is in a block.
  function listParameters({ model, block_size: T }, layers) {
    const C = models[model][2];
    const block = [[C, 1], [3 * C, C], [C, C], [C, 1], [4 * C, C], [C, 4 * C]];
    const inside = Array.from({ length: layers }, () => block).flat().map(([rows, width]) => ({ rows, width, isInBlock: true }));
    const outside = [[constants.VOCAB, C], [T, C]].map(([rows, width]) => ({ rows, width, isInBlock: false }));
    return [...outside, ...inside, { rows: C, width: 1, isInBlock: false }];
  }

  // Return the model state by category, and the bytes of the full tensors of the collectives by kind.
  function countBytes(row, options, layers) {
    const params = listParameters(options, layers);
    if (row.phase === "phase1") return countZero1Bytes(row, params, options);
    return row.phase === "phase3" ? countFsdpBytes(row, params, options) : countReplicatedBytes(params, options);
  }

  const adamwBytes = (elements) => 8 * elements + 4; // two moments, and a step count
  function countReplicatedBytes(params, options) {
    const size = 4 * sum(params.map(({ rows, width }) => rows * width));
    const optimizerState = sum(params.map(({ rows, width }) => adamwBytes(rows * width)));
    const state = { parameters: size, gradients: size, optimizer_state: optimizerState };
    return { state, traffic: options.gpus > 1 ? { "all-reduce": size } : {} };
  }

  // Divide parameters into flat buckets, from the last to the first (phase1_zero1/buckets.py).
  function splitIntoBuckets(sizes, limit) {
    const buckets = [];
    let bytes = 0;
    for (const size of [...sizes].reverse()) {
      if (!buckets.length || bytes + 4 * size > limit) { buckets.push([]); bytes = 0; }
      buckets.at(-1).push(size);
      bytes += 4 * size;
    }
    return buckets;
  }

  function countZero1Bytes(row, params, { gpus: ranks, micro_batches: M }) {
    const limit = ranks > 1 ? constants.ZERO1_BUCKET_BYTES : Infinity;
    const groups = [params.filter(({ width }) => width > 1), params.filter(({ width }) => width === 1)];
    const size = ({ rows, width }) => rows * width;
    let flat = 0, local = 0, optimizerState = 0;
    for (const bucket of groups.flatMap((group) => splitIntoBuckets(group.map(size), limit))) {
      const slice = constants.ALIGN * Math.ceil(sum(bucket) / (constants.ALIGN * ranks));
      let begin = 0;
      for (const elements of bucket) { // rank 0 owns the first slice
        const shard = Math.min(begin + elements, slice) - begin;
        if (shard > 0) optimizerState += adamwBytes(shard);
        begin += elements;
      }
      flat += slice * ranks;
      local += slice;
    }
    const isZero2 = row.options.zero_stage === 2 && ranks > 1, full = 4 * flat;
    const state = { parameters: full, gradients: isZero2 ? 4 * local : full, optimizer_state: optimizerState };
    const traffic = { "reduce-scatter": full * (isZero2 ? M : 1), "all-gather": full };
    return { state, traffic: ranks > 1 ? { ...traffic, "all-reduce": params.length + 8 } : {} };
  }

  function countFsdpBytes(row, params, options) {
    const { gpus: count, dtype, micro_batches: M } = options;
    const ranks = Number(row.options.fsdp_shard_size ?? count), replicas = count / ranks;
    let shards = 0, optimizerState = 0, gathered = 0;
    for (const { rows, width, isInBlock } of params) {
      const rowsPerRank = Math.ceil(rows / ranks);
      shards += rowsPerRank * width;
      optimizerState += adamwBytes(Math.min(rowsPerRank, rows) * width);
      gathered += (isInBlock ? 2 : 1) * rowsPerRank * ranks * width;
    }
    const state = { parameters: 4 * shards, gradients: 4 * shards, optimizer_state: optimizerState };
    if (ranks === 1) return { state, traffic: { "all-reduce": 8 } };
    const traffic = { "all-gather": M * gathered * samples.dtype_bytes[dtype], "reduce-scatter": 4 * shards * ranks };
    if (replicas === 1) return { state, traffic: { ...traffic, "all-reduce": 8 } };
    const isOneKind = replicas === ranks; // the planner adds up all-reduces over equally many ranks
    return { state, traffic: { ...traffic, replicas: 4 * shards + (isOneKind ? 8 : 0), ...(isOneKind ? {} : { "all-reduce": 8 }) } };
  }

  return countBytes;
}
