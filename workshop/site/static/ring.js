// The ring page: which chunk every rank sends in each step, what its chunks contain, and what ring, tree and gloo cost.
"use strict";

const ALL_CHUNKS = -1; // the number of the chunk if a rank sends its full tensor

// Return the ranks in a recorded value: rank r contributed 2^r.
function ranksIn(value) {
  return [...value.toString(2)].reverse().flatMap((bit, rank) => (bit === "1" ? [rank] : []));
}

// Throw an error if a run is incomplete: in every step, some rank sends, and every rank has N chunks.
function checkRing(run) {
  const isComplete = (chunks) => chunks.length === run.ranks;
  const isSend = ({ to, chunk, bytes }) => to === undefined || (Number.isInteger(chunk) && bytes > 0 && to < run.ranks);
  const isRight = run.steps.every((sends) => sends.length === run.ranks && sends.some(({ bytes }) => bytes > 0) &&
    sends.every((send) => isSend(send) && isComplete(send.chunks)));
  if (!isRight || !isComplete(run.end) || !run.end.every(isComplete) || !(run.predicted_bytes > 0)) {
    throw new Error(`the ${run.collective} over ${run.ranks} ranks is incomplete`);
  }
}

// Return the bytes of the largest message of each step, as parts of the tensor.
function largestMessages(run) {
  return run.steps.map((sends) => Math.max(...sends.map(({ bytes = 0 }) => bytes)) / run.tensor_bytes);
}

// Return the seconds of a run in the latency-bandwidth model (Hockney 1994).
function predictSeconds(run, tensorBytes, latency, bandwidth) {
  return largestMessages(run).reduce((sum, part) => sum + latency + (part * tensorBytes) / bandwidth, 0);
}

// Return the tensor size below which the second run is faster than the first one: where both need the same time.
function findCrossover(first, second, latency, bandwidth) {
  const parts = (run) => largestMessages(run).reduce((sum, part) => sum + part, 0);
  return (latency * bandwidth * (first.steps.length - second.steps.length)) / (parts(second) - parts(first));
}

// Draw the ranks on a circle with their chunks, and an arrow for each message of a step. A chunk has one stripe for each
// rank whose values it contains.
function drawRing(chunks, sends, isRing, space) {
  const count = chunks.length, isLarge = count > 4, width = isLarge ? Math.max(800, space) : Math.max(330, Math.min(620, space)), height = isLarge ? 540 : 400;
  const chunkWidth = Math.min(38, 150 / count), gap = chunkWidth / 8, rowHeight = 30;
  const boxes = chunks.map((_, rank) => {
    const angle = 2 * Math.PI * rank / count - Math.PI / 2;
    return { rank, x: width / 2 + (width / 2 - 82) * Math.cos(angle), y: height / 2 + (height / 2 - 60) * Math.sin(angle) };
  });
  const left = ({ x }) => x - count * chunkWidth / 2;
  const cells = boxes.flatMap((box) => chunks[box.rank].map((value, chunk) => ({
    chunk, x1: left(box) + chunk * chunkWidth, x2: left(box) + (chunk + 1) * chunkWidth - gap, y1: box.y - rowHeight / 2, y2: box.y + rowHeight / 2,
    isSent: sends && [chunk, ALL_CHUNKS].includes(sends[box.rank].chunk), value })));
  const stripes = cells.flatMap((cell) => ranksIn(cell.value ?? 0).map((rank) => {
    const stripe = (cell.x2 - cell.x1) / count;
    return { ...cell, rank, x1: cell.x1 + rank * stripe, x2: cell.x1 + (rank + 1) * stripe };
  }));
  const along = (from, to, part) => ({ x: from.x + part * (to.x - from.x), y: from.y + part * (to.y - from.y) });
  const links = boxes.map((box) => {
    const next = boxes[(box.rank + 1) % count], [begin, end] = [along(box, next, 0.24), along(box, next, 0.76)];
    return { x1: begin.x, y1: begin.y, x2: end.x, y2: end.y };
  });
  const arrows = (sends ?? []).flatMap(({ to, chunk }, rank) => {
    if (to === undefined) return [];
    const [from, target] = [boxes[rank], boxes[to]], distance = Math.hypot(target.x - from.x, target.y - from.y);
    const [begin, end, middle] = [0.24, 0.76, 0.5].map((part) => along(from, target, part));
    const label = chunk === ALL_CHUNKS ? "all" : `chunk ${chunk}`;
    return distance ? [{ x1: begin.x, y1: begin.y, x2: end.x, y2: end.y, x: middle.x, y: middle.y, rank, label }] : [];
  });
  const corners = { x1: "x1", x2: "x2", y1: "y1", y2: "y2" };
  return drawPlot("the chunks of each rank, and the messages of this step", {
    width, height, margin: 0,
    x: { type: "identity", axis: null }, y: { type: "identity", axis: null },
    marks: [
      Plot.rect(stripes, { ...corners, fill: ({ rank }) => rankColors[rank] }),
      Plot.rect(cells, { ...corners, stroke: "currentColor", strokeOpacity: 0.5, fill: "none" }),
      Plot.rect(cells.filter(({ isSent }) => isSent), { ...corners, stroke: "var(--color-brand-primary)", strokeWidth: 3, fill: "none" }),
      Plot.text(cells, { x: ({ x1, x2 }) => (x1 + x2) / 2, y: ({ y2 }) => y2 + 10, text: "chunk", fontSize: 11 }),
      isRing ? Plot.arrow(links, { x1: "x1", y1: "y1", x2: "x2", y2: "y2", bend: 8, strokeOpacity: 0.2 }) : null,
      Plot.text(boxes, { x: "x", y: ({ y }) => y - rowHeight, text: ({ rank }) => `rank ${rank}`, fontWeight: 600 }),
      Plot.arrow(arrows, { x1: "x1", y1: "y1", x2: "x2", y2: "y2", bend: 8, strokeWidth: 2, headLength: 7 }),
      Plot.text(arrows, { x: "x", y: "y", text: "label", fill: "currentColor", stroke: "var(--color-background-primary)", strokeWidth: 6 }),
    ],
  });
}

const formatSize = (bytes) => {
  const [unit, name] = [[1e9, "GB"], [1e6, "MB"], [1e3, "kB"], [1, "bytes"]].find(([each]) => bytes >= each) ?? [1, "bytes"];
  return `${Number((bytes / unit).toPrecision(3))} ${name}`;
};

Explorers.ring = function (root, samples) {
  samples.runs.forEach(checkRing);
  const { gloo, link } = samples;
  if (!gloo.length || !(link.latency > 0 && link.bandwidth > 0)) throw new Error("the costs are missing");
  const sizes = [1e3, 1e4, 1e5, 1e6, 1e7, 1e8, 1e9];
  const find = (collective, ranks, algorithm) => samples.runs.find((run) =>
    run.collective === collective && run.ranks === Number(ranks) && run.algorithm === algorithm);
  const sentBy = (run, rank, steps) => run.steps.slice(0, steps).reduce((sum, sends) => sum + (sends[rank].bytes ?? 0), 0);
  const asked = find("all-reduce", 4, "ring");
  const total = sentBy(asked, 0, asked.steps.length);
  const choices = [asked.tensor_bytes / 4, asked.tensor_bytes, total, asked.tensor_bytes * 3];
  askFirst(root, `4 ranks all-reduce a tensor of ${formatBytes(asked.tensor_bytes)} on a ring. How much does each rank send?`,
    choices, total, formatBytes, reveal);

  function reveal() {
    const unique = (key) => [...new Set(samples.runs.map((run) => run[key]))];
    const [collectiveLabel, collective] = makeSelect("collective", unique("collective"), "all-reduce", restart);
    const [ranksLabel, ranks] = makeSelect("number of ranks", unique("ranks"), 4, restart);
    const [algorithmLabel, algorithm] = makeSelect("algorithm", unique("algorithm"), "ring", restart);
    const sentence = make("p", { class: "sentence", "aria-live": "polite" });
    const volume = make("p", { class: "volume" });
    const table = make("table", {}), picture = make("div");
    root.append(make("p", { class: "choices" }, collectiveLabel, ranksLabel, algorithmLabel));
    const run = () => find(collective.value, ranks.value, algorithm.value);
    const stepper = addStepper(root, "step of the collective", run().steps.length + 1, show);
    const legend = make("div");
    const area = makeScroll("picture of the ring", picture);
    root.append(sentence, legend, area, volume, makeScroll("chunks of all ranks", table));
    const showCosts = addCosts(() => [collective.value, Number(ranks.value)]);
    restart();

    function restart() {
      const hasTree = Boolean(find(collective.value, ranks.value, "tree"));
      algorithm.disabled = !hasTree;
      if (!hasTree) algorithm.value = "ring";
      legend.replaceChildren(makeLegend(rankColors.slice(0, run().ranks).map((_, rank) => `values of rank ${rank}`), rankColors));
      stepper.setCount(run().steps.length + 1);
      showCosts();
    }

    function show(step) {
      const { steps, end, ranks: count, predicted_bytes: predicted } = run();
      const sends = steps[step];
      const chunks = sends ? sends.map((send) => send.chunks) : end;
      const what = (chunk) => (chunk === ALL_CHUNKS ? "all chunks" : `chunk ${chunk}`);
      sentence.textContent = sends
        ? `Step ${step + 1} of ${steps.length}: ` + sends.flatMap(({ to, chunk }, rank) =>
          (to === undefined ? [] : [`rank ${rank} sends ${what(chunk)} to rank ${to}`])).join("; ") + "."
        : `After ${steps.length} of ${steps.length} steps: ${describeEnd(collective.value)}`;
      picture.replaceChildren(drawRing(chunks, sends, run().algorithm === "ring", area.clientWidth));
      table.classList.toggle("many", count > 4);
      const header = make("tr", {}, make("th", {}, ""),
        ...chunks.map((_, chunk) => make("th", { scope: "col" }, `chunk ${chunk}`)));
      table.replaceChildren(header, ...chunks.map((values, rank) => make("tr", {},
        make("th", { scope: "row" }, `rank ${rank}`),
        ...values.map((value, chunk) => showChunk(value, count, sends && [chunk, ALL_CHUNKS].includes(sends[rank].chunk))))));
      volume.textContent = `Rank 0 has sent ${formatBytes(sentBy(run(), 0, step))}. The tensor has ${formatBytes(run().tensor_bytes)}. ` +
        `The formula gives ${formatBytes(predicted)} for rank 0 in all steps.`;
    }
  }

  // Add the costs of ring, tree and gloo for a tensor of any size. Return the function that shows them.
  function addCosts(selected) {
    const [sizeLabel, size] = makeSelect("tensor", sizes, 1e6, show, formatSize);
    const number = (name, value) => {
      const input = make("input", { type: "number", class: name, min: 0, step: "any", value, oninput: show });
      return [input, (text) => make("label", {}, `${text} `, input, " ")];
    };
    const [latency, labelLatency] = number("latency", Number((1e6 * link.latency).toPrecision(6)));
    const [bandwidth, labelBandwidth] = number("bandwidth", Number((link.bandwidth / 1e9).toPrecision(6)));
    const sentence = make("p", { class: "crossover", role: "status" }), table = makeScroll("costs of the algorithms");
    root.append(make("p", { class: "part" }, "What it costs for a tensor of another size"),
      make("p", { class: "choices" }, sizeLabel, labelLatency("latency of a message (µs)"), labelBandwidth("bandwidth (GB/s)")),
      make("p", {}, `The first values are those that the planner assumes between two GPUs (${link.gpu}) of a node. ` +
        "Enter those of your network."), table, sentence);
    return show;

    function show() {
      const [collective, ranks] = selected(), bytes = Number(size.value), [alpha, beta] = [latency.value / 1e6, bandwidth.value * 1e9];
      if (!(alpha > 0 && beta > 0)) {
        sentence.textContent = "Enter a latency and a bandwidth that are larger than 0.";
        table.replaceChildren();
        return;
      }
      const [ring, tree] = ["ring", "tree"].map((name) => find(collective, ranks, name));
      const rows = [ring, tree].filter(Boolean).map((run) => [run.algorithm, String(run.steps.length),
        formatBytes((run.predicted_bytes / run.tensor_bytes) * bytes), `${(1e6 * predictSeconds(run, bytes, alpha, beta)).toFixed(1)} µs`]);
      const measured = gloo.filter((row) => row.kind === collective && row.ranks === ranks);
      rows.push(...measured.map((row) => [`gloo (measured average, ${row.hardware})`, "-", formatBytes(row.sent_per_tensor_byte * bytes), "-"]));
      table.replaceChildren(makeTable({ class: "costs" }, [["algorithm", "steps", "volume per rank, maximum", "predicted time"], ...rows]));
      sentence.textContent = [tree ? compare(ring, tree, alpha, beta) : "A tree sends full tensors, so it suits only all-reduce and broadcast.",
        measured.length ? "" : `We have not measured what gloo sends for this collective on ${ranks} ranks.`].join(" ").trim();
    }
  }

  function compare(ring, tree, alpha, beta) {
    const steps = ring.steps.length - tree.steps.length;
    if (steps <= 0) return "The tree has no fewer steps than the ring, so it is never faster.";
    const crossover = findCrossover(ring, tree, alpha, beta);
    if (!(crossover > 0)) return "The tree has fewer steps and sends no larger messages, so it is always faster.";
    return `The tree is faster for tensors smaller than ${formatSize(crossover)}, because it has ${steps} fewer ${steps > 1 ? "steps" : "step"}. ` +
      "The ring is faster for larger ones, because it sends smaller messages.";
  }

  function showChunk(value, count, isSent) {
    const ranks = value === null ? [] : ranksIn(value);
    const state = ranks.length === count ? "complete" : ranks.length > 1 ? "partial" : "";
    return make("td", { class: `${state} ${isSent ? "sent" : ""}` }, ranks.length ? ranks.join("+") : "empty");
  }

  function describeEnd(collective) {
    if (collective === "all-gather") return "every rank has the chunks of all ranks.";
    if (collective === "all-reduce") return "every rank has every chunk of the sum.";
    if (collective === "broadcast") return "every rank has the values of rank 0.";
    return "rank r has chunk r of the sum. Its other chunks are not used any more.";
  }
};
