// The page about kills: the files that a kill leaves at each moment of a save, and the checkpoint that opens then.
"use strict";

Explorers.kill_save = function (root, samples) {
  const { kills, modes, ranks } = samples;
  const isComplete = kills.length > 0 && kills.every(({ point, step, files }) =>
    point && Number.isInteger(step) && files.every(([name, size]) => name && (size === null || size >= 0)));
  if (!isComplete) throw new Error("a kill is incomplete");
  const find = (rank, mode) => kills.filter((kill) => kill.rank === Number(rank) && kill.mode === mode);
  const asked = kills.find((kill) => kill.point === "before the final rename");
  askFirst(root, "rank 0 has written the manifest of step 3, and is killed before the final rename. Which step opens?",
    [1, 2, 3], asked.step, (step) => `step ${step}`, reveal);

  function reveal() {
    const [modeLabel, mode] = makeSelect("save", modes, modes[0], restart);
    const allRanks = Array.from({ length: ranks }, (_, rank) => rank);
    const [rankLabel, rank] = makeSelect("killed rank", allRanks, 0, restart);
    const sentence = make("p", { class: "sentence", role: "status" });
    const files = makeScroll("files after the kill");
    root.append(make("p", { class: "choices" }, modeLabel, rankLabel));
    const stepper = addStepper(root, "moment of the kill", find(0, modes[0]).length, show);
    root.append(sentence, files);
    stepper.go(0);

    function restart() { stepper.setCount(find(rank.value, mode.value).length); }

    function show(position) {
      const kill = find(rank.value, mode.value)[position];
      sentence.textContent = `Rank ${kill.rank} is killed ${kill.point}. Step ${kill.step} opens.`;
      files.replaceChildren(makeTable({ class: "files" }, [["directory", "files (bytes)", "state"], ...listFolders(kill)]));
    }
  }

  // Return the rows of the table: a directory, its files, and its state.
  function listFolders(kill) {
    const folders = new Map();
    for (const [path, size] of kill.files) {
      const [folder, name] = path.includes("/") ? path.split("/") : ["checkpoints", path];
      if (!folders.has(folder)) folders.set(folder, []);
      if (size !== null) folders.get(folder).push(`${name} (${size.toLocaleString("en-US")})`);
    }
    const rows = [...folders].sort(([first], [second]) => number(first) - number(second) || (first < second ? -1 : 1));
    return rows.map(([folder, names]) => [folder, names.join(", ") || "empty", describe(folder, kill.step)]);
  }

  // Return the step of a directory, so that the oldest checkpoint comes first; other files come last.
  function number(folder) { return Number(/(\d+)$/.exec(folder)?.[1] ?? Infinity); }

  function describe(folder, step) {
    if (folder === "checkpoints") return "the name of the newest checkpoint, for people";
    if (folder.startsWith(".tmp-old-")) return "an old checkpoint that is being deleted";
    if (folder.startsWith(".tmp-")) return "not complete: a resume ignores it";
    return number(folder) === step ? make("strong", { class: "opens" }, "complete: this one opens") : "complete";
  }
};
