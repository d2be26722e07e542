// The flash attention page: the tiles of scores in the order of the kernel, and its running values for each query.
"use strict";

Explorers.flash_attention = function (root, samples) {
  const { tokens, channels, tile, steps, output, expected } = samples, blocks = Math.ceil(tokens / tile);
  const isComplete = steps.length >= blocks && output.length === tokens && expected.length === tokens &&
    steps.every(({ scores, maximum, correction, sum, output: values }) =>
      [scores, maximum, correction, sum, values].every((list) => list.length === tile) &&
      scores.every((row) => row.length === tile) && values.every((row) => row.length === channels));
  if (!isComplete) throw new Error("a tile or a query is missing");
  const number = (value) => value.toFixed(3), list = (values) => values.map(number).join(", ");
  const rowsOf = (step) => Array.from({ length: Math.min(tile, tokens - step.query) }, (_, i) => i);
  const name = (first) => (first + 1 < tokens ? `${first} to ${Math.min(first + tile, tokens) - 1}` : `${first}`);
  askFirst(root, `${tokens} queries attend to ${tokens} keys, in tiles of ${tile} x ${tile}: ${blocks} x ${blocks} tiles. ` +
    "How many of them does the kernel compute?", [blocks, steps.length, blocks * blocks], steps.length,
    (count) => `${count} tiles`, reveal);

  function reveal() {
    const sentence = make("p", { class: "sentence", role: "status" });
    const legend = make("p", { class: "legend" }, ...[["now", "current tile"], ["gathered", "computed before"],
      ["skipped", "never computed"]].flatMap(([state, text]) => [make("span", { class: `key ${state}` }), `${text}  `]));
    const scores = makeScroll("scores by query and key"), weights = makeScroll("weights of the queries so far"), rows = makeScroll("running values of the queries");
    const stepper = addStepper(root, "tile", steps.length + 1, show);
    root.append(sentence, make("p", { class: "group-title" }, "Weights so far: 2^(score - maximum) / sum, of the tiles before and the current tile"), weights,
      make("p", { class: "group-title" }, "Running values of the queries of the tile"), rows, make("p", { class: "group-title" }, "Scores: the kernel stores one tile"), legend, scores);
    stepper.go(0);

    function show(position) {
      const step = steps[position];
      sentence.textContent = step ? describe(step, position) : describeEnd();
      rows.replaceChildren(step ? showRows(step, position) : showComparison());
      scores.replaceChildren(showScores(position));
      weights.replaceChildren(drawWeights(position, Math.min(620, Math.max(440, weights.clientWidth))));
    }
  }

  // Draw the weight of each key for each query, with the maximum and the sum that the query has after the current tile.
  function drawWeights(position, width) {
    const seen = steps.slice(0, position + 1), all = Array.from({ length: tokens }, (_, i) => i);
    const cells = seen.flatMap((step) => rowsOf(step).flatMap((i) => {
      const latest = seen.findLast((each) => each.query === step.query);
      return step.scores[i].flatMap((score, j) => (score === null || step.key + j >= tokens ? []
        : [{ query: step.query + i, key: step.key + j, weight: 2 ** (score - latest.maximum[i]) / latest.sum[i] }]));
    }));
    const current = steps[position] ? [steps[position]] : [];
    return drawPlot("weights of the queries so far", {
      width, height: 0.7 * width, marginLeft: 38, marginTop: 36,
      x: { domain: all, axis: "top", label: "key", tickSize: 0 }, y: { domain: all, label: "query", tickSize: 0 },
      marks: [
        Plot.cell(cells, { x: "key", y: "query", fill: "#e69f00", fillOpacity: "weight", stroke: "currentColor", strokeOpacity: 0.25 }),
        Plot.text(cells, { x: "key", y: "query", text: ({ weight }) => weight.toFixed(2), fill: "currentColor",
          stroke: "var(--color-background-primary)", strokeWidth: 3 }),
        Plot.cell(current.flatMap((step) => rowsOf(step).flatMap((i) => rowsOf({ query: step.key }).map((j) => ({ query: step.query + i, key: step.key + j })))),
          { x: "key", y: "query", fill: "none", stroke: "var(--color-brand-primary)", strokeWidth: 2 }),
      ],
      opacity: { domain: [0, 1], range: [0, 1] }, color: { type: "identity" },
    });
  }

  function describe(step, position) {
    const isFirst = step.key === 0, hidden = rowsOf(step).some((i) => step.scores[i].includes(null));
    return `Tile ${position + 1} of ${steps.length}: queries ${name(step.query)}, keys ${name(step.key)}. ` +
      (hidden ? "The mask hides the keys after each query. " : "No query of this tile is before a key, so there is no mask. ") +
      (isFirst ? "The sums of these queries begin here." : "The sums so far are multiplied by the factor, then this tile is added.");
  }

  function describeEnd() {
    const differences = output.flatMap((row, i) => row.map((value, j) => Math.abs(value - expected[i][j])));
    return "The kernel divides each output by its sum. The largest difference from plain softmax in fp64 is " +
      `${Math.max(...differences).toExponential(1)}.`;
  }

  // Return the values of each query of the tile, before and after it.
  function showRows(step, position) {
    const before = steps.slice(0, position).findLast((each) => each.query === step.query);
    const header = ["query", "maximum before", "maximum", "factor of the old sums", "sum of weights", "output so far"];
    return makeTable({ class: "running" }, [header, ...rowsOf(step).map((i) => [`query ${step.query + i}`,
      before ? number(before.maximum[i]) : "none", number(step.maximum[i]), number(step.correction[i]),
      number(step.sum[i]), list(step.output[i].map((value) => value / step.sum[i]))])]);
  }

  function showComparison() {
    return makeTable({ class: "comparison" }, [["query", "output of the kernel", "plain softmax"],
      ...output.map((row, i) => [`query ${i}`, list(row), list(expected[i])])]);
  }

  // Return the matrix of scores. The kernel stores only those of the current tile.
  function showScores(position) {
    const all = Array.from({ length: tokens }, (_, i) => i);
    const table = makeTable({ class: "scores" }, [["", ...all.map((key) => `key ${key}`)],
      ...all.map((query) => [`query ${query}`, ...all.map((key) => {
        const index = steps.findIndex((step) => step.query === query - query % tile && step.key === key - key % tile);
        if (index < 0) return "skipped";
        if (index !== position) return index < position ? "gathered" : "";
        const score = steps[index].scores[query % tile][key % tile];
        return score === null ? "hidden" : score.toFixed(2);
      })])]);
    for (const cell of table.querySelectorAll("td")) { // a state is a color, and a number or "hidden" is shown
      const state = cell.textContent;
      cell.className = ["skipped", "gathered", ""].includes(state) ? state : "now";
      if (cell.className !== "now") cell.replaceChildren();
      if (state === "skipped") cell.setAttribute("aria-label", "never computed");
    }
    return table;
  }
};
