// The bug museum: the curves of a trainer with a planted fault, next to those of the right trainer.
"use strict";

Explorers.bug_museum = function (root, samples) {
  const { right, exhibits, steps } = samples;
  const isComplete = exhibits.length > 1 && [right, ...exhibits].every(({ loss, grad_norm: norm, val_loss: validation }) =>
    loss.length === steps && norm.length === steps && validation.length > 1);
  if (!isComplete) throw new Error("a curve is incomplete");
  const letters = exhibits.map((_, i) => String.fromCharCode(65 + i));
  const quantities = { "training loss": "loss", "gradient norm": "grad_norm", "validation loss": "val_loss" };
  const points = (curve, key) => (key === "val_loss" ? curve.val_loss : curve[key].map((value, step) => [step, value]));
  const choices = exhibits.map((_, i) => i).sort((a, b) => (exhibits[a].fault < exhibits[b].fault ? -1 : 1));
  const solved = new Set();
  let current = 0;
  const charts = make("div", { class: "charts" }), question = make("div", {}), cause = make("div", { class: "cause" });
  const more = make("div", {});
  root.append(charts, question, cause, more);
  ask();

  function ask() {
    const name = `curve ${letters[current]}`, drawn = Object.entries(quantities).map(([title, key]) =>
      makeChart(title, "step", { "right trainer": points(right, key), [name]: points(exhibits[current], key) }));
    charts.replaceChildren(make("p", { class: "curve-title" }, `Curve ${letters[current]}`), ...drawn, readFirstStep());
    cause.replaceChildren();
    const area = make("div", {}), index = current;
    question.replaceChildren(area);
    askFirst(area, `which fault made curve ${letters[index]}?`, choices, index,
      (i) => exhibits[i].fault, () => reveal(index), "the planted fault was that");
  }

  // Return the numbers of the first step as a table: they show where the curves begin to differ.
  function readFirstStep() {
    const numbers = (curve) => [curve.val_loss[0][1], curve.loss[0], curve.grad_norm[0]].map((value) => value.toFixed(6));
    const header = ["trainer", "validation loss before step 0", "training loss of step 0", "gradient norm of step 0"];
    return makeScroll("the first step", makeTable({ class: "first-step" }, [header,
      ["right trainer", ...numbers(right)], [`curve ${letters[current]}`, ...numbers(exhibits[current])]]));
  }

  function reveal(index) {
    solved.add(index);
    const { symptom, old, new: planted } = exhibits[index];
    cause.replaceChildren(make("p", { class: "symptom" }, symptom),
      make("pre", { tabindex: 0 }, make("del", {}, `- ${old}`), "\n", make("ins", {}, `+ ${planted}`)));
    const [label] = makeSelect("curve", letters, letters[index], (event) => {
      current = letters.indexOf(event.target.value);
      ask();
    });
    more.replaceChildren(make("p", { class: "choices" }, label, ` ${solved.size} of ${exhibits.length} curves explained`));
  }
};
