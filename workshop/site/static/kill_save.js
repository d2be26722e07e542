// The page about kills: the files that a kill leaves at each moment of a save, and the checkpoint that opens then.
"use strict";

Explorers.kill_save = function (root, samples) {
  const { kills, modes, ranks } = samples;
  const isComplete = kills.length > 0 && kills.every(({ point, step, files }) =>
    point && Number.isInteger(step) && files.every(([name, size]) => name && (size === null || size >= 0)));
  if (!isComplete) throw new Error("a kill is incomplete");
  const states = { opens: "complete: this one opens", complete: "complete", unfinished: "not complete: a resume ignores it",
    deleted: "an old checkpoint that is being deleted" };
  const colors = ["#009e73", "#56b4e9", "#e69f00", "#999999"];
  const find = (rank, mode) => kills.filter((kill) => kill.rank === Number(rank) && kill.mode === mode);
  const asked = kills.find((kill) => kill.point === "before the final rename");
  askFirst(root, "rank 0 has written the manifest of step 3, and is killed before the final rename. Which step opens?",
    [1, 2, 3], asked.step, (step) => `step ${step}`, reveal);

  function reveal() {
    const [modeLabel, mode] = makeSelect("save", modes, modes[0], restart);
    const allRanks = Array.from({ length: ranks }, (_, rank) => rank);
    const [rankLabel, rank] = makeSelect("killed rank", allRanks, 0, restart);
    const sentence = make("p", { class: "sentence", role: "status" });
    const moments = makeScroll("bytes of each directory after a kill at each moment"), files = makeScroll("files after the kill");
    root.append(make("p", { class: "choices" }, modeLabel, rankLabel));
    const stepper = addStepper(root, "moment of the kill", find(0, modes[0]).length, show);
    root.append(sentence, makeLegend(Object.values(states), colors), moments, files);
    stepper.go(0);

    function restart() { stepper.setCount(find(rank.value, mode.value).length); }

    function show(position) {
      const all = find(rank.value, mode.value), kill = all[position];
      moments.replaceChildren(drawMoments(all, position, Math.max(300, moments.clientWidth)));
      sentence.textContent = `Rank ${kill.rank} is killed ${kill.point}. Step ${kill.step} opens.`;
      files.replaceChildren(makeTable({ class: "files" }, [["directory", "files (bytes)", "state"], ...listFolders(kill)]));
    }
  }

  // Draw every directory after a kill at each moment: one row per directory, and its bytes as the height of a bar.
  function drawMoments(all, position, width) {
    const bars = all.flatMap((kill, moment) => [...readFolders(kill)].filter(([folder]) => folder !== "checkpoints")
      .map(([folder, files]) => ({ moment, folder, bytes: files.reduce((sum, [, size]) => sum + size, 0),
        state: findState(folder, kill.step), title: `killed ${kill.point}: ${folder}, ${states[findState(folder, kill.step)]}` })));
    const folders = [...new Set(bars.map(({ folder }) => folder))].sort(compare), numbers = all.map((_, moment) => moment);
    return drawPlot("bytes of each directory after a kill at each moment", {
      width, height: 40 + 62 * folders.length, marginLeft: 124, marginRight: 8, marginBottom: 36,
      x: { domain: numbers, tickFormat: (moment) => String(moment + 1), label: "moment of the kill", tickSize: 0 },
      y: { axis: null }, fy: { domain: folders, label: null, padding: 0.15, tickFormat: (folder) => folder.replace(/-0+/, "-") },
      color: { domain: Object.keys(states), range: colors },
      marks: [
        Plot.barY(bars, { x: "moment", y: "bytes", fy: "folder", fill: "state", title: "title" }),
        Plot.ruleY([0], { strokeOpacity: 0.3 }),
        Plot.frame({ stroke: "none" }),
        Plot.barY(folders.map((folder) => ({ folder, moment: position })), { x: "moment", y1: 0,
          y2: Math.max(...bars.map(({ bytes }) => bytes)), fy: "folder", fill: "none", stroke: "var(--color-brand-primary)", strokeWidth: 2 }),
      ],
    });
  }

  // Return the files of each directory, with their sizes. A directory without files has none.
  function readFolders(kill) {
    const folders = new Map();
    for (const [path, size] of kill.files) {
      const [folder, name] = path.includes("/") ? path.split("/") : ["checkpoints", path];
      if (!folders.has(folder)) folders.set(folder, []);
      if (size !== null) folders.get(folder).push([name, size]);
    }
    return folders;
  }

  // Order directories: the oldest checkpoint first, and the directory in which a step is written before the step.
  function compare(first, second) { return number(first) - number(second) || (first < second ? -1 : 1); }

  // Return the rows of the table: a directory, its files, and its state.
  function listFolders(kill) {
    const rows = [...readFolders(kill)].sort(([first], [second]) => compare(first, second));
    return rows.map(([folder, files]) => [folder,
      files.map(([name, size]) => `${name} (${size.toLocaleString("en-US")})`).join(", ") || "empty", describe(folder, kill.step)]);
  }

  // Return the step of a directory, so that the oldest checkpoint comes first; other files come last.
  function number(folder) { return Number(/(\d+)$/.exec(folder)?.[1] ?? Infinity); }

  function describe(folder, step) {
    if (folder === "checkpoints") return "the name of the newest checkpoint, for people";
    const state = findState(folder, step);
    return state === "opens" ? make("strong", { class: "opens" }, states[state]) : states[state];
  }

  function findState(folder, step) {
    if (folder.startsWith(".tmp-old-")) return "deleted";
    if (folder.startsWith(".tmp-")) return "unfinished";
    return number(folder) === step ? "opens" : "complete";
  }
};
