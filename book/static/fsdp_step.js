// The FSDP page: the state of every unit on every rank after each event, and the memory of each rank by category.
"use strict";

Explorers.fsdp_step = function (root, samples) {
  const { events, units, categories, memory, ranks } = samples;
  const isComplete = memory.length === ranks && memory.every((byEvent) => byEvent.length === events.length &&
    byEvent.every((values) => values.length === categories.length));
  if (!isComplete) throw new Error("a rank or an event is missing");
  const colors = ["#4c78a8", "#e45756", "#b279a2", "#f2a93b", "#54a24b", "#9d9d9d"];
  const gathers = events.filter(([kind, unit]) => kind === "all-gather" && unit !== "root").length / (units.length - 1);
  askFirst(root, "how often does a rank all-gather the parameters of one block in a step?", [1, 2, 3], gathers,
    (times) => `${times} ${times === 1 ? "time" : "times"}`, reveal);

  // Return the state of each unit after the given event.
  function unitStates(last) {
    const states = Object.fromEntries(units.map((unit) => [unit, "sharded"]));
    for (const [kind, unit] of events.slice(0, last + 1)) {
      if (kind === "all-gather") states[unit] = "gathered";
      else if (kind === "free") states[unit] = "sharded";
      else if (kind === "forward" || kind === "backward") {
        for (const each of units) if (states[each] === "forward" || states[each] === "backward") states[each] = "gathered";
        states[unit] = kind;
      }
    }
    return states;
  }

  function describe([kind, unit, size]) {
    const name = unit === "root" ? "the root" : unit;
    return {
      "all-gather": `All ranks all-gather the parameters of ${name}: ${formatBytes(size)}.`,
      forward: `${name} runs its forward pass.`,
      backward: `${name} runs its backward pass.`,
      free: `Each rank frees the full parameters of ${name} and keeps its shard.`,
      "reduce-scatter": `All ranks reduce-scatter the gradients of ${name}: ${formatBytes(size)}.`,
      update: "Each rank updates its shards.",
    }[kind];
  }

  function reveal() {
    const largest = Math.max(...memory.flat().map((values) => values.reduce((sum, value) => sum + value, 0)));
    const sentence = make("p", { class: "sentence", "aria-live": "polite" });
    const grid = make("table", { class: "units" });
    const volume = make("p", { class: "volume" });
    const bars = make("table", { class: "memory" });
    const stepper = addStepper(root, "event of the step", events.length, show);
    const legend = make("p", { class: "legend" }, ...categories.flatMap((name, i) => [
      make("span", { class: "key", style: `background:${colors[i]}` }), `${name.replaceAll("_", " ")}  `]));
    root.append(sentence, makeScroll("state of the units", grid), volume, legend, makeScroll("memory of the ranks", bars));
    stepper.go(0);

    function show(position) {
      const states = unitStates(position), [kind, current] = events[position];
      sentence.textContent = `Event ${position + 1} of ${events.length}: ${describe(events[position])}`;
      const tensors = events.slice(0, position + 1).reduce((sum, [, , size]) => sum + size, 0);
      volume.textContent = `Each rank has sent ${formatBytes(tensors * (ranks - 1) / ranks)} with the ring algorithm.`;
      const names = make("tr", {}, make("th", {}, ""), ...units.map((unit) => make("th", { scope: "col" }, unit)));
      grid.replaceChildren(names, ...memory.map((_, rank) => make("tr", {},
        make("th", { scope: "row" }, `rank ${rank}`),
        ...units.map((unit) => make("td",
          { class: `${states[unit]} ${unit === current || kind === "update" ? "now" : ""}` }, states[unit])))));
      bars.replaceChildren(...memory.map((byEvent, rank) => {
        const values = byEvent[position], total = values.reduce((sum, value) => sum + value, 0);
        const parts = values.map((value, i) => make("span",
          { style: `width:${100 * value / largest}%;background:${colors[i]}`, title: `${categories[i]}: ${value}` }));
        return make("tr", {}, make("th", { scope: "row" }, `rank ${rank}`),
          make("td", {}, make("div", { class: "bar" }, ...parts)), make("td", { class: "total" }, formatBytes(total)));
      }));
    }
  }
};
