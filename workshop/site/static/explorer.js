// The parts that all interactive pages share: reading the recording, the prediction, and moving through the steps.
"use strict";

const Explorers = {}; // name -> function (root, samples); each page's script adds its own

// Create an element with attributes and children (elements or strings).
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

const rankColors = ["#8ecae6", "#ffd166", "#f4978e", "#a7c957", "#cdb4db", "#f3722c", "#277da1", "#adb5bd"]; // the first five as in the notebooks
const memoryColors = ["#4c78a8", "#e45756", "#b279a2", "#f2a93b", "#54a24b", "#9d9d9d"]; // as in the notebooks

const formatBytes = (bytes) => `${Math.round(bytes).toLocaleString("en-US")} bytes`;

// Create a labeled select. `name` is its label, and its class with dashes for blanks.
function makeSelect(name, values, value, onchange, format = String) {
  const select = make("select", { class: name.replaceAll(" ", "-"), onchange },
    ...values.map((each) => make("option", { value: each }, format(each))));
  select.value = value;
  return [make("label", {}, `${name} `, select), select];
}

// Create a table from rows of strings or elements. The first row is the header, and the first column names the rows.
function makeTable(attributes, rows) {
  return make("table", attributes, ...rows.map((row, i) => make("tr", {}, ...row.map((cell, j) =>
    make(i && j ? "td" : "th", i && j ? {} : { scope: i ? "row" : "col" }, cell)))));
}

// Create a legend: a colored square and a name for each entry.
function makeLegend(names, colors) {
  return make("p", { class: "legend" }, ...names.flatMap((name, i) => [make("span", { class: "entry" },
    make("span", { class: "key", style: `background:${colors[i]}` }), name.replaceAll("_", " ")), " "]));
}

// Draw with Observable Plot, as one image with a label. Its parts have labels that only a role would allow.
function drawPlot(label, options) {
  const plot = Plot.plot({ style: "background: none; font-size: 13px; max-width: none", ariaLabel: label, ...options });
  plot.setAttribute("role", "img");
  for (const part of plot.querySelectorAll("[aria-label]")) part.removeAttribute("aria-label");
  return plot;
}

// Create an area that scrolls sideways on a narrow screen. It can have the focus, so that the arrow keys scroll it.
function makeScroll(label, ...children) {
  return make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": label }, ...children);
}

// Ask a question. After the first answer, print `source` and the answer, and call `reveal`. `Show me` skips the question.
function askFirst(root, question, choices, answer, format, reveal, source = "the recorded value is") {
  const verdict = make("p", { class: "verdict", role: "status" });
  const revealOnce = () => {
    if (!verdict.textContent) verdict.textContent = `${source[0].toUpperCase()}${source.slice(1)} ${format(answer)}.`;
    skip.remove();
    if (!root.classList.contains("is-revealed")) {
      root.classList.add("is-revealed");
      reveal();
      root.querySelector(".controls .next")?.focus();
    }
  };
  const buttons = choices.map((choice) =>
    make("button", { type: "button", "data-choice": choice, "aria-pressed": "false", onclick: (event) => {
      const isRight = choice === answer;
      for (const button of buttons) button.setAttribute("aria-pressed", String(button === event.currentTarget));
      verdict.textContent = `${isRight ? "Correct" : "Not quite"}: ${source} ${format(answer)}.`;
      revealOnce();
    } }, format(choice)));
  const skip = make("button", { type: "button", class: "skip", onclick: revealOnce }, "Show me");
  root.append(make("fieldset", {}, make("legend", {}, `Predict first: ${question}`), ...buttons, skip), verdict);
}

// Add controls that move through positions 0 to count - 1: buttons, a slider, arrow keys, and a swipe on the slider.
function addStepper(root, label, count, show) {
  let position = 0, timer = null;
  const slider = make("input", { type: "range", min: 0, max: count - 1, value: 0, "aria-label": label });
  const stop = () => { clearInterval(timer); timer = null; play.textContent = "Play"; };
  const go = (target) => {
    position = Math.max(0, Math.min(slider.max, target));
    slider.value = position;
    show(position);
    if (position >= slider.max) stop();
  };
  const button = (text, name, action) => make("button", { type: "button", class: name, onclick: action }, text);
  const play = button("Play", "play", () => {
    if (timer !== null) { stop(); return; }
    if (position >= slider.max) go(0);
    play.textContent = "Pause";
    timer = setInterval(() => go(position + 1), 900);
  });
  slider.addEventListener("input", () => { stop(); go(Number(slider.value)); });
  const controls = make("div", { class: "controls" },
    button("First", "first", () => { stop(); go(0); }),
    button("Back", "back", () => { stop(); go(position - 1); }),
    button("Next", "next", () => { stop(); go(position + 1); }),
    button("Last", "last", () => { stop(); go(Number(slider.max)); }), play);
  controls.addEventListener("keydown", ({ key }) => {
    const offset = { ArrowLeft: -1, ArrowRight: 1 }[key];
    if (offset) { stop(); go(position + offset); }
  });
  root.append(controls, slider);
  return { go, setCount: (length) => { slider.max = length - 1; go(0); } };
}

function startExplorer(root) {
  const live = root.querySelector(".explorer-live");
  const name = root.dataset.explorer;
  try {
    const recording = JSON.parse(root.querySelector("script[type='application/json']").textContent);
    Explorers[name](live, recording.samples);
  } catch (error) {
    live.replaceChildren(make("p", { class: "error", role: "alert" },
      `The recording of this page is damaged (${error.message}): restore docs/data/${name}.json from git, and run "make book".`));
  }
}

document.addEventListener("DOMContentLoaded", () => {
  for (const root of document.querySelectorAll(".explorer")) startExplorer(root);
});
