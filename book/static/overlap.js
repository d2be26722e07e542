// The overlap page: computation and communication of DDP, ZeRO-1 and FSDP on one time axis, for each bucket size.
"use strict";

Explorers.overlap = function (root, samples) {
  const { runs, methods, sizes_mb: sizes, steps, ranks } = samples;
  const find = (method, size) => runs.find((run) => run.method === method && run.bucket_mb === size);
  const isComplete = methods.length > 0 && sizes.length > 1 && methods.every((method) => sizes.every((size) => {
    const run = find(method, size);
    return run && run.summary.step_ms > 0 && run.stages.length === 3 * steps && run.communication.length && run.computation.length;
  }));
  if (!isComplete) throw new Error("a run is missing or incomplete");
  const last = sizes.at(-1), choices = [0, 0.5, 0.9], percent = (part) => `${Math.round(100 * part)}%`;
  const recorded = find("DDP", last).summary.overlap;
  const answer = [...choices].sort((a, b) => Math.abs(a - recorded) - Math.abs(b - recorded))[0];
  askFirst(root, `DDP all-reduces all gradients in one bucket of at most ${last} MB. How much of the communication overlaps ` +
    "with computation?", choices, answer, (part) => `about ${percent(part)}`, reveal);

  function reveal() {
    const sentence = make("p", { class: "sentence", role: "status" });
    const legend = make("p", { class: "legend" }, ...["computation", "communication"].flatMap((kind) => [
      make("span", { class: `key ${kind}` }), `${kind}  `]));
    const lanes = makeScroll("timelines"), table = makeScroll("times");
    const stepper = addStepper(root, "largest bucket", sizes.length, show);
    root.append(sentence, legend, lanes, table);
    stepper.go(sizes.length - 1); // the case of the question

    function show(position) {
      const size = sizes[position], shown = methods.map((method) => find(method, size));
      sentence.textContent = `Buckets of at most ${size} MB; FSDP: units of at least ${size} MB, and the rest in the root. ` +
        `${steps} steps on ${ranks} ranks, rank 0.`;
      const end = Math.max(...shown.map((run) => run.stages.at(-1)[2]));
      lanes.replaceChildren(...shown.map((run) => drawRun(run, end)));
      const header = ["method", "buckets or units", "step (ms)", "computation (ms)", "communication (ms)",
        "not overlapped (ms)", "overlap"];
      table.replaceChildren(makeTable({ class: "times" }, [header, ...shown.map(({ method, buckets, summary }) => [method,
        String(buckets), ...["step_ms", "computation_ms", "communication_ms", "exposed_ms"].map((key) =>
          summary[key].toFixed(1)), percent(summary.overlap)])]));
    }
  }

  // Draw both rows of a run. All methods have the same time axis, which ends at `end` ms.
  function drawRun({ method, stages, computation, communication }, end) {
    const width = fitWidth(root, 700), height = 92, left = 8, right = 8, top = 26;
    const x = (ms) => left + (Math.max(0, Math.min(end, ms)) / end) * (width - left - right);
    const bars = (spans, y) => spans.map(([begin, stop]) =>
      `M${x(begin).toFixed(1)},${y}h${Math.max(0.3, x(stop) - x(begin)).toFixed(1)}v20h-${Math.max(0.3, x(stop) - x(begin)).toFixed(1)}z`).join("");
    const text = (value, attributes) => makeSvg("text", attributes, value);
    const marks = stages.flatMap(([name, begin, stop]) => [
      makeSvg("path", { class: "axis", d: `M${x(begin).toFixed(1)},${top - 6}v54` }),
      x(stop) - x(begin) > 56 ? text(name, { x: x(begin) + 3, y: top - 8 }) : ""]);
    return make("figure", {}, make("figcaption", {}, method),
      makeSvg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", class: "wide",
        "aria-label": `${method}: computation and communication over ${end.toFixed(0)} ms; the table has the times` }, ...marks,
        makeSvg("path", { class: "computation", d: bars(computation, top) }),
        makeSvg("path", { class: "communication", d: bars(communication, top + 24) }),
        text("0", { x: left, y: height - 4 }),
        text(`${end.toFixed(0)} ms`, { x: width - right, y: height - 4, "text-anchor": "end" })));
  }
};
