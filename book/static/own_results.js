// The results page: the numbers of a result file that the reader opens, next to those of the committed results.
"use strict";

// Return the numbers in the samples of a result by name, as collect_numbers in book/own_results.py does.
function collectNumbers(value, labels, name = "") {
  if (typeof value === "number") return { [name]: value };
  const isObject = (item) => typeof item === "object" && item !== null && !Array.isArray(item);
  let parts = [];
  if (isObject(value)) {
    parts = Object.entries(value).map(([key, item]) => collectNumbers(item, labels, name ? `${name}.${key}` : key));
  } else if (Array.isArray(value) && value.length && value.every((item) => typeof item === "number")) {
    const sorted = [...value].sort((a, b) => a - b), half = sorted.length / 2;
    return { [`${name} (median)`]: half % 1 ? sorted[Math.floor(half)] : (sorted[half - 1] + sorted[half]) / 2 };
  } else if (Array.isArray(value) && value.every(isObject)) {
    const found = value.map((item) => {
      const entries = Object.entries(item);
      return [...entries.filter(([, each]) => typeof each === "string" && each).map(([, each]) => each),
        ...entries.filter(([key, each]) => labels.includes(key) && typeof each === "number").map(([key, each]) => `${key} ${each}`),
        ...entries.filter(([, each]) => each === true).map(([key]) => key)].join(", ");
    });
    const isUnique = (label) => label && found.filter((each) => each === label).length === 1;
    parts = value.map((item, i) =>
      collectNumbers(item, labels, `${name}[${isUnique(found[i]) ? found[i] : `${found[i]} ${i + 1}`.trim()}]`));
  }
  return Object.assign({}, ...parts);
}

Explorers.own_results = function (root, samples) {
  const { committed, labels, max_numbers: maximum } = samples;
  if (!committed.length || !committed.every(({ name, hardware, numbers }) => name && hardware && numbers)) {
    throw new Error("a committed result is incomplete");
  }
  const input = make("input", { type: "file", accept: ".json,application/json", onchange: () => open(input.files[0]) });
  const zone = make("div", { class: "drop" }, make("label", {}, "Drop a result file here, or choose one: ", input));
  const output = make("div", { role: "status" });
  const stop = (event, isOver) => { event.preventDefault(); zone.classList.toggle("is-over", isOver); };
  zone.addEventListener("dragover", (event) => stop(event, true));
  zone.addEventListener("dragleave", (event) => stop(event, false));
  zone.addEventListener("drop", (event) => { stop(event, false); open(event.dataTransfer.files[0]); });
  root.append(zone, output);

  async function open(file) {
    if (!file) return;
    try {
      output.replaceChildren(...compare(JSON.parse(await file.text())));
    } catch (error) {
      output.replaceChildren(make("p", { class: "error", role: "alert" },
        `${file.name} is not a result file (${error.message}): choose a JSON file that a command with --write has written.`));
    }
  }

  // Return the tables for a result file. Throw an error if it is damaged.
  function compare(own) {
    for (const key of ["name", "hardware", "settings", "samples"]) {
      if (!own?.[key]) throw new Error(`it has no ${key}`);
    }
    if ((own.format ?? 1) !== 1) throw new Error(`it has format ${own.format}, and this page reads format 1`);
    const numbers = collectNumbers(own.samples, labels), names = Object.keys(numbers);
    if (!names.length) throw new Error("its samples contain no numbers");
    const others = committed.filter(({ name }) => name === own.name);
    const facts = [own, ...others].map((each, i) => [i ? "committed" : "yours", each.hardware,
      (each.git_commit || "-").slice(0, 10), (each.time || "-").slice(0, 10), each.command ?? each.settings.command ?? "-"]);
    const header = ["number", "yours", ...others.flatMap(({ hardware }) => [hardware, "yours relative to it"])];
    const rows = names.slice(0, maximum).map((name) => [name, format(numbers[name]),
      ...others.flatMap((other) => [format(other.numbers[name]), relate(numbers[name], other.numbers[name])])]);
    const sentence = others.length ? `${own.name}: ${names.length} numbers in your file.`
      : `${own.name}: ${names.length} numbers in your file. The repository has no committed result with this name.`;
    return [make("p", { class: "sentence" }, `${sentence}${names.length > maximum ? ` The table shows the first ${maximum}.` : ""}`),
      makeScroll("origin of the results", makeTable({ class: "origin" },
        [["result", "hardware", "commit", "date", "command"], ...facts])),
      makeScroll("numbers of the results", makeTable({ class: "numbers" }, [header, ...rows]))];
  }

  function format(value) {
    return value === undefined ? "-" : value.toLocaleString("en-US", Number.isInteger(value) ? {} : { maximumSignificantDigits: 6 });
  }

  function relate(own, other) {
    return other === undefined || other === 0 ? "-" : `${((100 * own) / other).toFixed(0)}%`;
  }
};
