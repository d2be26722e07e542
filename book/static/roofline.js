// The roofline page: the FLOPs and bytes of every kernel, and the limits of a GPU.
"use strict";

// Return the limit of a kernel and its shortest time in seconds: that of its bytes or that of its FLOPs.
function evaluateRoofline({ peak, bandwidth }, [, , bytes, flops]) {
  const memory = bytes / bandwidth, arithmetic = flops / peak;
  return { limit: memory > arithmetic ? "memory" : "arithmetic", seconds: Math.max(memory, arithmetic),
    intensity: flops / bytes };
}

Explorers.roofline = function (root, samples) {
  const { gpus, shapes, measured } = samples;
  const isComplete = shapes.length > 0 && Array.isArray(measured) && shapes.every(({ costs }) => costs.length &&
    costs.every(([name, pass, bytes, flops]) => name && pass && bytes > 0 && flops > 0)) &&
    Object.values(gpus).every(({ peak, bandwidth }) => peak > 0 && bandwidth > 0);
  if (!isComplete) throw new Error("a GPU or a kernel is incomplete");
  const keys = { model: "model", batch_size: "sequences", block_size: "tokens per sequence" };
  const asked = { model: "gpt2", batch_size: 16, block_size: 1024 }, askedGpu = "h100";
  const find = (values) => shapes.find((shape) => Object.keys(keys).every((key) => String(shape[key]) === String(values[key])));
  const attention = find(asked).costs.find(([name, pass]) => name === "attention" && pass === "forward");
  const answer = evaluateRoofline(gpus[askedGpu], attention).limit;
  askFirst(root, "what limits the forward pass of attention on an H100, for GPT-2 with 16 sequences of 1,024 tokens?",
    ["memory", "arithmetic"], answer, (limit) => (limit === "memory" ? "reading and writing memory" : "arithmetic"), reveal,
    "the cost function's answer is");

  function reveal() {
    const selects = Object.entries(keys).map(([key, label]) =>
      [key, ...makeSelect(label, [...new Set(shapes.map((shape) => shape[key]))], asked[key], show)]);
    const [gpuLabel, gpu] = makeSelect("GPU", Object.keys(gpus), askedGpu, show);
    const sentence = make("p", { class: "sentence", role: "status" });
    const chart = makeScroll("roofline"), table = makeScroll("kernels"), measurements = make("div", {});
    root.append(make("p", { class: "choices" }, gpuLabel, ...selects.map(([, label]) => label)), sentence, chart, table,
      measurements);
    show();

    function show() {
      const { costs } = find(Object.fromEntries(selects.map(([key, , select]) => [key, select.value])));
      const limits = gpus[gpu.value], results = costs.map((cost) => evaluateRoofline(limits, cost));
      const memory = results.filter(({ limit }) => limit === "memory").length;
      sentence.textContent = `On this GPU, memory limits a kernel with less than ${ridge(limits).toFixed(0)} FLOPs per byte: ` +
        `${memory} of these ${costs.length} passes.`;
      chart.replaceChildren(drawRoofline(limits, results));
      const header = ["pass", "memory traffic (MB)", "GFLOPs", "FLOPs per byte", "limit", "shortest time (µs)"];
      table.replaceChildren(makeTable({ class: "kernels" }, [header, ...costs.map(([name, pass, bytes, flops], i) => [
        `${i + 1}. ${name}, ${pass}`, format(bytes / 1e6), format(flops / 1e9), results[i].intensity.toFixed(1),
        results[i].limit, format(results[i].seconds * 1e6)])]));
      measurements.replaceChildren(showMeasurements());
    }
  }

  function ridge({ peak, bandwidth }) { return peak / bandwidth; }

  function format(value) {
    return value.toLocaleString("en-US", { minimumFractionDigits: 1, maximumFractionDigits: 1 });
  }

  // Return the measured kernels, or a sentence if there are none.
  function showMeasurements() {
    if (!measured.length) return make("p", { class: "measured" }, "No GPU has measured these kernels yet.");
    const header = ["kernel", "hardware", "shape", "measured (ms)", "TFLOP/s", "GB/s"];
    return makeScroll("measured kernels", makeTable({ class: "measured" }, [header, ...measured.map((row) => [
      `${row.kernel}, ${row.pass}`, row.hardware, row.shape, row.ms.toFixed(3), (row.flops / row.ms / 1e9).toFixed(1),
      (row.bytes / row.ms / 1e6).toFixed(0)])]));
  }

  // Draw the limits of a GPU, and each kernel at its FLOPs per byte. Both axes are logarithmic.
  function drawRoofline(limits, results) {
    const width = fitWidth(root, 640), height = 340, left = 60, right = 14, top = 48, bottom = 44, log = Math.log10;
    const range = { x: [-1.5, 3.5], y: [log(limits.peak) - 6, log(limits.peak) + 0.5] };
    const x = (value) => left + ((log(value) - range.x[0]) / (range.x[1] - range.x[0])) * (width - left - right);
    const y = (value) => height - bottom - ((log(value) - range.y[0]) / (range.y[1] - range.y[0])) * (height - top - bottom);
    const inside = (value) => Math.max(10 ** range.x[0], Math.min(10 ** range.x[1], value));
    const roof = [10 ** range.x[0], ridge(limits), 10 ** range.x[1]].map((intensity) =>
      `${x(intensity)},${y(Math.min(limits.peak, intensity * limits.bandwidth))}`).join(" ");
    const text = (value, attributes) => makeSvg("text", attributes, value);
    const marks = [0.1, 1, 10, 100, 1000].map((value) =>
      text(String(value), { x: x(value), y: height - bottom + 16, "text-anchor": "middle" }));
    const order = results.map((_, i) => i).sort((a, b) => results[a].intensity - results[b].intensity);
    const points = results.map(({ intensity, limit }, i) => {
      const rate = Math.min(limits.peak, intensity * limits.bandwidth), at = x(inside(intensity));
      const shift = [-8, 18, -20, 30, -32, 42][order.indexOf(i) % 6]; // neighbors have labels at different heights
      return makeSvg("g", { class: `point ${limit}` }, makeSvg("circle", { cx: at, cy: y(rate), r: 4 }),
        text(String(i + 1), { x: at, y: y(rate) + shift, "text-anchor": "middle" }));
    });
    const crosses = measured.map((row) => makeSvg("circle", { class: "measured", r: 4,
      cx: x(inside(row.flops / row.bytes)), cy: y(1e3 * row.flops / row.ms) }));
    return make("figure", {}, make("figcaption", {}, "Limit of each pass: memory (orange) or arithmetic (blue). The numbers are those of the table."),
      makeSvg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", class: "wide",
        "aria-label": "roofline: FLOPs per second over FLOPs per byte; the table below has the same values" },
        makeSvg("path", { class: "axis", fill: "none", d: `M${left},${top}V${height - bottom}H${width - right}` }), ...marks,
        text("FLOPs per byte", { x: (left + width) / 2, y: height - 6, "text-anchor": "middle" }),
        text("TFLOP/s", { x: left - 52, y: top - 30 }),
        text(format(limits.peak / 1e12), { x: left - 6, y: y(limits.peak) + 4, "text-anchor": "end" }),
        makeSvg("polyline", { class: "line line-0", fill: "none", points: roof }), ...points, ...crosses));
  }
};
