// The layout page: where one weight of GPT-2 is stored in ZeRO-1, in FSDP, and in a checkpoint.
"use strict";

// Return the numbers that place all weights of a parameter: elements per row, its bucket, the offset of its first
// element in the bucket, the length of a slice, and the rows of a shard of FSDP.
function describeParameter(samples, layout, name) {
  const sizes = new Map(samples.parameters.map(([each, shape]) =>
    [each, shape.reduce((product, length) => product * length, 1)]));
  const [length, width = 1] = samples.parameters.find(([each]) => each === name)[1];
  const bucket = layout.buckets.findIndex(({ params }) => params.includes(name));
  const { params, slice } = layout.buckets[bucket];
  const begin = params.slice(0, params.indexOf(name)).reduce((sum, each) => sum + sizes.get(each), 0);
  return { length, width, bucket, begin, slice, shardRows: layout.rows[name] };
}

// Return where a weight is stored. Sizes and positions of buckets count elements, positions in files count bytes.
function locateWeight(samples, layout, name, row, column) {
  const { length, width, bucket, begin, slice, shardRows } = describeParameter(samples, layout, name);
  const offset = begin + row * width + column, rank = Math.floor(row / shardRows), first = rank * shardRows;
  const inFile = (key) => {
    const [firstRow, file, data] = layout.files[key].findLast(([each]) => each <= row);
    return { file: `__${file}_0.distcp`, position: data + 4 * ((row - firstRow) * width + column) };
  };
  return {
    bucket, buckets: layout.buckets.length, offset, owner: Math.floor(offset / slice), in_slice: offset % slice,
    rank, shard: [first, Math.min(first + shardRows, length)], in_shard: (row - first) * width + column,
    weight: inFile(`model.${name}`), exp_avg: inFile(`optimizer.${name}.exp_avg`),
    exp_avg_sq: inFile(`optimizer.${name}.exp_avg_sq`),
  };
}

Explorers.layout = function (root, samples) {
  const { parameters, layouts } = samples;
  const names = parameters.map(([name]) => name), shapes = new Map(parameters);
  const isComplete = layouts.length && layouts.every(({ ranks, buckets, rows, files }) => ranks > 1 && buckets.length &&
    names.every((name) => rows[name] > 0 && files[`model.${name}`].length && files[`optimizer.${name}.exp_avg`].length));
  if (!isComplete) throw new Error("a parameter has no position");
  const find = (ranks) => layouts.find((layout) => layout.ranks === Number(ranks));
  const colors = ["#4c78a8", "#f2a93b", "#54a24b", "#e45756", "#b279a2", "#72b7b2", "#9d755d", "#9d9d9d"];
  const asked = "h.0.attn.c_proj.weight", example = find(4);
  const owners = listOwners(example, asked);
  askFirst(root, `how many of 4 ranks have optimizer state of ${asked}, a matrix of 768 x 768, in ZeRO-1?`,
    [1, 2, 4], owners.length, (count) => `${count} rank${count === 1 ? "" : "s"}`, reveal);

  function listOwners(layout, name) {
    const [rows, width = 1] = shapes.get(name);
    const first = locateWeight(samples, layout, name, 0, 0).owner;
    const last = locateWeight(samples, layout, name, rows - 1, width - 1).owner;
    return Array.from({ length: last - first + 1 }, (_, i) => first + i);
  }

  function reveal() {
    const [nameLabel, name] = makeSelect("parameter", names, asked, restart);
    const [ranksLabel, ranks] = makeSelect("number of ranks", layouts.map((each) => each.ranks), 4, show);
    const makeNumber = (label) => {
      const input = make("input", { type: "number", class: label, min: 0, value: 0, oninput: show });
      return [make("label", {}, `${label} `, input), input];
    };
    const [rowLabel, row] = makeNumber("row"), [columnLabel, column] = makeNumber("column");
    const sentence = make("p", { class: "sentence", role: "status" });
    const places = makeScroll("places of the weight");
    const pictures = ["zero1", "fsdp"].map((kind) => makePicture(kind));
    const legend = make("p", { class: "legend" });
    root.append(make("p", { class: "choices" }, nameLabel, ranksLabel, rowLabel, columnLabel), sentence, legend,
      make("div", { class: "pictures" }, ...pictures.map(({ figure }) => figure)), places);
    restart();

    function restart() { row.value = 0; column.value = 0; show(); }

    // Create a map of the matrix. A click, a touch or a move of the pointer selects a weight; so do the arrow keys.
    function makePicture(kind) {
      const canvas = make("canvas", { width: 240, height: 240, tabindex: 0, role: "img", class: kind });
      const select = (event) => {
        const box = canvas.getBoundingClientRect(), [rows, width = 1] = shapes.get(name.value);
        choose(((event.clientY - box.top) / box.height) * rows, ((event.clientX - box.left) / box.width) * width);
      };
      canvas.addEventListener("pointermove", select);
      canvas.addEventListener("pointerdown", select);
      canvas.addEventListener("keydown", (event) => {
        const [rows, width = 1] = shapes.get(name.value), step = { rows: Math.ceil(rows / 32), width: Math.ceil(width / 32) };
        const move = { ArrowUp: [-step.rows, 0], ArrowDown: [step.rows, 0], ArrowLeft: [0, -step.width],
          ArrowRight: [0, step.width] }[event.key];
        if (!move) return;
        event.preventDefault();
        choose(Number(row.value) + move[0], Number(column.value) + move[1]);
      });
      const title = kind === "zero1" ? "ZeRO-1: owner of the optimizer state" : "FSDP: rank that stores the weight";
      return { kind, canvas, figure: make("figure", {}, make("figcaption", {}, title), canvas) };
    }

    function choose(newRow, newColumn) {
      const [rows, width = 1] = shapes.get(name.value);
      row.value = Math.max(0, Math.min(rows - 1, Math.floor(newRow)));
      column.value = Math.max(0, Math.min(width - 1, Math.floor(newColumn)));
      show();
    }

    function show() {
      const [rows, width = 1] = shapes.get(name.value), layout = find(ranks.value);
      row.max = rows - 1;
      column.max = width - 1;
      const weight = [row, column].map((input) => Math.max(0, Math.min(Number(input.max), Math.floor(Number(input.value)))));
      const place = locateWeight(samples, layout, name.value, ...weight);
      sentence.textContent = `${name.value} has ${rows} rows of ${width}. The weight in row ${weight[0]}, column ` +
        `${weight[1]}: rank ${place.owner} updates it in ZeRO-1, and rank ${place.rank} stores it in FSDP.`;
      legend.replaceChildren(...Array.from({ length: layout.ranks }, (_, rank) => rank).flatMap((rank) => [
        make("span", { class: "key", style: `background:${colors[rank]}` }), `rank ${rank}  `]));
      for (const { kind, canvas } of pictures) draw(kind, canvas, layout, weight);
      const number = (value) => value.toLocaleString("en-US");
      const file = ({ file: path, position }) => `${path}, byte ${number(position)}`;
      places.replaceChildren(makeTable({ class: "places" }, [["where", "place"],
        ["bucket in ZeRO-1", `bucket ${place.bucket + 1} of ${place.buckets}, element ${number(place.offset)}`],
        ["slice in ZeRO-1", `slice of rank ${place.owner}, element ${number(place.in_slice)}`],
        ["shard in FSDP", `rank ${place.rank}: rows ${place.shard[0]} to ${place.shard[1] - 1}, element ` +
          number(place.in_shard)],
        ["weight in the checkpoint", file(place.weight)],
        ["exp_avg in the checkpoint", file(place.exp_avg)],
        ["exp_avg_sq in the checkpoint", file(place.exp_avg_sq)]]));
    }

    function draw(kind, canvas, layout, [selectedRow, selectedColumn]) {
      const { length: rows, width, begin, slice, shardRows } = describeParameter(samples, layout, name.value);
      const context = canvas.getContext("2d"), cells = 120, size = canvas.width / cells;
      for (let y = 0; y < cells; y++) {
        for (let x = 0; x < cells; x++) {
          const cellRow = Math.floor((y / cells) * rows), flat = cellRow * width + Math.floor((x / cells) * width);
          context.fillStyle = colors[Math.floor(kind === "zero1" ? (begin + flat) / slice : cellRow / shardRows)];
          context.fillRect(x * size, y * size, size, size);
        }
      }
      context.strokeStyle = "#000";
      context.fillStyle = "#fff";
      context.lineWidth = 3;
      context.beginPath();
      const inside = (fraction) => Math.max(8, Math.min(canvas.width - 8, fraction * canvas.width));
      context.arc(inside((selectedColumn + 0.5) / width), inside((selectedRow + 0.5) / rows), 6, 0, 7);
      context.fill();
      context.stroke();
      canvas.setAttribute("aria-label", `${kind === "zero1" ? "ZeRO-1" : "FSDP"}: ${sentence.textContent}`);
    }
  }
};
