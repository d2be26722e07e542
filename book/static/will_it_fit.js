// The page "Will it fit?": the planner's formulas for memory, communication and time, for every row of a plan.
"use strict";

// Return the functions of the planner. `samples` is the recording docs/data/will_it_fit.json.
function makePlanner(samples) {
  const { constants, models, gpus, rows, polynomials, terms, categories } = samples;
  const [few, more] = constants.TRACED_LAYERS;

  // Return the value of every term, such as B T C, for a case.
  function evaluateTerms({ model, block_size: T, batch_size: B, gpus: N }) {
    const [, h, C] = models[model], values = { B, T, C, h, 1: 1 };
    return terms.map((term) => {
      const [factors, divisor] = term.split("/");
      return factors.split(" ").reduce((product, name) => product * values[name], 1) / (divisor ? N : 1);
    });
  }

  const evaluate = (polynomial, values) =>
    polynomials[polynomial].reduce((sum, [term, factor]) => sum + factor * values[term], 0);
  const extrapolate = ([first, second], layers) => first + ((layers - few) / (more - few)) * (second - first);
  const formulasOf = (row, dtype, ranks) => row.formulas[`${dtype} ${ranks > 1 ? "N" : "1"}`];

  // Return the bytes that the fused loss allocates inside its kernel.
  function lossWorkspace(row, { model, block_size: T, batch_size: B, dtype }) {
    if (row.phase !== "phase2" && !row.options.kernels) return 0;
    const tokens = B * T, C = models[model][2], V = constants.VOCAB, size = samples.dtype_bytes[dtype];
    const chunks = Math.max(1, Math.ceil((tokens * V * size) / constants.CHUNK_BYTES));
    return Math.max(1, Math.ceil(tokens / chunks)) * (V + C) * size + V * C * size;
  }

  // Return the bytes of each category at the memory peak of a step.
  function peakMemory(row, options) {
    const values = evaluateTerms(options), layers = models[options.model][0];
    const traced = formulasOf(row, options.dtype, options.gpus);
    const total = (bytes) => bytes.reduce((sum, each) => sum + each, 0);
    const largest = (list) => list.reduce((best, each) => (total(each) > total(best) ? each : best));
    return largest(Object.keys(traced[0].moments).map((stage) => {
      const peaks = traced.map((formulas) =>
        largest(formulas.moments[stage].map((moment) => moment.map((each) => evaluate(each, values)))));
      const bytes = categories.map((_, i) => extrapolate(peaks.map((peak) => peak[i]), layers));
      if (stage === "head") bytes[categories.indexOf("other")] += lossWorkspace(row, options);
      return bytes;
    }));
  }

  // Return the parameters of a model: [rows, elements in a row], and whether each is in a block.
  function listParameters({ model, block_size: T }, layers) {
    const C = models[model][2];
    const block = [[C, 1], [3 * C, C], [C, C], [C, 1], [4 * C, C], [C, 4 * C]];
    const inside = Array.from({ length: layers }, () => block).flat().map((shape) => [...shape, true]);
    return [[constants.VOCAB, C, false], [T, C, false], ...inside, [C, 1, false]];
  }

  // Return the model state by category, and the bytes of the full tensors of the collectives: [kind, bytes].
  function countBytes(row, options, layers) {
    const params = listParameters(options, layers);
    if (row.phase === "phase1") return countZero1Bytes(params, options.gpus);
    return row.phase === "phase3" ? countFsdpBytes(row, params, options) : countReplicatedBytes(params, options.gpus);
  }

  function countReplicatedBytes(params, ranks) {
    const size = 4 * params.reduce((sum, [length, width]) => sum + length * width, 0);
    const state = { parameters: size, gradients: size, optimizer_state: 2 * size + 4 * params.length };
    return { state, traffic: ranks > 1 ? { "all-reduce": size } : {} };
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

  function countZero1Bytes(params, ranks) {
    const limit = ranks > 1 ? constants.ZERO1_BUCKET_BYTES : Infinity;
    const groups = [params.filter(([, width]) => width > 1), params.filter(([, width]) => width === 1)];
    let length = 0, optimizerState = 0;
    for (const bucket of groups.flatMap((group) => splitIntoBuckets(group.map(([n, width]) => n * width), limit))) {
      const elements = bucket.reduce((sum, size) => sum + size, 0);
      const slice = constants.ALIGN * Math.ceil(elements / (constants.ALIGN * ranks));
      let begin = 0;
      for (const size of bucket) { // rank 0 owns the first slice
        const shard = Math.min(begin + size, slice) - begin;
        if (shard > 0) optimizerState += 8 * shard + 4;
        begin += size;
      }
      length += slice * ranks;
    }
    const full = 4 * length;
    const traffic = { "reduce-scatter": full, "all-gather": full, "all-reduce": params.length + 8 };
    const state = { parameters: full, gradients: full, optimizer_state: optimizerState };
    return { state, traffic: ranks > 1 ? traffic : {} };
  }

  function countFsdpBytes(row, params, { gpus: ranks, dtype }) {
    const gathers = row.options.fsdp_reshard_after_forward === false ? 1 : 2;
    let shards = 0, optimizerState = 0, gathered = 0;
    for (const [length, width, isInBlock] of params) {
      const rowsPerRank = Math.ceil(length / ranks);
      shards += rowsPerRank * width;
      optimizerState += 8 * Math.min(rowsPerRank, length) * width + 4;
      gathered += (isInBlock ? gathers : 1) * rowsPerRank * ranks * width;
    }
    const state = { parameters: 4 * shards, gradients: 4 * shards, optimizer_state: optimizerState };
    if (ranks === 1) return { state, traffic: { "all-reduce": 8 } };
    const traffic = { "reduce-scatter": 4 * shards * ranks, "all-gather": gathered * samples.dtype_bytes[dtype] };
    return { state, traffic: { ...traffic, "all-reduce": 8 } };
  }

  // Return countBytes for the full model, from the two models that the planner traces.
  function fullBytes(row, options) {
    const layers = models[options.model][0];
    const [first, second] = constants.TRACED_LAYERS.map((each) => countBytes(row, options, each));
    const combine = (name) => Object.fromEntries(Object.keys(first[name]).map((key) =>
      [key, extrapolate([first[name][key], second[name][key]], layers)]));
    return { state: combine("state"), traffic: combine("traffic") };
  }

  const ringBytes = (kind, size, ranks) => ((kind === "all-reduce" ? 2 : 1) * size * (ranks - 1)) / ranks;
  const sentBytes = (traffic, ranks) =>
    Object.entries(traffic).reduce((sum, [kind, size]) => sum + ringBytes(kind, size, ranks), 0);

  function collectiveSeconds(gpu, kind, size, ranks, calls) {
    const nodes = Math.ceil(ranks / constants.GPUS_PER_NODE);
    const rate = nodes === 1 ? gpu.link : Math.min(gpu.link, gpu.network);
    const hops = (ranks - nodes) * constants.HOP_SECONDS + (nodes > 1 ? nodes : 0) * constants.NODE_HOP_SECONDS;
    const latency = (kind === "all-reduce" ? 2 : 1) * hops;
    return calls * latency + ringBytes(kind, size, ranks) / (constants.LINK_EFFICIENCY * rate);
  }

  // Return the communication that can overlap with the forward and the backward pass.
  function communicationByStage(row, traffic, options, isCompiled) {
    const gpu = gpus[options.gpu], [layers, , C] = models[options.model];
    const params = layers * (12 * C * C + 2 * C) + (constants.VOCAB + options.block_size) * C + C;
    const stages = { forward: { seconds: 0, minExposed: 0 }, backward: { seconds: 0, minExposed: 0 } };
    const add = (stage, seconds, minExposed) => {
      stages[stage].seconds += seconds;
      stages[stage].minExposed = Math.max(stages[stage].minExposed, minExposed);
    };
    for (const [kind, size] of Object.entries(traffic)) {
      const isScalar = size < constants.SCALAR_BYTES;
      const calls = isScalar ? 1 : row.phase === "phase3" ? layers + 1 : Math.ceil(size / constants.BUCKET_BYTES);
      const time = (amount) => (amount ? collectiveSeconds(gpu, kind, amount, options.gpus, calls) : 0);
      if (kind === "all-gather" && row.phase === "phase3") {
        const forward = Math.min(samples.dtype_bytes[options.dtype] * params, size);
        add("forward", time(forward), time(forward) / calls);
        add("backward", time(size - forward), time(size - forward) / calls);
      } else {
        const stage = kind === "all-gather" ? "forward" : "backward";
        const isOverlapped = row.phase !== "phase1" || stage === "backward" || !isCompiled;
        add(stage, time(size), isOverlapped ? time(size) / calls : time(size));
      }
    }
    return stages;
  }

  // Return the compute time of each stage in seconds.
  function computeSeconds(row, options, isCompiled) {
    const values = evaluateTerms(options), [layers] = models[options.model], gpu = gpus[options.gpu];
    const peak = options.dtype === "float32" ? gpu.fp32 : gpu.peak;
    const bandwidth = constants.MEMORY_EFFICIENCY * gpu.bandwidth;
    const accepted = Object.keys(models).filter((name) => !row.cannot.includes(name));
    const traced = formulasOf(row, options.dtype, options.gpus);
    return Object.fromEntries(["forward", "backward", "update"].map((stage) => {
      const seconds = traced.map((formulas) => {
        const bytes = formulas[isCompiled ? "compiled_bytes" : "eager_bytes"][stage];
        const products = formulas.products.filter((each) => each[0] === stage)
          .map(([, efficiency, flops, traffic, count]) => count *
            Math.max(evaluate(flops, values) / (efficiency * peak), evaluate(traffic, values) / bandwidth));
        return evaluate(bytes, values) / bandwidth + products.reduce((sum, each) => sum + each, 0);
      });
      const kernels = traced.map(({ kernels: { [stage]: count } }) =>
        (Array.isArray(count) ? count[accepted.indexOf(options.model)] : count));
      const launch = isCompiled ? 0 : constants.LAUNCH_SECONDS * extrapolate(kernels, layers);
      return [stage, Math.max(extrapolate(seconds, layers), launch)];
    }));
  }

  function stepSeconds(row, options, isCompiled) {
    const compute = computeSeconds(row, options, isCompiled);
    const stages = communicationByStage(row, fullBytes(row, options).traffic, options, isCompiled);
    return ["forward", "backward"].reduce((total, stage) => {
      const { seconds, minExposed } = stages[stage];
      return total + compute[stage] + Math.max(seconds - compute[stage], Math.min(minExposed, seconds));
    }, compute.update);
  }

  const usableBytes = (gpu) => (0.92 * gpus[gpu].gib - 1) * constants.GIB;
  const peakBytes = (row, options) => peakMemory(row, options).reduce((sum, each) => sum + each, 0);

  // Return the largest batch size that fits, up to the largest one of the page; 0 if even 1 does not fit.
  function largestBatch(row, options) {
    let good = 0, bad = Math.max(...samples.sizes.batch_size) + 1;
    while (bad - good > 1) {
      const middle = (good + bad) >> 1;
      if (peakBytes(row, { ...options, batch_size: middle }) <= usableBytes(options.gpu)) good = middle;
      else bad = middle;
    }
    return good;
  }

  // Return the planner's numbers for one row: see `plan_case` in book/recordings/will_it_fit.py.
  function plan(options) {
    const row = rows[options.row], { state, traffic } = fullBytes(row, options);
    return { state_bytes: state, sent_bytes: sentBytes(traffic, options.gpus), peak: peakMemory(row, options),
      peak_bytes: peakBytes(row, options), eager: stepSeconds(row, options, false),
      compiled: stepSeconds(row, options, true), fits: peakBytes(row, options) <= usableBytes(options.gpu) };
  }

  // Return the GPU-hours to train on a billion tokens, with a compiled model and one micro-batch per step and GPU.
  const billionTokenHours = (options, seconds) => (1e9 / (options.batch_size * options.block_size)) * (seconds / 3600);

  return { plan, billionTokenHours, largestBatch: (options) => largestBatch(rows[options.row], options), usableBytes };
}

Explorers.will_it_fit = function (root, samples) {
  const planner = makePlanner(samples), { rows, models, categories, constants } = samples;
  const colors = ["#4c78a8", "#e45756", "#b279a2", "#f2a93b", "#54a24b", "#9d9d9d"];
  const inGib = (bytes) => `${(bytes / constants.GIB).toFixed(1)} GiB`;
  const canRun = (row, model) => !rows[row].cannot.includes(model);
  const numbers = rows.map((_, i) => i);
  const firstFitting = (options) => numbers.find((row) =>
    canRun(row, options.model) && planner.plan({ ...options, row }).fits);
  const asked = { model: "gpt2-xl", gpus: 8, gpu: "a100-40", batch_size: 4, block_size: 1024, dtype: "bfloat16" };
  const names = ["baseline", "phase1", "phase3", "phase3 checkpointing=full"];
  const choices = rows.flatMap((row, i) => (names.includes(row.name) || i === firstFitting(asked) ? [i] : []));
  askFirst(root, "8 A100 GPUs with 40 GB train GPT-2 XL, with 4 sequences of 1,024 tokens on each. Which is the first " +
    "row of the plan that fits?", choices, firstFitting(asked), (row) => rows[row].name, reveal, "the planner's answer is");

  function reveal() {
    const fields = {
      model: ["model", Object.keys(models)], gpus: ["number of GPUs", samples.sizes.gpus],
      gpu: ["GPU", Object.keys(samples.gpus)], batch_size: ["sequences per GPU", samples.sizes.batch_size],
      block_size: ["tokens per sequence", samples.sizes.block_size], dtype: ["dtype", Object.keys(samples.dtype_bytes)],
    };
    const [priceLabel, price] = makeSelect("price of a GPU-hour", [0.5, 1, 1.5, 2, 3, 4, 6, 8], 2, show);
    const selects = Object.entries(fields).map(([key, [label, values]]) =>
      [key, ...makeSelect(label, values, asked[key], show)]);
    const sentence = make("p", { class: "sentence", role: "status" });
    const legend = make("p", { class: "legend" }, ...categories.flatMap((name, i) => [
      make("span", { class: "key", style: `background:${colors[i]}` }), `${name.replaceAll("_", " ")}  `]),
      make("span", { class: "key limit" }), "usable memory of the GPU");
    const output = makeScroll("the plan");
    root.append(make("p", { class: "choices" }, ...selects.map(([, label]) => label), priceLabel), sentence, legend, output);
    show();

    function show() {
      const options = Object.fromEntries(selects.map(([key, , select]) =>
        [key, typeof asked[key] === "number" ? Number(select.value) : select.value]));
      const usable = planner.usableBytes(options.gpu), first = firstFitting(options);
      sentence.textContent = first === undefined
        ? `Nothing fits into ${inGib(usable)}: choose more GPUs, fewer sequences, or a larger GPU.`
        : `The first row that fits into ${inGib(usable)}: ${rows[first].name}.`;
      const header = ["phase, options", "peak memory by category", "peak", "state", "fits", "largest batch",
        "cost of 10⁹ tokens", "sent per step (GB)", "step, compiled (ms)", "step, eager (ms)"];
      const cells = numbers.map((row) => showRow(row, options, first, Number(price.value)));
      output.replaceChildren(makeTable({ class: "plan" }, [header, ...cells]));
    }
  }

  function showRow(row, options, first, price) {
    const name = make("span", { class: row === first ? "first-fitting" : "" }, rows[row].name);
    if (!canRun(row, options.model)) {
      return [name, "its kernels do not accept this model", "", "", "no", "", "", "", "", ""];
    }
    const result = planner.plan({ ...options, row }), usable = planner.usableBytes(options.gpu);
    const scale = 50 / usable; // the limit is in the middle of the bar
    const parts = result.peak.map((bytes, i) => make("span",
      { style: `width:${bytes * scale}%;background:${colors[i]}`, title: `${categories[i]}: ${inGib(bytes)}` }));
    const bar = make("div", { class: "bar limited" }, ...parts);
    const state = Object.values(result.state_bytes).reduce((sum, each) => sum + each, 0);
    const largest = planner.largestBatch({ ...options, row }), isMaximum = largest === Math.max(...samples.sizes.batch_size);
    return [name, bar, inGib(result.peak_bytes), inGib(state), result.fits ? "yes" : "no",
      `${largest}${isMaximum ? "+" : ""}`,
      result.fits ? (price * planner.billionTokenHours(options, result.compiled)).toFixed(2) : "",
      (result.sent_bytes / 1e9).toFixed(2), (1e3 * result.compiled).toFixed(1), (1e3 * result.eager).toFixed(1)];
  }
};
