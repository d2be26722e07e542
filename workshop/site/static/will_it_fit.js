// The page "Will it fit?": every row of a plan for a model, a job and GPUs. planner.js has the formulas.
"use strict";

Explorers.will_it_fit = function (root, samples) {
  const planner = makePlanner(samples), { rows, models, categories, constants, sizes } = samples;
  const inGib = (bytes) => `${(bytes / constants.GIB).toFixed(1)} GiB`;
  const numbers = rows.map((_, i) => i);
  const firstFitting = (options) => numbers.find((row) =>
    !planner.findProblem({ ...options, row }) && planner.plan({ ...options, row }).fits);
  const asked = { model: "gpt2-xl", block_size: 1024, batch_size: 4, micro_batches: 1,
    dtype: "bfloat16", gpu: "a100-40", gpus: 8 };
  showPlan();

  function showPlan() {
    const groups = {
      "Model and batch": { model: ["model", Object.keys(models)], block_size: ["tokens per sequence", sizes.block_size],
        batch_size: ["sequences per micro-batch", sizes.batch_size], micro_batches: ["micro-batches per step", sizes.micro_batches] },
      Training: { dtype: ["dtype", Object.keys(samples.dtype_bytes)] },
      GPUs: { gpu: ["GPU", Object.keys(samples.gpus)], gpus: ["number of GPUs", sizes.gpus] },
    };
    const selects = {};
    const boxes = Object.entries(groups).map(([title, fields]) => {
      const labels = Object.entries(fields).map(([key, [label, values]]) => {
        const [element, select] = makeSelect(label, values, asked[key], show);
        selects[key] = select;
        return element;
      });
      return make("div", { class: "choices group", role: "group", "aria-label": title },
        make("span", { class: "group-title" }, title), ...labels);
    });
    const sentence = make("p", { class: "sentence", role: "status" });
    const legend = make("p", { class: "legend" }, ...categories.flatMap((name, i) => [
      make("span", { class: "entry" }, make("span", { class: "key", style: `background:${memoryColors[i]}` }),
        name === "gathered" ? "all-gathered parameters" : name.replaceAll("_", " ")), " "]),
      make("span", { class: "entry" }, make("span", { class: "key limit" }), "usable memory of the GPU"));
    const drawing = makeScroll("peak memory of every row"), output = makeScroll("the plan");
    root.append(...boxes, sentence, legend, drawing, output);
    show();

    function show() {
      const options = Object.fromEntries(Object.entries(selects).map(([key, select]) =>
        [key, typeof asked[key] === "number" ? Number(select.value) : select.value]));
      const first = firstFitting(options);
      sentence.textContent = describe(options, first);
      drawing.replaceChildren(drawMemory(options, first, Math.max(320, drawing.clientWidth)));
      const header = ["phase, options", "fits", "peak", "state", "largest batch (sequences)", "sent per step (GB)"];
      output.replaceChildren(makeTable({ class: "plan" }, [header, ...numbers.map((row) => showRow(row, options, first))]));
    }
  }

  // Return the first row that fits, or what to change if nothing fits.
  function describe(options, first) {
    const usable = inGib(planner.usableBytes(options.gpu));
    return first === undefined ? `Nothing fits into ${usable}: choose more GPUs, fewer sequences, or a larger GPU.`
      : `The first row that fits into ${usable}: ${rows[first].name}.`;
  }

  // Return the usual name of what a row shards or changes.
  function methodOf({ phase, options }) {
    if (options.zero_stage) return "ZeRO-2";
    if (options.fsdp_shard_size) return "FSDP, hybrid sharding";
    return { baseline: "DDP", phase1: "ZeRO-1", phase2: "DDP, Triton kernels", phase3: "FSDP" }[phase];
  }

  // Draw the peak memory of every row by category, up to twice the usable memory of the GPU.
  function drawMemory(options, first, width) {
    const usable = planner.usableBytes(options.gpu) / constants.GIB;
    const isNarrow = width < 600, planned = numbers.filter((row) => !planner.findProblem({ ...options, row }));
    const totals = planned.map((row) => ({ row, gib: planner.plan({ ...options, row }).peak_bytes / constants.GIB }));
    const bars = planned.flatMap((row) => planner.plan({ ...options, row }).peak
      .map((bytes, i) => ({ row, category: categories[i], gib: bytes / constants.GIB, title: `${categories[i]}: ${inGib(bytes)}` })));
    return drawPlot("peak memory of every row", {
      width, height: 60 + 30 * rows.length, marginLeft: isNarrow ? 180 : 400, marginRight: 16, marginBottom: 40,
      x: { domain: [0, 2 * usable], clamp: true, grid: true, label: "peak memory per GPU (GiB)", ticks: isNarrow ? 4 : 8 },
      y: { domain: numbers, label: null, tickSize: 0, tickFormat: (row) => (isNarrow ? shorten(rows[row].name) : rows[row].name) },
      color: { domain: categories, range: memoryColors },
      marks: [
        Plot.barX(bars, { x: "gib", y: "row", fill: "category", title: "title", order: categories }),
        Plot.text(totals.filter(({ gib }) => gib > 2 * usable), { x: () => 2 * usable, y: "row", text: ({ gib }) => `${gib.toFixed(0)} GiB >`,
          textAnchor: "end", dx: -4, fill: "white", fontWeight: 600 }),
        Plot.ruleX([usable], { stroke: "currentColor", strokeWidth: 3 }),
        Plot.barX(first === undefined ? [] : [first], { x1: 0, x2: 2 * usable, y: (row) => row, fill: "none",
          stroke: "var(--color-brand-primary)", strokeWidth: 2 }),
      ],
    });
  }

  // Return a name that fits on a narrow screen: the values of the options without their names.
  function shorten(name) { return name.replaceAll(/=True|(zero_|checkpointing=|kernels=|cpu_)/g, "").replace("stage=2", "ZeRO-2"); }

  function showRow(row, options, first) {
    const name = make("span", {}, make("span", { class: row === first ? "first-fitting" : "" }, rows[row].name),
      make("span", { class: "method" }, methodOf(rows[row])));
    const problem = planner.findProblem({ ...options, row });
    if (problem) return [name, "no", problem, "", "", ""];
    const result = planner.plan({ ...options, row });
    const state = Object.values(result.state_bytes).reduce((sum, each) => sum + each, 0);
    const largest = planner.largestBatch({ ...options, row }), isMaximum = largest === Math.max(...sizes.batch_size);
    return [name, result.fits ? "yes" : "no", inGib(result.peak_bytes), inGib(state),
      `${largest}${isMaximum ? "+" : ""}`, (result.sent_bytes / 1e9).toFixed(2)];
  }
};
