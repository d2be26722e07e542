// The ring page: which chunk every rank sends in each step, and what its chunks contain.
"use strict";

// Return the ranks in a recorded value: rank r contributed 2^r.
function ranksIn(value) {
  return [...value.toString(2)].reverse().flatMap((bit, rank) => (bit === "1" ? [rank] : []));
}

// Throw an error if a run is incomplete: every rank sends one of N chunks in every step.
function checkRing(run) {
  const isComplete = (chunks) => chunks.length === run.ranks;
  const isRight = run.steps.every((sends) => sends.length === run.ranks &&
    sends.every((send) => Number.isInteger(send.chunk) && send.bytes > 0 && isComplete(send.chunks)));
  if (!isRight || !isComplete(run.end) || !run.end.every(isComplete) || !(run.predicted_bytes > 0)) {
    throw new Error(`the ${run.collective} over ${run.ranks} ranks is incomplete`);
  }
}

Explorers.ring = function (root, samples) {
  samples.runs.forEach(checkRing);
  const find = (collective, ranks) =>
    samples.runs.find((run) => run.collective === collective && run.ranks === Number(ranks));
  const sentBy = (run, rank, steps) => run.steps.slice(0, steps).reduce((sum, sends) => sum + sends[rank].bytes, 0);
  const asked = find("all-reduce", 4);
  const total = sentBy(asked, 0, asked.steps.length);
  const choices = [asked.tensor_bytes / 4, asked.tensor_bytes, total, asked.tensor_bytes * 3];
  askFirst(root, `4 ranks all-reduce a tensor of ${formatBytes(asked.tensor_bytes)}. How much does each rank send?`,
    choices, total, formatBytes, reveal);

  function reveal() {
    const unique = (key) => [...new Set(samples.runs.map((run) => run[key]))];
    const [collectiveLabel, collective] = makeSelect("collective", unique("collective"), "all-reduce", restart);
    const [ranksLabel, ranks] = makeSelect("number of ranks", unique("ranks"), 4, restart);
    const sentence = make("p", { class: "sentence", "aria-live": "polite" });
    const volume = make("p", { class: "volume" });
    const table = make("table", {});
    root.append(make("p", { class: "choices" }, collectiveLabel, ranksLabel));
    const run = () => find(collective.value, ranks.value);
    const stepper = addStepper(root, "step of the collective", run().steps.length + 1, show);
    root.append(sentence, makeScroll("chunks of all ranks", table), volume);
    stepper.go(0);

    function restart() { stepper.setCount(run().steps.length + 1); }

    function show(step) {
      const { steps, end, ranks: count, predicted_bytes: predicted } = run();
      const sends = steps[step];
      const chunks = sends ? sends.map((send) => send.chunks) : end;
      sentence.textContent = sends
        ? `Step ${step + 1} of ${steps.length}: ` +
          sends.map((send, rank) => `rank ${rank} sends chunk ${send.chunk} to rank ${send.to}`).join("; ") + "."
        : `After ${steps.length} steps: ${describeEnd(collective.value)}`;
      const header = make("tr", {}, make("th", {}, ""),
        ...chunks.map((_, chunk) => make("th", { scope: "col" }, `chunk ${chunk}`)));
      table.replaceChildren(header, ...chunks.map((values, rank) => make("tr", {},
        make("th", { scope: "row" }, `rank ${rank}`),
        ...values.map((value, chunk) => showChunk(value, count, sends && sends[rank].chunk === chunk)))));
      volume.textContent = `Rank 0 has sent ${formatBytes(sentBy(run(), 0, step))}. ` +
        `The ring formula gives ${formatBytes(predicted)} for all steps.`;
    }
  }

  function showChunk(value, count, isSent) {
    const ranks = value === null ? [] : ranksIn(value);
    const state = ranks.length === count ? "complete" : ranks.length > 1 ? "partial" : "";
    return make("td", { class: `${state} ${isSent ? "sent" : ""}` }, ranks.length ? ranks.join("+") : "empty");
  }

  function describeEnd(collective) {
    if (collective === "all-gather") return "every rank has the chunks of all ranks.";
    if (collective === "all-reduce") return "every rank has every chunk of the sum.";
    return "rank r has chunk r of the sum. Its other chunks are not used any more.";
  }
};
