// The FSDP page: the state of every unit on every rank after each event, and the memory of each rank by category.
"use strict";

Explorers.fsdp_step = function (root, samples) {
  const { runs, units, categories, switches, ranks } = samples;
  checkRuns();
  const colors = ["#4c78a8", "#e45756", "#b279a2", "#f2a93b", "#54a24b", "#9d9d9d"];
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

  // Return the state of each unit after the given event.
  function unitStates(events, last) {
    const states = Object.fromEntries(units.map((unit) => [unit, "sharded"]));
    for (const [kind, unit] of events.slice(0, last + 1)) {
      if (kind === "all-gather") states[unit] = "gathered";
      else if (kind === "free") states[unit] = "sharded";
      else if (["forward", "recompute", "backward"].includes(kind)) {
        for (const each of units) if (states[each] !== "sharded") states[each] = "gathered";
        states[unit] = kind;
      }
    }
    return states;
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
    const grid = make("table", { class: "units" });
    const volume = make("p", { class: "volume" });
    const bars = make("table", { class: "memory" });
    const legend = make("p", { class: "legend" }, ...categories.flatMap((name, i) => [
      make("span", { class: "key", style: `background:${colors[i]}` }), `${name.replaceAll("_", " ")}  `]));
    const run = () => find(Object.fromEntries(selects.map(([name, values, , select]) => [name, values.find((value) => String(value) === select.value)])));
    root.append(make("p", { class: "choices" }, ...selects.map(([, , label]) => label)), summary);
    const stepper = addStepper(root, "event of the step", run().events.length, show);
    root.append(sentence, makeScroll("state of the units", grid), volume, legend, makeScroll("memory of the ranks", bars));
    restart();

    function restart() {
      const { events, peak, loss } = run();
      const gathers = events.filter(([kind, unit]) => kind === "all-gather" && unit !== "root").length / (units.length - 1);
      summary.textContent = `In this run, a rank all-gathers each block ${gathers === 1 ? "once" : `${gathers} times`} and sends ` +
        `${formatBytes(sent(run()))} (ring algorithm). Its peak memory is ${formatBytes(Math.max(...peak.map(sum)))}. The loss is ${loss.toFixed(6)}.`;
      stepper.setCount(events.length);
    }

    function show(position) {
      const { events, memory, begin_ms: begins } = run(), [kind, current] = events[position];
      const states = unitStates(events, position);
      const isFirst = events.findIndex(([each, unit]) => each === kind && unit === current) === position;
      sentence.textContent = `Event ${position + 1} of ${events.length}: ${describe(events[position], isFirst)}`;
      const tensors = sum(events.slice(0, position + 1).map(([, , size]) => size));
      volume.textContent = `Each rank has sent ${formatBytes(tensors * (ranks - 1) / ranks)} with the ring algorithm.`;
      const header = make("tr", {}, make("th", {}, ""), ...units.map((unit) => make("th", { scope: "col" }, unit)));
      grid.replaceChildren(header, ...memory.map((_, rank) => make("tr", {},
        make("th", { scope: "row" }, `rank ${rank}`),
        ...units.map((unit) => make("td",
          { class: `${states[unit]} ${unit === current || kind === "update" ? "now" : ""}` }, states[unit])))));
      const titles = ["", "memory after the event", "total", "event began"];
      bars.replaceChildren(make("tr", {}, ...titles.map((title) => make("th", title ? { scope: "col" } : {}, title))),
        ...memory.map((byEvent, rank) => {
          const values = byEvent[position];
          const parts = values.map((value, i) => make("span",
            { style: `width:${100 * value / largest}%;background:${colors[i]}`, title: `${categories[i]}: ${value}` }));
          return make("tr", {}, make("th", { scope: "row" }, `rank ${rank}`), make("td", {}, make("div", { class: "bar" }, ...parts)),
            make("td", { class: "total" }, formatBytes(sum(values))), make("td", { class: "begin" }, `${begins[rank][position].toFixed(1)} ms`));
        }));
    }
  }
};
