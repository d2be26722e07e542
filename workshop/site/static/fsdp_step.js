// The FSDP page: what every rank does over time, its memory, and which shards of each unit it stores after an event.
"use strict";

Explorers.fsdp_step = function (root, samples) {
  const { runs, units, categories, switches, ranks } = samples;
  checkRuns();
  const lanes = { computes: ["forward", "recompute", "backward", "update"], communicates: ["all-gather", "reduce-scatter"] };
  const kinds = Object.values(lanes).flat(), kindColors = ["#56b4e9", "#0072b2", "#009e73", "#999999", "#e69f00", "#d55e00"];
  const margins = { marginLeft: 62, marginRight: 12 };
  const names = { fsdp_activation_checkpointing: "activation checkpointing", fsdp_reshard_after_forward: "reshard after forward" };
  const words = { true: "on", false: "off" };
  const format = (value) => words[value] ?? String(value);
  const defaults = Object.fromEntries(Object.entries(switches).map(([name, [first]]) => [name, first]));
  const sum = (values) => values.reduce((total, value) => total + value, 0);
  const sent = (run) => sum(Object.values(run.ring_bytes));
  const find = (options) => runs.find((run) => Object.keys(switches).every((name) => run.options[name] === options[name]));

  // The answer is the change of one switch after which each rank sends the fewest bytes.
  const changes = Object.entries(switches).map(([name, values]) => ({ name, value: values[1], text: `${names[name]}: ${format(values[1])}` }));
  const best = changes.reduce((a, b) => (sentAfter(b) < sentAfter(a) ? b : a));
  askFirst(root, "which of these changes makes each rank send fewer bytes in a step?", changes.map(({ text }) => text), best.text,
    (text) => text, reveal, `each rank sends ${formatBytes(sent(find(defaults)))} by default, and ${formatBytes(sentAfter(best))} with`);

  function sentAfter({ name, value }) { return sent(find({ ...defaults, [name]: value })); }

  function checkRuns() {
    const isFull = (table, length) => table.length === ranks && table.every((byEvent) => byEvent.length === length);
    const isComplete = ({ events, memory, begin_ms: begins, ring_bytes: bytes, peak }) => events.length && isFull(memory, events.length) &&
      memory.flat().every((values) => values.length === categories.length) && isFull(begins, events.length) && bytes && isFull(peak, categories.length);
    const count = Object.values(switches).reduce((product, values) => product * values.length, 1);
    if (runs.length !== count || !runs.every(isComplete)) throw new Error("a run, a rank or an event is missing");
  }

  // Return the units whose full parameters every rank has after the given event.
  function gatheredUnits(events, last) {
    const gathered = new Set();
    for (const [kind, unit] of events.slice(0, last + 1)) {
      if (kind === "all-gather") gathered.add(unit);
      else if (kind === "free") gathered.delete(unit);
    }
    return gathered;
  }

  // Draw what each rank does: a bar lasts until the next event of the rank begins.
  function drawTimeline({ events, begin_ms: begins }, width, end) {
    const bars = begins.flatMap((times, rank) => events.flatMap(([kind, unit], i) => (kinds.includes(kind)
      ? [{ rank, kind, lane: Object.keys(lanes).find((lane) => lanes[lane].includes(kind)), begin: times[i], end: times[i + 1] ?? end,
        title: `rank ${rank}: ${kind} of ${unit}, ${times[i].toFixed(1)} ms` }] : [])));
    return drawPlot("what each rank does over time", {
      width, height: 210, ...margins,
      x: { domain: [0, end], label: null, ticks: 6, grid: true }, y: { domain: Object.keys(lanes), axis: null, padding: 0.1 },
      fy: { label: null, tickFormat: (rank) => `rank ${rank}`, padding: 0.25 }, facet: { marginRight: margins.marginRight },
      color: { domain: kinds, range: kindColors },
      marks: [Plot.barX(bars, { x1: "begin", x2: "end", y: "lane", fy: "rank", fill: "kind", title: "title", insetRight: 0.5 })],
    });
  }

  // Draw the memory of rank 0 by category, under the same axis of time.
  function drawMemory({ events, memory, begin_ms: begins }, width, end, largest) {
    const times = [...begins[0].slice(1), end]; // at which the events have ended
    const points = [[begins[0][0], memory[0][0]], ...times.map((time, i) => [time, memory[0][i]])].flatMap(([time, values]) =>
      categories.map((category, j) => ({ time, category, megabytes: values[j] / 1e6 })));
    return drawPlot("memory of rank 0 over time", {
      width, height: 200, ...margins, marginBottom: 42,
      x: { domain: [0, end], label: "milliseconds since the first event of any rank", ticks: 6 },
      y: { domain: [0, largest / 1e6], label: "memory of rank 0 (MB)", grid: true, ticks: 5 },
      color: { domain: categories, range: memoryColors },
      marks: [Plot.areaY(points, { x: "time", y: "megabytes", fill: "category", order: categories, curve: "step-after" })],
    });
  }

  // Draw the shards of each unit that each rank stores: one color for the shard of each rank.
  function drawUnits({ events }, position, width) {
    const gathered = gatheredUnits(events, position), [kind, current] = events[position];
    const owners = [...Array(ranks).keys()], space = ranks + 1;
    const cells = owners.flatMap((rank) => units.flatMap((unit, i) => owners.map((owner) =>
      ({ rank, x: i * space + owner, owner, isStored: owner === rank || gathered.has(unit) }))));
    const marked = units.flatMap((unit, i) => (unit === current || kind === "update" ? [i * space] : []));
    return drawPlot("shards of each unit that each rank stores", {
      width, height: 150, ...margins, marginTop: 24,
      x: { domain: [-0.5, units.length * space - 0.5], axis: "top", ticks: units.map((_, i) => i * space + ranks / 2), tickSize: 0,
        tickFormat: (x) => units[Math.floor(x / space)], label: null },
      y: { domain: owners, label: null, tickSize: 0, tickFormat: (rank) => `rank ${rank}` },
      marks: [
        Plot.barX(cells, { x1: "x", x2: ({ x }) => x + 1, y: "rank", insetLeft: 1, insetTop: 2, insetBottom: 2, stroke: "currentColor",
          strokeOpacity: 0.35, fill: ({ owner, isStored }) => (isStored ? rankColors[owner] : "none") }),
        Plot.rect(marked, { x1: (x) => x - 0.25, x2: (x) => x + ranks + 0.25, stroke: "var(--color-brand-primary)", strokeWidth: 3, fill: "none" }),
      ],
    });
  }

  // Add a vertical line to a plot. Return a function that moves it to a time, in one facet or over the full height.
  function addMarker(plot, facet) {
    const svg = plot.tagName === "svg" ? plot : plot.querySelector("svg"), x = plot.scale("x"), fy = plot.scale("fy");
    const [top, height] = facet === undefined ? [plot.scale("y").range[1], plot.scale("y").range[0] - plot.scale("y").range[1]]
      : [fy.apply(facet), fy.bandwidth];
    const line = document.createElementNS("http://www.w3.org/2000/svg", "line");
    for (const [name, value] of Object.entries({ y1: top, y2: top + height, stroke: "currentColor", "stroke-width": 2 })) line.setAttribute(name, value);
    svg.append(line);
    return (time) => { for (const name of ["x1", "x2"]) line.setAttribute(name, x.apply(time)); };
  }

  function describe([kind, unit, size], isFirst) {
    const name = unit === "root" ? "the root" : unit;
    const part = unit !== "root" ? "" : isFirst ? ": the embeddings" : ": the last LayerNorm, the head and the loss";
    return {
      "all-gather": `All ranks all-gather the parameters of ${name}: ${formatBytes(size)}.`,
      forward: `${name} runs its forward pass${part}.`,
      recompute: `${name} runs its forward pass again, because its activations were not saved.`,
      backward: `${name} runs its backward pass.`,
      free: `Each rank frees the full parameters of ${name} and keeps its shard.`,
      "reduce-scatter": `All ranks reduce-scatter the gradients of ${name}: ${formatBytes(size)}.`,
      update: "Each rank updates its shards.",
    }[kind];
  }

  function reveal() {
    const largest = Math.max(...runs.flatMap((run) => run.memory.flat().map(sum)));
    const selects = Object.entries(switches).map(([name, values]) => [name, values, ...makeSelect(names[name], values, values[0], restart, format)]);
    const summary = make("p", { class: "summary" });
    const sentence = make("p", { class: "sentence", "aria-live": "polite" });
    const timeline = make("div"), memoryPlot = make("div"), unitPlot = make("div");
    const volume = make("p", { class: "volume" }), totals = make("p");
    let markers = [], lastEnd = 0;
    const run = () => find(Object.fromEntries(selects.map(([name, values, , select]) => [name, values.find((value) => String(value) === select.value)])));
    root.append(make("p", { class: "choices" }, ...selects.map(([, , label]) => label)), summary);
    const stepper = addStepper(root, "event of the step", run().events.length, show);
    root.append(sentence, makeLegend(rankColors.slice(0, ranks).map((_, rank) => `shard of rank ${rank}`), rankColors),
      makeScroll("shards of the ranks", unitPlot), makeLegend(kinds, kindColors), makeScroll("timeline of the ranks", timeline),
      makeLegend(categories, memoryColors), makeScroll("memory of rank 0", memoryPlot), totals, volume);
    restart();

    function restart() {
      const { events, peak, loss } = run();
      const gathers = events.filter(([kind, unit]) => kind === "all-gather" && unit !== "root").length / (units.length - 1);
      summary.textContent = `In this run, a rank all-gathers each block ${gathers === 1 ? "once" : `${gathers} times`} and sends ` +
        `${formatBytes(sent(run()))} (ring algorithm). Its peak memory, inside an event, is ${formatBytes(Math.max(...peak.map(sum)))}. The loss is ${loss.toFixed(6)}.`;
      const { begin_ms: begins } = run(), width = Math.max(560, root.clientWidth);
      const end = lastEnd = 1.02 * Math.max(...begins.flat());
      const plots = [drawTimeline(run(), width, end), drawMemory(run(), width, end, largest)];
      [timeline, memoryPlot].forEach((place, i) => place.replaceChildren(plots[i]));
      markers = [...begins.map((_, rank) => addMarker(plots[0], rank)), addMarker(plots[1])];
      stepper.setCount(events.length);
    }

    function show(position) {
      const { events, memory, begin_ms: begins } = run(), [kind, current] = events[position];
      const isFirst = events.findIndex(([each, unit]) => each === kind && unit === current) === position;
      sentence.textContent = `Event ${position + 1} of ${events.length}: ${describe(events[position], isFirst)}`;
      const tensors = sum(events.slice(0, position + 1).map(([, , size]) => size));
      volume.textContent = `Each rank has sent ${formatBytes(tensors * (ranks - 1) / ranks)} with the ring algorithm.`;
      unitPlot.replaceChildren(drawUnits(run(), position, Math.max(560, root.clientWidth)));
      markers.forEach((move, rank) => move(begins[rank % ranks][position + 1] ?? lastEnd));
      for (const plot of [timeline, memoryPlot]) { // keep the lines visible on a narrow screen
        const area = plot.parentElement, part = (begins[0][position + 1] ?? lastEnd) / lastEnd;
        area.scrollLeft = part * area.scrollWidth - area.clientWidth / 2;
      }
      totals.replaceChildren("The vertical lines show where each rank has finished this event. Memory after it: ", ...memory.flatMap((byEvent, rank) => [
        `${rank ? "; " : ""}rank ${rank}: `, make("span", { class: "total" }, formatBytes(sum(byEvent[position])))]), ".");
    }
  }
};
