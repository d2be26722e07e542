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

// Create an area that scrolls sideways on a narrow screen. It can have the focus, so that the arrow keys scroll it.
function makeScroll(label, ...children) {
  return make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": label }, ...children);
}

// Ask a question. After the first answer, print `source` and the answer, and call `reveal`.
function askFirst(root, question, choices, answer, format, reveal, source = "the recorded value is") {
  const verdict = make("p", { class: "verdict", role: "status" });
  const buttons = choices.map((choice) =>
    make("button", { type: "button", "data-choice": choice, "aria-pressed": "false", onclick: (event) => {
      const isRight = choice === answer;
      for (const button of buttons) button.setAttribute("aria-pressed", String(button === event.currentTarget));
      verdict.textContent = `${isRight ? "Correct" : "Not quite"}: ${source} ${format(answer)}.`;
      if (!root.classList.contains("is-revealed")) {
        root.classList.add("is-revealed");
        reveal();
      }
    } }, format(choice)));
  root.append(make("fieldset", {}, make("legend", {}, `Predict first: ${question}`), ...buttons), verdict);
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
  root.append(controls, slider);
  return { go, setCount: (length) => { slider.max = length - 1; go(0); } };
}

// Create an SVG element with attributes and children (elements or strings).
function makeSvg(tag, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

// Return the width of a picture: all of the page, so that a phone shows it without scrolling. A change shows it again.
function fitWidth(root, maximum) {
  return Math.max(300, Math.min(maximum, root.clientWidth));
}

// Create a line chart. `series` has, for each name, pairs of x and y. The last one is drawn on top.
function makeChart(title, xLabel, series) {
  const width = 360, height = 190, left = 52, bottom = 34, top = 12, right = 10;
  const points = Object.values(series).flat(), range = (i) => points.map((point) => point[i]);
  const [x0, x1] = [Math.min(...range(0)), Math.max(...range(0))];
  const [y0, y1] = [Math.min(...range(1)), Math.max(...range(1))];
  const x = (value) => left + ((value - x0) / (x1 - x0 || 1)) * (width - left - right);
  const y = (value) => height - bottom - ((value - y0) / (y1 - y0 || 1)) * (height - bottom - top);
  const lines = Object.values(series).map((line, i) => makeSvg("polyline", { class: `line line-${i}`, fill: "none",
    points: line.map((point) => `${x(point[0]).toFixed(1)},${y(point[1]).toFixed(1)}`).join(" ") }));
  const text = (value, attributes) => makeSvg("text", attributes, value);
  const names = Object.keys(series), digits = y1 - y0 < 1 ? 3 : 2;
  return make("figure", {}, make("figcaption", {}, title, ...names.flatMap((name, i) => [
    make("span", { class: `key line-${i}` }), `${name}  `])),
    makeSvg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${title}: ${names.join(" and ")}` },
      makeSvg("path", { class: "axis", fill: "none", d: `M${left},${top}V${height - bottom}H${width - right}` }),
      text(y1.toFixed(digits), { x: left - 6, y: top + 8, "text-anchor": "end" }),
      text(y0.toFixed(digits), { x: left - 6, y: height - bottom, "text-anchor": "end" }),
      text(String(x0), { x: left, y: height - bottom + 16, "text-anchor": "middle" }),
      text(String(x1), { x: width - right, y: height - bottom + 16, "text-anchor": "end" }),
      text(xLabel, { x: (left + width) / 2, y: height - 4, "text-anchor": "middle" }), ...lines));
}

function startExplorer(root) {
  const live = root.querySelector(".explorer-live");
  const name = root.dataset.explorer;
  try {
    const recording = JSON.parse(root.querySelector("script[type='application/json']").textContent);
    Explorers[name](live, recording.samples);
  } catch (error) {
    const remedy = root.dataset.remedy ?? `run "make record NAME=${name}" and "make book"`;
    live.replaceChildren(make("p", { class: "error", role: "alert" },
      `The recording of this page is damaged (${error.message}): ${remedy}.`));
  }
}

document.addEventListener("DOMContentLoaded", () => {
  for (const root of document.querySelectorAll(".explorer")) startExplorer(root);
});
