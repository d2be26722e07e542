// The diff page: every change of a phase's train.py next to the baseline, with its lesson, its cost and its tests.
"use strict";

Explorers.train_diffs = function (root, samples) {
  const { baseline, phases, ranks, micro_batches: microBatches } = samples, context = 3;
  const isComplete = phases.length > 0 && phases.every(({ lines, hunks }) => lines.length && hunks.length &&
    hunks.every((hunk) => hunk.lessons.every(({ text }) => text) && hunk.lessons.length && hunk.tests.length &&
      hunk.line + hunk.added <= lines.length && hunk.baseline_line + hunk.removed <= baseline.length));
  if (!isComplete) throw new Error("a change has no lesson, no test or no lines");
  const count = (name) => phases.find((phase) => phase.name === name).hunks.reduce((sum, hunk) => sum + hunk.added, 0);
  const added = count("phase3_fsdp");
  askFirst(root, `the baseline's train.py has ${baseline.length} lines. How many lines does FSDP add to it, without the imports?`,
    [added, 60, 150], added, (lines) => `${lines} lines`, reveal);

  function reveal() {
    const [label, name] = makeSelect("phase", phases.map((phase) => phase.name), "phase3_fsdp",
      () => stepper.setCount(phase().hunks.length), (each) => phases.find((phase) => phase.name === each).title);
    const phase = () => phases.find((each) => each.name === name.value);
    const sentence = make("p", { class: "sentence", role: "status" });
    const code = make("div", { class: "pair" }), lessons = make("div", { class: "lessons" });
    const cost = make("div", { class: "cost" }), tests = make("ul", { class: "tests" });
    root.append(make("p", { class: "choices" }, label));
    const stepper = addStepper(root, "change", phase().hunks.length, show);
    root.append(sentence, code, make("p", { class: "part" }, "Lesson"), lessons,
      make("p", { class: "part" }, "Cost"), cost, make("p", { class: "part" }, "Tests"), tests);
    stepper.go(0);

    function show(position) {
      const { hunks, title, lines, name: folder } = phase(), hunk = hunks[position];
      const total = hunks.reduce((sum, each) => sum + each.added, 0);
      sentence.textContent = `Change ${position + 1} of ${hunks.length} in ${title}, which adds ${total} lines in total: ` +
        `[${hunk.lessons.map((each) => each.tag).join(", ")}] in line ${hunk.line}.`;
      code.replaceChildren(
        showLines("nanoGPT/train.py", baseline, hunk.baseline_line, hunk.removed, "del"),
        showLines(`${folder}/train.py`, lines, hunk.line, hunk.added, "ins"));
      lessons.replaceChildren(...hunk.lessons.map(({ anchor, text }) => make("p", {}, `${text} `,
        make("a", { href: `../../${folder}/IMPLEMENTATION.html#${anchor}` }, "Read the notes"))));
      cost.replaceChildren(showCost(hunk.quantities));
      tests.replaceChildren(...hunk.tests.map(({ name: test, claim }) => make("li", {}, `${claim} `,
        make("code", {}, `make test ARGS="${test}"`))));
    }
  }

  function showCost(quantities) {
    if (!quantities.length) return make("p", {}, "This change neither uses memory nor communicates.");
    const rows = quantities.map(([name, without, changed]) => [name, formatBytes(without), formatBytes(changed)]);
    return makeScroll("cost of the change", make("p", {}, `One step of GPT-2 on ${ranks} ranks, with ${microBatches} ` +
      "micro-batches per rank:"), makeTable({ class: "quantities" }, [["quantity", "without it", "with it"], ...rows]));
  }

  // Return the changed lines of a file, with the lines around them. `first` is the number of the first one, from 1.
  function showLines(name, lines, first, length, tag) {
    const begin = Math.max(1, first - context), end = Math.min(lines.length, first + length + context - 1);
    const numbers = Array.from({ length: end - begin + 1 }, (_, i) => begin + i);
    return make("figure", {}, make("figcaption", {}, name), make("pre", { tabindex: 0, "aria-label": name },
      ...numbers.flatMap((number) => {
        const isChanged = number >= first && number < first + length, text = lines[number - 1];
        const line = `${String(number).padStart(3)} ${isChanged ? (tag === "del" ? "-" : "+") : " "} ${text}`;
        return [isChanged ? make(tag, {}, line) : line, "\n"];
      })));
  }
};
